"""The figures of the report: claims, results, learning curves, and results by length of context or source.

The colour of a variant follows from its settings, so it is the same in every figure. Rows of one colour in a table
differ in line style, hatch and marker.
"""

from __future__ import annotations

import functools
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import yaml
from PIL import Image

from speechformer.corpora.files import OutputFolder
from speechformer.escape import one_line
from speechformer.report import published
from speechformer.report.claims import Judgement
from speechformer.report.results import Row, Table
from speechformer.report.statistics import Summary
from speechformer.report.tables import comparisons, format_interval, heading, number, scale

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Lines = dict[str, dict[float, Summary]]
Notes = Mapping[str, str]
HERE = Path(__file__).parent
INK = "#1f2933"
WIDEST = 80.0  # inches; a picture has at most 2^16 pixels in a row
LINES: list[tuple[Any, str, str]] = [("-", "", "o"), ((0, (4, 2)), "//", "s"), ((0, (1.5, 1.5)), "..", "^")]
LINES += [((0, (6, 2, 1.5, 2)), "xx", "v"), ((0, (8, 3)), "\\\\", "D")]
TICKS = {"test_accuracy": "all", "test_accuracy_in_train": "in train", "test_accuracy_not_in_train": "not in train"}
TICKS |= {"test_bleu": "BLEU", "test_chrf": "chrF"}


class Style(NamedTuple):
    """How a variant is drawn."""

    colour: str
    line: Any
    hatch: str
    marker: str


@functools.cache
def colours() -> dict[str, Any]:
    return yaml.safe_load((HERE / "colours.yaml").read_text(encoding="utf-8"))


def colour(settings: Mapping[str, Any]) -> str:
    """Return the colour of a variant: of its pattern unless full, of its initialisation if normal, of its model."""
    model, pattern, other = settings.get("model.name"), settings.get("pattern.name"), colours()["other"]
    if pattern != "full":
        return colours()["patterns"].get(pattern, other)
    if settings.get("recipe.init") == "normal":
        return other
    if model == "alibi" and settings.get("model.slopes") == "learned":
        return colours()["alibi_learned_slopes"]
    if model == "alibi":
        scale = settings.get("model.scale", 1.0)
        return colours()["alibi_scales"].get(scale if isinstance(scale, float | int) else None, other)
    return colours()["models"].get(model, other)


def styles(rows: list[Row]) -> list[Style]:
    """Return the style of each row of a table; rows of one colour differ in line, hatch and marker."""
    own = [colour(row.settings) for row in rows]
    return [Style(name, *LINES[own[:place].count(name) % len(LINES)]) for place, name in enumerate(own)]


def short(text: str, limit: int = 40) -> str:
    """Return a text from outside as a figure shows it."""
    return one_line(text, limit)


def kind(metric: str) -> str:
    """Return what a metric measures: "accuracy" of `test_accuracy_in_train`."""
    return metric.partition("_")[2].partition("_")[0]


def axis_label(metric: str) -> str:
    """Return the name of a metric with its unit."""
    metric = short(metric)
    split, what = metric.partition("_")[0], kind(metric)
    if what == "accuracy":
        return f"{split} accuracy{f', {TICKS[metric]}' if metric.endswith('_in_train') else ''} (%)"
    if what == "perplexity":
        return f"{split} perplexity per token" + (" (mean of tests)" if metric.endswith("mean") else "")
    return f"{split} BLEU" if what == "bleu" else heading(metric)


def draw_lines(
    axis: Axes, table: Table, lines: Lines, unit: float = 1, marker: str = "", notes: Notes | None = None
) -> None:
    """Draw a line for each row through its means, and a band from the lowest to the highest run.

    `lines` holds for each row, by label, its values over x; `notes` what to add to the label; the marker "style" is
    that of the row's style.
    """
    for row, style in zip(table.rows, styles(table.rows)):
        if points := lines[row.label]:
            x, label = list(points), short(row.label, 100) + (notes or {}).get(row.label, "")
            shape = marker or ("o" if len(x) == 1 else "")  # a line through one point is invisible
            look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "lw": 1.9, "mfc": "white"}
            look["marker"] = style.marker if marker == "style" else shape
            axis.plot(x, [unit * summary.mean for summary in points.values()], label=label, **look)
            low, high = ([unit * summary.extremes[end] for summary in points.values()] for end in (0, 1))
            axis.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)


def several(rows: list[Row]) -> bool:
    """Return whether some row has several finished runs."""
    return any(len(row.finished) > 1 for row in rows)


