"""Dropout, with fewer random numbers on the CPU.

torch's CPU dropout draws its mask with one serial Bernoulli trial for each element, a fifth of the training step
of a small model. Here one 64-bit draw decides four elements, so the rate is a multiple of 1/65536. Other devices
use torch's own.

Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(x: Tensor, rate: float) -> Tensor:
    """x with each element set to 0 with probability `rate` and the others divided by 1 - rate; same shape."""
    if rate == 0 or x.device.type != "cpu":
        return F.dropout(x, rate)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    sixteen_bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    mask = (sixteen_bits >= round(rate * 65536) - 32768).to(x.dtype).mul_(1 / (1 - rate))
    return x * mask


class Dropout(nn.Module):
    """`dropout` in training, nothing in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x
