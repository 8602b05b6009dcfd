"""probe=reverse: write a string from its end."""

from __future__ import annotations

import numpy as np

from speechformer.probes.base import Ints
from speechformer.probes.copy import Copy


class Reverse(Copy):
    """Write a string from its end; the dots mark what a model predicts.

        ^ d a a f | f a a d
                    . . . .

    Sutskever, Vinyals, Le 2014, section 3.3, reversed sources, which made RNNs better; Kazemnejad et al. 2023. A
    perfect solution attends to the symbol as far before the separator as its own place is behind it. The distance
    changes with each symbol, so relative distances alone do not tell it; an RNN can use a stack.

    Args:
        symbols: different symbols of a string.
        lengths: symbols in the string; see `Probe`.
    """

    def answer(self, string: Ints, length: Ints) -> Ints:
        source = length[:, None] - 1 - np.arange(string.shape[1])
        return np.take_along_axis(string, source.clip(0), axis=1)
