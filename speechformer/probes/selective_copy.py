"""probe=selective_copy: write again what is not blank."""

from __future__ import annotations

import functools

import numpy as np

from speechformer.errors import require
from speechformer.options import Size
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, letters

BLANK = "_"


class SelectiveCopy(Probe):
    """Write the symbols again that stand between blanks; the dots mark what a model predicts.

        ^ _ d _ _ a f _ | d a f
                          . . .

    Gu and Dao 2023, "Mamba", section 4.1.1, after Jing et al. 2019. A perfect solution attends to the next symbol
    that is no blank, so it must count symbols and not places: distances vary within a row. An RNN must choose what
    to remember.

    Args:
        symbols: different symbols besides the blank.
        tokens: symbols of a row that are no blanks.
        lengths: symbols and blanks before the separator; see `Probe`.
    """

    symbols: Size
    tokens: Size

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        rule = f"at most {self.shortest}, the length of the shortest string"
        require(self.tokens <= self.shortest, "probe.tokens", rule, self.tokens)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, BLANK, *letters(self.symbols)]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        B, N = len(length), int(length.max())
        places = np.sort(draws.orders(length[:, None], N)[:, : self.tokens], axis=1)
        answer, string = 3 + draws.integers(self.symbols, self.tokens), np.full((B, N), 2)
        np.put_along_axis(string, places, answer, axis=1)
        return [Piece(string, length), ASK, Piece(answer, None, self.symbols)]
