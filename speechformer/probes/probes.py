"""The probes, `probe=` in the config: each a dataclass of its options with `pieces`, which draws its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from speechformer.errors import require
from speechformer.options import Rate, Size, Whole
from speechformer.probes.base import (
    ASK,
    BEGIN,
    Draws,
    Ints,
    Piece,
    Probe,
    doubling,
    doubling_group,
    letters,
    pairs,
)

PLUS, EQUALS = "+", "="
WRITE, IGNORE, READ = 2, 3, 4
BLANK = "_"


@dataclass(kw_only=True, eq=False)
class Copy(Probe):
    """Write a string again; the dots mark what a model predicts.

        ^ d a a f | d a a f
                    . . . .

    Graves, Wayne, Danihelka 2014, "Neural Turing Machines", section 4.1. A perfect solution attends as far back as
    the string is long. It needs order, at a distance that differs from row to row and grows in longer strings.

    Args:
        symbols: different symbols of a string.
        lengths: symbols in the string; see `Probe`.
    """

    symbols: Size

    def prepare(self) -> None:
        self.vocabulary = [BEGIN, ASK, *letters(self.symbols)]

    def answer(self, string: Ints, length: Ints) -> Ints:
        """Return the answer to strings, [B, T], of these lengths, [B]."""
        return string

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        string = 2 + draws.integers(self.symbols, int(length.max()))
        return [Piece(string, length), ASK, Piece(self.answer(string, length), length, self.symbols)]


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


@dataclass(kw_only=True, eq=False)
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

    def prepare(self) -> None:
        rule = f"0 or at least {self.longest + 1}, the digits of a sum"
        require(self.hints == 0 or self.hints > self.longest, "probe.hints", rule, self.hints)
        self.vocabulary = [*map(str, range(self.base)), BEGIN, PLUS, EQUALS, *letters(self.hints)]

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


@dataclass(kw_only=True, eq=False)
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

    groups = doubling("gap")

    keys: Size
    values: Size
    queries: Size

    def prepare(self) -> None:
        rule = f"at least {self.longest}, as the keys of a row differ"
        require(self.keys >= self.longest, "probe.keys", rule, self.keys)
        self.vocabulary = [BEGIN, ASK, *(f"k{k}" for k in range(self.keys)), *(f"v{k}" for k in range(self.values))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N, size = int(length.max()), length[:, None]
        keys = 2 + draws.orders(self.keys, self.keys)[:, :N]
        values = 2 + self.keys + draws.integers(self.values, N)
        asked = draws.orders(size, N)[:, : self.queries]
        gaps = 2 * size + 1 + 2 * np.arange(asked.shape[1]) - 2 * asked
        asked_keys, answers = (np.take_along_axis(x, asked, axis=1) for x in (keys, values))
        queries = pairs(asked_keys, answers, length.clip(max=self.queries), self.values, doubling_group(gaps))
        return [pairs(keys, values, length), ASK, queries]


@dataclass(kw_only=True, eq=False)
class Induction(Probe):
    """Continue from a symbol as the string did after it; the dots mark what a model predicts.

        ^ d k a c b f e | a c b f
                            . . .

    Olsson et al. 2022, "In-context Learning and Induction Heads". The symbols of a string differ. A perfect solution
    is an induction head: one layer attends to the symbol before, the next one to the symbol that followed the last
    time. It needs order only between neighbours. Accuracy is also measured by the gap from a symbol to its last
    occurrence.

    Args:
        symbols: different symbols, at least as many as in the longest string.
        answers: in a row.
        lengths: symbols in the string; see `Probe`.
    """

    groups = doubling("gap")

    symbols: Size
    answers: Size

    def prepare(self) -> None:
        rule = f"at least {self.longest}, as those of a string differ"
        require(self.symbols >= self.longest, "probe.symbols", rule, self.symbols)
        rule = f"below {self.shortest}, the length of the shortest string"
        require(self.answers < self.shortest, "probe.answers", rule, self.answers)
        self.vocabulary = [BEGIN, ASK, *letters(self.symbols)]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        size = length[:, None]
        string = 2 + draws.orders(self.symbols, self.symbols)[:, : int(length.max())]
        start = draws.integers(size - self.answers, 1)
        again = np.take_along_axis(string, start + np.arange(self.answers + 1), axis=1)
        choices = np.array([0, *[self.symbols] * self.answers])
        answer = Piece(again, None, choices, doubling_group(size + 1 - start))
        return [Piece(string, length), ASK, answer]


@dataclass(kw_only=True, eq=False)
class Indirect(Probe):
    """Name the symbol at a place, or the place of a symbol; the dots mark what a model predicts.

        ^ d k a c | 3 a 1 d    by=position        ^ d k a c | a 3 d 1    by=content
                      .   .                                     .   .

    Indirect indexing, as in Graves, Wayne, Danihelka 2014, sections 3.3 and 4: addressing by location and by content.
    A perfect solution counts from the start of the row: every place must be known, not only distances. Accuracy is
    also measured by place.

    Args:
        by: "position" or "content": what a query names.
        symbols: different symbols; those of a row differ.
        queries: in a row, of different places.
        lengths: symbols in the string; see `Probe`. Longer ones than in training would have unknown places.
    """

    groups = doubling("place")

    by: Literal["position", "content"]
    symbols: Size
    queries: Size

    def prepare(self) -> None:
        rule = f"at most probe.max_length={self.max_length}, as training names no place beyond it"
        require(self.longest <= self.max_length, "probe.test_lengths", rule, self.test_lengths)
        rule = f"at least {self.longest}, as those of a string differ"
        require(self.symbols >= self.longest, "probe.symbols", rule, self.symbols)
        rule = f"at most {self.shortest}, the length of the shortest string"
        require(self.queries <= self.shortest, "probe.queries", rule, self.queries)
        self.vocabulary = [BEGIN, ASK, *letters(self.symbols), *map(str, range(1, self.max_length + 1))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N = int(length.max())
        string = 2 + draws.orders(self.symbols, self.symbols)[:, :N]
        places = draws.orders(length[:, None], N)[:, : self.queries]
        names, symbols = 2 + self.symbols + places, np.take_along_axis(string, places, axis=1)
        if self.by == "position":
            queries = pairs(names, symbols, None, self.symbols, doubling_group(places + 1))
        else:
            queries = pairs(symbols, names, None, length[:, None], doubling_group(places + 1))
        return [Piece(string, length), ASK, queries]


@dataclass(kw_only=True, eq=False)
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

    groups = doubling("gap")

    ignore: Rate

    def prepare(self) -> None:
        require(self.shortest >= 2, "probe.min_length and probe.test_lengths", "at least 2", self.shortest)
        self.vocabulary = ["0", "1", "w", "i", "r", BEGIN]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        B, N = len(length), int(length.max())
        number, place = draws.uniform(N), np.arange(N)
        instructions = np.where(number < self.ignore, IGNORE, np.where(number < (1 + self.ignore) / 2, WRITE, READ))
        instructions[:, 0], instructions[np.arange(B), length - 1] = WRITE, READ
        written = np.maximum.accumulate(np.where(instructions == WRITE, place, 0), axis=1)
        bits, reads = draws.integers(2, N), instructions == READ
        bits = np.where(reads, np.take_along_axis(bits, written, axis=1), bits)
        return [pairs(instructions, bits, length, 2 * reads, doubling_group(place - written))]


@dataclass(kw_only=True, eq=False)
class SelectiveCopy(Probe):
    """Write the symbols again that stand between blanks; the dots mark what a model predicts.

        ^ _ d _ _ a f _ | d a f
                          . . .

    Gu and Dao 2023, "Mamba", section 4.1.1, after Jing et al. 2019. A perfect solution attends to the next symbol
    that is no blank, so it must count symbols and not places: distances vary within a row. An RNN must choose what
    to remember.

    Args:
        symbols: different symbols besides the blank.
        tokens: symbols of a row that are no blanks.
        lengths: symbols and blanks before the separator; see `Probe`.
    """

    symbols: Size
    tokens: Size

    def prepare(self) -> None:
        rule = f"at most {self.shortest}, the length of the shortest string"
        require(self.tokens <= self.shortest, "probe.tokens", rule, self.tokens)
        self.vocabulary = [BEGIN, ASK, BLANK, *letters(self.symbols)]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        B, N = len(length), int(length.max())
        places = np.sort(draws.orders(length[:, None], N)[:, : self.tokens], axis=1)
        answer, string = 3 + draws.integers(self.symbols, self.tokens), np.full((B, N), 2)
        np.put_along_axis(string, places, answer, axis=1)
        return [Piece(string, length), ASK, Piece(answer, None, self.symbols)]


@dataclass(kw_only=True, eq=False)
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

    def prepare(self) -> None:
        require(self.max_length % 2 == 1, "probe.max_length", "odd", self.max_length)
        require(all(length % 2 for length in self.test_lengths), "probe.test_lengths", "odd", self.test_lengths)
        self.vocabulary = ["a", "b", BEGIN, ASK]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        odd = length | 1
        string = draws.integers(2, int(odd.max()))
        count = (string * (np.arange(string.shape[1]) < odd[:, None])).sum(axis=1)
        answer = Piece((2 * count > odd).astype(np.int64)[:, None], choices=2)
        return [Piece(string, odd), ASK, answer]


@dataclass(kw_only=True, eq=False)
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

    groups = ("depth_0_25", "depth_25_50", "depth_50_75", "depth_75_100")

    symbols: Size
    needles: Size

    def prepare(self) -> None:
        most = self.shortest // 2
        require(self.needles <= most, "probe.needles", f"at most {most}, half of the shortest string", self.needles)
        self.vocabulary = [BEGIN, ASK, *letters(self.symbols), *(f"M{k}" for k in range(self.needles))]

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


PROBES: dict[str, type[Probe]] = {
    "copy": Copy,
    "reverse": Reverse,
    "addition": Addition,
    "recall": Recall,
    "induction": Induction,
    "indirect": Indirect,
    "flip_flop": FlipFlop,
    "selective_copy": SelectiveCopy,
    "majority": Majority,
    "needle": Needle,
}