def spread(table: Table) -> str:
    """Return what lines and bands show, for a caption."""
    return "Mean over seeds. Band: lowest to highest run." if several(table.rows) else "One run each."


def curves(table: Table, path: Path) -> str:
    """Draw learning curves, with published values as open markers."""
    what = kind(table.metric)
    kinds = dict.fromkeys((what, "perplexity"))
    metrics = [name for name in table.report["compare"] if table.has(name)]
    metrics += [f"{split}_{name}" for split in ("validation", "train") for name in kinds]
    metrics = [name for name in metrics if any(row.curve(name) for row in table.rows)]
    if not metrics:
        return ""
    x_label, with_published = short(table.report["x_axis"]), False
    sizes = {(row.settings["batch_size"], row.settings["block_size"]) for row in table.rows if row.ran}
    if x_label == "step" and what == "perplexity" and len(sizes) == 1:
        x_label += " (of {} × {} tokens)".format(*sizes.pop())
    figure, axes = plt.subplots(1, len(metrics), figsize=(min(WIDEST, 4.1 * len(metrics) + 0.6), 4.4), squeeze=False)
    for axis, name in zip(axes[0], metrics):
        lines = {row.label: row.curve(name) for row in table.rows}
        draw_lines(axis, table, lines, scale(name))
        for row, style in zip(table.rows, styles(table.rows)):
            points = published.curve(row.published, name) if table.comparable and row.published else []
            if points and lines[row.label]:
                x, y = zip(*((x, scale(name) * value) for x, value in points))
                axis.plot(x, y, style.marker, mfc="white", mec=style.colour, mew=1.4, ms=5)
                with_published = True
        axis.set(xlabel=x_label, ylabel=axis_label(name))
        if "perplexity" in name:
            set_log_scale(axis, [end for line in lines.values() for at in line.values() for end in at.extremes])
    save(figure, axes[0][0], path)
    return spread(table) + (" Open markers: published." if with_published else "")


