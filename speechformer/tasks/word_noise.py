"""Words replaced at random in training.

    task.unknown_rate   a word that occurs once in train is read and predicted as <unk>, which is a target
                        otherwise only with task.min_count or vocab_size: a language model learns when new words
                        come, a classifier what it can tell without them
    task.noise          an input word is replaced by one drawn by its frequency in train, the target is not
                        (Xie et al. 2017, "Data Noising as Smoothing in Neural Network Language Models", "unigram")

Shapes: B rows, T tokens, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.errors import UserError


class WordNoise:
    """Replaces words of training batches.

    Args:
        stream: the ids of the training text.
        vocab_size: V.
        unknown_rate: the chance that an occurrence of a word that occurs once becomes <unk>.
        noise: the chance that an input is replaced.
    """

    def __init__(self, stream: Tensor, vocab_size: int, unknown_rate: float, noise: float) -> None:
        self.unknown_rate, self.noise = unknown_rate, noise
        self.counts_V = stream.bincount(minlength=vocab_size)

    def check(self) -> None:
        """Raise a `UserError` if no word could become <unk>."""
        if self.unknown_rate and not (self.counts_V == 1).any():
            raise UserError(
                "task.unknown_rate replaces words that occur once in train, and there are none, as in the sample. "
                "Set it to 0, or train on another text; for the speeches: python -m speechformer.download speeches"
            )

    def with_unknown(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Return ids of any shape in which some words that occur once are <unk>."""
        if not self.unknown_rate:
            return ids
        drawn = torch.rand(ids.shape, generator=generator) < self.unknown_rate
        return ids.where(~((self.counts_V == 1)[ids.cpu()] & drawn).to(ids.device), UNKNOWN)

    def inputs(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Return ids of any shape in which some are replaced by others."""
        if not self.noise:
            return ids
        drawn = torch.rand(ids.shape, generator=generator) < self.noise
        others = torch.multinomial(self.counts_V.double(), ids.numel(), replacement=True, generator=generator)
        return ids.where(~drawn.to(ids.device), others.view(ids.shape).to(ids.device))
