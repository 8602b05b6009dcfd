"""The tables of the report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from speechformer.console import is_fraction
from speechformer.report import labels, published
from speechformer.report.markdown import Markdown, code, lines
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Effect, Interval, Summary, contrast, holm

NONE = "–"
WORDS = {
    "test_accuracy": "test, %",
    "test_accuracy_in_train": "test, in train, %",
    "test_accuracy_not_in_train": "test, not in train, %",
    "train_accuracy": "train, %",
    "validation_accuracy": "validation, %",
    "validation_balanced_accuracy": "validation, mean over classes, %",
    "test_perplexity_mean": "test, mean",
    "test_known_perplexity_mean": "known words, mean",
    "test_unknown_rate_mean": "unknown words, %",
    "test_sliding_perplexity_mean": "sliding window, mean",
    "test_word_perplexity_mean": "per word, mean",
    "test_bits_per_byte_mean": "bits per byte, mean",
    "test_bleu": "test, BLEU",
    "test_bleu_interval": "± over sentences",
    "test_chrf": "test, chrF",
    "test_length_ratio": "length ratio",
    "test_exact": "exact, %",
    "validation_bleu": "validation, BLEU (greedy)",
    "test_perplexity_mean / train_perplexity": "test over train",
    "test_length_256_perplexity_mean / test_perplexity_mean": "256 tokens over 32",
}
BUCKET = {"bleu": "", "chrf": "chrF ", "length_ratio": "ratio ", "exact": "exact % "}  # metrics of a source length


def heading(metric: str) -> str:
    """Return the name of a metric for the head of a column."""
    return WORDS.get(metric) or metric.replace("_perplexity_", ", ").replace("_", ", ").removesuffix(", perplexity")


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
    if not signed and not any(word in metric for word in ("perplexity", "loss", "ratio")):
        most = 100 / scale(metric)  # Student's t is unbounded
        interval = (max(interval[0], 0.0), min(interval[1], most))
    like = max(map(abs, interval)) if like is None else like
    return Markdown("[{}, {}]").format(*(number(metric, end, signed, like) for end in interval))


def mean_and_sd(metric: str, values: Summary) -> str:
    """Return "mean ± standard deviation" with the decimals of the mean."""
    text = number(metric, values.mean)
    return text + (f" ± {number(metric, values.sd, like=values.mean)}" if values.n > 1 else "")


def precision(effect: Effect) -> float:
    """Return the value that decides the decimals of an effect: three digits of it, at most two of its uncertainty."""
    low, high = effect.interval
    return abs(effect.mean) if math.isnan(low) else max(abs(effect.mean), 5 * (high - low))


def estimate(metric: str, effect: Effect) -> tuple[str, str]:
    """Return an effect and its 95 % confidence interval as texts."""
    like = precision(effect)
    return number(metric, effect.mean, True, like), format_interval(metric, effect.interval, True, like)


def yes_or_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: NONE}[value]


def results_table(table: Table) -> Markdown:
    """Return mean ± sd of each row and metric with the confidence interval of the mean, then the baselines."""
    columns = table.columns
    rows = [[row.label, row.state, *(result_cell(row, name) for name in columns), *size(row)] for row in table.rows]
    rows += [[label, "not run", *[NONE] * (len(columns) + 2)] for label in table.expected]
    for run in table.baselines:
        values = (number(metric, run.metrics.get(metric)) for metric in columns)
        rows.append([emphasis(run), "exact", *values, f"{run.result['parameters']['total']:,}", NONE])
    return markdown_table(["", "runs", *map(heading, columns), "parameters", "seconds"], rows)


def emphasis(run: Run) -> Markdown:
    """Return the name of a baseline in italics."""
    return Markdown("*{}*").format(baseline_name(run))


def baseline_name(run: Run) -> str:
    """Return the name of a baseline in words."""
    return labels.content()["baselines"].get(run.baseline or "", run.baseline or "")


def result_cell(row: Row, metric: str) -> str:
    if not (summary := row.summary(metric)):
        return NONE
    incomplete = f" (of {summary.n})" if summary.n < len(row.finished) else ""
    interval = [format_interval(metric, summary.confidence_interval, like=summary.mean)] if summary.n > 1 else []
    return lines([mean_and_sd(metric, summary) + incomplete, *interval])


def size(row: Row) -> tuple[str, str]:
    """Return the number of parameters, with the published one, and the mean seconds of a run."""
    totals = sorted({run.result["parameters"]["total"] for run in row.finished})
    seconds = [run.result["seconds"] for run in row.finished if run.result.get("seconds") is not None]
    reported = published.content()["rows"][row.published].get("parameters") if row.published else None
    text = (" to " if len(totals) > 2 else " or ").join(f"{n:,}" for n in dict.fromkeys(totals[:1] + totals[-1:]))
    return lines(
        [text or NONE, *([f"published {reported:,}"] if reported else [])]
    ), f"{Summary(seconds).mean:.0f}" if seconds else NONE


@dataclass(frozen=True)
class Comparison:
    """A published value beside our runs, chosen in the same way; `ours` is None where we have no such metric."""

    row: Row
    theirs: published.Figure
    ours: Summary | None

    @property
    def inside(self) -> bool | None:
        """Whether the published value lies inside the prediction interval of one run of ours."""
        return self.ours.predicts(self.theirs.value) if self.ours else None

    @property
    def counts(self) -> bool:
        """Whether the overview counts it: a final result on test that is not a mean of others."""
        return self.theirs.final and self.theirs.name.startswith("test") and not self.theirs.name.endswith("mean")


def comparisons(table: Table) -> Iterator[Comparison]:
    """Yield every published value of a table's rows beside ours; none on another corpus or protocol."""
    for row in table.rows if table.comparable else []:
        for theirs in published.figures(row.published) if row.published else []:
            if theirs.chosen == "best":
                ours = row.summary(theirs.name, best=True)
            else:
                ours = row.summary(theirs.name) if theirs.final else row.curve(theirs.name).get(theirs.at or math.nan)
            yield Comparison(row, theirs, ours)


