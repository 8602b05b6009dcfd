"""probe=recall: find the value of a key, in several pairs."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from speechformer.errors import require
from speechformer.options import Size
from speechformer.probes.base import ASK, BEGIN, Draws, Ints, Piece, Probe, doubling, doubling_group, pairs


class Recall(Probe):
    """Find the values of keys; the dots mark what a model predicts.

        ^ k3 v7 k0 v2 k9 v7 | k9 v7 k3 v7
                                 .     .

    Multi-query associative recall: Arora et al. 2023, "Zoology", section 4; all pairs stand before the queries. A
    perfect solution joins each value with the key before it, then attends to the pair of the query's key: two layers,
    order only between neighbours. The state of a recurrent network must hold all pairs. Accuracy is also measured by
    the gap from a query back to its key.

    Args:
        keys, values: different keys and values; those of a row are independent of each other.
        queries: in a row, of different keys; in rows of fewer pairs, all of them.
        lengths: pairs in a row; see `Probe`.
    """

    groups: ClassVar[tuple[str, ...]] = doubling("gap")

    keys: Size
    values: Size
    queries: Size

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        rule = f"at least {self.longest}, as the keys of a row differ"
        require(self.keys >= self.longest, "probe.keys", rule, self.keys)

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        return [BEGIN, ASK, *(f"k{k}" for k in range(self.keys)), *(f"v{k}" for k in range(self.values))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N, size = int(length.max()), length[:, None]
        keys = 2 + draws.orders(self.keys, self.keys)[:, :N]
        values = 2 + self.keys + draws.integers(self.values, N)
        asked = draws.orders(size, N)[:, : self.queries]
        gaps = 2 * size + 1 + 2 * np.arange(asked.shape[1]) - 2 * asked
        asked_keys, answers = (np.take_along_axis(x, asked, axis=1) for x in (keys, values))
        queries = pairs(asked_keys, answers, length.clip(max=self.queries), self.values, doubling_group(gaps))
        return [pairs(keys, values, length), ASK, queries]
