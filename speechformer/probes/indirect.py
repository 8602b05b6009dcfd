"""probe=indirect: which symbol stands at a place, or at which place does a symbol stand?"""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

import numpy as np

from speechformer.errors import require
from speechformer.options import Size
from speechformer.probes.base import (
    ASK,
    BEGIN,
    Draws,
    Ints,
    Piece,
    Probe,
    doubling,
    doubling_group,
    letters,
    pairs,
)


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

    groups: ClassVar[tuple[str, ...]] = doubling("place")

    by: Literal["position", "content"]
    symbols: Size
    queries: Size

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        rule = f"at most probe.max_length={self.max_length}, as training names no place beyond it"
        require(self.longest <= self.max_length, "probe.test_lengths", rule, self.test_lengths)
        rule = f"at least {self.longest}, as those of a string differ"
        require(self.symbols >= self.longest, "probe.symbols", rule, self.symbols)
        rule = f"at most {self.shortest}, the length of the shortest string"
        require(self.queries <= self.shortest, "probe.queries", rule, self.queries)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, *letters(self.symbols), *map(str, range(1, self.max_length + 1))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N = int(length.max())
        string = 2 + draws.orders(self.symbols, self.symbols)[:, :N]
        places = draws.orders(length[:, None], N)[:, : self.queries]
        names, symbols = 2 + self.symbols + places, np.take_along_axis(string, places, axis=1)
        if self.by == "position":
            queries = pairs(names, symbols, None, self.symbols, doubling_group(places + 1))
        else:
            queries = pairs(symbols, names, None, length[:, None], doubling_group(places + 1))
        return [Piece(string, length), ASK, queries]
