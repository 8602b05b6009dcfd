"""A language model mixed with counts.

    p(w | h) = weight_k p_model(w | h) + (1 - weight_k) p_KN(w | h)

k is the number of words at the end of h after which the Kneser-Ney model has counted something: the more it has
counted, the more it may weigh. The weights maximise the likelihood of a held-out text, by expectation maximisation.

Jelinek and Mercer 1980, "Interpolated estimation of Markov source parameters from sparse data".

Shapes: R targets, V words; for `CountsMixture.add` B texts of T tokens, and of histories of one length H that are
followed by G different words in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speechformer.models.kneser_ney import KneserNey

EM_ITERATIONS = 500  # the likelihood of two fixed components has one maximum


class Counted(NamedTuple):
    """log p_KN of R targets, in nats, and how many words of their contexts it has counted."""

    logs_R: Tensor
    matched_R: Tensor


class Histories(NamedTuple):
    """The histories of k words that train has, as tensors.

    A history's number is its place in `keys`; its key is base times the number of the history without its first word,
    plus that word. An n-gram's key is base times the number of its history plus the last word.
    """

    keys_H: Tensor
    backoff_H: Tensor  # D N(h) / c(h)
    grams_G: Tensor  # their keys, ascending
    values_G: Tensor  # max(c - D, 0) / c(h)


def histories_of(model: KneserNey, base: int) -> list[Histories]:
    """Return the histories of each length from 1 on of a Kneser-Ney model."""
    numbers: dict[tuple[int, ...], int] = {(): 0}
    tables = []
    for k in range(1, model.order):
        totals, followers, discount = model.totals[k], model.followers[k], model.discounts[k]
        keys = sorted((numbers[h[1:]] * base + h[0], h) for h in totals if h[1:] in numbers)
        numbers = {h: number for number, (_, h) in enumerate(keys)}
        grams = sorted(
            (numbers[gram[:-1]] * base + gram[-1], max(count - discount, 0) / totals[gram[:-1]])
            for gram, count in model.counts[k].items()
            if gram[:-1] in numbers
        )
        backoff = torch.tensor([discount * followers[h] / totals[h] for _, h in keys], dtype=torch.float64)
        keys_H, grams_G = torch.tensor([key for key, _ in keys]), torch.tensor([key for key, _ in grams])
        values_G = torch.tensor([value for _, value in grams], dtype=torch.float64)
        tables.append(Histories(keys_H, backoff.float(), grams_G, values_G.float()))
    return tables


def find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of keys among ascending ones, and which were found."""
    places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return places, keys[places] == wanted


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
        return KneserNey(self.stream.tolist(), self.order, self.vocabulary)

    def count(self, stream: Sequence[int]) -> Counted:
        """Return what the counts say of every token of a stream but the first."""
        matched = [self.kneser_ney.matched(context) for context in self.kneser_ney.contexts(stream)]
        logs = torch.tensor(self.kneser_ney.log_probabilities(stream), dtype=torch.float64)
        return Counted(logs, torch.tensor(matched))

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

    @cached_property
    def histories(self) -> list[Histories]:
        """What `add` looks up."""
        tables = histories_of(self.kneser_ney, self.vocabulary + 1)
        return [histories for histories in tables if len(histories.grams_G)]

    def add(self, ids_BT: Tensor, logits_BTV: Tensor) -> Tensor:
        """Return the logits of the mixture after each token of some texts, [B, T, V], by tensor operations alone.

        Equal to `forward` for each context, in more time: every word is looked up after every history, on the CPU.
        """
        ids, base, T = ids_BT.cpu().long(), self.vocabulary + 1, ids_BT.shape[1]
        number, matched, is_known = torch.zeros_like(ids), torch.zeros_like(ids), torch.ones_like(ids) == 1
        p_BTV = self.kneser_ney.single_words.expand(*ids.shape, base)
        for k, histories in enumerate(self.histories, start=1):
            first = nn.functional.pad(ids, (k - 1, 0))[:, :T]  # the padding, id 0, is in no history
            places, has_history = find(histories.keys_H, number * base + first)
            is_known = is_known & has_history
            number, matched = torch.where(is_known, places, 0), matched + is_known
            places, has_gram = find(histories.grams_G, number[..., None] * base + torch.arange(base))
            counted = torch.where(has_gram, histories.values_G[places], 0)
            longer = counted + histories.backoff_H[number][..., None] * p_BTV
            p_BTV = torch.where(is_known[..., None], longer, p_BTV)
        weights = self.weights.cpu().double()[matched][..., None]
        model_BTV = logits_BTV.cpu().double().softmax(dim=-1)
        counts_BTV = nn.functional.pad(p_BTV.double(), (0, logits_BTV.shape[-1] - base))
        return (weights * model_BTV + (1 - weights) * counts_BTV).log().to(logits_BTV)

    def forward(self, logits_V: Tensor, context: Sequence[int]) -> Tensor:
        """Return the logits of the mixture from those of the model after a context, [V]."""
        matched = self.kneser_ney.matched(context)
        weight, counts_V = float(self.weights[matched]), torch.zeros(len(logits_V), dtype=torch.float64)
        counts_V[: self.vocabulary + 1] = self.kneser_ney.distributions([context])[0]
        return (weight * logits_V.double().softmax(dim=0) + (1 - weight) * counts_V).log().to(logits_V.dtype)
