"""What results cost: those of rows with contexts of different lengths, beside their time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from speechformer.errors import UserError
from speechformer.report.labels import joined
from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Table
from speechformer.report.style import add_legend, axis_label, panels, styles
from speechformer.report.tables import NONE, heading, mean_and_sd, scale

CONTEXT = ("block_size", "batch_size")  # keys of the length of a context; a batch holds as many tokens with each
SLIDING = "test_sliding_perplexity_mean"  # in which the first tokens of a block have a context, too
COSTS = {"training_seconds": "training, seconds", "peak_megabytes": "peak of memory, MB"}


def measured(table: Table) -> list[Row]:
    """Return the rows with costs by the length of their context; none if all rows have the same.

    A run without a step took no time, so it has no cost.
    """

    def has_costs(row: Row) -> bool:
        costs = [row.summary(name) for name in COSTS]
        return row.summary(table.metric) is not None and all(own is not None and own.mean > 0 for own in costs)

    rows = [row for row in table.rows if row.finished and has_costs(row)]
    several = len({row.settings.get("block_size") for row in rows}) > 1
    return sorted(rows, key=lambda row: row.settings["block_size"]) if several else []


def compared(table: Table) -> str:
    """Return the metric that is compared: perplexity in sliding windows if it was measured, else the main metric."""
    return SLIDING if table.has(SLIDING) else table.metric


def variant(row: Row) -> str:
    """Return what a row is without the length of its context, in words."""
    return joined(words for key, words in row.words.items() if key not in CONTEXT) or row.label


def frontier(points: Sequence[tuple[float, float]], higher_is_better: bool) -> list[tuple[float, float]]:
    """Return the points that no cheaper one equals, by cost."""
    sign, best = (-1 if higher_is_better else 1), math.inf
    chosen = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if sign * y < best:
            best = sign * y
            chosen.append((x, y))
    return chosen


def place(row: Row, cost: str, metric: str) -> tuple[float, float]:
    """Return the mean cost of a row and the mean of its metric."""
    x, y = row.summary(cost), row.summary(metric)
    assert x is not None and y is not None
    return x.mean, y.mean


def costs_table(table: Table) -> Markdown:
    """Return rows by context with their results and costs; a cost is bold if no row is as good for less of it.

    Raises:
        UserError: the rows have no contexts of different lengths.
    """
    rows, metric = measured(table), compared(table)
    if not rows:
        raise UserError(f"study={table.study} has no runs with contexts of different lengths.")
    least = {
        cost: frontier([place(row, cost, metric) for row in rows], table.report["higher_is_better"]) for cost in COSTS
    }
    shown: list[list[str]] = []
    for row in rows:
        cells = []
        for name in filter(None, (table.held_out, metric, *COSTS)):
            summary = row.summary(name)
            cell = Markdown.escape(mean_and_sd(name, summary) if summary else NONE)
            best = name in COSTS and place(row, name, metric) in least[name]
            cells.append(Markdown("**{}**").format(cell) if best else cell)
        shown.append([variant(row), f"{row.settings['block_size']:,}", *cells, str(len(row.finished))])
    names = filter(None, (table.held_out, metric))
    return markdown_table(["pattern", "context", *map(heading, names), *COSTS.values(), "seeds"], shown)


def costs_figure(table: Table) -> tuple[Any, str] | None:
    """Draw the metric over time and memory of training: a line for each variant, from context to context."""
    rows, metric = measured(table), compared(table)
    if not rows:
        return None
    figure, axes = panels(2, 5.0, 4.6, sharey=True)
    for axis, (cost, label) in zip(axes, COSTS.items()):
        best = frontier([place(row, cost, metric) for row in rows], table.report["higher_is_better"])
        xs, ys = zip(*best)
        axis.plot(xs, [scale(metric) * y for y in ys], color="#d5dae0", lw=9, solid_joinstyle="round", zorder=0)
        draw_variants(axis, rows, cost, metric)
        axis.set_xlabel(label)
    axes[0].set_ylabel("test perplexity per token, sliding window" if metric == SLIDING else axis_label(metric))
    add_legend(figure, axes[0])
    contexts = ", ".join(f"{own:,}" for own in sorted({row.settings["block_size"] for row in rows}))
    caption = f"Mean over seeds, each seed a dash; the larger the mark, the longer the context: {contexts} tokens."
    return figure, f"{caption} Grey: no other row is as good for less."


def draw_variants(axis: Any, rows: Sequence[Row], cost: str, metric: str) -> None:
    """Draw the rows over one cost: a line for each variant, with larger marks for longer contexts."""
    variants: dict[str, list[Row]] = {}
    for row in rows:
        variants.setdefault(variant(row), []).append(row)
    contexts = sorted({row.settings["block_size"] for row in rows})
    for (name, own), style in zip(variants.items(), styles([own[0] for own in variants.values()])):
        xs, ys = zip(*(place(row, cost, metric) for row in own))
        axis.plot(xs, [scale(metric) * y for y in ys], label=name, color=style.colour, ls=style.line, lw=1.2)
        for row, x, y in zip(own, xs, ys):
            size = 4 + 3 * contexts.index(row.settings["block_size"])
            axis.plot([x], [scale(metric) * y], style.marker, color=style.colour, ms=size)
            seeds = [scale(metric) * value for value in row.values(metric).values()]
            axis.plot([x] * len(seeds), seeds, "_", color=style.colour, ms=7, alpha=0.6)
    set_ticks(axis, [place(row, cost, metric)[0] for row in rows])


def set_ticks(axis: Any, values: Sequence[float]) -> None:
    """Make the axis of a cost logarithmic if its values differ by a factor of three or more."""
    least, most = min(values), max(values)
    if most > 3 * least:
        axis.set_xscale("log", base=2)
        ticks = [2.0**k for k in range(math.floor(math.log2(least)), math.ceil(math.log2(most)) + 1)]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
