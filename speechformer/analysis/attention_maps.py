"""Attention maps: the weights of every head as numbers, as a sanity check and as a picture.

For a query i with weights w_ij over the keys j:

    entropy     - sum_j w_ij ln w_ij      in nats; 0: all weight on one key, ln S: uniform over S keys
    distance    sum_j w_ij |i - j|        in tokens; defined within one sequence only

Both are averaged over the queries. Clark et al. 2019, "What Does BERT Look At?", section 3.

Shapes: L layers, N heads, T queries, S keys.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.escape import drawable, missing_glyphs
from speechformer.layers.attention import attention_mask

CLS = "<cls>"
CAPTIONS = {
    "encoder": "encoder self-attention (both directions)",
    "decoder": "decoder self-attention (causal)",
    "cross": "cross-attention: tokens of the translation (queries) to tokens of the source (keys)",
}


@dataclass
class AttentionMap:
    """The attention weights of one part of a model, for one text.

    Attributes:
        name: the part: "encoder", "decoder" or "cross".
        queries: the T query tokens as text.
        keys: the S key tokens as text.
        weights: [L, N, T, S], on the CPU.
        mask: [T, S], True where the query may attend to the key, in some layer at least.
        heading: title of the panel in the picture; None: its layer and head.
        sums_to_one: whether each row does.
        implied: the layers without scores, from 0: their weights are what multiplies the value of each key.
    """

    name: str
    queries: list[str]
    keys: list[str]
    weights: Tensor
    mask: Tensor
    heading: str | None = None
    sums_to_one: bool = True
    implied: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"AttentionMap({self.name}, weights {list(self.weights.shape)}: layers, heads, queries, keys)"

    def entropy(self) -> Tensor:
        """Return the mean entropy of each head's weights in nats, [L, N]; of their shares if they do not sum to 1."""
        return torch.special.entr(self.shares()).sum(dim=-1).mean(dim=-1)

    def shares(self) -> Tensor:
        """Return the weights, or their shares of the sum of their sizes if they do not sum to 1."""
        sizes = self.weights.abs()
        return self.weights if self.sums_to_one else sizes / sizes.sum(dim=-1, keepdim=True).clamp(min=1e-9)

    def distance(self) -> Tensor | None:
        """Return the mean distance between query and key in tokens, [L, N]; None for cross-attention."""
        if self.name == "cross":
            return None
        i, j = torch.arange(len(self.queries))[:, None], torch.arange(len(self.keys))
        return (self.shares() * (i - j).abs()).sum(dim=-1).mean(dim=-1)


@torch.no_grad()
def maps_of(model: nn.Module, ids: Sequence[Tensor], tokens: Sequence[Sequence[str]]) -> list[AttentionMap]:
    """Compute the attention maps of a model for one text: one for each part that has attention.

    Args:
        model: an `EncoderClassifier`, `Decoder` or `Translator`, in evaluation mode.
        ids: the model's inputs without batch dimension: [T], or source [S] and target [T] of a translator.
        tokens: the same inputs as text; a translator also needs the tokens that its decoder predicts.
    """
    maps = []
    for name, weights in weights_of(model, ids).items():
        T, S = weights.shape[-2:]
        if name == "cross":
            queries, keys, mask, layers = tokens[2], tokens[0], torch.ones(T, S, dtype=torch.bool), []
        else:
            stack: Any = getattr(model, name)
            i, j = torch.arange(T)[:, None], torch.arange(S)[None, :]
            masks = [attention_mask(pattern, i, j, stack.causal) for pattern in set(stack.patterns)]
            mask = torch.stack(masks).any(dim=0)
            read = tokens[-1] if len(tokens) == 1 else tokens[name == "decoder"]
            queries = keys = [*([CLS] if stack.first_token is not None else []), *read]
            layers = [block.attention for block in stack.blocks]
        kind: Any = {
            "sums_to_one": all(layer.sums_to_one for layer in layers),
            "implied": tuple(k for k, layer in enumerate(layers) if layer.kernel == "none"),
        }
        maps.append(AttentionMap(name, list(queries), list(keys), weights, mask.cpu(), **kind))
    return maps


