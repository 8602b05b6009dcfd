"""probe=flip_flop: what was written last?"""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from speechformer.errors import require
from speechformer.options import Rate
from speechformer.probes.base import BEGIN, Draws, Ints, Piece, Probe, doubling, doubling_group, pairs

WRITE, IGNORE, READ = 2, 3, 4


class FlipFlop(Probe):
    """Read the bit that was written last; the dots mark what a model predicts.

        ^ w 1 i 0 i 0 r 1 w 0 r 0    (w: write, i: ignore, r: read)
                        .       .

    Liu et al. 2023, "Exposing Attention Glitches with Flip-Flop Language Modeling", section 3. A row begins with a
    write and ends with a read. A perfect solution attends to the last write, however far away; an RNN needs one bit.
    Accuracy is also measured by the gap from a read back to that write, in instructions.

    Args:
        ignore: the probability that an instruction in the middle is ignored; writes and reads share the rest.
        lengths: instructions of a row; see `Probe`.
    """

    groups: ClassVar[tuple[str, ...]] = doubling("gap")

    ignore: Rate

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        require(self.shortest >= 2, "probe.min_length and probe.test_lengths", "at least 2", self.shortest)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return ["0", "1", "w", "i", "r", BEGIN]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        B, N = len(length), int(length.max())
        number, place = draws.uniform(N), np.arange(N)
        instructions = np.where(number < self.ignore, IGNORE, np.where(number < (1 + self.ignore) / 2, WRITE, READ))
        instructions[:, 0], instructions[np.arange(B), length - 1] = WRITE, READ
        written = np.maximum.accumulate(np.where(instructions == WRITE, place, 0), axis=1)
        bits, reads = draws.integers(2, N), instructions == READ
        bits = np.where(reads, np.take_along_axis(bits, written, axis=1), bits)
        return [pairs(instructions, bits, length, 2 * reads, doubling_group(place - written))]
