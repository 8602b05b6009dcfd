"""Dropout.

    y = x m / (1 - rate),   m = 1 with probability 1 - rate, else 0

Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Dropout of single elements, in training mode only.

    Args:
        rate: probability that an element becomes 0.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def active_rate(self) -> float:
        """The rate in training mode, else 0."""
        return self.rate if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some elements zeroed and the others scaled up, same shape."""
        if not self.active_rate:
            return x
        return x * (torch.rand_like(x) >= self.rate) / (1 - self.rate)
