"""Pictures of what position encodings do, and of which pairs the patterns keep: `figure.savefig` writes them.

An encoding is drawn by the place where it acts (see `layers/positions.py`):

    embed     what it adds to the embeddings                           position × dimension
    rotate    the cosine of each pair's angle, times its length        position × pair
    bias      what it adds to the scores of head 1                     query × key
    gate      the same, of random gates                                query × key
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from speechformer.layers.attention import attention_mask, gate_bias
from speechformer.layers.patterns import PATTERNS, build_pattern
from speechformer.layers.positions import POSITIONS, Positions, build_positions


@torch.no_grad()
def table_of(positions: Positions, T: int, width: int, heads: int, causal: bool) -> tuple[str, Tensor | None]:
    """Return the place where an encoding acts and its values for T tokens, [T, columns], None if it does nothing.

    In a decoder (`causal`) keys after their query have no value: NaN.
    """
    index = positions.prepare(T)
    if positions.overrides("embed"):
        return "add to embeddings:\nposition × dimension", positions.embed(torch.zeros(1, T, width), index)[0]
    if positions.overrides("rotate"):
        pairs = torch.tensor([1.0, 0.0]).repeat(1, heads, T, width // heads // 2)  # (1, 0) becomes (cos, sin)
        return "rotate queries and keys:\nposition × pair", positions.rotate(pairs, pairs, index)[0][0, 0, :, 0::2]
    i, j = index[:, None], index[None, :]
    scores = positions.bias(i, j)
    if positions.overrides("gate"):
        scores = gate_bias(positions.gate(torch.randn(1, T, heads)).cumsum(dim=1).mT, i, j)[0]
    if scores is None:
        return "nothing", None
    return "add to scores:\nquery × key", scores[0].masked_fill((j > i) & causal, float("nan"))


NO_TICKS: dict[str, Any] = {"xticks": [], "yticks": [], "facecolor": "0.9"}


def draw_encodings(
    encodings: Mapping[str, Positions] | None = None,
    T: int = 32,
    width: int = 64,
    heads: int = 2,
    causal: bool = True,
) -> Figure:
    """Draw a panel for each encoding: blue is positive, red negative, white 0, grey a key after its query.

    Args:
        encodings: by their titles, such as {"trained": run.model.encoder.positions}; None: each of `model=`.
        T: the tokens that are drawn.
        width: D of the encodings.
        heads: N of the encodings.
        causal: whether they are of a decoder.
    """
    if encodings is None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"width": width, "heads": heads, "length": T, "causal": True}
        encodings = {name: build_positions({"name": name}, **sizes) for name in POSITIONS}
    columns, rows = min(5, len(encodings)), -(-len(encodings) // 5)
    size = (2.2 * columns, 2.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, subplot_kw=NO_TICKS)
    for axis, (name, positions) in zip(axes.flat, encodings.items()):
        axis.set_title(name, fontsize=9)
        place, table = table_of(positions, T, width, heads, causal)
        axis.set_xlabel(place, fontsize=8)
        if table is not None:
            limit = float(table.nan_to_num().abs().max())
            axis.imshow(table.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
            axis.set_xlabel(f"{place}, ±{limit:.2g}", fontsize=8)
    for axis in axes.flat[len(encodings) :]:
        axis.remove()
    return figure


def draw_patterns(T: int = 32) -> Figure:
    """Draw each pattern in an encoder (above) and in a decoder, with the share of pairs that it keeps."""
    size = (2.2 * len(PATTERNS), 5.2)
    figure, axes = plt.subplots(2, len(PATTERNS), figsize=size, layout="constrained", subplot_kw=NO_TICKS)
    index = torch.arange(T)
    for row, causal in zip(axes, (False, True)):
        for axis, name in zip(row, PATTERNS):
            mask = attention_mask(build_pattern({"name": name}), index[:, None], index[None, :], causal)
            axis.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
            axis.set_title(name, fontsize=9)
            pairs = T * (T + 1) // 2 if causal else T * T
            axis.set_xlabel(f"{100 * mask.sum().item() / pairs:.0f} % of pairs", fontsize=8)
        row[0].set_ylabel("decoder" if causal else "encoder", fontsize=9)
    return figure
