"""What the paper measures: variants by name, values of them, and the claims of `claims.yaml`, judged.

A claim is about an effect, a contrast of means over seeds. It is *supported* or *contradicted* if the effect is
significant at 5 % after Holm's correction within its family. Otherwise it is *equivalent* to no effect if two
one-sided tests at 5 % find the effect smaller than the margin of `claims.yaml` (Schuirmann 1987), or else
*inconclusive*. Effects are paired over the seeds that all sides have; sides without two common seeds are
independent (Welch). Runs that collapsed, by the rule of `claims.yaml`, count in no mean and in no claim.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from scipy import stats

from speechformer.report.labels import ABSENT, Variant, content
from speechformer.report.load import Run, Study, build_studies, read_runs
from speechformer.report.statistics import Effect, Summary, contrast, holm
from speechformer.report.tables import estimate, format_interval, mean_and_sd, number
from speechformer.runs.folder import read_json
from speechformer.runs.identity import LATER
from studies.sentences import over_seeds_and_items, predictions, right_answers

HERE = Path(__file__).parent
VERDICTS = ("supported", "equivalent", "inconclusive", "contradicted")
ON_SPEECHES = ("classify", "lm", "maps", "classify_beyond", "lm_beyond")  # families of claims
OURS = "this repository"  # says the claims that are not of others
SUBSETS = {"test_accuracy": None, "test_accuracy_in_train": True, "test_accuracy_not_in_train": False}
MAPS = "maps.json"  # beside the runs of the reports; see maps.py
Values = dict[int | None, float]  # by seed


class PageError(Exception):
    """A page asks for what the results do not have."""


@functools.cache
def read_yaml(name: str) -> dict[str, Any]:
    """Return `claims.yaml` or `published.yaml`, which explain themselves at their tops."""
    return yaml.load((HERE / name).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def values(study: Study, label: str, metric: str, at: float | None = None) -> Values:
    """Return a metric of a variant by seed, or the ratio of two (`a / b`): at the end, or at an epoch or step."""
    if " / " in metric:
        over, under = (values(study, label, name, at) for name in metric.split(" / "))
        return {seed: over[seed] / under[seed] for seed in over if under.get(seed)}
    if at is None:
        return study.values(label, metric)
    if metric not in study.curves:
        return {}
    points = study.curves[(study.curves["variant"] == label) & ((study.curves["x"] - at).abs() < 1e-6)]
    points = points.dropna(subset=[metric])
    return {int(seed): float(value) for seed, value in zip(points["seed"], points[metric])}


def mixed(study: Study, label: str, metric: str) -> Values:
    """Return a metric by seed; of a model that is mixed with counts, that of the mixture."""
    return values(study, label, re.sub("^(test|validation)_", r"\1_mixture_", metric)) or values(study, label, metric)


@dataclass(frozen=True)
class Place:
    """A variant in its study, or (`baseline`) a run that only counts."""

    study: Study
    variant: Variant
    baseline: Run | None = None

    @functools.cached_property
    def collapsed(self) -> Values:
        """Of runs that did not learn, the value of the main metric by seed; a search has runs that learn slowly."""
        if self.study.study.startswith("search_"):
            return {}
        rule, label = read_yaml("claims.yaml")["collapsed"], self.variant.label
        found = {seed for seed, own in self.study.values(label, rule["metric"]).items() if own < rule["below"]}
        return {seed: own for seed, own in self.study.values(label, self.study.metric).items() if seed in found}

    @property
    def runs(self) -> list[Run]:
        """Its finished runs that learned."""
        finished = self.study.finished_runs(self.variant.label)
        return [self.baseline] if self.baseline else [run for run in finished if run.seed not in self.collapsed]

    def values(self, metric: str, at: float | None = None) -> Values:
        """Return a metric by seed."""
        if self.baseline is None:
            found = values(self.study, self.variant.label, metric, at)
            return {seed: value for seed, value in found.items() if seed not in self.collapsed}
        value = self.baseline.metrics.get(metric)
        return {} if value is None else {None: value}


@dataclass(frozen=True)
class Claim:
    """A claim with its measured effect.

    Attributes:
        metric: of the first term of the effect.
        known: of perplexities, the same effect over known words; None without one.
        p: corrected over its family (Holm).
        reference: the sum of what the effect subtracts, to which it is relative.
        noise: without an effect, 95 of 100 pairs of single runs differ by less.
        margin: of an effect that is too small to matter.
        lowest: the lowest mean in the effect.
    """

    name: str
    family: str
    by: str
    says: str
    sign: int
    over_sentences: bool
    metric: str
    estimated: Effect
    known: Effect | None = None
    p: float = math.nan
    reference: float = math.nan
    noise: float = math.nan
    margin: float = math.nan
    lowest: float = math.nan

    @property
    def is_on_speeches(self) -> bool:
        """Whether it is about the reports' corpus."""
        return self.family in ON_SPEECHES

    @property
    def equivalence(self) -> float:
        """The p-value of two one-sided t-tests that the effect is not smaller than the margin."""
        distance = self.margin - abs(self.estimated.mean)
        return float(stats.t.sf(distance / self.estimated.error, self.estimated.freedom))

    @property
    def is_at_ceiling(self) -> bool:
        """Whether all accuracies are so near 100 % that they cannot differ by the margin."""
        return "accuracy" in self.metric and self.lowest > 1 - self.margin

    @property
    def is_small(self) -> bool:
        """Whether the effect is smaller than the margin."""
        return self.equivalence < 0.05

    @property
    def relative(self) -> str:
        """The effect as a share of what it subtracts; of accuracies, which are per cent already, nothing."""
        share = self.estimated.mean / self.reference if self.reference and "accuracy" not in self.metric else math.nan
        return "" if math.isnan(share) else f"{100 * share:+.1f} %".replace("-", "−")

    @property
    def verdict(self) -> str:
        """Whether the effect is as claimed."""
        if self.p < 0.05:
            return "supported" if self.estimated.mean * self.sign > 0 else "contradicted"
        return "equivalent" if self.is_small and not self.is_at_ceiling else "inconclusive"

    @property
    def effect(self) -> str:
        """The effect with its 95 % confidence interval."""
        return estimate(self.metric, self.estimated)


