"""The figures of the report. Each function takes a study and yields figures with their captions.

The colour of a variant follows from its settings, so it is the same in every figure. Marks beside a label are
cautions, as in the tables. No figure is wider than 12 inches; many variants or metrics take several figures.
"""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import yaml
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from speechformer.escape import one_line
from speechformer.report.labels import Variant, content
from speechformer.report.load import Study
from speechformer.report.statistics import Effect, Summary
from speechformer.report.tables import (
    at_length,
    cautions,
    differences,
    estimate,
    heading,
    legend,
    number,
    p_value,
    scale,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Figures = Iterator[tuple[Any, str]]  # with their captions
Lines = Mapping[str, Mapping[float, Summary]]  # by label and x
HERE = Path(__file__).parent
FORMATS = ("png", "svg", "pdf")
INK, GREY = "#1f2933", "#8a949e"
WIDEST = 11.7  # inches, without the margin
ROWS, PANELS, CURVES, BANDS = 30, 4, 16, 4  # at most in one figure; more bands than four hide each other
DASHES: list[tuple[Any, str]] = [("-", "o"), ((0, (4, 2)), "s"), ((0, (1.5, 1.5)), "^")]
DASHES += [((0, (6, 2, 1.5, 2)), "v"), ((0, (8, 3)), "D")]
SHADES = (0.0, 0.35, -0.4, 0.6, -0.65, 0.2, 0.5, -0.2, -0.5)  # towards white, or black
SIGNIFICANCE = {"better": ("#0072B2", "o"), "not significant": (GREY, "s"), "worse": ("#D55E00", "X")}


# Style


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield items in groups of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


class Style(NamedTuple):
    """How a variant is drawn."""

    color: str
    linestyle: Any
    marker: str


@functools.cache
def colours() -> dict[str, Any]:
    """Return `colours.yaml`."""
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
        size = settings.get("model.scale", 1.0)
        return colours()["alibi_scales"].get(size if isinstance(size, float | int) else None, other)
    return colours()["models"].get(model, other)


def styles(variants: Sequence[Variant]) -> list[Style]:
    """Return the style of each variant: those of one line and marker differ in colour, visibly."""
    chosen: list[Style] = []

    def distance(style: Style) -> float:
        alike = (to_rgb(other.color) for other in chosen if other.linestyle == style.linestyle)
        return min((sum(abs(a - b) for a, b in zip(to_rgb(style.color), other)) for other in alike), default=3.0)

    for variant in variants:
        possible = []
        for shade in SHADES:
            red, green, blue = ((1 - abs(shade)) * part + max(shade, 0) for part in to_rgb(colour(variant.settings)))
            possible += [Style(to_hex((red, green, blue)), *dash) for dash in DASHES]
        chosen.append(next((style for style in possible if distance(style) > 0.3), max(possible, key=distance)))
    return chosen


def style_of(study: Study) -> dict[str, Style]:
    """Return the style of each variant of a study by its label."""
    return dict(zip((variant.label for variant in study.variants), styles(study.variants)))


def wrapped(text: str, width: int = 44) -> str:
    """Return a text from outside on lines of at most `width` characters."""
    return textwrap.fill(one_line(text, 300), width)


def kind(metric: str) -> str:
    """Return what a metric measures: "accuracy" of `test_accuracy_in_train`."""
    return metric.partition("_")[2].partition("_")[0]


def axis_label(metric: str) -> str:
    """Return the name of a metric with its unit."""
    metric = one_line(metric, 60)
    split, what = metric.partition("_")[0], kind(metric)
    rest = metric.split("_", 2)[2].replace("_", " ") if metric.count("_") > 1 else ""
    if what == "accuracy":
        return f"{split} accuracy{', ' * bool(rest)}{rest} (%)"
    if what == "perplexity":
        return f"{split} perplexity per token" + (" (mean of tests)" if metric.endswith("mean") else "")
    return heading(metric)


def panel_title(metric: str) -> str:
    """Return what tells a metric from the others of its figure: "not in train", "length 20", "mean"."""
    parts = one_line(metric, 60).split("_", 2)
    return parts[2].replace("_", " ") if len(parts) > 2 else "all" if kind(metric) == "accuracy" else heading(metric)


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Any, list[Axes]]:
    """Return a figure with panels side by side, three at most or four in a square; inches are those of one."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    size = (min(WIDEST, width * columns + 2.2), height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def add_legend(figure: Any, axis: Axes) -> None:
    """Put the legend of several lines to the right of all panels."""
    handles, names = axis.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, [wrapped(name, 28) for name in names], loc="outside right center", handlelength=3.2)


def add_marks(figure: Any, marks: Mapping[str, Line2D], title: str) -> None:
    """Explain marks below the panels, and above it the label of all x axes."""
    for text, handle in marks.items():
        handle.set_label(one_line(text, 60))
    look: dict[str, Any] = {"fontsize": 9, "title": title, "title_fontsize": 10, "ncols": min(4, len(marks))}
    figure.legend(handles=list(marks.values()), loc="outside lower center", **look)


def rows_figure(labels: Sequence[str], columns: int, width: float) -> tuple[Any, list[Axes]]:
    """Return a figure whose panels share labelled rows, the first at the top."""
    texts = [wrapped(label) for label in labels]
    lines = max(text.count("\n") for text in texts) + 1
    longest = max(len(line) for text in texts for line in text.split("\n"))
    size = (min(WIDEST, 0.4 + 0.085 * longest + width * columns), 1.5 + len(labels) * (0.14 + 0.18 * lines))
    figure, axes = plt.subplots(1, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    axes[0][0].set_yticks(range(len(labels)), texts)
    axes[0][0].set_ylim(len(labels) - 0.4, -0.6)
    for axis in axes[0]:
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_locator(MaxNLocator(4))
    return figure, list(axes[0])


def limit(axis: Axes, points: Sequence[float]) -> str:
    """Cut off intervals, of two runs for example, that are much longer than the points are apart; say so if any."""
    left, right = axis.get_xlim()
    room = 1.2 * (max(points) - min(points))
    low, high = min(points) - room, max(points) + room
    if not room or (low <= left and right <= high):
        return ""
    axis.set_xlim(max(left, low), min(right, high))
    return " Intervals longer than the axis are cut."


def explained(marks: str) -> str:
    """Return what the marks of a figure mean, for its caption."""
    return f" {legend(marks)}." if marks else ""


# Figures of a study


def dots(study: Study) -> Figures:
    """Draw the test metrics of each run, with means, confidence intervals and the best baseline."""
    what = kind(study.metric)
    comparable = ("bleu", "chrf") if what == "bleu" else (what,)  # kinds on one scale
    tested = [name for name in study.columns if name.startswith("test_") and "interval" not in name]
    metrics = sorted((name for name in tested if kind(name) in comparable), key=lambda name: name.endswith("_mean"))
    variants = [variant for variant in study.variants if study.values(variant.label, study.metric)]
    metrics = [name for name in metrics if any(study.values(variant.label, name) for variant in variants)]
    repeated = bool((study.runs[study.runs["status"] == "finished"].groupby("variant").size() > 1).any())
    look = style_of(study)
    for group in batches(variants, ROWS):
        for names in batches(metrics, PANELS):
            marks = {v.label: cautions(study, v.label, study.metric) for v in group}
            figure, axes = rows_figure([f"{v.label} {marks[v.label]}".strip() for v in group], len(names), 2.1)
            drawn, cut = dict[str, Line2D](), ""
            for axis, name in zip(axes, names):
                axis.set_title(panel_title(name))
                points = []
                for y, variant in enumerate(group):
                    if (summary := study.summary(variant.label, name)) is not None:
                        points += draw_dots(axis, y, summary, scale(name), look[variant.label])
                cut = (limit(axis, points) if points else "") or cut
                drawn |= draw_baseline(axis, study, name)
            label = axis_label(names[0]).partition(",")[0].replace(" (mean of tests)", "").removesuffix(" (%)")
            label = label if len(comparable) == 1 else "test score, 0 to 100"
            direction = "higher" if study.higher_is_better else "lower"
            mean = "mean, 95 % confidence interval" if repeated else "one run"
            about = {"run": Line2D([], [], ls="", marker=".", color=INK, alpha=0.55)} if repeated else {}
            about[mean] = Line2D([], [], ls="-" if repeated else "", color=INK, marker="o", mfc="white")
            title = f"{label}{' (%)' * (what == 'accuracy')}, {direction} is better"
            add_marks(figure, {**about, **drawn}, title)
            caption = "Dots: runs. Line: mean and 95 % confidence interval" if repeated else "One run each"
            yield figure, f"{caption}.{cut}{explained(''.join(marks.values()))}"


def draw_dots(axis: Axes, y: float, summary: Summary, unit: float, style: Style) -> list[float]:
    """Draw the runs of a variant with their mean and interval; return the points."""
    points = [unit * value for value in summary.values]
    axis.plot(
        points, y + np.linspace(-0.2, 0.2, summary.n) * (summary.n > 1), ".", color=style.color, alpha=0.7, ms=6
    )
    if summary.varies:
        axis.plot([unit * end for end in summary.confidence_interval], [y, y], color=INK, lw=1.6, zorder=3)
    axis.plot(unit * summary.mean, y, style.marker, color=style.color, mec=INK, ms=6.5, zorder=4)
    return points


def draw_baseline(axis: Axes, study: Study, metric: str) -> dict[str, Line2D]:
    """Draw the best baseline as a dotted line, if it is not far; return the mark for the legend, with its value."""
    if not {study.metric, metric} <= set(study.baselines):
        return {}
    rows = study.baselines.dropna(subset=[study.metric, metric]).sort_values(study.metric)
    if rows.empty:
        return {}
    best = rows.iloc[-1 if study.higher_is_better else 0]
    place, (left, right) = best[metric] * scale(metric), axis.get_xlim()
    if abs(place - (left + right) / 2) > right - left:
        return {f"{best['variant']}, beyond the axis": Line2D([], [], ls="")}
    axis.axvline(place, color=INK, linestyle=":", linewidth=1.3, zorder=1)
    margin = 0.05 * (right - left)
    axis.set_xlim(min(left, place - margin), max(right, place + margin))
    return {best["variant"]: Line2D([], [], color=INK, linestyle=":", lw=1.3)}


def draw_effect(axis: Axes, y: float, effect: Effect, unit: float, look: tuple[str, str]) -> None:
    """Draw an effect, times `unit`, with its interval."""
    if not math.isnan(effect.interval[0]):
        axis.plot([unit * end for end in effect.interval], [y, y], color=look[0], lw=1.8, zorder=3)
    axis.plot(unit * effect.mean, y, look[1], color=look[0], ms=6.5, zorder=4)


def beside(axis: Axes, y: float, text: str) -> None:
    """Write the number of an effect to the right of its line."""
    axis.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def forest(study: Study) -> Figures:
    """Draw each variant minus the reference with its interval; colours show what is significant after correction."""
    family, better = differences(study), 1 if study.higher_is_better else -1
    for metric in dict.fromkeys(difference.metric for difference in family):
        for group in batches([difference for difference in family if difference.metric == metric], ROWS):
            figure, (axis,) = rows_figure([difference.label for difference in group], 1, 7.0)
            axis.axvline(0, color=INK, lw=0.9)
            points = [0.0]
            for y, difference in enumerate(group):
                effect = difference.effect
                sign = better * effect.mean * (difference.p < 0.05)
                look = SIGNIFICANCE["better" if sign > 0 else "worse" if sign < 0 else "not significant"]
                seeds = [scale(metric) * value for value in seed_differences(study, difference.label, metric, effect)]
                places = y + np.linspace(-0.2, 0.2, len(seeds)) if len(seeds) > 1 else [y]
                axis.plot(seeds, places, ".", color=look[0], alpha=0.5, ms=5, mew=0)
                draw_effect(axis, y, effect, scale(metric), look)
                p = "" if math.isnan(difference.p) else f", p = {p_value(difference.p)}".replace("= <", "<")
                beside(axis, y, estimate(metric, effect) + p)
                points += [scale(metric) * effect.mean, *seeds]
            cut = limit(axis, points)
            direction = "higher" if study.higher_is_better else "lower"
            title = wrapped(f"{axis_label(metric)}, minus that of {study.reference} ({direction} is better)", 80)
            shown = SIGNIFICANCE.items()
            add_marks(figure, {text: Line2D([], [], color=own[0], marker=own[1]) for text, own in shown}, title)
            caption = f"Each row minus {study.reference}, with the 95 % confidence interval of the difference."
            yield figure, f"{caption} Dots: seeds. Colours and p-values: after Holm's correction.{cut}"


def seed_differences(study: Study, label: str, metric: str, effect: Effect) -> Iterator[float]:
    """Yield the difference of each seed, of paired ones; else each run minus the mean of the reference."""
    reference = study.values(study.reference, metric)
    mean = sum(reference.values()) / len(reference)
    for seed, value in study.values(label, metric).items():
        if not effect.paired:
            yield value - mean
        elif seed in reference:
            yield value - reference[seed]


def draw_lines(
    axis: Axes,
    study: Study,
    lines: Lines,
    unit: float = 1,
    marker: bool = False,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Draw a line for each variant through its means; of a few, a band from the lowest to the highest run.

    Args:
        marker: whether to draw the marker of the variant at each point.
        notes: what to add to labels.
    """
    look = style_of(study)
    for label, points in lines.items():
        x, style = list(points), look[label]
        y = [unit * summary.mean for summary in points.values()]
        shape = style.marker if marker or len(x) == 1 else ""  # a line through one point is invisible
        name = label + (notes or {}).get(label, "")
        axis.plot(x, y, lw=1.9, mfc="white", label=name, **{**style._asdict(), "marker": shape})
        if len(lines) <= BANDS:
            low, high = ([unit * summary.extremes[end] for summary in points.values()] for end in (0, 1))
            axis.fill_between(x, low, high, color=style.color, alpha=0.18, linewidth=0)


