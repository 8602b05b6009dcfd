"""Plot the bench: a step against the peers and the machine's limit, and attention by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from speechformer.bench.timing import Comparison
from speechformer.corpora.files import OutputFolder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
LIMIT = "#332288"
STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def draw(rows: Sequence[Comparison], machine: dict[str, Any], output: OutputFolder) -> list[Path]:
    """Plot the parts that were measured; return the files."""
    paths = []
    with plt.rc_context(STYLE):
        steps = [row for row in rows if row.part.startswith("steps") and "training" in row.what]
        if steps:
            paths.append(draw_steps(steps, machine, output.file("steps.png")))
        attention = [row for row in rows if row.part.startswith("attention")]
        if len({row.more["tokens"] for row in attention}) > 1:
            paths.append(draw_attention(attention, output.file("attention.png")))
    return paths


def draw_steps(rows: Sequence[Comparison], machine: dict[str, Any], path: Path) -> Path:
    """Plot the milliseconds per step as bars, with the machine's limit as a line."""
    figure, axes = plt.subplots(1, len(rows), figsize=(2.6 * len(rows), 3.4), layout="constrained", squeeze=False)
    for axis, row in zip(axes[0], rows):
        limit = 1000 * (row.limit(machine) or 0.0)
        names, values = list(row.seconds), [1000 * value for value in row.seconds.values()]
        *texts, text = (f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in (*values, limit))
        bars = axis.bar(range(len(names)), values, color=COLOURS[: len(names)], width=0.7)
        axis.bar_label(bars, texts, padding=2)
        axis.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.4)
        look: Any = {"color": LIMIT, "va": "center", "ha": "center", "fontsize": 8.5}
        shade = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5}
        axis.text(len(names) - 1, limit, f"limit {text}", bbox=shade, **look)
        axis.set_xticks(range(len(names)), [name.replace("-", "-\n") for name in names], fontsize=8)
        size = {"steps, report": "the reports' size", "steps, large": "512 wide, 1,024 tokens"}[row.part]
        axis.set_title(f"{row.what.partition(',')[0]}, {size}", fontsize=9.5)
        axis.set_ylim(0, 1.15 * max(values))
    axes[0][0].set_ylabel("ms per training step")
    return save(figure, path)


def save(figure: Any, path: Path, dpi: int = 150) -> Path:
    """Write a figure and forget it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    return path


def draw_attention(rows: Sequence[Comparison], path: Path) -> Path:
    """Plot time and memory by length on logarithmic axes, a column for each position or pattern, five to a row."""
    kinds = list(dict.fromkeys(row.what for row in rows))
    kernels = list(dict.fromkeys(name for row in rows for name in row.seconds))
    across = min(5, len(kinds))
    down = -(-len(kinds) // across)
    figure, axes = plt.subplots(
        2 * down, across, figsize=(1.2 + 2.4 * across, 4.6 * down), layout="constrained", sharex=True, squeeze=False
    )
    for k, kind in enumerate(kinds):
        column = axes[2 * (k // across) : 2 * (k // across) + 2, k % across]
        own = [row for row in rows if row.what == kind]
        for name in kernels:
            measured = [row for row in own if name in row.seconds]
            tokens = [row.more["tokens"] for row in measured]
            style = {"color": COLOURS[kernels.index(name)], "marker": "o", "markersize": 3, "label": name}
            column[0].plot(tokens, [1000 * row.seconds[name] for row in measured], **style)
            column[1].plot(tokens, [max(row.more["bytes"][name], 1) / 2**20 for row in measured], **style)
        column[0].set_title(kind.replace("nope, ", ""), fontsize=10)
        column[1].set_xlabel("tokens")
        if k % across == 0:
            column[0].set_ylabel("ms, forward and backward")
            column[1].set_ylabel("MiB saved or allocated")
        for axis in column:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(True, color="#e3e8ed")
    for first in range(2 * down):  # one scale for all times, and one for all memory
        limits = [axis.get_ylim() for axis in axes[first % 2 :: 2].flat if axis.has_data()]
        for axis in axes[first]:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    handles = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(kernels), frameon=False)
    return save(figure, path, 130)
