"""Batches: training rows in an order that depends on (seed, epoch) alone, evaluation rows sorted by length.

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import IGNORE, PAD

EVALUATION_TOKENS = 4096  # of an evaluation batch
LONG_STREAM = 1 << 20  # tokens; from here on an epoch is no permutation of all windows
Stream = Tensor  # ids, [n]: int64 in memory, or int32 in a file that is mapped into memory
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
    cut = {name: tensor[:, :max_length] if tensor.ndim == 2 else tensor for name, tensor in rows.items()}
    return {name: tensor.index_select(0, chosen) for name, tensor in cut.items()}


def evenly_spaced(rows: int, total: int, tokens: int | None) -> Tensor:
    """Return the indices of rows that have about `tokens` of `total`; of all if they have no more, or for None."""
    number = rows if tokens is None or total <= tokens else max(1, rows * tokens // total)
    return torch.arange(number) * rows // number


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

    def remaining(self) -> Iterable[Tensor]:
        """Return the indices of the rows of each batch that is left of the epoch."""
        return self.order(self.epoch)[self.batches_done :]

    def batch(self, chosen: Tensor) -> Batch:
        """Return the rows with these indices as a batch."""
        raise NotImplementedError

    def weight(self, batch: Batch) -> int:
        """Return the denominator of the mean loss of a batch."""
        return len(batch["ids"])

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.batches_done = epoch, 0

    def __iter__(self) -> Iterator[Batch]:
        k, n = self.shard
        for chosen in self.remaining():
            self.batches_done += 1
            batch = self.batch(chosen)
            if n > 1:
                # A device without rows gets one of weight 0: the other devices wait for its gradients.
                ours = self.batch(chosen[k::n] if k < len(chosen) else chosen[:1])
                batch = {**ours, "weight": (k < len(chosen)) * self.weight(ours) * n / self.weight(batch)}
            yield batch
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


class WindowBatches(SeededBatches):
    """Batches of windows of `length` tokens anywhere in a long stream, drawn at random for each batch.

    An epoch has as many windows as the stream, but some more than once.
    """

    def __init__(self, stream: Stream, length: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(len(stream) - length + 1, size, seed, shard)
        self.stream, self.column = stream, torch.arange(length)

    def remaining(self) -> Iterable[Tensor]:
        for k in range(self.batches_done, len(self)):
            digest = hashlib.sha256(f"{self.seed} {self.epoch} {k}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            yield torch.randint(self.N, (min(self.size, self.N - k * self.size),), generator=generator)

    def batch(self, chosen: Tensor) -> Batch:
        return {"ids": self.stream[chosen[:, None] + self.column].long()}


def by_length(lengths_N: Tensor, longest: int) -> Sequence[Tensor]:
    """Return the indices of the rows of each evaluation batch, sorted by length to save padding."""
    return lengths_N.argsort(stable=True).split(max(1, EVALUATION_TOKENS // longest))


def sorted_batches(rows: Rows) -> list[Rows]:
    """Return all rows in evaluation batches."""
    lengths_N = lengths_of(rows)
    return [take(rows, chosen, lengths_N) for chosen in by_length(lengths_N, rows["ids"].shape[1])]


class EvaluationBatches:
    """All rows of all parts once; `batch["part"]` names the part.

    Args:
        parts: rows, or batches of them. Those of `Windows` are read when it is their turn.
    """

    def __init__(self, parts: Mapping[Any, Rows | list[Batch] | Windows]) -> None:
        self.batches = {
            part: sorted_batches(rows) if isinstance(rows, dict) else rows for part, rows in parts.items()
        }

    def __len__(self) -> int:
        return sum(map(len, self.batches.values()))

    def __iter__(self) -> Iterator[Batch]:
        for part, batches in self.batches.items():
            for batch in batches:
                yield {"part": part, **batch}


@dataclass(frozen=True)
class Windows:
    """Windows over a stream of ids in which each token but the first of a segment is a target at most once.

    Iterating gives batches of windows of similar length, which are read from the stream when it is their turn.

    Args:
        start: place of the first input of each window, [W].
        size: number of inputs, [W].
        scored: the first target, counted from 0, that no earlier window scores, [W].
    """

    stream: Stream
    start: Tensor
    size: Tensor
    scored: Tensor

    @classmethod
    def cover(cls, stream: Stream, begins: Tensor, ends: Tensor, block_size: int, stride: int) -> Windows:
        """Cover segments of a stream, from `begins` up to, but without, `ends`; each token but the first is a target.

        A window holds `block_size` inputs and starts `stride` after the previous one. It scores only targets that no
        earlier window scored. With stride == block_size these are blocks: a target has 1 to block_size tokens of
        context. With a smaller stride it has at least block_size - stride + 1, except at the start of a segment.
        Press, Smith, Lewis 2021, "Shortformer", section 2, "sliding window".
        """
        inputs = ends - begins - 1
        count = (1 - (block_size - inputs).clamp(max=0) // stride) * (inputs > 0)
        segment = torch.repeat_interleave(torch.arange(len(begins)), count)
        offset = (torch.arange(len(segment)) - (count.cumsum(0) - count)[segment]) * stride
        size = (inputs[segment] - offset).clamp(max=block_size)
        return cls(stream, begins[segment] + offset, size, (offset > 0) * (block_size - stride))

    @property
    def tokens(self) -> int:
        """The number of targets."""
        return int((self.size - self.scored).sum())

    def sample(self, tokens: int | None) -> Windows:
        """Return evenly spaced windows with about this many targets; all if they have no more, or for None."""
        chosen = evenly_spaced(len(self.start), self.tokens, tokens)
        return replace(self, start=self.start[chosen], size=self.size[chosen], scored=self.scored[chosen])

    def rows(self, chosen: Tensor) -> Rows:
        """Return ids and targets of some windows, and the targets' places in the stream, [windows, longest].

        Targets that are not scored are -100.
        """
        start, size, scored = self.start[chosen], self.size[chosen], self.scored[chosen]
        column = torch.arange(int(size.max()))
        is_input = column < size[:, None]
        places = torch.where(is_input, start[:, None] + column, start[:, None])
        ids = torch.where(is_input, self.stream[places].long(), PAD)
        targets = torch.where(is_input & (column >= scored[:, None]), self.stream[places + 1].long(), IGNORE)
        return {"ids": ids, "targets": targets, "places": places + 1}

    @functools.cached_property
    def batches(self) -> Sequence[Tensor]:
        """The indices of the windows of each batch."""
        return by_length(self.size, int(self.size.max()))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Rows]:
        return map(self.rows, self.batches)
