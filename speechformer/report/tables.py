"""The tables of the report, each a DataFrame of texts, and the sentences on what a study found.

Every table says what ± is. All differences of a table form one family for Holm's correction, and page, CSV, LaTeX and
headline show the same p-values.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from speechformer.console import is_fraction
from speechformer.errors import UserError
from speechformer.report.labels import Variant, content
from speechformer.report.load import TUNED, Study
from speechformer.report.statistics import Effect, Interval, Summary, contrast, holm
from speechformer.runs import search
from speechformer.runs.folder import read_json

NONE = "–"
FEW_SEEDS = 5
MOST_TRIALS = 30  # of a search in its table
LATEX_METRICS = 4
OF_LENGTH = {"bleu": "", "chrf": "chrF ", "length_ratio": "ratio ", "exact": "exact % "}  # by the source's length
CAUTIONS = {
    "†": f"fewer than {FEW_SEEDS} seeds",
    "‡": "still improving at the end of training",
    "§": "two groups of seeds far apart, so no prediction interval",
    "¶": "a seed at the level of chance",
}
INTERVAL = "95 % confidence interval"


@dataclass
class Table:
    """A table of the report.

    Attributes:
        name: of its files.
        heading: what stands above it; "" if it belongs to what is above.
        frame: its cells as text, the first column names the row; a line break separates two lines of a cell.
        note: what its numbers are.
        bold: (row, column) of cells that are the best of their column.
        latex: the columns that its LaTeX file has; all if empty.
    """

    name: str
    heading: str
    frame: pd.DataFrame
    note: str = ""
    bold: set[tuple[int, str]] = field(default_factory=set)
    latex: list[str] = field(default_factory=list)


# Numbers as text


def is_better_higher(metric: str) -> bool:
    """Return whether a higher value of a metric is better; of perplexities and losses a lower one is."""
    return not any(word in metric for word in ("perplexity", "loss", "bits_per_byte"))


def heading(metric: str) -> str:
    """Return the name of a metric for the head of a column or an axis."""
    name = content()["metrics"].get(metric)
    return name or re.sub("_perplexity_|_(?=length_)", ", ", metric).replace("_", " ").removesuffix(" perplexity")


def direction(study: Study, metric: str) -> int:
    """Return 1 if a higher value of a metric is better, -1 if a lower one is, 0 if neither is known."""
    if metric == study.metric:
        return 1 if study.higher_is_better else -1
    known = re.search("accuracy|exact|perplexity|bits_per_byte|bleu|chrf", metric) and "interval" not in metric
    return 0 if not known else 1 if is_better_higher(metric) else -1


def with_arrow(study: Study, metric: str) -> str:
    """Return the name of a metric with the direction in which it is better."""
    return heading(metric) + ("", " ↑", " ↓")[direction(study, metric)]


def scale(metric: str) -> float:
    """Return the factor from `result.json` to the report, which shows fractions in per cent."""
    return 100.0 if is_fraction(metric) else 1.0


def number(metric: str, value: float | None, signed: bool = False, like: float | None = None) -> str:
    """Format a value with three significant digits, but at least one decimal; fractions in per cent.

    Args:
        like: the value whose decimals it gets, such as the mean of a standard deviation.
    """
    if value is None or math.isnan(value):
        return NONE
    value, size = value * scale(metric), abs(value if like is None else like) * scale(metric)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:{'+' if signed else ''}.2e}".replace("-", "−")
    decimals = max(1, 2 - math.floor(math.log10(float(f"{size:.2e}")))) if size else 1
    value = round(value, decimals) + 0.0  # no "-0.0"
    return f"{value:{'+' if signed and value else ''}.{decimals}f}".replace("-", "−")


def within_scale(metric: str, interval: Interval) -> Interval:
    """Return an interval of values, limited to the scale of an accuracy or score: Student's t is unbounded."""
    if is_fraction(metric) or re.search("accuracy|bleu|chrf", metric):
        return max(interval[0], 0.0), min(interval[1], 100 / scale(metric))
    return interval


def format_interval(metric: str, interval: Interval, signed: bool = False, like: float | None = None) -> str:
    """Format an interval as [low, high], limited to the scale of an accuracy or score; `like` as in `number`."""
    if math.isnan(interval[0]):
        return NONE
    interval = interval if signed else within_scale(metric, interval)
    like = max(map(abs, interval)) if like is None else like
    return "[{}, {}]".format(*(number(metric, end, signed, like) for end in interval))


