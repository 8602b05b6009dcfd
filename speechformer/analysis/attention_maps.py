"""Attention maps: the weights of every head as numbers, as a sanity check and as a picture.

For a query i with weights w_ij over the keys j:

    entropy     - sum_j w_ij ln w_ij      in nats; 0: all weight on one key, ln S: uniform over S keys
    distance    sum_j w_ij |i - j|        in tokens; defined within one sequence only

Both are averaged over the queries. Clark et al. 2019, "What Does BERT Look At?", section 3.

Shapes: L layers, N heads, T queries, S keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

from speechformer.analysis.fonts import font
from speechformer.corpora.special_tokens import PAD
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
        weights: [L, N, T, S], on the CPU; each row sums to 1.
        mask: [T, S], True where the query may attend to the key, in some layer at least.
        heading: title of the panel in the picture; None: its layer and head.
    """

    name: str
    queries: list[str]
    keys: list[str]
    weights: Tensor
    mask: Tensor
    heading: str | None = None

    def entropy(self) -> Tensor:
        """Return the mean entropy of each head's weights in nats, [L, N]."""
        return torch.special.entr(self.weights).sum(dim=-1).mean(dim=-1)

    def distance(self) -> Tensor | None:
        """Return the mean distance between query and key in tokens, [L, N]; None for cross-attention."""
        if self.name == "cross":
            return None
        i, j = torch.arange(len(self.queries))[:, None], torch.arange(len(self.keys))
        return (self.weights * (i - j).abs()).sum(dim=-1).mean(dim=-1)


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
            queries, keys, mask = tokens[2], tokens[0], torch.ones(T, S, dtype=torch.bool)
        else:
            stack: Any = getattr(model, name)
            i, j = torch.arange(T)[:, None], torch.arange(S)[None, :]
            masks = [attention_mask(pattern, i, j, stack.causal)[0, 0] for pattern in set(stack.patterns)]
            mask = torch.stack(masks).any(dim=0)
            own = tokens[-1] if len(tokens) == 1 else tokens[name == "decoder"]
            queries = keys = ([CLS] if stack.first_token is not None else []) + list(own)
        maps.append(AttentionMap(name, list(queries), list(keys), weights, mask.cpu()))
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
    sums = [part.weights.sum(dim=-1) - 1 for part in maps]
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


# Drawn with Pillow, in milliseconds: TensorBoard gets these pictures during training.
INK, MUTED, MASKED, PAPER, FRAME = (31, 41, 51), (96, 108, 118), (232, 232, 229), (255, 255, 255), (200, 204, 208)
BLUES = [(247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107)]
TOP, GAP, HEADER = 66, 18, 36  # pixels above the first row of panels, between columns, and above each panel


def text_width(text: str, size: int) -> int:
    """Return the width of a text in pixels."""
    return int(font(size, text).getlength(text))


def colours(values: Any) -> Any:
    """Map numbers from 0 to 1 to RGB, [..., 3]."""
    places = np.linspace(0, 1, len(BLUES))
    return np.stack([np.interp(values, places, [c[k] for c in BLUES]) for k in range(3)], axis=-1).astype(np.uint8)


def shorten(token: str, length: int = 14) -> str:
    """Shorten a token for an axis; a dot marks a space, which shows where a word begins."""
    token = token.replace(" ", "·").replace("\n", "⏎")
    return token if len(token) <= length else f"{token[: length - 1]}…"