def set_log_scale(axis: Axes, values: list[float]) -> None:
    """Draw values on a logarithmic scale if they span more than a factor of two."""
    if max(values) > 2 * min(values):
        axis.set_yscale("log")
        subs = (1, 2, 5) if max(values) > 20 * min(values) else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
        axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def dots(table: Table, path: Path) -> str:
    """Draw the test metrics of each run, with means, confidence intervals, published values and the best baseline."""
    what = kind(table.metric)
    comparable = ("bleu", "chrf") if what == "bleu" else (what,)  # kinds on one scale
    tested = [name for name in table.columns if name.startswith("test_") and "interval" not in name]
    metrics = sorted((name for name in tested if kind(name) in comparable), key=lambda name: name.endswith("_mean"))
    rows = [row for row in table.rows if row.values(table.metric)]
    if not rows or not metrics:
        return ""
    # Where a report chose its perplexities on test, so do the points beside them.
    best = what == "perplexity" and any(line.theirs.chosen == "best" for line in comparisons(table))
    width, height = 1.6 + 2.3 * len(metrics), 1.5 + 0.32 * len(rows)
    figure, axes = plt.subplots(1, len(metrics), figsize=(min(WIDEST, width), height), sharey=True, squeeze=False)
    dotted = diamonds = False
    for axis, name in zip(axes[0], metrics):
        diamonds |= draw_dots(axis, table, rows, name, best)
        dotted |= draw_best_baseline(axis, table, name)
        limit_to_points(axis)
        axis.set_title(TICKS.get(name, short(name.split("_", 2)[-1])))
        axis.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(rows)), [short(row.label, 60) for row in rows])
    axes[0][0].set_ylim(len(rows) - 0.4, -0.6)
    label = axis_label(metrics[0]).partition(",")[0] if len(comparable) == 1 else "test score, 0 to 100"
    label = "test accuracy (%)" if what == "accuracy" else label.replace(" (mean of tests)", "")
    axes[0][(len(metrics) - 1) // 2].set_xlabel(label + (", best of the run" if best else ""))
    save(figure, axes[0][0], path)
    caption = "Dots: runs. Line: mean and 95 % confidence interval" if several(rows) else "One run each"
    caption += ", of each text's best value on test during a run, as published" if best else ""
    return caption + "." + " Diamonds: published." * diamonds + " Dotted line: the best baseline." * dotted


def draw_dots(axis: Axes, table: Table, rows: list[Row], name: str, best: bool) -> bool:
    """Draw the runs of each row with their mean and interval; return whether a published value was drawn."""
    diamonds, unit = False, scale(name)
    style = dict(zip((row.label for row in table.rows), styles(table.rows)))
    for y, row in enumerate(rows):
        if not (summary := row.summary(name, best)):
            continue
        colour, marker = style[row.label].colour, style[row.label].marker
        spread = np.linspace(-0.2, 0.2, summary.n) if summary.n > 1 else [0.0]
        axis.plot(unit * summary.values, y + np.array(spread), ".", color=colour, alpha=0.55, ms=5, mew=0)
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


def limit_to_points(axis: Axes) -> None:
    """Cut off intervals that are much longer than the runs, baselines and published values are apart."""
    drawn = [np.asarray(line.get_xdata(), dtype=float) for line in axis.lines if line.get_linestyle() != "-"]
    if not drawn:
        return
    points = np.concatenate(drawn)
    low, high, room = points.min(), points.max(), 0.7 * np.ptp(points)
    if room:
        left, right = axis.get_xlim()
        axis.set_xlim(max(left, low - room), min(right, high + room))


def draw_best_baseline(axis: Axes, table: Table, name: str) -> bool:
    """Draw the best baseline as a dotted line; return whether there is one with this metric."""
    values = [(run.metrics.get(table.metric), run) for run in table.baselines]
    measured = [(value, run) for value, run in values if value is not None]
    if not measured:
        return False
    _, best = (max if table.report["higher_is_better"] else min)(measured, key=lambda pair: pair[0])
    value = best.metrics.get(name)
    if value is not None:
        axis.axvline(value * scale(name), color=INK, linestyle=(0, (1.5, 1.2)), linewidth=1.3, zorder=1)
    return value is not None


VERDICT_STYLES = {"supported": ("#0072B2", "o"), "inconclusive": ("#8a949e", "s"), "contradicted": ("#D55E00", "X")}


UNITS = {"accuracy": "test accuracy, points", "perplexity": "perplexity", "ratio": "ratio of perplexities"}


def forest(judgements: Sequence[Judgement], path: Path) -> str:
    """Draw the effect of each claim with its interval, positive as claimed; verdicts differ in colour and marker."""
    panels = defaultdict[str, list[Judgement]](list)
    for own in judgements:
        if not math.isnan(own.effect.interval[0]):
            panels["ratio" if " / " in own.metric else kind(own.metric).replace("known", "perplexity")].append(own)
    if not panels:
        return ""
    heights = [len(own) + 1 for own in panels.values()]
    size = (10.5, 0.25 * sum(heights) + 0.7 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, height_ratios=heights, squeeze=False)
    for axis, (unit, group) in zip(axes[:, 0], panels.items()):
        draw_effects(axis, group)
        axis.set_xlabel(f"effect, positive as claimed ({UNITS.get(unit, unit)})", fontsize=9)
    for verdict, (colour, marker) in VERDICT_STYLES.items():
        axes[0, 0].plot([], [], marker, color=colour, label=verdict)
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1.35, 1), ncols=3)
    write(figure, path)
    intervals = "95 % confidence intervals, over seeds or over seeds and sentences"
    return f"Effects of all claims with {intervals}; positive as claimed. Verdicts after Holm's correction."


def draw_effects(axis: Axes, judgements: Sequence[Judgement]) -> None:
    """Draw one line for each claim, on a scale that is linear around zero and logarithmic beyond."""
    ends = []
    for y, own in enumerate(judgements):
        unit = own.sign * scale(own.metric)
        low, mean, high = (
            unit * value for value in (own.effect.interval[0], own.effect.mean, own.effect.interval[1])
        )
        colour, marker = VERDICT_STYLES[own.verdict]
        axis.plot([low, high], [y, y], color=colour, lw=1.8)
        axis.plot(mean, y, marker, color=colour, ms=6.5)
        text = f"{number(own.metric, own.effect.mean, True)} {format_interval(own.metric, own.effect.interval, True)}"
        axis.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        ends += [abs(low), abs(high)]
    linear = float(np.median(ends))
    axis.set_xscale("symlog", linthresh=linear, linscale=1.5)
    ticks = sorted({float(f"{value:.0e}") for value in (linear / 2, linear, 4 * linear) if value < max(ends)})
    axis.set_xticks([*(-tick for tick in reversed(ticks)), 0, *ticks])
    axis.tick_params(labelsize=8)
    axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.minorticks_off()
    axis.axvline(0, color=INK, lw=0.9)
    names = [short(f"{own.by}: {own.says}", 100) for own in judgements]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)