def spread(study: Study, lines: Lines) -> str:
    """Return what lines and bands show, for a caption."""
    repeated = any(summary.n > 1 for points in lines.values() for summary in points.values())
    band = " Band: lowest to highest run." if len(lines) <= BANDS else ""
    return f"Mean over seeds.{band}" if repeated else "One run each."


def curves(study: Study) -> Figures:
    """Draw learning curves."""
    kinds = dict.fromkeys((kind(study.metric), "perplexity"))
    metrics = [name for name in study.compare if study.has(name)]
    metrics += [f"{split}_{name}" for split in ("validation", "train") for name in kinds]
    for group in batches(study.variants, CURVES):
        lines_of: dict[str, dict[str, dict[float, Summary]]] = {}
        for name in dict.fromkeys(metrics):
            lines = {v.label: points for v in group if (points := study.curve(v.label, name))}
            if any(len(points) > 1 for points in lines.values()):
                lines_of[name] = lines
        if not lines_of:
            continue
        x_label = one_line(study.x_axis, 40)
        settings = [variant.settings for variant in study.settled()]
        sizes = {(own["batch_size"], own["block_size"]) for own in settings}
        if x_label == "step" and kind(study.metric) == "perplexity" and len(sizes) == 1:
            x_label += " (of {} × {} tokens)".format(*sizes.pop())
        figure, axes = panels(len(lines_of), 3.6, 3.6)
        for axis, (name, lines) in zip(axes, lines_of.items()):
            draw_lines(axis, study, lines, scale(name))
            axis.set(xlabel=x_label, ylabel=wrapped(axis_label(name), 28))
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        set_log_scale([axis for axis, name in zip(axes, lines_of) if "perplexity" in name])
        add_legend(figure, max(axes, key=lambda axis: len(axis.lines)))
        yield figure, spread(study, max(lines_of.values(), key=len))


