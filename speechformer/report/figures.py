"""The figures of the report. Each function takes a study and yields figures with their captions.

A variant has the same colour in every figure of its study. Marks beside a label are cautions, as in the tables. No
figure is wider than 12 inches.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from PIL import Image

from speechformer.escape import drawable, missing_glyphs
from speechformer.report.labels import in_words
from speechformer.report.load import Study
from speechformer.report.statistics import Effect, Summary
from speechformer.report.tables import (
    at_length,
    cautions,
    differences,
    direction,
    estimate,
    heading,
    legend,
    p_value,
    scale,
    within_scale,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Figures = Iterator[tuple[Figure, str]]  # with their captions
Lines = Mapping[str, Mapping[float, Summary]]  # by label and x
FORMATS = ("png", "svg", "pdf")
INK = "#1f2933"
WIDEST = 11.7  # inches, without the margin
PANELS, CURVES, BANDS = 4, 16, 4  # at most side by side; lines of a figure; more bands than four hide each other
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#882255", "#7a7a7a")
DASHES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
LOOKS: list[dict[str, Any]] = [
    {"ls": dash, "marker": mark, "color": color} for (dash, mark), color in itertools.product(DASHES, COLOURS)
]
SIGNIFICANCE = {"better": ("#0072B2", "o"), "not significant": ("#8a949e", "s"), "worse": ("#D55E00", "X")}


def style() -> AbstractContextManager[None]:
    """Return the context in which the figures are drawn."""
    return plt.style.context(Path(__file__).with_name("figures.mplstyle"))


def wrapped(text: str, width: int = 44) -> str:
    """Return a text from outside on lines of at most `width` characters."""
    return textwrap.fill(drawable(text, 300), width)


def is_better(study: Study) -> str:
    """Return which values of the main metric are better."""
    return "higher is better" if study.higher_is_better else "lower is better"


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, four at most; inches are those of one."""
    columns = min(count, PANELS)
    rows = -(-count // columns)
    options["figsize"] = (min(WIDEST, width * columns + 2.2), height * rows)
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def row_panels(labels: Sequence[str], count: int, width: float) -> tuple[Figure, list[Axes]]:
    """Return a figure whose panels share labelled rows, the first at the top."""
    texts = [wrapped(label) for label in labels]
    lines = max(text.count("\n") for text in texts) + 1
    figure, axes = panels(count, width, 1.2 + len(labels) * (0.14 + 0.18 * lines), sharey=True)
    axes[0].set_yticks(range(len(labels)), texts)
    axes[0].set_ylim(len(labels) - 0.4, -0.6)
    for axis in axes:
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.margins(x=0.2)
    return figure, axes


def add_legend(figure: Figure, axis: Axes, **options: Any) -> None:
    """Put the legend of several lines beside or below all panels."""
    handles, names = axis.get_legend_handles_labels()
    if len(handles) > 1:
        options = {"loc": "outside right center", **options}
        figure.legend(handles, [wrapped(name, 28) for name in names], **options)


def spread_out(y: float, count: int) -> np.ndarray:
    """Return the height of each of several dots of a row."""
    return y + np.linspace(-0.2, 0.2, count) * (count > 1)


def looks(study: Study) -> dict[str, dict[str, Any]]:
    """Return how lines and markers of each variant look."""
    return dict(zip((variant.label for variant in study.variants), itertools.cycle(LOOKS)))


# Figures of a study


def dots(study: Study) -> Figures:
    """Draw the test metrics of each run, with means, confidence intervals and the best baseline."""
    split = study.metric.split("_")[:2]
    metrics = [name for name in study.columns if name.split("_")[:2] == split and direction(study, name)]
    variants = study.finished_variants()
    if not metrics:
        return
    marks = [cautions(study, variant.label, study.metric) for variant in variants]
    labels = [f"{variant.label} {mark}".strip() for variant, mark in zip(variants, marks)]
    figure, axes = row_panels(labels, len(metrics), 2.3)
    for axis, metric in zip(axes, metrics):
        axis.set_title(wrapped(heading(metric), 24))
        rows = [(y, v.label, own) for y, v in enumerate(variants) if (own := study.summary(v.label, metric))]
        for y, label, summary in rows:
            color = looks(study)[label]["color"]
            axis.plot(scale(metric) * summary.values, spread_out(y, summary.n), ".", color=color, alpha=0.7)
            axis.plot(scale(metric) * summary.mean, y, "o", color=color, mec=INK, zorder=4)
        axis.set_xlim(axis.get_xlim())  # of the dots
        for y, _, summary in rows:
            axis.plot(scale(metric) * np.array(summary.confidence_interval), [y, y], color=INK, lw=1.6, zorder=3)
        for value in study.baselines.get(metric, pd.Series()).dropna():
            axis.axvline(scale(metric) * value, color=INK, linestyle=":", lw=1.3, zorder=1)
    figure.supxlabel(f"{is_better(study)}; dots: runs; circle and line: mean, 95 % confidence interval", fontsize=10)
    caption = "Intervals longer than the axis are cut. Dotted: baselines, where they are within the axis."
    yield figure, caption + legend("".join(marks))


def draw_effect(axis: Axes, y: float, effect: Effect, unit: float, color: str, marker: str) -> None:
    """Draw an effect, times `unit`, with its interval."""
    half = unit * (effect.interval[1] - effect.mean)
    axis.errorbar(unit * effect.mean, y, xerr=half, fmt=marker, color=color, ms=6.5, lw=1.8, zorder=3)


def write_beside(axis: Axes, y: float, text: str) -> None:
    """Write the number of an effect to the right of its line."""
    axis.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def forest(study: Study) -> Figures:
    """Draw each variant minus the reference with its interval; colours show what is significant after correction."""
    for metric, group in itertools.groupby(differences(study), key=lambda difference: difference.metric):
        found, unit, reference = [*group], scale(metric), study.values(study.reference, metric)
        figure, (axis,) = row_panels([difference.label for difference in found], 1, 7.0)
        significance = []
        for y, difference in enumerate(found):
            sign = difference.effect.mean * (difference.p < 0.05) * (1 if study.higher_is_better else -1)
            significance.append(SIGNIFICANCE["better" if sign > 0 else "worse" if sign < 0 else "not significant"])
            values = pd.Series(study.values(difference.label, metric))
            less = pd.Series(reference) if difference.effect.paired else np.mean([*reference.values()])
            seeds = unit * (values - less).dropna()
            axis.plot(seeds, spread_out(y, len(seeds)), ".", color=significance[-1][0], alpha=0.5, ms=5, mew=0)
            p = "" if math.isnan(difference.p) else f", p = {p_value(difference.p)}".replace("= <", "<")
            write_beside(axis, y, estimate(metric, difference.effect) + p)
        axis.axvline(0, color=INK, lw=0.9)
        axis.set_xlim(axis.get_xlim())  # of the dots
        for y, (difference, look) in enumerate(zip(found, significance)):
            draw_effect(axis, y, difference.effect, unit, *look)
        for text, (color, marker) in SIGNIFICANCE.items():
            axis.plot([], [], marker, color=color, label=text)
        axis.set_xlabel(wrapped(f"{heading(metric)}, minus that of {study.reference} ({is_better(study)})", 80))
        add_legend(figure, axis, loc="outside lower center", ncols=3)
        caption = f"Each row minus {study.reference}, with the 95 % confidence interval of the difference, which is "
        yield figure, caption + "cut at the axis. Dots: seeds. Colours and p-values: after Holm's correction."


def draw_lines(
    study: Study, panels_of: Mapping[str, tuple[float, Lines]], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Draw panels (by the label of y: unit, lines) with a line for each variant through its means.

    Of a few variants, a band goes from the lowest to the highest run.
    """
    figure, axes = panels(len(panels_of), 3.6 if len(panels_of) > 1 else 6.5, 3.8)
    for axis, (name, (unit, lines)) in zip(axes, panels_of.items()):
        axis.set(ylabel=wrapped(name, 28), **options)
        for label, points in lines.items():
            x, means = [*points], [unit * summary.mean for summary in points.values()]
            axis.plot(x, means, lw=1.9, mfc="white", label=label, markevery=-(-len(x) // 10), **looks(study)[label])
            if len(lines) <= BANDS:
                low, high = ([unit * summary.extremes[end] for summary in points.values()] for end in (0, 1))
                axis.fill_between(x, low, high, color=looks(study)[label]["color"], alpha=0.18, linewidth=0)
    add_legend(figure, max(axes, key=lambda axis: len(axis.lines)), handlelength=3.2)
    return figure, axes


SPREAD = f"Mean over seeds; of at most {BANDS} rows, the band goes from the lowest to the highest run."


def curves(study: Study) -> Figures:
    """Draw learning curves."""
    metrics = [*study.compare, *(name for name in study.curves if name.startswith(("validation_", "train_")))]
    metrics = [name for name in metrics if direction(study, name) and (name in study.compare or name.count("_") == 1)]
    panels_of = {}
    for name in dict.fromkeys(metrics):
        lines = {v.label: points for v in study.variants[:CURVES] if (points := study.curve(v.label, name))}
        if any(len(points) > 1 for points in lines.values()):
            panels_of[heading(name)] = (scale(name), lines)
    if not panels_of:
        return
    figure, axes = draw_lines(study, panels_of, xlabel=drawable(study.x_axis, 40))
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        values = np.concatenate([line.get_ydata() for line in axis.lines]).astype(float)
        if "perplexity" in axis.get_ylabel() and values.max() > 2 * values.min() > 0:
            axis.set_yscale("log")
            axis.set_ylabel(f"{axis.get_ylabel()}, log scale")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())
    more = f" The first {CURVES} rows." if len(study.variants) > CURVES else ""
    yield figure, SPREAD + more


def context_lengths(study: Study) -> Figures:
    """Draw test perplexity over the length of the context, that of training as a filled marker."""
    lengths = study.lengths()
    lines = {}
    for variant in study.variants:
        values = {float(length): at_length(study, variant, length) for length in lengths}
        if line := {x: value for x, value in values.items() if isinstance(value, Summary)}:
            lines[variant.label] = line
    if not any(len(line) > 1 for line in lines.values()):
        return
    name = heading(study.metric)
    figure, (axis,) = draw_lines(study, {name: (1.0, lines)}, xlabel="context in the test (tokens)")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, list(map(str, lengths)))
    yield figure, f"{SPREAD} A model whose line ends cannot run longer."


def source_lengths(study: Study) -> Figures:
    """Draw BLEU and chrF over the length of the source; exact translations too, where these are more than a fifth."""
    buckets = study.source_lengths()
    exact = [own.mean for v in study.variants if (own := study.summary(v.label, "test_exact"))]
    panels_of = {}
    for name in ("test_bleu", "test_chrf", *(["test_exact"] if max(exact, default=0) > 0.2 else [])):
        lines = {}
        for variant in study.finished_variants():
            points = [study.summary(variant.label, f"{name}_at_{bucket}") for bucket in buckets]
            if points and all(points):
                lines[variant.label] = {float(x): own for x, own in enumerate(points) if own}
        if lines:
            panels_of[heading(name)] = (scale(name), lines)
    if len(buckets) < 2 or not panels_of:
        return
    figure, axes = draw_lines(study, panels_of, xlabel="words of the source (sentences)")
    for axis in axes:
        axis.set_xticks(range(len(buckets)), [f"{drawable(bucket, 20)}\n({n})" for bucket, n in buckets.items()])
        axis.set_ylim(bottom=0)
    yield figure, f"Each length on its own sentences. {SPREAD}"


def factor_grid(study: Study) -> Figures:
    """Draw the main metrics over the two settings in which the variants differ, or over one that is numeric.

    The first is on the x axis, a number if one is; each value of the second has a colour.
    """
    variants = study.finished_variants()
    metrics = [name for name in dict.fromkeys([study.metric, *study.compare]) if study.has(name)]
    keys = list(dict.fromkeys(key for variant in variants for key in variant.overrides))
    settings = pd.DataFrame([variant.settings for variant in variants], dtype=object).reindex(columns=keys)
    is_numeric = settings.map(type).isin([int, float]).all() & (settings.astype(str).nunique() > 2)
    codes = settings.astype(str).apply(lambda column: pd.factorize(column)[0])
    factors = sorted(codes.T.drop_duplicates().index, key=lambda key: not is_numeric[key])  # together: the first
    cells = len(codes.drop_duplicates())
    if not metrics or settings.isna().any(axis=None) or len(factors) not in (1, 2) or cells < len(variants):
        return
    if len(factors) == 1 and is_numeric.sum() != 1:  # no number, or several that were drawn at random
        return
    if len(factors) == 2 and cells in codes[factors].nunique().tolist():  # one follows from the other
        return
    first, second = (factors * 2)[:2]
    frame = pd.DataFrame({"x": [variant.words[first] for variant in variants]})
    frame["line"] = [variant.words[second] if len(factors) == 2 else "" for variant in variants]
    names = frame["x"].unique()
    frame["x"] = settings[first].astype(float) if is_numeric[first] else pd.factorize(frame["x"])[0]
    figure, axes = panels(len(metrics), 4.4, 4.2)
    for axis, metric in zip(axes, metrics):
        summaries = [Summary(study.values(variant.label, metric).values()) for variant in variants]
        frame["mean"] = [scale(metric) * own.mean for own in summaries]
        ends = [within_scale(metric, own.confidence_interval) for own in summaries]
        frame[["low", "high"]] = scale(metric) * np.array(ends)
        lines = frame.sort_values("x").groupby("line", sort=False)
        for place, ((name, line), look) in enumerate(zip(lines, itertools.cycle(LOOKS))):
            if not is_numeric[first]:  # side by side, without a line
                line, look = line.assign(x=line["x"] + 0.6 * (place / len(lines) - 0.5)), {**look, "ls": ""}
            errors = np.abs(line[["low", "high"]].T.to_numpy() - line["mean"].to_numpy())
            axis.errorbar(line["x"], line["mean"], errors, label=str(name), lw=1.9, **look)
        factor = drawable(in_words(f"{first.removesuffix('.name')}=", {}), 40)
        axis.set(xlabel=factor, ylabel=wrapped(heading(metric), 28))
        if is_numeric[first]:
            ticks = sorted(set(frame["x"]))
            if ticks[0] > 0 and ticks[-1] > 8 * ticks[0]:
                axis.set_xscale("log")
            axis.set_xticks(ticks[:: -(-len(ticks) // 8)])
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            axis.set_xticks(range(len(names)), [wrapped(name, 16) for name in names], rotation=40)
    add_legend(figure, axes[0])
    yield figure, "Mean over seeds, 95 % confidence interval."


FIGURES: list[Callable[[Study], Figures]] = [dots, forest, factor_grid, source_lengths, curves, context_lengths]


def search_figures(search: Any) -> Figures:
    """Draw the history of a search and, with four different scores or more, the importance of its settings."""
    from optuna import importance, visualization

    scores = {trial.value for trial in search.trials if trial.state.name == "COMPLETE"}
    axis: Any = visualization.matplotlib.plot_optimization_history(search, target_name="score on held-out data")
    yield axis.figure, "The score of each trial, and the best so far."
    if len(scores) >= 4:
        evaluator = importance.FanovaImportanceEvaluator(seed=0)
        axis = visualization.matplotlib.plot_param_importances(search, evaluator=evaluator)
        yield axis.figure, "The share of the score's variance that each setting explains (fANOVA)."


# Files


@missing_glyphs()
def write(figure: Figure, file: Callable[[str], Path], name: str, formats: Sequence[str] = FORMATS) -> Path:
    """Write a figure as PNG, with 256 colours and so a third of the bytes, and in other formats; return the PNG.

    Args:
        file: returns the path of a file by its name, such as `OutputFolder.file`.
    """
    look: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.1, "facecolor": "white"}
    path, png = file(f"figures/{name}.png"), io.BytesIO()
    figure.savefig(png, **look)
    Image.open(png).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    for form, undated in {"svg": "Date", "pdf": "CreationDate"}.items():  # the same results give the same bytes
        if form in formats:
            figure.savefig(file(f"figures/{name}.{form}"), metadata={undated: None}, **look)
    plt.close(figure)
    return path