def published_table(table: Table) -> Markdown:
    """Return the final published results beside ours, or "" if nothing was published."""
    rows = []
    for line in comparisons(table):
        theirs, ours, name = line.theirs, line.ours, line.theirs.name
        if not theirs.final:
            continue
        value = f"{theirs.value:.3f}" if name.endswith("loss") else number(name, theirs.value)
        cells = [line.row.label, heading(name), f"{theirs.report}, {theirs.table} ({theirs.chosen})", value]
        if ours is None:
            rows.append([*cells, "not measured", *[NONE] * 4])
            continue
        low, high = (end - theirs.value for end in ours.confidence_interval)
        cells += [mean_and_sd(name, ours), *estimate(name, Effect((ours.n,), ours.mean - theirs.value, (low, high)))]
        interval = format_interval(name, ours.prediction_interval, like=ours.mean)
        rows.append([*cells, interval, yes_or_no(line.inside)])
    header = ["", "metric", "published in", "published", "ours", "ours − published", "95 % confidence interval"]
    return markdown_table([*header, "95 % prediction interval of ours", "published inside"], rows)


@dataclass(frozen=True)
class Difference:
    """A row minus its reference; `corrected` is the p-value after Holm's correction."""

    row: Row
    reference: Row
    metric: str
    effect: Effect
    corrected: float


def differences(table: Table, all_pairs: bool = False) -> Iterator[Difference]:
    """Yield each row minus the reference, or all pairs; a family of tests are those of one metric."""
    others = [row for row in table.rows if row is not table.reference]
    pairs = list(combinations([table.reference, *others], 2))
    pairs = pairs if all_pairs else pairs[: len(others)]
    for metric in filter(table.has, table.report["compare"]):
        effects = [
            (row, reference, metric, effect)
            for reference, row in pairs
            if (effect := contrast([(1, row.values(metric)), (-1, reference.values(metric))]))
        ]
        corrected = holm([effect.p for *_, effect in effects])
        yield from (Difference(*own, p) for own, p in zip(effects, corrected))


