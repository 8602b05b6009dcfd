"""What the course reports published, beside our runs: the content of `published.yaml`.

A published *curve* is every value that a table gives for a run, of train and test, at all its epochs or steps. The
training regime of a report counts as not reproduced if fewer than half of the points of its curve lie inside our 95 %
prediction intervals of one run (the half rule).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy import stats

from speechformer.report.labels import override
from speechformer.report.statistics import Summary
from speechformer.report.tables import NONE, mean_and_sd, number
from studies.results import (
    OURS,
    VERDICTS,
    Claim,
    Place,
    Results,
    Values,
    best_values,
    predicted,
    read_yaml,
    terms_of,
)

Rows = list[list[str]]
NOISY = ("test_accuracy", "test_accuracy_not_in_train", "test_perplexity_mean")
GROUPS = (
    "conclusions, regime not rejected",
    "conclusions, regime not reproduced",
    "our reformulations of them",
    "our own claims, exploratory",
)


@dataclass(frozen=True)
class Printed:
    """One published value; accuracies are fractions.

    Attributes:
        at: the epoch or step, or None if the report gives none.
        chosen: "last", or "best" on test during the run.
        final: whether it is in the last line of its table.
        curve: whether its table has several lines.
    """

    row: str
    metric: str
    value: float
    at: float | None
    chosen: str
    final: bool
    curve: bool

    def of(self, place: Place) -> Values:
        """Return the same of our runs, by seed."""
        if self.chosen == "best":
            return best_values(place, self.metric)
        return place.values(self.metric, None if self.final else self.at)

    def inside(self, place: Place, reference: Place | None = None) -> bool | None:
        """Return whether the mean of our runs is as near as that of one more run would be; None without one.

        Args:
            reference: whose standard deviation counts; with that of the place, it is its prediction interval.
        """
        own, spread = self.of(place), [*self.of(reference or place).values()]
        if not own or len(spread) < 2:
            return None
        reach = stats.t.ppf(0.975, len(spread) - 1) * Summary(spread).sd * math.sqrt(1 + 1 / len(own))
        return bool(abs(Summary(own.values()).mean - self.value) <= reach)


@functools.cache
def printed() -> list[Printed]:
    """Return every published value."""
    found = []
    for table in read_yaml("published.yaml")["tables"]:
        for line, cells in enumerate(table["rows"], start=1):
            metrics = dict(zip(table["columns"], cells))
            at = next((metrics.pop(axis) for axis in ("epoch", "step") if axis in metrics), None)
            final, several = line == len(table["rows"]), len(table["rows"]) > 1
            for metric, own in metrics.items():
                unit = table.get("unit", 100) if "accuracy" in metric else 1
                found.append(Printed(table["row"], metric, own / unit, at, table["chosen"], final, several))
    return found


def reported(results: Results) -> dict[str, Place]:
    """Return our rows of the reports that have published values, by name, under the protocol of the reports."""
    protocol = read_yaml("published.yaml")["corpus"]["protocol"]
    known = {line.row: results.places.get((line.row, protocol["name"])) for line in printed()}
    return {name: own for name, own in known.items() if own and own.study.protocol == protocol}


def finals(results: Results) -> list[tuple[Printed, bool]]:
    """Return the published final results on test and whether each is inside; the last value where two are printed."""
    counted: dict[tuple[str, str], tuple[Printed, bool]] = {}
    for line in sorted(printed(), key=lambda line: line.chosen):
        place = reported(results).get(line.row)
        is_test = line.final and line.metric.startswith("test") and not line.metric.endswith("mean")
        if place and is_test and (inside := line.inside(place)) is not None:
            counted[line.row, line.metric] = line, inside
    return [*counted.values()]


def curve(row: str, place: Place, reference: Place | None = None) -> Mapping[str, list[bool]]:
    """Return whether the points of a published curve are inside our intervals, of test and of train."""
    found: dict[str, list[bool]] = {"test": [], "train": []}
    for line in printed():
        if line.row == row and line.curve and (inside := line.inside(place, reference)) is not None:
            found[line.metric.partition("_")[0]].append(inside)
    return found


@functools.cache
def curves(results: Results) -> dict[str, Mapping[str, list[bool]]]:
    """Return whether the points of each published curve are inside our intervals, by row."""
    found = {row: curve(row, place) for row, place in reported(results).items()}
    return {row: own for row, own in found.items() if any(own.values())}


def not_reproduced(results: Results) -> list[str]:
    """Return the rows of which fewer than half of the points of the published curve are inside."""
    points = {row: [*own["test"], *own["train"]] for row, own in curves(results).items()}
    return [row for row, inside in points.items() if sum(inside) < len(inside) / 2]


def counts(points: Mapping[str, list[bool]]) -> list[str]:
    """Return how many points are inside, of test and of train."""
    return [f"{sum(inside)} of {len(inside)}" if inside else NONE for inside in points.values()]


def curves_table(results: Results) -> Rows:
    """Return how many points of each published curve are inside our intervals, and the final values."""
    rows = [["published curve", "test, inside", "train, inside", "half rule", "final, published", "ours, 95 % PI"]]
    for row, points in curves(results).items():
        place = reported(results)[row]
        metric = place.study.metric
        ours = Summary(place.values(metric).values())
        regime = "**not reproduced**" if row in not_reproduced(results) else "not rejected"
        final = number(metric, value(row, metric, None, "last"))
        rows.append([row.replace("_", " "), *counts(points), regime, final, predicted(metric, ours)])
    return rows


def finals_table(results: Results) -> Rows:
    """Return each published final result on test, beside our interval."""
    rows = []
    for line, inside in finals(results):
        ours = predicted(line.metric, Summary(line.of(reported(results)[line.row]).values()))
        test = line.metric.removeprefix("test_").removeprefix("perplexity_")
        name = f"{line.row}, {test}{', best of the run' * (line.chosen == 'best')}".replace("_", " ")
        rows.append([name, number(line.metric, line.value), ours, "yes" if inside else "**no**"])
    return [["table and test", "published", "ours, 95 % PI", "inside"], *sorted(rows)]


def search(results: Results, row: str) -> Rows:
    """Return how many points of a published curve each setting of a search for it fits, the best first.

    A mean is compared with the noise of our row at that epoch. A setting is named by what differs from our row.
    """
    study = next((study for study in results.studies if study.study == f"search_{row}"), None)
    rows = []
    for variant in study.variants if study else ():
        ours, place = reported(results)[row], Place(study, variant)  # type: ignore[arg-type]
        points = curve(row, place, ours)
        ends = [Summary(place.values(metric).values()) for metric in ("test_accuracy", "train_accuracy")]
        other = ours.variant.settings
        words = [override(key, own) for key, own in variant.settings.items() if other.get(key, own) != own]
        name = f"`{' '.join(words)}`" if words else "as our row"
        cells = [name, *counts(points), *(mean_and_sd("accuracy", own) for own in ends), str(len(place.runs))]
        rows.append((-sum(map(sum, points.values())), -ends[0].mean, cells))
    header = ["setting", "test, inside", "train, inside", "test, %", "train, %", "seeds"]
    return [header, *(cells for *_, cells in sorted(rows))] if rows else []


def value(row: str, metric: str, at: float | None, chosen: str) -> float:
    """Return a published value, the ratio of two, or the mean over the texts; NaN if no table has it."""
    if " / " in metric:
        over, under = (value(row, name, at, chosen) for name in metric.split(" / "))
        return over / under
    lines = [line for line in printed() if (line.row, line.chosen) == (row, chosen)]
    last = [line for line in lines if line.final and (line.curve or line.at is None)]
    found = {line.metric: line.value for line in (last if at is None else lines) if at in (None, line.at)}
    texts = [own for name, own in found.items() if name.startswith("test_perplexity")]
    mean = sum(texts) / len(texts) if texts and metric == "test_perplexity_mean" else math.nan
    return found.get(metric, mean)


def effect(claim: Claim) -> float | None:
    """Return the effect that a claim has in the published tables; None if they have it not."""
    for chosen in ("last", "best"):
        parts = []
        for line in terms_of(read_yaml("claims.yaml")["claims"].get(claim.name, {"effect": []})):
            is_printed = line["protocol"] == "paper" and not line["baseline"]
            own = value(line["variant"], line["metric"], line["at"], chosen) if is_printed else math.nan
            parts.append(line["times"] * own if line["constant"] is None else line["constant"])
        if parts and not math.isnan(sum(parts)):
            return sum(parts)
    return None


def regime(results: Results, claim: Claim) -> bool:
    """Return whether a claim is about a training regime of a report that we do not reproduce."""
    lines = terms_of(read_yaml("claims.yaml")["claims"].get(claim.name, {"effect": []}))
    return bool({line.get("variant") for line in lines} & {*not_reproduced(results)})


def conclusions(results: Results) -> dict[str, tuple[str, bool]]:
    """Return the verdict on each conclusion, as its author drew it, and whether its regime is not reproduced.

    The key is its first claim. A conclusion of several parts is supported if all are, and contradicted if one is.
    """
    entries, drawn = read_yaml("claims.yaml")["claims"], defaultdict[str, list[Claim]](list)
    for name, claim in results.claims.items():
        entry = entries.get(name, {})
        if claim.is_on_speeches and claim.by != OURS and "reformulates" not in entry:
            drawn[entry.get("conclusion", name)].append(claim)
    return {
        claims[0].name: (
            max((claim.verdict for claim in claims), key=VERDICTS.index),
            all(regime(results, claim) for claim in claims),
        )
        for claims in drawn.values()
    }


def verdicts(results: Results) -> Rows:
    """Return how many conclusions have each verdict: of the reports as drawn, our reformulations, and our own."""
    entries = read_yaml("claims.yaml")["claims"]
    found = {name: Counter[str]() for name in GROUPS}
    for verdict, missing in conclusions(results).values():
        found[GROUPS[missing]][verdict] += 1
    for name, claim in results.claims.items():
        if claim.is_on_speeches and (claim.by == OURS or "reformulates" in entries.get(name, {})):
            found[GROUPS[3 if claim.by == OURS else 2]][claim.verdict] += 1
    return [["", *VERDICTS], *([name, *(str(own[word]) for word in VERDICTS)] for name, own in found.items())]


def noise(results: Results, metric: str) -> float:
    """Return what two single runs of one setting differ by at most in 95 of 100 cases.

    Pooled over the rows of the reports of which no run collapsed.
    """
    known = [place.values(metric).values() for place in reported(results).values() if not place.collapsed]
    own = [Summary(values) for values in known if len(values) > 1]
    freedom = sum(summary.n - 1 for summary in own)
    squares = sum((summary.n - 1) * summary.sd**2 for summary in own)
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(2 * squares / freedom) if freedom else math.nan


def collapses(results: Results) -> str:
    """Return which rows of the reports have runs that collapsed, how many, and where these ended."""
    texts = []
    for name, place in reported(results).items():
        if place.collapsed:
            lost, rest = (Summary(own.values()) for own in (place.collapsed, place.values(place.study.metric)))
            ends = " to ".join(number(place.study.metric, end) for end in lost.extremes)
            others = mean_and_sd(place.study.metric, rest)
            texts.append(
                f"{lost.n} of {lost.n + rest.n} runs of `{name}`, which end at {ends} % on test (others: {others})"
            )
    return "; ".join(texts) or "none"


def facts(results: Results) -> dict[str, Any]:
    """Return how far published results agree with ours, and how much single runs vary.

    `finals` of `finals_of` published final results on test are inside our prediction intervals; of those for which an
    assumption of ours was `chosen` by looking at published results, and of all `points` of curves. `readable` of
    `readable_of` published effects are beyond the noise of single runs.
    """
    rows = {name for entry in read_yaml("claims.yaml")["chosen"] for name in entry["rows"]}
    claims = [claim for claim in results.claims.values() if claim.noise > 0]
    inside = {
        "finals": [own for _, own in finals(results)],
        "chosen": [own for line, own in finals(results) if line.row in rows],
        "points": [own for points in curves(results).values() for part in points.values() for own in part],
        "readable": [abs(found) > claim.noise for claim in claims if (found := effect(claim)) is not None],
    }
    return {
        **{name: sum(own) for name, own in inside.items()},
        **{f"{name}_of": len(own) for name, own in inside.items()},
        **{f"noise_{metric}": number(metric, noise(results, metric)) for metric in NOISY},
        "collapsed": collapses(results),
        "threshold": number("accuracy", read_yaml("claims.yaml")["collapsed"]["below"]),
        "missing": not_reproduced(results),
    }


TABLES: dict[str, Callable[..., Rows]] = {
    "curves": curves_table,
    "finals": finals_table,
    "verdicts": verdicts,
    "search": search,
}
