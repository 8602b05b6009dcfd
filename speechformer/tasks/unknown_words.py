"""Words that occur once in train, replaced by <unk> at random in training: `task.unknown_rate`.

Such a word is read and predicted as <unk>, which is a target otherwise only with `task.min_count` or `vocab_size`. A
language model learns when new words come, a classifier what it can tell without them.

Shapes: V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.errors import UserError


class UnknownWords:
    """Replaces words of training batches by <unk>.

    Args:
        stream: the ids of the training text.
        vocab_size: V.
        rate: the chance that an occurrence of a word that occurs once becomes <unk>.
    """

    def __init__(self, stream: Tensor, vocab_size: int, rate: float) -> None:
        self.rate, self.occurs_once_V = rate, stream.bincount(minlength=vocab_size) == 1

    def check(self) -> None:
        """Raise a `UserError` if no word could become <unk>."""
        if not self.occurs_once_V.any():
            raise UserError(
                "task.unknown_rate replaces words that occur once in train, and there are none, as in the sample. "
                "Set it to 0, or train on another text; for the speeches: python -m speechformer.download speeches"
            )

    def replace(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Return ids of any shape in which some words that occur once are <unk>."""
        is_replaced = torch.rand(ids.shape, generator=generator) < self.rate
        is_replaced &= self.occurs_once_V[ids.cpu()]
        return ids.where(~is_replaced.to(ids.device), UNKNOWN)