class Results:
    """All results of the paper.

    Attributes:
        runs: those of the reports, the first folder.
        claims: those whose runs are all there, by name.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.runs, self.studies = list[Run](), list[Study]()
        for folder in folders:
            runs, _ = read_runs([folder])
            studies, _ = build_studies(runs)
            add_maps(studies, read_json(folder / MAPS) or {})
            self.runs = self.runs or runs
            self.studies += studies
        self.places = dict(self.find_variants())
        for study in self.studies:
            add_balanced_accuracy(study)
        self.claims = {claim.name: claim for claim in self.judge()}

    def find_variants(self) -> Iterable[tuple[tuple[str, str], Place]]:
        """Yield the named variants by name and protocol; the first of several counts."""
        found = set()
        usual = sorted(self.studies, key=lambda study: bool(study.protocol["fold"]))  # before those of other folds
        for study in usual:
            for variant in study.variants:
                for name in names_of(study, variant):
                    if (key := (name, study.protocol["name"])) not in found:
                        found.add(key)
                        yield key, Place(study, variant)

    def place(self, variant: str, protocol: str | None = None, baseline: str | None = None) -> Place:
        """Return a variant by name, or a baseline beside it.

        Args:
            protocol: "paper" or "clean"; by default the only one of the two that it has, or else "paper".

        Raises:
            PageError: it has no finished run.
        """
        known = [name for name in ("paper", "clean") if (variant, name) in self.places]
        protocol = protocol or next(iter(known), "paper")
        place = self.places.get((variant, protocol))
        if place is None or not place.runs:
            raise PageError(f"there is no finished run of the variant {variant} under protocol={protocol}.")
        if baseline is None:
            return place
        for run in place.study.counted:
            if run.baseline == baseline:
                return Place(place.study, place.variant, run)
        raise PageError(f"there is no baseline {baseline} beside the variant {variant}.")

    def value(
        self,
        variant: str,
        metric: str | None = None,
        at: float | None = None,
        *,
        protocol: str | None = None,
        baseline: str | None = None,
        less: str | None = None,
        show: str = "mean ± sd",
    ) -> str:
        """Return a value of a variant as text; one of the two words of a page.

        Args:
            metric: as in `result.json`, the ratio of two (`a / b`), or "counts.NAME" of the corpus, also as a ratio;
                by default the main metric of the study.
            at: an epoch or step instead of the end.
            baseline: the value of a baseline beside the variant.
            less: another variant; the difference with its 95 % confidence interval is shown.
            show: "mean", "mean ± sd", "prediction" (95 % interval of one more run), "best prediction" (of the best
                value of each run), "seeds" or "integer".

        Raises:
            PageError: there is no such value.
        """
        place = self.place(variant, protocol, baseline)
        if show == "seeds":
            return str(len(place.runs))
        name = metric or place.study.metric
        if name.startswith("counts."):
            over, _, under = name.removeprefix("counts.").partition(" / ")
            count = place.study.counts[over]
            return f"{count / place.study.counts[under]:,.0f}" if under else f"{count:,}"
        own = best_values(place, name) if show.startswith("best") else place.values(name, at)
        if not own:
            raise PageError(f"the variant {variant} has no {name}" + (f" at {at:g}." if at is not None else "."))
        if less is not None:
            effect = contrast([(1, own), (-1, self.place(less, protocol).values(name, at))])
            if effect is None:
                raise PageError(f"{variant} and {less} have no common {name}.")
            return estimate(name, effect)
        summary = Summary(own.values())
        if show.endswith("prediction"):
            return predicted(name, summary)
        if show == "integer":
            return f"{summary.mean:,.0f}"
        return number(name, summary.mean) if show == "mean" else mean_and_sd(name, summary)

    def claim(self, name: str) -> Claim:
        """Return a judged claim; the other of the two words of a page.

        Raises:
            PageError: it has not been measured.
        """
        if name not in self.claims:
            raise PageError(f"the claim {name} does not exist or has not been measured.")
        return self.claims[name]

    def judge(self) -> list[Claim]:
        """Return the claims whose runs are all there, in the order of the file."""
        content = read_yaml("claims.yaml")
        measured = [self.measure(name, entry) for name, entry in content["claims"].items()]
        return [
            replace(claim, p=p)
            for family in content["families"]
            for claims in [[claim for claim in measured if claim and claim.family == family]]
            for claim, p in zip(claims, holm([claim.estimated.p for claim in claims]))
        ]

    def measure(self, name: str, entry: Mapping[str, Any]) -> Claim | None:
        """Return a claim with its effect, uncorrected; None if a variant has no runs or not this metric."""
        terms, constant = list[tuple[float, str, float | None, Place]](), 0.0
        for line in terms_of(entry):
            if line["constant"] is not None:
                constant += line["constant"]
                continue
            try:
                place = self.place(line["variant"], line["protocol"], line["baseline"])
            except PageError:
                return None
            terms.append((line["times"], line["metric"], line["at"], place))
        effect = self.effect(terms, constant)
        if effect is None:
            return None
        both = None
        if entry.get("over") == "sentences" and not math.isnan(effect.p):  # one seed says nothing about others
            both = over_sentences(terms, constant)
            seeds = tuple(len(place.runs) for *_, place in terms if not place.baseline)
            effect = replace(both, n=seeds) if both else effect
        _, metric, _, place = next(term for term in terms if term[3].baseline is None)
        known = [(times, over_known_words(metric), at, place) for times, metric, at, place in terms]
        is_about_words = any(new[1] != old[1] for new, old in zip(known, terms)) and "test_length" not in metric
        known_effect = self.effect(known, constant) if is_about_words else None
        sign = {"more": 1, "less": -1}[entry["expect"]]
        about = (entry["family"], entry["by"], entry["says"], sign, both is not None, metric)
        means = [(times, Summary(place.values(name, at).values()).mean) for times, name, at, place in terms]
        reference = abs(sum(times * mean for times, mean in means if times < 0) + min(constant, 0.0))
        numbers = reference, noise(terms), margin(metric, reference), min(mean for _, mean in means)
        return Claim(name, *about, effect, known_effect, math.nan, *numbers)

    def effect(self, terms: Sequence[tuple[float, str, float | None, Place]], constant: float) -> Effect | None:
        """Return a contrast; baselines are exact, so they count as constants."""
        exact = [(times, place.values(metric)) for times, metric, _, place in terms if place.baseline]
        if not all(own for _, own in exact):
            return None
        constant += sum(times * own[None] for times, own in exact)
        means = [(times, place.values(metric, at)) for times, metric, at, place in terms if not place.baseline]
        return contrast(means, constant)


def terms_of(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the terms of an effect; a key that one leaves out is that of the one before."""
    line: dict[str, Any] = {"protocol": "paper", "at": None}
    for own in entry["effect"]:
        line |= {"times": 1, "baseline": None, "constant": None, **own}
        yield {**line}