def set_log_scale(axes: Sequence[Axes]) -> None:
    """Draw the values of all axes on a logarithmic scale, and say so, if some span more than a factor of two."""
    values = [np.concatenate([line.get_ydata() for line in axis.lines]).astype(float) for axis in axes]
    if not any(own.max() > 2 * own.min() > 0 for own in values):
        return
    for axis, own in zip(axes, values):
        axis.set_yscale("log")
        axis.set_ylabel(f"{axis.get_ylabel()}, log scale")
        factor = own.max() / own.min()
        locator = LogLocator(subs=(1, 2, 5) if factor > 20 else (1, 1.5, 2, 3, 4, 5, 6, 8))
        axis.yaxis.set_major_locator(locator if factor > 2 else MaxNLocator(5))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(NullLocator())


def context_lengths(study: Study) -> Figures:
    """Draw test perplexity over the length of the context, that of training as a filled marker."""
    lengths = study.lengths()
    values = {v.label: {n: at_length(study, v.settings, v.label, n) for n in lengths} for v in study.variants}
    lines = {
        label: {float(length): value for length, value in line.items() if isinstance(value, Summary)}
        for label, line in values.items()
    }
    lines = {label: line for label, line in lines.items() if line}
    if not any(len(line) > 1 for line in lines.values()):
        return
    figure, (axis,) = panels(1, 6.5, 4.4)
    ended = [label for label, line in lines.items() if len(line) == 1 and "cannot run" in values[label].values()]
    draw_lines(axis, study, lines, marker=True, notes=dict.fromkeys(ended, " (cannot run longer)"))
    for variant in study.settled():
        if (trained := variant.settings["block_size"]) in lines.get(variant.label, {}):
            colour_of = style_of(study)[variant.label].color
            axis.plot(trained, lines[variant.label][trained].mean, "o", color=colour_of, ms=7)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.minorticks_off()
    axis.set(xlabel="context in the test (tokens)", ylabel="test perplexity per token (mean of tests)")
    add_legend(figure, axis)
    yield figure, spread(study, lines) + " Filled marker: the context of training."


