"""Perplexity as a torchmetrics metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanPerplexity(Metric):
    """exp of the mean loss per token, from the mean losses of batches and their numbers of tokens.

    torchmetrics' MeanMetric leaves NaN out, so a diverged model would look good; told not to, it forgets the weights
    (1.9.0).
    """

    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: int) -> None:
        self.total += loss * tokens
        self.count += tokens

    def compute(self) -> Tensor:
        return (self.total / self.count).exp()