def noise(terms: Sequence[tuple[float, str, float | None, Place]]) -> float:
    """Return how far 95 of 100 contrasts of single runs are from their mean; baselines are exact."""
    sums = defaultdict[int, Any](int)  # by variant, whose runs have all its terms
    for times, metric, at, place in terms:
        if not place.baseline:
            sums[id(place.variant)] += times * pd.Series(place.values(metric, at))
    own = [Summary(found) for series in sums.values() if len(found := series.dropna()) > 1]
    freedom = sum(summary.n - 1 for summary in own)
    spread = math.sqrt(sum(summary.sd**2 for summary in own))
    return float(stats.t.ppf(0.975, freedom)) * spread if freedom else math.nan


def margin(metric: str, reference: float) -> float:
    """Return the margin of a metric in `claims.yaml`; without one, NaN."""
    for word, (points, share) in read_yaml("claims.yaml")["margins"].items():
        if word in metric:
            return float(points + share * reference)
    return math.nan


def add_maps(studies: Iterable[Study], maps: Mapping[str, Mapping[str, float]]) -> None:
    """Add what `maps.py` measured in the attention maps of each run, by the name of its folder."""
    for study in studies if maps else ():
        names = study.runs["folder"].map(lambda folder: Path(folder).name)
        study.runs = study.runs.join(pd.DataFrame.from_dict(maps, orient="index"), on=names)


