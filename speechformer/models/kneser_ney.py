"""Kneser-Ney n-gram models: the counting baseline of `lm`, and what a transformer is mixed with or learns from.

    p(w | h) = max(c(hw) - D, 0) / c(h) + D N(h) / c(h) p(w | h without its first word)

c counts n-grams at the highest order, and below it the different words that precede one. N(h) counts the different
words that follow h. Single words are interpolated with 1 / vocabulary. D = n1 / (n1 + 2 n2) for each order; n1 and n2
n-grams occur once and twice.

Kneser and Ney 1995; Chen and Goodman 1999, section 2.7 and equation 27.

Shapes: R contexts, V words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import UNKNOWN


class KneserNey:
    """The interpolated n-gram model.

    Args:
        stream: the ids of the training text.
        order: n of the longest n-gram.
        vocabulary: the number of words that can occur.
        discounts: D for each order from 1 to n, in [0, 1]; None estimates them.
    """

    def __init__(
        self, stream: Sequence[int], order: int, vocabulary: int, discounts: Sequence[float] | None = None
    ) -> None:
        self.order, self.vocabulary = order, vocabulary
        self.counts: list[Counter[tuple[int, ...]]] = [Counter(zip(*(stream[k:] for k in range(order))))]
        for _ in range(order - 1):  # of each shorter n-gram, the longer ones that it ends
            self.counts.insert(0, Counter(gram[1:] for gram in self.counts[0]))
        self.totals: list[Counter[tuple[int, ...]]] = [Counter() for _ in self.counts]
        self.followers = [Counter(gram[:-1] for gram in counts) for counts in self.counts]
        for totals, counts in zip(self.totals, self.counts):
            for gram, count in counts.items():
                totals[gram[:-1]] += count
        self.discounts = list(discounts) if discounts is not None else [self.estimate(c) for c in self.counts]

    @staticmethod
    def estimate(counts: Counter[tuple[int, ...]]) -> float:
        """Estimate the discount of one order; never 0, so that every word is possible. Ney, Essen and Kneser 1994."""
        times = Counter(counts.values())
        return times[1] / (times[1] + 2 * times[2]) if times[1] else 0.5

    def probability(self, word: int, context: tuple[int, ...]) -> float:
        """Return p(word | context); only the last order - 1 ids of the context count."""
        p = 1 / self.vocabulary
        for k in range(min(len(context), self.order - 1) + 1):
            history = context[len(context) - k :]
            total = self.totals[k][history]
            if total == 0:
                break  # neither this history nor a longer one occurs in train
            discount = self.discounts[k]
            counted = max(self.counts[k][(*history, word)] - discount, 0) / total
            p = counted + discount * self.followers[k][history] / total * p
        return p

    @cached_property
    def tables(self) -> list[tuple[dict[tuple[int, ...], slice], Tensor, Tensor]]:
        """For histories of each length from 1 on: where their followers lie; which they are; max(c - D, 0) / c(h)."""
        tables = []
        for k in range(1, self.order):
            grams, totals = sorted(self.counts[k]), self.totals[k]
            counts = torch.tensor([self.counts[k][gram] for gram in grams], dtype=torch.float64)
            of_histories = torch.tensor([totals[gram[:-1]] for gram in grams], dtype=torch.float64)
            values = (counts - self.discounts[k]).clamp(min=0) / of_histories
            places, start = {}, 0
            for history in dict.fromkeys(gram[:-1] for gram in grams):
                places[history] = slice(start, start := start + self.followers[k][history])
            tables.append((places, torch.tensor([gram[-1] for gram in grams]), values.float()))
        return tables

    @cached_property
    def single_words(self) -> Tensor:
        """p(w) of every word, [vocabulary + 1]; that of the padding, id 0, is 0."""
        total, discount = self.totals[0][()], self.discounts[0]
        counts = torch.zeros(self.vocabulary + 1, dtype=torch.float64)
        for (word,), count in self.counts[0].items():
            counts[word] = count
        rest = discount * self.followers[0][()] / total / self.vocabulary
        p_V = (counts - discount).clamp(min=0) / total + rest
        p_V[0] = 0
        return p_V.float()

    def matched(self, context: Sequence[int]) -> int:
        """Return the number of words at the end of a context after which train has a word, at most order - 1."""
        for k in range(1, min(len(context), self.order - 1) + 1):
            if tuple(context[len(context) - k :]) not in self.totals[k]:
                return k - 1
        return min(len(context), self.order - 1)

    def distributions(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Return p(w | context) of every word after each context, [R, vocabulary + 1]; ids count from padding, 0."""
        rests, rows, words, values = [], [], [], []
        for row, context in enumerate(contexts):
            rest = 1.0
            for k in range(self.matched(context), 0, -1):
                history = tuple(context[len(context) - k :])
                places, followers, shares = self.tables[k - 1]
                place = places[history]
                rows.append(torch.full_like(followers[place], row))
                words.append(followers[place])
                values.append(shares[place] * rest)
                rest *= self.discounts[k] * self.followers[k][history] / self.totals[k][history]
            rests.append(rest)
        p_RV = torch.tensor(rests)[:, None] * self.single_words
        if rows:
            p_RV.index_put_((torch.cat(rows), torch.cat(words)), torch.cat(values), accumulate=True)
        return p_RV

    def contexts(self, stream: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what precedes every token of a stream but the first: order - 1 ids, fewer at its beginning."""
        return [tuple(stream[max(0, k - self.order + 1) : k]) for k in range(1, len(stream))]

    def log_probabilities(self, stream: Sequence[int]) -> list[float]:
        """Return log p of every token of a stream but the first, in nats.

        As for the transformers, `<unk>` is a word that has a probability.
        """
        return [math.log(self.probability(*pair)) for pair in zip(stream[1:], self.contexts(stream))]

    def perplexities(self, stream: Sequence[int]) -> tuple[float, float | None]:
        """Return exp of the mean negative log-probability, of every token but the first and of the known ones.

        The second is None without a known word.
        """
        logs = self.log_probabilities(stream)
        known = [log for log, word in zip(logs, stream[1:]) if word != UNKNOWN]
        return math.exp(-sum(logs) / len(logs)), math.exp(-sum(known) / len(known)) if known else None


class Unigram(KneserNey):
    """p(w) = (c(w) + 1) / (tokens + vocabulary): Laplace's rule."""

    def __init__(self, stream: Sequence[int], vocabulary: int) -> None:
        super().__init__(stream, 1, vocabulary, [0.0])
        self.tokens = len(stream)

    def probability(self, word: int, context: tuple[int, ...]) -> float:
        return (self.counts[0][(word,)] + 1) / (self.tokens + self.vocabulary)