def source_lengths(study: Study) -> Figures:
    """Draw BLEU and chrF over the length of the source; exact translations too, where these are more than a fifth."""
    buckets = study.source_lengths()
    shown = {"bleu": "test BLEU", "chrf": "test chrF"}
    exact = [study.summary(variant.label, "test_exact") for variant in study.variants]
    if any(summary.mean > 0.2 for summary in exact if summary):
        shown["exact"] = "exact translations (%)"
    lines_of: dict[str, dict[str, dict[float, Summary]]] = {}
    for name in shown:
        lines: dict[str, dict[float, Summary]] = {}
        for variant in study.variants:
            summaries = [study.summary(variant.label, f"test_{name}_at_{bucket}") for bucket in buckets]
            points = {float(place): summary for place, summary in enumerate(summaries) if summary}
            if points and len(points) == len(buckets):
                lines[variant.label] = points
        if lines:
            lines_of[name] = lines
    if len(buckets) < 2 or not lines_of:
        return
    figure, axes = panels(len(lines_of), 3.6, 3.8)
    for axis, (name, lines) in zip(axes, lines_of.items()):
        draw_lines(axis, study, lines, scale(name), marker=True)
        axis.set_xticks(range(len(buckets)), [f"{one_line(bucket, 20)}\n({n})" for bucket, n in buckets.items()])
        axis.set(xlabel="words of the source (sentences)", ylabel=shown[name])
        axis.set_ylim(bottom=0)
    add_legend(figure, axes[0])
    yield figure, f"Each length on its own sentences. {spread(study, lines_of[next(iter(lines_of))])}"


