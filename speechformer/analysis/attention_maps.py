"""Attention maps: where every head of every layer looks, as numbers, as a check and as a picture.

For a query i with weights w_ij over the keys j:

    entropy     - sum_j w_ij ln w_ij      in nats: 0 looks at one token, ln S at all S alike
    distance    sum_j w_ij |i - j|        in tokens; of attention within one sequence

each in the mean over the queries. Clark et al. 2019, "What Does BERT Look At?", section 3.

Shapes: L layers, N heads, T queries, S keys.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.layers.attention import attention_mask

CLS = "<cls>"
WHAT = {
    "encoder": "encoder: every token looks at both sides",
    "decoder": "decoder: every token looks at what stands before it",
    "cross": "decoder to encoder: what each token that it writes looks at in the source",
}


@dataclass
class Map:
    """The attention of one part of a model: "encoder", "decoder" or "cross".

    `queries` and `keys` are the tokens as text, `weights` [L, N, T, S] on the CPU, `mask` [T, S] where a query may
    look, `heading` what to write above its only panel instead of layer and head.
    """

    name: str
    queries: list[str]
    keys: list[str]
    weights: Tensor
    mask: Tensor
    heading: str | None = None

    def entropy(self) -> Tensor:
        """In nats, [L, N]."""
        return torch.special.entr(self.weights).sum(dim=-1).mean(dim=-1)

    def distance(self) -> Tensor | None:
        """In tokens, [L, N]; None between two sequences, where a distance means nothing."""
        if self.name == "cross":
            return None
        i, j = torch.arange(len(self.queries))[:, None], torch.arange(len(self.keys))
        return (self.weights * (i - j).abs()).sum(dim=-1).mean(dim=-1)


@torch.no_grad()
def maps_of(model: nn.Module, ids: Sequence[Tensor], words: Sequence[Sequence[str]]) -> list[Map]:
    """The maps of a model for one example; none for a model that does not attend.

    Args:
        model: an `EncoderClassifier`, `Decoder` or `Translator`, in evaluation mode.
        ids: the ids of a text, [T]; for a translator of the source, [S], and of what the decoder reads, [T].
        words: the tokens of the same as text; for a translator also those that the decoder writes.
    """
    device = next(model.parameters()).device
    found = model.attention(*(part.to(device)[None] for part in ids))  # type: ignore[operator]
    maps = []
    for name, layers in found.items():
        if not layers:
            continue
        weights = torch.stack([layer[0] for layer in layers]).float().cpu()
        T, S = weights.shape[-2:]
        if name == "cross":
            queries, keys, seen = words[2], words[0], torch.ones(T, S, dtype=torch.bool)
        else:
            stack: Any = getattr(model, name)
            seen = attention_mask(stack.pattern, T, S, stack.causal)[0, 0]
            own = words[-1] if len(words) == 1 else words[name == "decoder"]
            queries = keys = ([CLS] if stack.first_token is not None else []) + list(own)
        maps.append(Map(name, list(queries), list(keys), weights, seen.cpu()))
    return maps


@dataclass
class Check:
    """One thing that must hold of attention, and the figure that is furthest from it, None where there is nothing of
    which it could hold."""

    what: str
    worst: float | None
    allowed: float

    @property
    def passed(self) -> bool:
        return self.worst is None or self.worst <= self.allowed  # not of NaN


@torch.no_grad()
def checks(model: nn.Module, ids: Sequence[Tensor], maps: Sequence[Map], padding: int = 3) -> list[Check]:
    """The reports' sanity check: the weights of each query sum to 1, none is on a key that it may not see (causality,
    pattern), and with padding behind the text none is on that, and the others are what they were.

    Padding stands where a model is trained with it: behind the sentence of a classifier and the source of a
    translator; a language model has none.
    """
    found = [
        Check("the weights of each query sum to 1", worst([part.weights.sum(dim=-1) - 1 for part in maps]), 1e-5),
        Check(
            "no weight on what the mask hides",
            worst([part.weights[..., ~part.mask] for part in maps if not part.mask.all()]),
            0.0,
        ),
    ]
    if any(part.name in ("encoder", "cross") for part in maps):
        device = next(model.parameters()).device
        max_length: int | None = model.max_length  # type: ignore[assignment]
        padding = padding if max_length is None else min(padding, max_length - len(ids[0]))
        rows = [part.to(device)[None] for part in ids]
        rows[0] = F.pad(rows[0], (0, padding), value=PAD)
        padded = model.attention(*rows)  # type: ignore[operator]
        on_padding, moved = [], []
        for part in maps:
            if part.name == "decoder" or not padding:
                continue
            weights = torch.stack([layer[0] for layer in padded[part.name]]).float().cpu()
            T, S = part.mask.shape
            on_padding.append(weights[..., :T, S:])
            moved.append(weights[..., :T, :S] - part.weights)
        found.append(Check("no weight on padding", worst(on_padding), 0.0))
        found.append(Check("padding changes no other weight", worst(moved), 1e-5))
    return found


def worst(values: Sequence[Tensor]) -> float | None:
    """The greatest absolute value, NaN if there is one; None of nothing."""
    return float(torch.cat([value.flatten() for value in values]).abs().max()) if values else None


# The picture: by pillow, in some milliseconds, so that a dashboard can have it at every few evaluations
INK, MUTED, HIDDEN, PAPER = (31, 41, 51), (96, 108, 118), (232, 232, 229), (255, 255, 255)
BLUES = [(247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107)]


@functools.cache
def font(size: int) -> Any:
    """The font that matplotlib brings."""
    spec = importlib.util.find_spec("matplotlib")
    folder = Path((spec.submodule_search_locations or [""])[0] if spec else "")
    return ImageFont.truetype(str(folder / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def colours(table: Any) -> Any:
    """Numbers from 0 to 1 as RGB, [..., 3]."""
    places = np.linspace(0, 1, len(BLUES))
    return np.stack([np.interp(table, places, [c[k] for c in BLUES]) for k in range(3)], axis=-1).astype(np.uint8)


def sideways(text: str, size: int) -> Image.Image:
    """A text that is read from below."""
    drawn = Image.new("RGB", (1 + int(font(size).getlength(text)), size + 4), PAPER)
    ImageDraw.Draw(drawn).text((0, 0), text, font=font(size), fill=INK)
    return drawn.rotate(90, expand=True)


def short(word: str, most: int = 14) -> str:
    """A token for an axis; a space shows as a low dot, so that it is seen where a word begins."""
    word = word.replace(" ", "·").replace("\n", "⏎")
    return word if len(word) <= most else f"{word[: most - 1]}…"


def draw(part: Map, title: str, scale: float | None = None) -> Image.Image:
    """A picture of a map: a row of panels for each layer, a column for each head, one colour scale for all.

    `scale` is the weight that is darkest, None for the greatest of the map. What a query may not see is grey.
    """
    L, N, T, S = part.weights.shape
    part = replace(part, weights=part.weights.detach())
    cell = max(3, min(34, 420 // max(T, S)))
    size = max(9, min(15, cell - 2))
    every = -(-size // cell)  # where the cells are too small, every so manieth token is named
    names = [[short(word) for word in words] for words in (part.queries, part.keys)]
    wide, high = (max((int(font(size).getlength(name)) for name in words), default=0) + 10 for words in names)
    titles = [[part.heading or f"layer {k + 1}, head {n + 1}" for n in range(N)] for k in range(L)]
    gap, head = 18, 46
    column = max(S * cell, *(int(font(13).getlength(text)) for row in titles for text in row)) + gap
    texts = ((17, title), (13, WHAT[part.name]))
    width = max(wide + N * column + 10, 480, *(int(font(points).getlength(text)) + 20 for points, text in texts))
    image = Image.new("RGB", (width, 70 + L * (T * cell + head) + high + 52), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((10, 10), title, font=font(17), fill=INK)
    pen.text((10, 36), WHAT[part.name], font=font(13), fill=MUTED)
    scale = max(float(part.weights.max()) if scale is None else scale, 1e-9)
    entropy, distance = part.entropy(), part.distance()
    table = colours((part.weights / scale).clamp(0, 1).nan_to_num(0).numpy())
    table[:, :, ~part.mask.numpy()] = HIDDEN
    y = 66
    for layer in range(L):
        for n in range(N):
            x = wide + n * column
            pen.text((x, y), titles[layer][n], font=font(13), fill=INK)
            said = f"entropy {entropy[layer, n]:.2f}"
            if distance is not None:
                said += f", distance {distance[layer, n]:.1f}"
            if font(11).getlength(said) <= column - 4:
                pen.text((x, y + 18), said, font=font(11), fill=MUTED)
            panel = Image.fromarray(table[layer, n]).resize((S * cell, T * cell), Image.Resampling.NEAREST)
            image.paste(panel, (x, y + 36))
            pen.rectangle((x - 1, y + 35, x + S * cell, y + 36 + T * cell), outline=(200, 204, 208))
            if layer == L - 1:
                for j in range(0, S, every):
                    label = sideways(names[1][j], size)
                    image.paste(label, (x + j * cell + (cell - size) // 2 - 1, y + 40 + T * cell))
        for i in range(0, T, every):
            place = (wide - 5, y + 36 + i * cell + cell // 2)
            pen.text(place, names[0][i], font=font(size), fill=INK, anchor="rm")
        y += T * cell + head
    y += high + 4
    bar = Image.fromarray(colours(np.linspace(0, 1, 160)[None].repeat(12, axis=0)))
    pen.text((10, y + 6), "weight  0", font=font(13), fill=INK, anchor="lm")
    image.paste(bar, (90, y))
    pen.text((256, y + 6), f"{scale:.2f}", font=font(13), fill=INK, anchor="lm")
    pen.rectangle((320, y, 334, y + 12), fill=HIDDEN)
    pen.text((342, y + 6), "may not be seen", font=font(13), fill=INK, anchor="lm")
    pen.text((10, y + 30), "row: the token that looks; column: looked at", font=font(13), fill=MUTED, anchor="lm")
    return image
