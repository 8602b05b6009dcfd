"""probe=copy: write a string again."""

from __future__ import annotations

from typing import Any

from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, Rows, join, letters


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

    def __init__(self, *, symbols: int, **lengths: Any) -> None:
        super().__init__(**lengths)
        self.symbols, self.vocabulary = symbols, [BEGIN, ASK, *letters(symbols)]

    def symbols_of(self, length: int) -> int:
        return 2 * length + 2

    def answer(self, string: Ints, length: Ints) -> Ints:
        """Return the answer to strings, [B, T], of these lengths, [B]."""
        return string

    def draw(self, draws: Draws, length: Ints) -> Rows:
        string, B = 2 + draws.integers(self.symbols, int(length.max())), len(length)
        answer = Piece(self.answer(string, length), length, self.symbols)
        return join(length, self.piece(BEGIN, B), Piece(string, length), self.piece(ASK, B), answer)
