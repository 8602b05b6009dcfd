"""Accuracy as a torchmetrics metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Accuracy(Metric):
    """The share of right predictions, from the numbers of right and of all ones in each batch.

    torchmetrics' counts them itself, in dozens of calls for each group of sentences and each run of an ensemble.
    """

    right: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("right", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, right: int, count: int) -> None:
        self.right += right
        self.count += count

    def compute(self) -> Tensor:
        return self.right / self.count
