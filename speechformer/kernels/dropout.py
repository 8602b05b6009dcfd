"""Dropout with fewer random numbers on the CPU, and with all masks of a pass drawn at once.

torch's CPU dropout runs one serial Bernoulli trial per element, a large part of the training step of a small model.
Here one 64-bit draw decides four elements, so the rate is a multiple of 1/65536. Other devices use torch's dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.kernels.padding import Unpadder
from speechformer.layers.dropout import Dropout

MAX_DRAWN_AT_ONCE = 1 << 22  # elements; above, separate draws cost no more and need less memory


def dropout_masks(
    shapes: Sequence[Sequence[int]], rate: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Draw dropout masks on the CPU: 0 with probability `rate`, else 1 / (1 - rate), independent elements.

    Several shapes give the same masks, to the bit, as one call for each.
    """
    counts = [math.prod(shape) for shape in shapes]
    sizes = [4 * ((count + 3) // 4) for count in counts]  # masks never share a draw
    draws = torch.empty(sum(sizes) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    masks = torch.empty(sum(sizes), dtype=dtype)
    torch.ge(draws.view(torch.int16), round(rate * 65536) - 32768, out=masks).mul_(1 / (1 - rate))
    parts = zip(shapes, counts, masks.split(sizes))
    return [(part[:count] if count % 4 else part).view(shape) for shape, count, part in parts]


class FastDropout(Dropout):
    """Dropout that takes masks drawn ahead, or draws its own."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.ahead: list[Tensor] = []  # masks for the rest of this pass, the next one last

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) if self.active else x

    def drop(self, x: Tensor) -> Tensor:
        """Drop elements, in evaluation too: a checkpoint may compute its block again after training mode ended."""
        return x * self.mask(x.shape, x.dtype) if x.device.type == "cpu" else F.dropout(x, self.rate)

    def mask(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the factor of each element of the next tensor on the CPU."""
        return self.ahead.pop().to(dtype) if self.ahead else self.draw([shape], dtype)[0]

    def draw(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Draw the masks of several tensors."""
        return dropout_masks(shapes, self.rate, dtype)


def draw_ahead(
    uses: Sequence[tuple[FastDropout, Sequence[int]]], dtype: torch.dtype, unpadder: Unpadder | None = None
) -> None:
    """Draw all masks of a forward pass in the order of their use. Each use gets the mask it would draw itself.

    `uses` are dropouts of one rate and the shapes they meet, [B, N, T, T] or [B, T, D] ([R, D] with an unpadder).
    """
    shapes = [shape for _, shape in uses]
    small = sum(map(math.prod, shapes)) <= MAX_DRAWN_AT_ONCE
    masks = uses[0][0].draw(shapes, dtype) if small else [use.draw([shape], dtype)[0] for use, shape in uses]
    for dropout, _ in uses:
        dropout.ahead.clear()
    for (dropout, shape), mask in zip(reversed(uses), reversed(masks)):
        dropout.ahead.append(mask if unpadder is None or len(shape) == 4 else unpadder.unpad(mask))
