"""What a probe is: rows of symbols, each with places whose next symbol, or a hidden one, a model must predict.

A row is a function of (seed, split, epoch, index) alone, so nothing is stored. The splits "train", "validation" and
"test" have no row in common, whatever the seed: a hash of a row's symbols says which split may have it, and rows of
another split are drawn again. Rows are redrawn with their length, so a length of which the training split has no row
is left out. Long rows practically never repeat in training; short ones must, because there are few of them.

Shapes: B rows, T symbols of the longest row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speechformer.errors import UserError, require
from speechformer.options import Size

Ints = NDArray[np.int64]
SPLITS = {"validation": (0, 1), "test": (1, 2), "train": (2, 8)}  # which eighths of all rows
MOST_DRAWS = 256  # of a row; an eighth of many rows is missed so often with a probability of 10^-15
AT_ONCE = {"validation": 16, "test": 16, "train": 2}  # draws of a row
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
BEGIN, ASK = "^", "|"  # the first symbol of each row, and the one before the answers


class Rows(NamedTuple):
    """Rows of symbols.

    Attributes:
        symbols: indices into the vocabulary, -1 after the end of a row, [B, T].
        choices: of each symbol that must be predicted, how many symbols can stand there; 0 for the others, [B, T].
        groups: of each symbol that must be predicted, the index of its group in `Probe.groups`, [B, T].
        answers: at these places, what must be predicted: the symbol itself, unless the probe hides it, [B, T].
    """

    symbols: Ints
    choices: Ints
    groups: Ints
    answers: Ints


def empty_rows(B: int, T: int) -> Ints:
    """Return the four arrays of rows without a symbol, [4, B, T]."""
    return np.stack([np.full((B, T), -1), *np.zeros((3, B, T), np.int64)])


class Piece(NamedTuple):
    """Consecutive symbols of each row, [B, W], of which row b has the first `length[b]`; None: all W.

    `choices`, `groups` and `answers` are those of `Rows`, and may be anything that broadcasts to [B, W]. Answers that
    are not the symbols never enter the row, so no later symbol can be told from them.
    """

    symbols: Ints
    length: Ints | None = None
    choices: Ints | int = 0
    groups: Ints | int = 0
    answers: Ints | None = None


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well mixed bits of each number: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Draws:
    """Random numbers for B rows. Those of a row depend on `stream`, its index and the order of calls alone.

    Args:
        index: of each row, [B].
        stream: what tells these rows from others: seed, split, epoch.
    """

    def __init__(self, index: Ints, *stream: object) -> None:
        start = int.from_bytes(hashlib.sha256(repr(stream).encode()).digest()[:8], "little")
        self.keys, self.calls = mix(index.astype(np.uint64) * GOLDEN + np.uint64(start)), 0

    def uniform(self, columns: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1), [B, columns]; the first ones do not depend on how many follow."""
        self.calls += 1
        start = mix(self.keys ^ np.uint64(self.calls))
        bits = mix(start[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * GOLDEN)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, high: Ints | int, columns: int) -> Ints:
        """Return integers from 0 to `high` - 1, one number or [B, 1], as [B, columns]."""
        return (self.uniform(columns) * high).astype(np.int64)

    def orders(self, size: Ints | int, columns: int) -> Ints:
        """Return the numbers from 0 to `size` - 1, one number or [B, 1], in random order, and then the others."""
        return np.where(np.arange(columns) < size, self.uniform(columns), 2).argsort(axis=1, kind="stable")


def pairs(first: Ints, second: Ints, length: Ints | None = None, choices: Ints | int = 0, groups: Any = 0) -> Piece:
    """Return a piece of pairs, [B, N] each; `choices` and `groups` are those of the second of each pair."""

    def alternate(first: Any, second: Any) -> Ints:
        both = np.broadcast_arrays(first, second, symbols)[:2]
        return np.stack(both, axis=2).reshape(len(symbols), -1)

    symbols = second
    ends = None if length is None else 2 * length
    return Piece(alternate(first, second), ends, alternate(0, choices), alternate(0, groups))


