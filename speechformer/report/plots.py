"""The figures of the report: results, learning curves, and results by length of context or source."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from speechformer.corpora.files import OutputFolder
from speechformer.report import published
from speechformer.report.claims import Judgement
from speechformer.report.costs import costs_figure
from speechformer.report.effects import differences_figure, forest
from speechformer.report.factors import factors_figure
from speechformer.report.ladder import ladder_figure
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Summary
from speechformer.report.style import (
    HERE,
    INK,
    TICKS,
    Axes,
    add_legend,
    axis_label,
    kind,
    legend_below,
    limit,
    panels,
    plt,
    row_labels,
    short,
    size,
    styles,
    wrapped,
)
from speechformer.report.tables import baseline_name, comparisons, number, scale

Line2D = matplotlib.lines.Line2D
Lines = dict[str, dict[float, Summary]]
Notes = Mapping[str, str]
Figure = tuple[Any, str]  # with its caption
FORMATS = ("png", "svg", "pdf")
BANDS = 4  # more of them hide each other


def draw_lines(
    axis: Axes, table: Table, lines: Lines, unit: float = 1, marker: str = "", notes: Notes | None = None
) -> None:
    """Draw a line for each row through its means; of a few rows, a band from the lowest to the highest run.

    `lines` holds for each row, by label, its values over x; `notes` what to add to the label; the marker "style" is
    that of the row's style.
    """
    drawn = sum(bool(points) for points in lines.values())
    for row, style in zip(table.rows, styles(table.rows)):
        if points := lines[row.label]:
            x, label = list(points), row.label + (notes or {}).get(row.label, "")
            shape = marker or ("o" if len(x) == 1 else "")  # a line through one point is invisible
            look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "lw": 1.9, "mfc": "white"}
            look["marker"] = style.marker if marker == "style" else shape
            axis.plot(x, [unit * summary.mean for summary in points.values()], label=label, **look)
            if drawn <= BANDS:
                low, high = ([unit * summary.extremes[end] for summary in points.values()] for end in (0, 1))
                axis.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)


def several(rows: list[Row]) -> bool:
    """Return whether some row has several finished runs."""
    return any(len(row.finished) > 1 for row in rows)


def spread(table: Table) -> str:
    """Return what lines and bands show, for a caption."""
    band = " Band: lowest to highest run." if sum(bool(row.finished) for row in table.rows) <= BANDS else ""
    return f"Mean over seeds.{band}" if several(table.rows) else "One run each."


def curves(table: Table) -> Figure | None:
    """Draw learning curves, with published values as open markers."""
    what = kind(table.metric)
    metrics = [name for name in table.report["compare"] if table.has(name)]
    kinds = dict.fromkeys((what, "perplexity"))
    metrics += [f"{split}_{name}" for split in ("validation", "train") for name in kinds]
    lines_of = {name: {row.label: row.curve(name) for row in table.rows} for name in dict.fromkeys(metrics)}
    lines_of = {name: lines for name, lines in lines_of.items() if any(len(line) > 1 for line in lines.values())}
    if not lines_of:
        return None
    x_label, with_published = short(table.report["x_axis"]), False
    sizes = {(row.settings["batch_size"], row.settings["block_size"]) for row in table.rows if row.ran}
    if x_label == "step" and what == "perplexity" and len(sizes) == 1:
        x_label += " (of {} × {} tokens)".format(*sizes.pop())
    figure, axes = panels(len(lines_of), 4.3, 3.9)
    for axis, (name, lines) in zip(axes, lines_of.items()):
        draw_lines(axis, table, lines, scale(name))
        for row, style in zip(table.rows, styles(table.rows)):
            points = published.curve(row.published, name) if table.comparable and row.published else []
            if points and lines[row.label]:
                x, y = zip(*((x, scale(name) * value) for x, value in points))
                axis.plot(x, y, style.marker, mfc="white", mec=style.colour, mew=1.4, ms=5)
                with_published = True
        axis.set(xlabel=x_label, ylabel=wrapped(axis_label(name), 28))
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True))
    set_log_scale([axis for axis, name in zip(axes, lines_of) if "perplexity" in name])
    add_legend(figure, max(axes, key=lambda axis: len(axis.get_legend_handles_labels()[0])))
    return figure, spread(table) + (" Open markers: published." if with_published else "")


def set_log_scale(axes: Sequence[Axes]) -> None:
    """Draw the values of all axes on a logarithmic scale, and say so, if some span more than a factor of two."""
    values = [np.concatenate([line.get_ydata() for line in axis.lines]).astype(float) for axis in axes]
    if not any(own.max() > 2 * own.min() > 0 for own in values):
        return
    for axis, own in zip(axes, values):
        axis.set_yscale("log")
        axis.set_ylabel(f"{axis.get_ylabel()}, log scale")
        factor = own.max() / own.min()
        locator = matplotlib.ticker.LogLocator(subs=(1, 2, 5) if factor > 20 else (1, 1.5, 2, 3, 4, 5, 6, 8))
        axis.yaxis.set_major_locator(locator if factor > 2 else matplotlib.ticker.MaxNLocator(5))
        axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def dots(table: Table) -> Figure | None:
    """Draw the test metrics of each run, with means, confidence intervals, published values and the best baseline."""
    what = kind(table.metric)
    comparable = ("bleu", "chrf") if what == "bleu" else (what,)  # kinds on one scale
    tested = [name for name in table.columns if name.startswith("test_") and "interval" not in name]
    metrics = sorted((name for name in tested if kind(name) in comparable), key=lambda name: name.endswith("_mean"))
    rows = [row for row in table.rows if row.values(table.metric)]
    metrics = [name for name in metrics if any(row.values(name) for row in rows)]
    if not rows or not metrics:
        return None
    # Where a report chose its perplexities on test, so do the points beside them.
    best = what == "perplexity" and any(line.theirs.chosen == "best" for line in comparisons(table))
    labels = row_labels([row.label for row in rows])
    figure, axes = plt.subplots(1, len(metrics), figsize=size(labels, 2.1 * len(metrics)), sharey=True, squeeze=False)
    baseline, marks, cut = best_baseline(table), dict[str, Any](), ""
    for axis, name in zip(axes[0], metrics):
        axis.set_title(TICKS.get(name, short(name.split("_", 2)[-1])))
        if draw_dots(axis, table, rows, name, best):
            marks["published"] = Line2D([], [], ls="", marker="D", mfc="none", mec=INK, mew=1.3)
        drawn = [line.get_xdata() for line in axis.lines if line.get_linestyle() != "-"]
        cut = cut or limit(axis, np.concatenate(drawn).tolist()) if drawn else cut
        if baseline and (value := baseline.metrics.get(name)) is not None:
            marks |= draw_baseline(axis, baseline_name(baseline), name, value)
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
        axis.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(rows)), labels)
    axes[0][0].set_ylim(len(rows) - 0.4, -0.6)
    label = axis_label(metrics[0]).partition(",")[0] if len(comparable) == 1 else "test score, 0 to 100"
    label = "test accuracy (%)" if what == "accuracy" else label.replace(" (mean of tests)", "")
    axes[0][(len(metrics) - 1) // 2].set_xlabel(label + (", best of the run" if best else ""))
    mean = "mean, 95 % confidence interval" if several(rows) else "one run"
    ink: dict[str, Any] = {"color": INK, "marker": "o", "mfc": "white"}
    handles = {"run": Line2D([], [], ls="", marker=".", color=INK, alpha=0.55)} if several(rows) else {}
    handles |= {mean: Line2D([], [], ls="-" if several(rows) else "", **ink), **marks}
    for text, handle in handles.items():
        handle.set_label(short(text, 60))
    legend_below(figure, list(handles.values()))
    caption = "Dots: runs. Line: mean and 95 % confidence interval" if several(rows) else "One run each"
    caption += ", of each text's best value on test during a run, as published" if best else ""
    return figure, f"{caption}.{' Diamonds: published.' * ('published' in marks)}{cut}"


def draw_dots(axis: Axes, table: Table, rows: list[Row], name: str, best: bool) -> bool:
    """Draw the runs of each row with their mean and interval; return whether a published value was drawn."""
    diamonds, unit = False, scale(name)
    style = dict(zip((row.label for row in table.rows), styles(table.rows)))
    for y, row in enumerate(rows):
        if not (summary := row.summary(name, best)):
            continue
        colour, marker = style[row.label].colour, style[row.label].marker
        spread = np.linspace(-0.2, 0.2, summary.n) if summary.n > 1 else [0.0]
        axis.plot(unit * summary.values, y + np.array(spread), ".", color=colour, alpha=0.7, ms=6, mew=0)
        low, high = summary.confidence_interval
        if not math.isnan(low):
            axis.plot([unit * low, unit * high], [y, y], color=INK, lw=1.6, zorder=3)
        axis.plot(unit * summary.mean, y, marker, color=colour, mec=INK, ms=6.5, zorder=4)
        compared = table.comparable and row.published
        value = published.final(row.published or "", name, "best" if best else "last") if compared else None
        if value is not None:
            axis.plot(value * unit, y, "D", mfc="none", mec=INK, mew=1.3, ms=8, zorder=5)
            diamonds = True
    return diamonds


def best_baseline(table: Table) -> Run | None:
    """Return the baseline with the best main metric, or None without one."""
    measured = [run for run in table.baselines if run.metrics.get(table.metric) is not None]
    better = max if table.report["higher_is_better"] else min
    return better(measured, key=lambda run: run.metrics[table.metric] or 0.0) if measured else None


def draw_baseline(axis: Axes, name: str, metric: str, value: float) -> dict[str, Any]:
    """Draw a baseline as a dotted line, or name it at the edge if it is far; return the mark for the legend."""
    left, right = axis.get_xlim()
    place, width = value * scale(metric), right - left
    if left - 0.5 * width < place < right + 0.5 * width:
        line = axis.axvline(place, color=INK, linestyle=(0, (1.5, 1.2)), linewidth=1.3, zorder=1)
        axis.set_xlim(min(left, place - 0.05 * width), max(right, place + 0.05 * width))
        return {name: Line2D([], [], color=INK, linestyle=line.get_linestyle(), lw=1.3)}
    side, marker = ("left", "◂ {}") if place < left else ("right", "{} ▸")
    axis.set_title(marker.format(number(metric, value)), loc=side, fontsize=8.5, color="#52606d")  # type: ignore[arg-type]
    return {f"{name}, beyond the axis": Line2D([], [], ls="", marker="<" if side == "left" else ">", color="#52606d")}


def by_context_length(table: Table) -> Figure | None:
    """Draw test perplexity over the length of the context, that of training as a filled marker."""
    lengths = table.lengths()
    values = {row.label: {length: row.at_length(length) for length in lengths} for row in table.rows}
    lines: Lines = {
        label: {length: value for length, value in line.items() if isinstance(value, Summary)}
        for label, line in values.items()
    }
    if not any(len(line) > 1 for line in lines.values()):
        return None
    figure, axis = plt.subplots(figsize=(6.5, 4.4))
    ended = [label for label, line in lines.items() if len(line) == 1 and "cannot run" in values[label].values()]
    draw_lines(axis, table, lines, marker="o", notes=dict.fromkeys(ended, " (cannot run longer)"))
    for row, style in zip(table.rows, styles(table.rows)):
        if row.ran and (trained := row.settings["block_size"]) in lines[row.label]:
            axis.plot(trained, lines[row.label][trained].mean, "o", color=style.colour, ms=7)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.minorticks_off()
    axis.set(xlabel="context in the test (tokens)", ylabel="test perplexity per token (mean of tests)")
    add_legend(figure, axis)
    return figure, spread(table) + " Filled marker: the context of training."


def by_source_length(table: Table) -> Figure | None:
    """Draw BLEU and chrF over the length of the source; exact translations too, where these are more than a fifth."""
    buckets = table.source_lengths()
    shown = {"bleu": "test BLEU", "chrf": "test chrF"}
    exact = [row.summary("test_exact") for row in table.rows]
    if any(summary.mean > 0.2 for summary in exact if summary):
        shown["exact"] = "exact translations (%)"
    lines_of = {name: {row.label: source_points(row, name, buckets) for row in table.rows} for name in shown}
    lines_of = {name: lines for name, lines in lines_of.items() if any(lines.values())}
    if len(buckets) < 2 or not lines_of:
        return None
    figure, axes = panels(len(lines_of), 4.5, 4.4)
    for axis, (name, lines) in zip(axes, lines_of.items()):
        draw_lines(axis, table, lines, scale(name), "style")
        axis.set_xticks(range(len(buckets)), [f"{short(bucket)}\n({count})" for bucket, count in buckets.items()])
        axis.set(xlabel="words of the source (sentences)", ylabel=shown[name])
        axis.set_ylim(bottom=0)
    add_legend(figure, axes[0])
    few = sum(bool(row.finished) for row in table.rows) <= BANDS
    alone = " Band: 95 % bootstrap confidence interval over sentences." if few and not several(table.rows) else ""
    return figure, f"Each length on its own sentences. {spread(table)}{alone}"


def source_points(row: Row, name: str, buckets: Mapping[str, int]) -> dict[float, Summary]:
    """Return a metric of a row by the place of the bucket; the band of a single run is its spread over sentences."""
    summaries = [row.summary(f"test_{name}_at_{bucket}") for bucket in buckets]
    points = {float(place): summary for place, summary in enumerate(summaries) if summary}
    for summary, bucket in zip(points.values(), buckets):
        half = row.summary(f"test_{name}_interval_at_{bucket}")
        if summary.n == 1 and half:
            summary.extremes = (summary.mean - half.mean, summary.mean + half.mean)
    return points if len(points) == len(buckets) else {}


def write(figure: Any, output: OutputFolder, name: str, formats: Sequence[str]) -> Path:
    """Write a figure as PNG, with 256 colours and so a third of the bytes, and in other formats; return the PNG."""
    figure.tight_layout()
    figure.draw_without_rendering()
    look: dict[str, Any] = {"bbox_inches": figure.get_tightbbox().padded(0.1), "facecolor": "white"}
    path = output.file(f"figures/{name}.png")
    content = io.BytesIO()
    figure.savefig(content, **look)
    Image.open(content).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    for form, undated in {"svg": "Date", "pdf": "CreationDate"}.items():  # the same results give the same bytes
        if form in formats:
            place = output.file(f"figures/{name}.{form}")
            figure.savefig(place, metadata={undated: None}, **look)
    plt.close(figure)
    return path


FIGURES: dict[str, Callable[[Table], Figure | None]] = {
    "dots": dots,
    "differences": differences_figure,
    "factors": factors_figure,
    "sources": by_source_length,
    "curves": curves,
    "lengths": by_context_length,
    "cost": costs_figure,
    "ladder": ladder_figure,
}


def draw_figures(
    tables: list[Table],
    output: OutputFolder,
    judgements: Sequence[Judgement] = (),
    formats: Sequence[str] = FORMATS,
) -> dict[str, list[tuple[Path, str]]]:
    """Draw all figures and remove those of an earlier report; return PNGs and captions by table, "" for claims."""
    figures: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    with plt.style.context(HERE / "figures.mplstyle"):
        if drawn := forest(judgements):
            figures[""].append((write(drawn[0], output, "claims", formats), drawn[1]))
        for table in tables:
            for name, draw in FIGURES.items():
                if drawn := draw(table):
                    path = write(drawn[0], output, f"{table.name}_{name}", formats)
                    figures[table.name].append((path, drawn[1]))
    for form in FORMATS:
        output.remove_stale(f"figures/*.{form}")
    return figures
