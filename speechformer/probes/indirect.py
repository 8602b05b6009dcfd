"""probe=indirect: which symbol stands at a place, or at which place does a symbol stand?"""

from __future__ import annotations

from typing import Any

import numpy as np

from speechformer.errors import pick, require
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, Rows, doubling, doubling_group, join, letters


class Indirect(Probe):
    """Name the symbol at a place, or the place of a symbol; the dots mark what a model predicts.

        ^ d k a c | 3 a 1 d    by=position        ^ d k a c | a 3 d 1    by=content
                      .   .                                     .   .

    Indirect indexing, as in Graves, Wayne, Danihelka 2014, sections 3.3 and 4: addressing by location and by content.
    A perfect solution counts from the start of the row: every place must be known, not only distances. Accuracy is
    also measured by place.

    Args:
        by: "position" or "content": what a query names.
        symbols: different symbols; those of a row differ.
        queries: in a row, of different places.
        lengths: symbols in the string; see `Probe`. Longer ones than in training would have unknown places.
    """

    groups = doubling("place")

    def __init__(self, *, by: str, symbols: int, queries: int, **lengths: Any) -> None:
        super().__init__(**lengths)
        pick(dict.fromkeys(("position", "content")), by, "probe.by")
        least, valid = min(self.min_length, *self.test_lengths, 10**9), max(self.test_lengths, default=0)
        rule = f"at most probe.max_length={self.max_length}: training names no other places"
        require(valid <= self.max_length, "probe.test_lengths", rule, self.test_lengths)
        require(symbols >= self.max_length, "probe.symbols", f"at least probe.max_length={self.max_length}", symbols)
        require(queries <= least, "probe.queries", f"at most {least}, the length of the shortest string", queries)
        self.by, self.symbols, self.queries = by, symbols, queries
        self.vocabulary = [BEGIN, ASK, *letters(symbols), *map(str, range(1, self.max_length + 1))]

    def symbols_of(self, length: int) -> int:
        return length + 2 * self.queries + 2

    def draw(self, draws: Draws, length: Ints) -> Rows:
        B, longest, N = len(length), int(length.max()), self.queries
        string = 2 + draws.orders(self.symbols, self.symbols)[:, :longest]
        places = draws.orders(length[:, None], longest)[:, :N]
        pair, choices = [2 + self.symbols + places, np.take_along_axis(string, places, axis=1)], self.symbols + 0 * places
        if self.by == "content":
            pair, choices = pair[::-1], np.repeat(length[:, None], N, axis=1)
        doubled = [np.zeros_like(places), choices], [np.zeros_like(places), doubling_group(places + 1)]
        queries, choices, groups = (np.stack(own, axis=2).reshape(B, 2 * N) for own in (pair, *doubled))
        context = (self.piece(BEGIN, B), Piece(string, length), self.piece(ASK, B))
        return join(length, *context, Piece(queries, None, choices, groups))