# Factors: settings in which variants differ


def factors(variants: Sequence[Variant]) -> dict[str, list[Any]]:
    """Return the settings in which variants differ, those that change together once; {} if a variant lacks one."""
    values: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for variant in variants for key in variant.overrides):
        if any(key not in variant.settings for variant in variants):
            return {}
        column = [variant.settings[key] for variant in variants]
        parts = [[other.index(value) for value in other] for other in (column, *values.values())]
        if parts[0] not in parts[1:]:
            values[key] = column
    return values


def is_numeric(values: Sequence[Any]) -> bool:
    """Return whether there are three different numbers or more."""
    return len({*map(str, values)}) > 2 and all(type(value) in (int, float) for value in values)


def factor_grid(study: Study) -> Figures:
    """Draw the main metrics over the two settings in which the variants differ, or over one that is numeric.

    A number on the x axis gives lines; two settings that are not give a heat map.
    """
    variants = [variant for variant in study.variants if study.values(variant.label, study.metric)]
    values = factors(variants)
    metrics = [name for name in dict.fromkeys([study.metric, *study.compare]) if study.has(name)]
    keys = sorted(values, key=lambda key: (not is_numeric(values[key]), -len({*map(str, values[key])})))
    if not metrics or len(keys) not in (1, 2) or (len(keys) == 1 and not is_numeric(values[keys[0]])):
        return
    changed = {key for variant in variants for key in variant.overrides}
    if len(keys) == 1 and sum(is_numeric([v.settings[key] for v in variants]) for key in changed) > 1:
        return  # settings that were drawn at random, not one after the other
    cells = {tuple(str(values[key][place]) for key in keys) for place in range(len(variants))}
    if len(cells) < len(variants) or (len(keys) == 2 and len(cells) in [len({*own}) for own in zip(*cells)]):
        return  # more differs than these, or one of them follows from the other
    lines = is_numeric(values[keys[0]]) and (len(keys) == 1 or len({*map(str, values[keys[1]])}) <= 8)
    draw = factor_lines if lines else heat_map
    yield draw(study, variants, {key: values[key] for key in keys}, metrics)


