"""BPE-dropout: another segmentation of each word each time, which regularizes translation from few pairs.

Source: Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization". Wherever byte-pair encoding
could merge two symbols, it is kept from it with a probability, at each of its steps anew.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from speechformer.corpora.subwords import Subwords


class BPEDropout:
    """Segments texts with the merges of a vocabulary, some of which are left out at random.

    `tokenizers` can do this, but draws from the system's random numbers, so a run could not be repeated.

    Args:
        subwords: a vocabulary of kind "bpe".
        rate: the probability with which a possible merge is left out; with 0 segmentations are those of `subwords`.
    """

    def __init__(self, subwords: Subwords, rate: float) -> None:
        model: dict[str, Any] = json.loads(subwords.tokenizer.to_str())["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.split, self.rate = subwords.tokenizer.pre_tokenizer.pre_tokenize_str, rate

    def encode(self, text: str, generator: random.Random) -> list[int]:
        """Return the ids of a text, without <bos> and <eos>."""
        words = (word for word, _ in self.split(f" {text}"))
        return [self.ids[symbol] for word in words for symbol in self.symbols(word, generator)]

    def symbols(self, word: str, generator: random.Random) -> list[str]:
        """Return the symbols of a word: of the merges that are not left out, the one learned first, until none is."""
        symbols = list(word)
        while merges := list(self.merges(symbols, generator)):
            _, place = min(merges)
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return symbols

    def merges(self, symbols: list[str], generator: random.Random) -> Iterator[tuple[int, int]]:
        """Yield the rank and place of each possible merge that is not left out."""
        for place, pair in enumerate(itertools.pairwise(symbols)):
            rank = self.ranks.get(pair)
            if rank is not None and (not self.rate or generator.random() >= self.rate):
                yield rank, place
