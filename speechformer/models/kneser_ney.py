"""Kneser-Ney n-gram models: the counting baseline of `lm`, and what a transformer is mixed with or learns from.

    p(w | h) = max(c(hw) - D, 0) / c(h) + D N(h) / c(h) p(w | h without its first word)

c counts n-grams at the highest order, and below it the different words that precede one. N(h) counts the different
words that follow h. Single words are interpolated with 1 / vocabulary. D = n1 / (n1 + 2 n2) for each order; n1 and n2
n-grams occur once and twice.

Kneser and Ney 1995; Chen and Goodman 1999, section 2.7 and equation 27.

Shapes: R contexts, V words with the padding, C = n - 1 words of a context; H histories of one length, which G
different n-grams continue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.corpora.special_tokens import PAD, UNKNOWN


class Histories(NamedTuple):
    """The histories of one length that train has, and the words after them.

    A history's number is its place in `keys`; its key is V times the number of the history without its first word,
    plus that word; that of no words is 0. An n-gram's key is V times the number of its history plus the last word.
    """

    keys_H: Tensor
    backoff_H: Tensor  # D N(h) / c(h)
    grams_G: Tensor  # their keys, ascending
    values_G: Tensor  # max(c - D, 0) / c(h)


def find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of keys among ascending ones, and which were found."""
    places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return places, keys[places] == wanted


def contexts_of(ids: Tensor, order: int) -> Tensor:
    """Return the last `order` - 1 ids up to each one, [..., T, C], with `PAD` before the first."""
    return F.pad(ids.long(), (order - 2, 0), value=PAD).unfold(-1, order - 1, 1)


def estimate_discount(counts_G: Tensor) -> float:
    """Estimate the discount of one order; never 0, so that every word is possible. Ney, Essen and Kneser 1994."""
    once, twice = (int((counts_G == count).sum()) for count in (1, 2))
    return once / (once + 2 * twice) if once else 0.5


class KneserNey:
    """The interpolated n-gram model, on the CPU in double precision.

    Args:
        stream: the ids of the training text, from 1 on.
        order: n of the longest n-gram, at least 2.
        vocabulary: the number of words that can occur.
    """

    def __init__(self, stream: Tensor, order: int, vocabulary: int) -> None:
        self.order, self.vocabulary, self.words = order, vocabulary, torch.arange(vocabulary + 1)
        V, grams = vocabulary + 1, stream.long().unfold(0, order, 1)
        number = torch.zeros(len(grams), dtype=torch.long)
        levels = []
        for k in range(order):
            keys, number = (number * V + (grams[:, -1 - k] if k else 0)).unique(return_inverse=True)
            levels.append((keys, number * V + grams[:, -1]))
        self.tables: list[Histories] = []
        self.discounts: list[float] = []
        rows = torch.arange(len(grams))
        for keys, gram_keys in reversed(levels):  # each shorter n-gram counts the longer ones that it ends
            grams_G, index, counts_G = gram_keys[rows].unique(return_inverse=True, return_counts=True)
            rows = torch.empty_like(grams_G).scatter_(0, index, rows)
            history_G, discount = grams_G // V, estimate_discount(counts_G)
            totals_H = history_G.bincount(counts_G.double())
            backoff_H = discount * history_G.bincount().double() / totals_H
            values_G = (counts_G.double() - discount).clamp(min=0) / totals_H[history_G]
            self.tables.insert(0, Histories(keys, backoff_H, grams_G, values_G))
            self.discounts.insert(0, discount)
        self.parameters = sum(len(table.grams_G) for table in self.tables)

    def histories(self, contexts: Tensor) -> Iterator[tuple[Histories, Tensor, Tensor]]:
        """Yield for the last 0, 1, ... words of contexts, [..., C], the table, their numbers, and which are known."""
        number = torch.zeros(contexts.shape[:-1], dtype=torch.long)
        is_known = torch.ones_like(number, dtype=torch.bool)
        for k, table in enumerate(self.tables):
            key = number * len(self.words) + (contexts[..., -k] if k else 0)  # `PAD` is in no history
            places, has_history = find(table.keys_H, key)
            is_known = is_known & has_history
            number = torch.where(is_known, places, 0)
            yield table, number, is_known

    def matched(self, contexts: Tensor) -> Tensor:
        """Return the number of words at the end of contexts, [..., C], after which train has a word."""
        return torch.stack([is_known for *_, is_known in self.histories(contexts)]).sum(dim=0) - 1

    def probabilities(self, contexts: Tensor, words: Tensor) -> Tensor:
        """Return p(word | context) of contexts, [..., C], and words, [..., W]; that of `PAD` is 0."""
        p = (words != PAD).double() / self.vocabulary
        for table, number, is_known in self.histories(contexts):
            places, has_gram = find(table.grams_G, number[..., None] * len(self.words) + words)
            longer = torch.where(has_gram, table.values_G[places], 0) + table.backoff_H[number][..., None] * p
            p = torch.where(is_known[..., None], longer, p)
        return p

    def distributions(self, contexts_RC: Tensor) -> Tensor:
        """Return `probabilities` of all words, [R, V], in single precision and less time: no word is looked up."""
        V, rest_R = len(self.words), torch.ones(len(contexts_RC), dtype=torch.float64)
        rows, words, values = [], [], []
        for table, number_R, is_known_R in [*self.histories(contexts_RC)][:0:-1]:
            known = is_known_R.nonzero()[:, 0]
            start, end = torch.searchsorted(table.grams_G, V * (number_R[known] + torch.tensor([[0], [1]])))
            sizes = end - start
            rows.append(known.repeat_interleave(sizes))
            places = torch.arange(len(rows[-1])) + (end - sizes.cumsum(0)).repeat_interleave(sizes)
            words.append(table.grams_G[places] % V)
            values.append(table.values_G[places].float() * rest_R.float()[rows[-1]])
            rest_R = torch.where(is_known_R, rest_R * table.backoff_H[number_R], rest_R)
        single_words = self.probabilities(torch.full((self.order - 1,), PAD), self.words)
        p_RV = rest_R.float()[:, None] * single_words.float()
        return p_RV.index_put_((torch.cat(rows), torch.cat(words)), torch.cat(values), accumulate=True)

    def log_probabilities(self, stream: Tensor) -> Tensor:
        """Return log p of every token of a stream but the first, in nats.

        As for the transformers, `<unk>` is a word that has a probability.
        """
        p = self.probabilities(contexts_of(stream[:-1], self.order), stream[1:, None])
        return p[:, 0].apply_(math.log)  # torch's differs between processors

    def perplexities(self, stream: Tensor) -> tuple[float, float | None]:
        """Return exp of the mean negative log-probability, of every token but the first and of the known ones.

        The second is None without a known word.
        """
        logs = self.log_probabilities(stream)
        known = logs[stream[1:] != UNKNOWN]
        return (-logs.mean()).exp().item(), (-known.mean()).exp().item() if len(known) else None


class Unigram(KneserNey):
    """p(w) = (c(w) + 1) / (tokens + vocabulary): Laplace's rule."""

    def __init__(self, stream: Tensor, vocabulary: int) -> None:
        self.order, self.discounts, self.parameters = 1, [0.0], len(stream.unique())
        self.p_V = (stream.bincount(minlength=vocabulary + 1) + 1).double() / (len(stream) + vocabulary)

    def log_probabilities(self, stream: Tensor) -> Tensor:
        return self.p_V[stream[1:]].log()
