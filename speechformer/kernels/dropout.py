"""Dropout with fewer random numbers on the CPU.

torch's CPU dropout runs one serial Bernoulli trial per element, a large part of the training step of a small model.
Here one 64-bit draw decides four elements, so the rate is a multiple of 1/65536. Other devices and compiled blocks
use torch's dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.kernels.padding import Unpadder
from speechformer.layers.dropout import Dropout


def dropout_mask(
    shape: Sequence[int], rate: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a dropout mask on the CPU: 0 with probability `rate`, else 1 / (1 - rate), independent elements."""
    count = math.prod(shape)
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    mask = torch.empty(count, dtype=dtype)
    torch.ge(draws.view(torch.int16)[:count], round(rate * 65536) - 32768, out=mask).mul_(1 / (1 - rate))
    return mask.view(*shape)


class FastDropout(Dropout):
    """Dropout by `dropout_mask` on the CPU, unless it is compiled.

    Attributes:
        unpadder: if the input is the tokens without padding, [R, D]. The mask is drawn for the padded sequences,
            [B, T, D], all the same, so that a run draws what it does as a member of an ensemble.
    """

    unpadder: Unpadder | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.active_rate:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():  # which cannot trace `random_`
            return F.dropout(x, self.rate)
        if self.unpadder is None:
            return x * self.mask(x.shape, x.dtype)
        padded = (self.unpadder.B, self.unpadder.T, x.shape[-1])
        return x * self.unpadder.unpad(self.mask(padded, x.dtype))

    def mask(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the factor of each element of a tensor on the CPU."""
        return dropout_mask(shape, self.rate, dtype)