def mean_and_sd(metric: str, values: Summary) -> str:
    """Return "mean ± standard deviation" with the decimals of the mean."""
    text = number(metric, values.mean)
    return text + (f" ± {number(metric, values.sd, like=values.mean)}" if values.n > 1 else "")


def precision(effect: Effect) -> float:
    """Return the value that decides the decimals of an effect: three digits of it, at most two of its uncertainty."""
    low, high = effect.interval
    return abs(effect.mean) if math.isnan(low) else max(abs(effect.mean), 5 * (high - low))


def estimate(metric: str, effect: Effect) -> str:
    """Return an effect with its 95 % confidence interval."""
    like = precision(effect)
    return f"{number(metric, effect.mean, True, like)} {format_interval(metric, effect.interval, True, like)}"


def p_value(p: float) -> str:
    """Return a p-value with three decimals."""
    return NONE if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def test_name(effect: Effect) -> str:
    """Return the t-test."""
    return "paired" if effect.paired else "Welch" if len(effect.n) > 1 else "one sample"


def seeds_of(effect: Effect) -> str:
    """Return the number of seeds, or the numbers of independent samples where these differ."""
    return " and ".join(str(n) for n in dict.fromkeys(effect.n))


def ranges(seeds: Iterable[float]) -> str:
    """Return seeds with three or more consecutive ones as a range, "0, 5–19"; what is no number is left out."""
    known = [int(seed) for seed in seeds if pd.notna(seed)]
    texts = []
    for _, group in itertools.groupby(enumerate(known), key=lambda pair: pair[1] - pair[0]):
        run = [seed for _, seed in group]
        texts.append(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)))
    return ", ".join(texts)


# Cautions


def cautions(study: Study, label: str, metric: str) -> str:
    """Return the marks of `CAUTIONS` that a number of a variant needs."""
    summary = study.summary(label, metric)
    if summary is None:
        return ""
    found = {
        "†": summary.n < FEW_SEEDS,
        "‡": metric in (study.metric, study.held_out) and is_unfinished(study, label),
        "§": summary.is_bimodal,
        "¶": metric.startswith("test_accuracy") and is_at_chance(study, metric, summary),
    }
    return "".join(mark for mark, holds in found.items() if holds)


def is_unfinished(study: Study, label: str) -> bool:
    """Return whether the curve of what is held out, or else of the main metric, is best at its end.

    Of several runs, the gain over the last fifth of training must be significant at 5 %, too.
    """
    sign, curve = (1 if study.higher_is_better else -1), study.curve(label, study.held_out or study.metric)
    if len(curve) < 2 or max(curve, key=lambda x: (sign * curve[x].mean, -x)) != max(curve):
        return False
    *earlier, last = curve
    before = max((x for x in earlier if x <= 0.8 * last), default=earlier[0])
    gain = Summary(curve[last].values - curve[before].values)
    return not gain.varies or gain.p < 0.05


def is_at_chance(study: Study, metric: str, summary: Summary) -> bool:
    """Return whether a seed is right no more often than by chance, within two standard errors over the rows."""
    chances, classes = study.runs.get(metric.replace("test_", "chance_")), study.example.corpus.get("classes")
    chance = 1 / len(classes) if classes else math.nan
    chance = chance if chances is None else float(chances.mean())
    rows, leaked = (study.counts.get(name, 0) for name in ("test", "test_in_train"))
    subsets = {"test_accuracy_in_train": leaked, "test_accuracy_not_in_train": rows - leaked}
    rows = subsets.get(metric, rows)
    return rows > 0 and summary.extremes[0] <= chance + 2 * math.sqrt(chance * (1 - chance) / rows)


def legend(marks: str) -> str:
    """Return what marks mean, as a sentence; "" without one."""
    found = [f"{mark} {words}" for mark, words in CAUTIONS.items() if mark in marks]
    return f" {'; '.join(found)}." if found else ""


# Tables of a study


