"""The tables of the report, each a DataFrame of texts, and the sentences on what a study found.

Every table says what ± is. All differences of a table form one family for Holm's correction, and page, CSV, LaTeX and
headline show the same p-values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from speechformer.console import is_fraction
from speechformer.errors import UserError
from speechformer.report.labels import content
from speechformer.report.load import FAILED, TUNED, Study, right_answers
from speechformer.report.statistics import Effect, Interval, Summary, contrast, holm, over_seeds_and_items
from speechformer.runs import folder as folders_of_runs
from speechformer.runs import search

NONE = "–"
FEW_SEEDS = 5
MOST_TRIALS = 30  # of a search in its table
LATEX_COLUMNS = 6
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
    """Return the name of a metric for the head of a column."""
    name = content()["metrics"].get(metric)
    return name or metric.replace("_perplexity_", ", ").replace("_", ", ").removesuffix(", perplexity")


def direction(study: Study, metric: str) -> int:
    """Return 1 if a higher value of a metric is better, -1 if a lower one is, 0 if neither is known."""
    if metric == study.metric:
        return 1 if study.higher_is_better else -1
    known = ("accuracy", "exact", "perplexity", "bits_per_byte", "bleu", "chrf")
    if "interval" in metric or not any(word in metric for word in known):
        return 0
    return 1 if is_better_higher(metric) else -1


def with_arrow(study: Study, metric: str) -> str:
    """Return the name of a metric with the direction in which it is better."""
    return heading(metric) + {1: " ↑", -1: " ↓", 0: ""}[direction(study, metric)]


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
    text = f"{value:+.{decimals}f}" if signed and value else f"{value:.{decimals}f}"
    return text.replace("-", "−")


def format_interval(metric: str, interval: Interval, signed: bool = False, like: float | None = None) -> str:
    """Format an interval as [low, high], limited to the scale of an accuracy or score; `like` as in `number`."""
    if math.isnan(interval[0]):
        return NONE
    if not signed and (is_fraction(metric) or any(word in metric for word in ("accuracy", "bleu", "chrf"))):
        most = 100 / scale(metric)  # Student's t is unbounded
        interval = (max(interval[0], 0.0), min(interval[1], most))
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
    """Return the t-test, with the correlation of the two sides over common seeds."""
    correlation = "" if math.isnan(effect.correlation) else f" (r = {effect.correlation:.2f})".replace("-", "−")
    return ("paired" if effect.paired else "Welch" if len(effect.n) > 1 else "one sample") + correlation


def seeds_of(effect: Effect) -> str:
    """Return the number of seeds, or the numbers of independent samples where these differ."""
    return " and ".join(str(n) for n in dict.fromkeys(effect.n))


def ranges(seeds: Sequence[int | None]) -> str:
    """Return seeds with three or more consecutive ones as a range, "0, 5–19"."""
    parts: list[list[int | None]] = []
    for seed in seeds:
        if parts and seed is not None and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


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
    curve = study.curve(label, study.held_out or study.metric)
    if len(curve) < 2:
        return False
    sign = 1 if study.higher_is_better else -1
    *earlier, last = curve
    if sign * curve[last].mean <= max(sign * curve[x].mean for x in earlier):
        return False
    before = max((x for x in earlier if x <= 0.8 * last), default=earlier[0])
    gain = Summary(curve[last].values - curve[before].values)
    return not gain.varies or gain.p < 0.05


def is_at_chance(study: Study, metric: str, summary: Summary) -> bool:
    """Return whether a seed is right no more often than by chance, within two standard errors over the rows."""
    chances = study.runs.get(metric.replace("test_", "chance_"))
    classes = study.example.corpus.get("classes", [])
    chance = float(chances.mean()) if chances is not None else 1 / len(classes) if classes else math.nan
    rows, leaked = (study.counts.get(name, 0) for name in ("test", "test_in_train"))
    rows = leaked if metric.endswith("_in_train") else rows
    rows = study.counts.get("test", 0) - leaked if metric.endswith("_not_in_train") else rows
    return bool(rows) and summary.extremes[0] <= chance + 2 * math.sqrt(chance * (1 - chance) / rows)


def legend(marks: str) -> str:
    """Return what marks mean."""
    return "; ".join(f"{mark} {words}" for mark, words in CAUTIONS.items() if mark in marks)


# Tables of a study


def state(study: Study, label: str) -> str:
    """Return the number of finished runs of a variant, and the seeds of the others."""
    rows = study.runs[study.runs["variant"] == label]
    others: dict[str, list[Any]] = {
        word: rows.loc[rows["status"] == word, "seed"].tolist() for word in ("diverged", *FAILED)
    }
    others["missing"] = next(variant.missing for variant in study.variants if variant.label == label)
    words = [f"{word}: seed {ranges(seeds)}" for word, seeds in others.items() if seeds]
    return "; ".join([str((rows["status"] == "finished").sum()), *words])


def results(study: Study) -> Iterator[Table]:
    """Yield the table of mean ± standard deviation of each variant and metric, with the interval of the mean."""
    summaries = {(v.label, name): study.summary(v.label, name) for v in study.variants for name in study.columns}
    rows, marks = [], ""
    heads = {name: with_arrow(study, name) for name in study.columns}
    shared = [head for head in heads.values() if [*heads.values(), "runs", "parameters", "seconds"].count(head) > 1]
    heads = {name: f"{head} ({name})" if head in shared else head for name, head in heads.items()}
    for variant in study.variants:
        label, cells = variant.label, []
        finished = study.finished(label)
        for name in study.columns:
            if (summary := summaries[label, name]) is None:
                cells.append(NONE)
                continue
            own = cautions(study, label, name)
            marks += own
            incomplete = f" (of {summary.n})" if summary.n < len(finished) else ""
            interval = format_interval(name, summary.confidence_interval, like=summary.mean)
            cells.append(
                f"{mean_and_sd(name, summary)}{incomplete} {own}".rstrip()
                + (f"\n{interval}" if summary.n > 1 else "")
            )
        sizes = sorted({int(n) for n in finished["parameters"].dropna()})
        parameters = (" to " if len(sizes) > 2 else " or ").join(
            f"{n:,}" for n in dict.fromkeys(sizes[:1] + sizes[-1:])
        )
        seconds = finished["seconds"].mean()
        rows.append(
            [label, state(study, label), *cells, parameters or NONE, NONE if pd.isna(seconds) else f"{seconds:.0f}"]
        )
    for _, run in study.baselines.iterrows():
        values = (number(name, run.get(name)) for name in study.columns)
        rows.append([run["variant"], "exact", *values, f"{run['parameters']:,.0f}", NONE])
    frame = pd.DataFrame(rows, columns=["", "runs", *heads.values(), "parameters", "seconds"])
    bold = {(place, heads[name]) for name in study.columns for place in best(study, name)}
    note = f"Mean ± standard deviation over the runs, and the {INTERVAL} of the mean. ↑ higher is better, ↓ lower."
    shown = study.columns if study.selected else dict.fromkeys([study.metric, *study.compare, *study.columns])
    order = ["", "runs", *[heads[name] for name in shown if name in heads][: LATEX_COLUMNS - 2]]
    yield Table("results", "", frame, " ".join([note, f"{legend(marks)}." if marks else ""]).strip(), bold, order)


def best(study: Study, metric: str) -> set[int]:
    """Return the places of the rows, baselines included, whose value is the best one as it is shown."""
    means = [own.mean if (own := study.summary(v.label, metric)) else math.nan for v in study.variants]
    means += [] if metric not in study.baselines else [float(value) for value in study.baselines[metric]]
    sign, known = direction(study, metric), [mean for mean in means if not math.isnan(mean)]
    if not sign or len(known) < 2:
        return set()
    shown = number(metric, max(known, key=lambda mean: sign * mean))
    return {place for place, mean in enumerate(means) if number(metric, mean) == shown}


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
        (variant.label, metric, effect)
        for metric in study.compare
        if study.has(metric)
        for variant in study.variants
        if variant.label != study.reference and (effect := compare(study, metric, variant.label, study.reference))
    ]
    corrected = holm([effect.p for *_, effect in effects])
    return [
        Difference(label, study.reference, metric, effect, p)
        for (label, metric, effect), p in zip(effects, corrected)
    ]


def compare(study: Study, metric: str, first: str, second: str) -> Effect | None:
    """Return the difference of the means of two variants; None without a run of one of them."""
    return contrast([(1, study.values(first, metric)), (-1, study.values(second, metric))])


def differences_table(study: Study) -> Iterator[Table]:
    """Yield the differences from the reference, unless there is one variant alone."""
    rows = []
    for difference in differences(study):
        effect, metric = difference.effect, difference.metric
        significant = NONE if math.isnan(difference.p) else "yes" if difference.p < 0.05 else "no"
        what = f"{difference.label} − {difference.reference}"
        shown = [what, with_arrow(study, metric), seeds_of(effect), estimate(metric, effect), test_name(effect)]
        detectable = number(metric, effect.detectable, like=precision(effect))
        rows.append([*shown, detectable, p_value(difference.p), significant])
    columns = [
        "",
        "metric",
        "seeds",
        f"difference, {INTERVAL}",
        "test",
        "detectable",
        "p, Holm",
        "significant at 5 %",
    ]
    frame = pd.DataFrame(rows, columns=columns)
    note = f"p-values are after Holm's correction over all differences of this table ({len(rows)})."
    latex = [name for name in columns if name not in ("test", "detectable")]
    if rows:
        yield Table("differences", "Differences", frame, note, latex=latex)


def at_length(study: Study, settings: Mapping[str, Any], label: str, length: int) -> Summary | str:
    """Return the mean test perplexity in contexts of `length` tokens, or why there is none."""
    if label not in [variant.label for variant in study.settled()]:
        return NONE
    trained, requested = settings["block_size"], settings.get("task.lengths") or []
    metric = "test_perplexity_mean" if length == trained else f"test_length_{length}_perplexity_mean"
    if length != trained and length not in requested:
        return "not tested"
    return study.summary(label, metric) or ("cannot run" if len(study.finished(label)) else NONE)


def lengths(study: Study) -> Iterator[Table]:
    """Yield the mean test perplexity in contexts of other lengths than in training, if it was measured."""
    rows = []
    for variant in study.variants if study.lengths() else []:
        values = [at_length(study, variant.settings, variant.label, length) for length in study.lengths()]
        cells = [mean_and_sd(study.metric, value) if isinstance(value, Summary) else value for value in values]
        rows.append([variant.label, str(variant.settings.get("block_size", NONE)), *cells])
    columns = ["", "trained on, tokens", *(f"tested on {length}" for length in study.lengths())]
    if rows:
        note = "Test perplexity, mean ± standard deviation over the runs; lower is better."
        yield Table("lengths", "Train short, test long", pd.DataFrame(rows, columns=columns), note)


def sources(study: Study) -> Iterator[Table]:
    """Yield the metrics of a translation by the length of the source in words."""
    buckets = study.source_lengths()

    def cell(frame: pd.DataFrame, bucket: str) -> str:
        texts = []
        for name, prefix in OF_LENGTH.items():
            values = frame.get(f"test_{name}_at_{bucket}")
            if values is not None and values.notna().any():
                texts.append(prefix + mean_and_sd(name, Summary(values.dropna())))
        return "\n".join(texts or [NONE])

    frames = [(variant.label, study.finished(variant.label)) for variant in study.variants]
    frames += [(name, frame) for name, frame in study.baselines.groupby("variant", sort=False)]
    rows = [[label, *(cell(frame, bucket) for bucket in buckets)] for label, frame in frames]
    columns = ["", *(f"{bucket} words ({count})" for bucket, count in buckets.items())]
    if buckets:
        note = "BLEU and others, mean ± standard deviation over the runs."
        yield Table("sources", "By the length of the source", pd.DataFrame(rows, columns=columns), note)


def commands(study: Study) -> Iterator[Table]:
    """Yield how to repeat each variant: commands, seeds, commits."""
    rows = []
    runs = pd.concat([study.runs, study.baselines]) if len(study.baselines) else study.runs
    order = [variant.label for variant in study.variants] + study.baselines["variant"].tolist()
    groups = dict(list(runs.groupby("variant", sort=False)))
    for label in order:
        commands_of = groups[label]["command"].str.replace(r" seed=\d+$", "", regex=True)
        for command, group in groups[label].groupby(commands_of, sort=False):
            commits = {(name or "unknown")[:10] + (name or "")[40:] for name in group["commit"]}
            seeds = ranges([int(seed) for seed in group["seed"].dropna()]) or NONE
            rows.append([label, command, seeds, ", ".join(sorted(commits))])
    frame = pd.DataFrame(rows, columns=["", "command", "add seed=", "commit"])
    yield Table("commands", "How to repeat each row", frame)


TABLES = [results, lengths, sources, differences_table, commands]


# What a study found


def headline(study: Study) -> str:
    """Return a sentence on the best variant: its result, the next best, and the best baseline; "" without a run.

    The best one is that on the held-out part, if there is one. It is compared with its best rival alone. If one of
    them is the reference, the p-value is that of the table of differences.
    """
    metric = study.metric
    ranked = [v.label for v in study.variants if metric and study.values(v.label, metric)]
    sign, chosen_by = (1 if study.higher_is_better else -1), study.held_out or metric
    scores = {label: own.mean for label in ranked if (own := study.summary(label, chosen_by)) is not None}
    ranked.sort(key=lambda label: -sign * scores.get(label, -sign * math.inf))
    if not ranked:
        return ""
    label, summary = ranked[0], study.summary(ranked[0], metric)
    assert summary
    direction = "higher" if study.higher_is_better else "lower"
    spread = f"mean ± standard deviation over {summary.n} seeds" if summary.n > 1 else "one run"
    best = f"is best{' on the held-out part' * (chosen_by != metric)}:" if len(ranked) > 1 else "has"
    about = f"({heading(metric)}; {spread}; {direction} is better)"
    marks = cautions(study, label, metric)
    parts = [f"{label} {best} {mean_and_sd(metric, summary)} {about}"]
    parts[0] += f", with caution: {', '.join(CAUTIONS[mark] for mark in marks)}" if marks else ""
    if len(ranked) > 1 and (effect := compare(study, metric, label, ranked[1])):
        pairs = {frozenset((d.label, d.reference)): d.p for d in differences(study) if d.metric == metric}
        p = pairs.get(frozenset((label, ranked[1])), effect.p)
        verdict = f"p = {p_value(p)}, {'significant' if p < 0.05 else 'not significant'}".replace("= <", "<")
        if math.isnan(p):
            verdict = "too few seeds to compare" if min(effect.n) < 2 else "the values do not vary"
            parts.append(f"next is {ranked[1]}, difference {number(metric, effect.mean, True)}: {verdict}")
        else:
            parts.append(f"next is {ranked[1]}, difference {estimate(metric, effect)}: {verdict}")
    parts += beside_baseline(study, label)
    return "; ".join(parts) + "."


def beside_baseline(study: Study, label: str) -> Iterator[str]:
    """Yield what a variant has more than the best baseline, if there is one, with its interval.

    The interval is over sentences too, where all predictions are kept.
    """
    sign, metric = (1 if study.higher_is_better else -1), study.metric
    measured = [run for run in study.counted if run.metrics.get(metric) is not None]
    if not measured:
        return
    best_run = max(measured, key=lambda run: sign * (run.metrics[metric] or 0))
    value = float(best_run.metrics[metric] or 0)
    name = content()["baselines"].get(best_run.baseline, best_run.baseline)
    effect = contrast([(1, study.values(label, metric))], constant=-value)
    runs = study.finished_runs(label)
    if metric == "test_accuracy" and len(runs) > 1 and all(run.predictions() for run in [*runs, best_run]):
        effect = over_seeds_and_items([(1, right_answers(runs)), (-1, right_answers([best_run]))])
    if effect is not None:
        yield f"less {name} ({number(metric, value)}): {estimate(metric, effect)}".removesuffix(f" {NONE}")


# Searches and tuned sweeps


def search_table(folder: Path, study: Any) -> Table | None:
    """Return the complete trials of a search, the best first; None without one.

    Test metrics stand in the tables of the runs alone: to rank trials by them would be to choose by them.
    """
    states = [trial.state.name.lower() for trial in study.trials]
    if "complete" not in states:
        return None
    trials = study.trials_dataframe(attrs=("value", "params", "duration", "state"))
    trials = trials[trials["state"] == "COMPLETE"].drop(columns="state")
    trials = trials.sort_values("value", ascending=study.direction.name == "MINIMIZE").head(MOST_TRIALS)
    trials["duration"] = trials["duration"].dt.total_seconds().round()
    texts = trials.map(lambda value: f"{value:.4g}" if isinstance(value, float) else str(value))
    texts.insert(0, "rank", [str(rank) for rank in range(1, len(texts) + 1)])
    names = {"value": "score", "duration": "seconds"}
    frame = texts.rename(columns=lambda name: names.get(name, name.removeprefix("params_"))).reset_index(drop=True)
    counts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
    return Table(
        "search", f"Search {folder.name}", frame, f"{len(states)} trials: {counts}. Scores on held-out data."
    )


def searches(folders: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield each folder with a search below some folders, and its study, where optuna is installed."""
    for folder in sorted(file.parent for top in folders for file in find(top, search.JOURNAL)):
        try:
            storage = search.journal(folder)
            yield folder, search.import_optuna().load_study(study_name=search.STUDY, storage=storage)
        except (UserError, KeyError, OSError):
            continue


