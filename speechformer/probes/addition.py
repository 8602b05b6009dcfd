"""probe=addition: add two numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from speechformer.probes.base import BEGIN, Draws, Ints, Piece, Probe, Rows, join

PLUS, EQUALS = "+", "="


class Addition(Probe):
    """Add two numbers of as many digits, the least significant first; the dots mark what a model predicts.

        ^ 7 1 + 5 9 = 2 1 1    (17 + 95 = 112)
                      . . .

    Zhou et al. 2024, "Transformers Can Achieve Length Generalization But Not Robustly", section 3: reversed digits,
    and zeros at the end so that all sums have one digit more. A perfect solution attends to the two digits of its
    place, and knows the carry from the two digits before and their sum. Seeds differ much in longer numbers.

    Args:
        lengths: digits of each number; see `Probe`.
    """

    def __init__(self, **lengths: Any) -> None:
        super().__init__(**lengths)
        self.vocabulary = [*map(str, range(10)), BEGIN, PLUS, EQUALS]

    def symbols_of(self, length: int) -> int:
        return 3 * length + 4

    def draw(self, draws: Draws, length: Ints) -> Rows:
        B, digits = len(length), int(length.max())
        first, second = draws.integers(10, digits), draws.integers(10, digits)
        total, carry = np.zeros_like(first), np.zeros(B, np.int64)
        for place in range(digits):
            total[:, place] = carry + first[:, place] + second[:, place]
            carry = np.where(place < length, total[:, place] // 10, carry)  # that of the last place remains
        begin, plus, equals = (self.piece(word, B) for word in (BEGIN, PLUS, EQUALS))
        numbers = (begin, Piece(first, length), plus, Piece(second, length), equals)
        return join(length, *numbers, Piece(total % 10, length, 10), Piece(carry[:, None], choices=2))