def state(study: Study, variant: Variant) -> str:
    """Return the number of finished runs of a variant, and the seeds of the others."""
    rows = study.runs[study.runs["variant"] == variant.label]
    seeds = dict([*rows.groupby("status")["seed"]])
    finished = len(seeds.pop("finished", ()))
    words = [f"{status}: seed {ranges(others)}" for status, others in seeds.items()]
    words += [f"missing: seed {ranges(variant.missing)}"] if variant.missing else []
    return "; ".join([str(finished), *words])


def results(study: Study) -> Iterator[Table]:
    """Yield the table of mean ± standard deviation of each variant and metric, with the interval of the mean."""
    finished = {variant.label: study.finished(variant.label) for variant in study.variants}
    rows = [*finished.values(), *(frame for _, frame in study.baselines.groupby(level=0))]
    columns = {"": [*finished, *study.baselines["variant"]]}
    columns["runs"] = [*(state(study, variant) for variant in study.variants), *["exact"] * len(study.baselines)]
    bold, marks = set[tuple[int, str]](), ""
    for metric in study.columns:
        means = [runs[metric].mean() if metric in runs else math.nan for runs in rows]
        cells = [number(metric, mean) for mean in means]
        columns[head := with_arrow(study, metric)] = cells
        if (sign := direction(study, metric)) and sum(map(math.isfinite, means)) > 1:
            best = number(metric, sign * np.nanmax(sign * np.array(means)))
            bold |= {(row, head) for row, cell in enumerate(cells) if cell == best}
        for row, (label, runs) in enumerate(finished.items()):
            if summary := study.summary(label, metric):
                marks += (found := cautions(study, label, metric))
                incomplete = f" (of {summary.n})" if summary.n < len(runs) else ""
                cells[row] = f"{mean_and_sd(metric, summary)}{incomplete} {found}".rstrip()
                if summary.n > 1:
                    interval = format_interval(metric, summary.confidence_interval, like=summary.mean)
                    cells[row] += f"\n{interval}"
    for name, functions in {"parameters": ["min", "max"], "seconds": ["mean"]}.items():
        values = (pd.to_numeric(runs[name]).agg(functions).map("{:,.0f}".format).unique() for runs in rows)
        columns[name] = [" to ".join(texts).replace("nan", NONE) for texts in values]
    note = f"Mean ± standard deviation over the runs, and the {INTERVAL} of the mean. ↑ higher is better, ↓ lower."
    shown = [name for name in dict.fromkeys([study.metric, *study.compare, *study.columns]) if name in study.columns]
    latex = ["", "runs", *(with_arrow(study, name) for name in shown[:LATEX_METRICS])]
    yield Table("results", "", pd.DataFrame(columns), note + legend(marks), bold, latex)


def compare(study: Study, metric: str, first: str, second: str) -> Effect | None:
    """Return the difference of the means of two variants; None without a run of one of them."""
    return contrast([(1, study.values(first, metric)), (-1, study.values(second, metric))])


@dataclass(frozen=True)
class Difference:
    """A variant minus the reference; `p` is corrected over all differences of the table (Holm)."""

    label: str
    reference: str
    metric: str
    effect: Effect
    p: float


def differences(study: Study) -> list[Difference]:
    """Return each variant minus the reference, for each metric that is compared."""
    effects = [
        (variant.label, study.reference, metric, effect)
        for metric in study.compare
        if study.has(metric)
        for variant in study.variants
        if variant.label != study.reference and (effect := compare(study, metric, variant.label, study.reference))
    ]
    corrected = holm([effect.p for *_, effect in effects])
    return [Difference(*measured, p) for measured, p in zip(effects, corrected)]


def differences_table(study: Study) -> Iterator[Table]:
    """Yield the differences from the reference, unless there is one variant alone."""
    rows = [
        {
            "": f"{found.label} − {found.reference}",
            "metric": with_arrow(study, found.metric),
            "seeds": seeds_of(found.effect),
            f"difference, {INTERVAL}": estimate(found.metric, found.effect),
            "test": test_name(found.effect),
            "detectable": number(found.metric, found.effect.detectable, like=precision(found.effect)),
            "p, Holm": p_value(found.p),
            "significant at 5 %": NONE if math.isnan(found.p) else "yes" if found.p < 0.05 else "no",
        }
        for found in differences(study)
    ]
    note = f"p-values are after Holm's correction over all differences of this table ({len(rows)})."
    if rows:
        latex = [name for name in rows[0] if name not in ("test", "detectable")]
        yield Table("differences", "Differences", pd.DataFrame(rows), note, latex=latex)


