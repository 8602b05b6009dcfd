"""probe=addition: add two numbers."""

from __future__ import annotations

import functools
from typing import Annotated

import numpy as np
from pydantic import Field

from speechformer.errors import require
from speechformer.options import Whole
from speechformer.probes.base import BEGIN, Draws, Ints, Piece, Probe, letters, pairs

PLUS, EQUALS = "+", "="


class Addition(Probe):
    """Add two numbers of as many digits, the least significant first; the dots mark what a model predicts.

        ^ c 7 d 1 + c 5 d 9 = c 2 d 1 e 1    (17 + 95 = 112, hints=26)
                                .   .   .
        ^ 7 1 + 5 9 = 2 1 1                  (hints=0)
                      . . .

    Zhou et al. 2024, "Transformers Can Achieve Length Generalization But Not Robustly", section 3: reversed digits,
    a hint before each digit that names its place, and a sum that always has one digit more. The hints of a row are
    consecutive letters, from a random one on. A perfect solution attends to the two digits of its place, and knows
    the carry from the digits before and their sum. Seeds differ much in longer numbers.

    Args:
        base: different digits, 10 in the paper.
        hints: different hints; 0: none.
        lengths: digits of each number; see `Probe`.
    """

    base: Annotated[int, Field(ge=2, le=10)]
    hints: Whole

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        least, hints = self.longest + 1, self.hints
        require(hints == 0 or hints >= least, "probe.hints", f"0 or at least {least}, the digits of a sum", hints)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [*map(str, range(self.base)), BEGIN, PLUS, EQUALS, *letters(self.hints)]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        digits = int(length.max())
        first, second = draws.integers(self.base, digits), draws.integers(self.base, digits)
        total, carry = np.zeros_like(first), np.zeros(len(length), np.int64)
        for k in range(digits):
            total[:, k] = carry + first[:, k] + second[:, k]
            carry = np.where(k < length, total[:, k] // self.base, carry)  # that of the last place remains
        place, size = np.arange(digits + 1), length[:, None]
        total = np.where(place == size, carry[:, None], np.hstack([total % self.base, carry[:, None]]))
        none, choices = np.zeros(digits, np.int64), np.where(place < size, self.base, 2)
        unnamed = ((first, length, none), (second, length, none), (total, length + 1, choices))
        if self.hints:
            hints = self.base + 3 + draws.integers(self.hints - size, 1) + place
            numbers = [pairs(hints[:, : values.shape[1]], values, *others) for values, *others in unnamed]
        else:
            numbers = [Piece(*number) for number in unnamed]
        return [numbers[0], PLUS, numbers[1], EQUALS, numbers[2]]
