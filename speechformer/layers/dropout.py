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


def mask(shape: Sequence[int], rate: float, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
    """A CPU tensor of 0 with probability `rate` and else of 1 / (1 - rate), each element for itself."""
    count = math.prod(shape)
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    sixteen_bits = draws.view(torch.int16)[:count].view(shape)
    kept = torch.empty(shape, dtype=dtype)
    return torch.ge(sixteen_bits, round(rate * 65536) - 32768, out=kept).mul_(1 / (1 - rate))


class Dropout(nn.Module):
    """In training each element is set to 0 with probability `rate`, and the others are divided by 1 - rate. In
    evaluation nothing is done."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        return x * self.mask(x) if x.device.type == "cpu" else F.dropout(x, self.rate)

    def mask(self, x: Tensor) -> Tensor:
        """The factor of each element of a tensor on the CPU."""
        return mask(x.shape, self.rate, x.dtype)