def add_balanced_accuracy(study: Study) -> None:
    """Add the mean over the classes of the accuracy on the held-out part, where the classes differ in frequency."""
    of_classes = [name for name in study.runs if name.startswith("validation_accuracy_of_")]
    if of_classes:
        study.runs["validation_balanced_accuracy"] = study.runs[of_classes].mean(axis="columns")
        for run in study.counted:
            values = [value for name in of_classes if (value := run.metrics.get(name)) is not None]
            run.metrics["validation_balanced_accuracy"] = sum(values) / len(values) if values else None


def names_of(study: Study, variant: Variant) -> Iterable[str]:
    """Yield the names of a variant: on the corpus of the reports, unless the entry says another."""
    published = read_yaml("published.yaml")
    is_theirs = study.sha256 == published["corpus"]["sha256"]
    settings = {**variant.settings, **{f"protocol.{key}": value for key, value in study.protocol.items()}}
    name = published_name(variant.settings)
    if name and is_theirs and published["rows"][name]["study"] == study.study:  # not a search for other settings
        yield name
    for name, entry in read_yaml("claims.yaml")["variants"].items():
        here = entry["corpus"] == study.corpus if "corpus" in entry else is_theirs
        same = all(settings.get(key, LATER.get(key, ABSENT)) == value for key, value in entry["where"].items())
        if here and same and entry["study"] == study.study:
            yield name


def published_name(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the published row with these settings (dotted keys), apart from `free` ones, or None."""
    content_ = read_yaml("published.yaml")
    decisive = {key for key, value in settings.items() if LATER.get(key, ABSENT) != value} - set(content_["free"])
    for name, row in content_["rows"].items():
        where = row["where"]
        if decisive <= where.keys() and all(settings.get(key) == value for key, value in where.items()):
            return name
    return None


def over_known_words(metric: str) -> str:
    """Return the metric that is the same over known words."""
    return re.sub(r"\btest_perplexity", "test_known_perplexity", metric)


def over_sentences(terms: Sequence[tuple[float, str, float | None, Place]], constant: float = 0.0) -> Effect | None:
    """Return a contrast over both seeds and sentences; None if some runs have no predictions."""
    answers = right_by_term(terms)
    return over_seeds_and_items(answers, constant) if answers else None


def right_by_term(terms: Sequence[tuple[float, str, float | None, Place]]) -> list[tuple[float, Any]]:
    """Return coefficient and right answers [runs, sentences] of each term; none if some runs have no predictions."""
    answers: list[tuple[float, Any]] = []
    for times, metric, at, place in terms:
        predicted = [predictions(run) for run in place.runs]
        if at is not None or metric not in SUBSETS or any(own is None for own in predicted):
            return []
        right, subset = right_answers(place.runs), SUBSETS[metric]
        leaked = predicted[0][1]  # type: ignore[index]
        answers.append((times, right if subset is None else right[:, leaked == subset]))
    return answers if len({right.shape[1] for _, right in answers}) == 1 else []


def best_values(place: Place, metric: str) -> Values:
    """Return the best value of a metric during each run by seed; for a mean over tests, the mean of the bests."""
    best = "max" if place.study.higher_is_better else "min"
    names = [metric]
    if metric == "test_perplexity_mean":
        names = [name for name in place.study.columns if name.startswith("test_perplexity_") and name != metric]
    points = place.study.curves[place.study.curves["variant"] == place.variant.label]
    points = points[~points["seed"].isin([*place.collapsed])]
    if not set(names) <= set(points):
        return {}
    bests = points.groupby("seed")[names].agg(best).dropna().mean(axis=1)
    return {int(str(seed)): float(value) for seed, value in bests.items()}


def predicted(metric: str, summary: Summary) -> str:
    """Return the 95 % prediction interval of one more run, without the brackets of confidence intervals."""
    return format_interval(metric, summary.prediction_interval, like=summary.mean).strip("[]").replace(", ", " to ")


def baseline_name(run: Run) -> str:
    """Return the name of a baseline in words."""
    return content()["baselines"].get(run.baseline, run.baseline or "")