def at_length(study: Study, variant: Variant, length: int) -> Summary | str:
    """Return the mean test perplexity in contexts of `length` tokens, or why there is none."""
    if not len(study.finished(variant.label)):
        return NONE
    trained = length == variant.settings["block_size"]
    if not trained and length not in (variant.settings.get("task.lengths") or []):
        return "not tested"
    metric = "test_perplexity_mean" if trained else f"test_length_{length}_perplexity_mean"
    return study.summary(variant.label, metric) or "cannot run"


def lengths(study: Study) -> Iterator[Table]:
    """Yield the mean test perplexity in contexts of other lengths than in training, if it was measured."""
    rows: dict[str, list[str]] = {"": [variant.label for variant in study.variants]}
    rows["trained on, tokens"] = [str(variant.settings.get("block_size", NONE)) for variant in study.variants]
    for length in study.lengths():
        values = (at_length(study, variant, length) for variant in study.variants)
        texts = [mean_and_sd(study.metric, own) if isinstance(own, Summary) else own for own in values]
        rows[f"tested on {length}"] = texts
    if len(rows) > 2:
        note = "Test perplexity, mean ± standard deviation over the runs; lower is better."
        yield Table("lengths", "Train short, test long", pd.DataFrame(rows), note)


def sources(study: Study) -> Iterator[Table]:
    """Yield the metrics of a translation by the length of the source in words."""
    runs = [(variant.label, study.finished(variant.label)) for variant in study.variants]
    runs += [*study.baselines.groupby("variant", sort=False)]
    rows: dict[str, list[str]] = {"": [label for label, _ in runs]}
    for bucket, count in study.source_lengths().items():
        cells = rows[f"{bucket} words ({count})"] = []
        for _, frame in runs:
            values = {name: frame.get(f"test_{name}_at_{bucket}", pd.Series()).dropna() for name in OF_LENGTH}
            texts = [OF_LENGTH[name] + mean_and_sd(name, Summary(own)) for name, own in values.items() if len(own)]
            cells.append("\n".join(texts) or NONE)
    if len(rows) > 1:
        note = "BLEU and others, mean ± standard deviation over the runs."
        yield Table("sources", "By the length of the source", pd.DataFrame(rows), note)


def commands(study: Study) -> Iterator[Table]:
    """Yield how to repeat each variant: commands, seeds, commits."""
    rows = []
    labels = [*(variant.label for variant in study.variants), *study.baselines["variant"]]
    runs = study.with_baselines.sort_values("variant", key=lambda names: names.map(labels.index), kind="stable")
    for (label, command), group in runs.groupby(["variant", "command"], sort=False):
        commits = group["commit"].fillna("unknown").str.replace("(?<=^.{10}).{30}", "", regex=True)
        rows.append([label, command, ranges(group["seed"]) or NONE, ", ".join(sorted(set(commits)))])
    frame = pd.DataFrame(rows, columns=["", "command", "add seed=", "commit"])
    yield Table("commands", "How to repeat each row", frame)


TABLES = [results, lengths, sources, differences_table, commands]


# What a study found


