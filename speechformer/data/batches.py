"""Batches: training rows in an order that depends on (seed, epoch) alone, evaluation rows sorted by length.

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import IGNORE, PAD

EVALUATION_TOKENS = 4096  # of an evaluation batch
Rows = dict[str, Tensor]
Batch = dict[str, Any]
Batches = Iterable[Batch]
Part = tuple[str, str]  # what a metric is measured on: ("train", ""), ("test", "obama"), ("test_sliding", "obama")


@dataclass
class Example:
    """A text that TensorBoard shows during training.

    Attributes:
        ids: the inputs of the model, [T] each.
        tokens: the same as text; of a translation also the tokens that the decoder writes.
        label: the index of the class, if the text has one.
    """

    ids: list[Tensor]
    tokens: list[list[str]]
    label: int | None = None


def lengths_of(rows: Rows) -> Tensor:
    """Return the number of tokens of each row without padding, [N]."""
    return (rows["ids"] != PAD).sum(dim=1)


def take(rows: Rows, chosen: Tensor, lengths_N: Tensor) -> Rows:
    """Return the chosen rows, cut to the longest of them."""
    max_length = int(lengths_N.index_select(0, chosen).max())
    batch = {name: tensor.index_select(0, chosen) for name, tensor in rows.items()}
    return {name: tensor[:, :max_length] if tensor.ndim == 2 else tensor for name, tensor in batch.items()}


class SeededBatches:
    """Rows in random order, a fixed number per batch; the last batch may be smaller.

    Lightning announces the epoch (`sampler.set_epoch`) and saves `state_dict()` in checkpoints. After loading, the
    epoch continues with the next batch. A subclass defines `batch`.

    Args:
        rows: number of rows, N.
        size: rows of a batch.
        shard: (k, n): each batch consists of every n-th of its rows from the k-th on, for one of n devices. It then
            has a `weight`, n times its part of the loss's denominator, so that the mean over devices of the weighted
            losses is the loss of the whole batch.
    """

    def __init__(self, rows: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        self.N, self.size, self.seed, self.shard = rows, size, seed, shard
        self.epoch = self.batches_done = 0
        self.sampler = self

    def __len__(self) -> int:
        return -(-self.N // self.size)

    def generator(self, epoch: int) -> torch.Generator:
        """Return the random numbers of an epoch."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)

    def order(self, epoch: int) -> Sequence[Tensor]:
        """Return the indices of the rows of each batch of an epoch."""
        return torch.randperm(self.N, generator=self.generator(epoch)).split(self.size)

    def batch(self, chosen: Tensor) -> Batch:
        """Return the rows with these indices as a batch."""
        raise NotImplementedError

    def weight(self, chosen: Tensor) -> int:
        """Return the denominator of the mean loss of these rows."""
        return len(chosen)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.batches_done = epoch, 0

    def __iter__(self) -> Iterator[Batch]:
        k, n = self.shard
        for chosen in self.order(self.epoch)[self.batches_done :]:
            self.batches_done += 1
            if n == 1:
                yield self.batch(chosen)
            else:
                own = chosen[k::n]
                # A device without rows gets one of weight 0: the other devices wait for its gradients.
                weight = self.weight(own) * n / self.weight(chosen)
                yield {**self.batch(own if len(own) else chosen[:1]), "weight": weight}
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.batches_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batches_done = state["epoch"], state["given"]


class TrainingBatches(SeededBatches):
    """Batches of `rows`: tensors by name, all with the same first dimension N."""

    def __init__(self, rows: Rows, batch_size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(len(rows["ids"]), batch_size, seed, shard)
        self.rows, self.lengths_N = rows, lengths_of(rows)

    def batch(self, chosen: Tensor) -> Batch:
        return take(self.rows, chosen, self.lengths_N)


class EvaluationBatches:
    """All rows of all parts once, sorted by length to save padding; `batch["part"]` names the part."""

    def __init__(self, parts: Mapping[Part, Rows]) -> None:
        self.batches: list[Batch] = []
        for part, rows in parts.items():
            lengths_N, size = lengths_of(rows), max(1, EVALUATION_TOKENS // rows["ids"].shape[1])
            batches = lengths_N.argsort(stable=True).split(size)
            self.batches += [{"part": part, **take(rows, chosen, lengths_N)} for chosen in batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def evaluation_rows(stream: Tensor, block_size: int, stride: int) -> Rows:
    """Cover a stream of n ids with windows in which each token but the first is a target exactly once.

    A window holds `block_size` inputs and starts `stride` after the previous one. It scores only targets that no
    earlier window scored. With stride == block_size these are blocks: a target has 1 to block_size tokens of
    context. With a smaller stride it has at least block_size - stride + 1, except at the start of the text. Press,
    Smith, Lewis 2021, "Shortformer", section 2, "sliding window".

    Returns:
        ids and targets, [windows, block_size]; targets that are not scored are -100.
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
