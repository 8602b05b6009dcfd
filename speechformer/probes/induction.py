"""probe=induction: continue as before."""

from __future__ import annotations

import functools
from typing import ClassVar

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
)


class Induction(Probe):
    """Continue from a symbol as the string did after it; the dots mark what a model predicts.

        ^ d k a c b f e | a c b f
                            . . .

    Olsson et al. 2022, "In-context Learning and Induction Heads". The symbols of a string differ. A perfect solution
    is an induction head: one layer attends to the symbol before, the next one to the symbol that followed the last
    time. It needs order only between neighbours. Accuracy is also measured by the gap from a symbol to its last
    occurrence.

    Args:
        symbols: different symbols, at least as many as in the longest string.
        answers: in a row.
        lengths: symbols in the string; see `Probe`.
    """

    groups: ClassVar[tuple[str, ...]] = doubling("gap")

    symbols: Size
    answers: Size

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        rule = f"at least {self.longest}, as those of a string differ"
        require(self.symbols >= self.longest, "probe.symbols", rule, self.symbols)
        rule = f"below {self.shortest}, the length of the shortest string"
        require(self.answers < self.shortest, "probe.answers", rule, self.answers)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, *letters(self.symbols)]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        size = length[:, None]
        string = 2 + draws.orders(self.symbols, self.symbols)[:, : int(length.max())]
        start = draws.integers(size - self.answers, 1)
        again = np.take_along_axis(string, start + np.arange(self.answers + 1), axis=1)
        choices = np.array([0, *[self.symbols] * self.answers])
        answer = Piece(again, None, choices, doubling_group(size + 1 - start))
        return [Piece(string, length), ASK, answer]