def headline(study: Study) -> str:
    """Return a sentence on the best variant: its result, the next best, and the best baseline; "" without a run.

    The best one is that on the held-out part, if there is one. It is compared with its best rival alone. If one of
    them is the reference, the p-value is that of the table of differences.
    """
    metric, sign, chosen_by = study.metric, (1 if study.higher_is_better else -1), study.held_out or study.metric
    means = {v.label: summary.mean for v in study.variants if (summary := study.summary(v.label, chosen_by))}
    ranked = [v.label for v in study.variants if study.values(v.label, metric)]
    ranked.sort(key=lambda label: -sign * means.get(label, -sign * math.inf))
    if not ranked:
        return ""
    label = ranked[0]
    summary = Summary(study.values(label, metric).values())
    spread = f"mean ± standard deviation over {summary.n} seeds" if summary.n > 1 else "one run"
    best = f"is best{' on the held-out part' * (chosen_by != metric)}:" if len(ranked) > 1 else "has"
    about = f"{heading(metric)}; {spread}; {'higher' if sign > 0 else 'lower'} is better"
    marks = cautions(study, label, metric)
    caution = f", with caution: {', '.join(CAUTIONS[mark] for mark in marks)}" if marks else ""
    parts = [f"{label} {best} {mean_and_sd(metric, summary)} ({about}){caution}"]
    if len(ranked) > 1 and (effect := compare(study, metric, label, ranked[1])):
        tested = {frozenset((d.label, d.reference)): d.p for d in differences(study) if d.metric == metric}
        p = tested.get(frozenset((label, ranked[1])), effect.p)
        verdict = f"p = {p_value(p)}, {'significant' if p < 0.05 else 'not significant'}".replace("= <", "<")
        if math.isnan(p):
            verdict = "too few seeds to compare" if min(effect.n) < 2 else "the values do not vary"
        difference = estimate(metric, effect).removesuffix(f" {NONE}")
        parts.append(f"next is {ranked[1]}, difference {difference}: {verdict}")
    if metric in study.baselines and not (known := study.baselines.dropna(subset=[metric])).empty:
        counted = known.sort_values(metric).iloc[-1 if sign > 0 else 0]
        less = contrast([(1, study.values(label, metric))], constant=-counted[metric])
        assert less is not None
        text = estimate(metric, less).removesuffix(f" {NONE}") + " over seeds alone" * (summary.n > 1)
        parts.append(f"less {counted['variant']} ({number(metric, counted[metric])}): {text}")
    return "; ".join(parts) + "."


# Searches and tuned sweeps


def found_below(folders: Sequence[Path], name: str) -> list[Path]:
    """Return the files of this name below some folders."""
    return sorted(Path(place) / name for top in folders for place, _, files in os.walk(top) if name in files)


def searches(folders: Sequence[Path]) -> Iterator[tuple[Table, Any]]:
    """Yield the complete trials of each search below some folders, the best first, and its study of optuna.

    Test metrics stand in the tables of the runs alone: to rank trials by them would be to choose by them.
    """
    for file in found_below(folders, search.JOURNAL):
        try:
            storage = search.journal(file.parent)
            study = search.import_optuna().load_study(study_name=search.STUDY, storage=storage)
        except (UserError, KeyError, OSError):  # optuna is not installed, or the search has not begun
            continue
        trials = study.trials_dataframe(attrs=("value", "params", "duration", "state"))
        if "COMPLETE" not in (counts := trials.get("state", pd.Series(dtype=str)).value_counts(sort=False)):
            continue
        shown = trials[trials["state"] == "COMPLETE"].drop(columns="state")
        shown = shown.sort_values("value", ascending=study.direction.name == "MINIMIZE").head(MOST_TRIALS)
        shown["duration"] = shown["duration"].dt.total_seconds().round()
        shown = shown.rename(columns={"value": "score", "duration": "seconds"})
        frame = shown.map(lambda value: f"{value:.4g}" if isinstance(value, float) else str(value))
        frame.insert(0, "rank", [str(rank) for rank in range(1, len(frame) + 1)])
        frame = frame.rename(columns=lambda name: name.removeprefix("params_")).reset_index(drop=True)
        states = ", ".join(f"{count} {name.lower()}" for name, count in counts.items())
        note = f"{len(trials)} trials: {states}. Scores on held-out data."
        yield Table("search", f"Search {file.parent.name}", frame, note), study


def tuned(folders: Sequence[Path]) -> Iterator[Table]:
    """Yield how each sweep with `hydra/sweeper=tuned` below some folders was tuned: grid, scores, choices."""
    for file in found_below(folders, TUNED):
        tuning = read_json(file) or {}
        points, rows = [" ".join(point) for point in tuning["points"]], tuning["rows"]
        scores = [[NONE if score is None else f"{score:.4g}" for score in row["scores"]] for row in rows]
        frame = pd.DataFrame(scores, columns=points)
        frame.insert(0, "", [row["row"] for row in rows])
        choices = [" ".join(row["choice"] or ()) for row in rows]
        bold = {(place, choice) for place, choice in enumerate(choices) if choice in points}
        runs, seeds = len(points) * len(tuning["tuning_seeds"]), ", ".join(map(str, tuning["tuning_seeds"]))
        note = f"Each row had the same {runs} runs on seeds {seeds}. The best mean score on held-out data, in bold, "
        note += "is its choice."
        yield Table("tuning", f"Tuning of {file.parent.name}", frame, note, bold)
