"""Batches: training rows in an order that is a function of (seed, epoch), evaluation rows by length.

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import IGNORE, PAD

TOKENS_A_BATCH = 4096  # of an evaluation batch


Rows = dict[str, Tensor]


Batch = dict[str, Any]


Part = tuple[str, str]  # what a figure is of: ("train", ""), ("test", "obama"), ("test_sliding", "obama")


@dataclass
class Example:
    """A text that a training shows how it treats: the ids that the model reads, [T] each, their tokens as text (for a
    translation also those that it writes), and the class if it has one."""

    ids: list[Tensor]
    words: list[list[str]]
    label: int | None = None


def lengths_of(rows: Rows) -> Tensor:
    """How many tokens of each row are not padding, [N]."""
    return (rows["ids"] != PAD).sum(dim=1)


def take(rows: Rows, chosen: Tensor, lengths_N: Tensor) -> Rows:
    """The chosen rows, cut to the max_length of them: what is padding in all of them is not computed."""
    max_length = int(lengths_N.index_select(0, chosen).max())
    batch = {name: tensor.index_select(0, chosen) for name, tensor in rows.items()}
    return {name: tensor[:, :max_length] if tensor.ndim == 2 else tensor for name, tensor in batch.items()}


class SeededBatches:
    """Batches in an order that is a function of (seed, epoch) alone.

    Lightning names the epoch (`sampler.set_epoch`), and keeps `state_dict()` in a checkpoint: loaded, the epoch goes
    on after the batches that were given already. A subclass says `order` and `batch`, and its length.

    Args:
        share: (k, n): of each batch every n-th row from the k-th on, for one of n devices. The batch then has a
            `weight`, n times its part of what the loss is a mean over: the mean over devices of weighted mean losses
            is that of the whole batch.
    """

    def __init__(self, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.seed, self.share = seed, share
        self.epoch = self.given = 0
        self.sampler = self

    def generator(self, epoch: int) -> torch.Generator:
        """The random numbers of an epoch."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)

    def order(self, epoch: int) -> Sequence[Tensor]:
        """The rows of each batch of an epoch, by index."""
        raise NotImplementedError

    def batch(self, chosen: Tensor) -> Batch:
        """Some rows."""
        raise NotImplementedError

    def weight(self, chosen: Tensor) -> int:
        """What the loss of some rows is a mean over: how many."""
        return len(chosen)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, if we are not in it already."""
        if epoch != self.epoch:
            self.epoch, self.given = epoch, 0

    def __iter__(self) -> Iterator[Batch]:
        k, n = self.share
        for chosen in self.order(self.epoch)[self.given :]:
            self.given += 1
            if n == 1:
                yield self.batch(chosen)
            else:
                own = chosen[k::n]
                # a device without rows takes one that does not count, for the others wait for it
                weight = self.weight(own) * n / self.weight(chosen)
                yield {**self.batch(own if len(own) else chosen[:1]), "weight": weight}
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class TrainingBatches(SeededBatches):
    """Rows in random order; the last batch may be smaller.

    Args:
        rows: maps names to tensors with the same first dimension N.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        super().__init__(seed, share)
        self.rows, self.batch_size = rows, batch_size
        self.lengths_N = lengths_of(rows)
        self.N = len(self.lengths_N)

    def __len__(self) -> int:
        return -(-self.N // self.batch_size)

    def order(self, epoch: int) -> Sequence[Tensor]:
        return torch.randperm(self.N, generator=self.generator(epoch)).split(self.batch_size)

    def batch(self, chosen: Tensor) -> Batch:
        return take(self.rows, chosen, self.lengths_N)


class EvaluationBatches:
    """All rows of all parts, each once, ordered by length so that little is padding; a batch carries its part."""

    def __init__(self, parts: Mapping[Part, Rows]) -> None:
        self.batches = [batch for part, rows in parts.items() for batch in self.cut(part, rows)]

    @staticmethod
    def cut(part: Part, rows: Rows) -> Iterator[Batch]:
        lengths_N = lengths_of(rows)
        order = lengths_N.argsort(stable=True)
        size = max(1, TOKENS_A_BATCH // rows["ids"].shape[1])
        for chosen in order.split(size):
            yield {"part": part, **take(rows, chosen, lengths_N)}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def evaluation_rows(stream: Tensor, block_size: int, stride: int) -> Rows:
    """Windows over a stream of n ids in which each token but the first is a target exactly once.

    A window holds `block_size` inputs and starts `stride` after the one before it; it scores only the targets
    that no earlier window has scored. With stride == block_size these are plain blocks, where a target has
    1 to block_size tokens before it; with a smaller stride it has at least block_size - stride + 1, but for the
    first ones of the text (Press, Smith, Lewis 2021, "Shortformer", section 2, "sliding window").

    Returns:
        ids and targets, [windows, block_size]; targets are -100 where not scored.
    """
    n = len(stream)
    starts = list(range(0, max(1, n - 1 - block_size + stride), stride))
    ids = torch.full((len(starts), block_size), PAD)
    targets = torch.full((len(starts), block_size), IGNORE)
    scored = 1  # the first token has no context, so it is not predicted
    for row, start in enumerate(starts):
        inputs = stream[start : min(start + block_size, n - 1)]
        ids[row, : len(inputs)] = inputs
        end = start + len(inputs) + 1
        targets[row, scored - 1 - start : len(inputs)] = stream[scored:end]
        scored = end
    return {"ids": ids, "targets": targets}
