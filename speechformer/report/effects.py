"""Forest plots: the effects of claims, and the differences between the rows of a table, with their intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np

from speechformer.report.claims import Judgement
from speechformer.report.results import Table
from speechformer.report.statistics import Effect
from speechformer.report.style import (
    INK,
    TICKS,
    Axes,
    axis_label,
    kind,
    legend_below,
    limit,
    plt,
    row_labels,
    short,
    size,
    wrapped,
)
from speechformer.report.tables import Difference, differences, estimate, p_value, scale

Look = tuple[str, str]  # colour and marker
VERDICT_STYLES = {"supported": ("#0072B2", "o"), "inconclusive": ("#8a949e", "s"), "contradicted": ("#D55E00", "X")}
SIGNS = {"better": ("#0072B2", "o"), "not significant": ("#8a949e", "s"), "worse": ("#D55E00", "X")}
UNITS = {"accuracy": "test accuracy, points", "exact": "exact translations, points", "bleu": "BLEU"}


def legend(figure: Any, looks: dict[str, Look], title: str = "") -> None:
    """Explain colours and markers below the axes."""
    line = matplotlib.lines.Line2D
    handles = [line([], [], color=own[0], marker=own[1], label=text) for text, own in looks.items()]
    legend_below(figure, handles, title)


def draw_effect(axis: Axes, y: float, effect: Effect, unit: float, look: Look) -> None:
    """Draw an effect, times `unit`, with its interval."""
    colour, marker = look
    if not math.isnan(effect.interval[0]):
        axis.plot([unit * end for end in effect.interval], [y, y], color=colour, lw=1.8, zorder=3)
    axis.plot(unit * effect.mean, y, marker, color=colour, ms=6.5, zorder=4)


def write_beside(axis: Axes, y: float, text: str) -> None:
    """Write the number of an effect to the right of its line."""
    axis.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def set_rows(axis: Axes, names: Sequence[str]) -> None:
    """Label the lines, the first at the top, and draw zero."""
    axis.axvline(0, color=INK, lw=0.9)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)


def forest(judgements: Sequence[Judgement]) -> tuple[Any, str] | None:
    """Draw the effect of each claim with its interval, positive as claimed; verdicts differ in colour and marker."""
    groups = defaultdict[str, list[Judgement]](list)
    for own in judgements:
        if not math.isnan(own.effect.interval[0]):
            groups["ratio" if " / " in own.metric else kind(own.metric).replace("known", "perplexity")].append(own)
    if not groups:
        return None
    sizes = [len(own) + 1 for own in groups.values()]
    inches = (10.5, 0.25 * sum(sizes) + 0.7 * len(groups))
    figure, axes = plt.subplots(len(groups), 1, figsize=inches, height_ratios=sizes, squeeze=False)
    for axis, (unit, group) in zip(axes[:, 0], groups.items()):
        axis.tick_params(labelsize=8)
        for y, own in enumerate(group):
            factor = own.sign * scale(own.metric)
            draw_effect(axis, y, own.effect, factor, VERDICT_STYLES[own.verdict])
            write_beside(axis, y, " ".join(estimate(own.metric, as_claimed(own))))
        beyond = set_scale(axis, [end * scale(own.metric) for own in group for end in own.effect.interval])
        axis.set_xlabel(f"effect, positive as claimed ({UNITS.get(unit, unit)}){beyond}", fontsize=9)
        set_rows(axis, [short(f"{own.by}: {own.says}", 120) for own in group])
    legend(figure, VERDICT_STYLES)
    intervals = "95 % confidence intervals, over seeds or over seeds and sentences"
    return figure, f"Effects of all claims with {intervals}; positive as claimed. Verdicts after Holm's correction."


def as_claimed(own: Judgement) -> Effect:
    """Return the effect of a claim with the sign that makes it positive if the claim is true."""
    low, high = sorted(own.sign * end for end in own.effect.interval)
    return Effect(own.effect.n, own.sign * own.effect.mean, (low, high))


def set_scale(axis: Axes, ends: Sequence[float]) -> str:
    """Make a scale logarithmic beyond the median of the intervals' ends if it is far; return words that say so."""
    sizes = np.abs(ends)
    linear = float(f"{np.median(sizes):.0e}")
    if sizes.max() < 4 * linear or not linear:
        return ""
    axis.set_xscale("symlog", linthresh=linear, linscale=1.5)
    ticks = [tick for tick in (linear / 2, linear, 5 * linear, 50 * linear, 500 * linear) if tick < sizes.max()]
    axis.set_xticks([*(-tick for tick in reversed(ticks)), 0, *ticks])
    axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.minorticks_off()
    return f", logarithmic beyond ±{linear:g}"


def differences_figure(table: Table) -> tuple[Any, str] | None:
    """Draw each row minus the reference with its interval; colours: what is significant after Holm's correction."""
    groups = defaultdict[str, list[Difference]](list)
    for own in differences(table):
        groups[own.metric].append(own)
    if not groups:
        return None
    rows = [row for row in table.rows if any(own.row is row for group in groups.values() for own in group)]
    labels = row_labels([row.label for row in rows])
    figure, axes = plt.subplots(1, len(groups), figsize=size(labels, 4.9 * len(groups)), sharey=True, squeeze=False)
    cut, better = "", 1 if table.report["higher_is_better"] else -1
    for axis, (metric, group) in zip(axes[0], groups.items()):
        set_rows(axis, labels)
        for own in group:
            y, sign = rows.index(own.row), better * own.effect.mean * (own.corrected < 0.05)
            look = SIGNS["better" if sign > 0 else "worse" if sign < 0 else "not significant"]
            seeds = np.array(list(seed_differences(own))) * scale(metric)
            places = y + np.linspace(-0.2, 0.2, len(seeds)) if len(seeds) > 1 else [y]
            axis.plot(seeds, places, ".", color=look[0], alpha=0.5, ms=5, mew=0)
            draw_effect(axis, y, own.effect, scale(metric), look)
            p = "" if math.isnan(own.corrected) else f", p = {p_value(own.corrected)}".replace("= <", "<")
            write_beside(axis, y, " ".join(estimate(metric, own.effect)) + p)
        points = [value for own in group for value in (own.effect.mean, *seed_differences(own))]
        cut = limit(axis, [0.0, *(scale(metric) * value for value in points)]) or cut
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
        axis.set_title(TICKS.get(metric, short(axis_label(metric))) if len(groups) > 1 else "")
    name = axis_label(next(iter(groups))) if len(groups) == 1 else f"test {kind(table.metric)}"
    direction = "higher" if better > 0 else "lower"
    label = wrapped(f"{name} minus that of {table.reference.label} ({direction} is better)", 20 + 60 * len(groups))
    legend(figure, SIGNS, label)
    caption = f"Each row minus {table.reference.label}, with the 95 % confidence interval of the difference."
    return figure, f"{caption} Dots: seeds. Colours and p-values: after Holm's correction.{cut}"


def seed_differences(own: Difference) -> Iterator[float]:
    """Yield the difference of each seed, of paired ones; else each run minus the mean of the reference."""
    values, reference = own.row.values(own.metric), own.reference.values(own.metric)
    mean = sum(reference.values()) / len(reference)
    for seed, value in values.items():
        if not own.effect.paired:
            yield value - mean
        elif seed in reference:
            yield value - reference[seed]
