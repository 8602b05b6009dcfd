"""Dropout, with fewer random numbers on the CPU.

torch's CPU dropout draws its mask with one serial Bernoulli trial for each element, a fifth of the training step
of a small model. Here one 64-bit draw decides four elements, so the rate is a multiple of 1/65536. Other devices
use torch's own.

Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.kernels.padding import Unpadder


def masks(
    shapes: Sequence[Sequence[int]], rate: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> list[Tensor]:
    """CPU tensors of 0 with probability `rate` and else of 1 / (1 - rate), each element for itself.

    Of several shapes at once they are the same, bit for bit, as one after another.
    """
    sizes = [4 * ((math.prod(shape) + 3) // 4) for shape in shapes]  # no draw is shared between two of them
    draws = torch.empty(sum(sizes) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    kept = torch.empty(sum(sizes), dtype=dtype)
    torch.ge(draws.view(torch.int16), round(rate * 65536) - 32768, out=kept).mul_(1 / (1 - rate))
    return [own[: math.prod(shape)].view(shape) for shape, own in zip(shapes, kept.split(sizes))]


class Dropout(nn.Module):
    """In training each element is set to 0 with probability `rate`, and the others are divided by 1 - rate. In
    evaluation nothing is done."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.ahead: list[Tensor] = []  # the masks that it will take next, the first one last

    @property
    def active(self) -> bool:
        """Whether anything is done."""
        return self.training and self.rate > 0

    def forward(self, x: Tensor, tokens: Unpadder | None = None) -> Tensor:
        """x, of which some is dropped; it may be `tokens` alone, [R, D], which meet what they would with padding."""
        if not self.active:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        if tokens is None:
            return x * self.mask(x.shape, x.dtype)
        return x * tokens.unpad(self.mask((tokens.B, tokens.T, x.shape[1]), x.dtype))

    def mask(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The factor of each element of a tensor on the CPU."""
        return self.ahead.pop() if self.ahead else self.masks([shape], dtype)[0]

    def masks(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Those of several tensors."""
        return masks(shapes, self.rate, dtype)


AT_ONCE = 1 << 22  # elements; where there are more, each mask is work enough


def draw_ahead(places: Sequence[tuple[Dropout, Sequence[int]]], dtype: torch.dtype) -> None:
    """Make the masks of a whole pass at once, for dropouts of one rate and the shapes that they will meet, in order.

    They are those that each would make in its turn; but of a small model, to begin costs more than to do it.
    """
    for dropout, _ in places:
        dropout.ahead.clear()
    shapes = [shape for _, shape in places]
    if sum(map(math.prod, shapes)) <= AT_ONCE:
        made = places[0][0].masks(shapes, dtype)
        for (dropout, _), mask in zip(reversed(places), reversed(made)):
            dropout.ahead.append(mask)
