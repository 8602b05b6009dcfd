"""A language model mixed with counts.

    p(w | h) = weight_k p_model(w | h) + (1 - weight_k) p_KN(w | h)

k is the number of words at the end of h after which the Kneser-Ney model has counted something: the more it has
counted, the more it may weigh. The weights maximise the likelihood of a held-out text, by expectation maximisation.

Jelinek and Mercer 1980, "Interpolated estimation of Markov source parameters from sparse data".

Shapes: R targets, V words; B texts of T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.models.kneser_ney import KneserNey, contexts_of

EM_ITERATIONS = 500  # the likelihood of two fixed components has one maximum


class Counted(NamedTuple):
    """log p_KN of R targets, in nats, and how many words of their contexts it has counted."""

    logs_R: Tensor
    matched_R: Tensor


class CountsMixture(nn.Module):
    """A Kneser-Ney model of the training text and the weights of its mixture with a language model.

    Args:
        tokens: of the training text.
        order: n of the longest n-gram.
        vocabulary: the number of words that can occur.
        by_context: whether there is a weight for each number of matched words, or one.
    """

    stream: Tensor
    weights: Tensor

    def __init__(self, tokens: int, order: int, vocabulary: int, by_context: bool) -> None:
        super().__init__()
        self.order, self.vocabulary, self.by_context = order, vocabulary, by_context
        self.register_buffer("stream", torch.zeros(tokens, dtype=torch.int32))
        self.register_buffer("weights", torch.full((order,), 0.5))

    @cached_property
    def kneser_ney(self) -> KneserNey:
        """The model of counts, fitted when it is first used."""
        return KneserNey(self.stream.cpu(), self.order, self.vocabulary)

    def count(self, stream: Tensor) -> Counted:
        """Return what the counts say of every token of a stream but the first."""
        matched_R = self.kneser_ney.matched(contexts_of(stream[:-1], self.order))
        return Counted(self.kneser_ney.log_probabilities(stream), matched_R)

    def mix(self, logs_R: Tensor, counted: Counted) -> Tensor:
        """Return log p of the mixture from log p of the model, both of R targets."""
        weights_R = self.weights.cpu().double()[counted.matched_R]
        return torch.logaddexp(logs_R.cpu().double() + weights_R.log(), counted.logs_R + torch.log1p(-weights_R))

    def fit(self, logs_R: Tensor, counted: Counted) -> None:
        """Fit the weights to R targets that neither model was trained on; a weight without a target remains."""
        groups_R = counted.matched_R if self.by_context else torch.zeros_like(counted.matched_R)
        model_R, counts_R = logs_R.cpu().double().exp(), counted.logs_R.exp()
        sizes = groups_R.bincount(minlength=self.order)
        weights = torch.full((self.order,), 0.5, dtype=torch.float64)
        for _ in range(EM_ITERATIONS):
            weights_R = weights[groups_R]
            share_R = weights_R * model_R / (weights_R * model_R + (1 - weights_R) * counts_R)
            sums = torch.zeros_like(weights).index_add(0, groups_R, share_R)
            weights = torch.where(sizes > 0, sums / sizes.clamp(min=1), weights)
        weights = weights if self.by_context else weights[:1].expand(self.order)
        self.weights.copy_(weights.clamp(1e-6, 1 - 1e-6).float())

    def add(self, ids_BT: Tensor, logits_BTV: Tensor) -> Tensor:
        """Return the logits of the mixture after each token of some texts, [B, T, V], computed on the CPU."""
        contexts_BTC = contexts_of(ids_BT.cpu(), self.order)
        counts_BTV = self.kneser_ney.probabilities(contexts_BTC, self.kneser_ney.words)
        counts_BTV = nn.functional.pad(counts_BTV, (0, logits_BTV.shape[-1] - counts_BTV.shape[-1]))
        weights = self.weights.cpu().double()[self.kneser_ney.matched(contexts_BTC)][..., None]
        model_BTV = logits_BTV.cpu().double().softmax(dim=-1)
        return (weights * model_BTV + (1 - weights) * counts_BTV).log().to(logits_BTV)

    def forward(self, logits_V: Tensor, context: Sequence[int]) -> Tensor:
        """Return the logits of the mixture from those of the model after a context, [V]."""
        ids_1T = torch.tensor([[PAD, *context[1 - self.order :]]])
        return self.add(ids_1T, logits_V.expand(*ids_1T.shape, -1))[0, -1]