def by_context_length(table: Table, path: Path) -> str:
    """Draw test perplexity over the length of the context, that of training as a filled marker."""
    lengths = table.lengths()
    values = {row.label: {length: row.at_length(length) for length in lengths} for row in table.rows}
    lines: Lines = {
        label: {length: value for length, value in line.items() if isinstance(value, Summary)}
        for label, line in values.items()
    }
    if not any(len(line) > 1 for line in lines.values()):
        return ""
    figure, axis = plt.subplots(figsize=(6.5, 4.4))
    ended = [label for label, line in lines.items() if len(line) == 1 and "cannot run" in values[label].values()]
    draw_lines(axis, table, lines, marker="o", notes=dict.fromkeys(ended, " (cannot run longer)"))
    for row, style in zip(table.rows, styles(table.rows)):
        if row.ran and (trained := row.settings["block_size"]) in lines[row.label]:
            axis.plot(trained, lines[row.label][trained].mean, "o", color=style.colour, ms=7)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.minorticks_off()
    label = "test perplexity per token (mean of tests)"
    axis.set(xlabel="context in the test (tokens)", ylabel=label)
    save(figure, axis, path)
    return spread(table) + " Filled marker: the context of training."


def by_source_length(table: Table, path: Path) -> str:
    """Draw BLEU and chrF over the length of the source; exact translations too, where these are more than a fifth."""
    buckets = table.source_lengths()
    if len(buckets) < 2:
        return ""
    shown = {"bleu": "test BLEU", "chrf": "test chrF"}
    exact = [row.summary("test_exact") for row in table.rows]
    if any(summary.mean > 0.2 for summary in exact if summary):
        shown["exact"] = "exact translations (%)"
    figure, axes = plt.subplots(1, len(shown), figsize=(4.5 * len(shown) + 0.4, 4.4), squeeze=False)
    for axis, (name, label) in zip(axes[0], shown.items()):
        lines = {row.label: source_points(row, name, buckets) for row in table.rows}
        draw_lines(axis, table, lines, scale(name), "style")
        axis.set_xticks(range(len(buckets)), [f"{short(bucket)}\n({count})" for bucket, count in buckets.items()])
        axis.set(xlabel="words of the source (sentences)", ylabel=label)
        axis.set_ylim(bottom=0)
    save(figure, axes[0][0], path)
    alone = "" if several(table.rows) else " Band: 95 % bootstrap confidence interval over sentences."
    return f"Each length on its own sentences. {spread(table)}{alone}"


def source_points(row: Row, name: str, buckets: Mapping[str, int]) -> dict[float, Summary]:
    """Return a metric of a row by the place of the bucket; the band of a single run is its spread over sentences."""
    summaries = [row.summary(f"test_{name}_at_{bucket}") for bucket in buckets]
    points = {float(place): summary for place, summary in enumerate(summaries) if summary}
    for summary, bucket in zip(points.values(), buckets):
        half = row.summary(f"test_{name}_interval_at_{bucket}")
        if summary.n == 1 and half:
            summary.extremes = (summary.mean - half.mean, summary.mean + half.mean)
    return points if len(points) == len(buckets) else {}


def save(figure: Any, first: Axes, path: Path) -> None:
    """Put the legend beside the axes and write the figure."""
    handles, labels = first.get_legend_handles_labels()
    if len(handles) > 1:
        place: Any = {"bbox_to_anchor": (1.0, 0.55), "bbox_transform": figure.transFigure}
        figure.legend(handles, labels, loc="center left", ncols=1 + len(handles) // 60, **place)
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write the figure with 256 colours, a third of the bytes."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    Image.open(content).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


FIGURES = {"dots": dots, "sources": by_source_length, "curves": curves, "lengths": by_context_length}


def draw_figures(
    tables: list[Table], output: OutputFolder, judgements: Sequence[Judgement] = ()
) -> dict[str, list[tuple[Path, str]]]:
    """Draw all figures and remove those of an earlier report; return files and captions by table, "" for claims."""
    figures: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    with plt.style.context(HERE / "figures.mplstyle"):
        if judgements and (caption := forest(judgements, path := output.file("figures/claims.png"))):
            figures[""].append((path, caption))
        for table in tables:
            for name, draw in FIGURES.items():
                path = output.file(f"figures/{table.name}_{name}.png")
                if caption := draw(table, path):
                    figures[table.name].append((path, caption))
                else:
                    path.unlink(missing_ok=True)
    output.remove_stale("figures/*.png")
    return figures