@dataclass(kw_only=True, eq=False)
class Probe:
    """A probe. A subclass is a dataclass of its options, without defaults; it sets `vocabulary` and defines `pieces`.

    Args:
        min_length, max_length: the lengths of training rows, uniformly distributed.
        test_lengths: the lengths that are also tested one by one.

    Attributes:
        vocabulary: the symbols in words.
        shortest, longest: the limits of all lengths, also those of tests.
        groups: names of the groups of answers that are also measured alone, such as distances.
    """

    min_length: Size
    max_length: Size
    test_lengths: list[Size]
    vocabulary: list[str] = field(init=False)
    groups: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        valid, lengths = self.min_length <= self.max_length, self.test_lengths
        require(valid, "probe.min_length", f"at most probe.max_length={self.max_length}", self.min_length)
        require(len({*lengths}) == len(lengths), "probe.test_lengths", "a list of different lengths", lengths)
        self.shortest, self.longest = min([self.min_length, *lengths]), max([self.max_length, *lengths])
        self.prepare()

    def prepare(self) -> None:
        """Check the options and set `vocabulary`."""
        raise NotImplementedError

    def symbols_of(self, length: int) -> int:
        """Return the number of symbols of the longest row of a length; of most probes, of all of them."""
        return self.draw(Draws(np.zeros(1, np.int64)), np.array([length])).symbols.shape[1]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        """Return what follows `BEGIN` in a random row of each length, [B]; a word stands for one symbol."""
        raise NotImplementedError

    def draw(self, draws: Draws, length: Ints) -> Rows:
        """Return a random row of each length, [B]: its pieces, one after another."""
        B, contents, ends = len(length), [], []
        for piece in (BEGIN, *self.pieces(draws, length)):
            if isinstance(piece, str):
                piece = Piece(np.full((B, 1), self.vocabulary.index(piece)))
            answers = piece.symbols if piece.answers is None else piece.answers
            contents.append(np.stack(np.broadcast_arrays(piece.symbols, piece.choices, piece.groups, answers)))
            ends.append(np.full(B, piece.symbols.shape[1]) if piece.length is None else piece.length)
        rows, start = empty_rows(B, int(np.sum(ends, axis=0).max())), np.zeros(B, np.int64)
        for content, end in zip(contents, ends):
            row, column = np.nonzero(np.arange(content.shape[2]) < end[:, None])
            rows[:, row, start[row] + column] = content[:, row, column]
            start = start + end
        return Rows(*rows)

    def rows(self, index: Ints, seed: object, split: str, epoch: int = 0, length: int | None = None) -> Rows:
        """Return the rows of a split of the data with these indices.

        Args:
            seed, epoch: those of the run.
            split: "train", "validation" or "test", which have no row in common.
            length: of all rows; None for random lengths as in training.

        Raises:
            UserError: there is no such row.
        """
        symbols = self.symbols_of(self.max_length if length is None else length)
        chosen, (first, end) = empty_rows(len(index), symbols), SPLITS[split]
        open_rows, at_once = np.arange(len(index)), AT_ONCE[split]
        for attempt in range(0, MOST_DRAWS, at_once):
            attempts = np.arange(attempt, attempt + at_once)
            draws = Draws((index[open_rows, None] * MOST_DRAWS + attempts).ravel(), seed, split, epoch, length)
            lengths = np.full(len(draws.keys), length)
            if length is None:
                lengths = self.min_length + draws.integers(self.max_length - self.min_length + 1, 1)[:, 0]
            rows = self.draw(draws, lengths)
            share = (content_hash(rows.symbols) >> np.uint64(61)).reshape(-1, at_once)
            is_ours = (share >= first) & (share < end)
            taken, width = is_ours.any(axis=1), rows.symbols.shape[1]
            source = (np.arange(len(share)) * at_once + is_ours.argmax(axis=1))[taken]
            chosen[:, open_rows[taken], :width] = np.stack(rows)[:, source]
            open_rows = open_rows[~taken]
            if not len(open_rows):
                return Rows(*chosen)
        key = f"test_lengths={length}" if length is not None else f"max_length={self.max_length}"
        raise UserError(f"probe.{key}: too few different rows exist, and none is left for {split}; use longer ones.")


def content_hash(symbols: Ints) -> NDArray[np.uint64]:
    """Return a hash of the symbols of each row, [B], which does not depend on how many -1 follow them."""
    odd = mix(np.arange(1, symbols.shape[1] + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
    return mix(((symbols + 1).astype(np.uint64) * odd).sum(axis=1, dtype=np.uint64))


def letters(number: int) -> list[str]:
    """Return names of symbols: a, b, ..., z, a1, b1, ..."""
    return [f"{chr(97 + k % 26)}{k // 26 or ''}" for k in range(number)]


def doubling(name: str) -> tuple[str, ...]:
    """Return the names of groups of numbers that double in size: 1, 2, 3 to 4, 5 to 8, ..., from 513 on."""
    return (f"{name}_1", f"{name}_2", *(f"{name}_{2**k + 1}_{2 ** (k + 1)}" for k in range(1, 9)), f"{name}_513")


def doubling_group(numbers: Ints) -> Ints:
    """Return the index in `doubling` of each number, from 1 on."""
    return np.ceil(np.log2(np.maximum(numbers, 1))).astype(np.int64).clip(0, 10)
