"""A ladder: settings added one after another, each compared with the rung below it.

The rungs are the rows of a study, ordered by the overrides of their commands. A rung stands on the row whose
overrides it contains, and that has the most of them. Its step is what it adds. The longest way is the ladder; the
other rows are branches beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speechformer.report.markdown import Markdown, code, lines
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Effect, contrast
from speechformer.report.style import Axes, axis_label, plt
from speechformer.report.tables import NONE, estimate, heading, number

NOT_A_STEP = ("seed=", "study=", "experiment=", "corpus=", "hydra", "threads=")


@dataclass(frozen=True)
class Rung:
    """A row of a ladder.

    Attributes:
        step: the overrides that it adds to `below`.
        on_top: whether the way to the highest rung leads over it.
    """

    row: Row
    step: tuple[str, ...]
    below: Rung | None
    on_top: bool

    def difference(self, metric: str) -> Effect | None:
        """Return the metric of this rung less that of the rung below, over seeds; None without one of them."""
        if self.below is None:
            return None
        return contrast([(1, self.row.values(metric)), (-1, self.below.row.values(metric))])


def overrides_of(run: Run) -> tuple[str, ...]:
    """Return the overrides of a run that are steps of a ladder."""
    words = run.result.get("overrides") or []
    return tuple(word for word in words if not word.startswith(NOT_A_STEP))


def rungs(table: Table) -> list[Rung]:
    """Return the rungs of a study from below, each followed by the branches that stand on it."""
    words = {id(row): overrides_of(row.finished[0]) for row in table.rows if row.finished}
    rows = sorted((row for row in table.rows if row.finished), key=lambda row: len(words[id(row)]))
    parents: dict[int, Row | None] = {}
    for row in rows:
        lower = [other for other in rows if {*words[id(other)]} < {*words[id(row)]}]
        parents[id(row)] = lower[-1] if lower else None
    depth: dict[int, int] = {}
    for row in rows:
        parent = parents[id(row)]
        depth[id(row)] = 0 if parent is None else depth[id(parent)] + 1
    way, at = set(), max(rows, key=lambda row: depth[id(row)], default=None)
    while at is not None:
        way.add(id(at))
        at = parents[id(at)]
    built: dict[int, Rung] = {}
    for row in rows:
        parent = parents[id(row)]
        fewer = () if parent is None else words[id(parent)]
        step = tuple(word for word in words[id(row)] if word not in fewer)
        built[id(row)] = Rung(row, step, None if parent is None else built[id(parent)], id(row) in way)
    return sorted(built.values(), key=lambda rung: (depth[id(rung.row)] - (not rung.on_top), not rung.on_top))


def steps_table(table: Table, metrics: Sequence[str]) -> Markdown:
    """Return the rungs with their metrics and the difference of each to the rung below."""
    rows: list[list[Any]] = []
    for rung in rungs(table):
        name = lines([code(word) for word in rung.step]) if rung.step else Markdown("the first rung")
        cells = [name if rung.on_top else Markdown("*tried:* {}").format(name)]
        for metric in metrics:
            summary, effect = rung.row.summary(metric), rung.difference(metric)
            mean = NONE if summary is None else number(metric, summary.mean)
            cells.append(mean if effect is None else lines([mean, " ".join(estimate(metric, effect))]))
        rows.append([*cells, str(len(rung.row.finished))])
    for run in table.baselines:
        values = [number(metric, run.metrics.get(metric)) for metric in metrics]
        rows.append([Markdown("*{}*").format(run_name(run)), *values, "exact"])
    return markdown_table(["step", *map(heading, metrics), "seeds"], rows)


def run_name(run: Run) -> str:
    """Return the name of a baseline."""
    from speechformer.report.tables import baseline_name

    return baseline_name(run)


def steps_figure(table: Table, metrics: Sequence[str]) -> Any:
    """Draw the mean of each metric on each rung, with its 95 % confidence interval, and the baselines as lines."""
    ladder = rungs(table)
    names = [
        ("tried: " if not rung.on_top else "") + (", ".join(map(short, rung.step)) or "the reports")
        for rung in ladder
    ]
    figure, axes = plt.subplots(
        1, len(metrics), sharey=True, figsize=(4.2 * len(metrics) + 2.6, 0.36 * len(names) + 1.2)
    )
    for axis, metric in zip(list(axes) if len(metrics) > 1 else [axes], metrics):
        draw(axis, table, ladder, metric)
        axis.set_xlabel(axis_label(metric))
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis() if axis.yaxis_inverted() is False else None
    return figure


def draw(axis: Axes, table: Table, ladder: Sequence[Rung], metric: str) -> None:
    """Draw the bars of one metric."""
    for place, rung in enumerate(ladder):
        summary = rung.row.summary(metric)
        if summary is None:
            continue
        low, high = summary.confidence_interval
        axis.barh(place, summary.mean, color="#4477aa" if rung.on_top else "#bbbbbb", height=0.68)
        if summary.varies:
            axis.plot([low, high], [place, place], color="black", lw=1.2)
        axis.annotate(
            number(metric, summary.mean),
            (max(summary.mean, high if summary.varies else 0), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    for run in table.baselines:
        value = run.metrics.get(metric)
        if value is not None:
            axis.axvline(value, color="black", lw=1, ls="--")
            axis.annotate(run_name(run), (value, len(ladder) - 0.5), rotation=90)


def short(override: str) -> str:
    """Return an override without its group."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2].replace('_', ' ')} {value}"