def draw(part: AttentionMap, title: str, scale: float | None = None) -> Image.Image:
    """Draw a map: one row of panels for each layer, one column for each head, masked pairs in grey.

    Args:
        title: the first line of the picture.
        scale: the weight with the darkest colour; None: the largest of the map.
    """
    weights, caption = part.weights.detach(), CAPTIONS[part.name]
    L, N, T, S = weights.shape
    cell = max(3, min(34, 420 // max(T, S)))
    size = max(9, min(15, cell - 2))
    headings = [[part.heading or f"layer {k + 1}, head {n + 1}" for n in range(N)] for k in range(L)]
    queries, keys = (axis_labels(tokens, cell, size) for tokens in (part.queries, part.keys))
    keys = keys.rotate(90, expand=True)  # from bottom to top
    left, bottom = queries.width + 2, keys.height + 2
    column = max(S * cell, *(text_width(text, 13) for row in headings for text in row)) + GAP
    row_height = T * cell + HEADER + 10
    width = max(left + N * column + 10, 480, text_width(title, 17) + 20, text_width(caption, 13) + 20)
    image = Image.new("RGB", (width, TOP + L * row_height + bottom + 56), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((10, 10), title, font=font(17, title), fill=INK)
    pen.text((10, 36), caption, font=font(13), fill=MUTED)
    scale = max(float(weights.max()) if scale is None else scale, 1e-9)
    pixels = colours((weights / scale).clamp(0, 1).nan_to_num(0).numpy())
    pixels[:, :, ~part.mask.numpy()] = MASKED
    statistics = panel_statistics(part)
    for k, n in itertools.product(range(L), range(N)):
        x, y = left + n * column, TOP + k * row_height
        pen.text((x, y), headings[k][n], font=font(13), fill=INK)
        if text_width(statistics[k][n], 11) <= column - 4:
            pen.text((x, y + 18), statistics[k][n], font=font(11), fill=MUTED)
        panel = Image.fromarray(pixels[k, n]).resize((S * cell, T * cell), Image.Resampling.NEAREST)
        image.paste(panel, (x, y + HEADER))
        pen.rectangle((x - 1, y + HEADER - 1, x + S * cell, y + HEADER + T * cell), outline=FRAME)
        if n == 0:
            image.paste(queries, (0, y + HEADER - size // 2))
        if k == L - 1:
            image.paste(keys, (x - size // 2, y + HEADER + T * cell + 1))
    draw_legend(image, TOP + L * row_height + bottom + 4, scale)
    return image


def panel_statistics(part: AttentionMap) -> list[list[str]]:
    """Return the line above each panel: the head's entropy and distance."""
    entropy, distance = part.entropy().tolist(), part.distance()
    if distance is None:
        return [[f"entropy {value:.2f}" for value in row] for row in entropy]
    rows = zip(entropy, distance.tolist())
    return [[f"entropy {nats:.2f}, distance {tokens:.1f}" for nats, tokens in zip(*row)] for row in rows]


def axis_labels(tokens: Sequence[str], cell: int, size: int) -> Image.Image:
    """Draw tokens one below the other, flush right; only every second, third, ... if cells are lower than the font.

    There is room for half a line above the first and below the last.
    """
    names = [shorten(token) for token in tokens]
    width = max((text_width(name, size) for name in names), default=0)
    image = Image.new("RGB", (width + 8, len(names) * cell + 2 * (size // 2)), PAPER)
    pen = ImageDraw.Draw(image)
    for i in range(0, len(names), -(-size // cell)):
        place = (width + 4, size // 2 + i * cell + cell // 2)
        pen.text(place, names[i], font=font(size, names[i]), fill=INK, anchor="rm")
    return image


def draw_legend(image: Image.Image, y: int, scale: float) -> None:
    """Draw the colour scale and say what rows and columns are."""
    pen, text = ImageDraw.Draw(image), {"font": font(13), "anchor": "lm"}
    pen.text((10, y + 6), "weight  0", fill=INK, **text)
    image.paste(Image.fromarray(colours(np.linspace(0, 1, 160)[None].repeat(12, axis=0))), (90, y))
    pen.text((256, y + 6), f"{scale:.2f}", fill=INK, **text)
    pen.rectangle((320, y, 334, y + 12), fill=MASKED)
    pen.text((342, y + 6), "masked", fill=INK, **text)
    pen.text((10, y + 30), "row: query; column: key; each row sums to 1", fill=MUTED, **text)