def weights_of(model: nn.Module, ids: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute the weights of each part that has attention, [L, N, T, S]."""
    device = next(model.parameters()).device
    parts = model.attention(*(part.to(device)[None] for part in ids))  # type: ignore[operator]
    return {
        name: torch.stack([layer[0] for layer in layers]).float().cpu() for name, layers in parts.items() if layers
    }


@dataclass
class Check:
    """A property of attention weights, the largest deviation from it (None if it does not apply), and its bound."""

    description: str
    worst: float | None
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.worst is None or self.worst <= self.tolerance  # False for NaN


@torch.no_grad()
def check_maps(
    model: nn.Module, ids: Sequence[Tensor], maps: Sequence[AttentionMap], padding: int = 3
) -> list[Check]:
    """Check that the weights of each query sum to 1, that masked keys get none, and that padding changes nothing.

    `padding` tokens are appended to the text of a classifier and to the source of a translator, as in training. A
    language model is trained without padding, so it has no such check.
    """
    sums = [part.weights.sum(dim=-1) - 1 for part in maps if part.sums_to_one]
    masked = [part.weights[..., ~part.mask] for part in maps if not part.mask.all()]
    checks = [Check("the weights of each query sum to 1", largest(sums), 1e-5)]
    checks.append(Check("no weight on masked keys", largest(masked), 0.0))
    if not any(part.name in ("encoder", "cross") for part in maps):
        return checks
    max_length: int | None = model.max_length  # type: ignore[assignment]
    padding = padding if max_length is None else min(padding, max_length - len(ids[0]))
    padded = weights_of(model, [F.pad(ids[0], (0, padding), value=PAD), *ids[1:]])
    on_padding, changes = [], []
    for part in maps if padding else []:
        if part.name != "decoder":
            T, S = part.mask.shape
            on_padding.append(padded[part.name][..., :T, S:])
            changes.append(padded[part.name][..., :T, :S] - part.weights)
    checks.append(Check("no weight on padding", largest(on_padding), 0.0))
    return [*checks, Check("padding changes no other weight", largest(changes), 1e-5)]


def largest(values: Sequence[Tensor]) -> float | None:
    """Return the largest absolute value, NaN if any is NaN, None for an empty list."""
    return float(torch.cat([value.flatten() for value in values]).abs().max()) if values else None


# Fonts with Chinese, Japanese or Korean characters, on Linux, macOS and Windows, for those that DejaVu lacks
WIDE = ["Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "IPAGothic", "WenQuanYi Zen Hei", "Hiragino Sans"]
WIDE += ["PingFang SC", "Apple SD Gothic Neo", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS"]
MASKED = "#e8e8e5"


def shorten(token: str) -> str:
    """Shorten a token for an axis; a dot marks a space, which shows where a word begins."""
    return drawable(token.replace(" ", "·").replace("\n", "⏎"), 14)


def figure_of(part: AttentionMap, title: str, scale: float | None = None) -> Figure:
    """Draw a map; see `save`."""
    weights = np.ma.masked_array(part.weights.detach().numpy(), (~part.mask).expand_as(part.weights).numpy())
    L, N, T, S = weights.shape
    cell = max(0.05, min(0.24, 4 / max(T, S)))  # inches
    size = (max(6.5, N * (S * cell + 0.5) + 2), L * (T * cell + 0.7) + 2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(L, N, sharex=True, sharey=True, squeeze=False)
    largest = max(float(part.weights.abs().max()) if scale is None else scale, 1e-9)
    least, colors = (-largest, "RdBu") if part.weights.min() < 0 else (0, "Blues")
    entropy, distance = part.entropy(), part.distance()
    every = -(-10 // int(72 * cell))  # of small cells only some have a label
    for (k, n), axis in np.ndenumerate(axes):
        edges = np.arange(S + 1) - 0.5, np.arange(T + 1) - 0.5
        mesh = axis.pcolormesh(*edges, weights[k, n], cmap=colors, vmin=least, vmax=largest)
        axis.set(aspect="equal", ylim=(T - 0.5, -0.5), facecolor=MASKED)
        far = "" if distance is None else f", distance {distance[k, n]:.1f}"
        heading = part.heading or f"layer {k + 1}, head {n + 1}{'*' * (k in part.implied)}"
        axis.set_title(f"{heading}\nentropy {entropy[k, n]:.2f}{far}", loc="left", fontsize=9)
        axis.tick_params(length=0, axis="both")
        axis.tick_params(rotation=90, axis="x")
    axes[0, 0].set_xticks(range(0, S, every), [shorten(token) for token in part.keys[::every]])
    axes[0, 0].set_yticks(range(0, T, every), [shorten(token) for token in part.queries[::every]])
    figure.suptitle(f"{drawable(title, 200)}\n{CAPTIONS[part.name]}", fontsize=10)
    sums = "each row sums to 1" if part.sums_to_one else "rows need not sum to 1"
    implied = "\n* without scores: what multiplies the value of each key" if part.implied else ""
    figure.supxlabel(f"row: query; column: key; grey: masked; {sums}{implied}", fontsize=9)
    figure.colorbar(mesh, ax=axes, label="weight", shrink=0.6)
    return figure


@missing_glyphs()
def save(part: AttentionMap, title: str, file: Path | BinaryIO, scale: float | None = None) -> None:
    """Draw a map to a file: one row of panels for each layer, one column for each head, masked pairs in grey.

    Args:
        part: the map; its text may hold any characters.
        title: the first line of the picture.
        file: a path, whose suffix is the format (PNG, or SVG with selectable text), or a file for a PNG.
        scale: the weight with the darkest colour; None: the largest of the map.
    """
    families = [*(name for name in ("DejaVu Sans", *WIDE) if name in font_manager.get_font_names()), "sans-serif"]
    with matplotlib.rc_context(
        {"font.family": families, "text.parse_math": False, "font.size": 9, "svg.fonttype": "none"}
    ):
        figure_of(part, title, scale).savefig(file)


def draw(part: AttentionMap, title: str, scale: float | None = None) -> Image.Image:
    """Draw a map as a picture; see `save`."""
    save(part, title, file := io.BytesIO(), scale)
    return Image.open(file).convert("RGB")