def differences_table(table: Table) -> Markdown:
    """Return the differences from the reference, or "" for a table of one row."""
    rows = []
    for own in differences(table):
        effect, metric = own.effect, own.metric
        cells = [f"{own.row.label} − {own.reference.label}", heading(metric), seeds_cell(effect)]
        cells += [*estimate(metric, effect), method(effect), p_value(effect.p), p_value(own.corrected)]
        rows.append([*cells, number(metric, effect.detectable, like=precision(effect)), significant(own.corrected)])
    header = ["", "metric", "seeds", "difference", "95 % confidence interval", "test", "p", "p, Holm"]
    return markdown_table([*header, "detectable", "significant at 5 %"], rows)


def seeds_cell(effect: Effect) -> str:
    """Return the number of seeds, or the numbers of independent samples where these differ."""
    return " and ".join(str(n) for n in dict.fromkeys(effect.n))


def method(effect: Effect) -> str:
    """Return the t-test, with the correlation of the two sides over common seeds."""
    correlation = "" if math.isnan(effect.correlation) else f" (r = {effect.correlation:.2f})".replace("-", "−")
    return ("paired" if effect.paired else "Welch" if len(effect.n) > 1 else "one sample") + correlation


def p_value(p: float) -> str:
    return NONE if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def significant(p: float) -> str:
    return yes_or_no(None if math.isnan(p) else p < 0.05)


def lengths_table(table: Table) -> Markdown:
    """Return the mean test perplexity in contexts of other lengths than in training, or "" if not measured."""
    lengths, rows = table.lengths(), []
    for row in table.rows if lengths else []:
        values = [row.at_length(length) for length in lengths]
        cells = [mean_and_sd(table.metric, value) if isinstance(value, Summary) else value for value in values]
        rows.append([row.label, str(row.settings.get("block_size", NONE)), *cells])
    return markdown_table(["", "trained on, tokens", *(f"tested on {length}" for length in lengths)], rows)


def source_lengths_table(table: Table) -> Markdown:
    """Return the metrics of a translation by the length of the source in words, or "" for other tasks."""
    buckets = table.source_lengths()
    labelled: list[tuple[str, list[Run]]] = [(row.label, row.finished) for row in table.rows]
    labelled += [(emphasis(run), [run]) for run in table.baselines]

    def cell(runs: list[Run], bucket: str) -> str:
        texts = []
        for name, prefix in BUCKET.items():
            values = [run.metrics.get(f"test_{name}_at_{bucket}") for run in runs]
            if present := [value for value in values if value is not None]:
                texts.append(prefix + mean_and_sd(name, Summary(present)))
        return lines(texts or [NONE])

    rows = [[label, *(cell(runs, bucket) for bucket in buckets)] for label, runs in labelled if buckets]
    return markdown_table(["BLEU", *(f"{bucket} words ({count})" for bucket, count in buckets.items())], rows)


def commands_table(table: Table) -> Markdown:
    """Return how to repeat each row: commands, seeds, commits."""
    rows = []
    for row in table.rows:
        commands = dict.fromkeys(code(run.command) for run in row.runs)
        rows.append([row.label, lines([*commands]), ", ".join(str(run.seed) for run in row.runs), commits(row.runs)])
    rows += [[emphasis(run), code(run.command), NONE, commits([run])] for run in table.baselines]
    return markdown_table(["", "command (add seed=)", "seeds", "commit"], rows)


def commits(runs: list[Run]) -> str:
    """Return the commits of some runs, shortened."""
    names = {run.result.get("commit") or "unknown" for run in runs}
    return ", ".join(sorted(name if name == "unknown" else name[:10] + name[40:] for name in names))
