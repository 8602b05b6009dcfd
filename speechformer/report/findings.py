"""What the runs show, in sentences and tables that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speechformer.report import by_sentence, published
from speechformer.report.claims import OURS, VERDICTS, Judgement, content
from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Summary, contrast, holm
from speechformer.report.tables import (
    Comparison,
    baseline_name,
    comparisons,
    estimate,
    heading,
    mean_and_sd,
    method,
    number,
    p_value,
    precision,
    seeds_cell,
)


def found(tables: Sequence[Table], judgements: Sequence[Judgement]) -> list[Markdown]:
    """Return sentences: a count of verdicts, the agreement with the reports, and the best row of each table."""
    sentences = [count_verdicts(judgements), agreement(tables), *map(best_row, tables)]
    return [Markdown.escape(sentence) for sentence in sentences if sentence]


def count_verdicts(judgements: Sequence[Judgement]) -> str:
    """Return how many claims of others, and of this repository, have each verdict, or "" without a claim."""

    def verdicts(of: Sequence[Judgement]) -> str:
        own = [judgement.verdict for judgement in of]
        supported, inconclusive, contradicted = (f"{own.count(word)} {word}" for word in VERDICTS)
        return f"{supported}, {contradicted}, {inconclusive}"

    ours = [own for own in judgements if own.by == OURS]
    others = [own for own in judgements if own.by != OURS]
    if not (ours and others):
        return f"{len(judgements)} claims were tested: {verdicts(judgements)}." if judgements else ""
    return (
        f"{len(others)} claims of others were tested: {verdicts(others)}. So were {len(ours)} of this repository: "
        f"{verdicts(ours)}."
    )


def best_row(table: Table) -> Markdown | str:
    """Return a sentence on the best row of a table: its result, which rows it beats, and the best baseline."""
    metric, better = table.metric, 1 if table.report["higher_is_better"] else -1
    rows = [(row, Summary(own.values())) for row in table.rows if metric and (own := row.mixed_values(metric))]
    if not rows:
        return ""
    best, summary = max(rows, key=lambda pair: better * pair[1].mean)
    result = f"{mean_and_sd(metric, summary)} ({heading(best.mixed(metric))}; {count(summary.n, 'seed')})"
    parts = [f"{best.label} has {result}"]
    if len(rows) > 1:
        beaten, tested = beats(best, [row for row, _ in rows if row is not best], metric, better)
        parts = [f"best is {best.label} with {result}"]
        which = f"{beaten} of {tested} others" if tested > 1 else "the other"
        word = "significantly" if beaten or tested > 1 else "not significantly"
        parts.append(f"{word} better than {which}" if tested else "too few seeds to compare rows")
    parts += against_baseline(table, best, better, len(rows))
    return Markdown("[{}](#{}): {}.").format(table.heading, table.name, "; ".join(parts))


def beats(best: Row, others: Sequence[Row], metric: str, better: int) -> tuple[int, int]:
    """Return how many rows another is significantly better than (Holm), and with how many it could be compared."""
    own = best.mixed_values(metric)
    effects = [contrast([(1, own), (-1, row.mixed_values(metric))]) for row in others]
    p_values = [effect.p for effect in effects if effect]
    corrected = holm(p_values)
    means = [effect.mean for effect in effects if effect]
    return sum(p < 0.05 and better * mean > 0 for p, mean in zip(corrected, means)), sum(p == p for p in p_values)


def against_baseline(table: Table, row: Row, better: int, rows: int) -> list[str]:
    """Return what the best of some rows has more than the best baseline, if there is one, and whether it is better.

    The interval is over sentences too, where all predictions are kept. The verdict is after Bonferroni's correction
    for the number of rows.
    """
    measured = [(value, run) for run in table.baselines if (value := run.metrics.get(table.metric)) is not None]
    if not measured:
        return []
    value, run = max(measured, key=lambda pair: better * pair[0])
    by_item = table.metric == by_sentence.METRIC and all(own.predictions() for own in [*row.finished, run])
    effect = (
        by_sentence.less(row, run) if by_item else contrast([(1, row.mixed_values(table.metric))], constant=-value)
    )
    baseline = f"{baseline_name(run)} ({number(table.metric, value)})"
    if effect is None or math.isnan(effect.p):
        return [f"beside {baseline}"]
    better_or_worse = "better" if better * effect.mean > 0 else "worse"
    verdict = better_or_worse if effect.p * rows < 0.05 else "inconclusive"
    return ["less {}: {} {}, {}".format(baseline, *estimate(table.metric, effect), verdict)]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def claims_table(judgements: Sequence[Judgement], page: str = "") -> Markdown:
    """Return claims with effect, interval, p-values and verdict; `page` is that of the tables, for links."""
    rows, shows_known = [], any(own.known for own in judgements)
    for own in judgements:
        effect, metric = own.effect, own.metric
        where = Markdown("[{}]({}#{})").format(heading(metric), page, own.terms[0].table.name)
        verdict = Markdown("**{}**").format(own.verdict) if own.verdict != "inconclusive" else own.verdict
        test = "over sentences" if own.over_sentences else method(effect)
        cells = [own.says, own.by, verdict, Markdown("{} {}").format(*estimate(metric, effect)), where]
        if shows_known:
            cells.append(Markdown("{} {}").format(*estimate(metric, own.known)) if own.known else "")
        detectable = number(metric, effect.detectable, like=precision(effect))
        rows.append([*cells, seeds_cell(effect), detectable, test, f"{p_value(effect.p)}; {p_value(own.corrected)}"])
    header = ["claim", "by", "verdict", "effect, 95 % confidence interval", "of"]
    header += ["effect over known words"] if shows_known else []
    return markdown_table([*header, "seeds", "detectable", "test", "p; after Holm"], rows)


def untested_table() -> Markdown:
    """Return the conclusions of the reports that no claim tests, and why."""
    rows = [[own["says"], own["by"], own["why"]] for own in content()["untested"]]
    return markdown_table(["conclusion", "by", "why not"], rows)


def published_values(tables: Sequence[Table]) -> list[Comparison]:
    """Return the published final results on test, each once: the last value where the best is printed too."""
    values: dict[tuple[str | None, str], Comparison] = {}
    for line in (line for table in tables for line in comparisons(table) if line.counts and line.inside is not None):
        key = (line.row.published, line.theirs.name)
        if key not in values or line.theirs.chosen == "last":
            values[key] = line
    return list(values.values())


def agreement(tables: Sequence[Table]) -> str:
    """Return how many published results agree with ours, and how many should, or "" without a published one."""
    from scipy import stats

    values = published_values(tables)
    if not values:
        return ""
    inside = sum(bool(line.inside) for line in values)
    p = p_value(float(stats.binom.cdf(inside, len(values), 0.95)))
    p = p if p.startswith("<") else f"= {p}"
    text = (
        f"{inside} of {len(values)} published final results on test fall inside our 95 % prediction interval of one "
        f"run. If the published runs were like ours, about {0.95 * len(values):.0f} would (p {p} for {inside} or "
        "fewer, were they independent)."
    )
    chosen = content()["chosen"]
    rows = {name for entry in chosen for name in entry["rows"]}
    if looked := [bool(line.inside) for line in values if line.row.published in rows]:
        whats = ", ".join(dict.fromkeys(entry["what"] for entry in chosen))
        text += (
            f" For {len(looked)} of them, an assumption of ours was chosen by looking at published results "
            f"({whats}): {sum(looked)} of these are inside, and {inside - sum(looked)} of the other "
            f"{len(values) - len(looked)}."
        )
    wide = [line.row.published for line in values if line.ours and width(line.ours) > 0.1 * line.ours.mean]
    return text + (f" Wider than a tenth of the value: the interval of {', '.join(map(str, wide))}." if wide else "")


def width(summary: Summary) -> float:
    """Return the width of the prediction interval."""
    low, high = summary.prediction_interval
    return high - low


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return the different runs: of those that are repeated under the name of another study, the first."""
    free = set(published.content()["free"])
    different: dict[tuple[object, ...], Run] = {}
    for run in runs:
        settings = tuple(sorted((key, repr(value)) for key, value in run.settings.items() if key not in free))
        different.setdefault((run.protocol, run.corpus_key, run.baseline, run.seed, settings), run)
    return list(different.values())
