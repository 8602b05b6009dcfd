"""Plot the bench: a step against the peers and the machine's limit, and attention by length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def draw(rows: Sequence[Comparison], output: OutputFolder) -> list[Path]:
    """Plot the parts that were measured; return the files."""
    paths = []
    with plt.rc_context(STYLE):
        steps = [row for row in rows if row.part.startswith("steps") and "training" in row.what]
        if steps:
            paths.append(draw_steps(steps, output.file("steps.png")))
        attention = [row for row in rows if row.part.startswith("attention")]
        attention = [row for row in attention if "chosen" in row.more]  # which rows of older files lack
        if len({row.more["tokens"] for row in attention}) > 1:
            paths.append(draw_attention(attention, output.file("attention.png")))
    return paths


def draw_steps(rows: Sequence[Comparison], path: Path) -> Path:
    """Plot the milliseconds per step as bars, with the machine's limit as a line."""
    figure, axes = plt.subplots(1, len(rows), figsize=(2.6 * len(rows), 3.4), layout="constrained", squeeze=False)
    for axis, row in zip(axes[0], rows):
        limit = 1000 * (row.limit or 0.0)
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
    """Plot time and memory of the chosen kernels by length, on logarithmic axes, and those of a dense mask."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    kinds = list(dict.fromkeys(row.what for row in rows))
    lines = [(what, [row for row in rows if row.what == what][-1].more["chosen"]) for what in kinds]
    texts = dict(zip(lines, kinds))
    texts["window 64", "dense mask"] = "any pattern as a dense mask"  # which takes the same time for all
    for k, ((what, name), text) in enumerate(texts.items()):
        own = [row for row in rows if row.what == what and name in row.seconds]
        tokens = [row.more["tokens"] for row in own]
        look: Any = {"color": plt.colormaps["tab20"](k), "marker": "osD^vP*XdhH"[k % 11], "markersize": 4}
        look = {"color": "#444444", "linestyle": "--"} if name == "dense mask" else look
        for axis, measure in zip(axes, (seconds_of, mebibytes_of)):
            (line,) = axis.plot(tokens, [measure(row, name) for row in own], **look)
        exponents = [" and ".join(map(str, power_laws)) for power_laws in fits(own, name).values() if power_laws]
        line.set_label(f"{text} ({', '.join(exponents)})" if exponents else text)
    for axis, title in zip(axes, ("seconds, forward and backward", "MiB held for the backward pass")):
        axis.set(yscale="log", xlabel="tokens", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(True, color="#e3e8ed")
    axes[1].set_ylim(bottom=max(0.1, axes[1].get_ylim()[0]))  # query blocks hold nearly nothing
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5, title="exponents of time and memory")
    return save(figure, path, 130)


def seconds_of(row: Comparison, name: str) -> float:
    """Return the seconds of a kernel."""
    return row.seconds[name]


def mebibytes_of(row: Comparison, name: str) -> float:
    """Return the MiB that a kernel holds for the backward pass."""
    return max(row.more["bytes"][name], 1) / 2**20


@dataclass(frozen=True)
class Fit:
    """A power law over the length, T^power, fitted from `tokens` to `tokens`; `how` names one of two ways."""

    power: float
    tokens: tuple[int, int]
    how: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"T^{self.power:.2f}", self.how)))


def fits(rows: Sequence[Comparison], name: str) -> dict[str, list[Fit]]:
    """Fit a kernel's time and memory over the length.

    Sparse blocks keep the weights of a group of blocks for the backward pass if they are not too many, and compute
    them again otherwise (`more["recomputed"]`, if there is such a group). Each way has its own exponent of memory,
    if it has two lengths.
    """
    ways = {"": list(rows)}
    if name == "sparse blocks" and any(row.more.get("recomputed") for row in rows):
        ways = {
            how: [row for row in rows if row.more["recomputed"] == again]
            for how, again in (("kept", False), ("recomputed", True))
        }
    memory = [fit(own, name, mebibytes_of, how) for how, own in ways.items()]
    power_laws = {"time": [fit(rows, name, seconds_of)], "memory": memory}
    return {measure: [own for own in of_measure if own is not None] for measure, of_measure in power_laws.items()}


def fit(
    rows: Sequence[Comparison],
    name: str,
    measure: Callable[[Comparison, str], float],
    how: str = "",
    start: int = 512,
) -> Fit | None:
    """Return the power law of a measure from `start` tokens on, or None for fewer than two rows."""
    own = [row for row in rows if start <= row.more["tokens"]]
    if len(own) < 2:
        return None
    tokens = [row.more["tokens"] for row in own]
    line = statistics.linear_regression([math.log(T) for T in tokens], [math.log(measure(row, name)) for row in own])
    return Fit(line.slope, (min(tokens), max(tokens)), how)
