"""The style of the figures. The colour of a variant follows from its settings, so it is the same in every figure."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import yaml
from matplotlib.colors import to_hex, to_rgb

from speechformer.escape import one_line
from speechformer.report.results import Row
from speechformer.report.tables import heading

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
INK = "#1f2933"
WIDEST = 80.0  # inches; a picture has at most 2^16 pixels in a row
LINES: list[tuple[Any, str]] = [("-", "o"), ((0, (4, 2)), "s"), ((0, (1.5, 1.5)), "^")]
LINES += [((0, (6, 2, 1.5, 2)), "v"), ((0, (8, 3)), "D")]
SHADES = (0.0, 0.35, -0.4, 0.6, -0.65, 0.2, 0.5, -0.2, -0.5)  # towards white, or black
TICKS = {"test_accuracy": "all", "test_accuracy_in_train": "in train", "test_accuracy_not_in_train": "not in train"}
TICKS |= {"test_bleu": "BLEU", "test_chrf": "chrF"}


class Style(NamedTuple):
    """How a variant is drawn."""

    colour: str
    line: Any
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


def variations(name: str) -> Iterator[Style]:
    """Yield the styles of a colour: with each line and marker, then shades of it with each."""
    for shade in SHADES:
        red, green, blue = ((1 - abs(shade)) * part + max(shade, 0) for part in to_rgb(name))
        yield from (Style(to_hex((red, green, blue)) if shade else name, *line) for line in LINES)


def styles(rows: Sequence[Row]) -> list[Style]:
    """Return the style of each row of a table: rows of one line and marker differ in colour, visibly."""
    chosen: list[Style] = []
    for row in rows:
        possible = [(style, apart(style, chosen)) for style in variations(colour(row.settings))]
        unlike = next((style for style, least in possible if least > 0.3), None)
        chosen.append(unlike or max(possible, key=lambda pair: pair[1])[0])
    return chosen


def apart(style: Style, others: Sequence[Style]) -> float:
    """Return the least distance of a colour, 0 to 3, from those of the other styles with the same line."""
    own = to_rgb(style.colour)
    alike = [to_rgb(other.colour) for other in others if other.line == style.line]
    return min((sum(abs(a - b) for a, b in zip(own, other)) for other in alike), default=3.0)


def short(text: str, limit: int = 40) -> str:
    """Return a text from outside as a figure shows it."""
    return one_line(text, limit)


def wrapped(text: str, width: int = 44) -> str:
    """Return a label on lines of at most `width` characters."""
    return textwrap.fill(short(text, 300), width)


def row_labels(texts: Sequence[str]) -> list[str]:
    """Return the labels of rows on a few lines, as rows are as far apart as the longest label needs."""
    longest = max(len(short(text, 300)) for text in texts)
    return [wrapped(text, max(44, longest // 3)) for text in texts]


def size(labels: Sequence[str], width: float) -> tuple[float, float]:
    """Return the size, in inches, of a figure with axes of this width and rows with these labels."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    height = len(labels) * (0.14 + 0.18 * max(1 + label.count("\n") for label in labels))
    return min(WIDEST, 0.3 + 0.09 * longest + width), 1.3 + height


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


def panels(number: int, width: float, height: float, **options: Any) -> tuple[Any, list[Axes]]:
    """Return a figure with panels side by side, three at most or four in a square; inches are those of one."""
    columns = 2 if number == 4 else min(number, 3)
    rows = -(-number // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **options)
    for axis in axes.flat[number:]:
        axis.remove()
    return figure, list(axes.flat[:number])


def add_legend(figure: Any, first: Axes) -> None:
    """Put the legend of several lines beside the axes, two columns of them if they are many."""
    handles, names = first.get_legend_handles_labels()
    if len(handles) > 1:
        place: Any = {"bbox_to_anchor": (1.0, 0.55), "bbox_transform": figure.transFigure}
        names = [wrapped(name) for name in names]
        figure.legend(handles, names, loc="center left", ncols=1 + len(handles) // 25, handlelength=3.4, **place)


def legend_below(figure: Any, handles: Sequence[Any], title: str = "") -> None:
    """Put a legend of what marks mean below the axes, and above it the label of all axes."""
    width = sum(0.6 + 0.075 * len(handle.get_label()) for handle in handles)  # inches
    columns = len(handles) if width < 1.3 * figure.get_figwidth() else 2
    place: Any = {"bbox_to_anchor": (0.5, 0.0), "bbox_transform": figure.transFigure, "borderaxespad": 0.0}
    look: Any = {"title": title or None, "title_fontsize": 9.5, "fontsize": 9}
    figure.legend(handles=handles, loc="upper center", ncols=columns, **look, **place)


def limit(axis: Axes, points: Sequence[float]) -> str:
    """Cut off intervals, of two runs for example, that are much longer than the points are apart; say so if any."""
    left, right = axis.get_xlim()
    room = 1.2 * (max(points) - min(points))
    low, high = min(points) - room, max(points) + room
    if not room or (low <= left and right <= high):
        return ""
    axis.set_xlim(max(left, low), min(right, high))
    return " Intervals longer than the axis are cut."