def factor_name(key: str) -> str:
    """Return the name of a factor for an axis."""
    key = key.removesuffix(".name")
    words = content()["keys"].get(key, "").replace("{}", "").strip()
    return words or one_line(key.rpartition(".")[2].replace("_", " "), 40)


def factor_lines(
    study: Study, variants: Sequence[Variant], values: dict[str, list[Any]], metrics: Sequence[str]
) -> tuple[Any, str]:
    """Draw each metric over the first factor, with a line for each value of the second one."""
    key, *others = values
    figure, axes = panels(len(metrics), 4.4, 4.2)
    second = values[others[0]] if others else [None] * len(variants)
    groups = {str(value): [v for v, own in zip(variants, second) if own == value] for value in second}
    looks = styles([group[0] for group in groups.values()])
    for axis, metric in zip(axes, metrics):
        for group, style in zip(groups.values(), looks):
            points = {v.settings[key]: s for v in group if (s := study.summary(v.label, metric)) is not None}
            for at, summary in points.items():
                runs = scale(metric) * summary.values
                axis.plot([at] * summary.n, runs, ".", color=style.color, alpha=0.5, ms=5, mew=0)
                ends = [scale(metric) * end for end in summary.confidence_interval]
                axis.plot([at, at], ends, color=style.color, lw=1.2)
            name = group[0].words[others[0]] if others else None
            means = [scale(metric) * points[at].mean for at in sorted(points)]
            axis.plot(sorted(points), means, lw=1.9, label=name, **style._asdict())
        set_ticks(axis, sorted(set(values[key])))
        axis.set(xlabel=factor_name(key), ylabel=wrapped(axis_label(metric), 28))
    if others:
        add_legend(figure, axes[0])
    return figure, f"Mean over seeds by {factor_name(key)}. Dots: runs. Bars: 95 % confidence interval of the mean."