def find(top: Path, name: str) -> list[Path]:
    """Return the files of this name below a folder."""
    return [Path(place) / name for place, _, files in os.walk(top) if name in files]


def tuned(folders: Sequence[Path]) -> Iterator[Table]:
    """Yield how each sweep with `hydra/sweeper=tuned` below some folders was tuned: grid, scores, choices."""
    for file in sorted(file for top in folders for file in find(top, TUNED)):
        tuning = folders_of_runs.read_json(file) or {}
        points = [" ".join(point) for point in tuning["points"]]
        rows, bold = [], set()
        for place, row in enumerate(tuning["rows"]):
            choice = " ".join(row["choice"] or ())
            bold |= {(place, choice)} if choice in points else set()
            rows.append([row["row"], *(NONE if score is None else f"{score:.4g}" for score in row["scores"])])
        seeds = ", ".join(map(str, tuning["tuning_seeds"]))
        note = (
            f"Each row had the same {len(points) * len(tuning['tuning_seeds'])} runs on seeds {seeds}. The best mean "
            "score on held-out data, in bold, is its choice."
        )
        if edge := [row["row"] for row in tuning["rows"] if is_at_edge(row["choice"] or (), tuning["points"])]:
            note += f" At the edge of the grid, where a wider one may be better: {'; '.join(edge)}."
        frame = pd.DataFrame(rows, columns=["", *points])
        yield Table("tuning", f"Tuning of {file.parent.name}", frame, note, bold)


def is_at_edge(choice: Sequence[str], points: Sequence[Sequence[str]]) -> bool:
    """Return whether a choice has the least or greatest of three or more numbers of a setting."""
    for place, word in enumerate(choice):
        try:
            values = {float(point[place].partition("=")[2]) for point in points}
        except ValueError:
            continue
        if len(values) > 2 and float(word.partition("=")[2]) in (min(values), max(values)):
            return True
    return False
