"""probe=majority: which symbol is more frequent?"""

from __future__ import annotations

import functools

import numpy as np

from speechformer.errors import require
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe


class Majority(Probe):
    """Name the more frequent one of two symbols; the dot marks what a model predicts.

        ^ a b b a b | b
                      .

    The control. Merrill, Sabharwal, Smith 2022, "Saturated Transformers are Constant-Depth Threshold Circuits": a
    perfect solution is one head that attends to all symbols alike. Order does not matter, so no encoding should help.
    In rows that are longer than in training, those that favour near symbols have a disadvantage.

    Args:
        lengths: symbols in the string; see `Probe`. Training raises even ones by one.

    Raises:
        UserError: `max_length` or a test length is even, so that its rows would be longer than it says.
    """

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        require(self.max_length % 2 == 1, "probe.max_length", "odd", self.max_length)
        require(all(length % 2 for length in self.test_lengths), "probe.test_lengths", "odd", self.test_lengths)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return ["a", "b", BEGIN, ASK]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        odd = length | 1
        string = draws.integers(2, int(odd.max()))
        count = (string * (np.arange(string.shape[1]) < odd[:, None])).sum(axis=1)
        answer = Piece((2 * count > odd).astype(np.int64)[:, None], choices=2)
        return [Piece(string, odd), ASK, answer]