def set_ticks(axis: Axes, values: Sequence[float]) -> None:
    """Put ticks at the values of a factor, on a logarithmic scale if they span more than a factor of eight."""
    if values[0] > 0 and values[-1] > 8 * values[0]:
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    if len(values) <= 8:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.tick_params(axis="x", rotation=40 if sum(len(f"{value:g}") for value in values) > 20 else 0)


def heat_map(
    study: Study, variants: Sequence[Variant], values: dict[str, list[Any]], metrics: Sequence[str]
) -> tuple[Any, str]:
    """Draw each metric as colours and numbers, with a row for each value of one factor and a column of the other."""
    down, across = values
    names = [dict(zip(map(str, values[key]), (v.words[key] for v in variants))) for key in values]
    size = [len(own) for own in names]
    figure, axes = panels(len(metrics), 1.4 + 0.85 * size[1], 1.7 + 0.42 * size[0])
    for axis, metric in zip(axes, metrics):
        means = np.full(size, np.nan)
        for variant, *place in zip(variants, values[down], values[across]):
            if (summary := study.summary(variant.label, metric)) is not None:
                means[tuple([*own].index(str(value)) for own, value in zip(names, place))] = summary.mean
        best = np.nanmax(means) if study.higher_is_better else np.nanmin(means)
        axis.imshow(scale(metric) * means, cmap="cividis", aspect="auto")
        for (y, x), mean in np.ndenumerate(means):
            look: dict[str, Any] = {"ha": "center", "va": "center", "weight": "bold" if mean == best else "normal"}
            look["color"] = "white" if mean < (np.nanmin(means) + np.nanmax(means)) / 2 else INK
            axis.text(x, y, number(metric, mean), **look)
        for own, ticks in zip(names, (axis.set_yticks, axis.set_xticks)):
            ticks(range(len(own)), [wrapped(text, 16) for text in own.values()])
        axis.tick_params(axis="x", rotation=0 if size[1] < 4 else 40, length=0)
        axis.set_title(axis_label(metric))
        axis.grid(visible=False)
    return figure, f"Mean over seeds by {factor_name(down)} and {factor_name(across)}. Bold: best."


FIGURES: list[Callable[[Study], Figures]] = [
    dots,
    forest,
    factor_grid,
    source_lengths,
    curves,
    context_lengths,
]


# Files


def search_figures(search: Any) -> Figures:
    """Draw the history of a search and, with four different scores or more, the importance of its settings."""
    from optuna import importance, visualization

    scores = {trial.value for trial in search.trials if trial.state.name == "COMPLETE"}
    axis: Any = visualization.matplotlib.plot_optimization_history(search, target_name="score on held-out data")
    axis.figure.set_size_inches(7, 4)
    yield axis.figure, "The score of each trial, and the best so far."
    if len(scores) >= 4:
        evaluator = importance.FanovaImportanceEvaluator(seed=0)
        axis = visualization.matplotlib.plot_param_importances(search, evaluator=evaluator)
        axis.figure.set_size_inches(7, 4)
        yield axis.figure, "The share of the score's variance that each setting explains (fANOVA)."


def write(figure: Any, file: Callable[[str], Path], name: str, formats: Sequence[str] = FORMATS) -> Path:
    """Write a figure as PNG, with 256 colours and so a third of the bytes, and in other formats; return the PNG.

    Args:
        file: returns the path of a file by its name, such as `OutputFolder.file`.
    """
    look: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.1, "facecolor": "white"}
    path = file(f"figures/{name}.png")
    png = io.BytesIO()
    figure.savefig(png, **look)
    Image.open(png).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    for form, undated in {"svg": "Date", "pdf": "CreationDate"}.items():  # the same results give the same bytes
        if form in formats:
            figure.savefig(file(f"figures/{name}.{form}"), metadata={undated: None}, **look)
    plt.close(figure)
    return path


def style() -> Any:
    """Return the context in which the figures are drawn."""
    return plt.style.context(HERE / "figures.mplstyle")
