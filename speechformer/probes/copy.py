"""probe=copy: write a string again."""

from __future__ import annotations

import functools

from speechformer.options import Size
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, letters


class Copy(Probe):
    """Write a string again; the dots mark what a model predicts.

        ^ d a a f | d a a f
                    . . . .

    Graves, Wayne, Danihelka 2014, "Neural Turing Machines", section 4.1. A perfect solution attends as far back as
    the string is long. It needs order, at a distance that differs from row to row and grows in longer strings.

    Args:
        symbols: different symbols of a string.
        lengths: symbols in the string; see `Probe`.
    """

    symbols: Size

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, *letters(self.symbols)]

    def answer(self, string: Ints, length: Ints) -> Ints:
        """Return the answer to strings, [B, T], of these lengths, [B]."""
        return string

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        string = 2 + draws.integers(self.symbols, int(length.max()))
        return [Piece(string, length), ASK, Piece(self.answer(string, length), length, self.symbols)]
