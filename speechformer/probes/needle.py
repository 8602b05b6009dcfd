"""probe=needle: find a symbol in a long text."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from speechformer.errors import require
from speechformer.options import Size
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, letters, pairs


class Needle(Probe):
    """Find the symbols that follow marks in a long string; the dots mark what a model predicts.

        ^ d a M1 f a c b M0 d e | M0 d M1 f
                                     .    .

    Kamradt 2023, "Needle in a Haystack"; passkeys of Mohtashami and Jaggi 2023, "Landmark Attention", section 4.2.
    A perfect solution attends to the symbol behind the mark, wherever it stands. Accuracy is also measured by depth,
    the share of the string before the mark, in quarters.

    Args:
        symbols: different symbols of the string.
        needles: marked symbols in a row, each with its own mark.
        lengths: symbols in the string, with marks; see `Probe`.
    """

    groups: ClassVar[tuple[str, ...]] = ("depth_0_25", "depth_25_50", "depth_50_75", "depth_75_100")

    symbols: Size
    needles: Size

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        most = self.shortest // 2
        require(self.needles <= most, "probe.needles", f"at most {most}, half of the shortest string", self.needles)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, *letters(self.symbols), *(f"M{k}" for k in range(self.needles))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        K, size = self.needles, length[:, None]
        string, marks = 2 + draws.integers(self.symbols, int(length.max())), draws.orders(K, K)
        places = np.sort(draws.orders(size - K, int(length.max()) - K)[:, :K], axis=1) + np.arange(K)
        np.put_along_axis(string, places, 2 + self.symbols + marks, axis=1)
        asked = draws.orders(K, K)
        marks, places = (np.take_along_axis(x, asked, axis=1) for x in (marks, places))
        answers = np.take_along_axis(string, places + 1, axis=1)
        queries = pairs(2 + self.symbols + marks, answers, None, self.symbols, 4 * places // size)
        return [Piece(string, length), ASK, queries]
