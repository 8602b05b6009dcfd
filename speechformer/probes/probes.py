"""The probes, `probe=` in the config: each a dataclass of its options with `pieces`, which draws its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
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


class Compress(Copy):
    """Recover a string from what is known at its end; the second line has what a model predicts.

        ^ d a a f | _ _ _ _
                    d a a f

    Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD), section 3. In MAD, a network of
    its own decodes each symbol from its place and the output at the last symbol. Here, the model itself decodes, at
    blanks; unlike in `copy`, it never sees what it recovered. An RNN must hold the whole string in its state, as in
    MAD. Attention need not compress, as nothing keeps it from reading the string again: its perfect solution attends
    as far back as the string is long. So compare RNNs with each other, and attention with `copy`.

    Args:
        symbols: different symbols of a string.
        lengths: symbols in the string; see `Probe`.
    """

    def prepare(self) -> None:
        super().prepare()
        self.vocabulary.append(BLANK)

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        string = 2 + draws.integers(self.symbols, int(length.max()))
        blanks = np.full_like(string, 2 + self.symbols)
        return [Piece(string, length), ASK, Piece(blanks, length, self.symbols, answers=string)]


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

    def string(self, draws: Draws, string: Piece, length: Ints) -> Piece:
        """Return what stands before the queries, given the pairs."""
        return string

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N, size = int(length.max()), length[:, None]
        keys = 2 + draws.orders(self.keys, self.keys)[:, :N]
        values = 2 + self.keys + draws.integers(self.values, N)
        asked = draws.orders(size, N)[:, : self.queries]
        gaps = 2 * size + 1 + 2 * np.arange(asked.shape[1]) - 2 * asked
        asked_keys, answers = (np.take_along_axis(x, asked, axis=1) for x in (keys, values))
        queries = pairs(asked_keys, answers, length.clip(max=self.queries), self.values, doubling_group(gaps))
        return [self.string(draws, pairs(keys, values, length), length), ASK, queries]


@dataclass(kw_only=True, eq=False)
class NoisyRecall(Recall):
    """Find the values of keys in noise; the dots mark what a model predicts.

        ^ n3 k3 v7 n0 k0 v2 | k0 v2 k3 v7    (noise=1)
                                 .     .

    Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD), section 3. Unlike in MAD, the
    queries follow all pairs, as in `recall`. A perfect solution is that of `recall`; an RNN must not spend its state
    on noise. Accuracy is also measured by the gap from a query back to its key, not counting noise.

    Args:
        keys, values, queries: see `Recall`.
        noise: symbols of noise in a row, for each of its pairs. They do not separate a key from its value.
        noises: different symbols of noise.
        lengths: pairs in a row; see `Probe`.
    """

    noise: Size
    noises: Size

    def prepare(self) -> None:
        super().prepare()
        self.vocabulary += [f"n{k}" for k in range(self.noises)]

    def string(self, draws: Draws, string: Piece, length: Ints) -> Piece:
        B, width = string.symbols.shape
        columns, size = self.noise * width // 2, length[:, None]
        noise = len(self.vocabulary) - 1 - draws.integers(self.noises, columns)
        places = 2.0 * draws.integers(size + 1, columns) - 0.5  # between pairs, which begin at even places
        places[np.arange(columns) >= self.noise * size] = np.inf
        order = np.hstack([np.tile(np.arange(width), (B, 1)), places]).argsort(axis=1, kind="stable")
        mixed = np.take_along_axis(np.hstack([string.symbols, noise]), order, axis=1)
        return Piece(mixed, (2 + self.noise) * length)


@dataclass(kw_only=True, eq=False)
class FuzzyRecall(Probe):
    """Find the values of keys where both have one symbol or more; the dots mark what a model predicts.

        ^ k3 v7 v1 k3 k0 v2 k1 v7 | k3 k0 v2 k3 v7 v1
                                          .     .  .

    Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD), section 3. Unlike in MAD, the
    queries follow all pairs, as in `recall`. Keys and values have random sizes. A perfect solution joins the symbols
    of a key before it compares keys, and knows where a key ends, because one key may begin or end with another.

    Args:
        keys, values: different symbols of keys and of values. The keys of a row differ; the values may not.
        size: the most symbols of a key, and of a value.
        queries: in a row, of different keys; in rows of fewer pairs, all of them.
        lengths: pairs in a row; see `Probe`.
    """

    keys: Size
    values: Size
    size: Annotated[int, Field(ge=1, le=4)]
    queries: Size

    def prepare(self) -> None:
        number = sum(self.keys**size for size in range(1, self.size + 1))
        rule = f"such that there are {self.longest} to 10000 keys of up to {self.size} symbols"
        require(self.longest <= number <= 10000, "probe.keys", rule, self.keys)
        self.vocabulary = [BEGIN, ASK, *(f"k{k}" for k in range(self.keys)), *(f"v{k}" for k in range(self.values))]

    def symbols_of(self, length: int) -> int:
        return 2 + 2 * self.size * (length + min(length, self.queries))

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        B, N, row = len(length), int(length.max()), np.arange(len(length))
        repeats = range(1, self.size + 1)
        motifs = [motif for repeat in repeats for motif in itertools.product(range(self.keys), repeat=repeat)]
        all_keys = np.array([*itertools.zip_longest(*motifs, fillvalue=0)]).T
        all_sizes = np.array([*map(len, motifs)])
        # The least exponential times are draws without replacement; their rates make all sizes alike in probability.
        times = -np.log1p(-draws.uniform(len(motifs))) * self.keys**all_sizes
        chosen = times.argsort(axis=1, kind="stable")[:, :N]
        keys, key_sizes = 2 + all_keys[chosen], all_sizes[chosen]
        values = 2 + self.keys + draws.integers(self.values, N * self.size).reshape(B, N, self.size)
        value_sizes = 1 + draws.integers(self.size, N)

        def listed(order: Ints, number: Ints, choices: int = 0) -> Iterator[Piece]:
            for k, pair in enumerate(order.T):
                yield Piece(keys[row, pair], key_sizes[row, pair] * (k < number))
                yield Piece(values[row, pair], value_sizes[row, pair] * (k < number), choices)

        asked = draws.orders(length[:, None], N)[:, : self.queries]
        string = listed(np.tile(np.arange(N), (B, 1)), length)
        return [*string, ASK, *listed(asked, length.clip(max=self.queries), self.values)]


@dataclass(kw_only=True, eq=False)
class MultiHop(Probe):
    """Follow a cycle that is given by its edges; the dots mark what a model predicts.

        ^ c a d c a d | 2 a c 1 d c    (c to a, d to c, a to d)
                            .     .

    Allen-Zhu 2025, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers", task
    Depo: names of one symbol. Each query names the number of steps and the symbol to start from. A perfect solution
    joins each edge in one layer, and then takes a step in each layer. Accuracy is also measured by hops.

    Args:
        symbols: different symbols; those of a cycle differ.
        hops: the most steps of a query.
        queries: in a row, independent of each other.
        lengths: symbols of the cycle; see `Probe`.
    """

    groups = doubling("hops")

    symbols: Size
    hops: Size
    queries: Size

    def prepare(self) -> None:
        rule = f"at least {self.longest}, as those of a cycle differ"
        require(self.symbols >= self.longest, "probe.symbols", rule, self.symbols)
        rule = f"below {self.shortest}, the length of the shortest cycle"
        require(self.hops < self.shortest, "probe.hops", rule, self.hops)
        self.vocabulary = [BEGIN, ASK, *letters(self.symbols), *map(str, range(1, self.hops + 1))]

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N, size = int(length.max()), length[:, None]
        cycle = 2 + draws.orders(self.symbols, self.symbols)[:, :N]
        edges, start = draws.orders(size, N), draws.integers(size, self.queries)
        steps = 1 + draws.integers(self.hops, self.queries)
        first, second, asked, answers = (
            np.take_along_axis(cycle, places % size, axis=1) for places in (edges, edges + 1, start, start + steps)
        )
        queries = np.stack([1 + self.symbols + steps, asked, answers], axis=2).reshape(len(length), -1)
        choices = np.tile([0, 0, 1], self.queries) * (size - 1)
        groups = doubling_group(steps).repeat(3, axis=1)
        return [pairs(first, second, length), ASK, Piece(queries, None, choices, groups)]


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
class WordProblem(Probe):
    """The product of all symbols so far, which are elements of a group. A subclass sets `product`.

    Merrill, Petty, Sabharwal 2024, "The Illusion of State in State-Space Models", section 3. As there, the model
    predicts the product after each symbol, and products do not enter the row: with the product before in sight, one
    more would need no state. Only the last one ends the row. Accuracy is also measured by the number of factors.

    Args:
        lengths: symbols of the word; see `Probe`.

    Attributes:
        product: of an element and the next one, [S, S]; `vocabulary` begins with their names.
        moves: the elements that the word may have.
    """

    groups = doubling("factors")

    product: Ints = field(init=False)
    moves: Ints = field(init=False)

    def pieces(self, draws: Draws, length: Ints) -> list[Piece | str]:
        N, reached, choices = int(length.max()), self.moves, [0, len(self.moves)]
        word = self.moves[draws.integers(len(self.moves), N + 1)]
        products = word.copy()
        for k in range(1, N + 1):
            products[:, k] = self.product[products[:, k - 1], word[:, k]]
            reached = np.unique(self.product[np.ix_(reached, self.moves)])
            choices.append(len(reached))
        place, answers = np.arange(N + 1), np.roll(products, 1, axis=1)
        symbols = np.where(place < length[:, None], word, answers)
        return [Piece(symbols, length + 1, np.array(choices[:-1]), doubling_group(place), answers)]


@dataclass(kw_only=True, eq=False)
class Modular(WordProblem):
    """Add digits modulo m; the second line has what a model predicts.

        ^ 3 4 1 2 0      (modulus=5)
            3 2 3 0

    The word problem of a cyclic group; see `WordProblem`. The order of the symbols does not matter, so attention to
    all symbols alike can count them (Merrill, Sabharwal 2023, "The Parallelism Tradeoff"), but must tell each number
    from the next one. The state of an RNN has m values, whatever the length. A linear recurrence cannot hold it with
    positive eigenvalues: Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues".

    Args:
        modulus: m, the number of different digits.
        lengths: digits; see `Probe`.
    """

    modulus: Annotated[int, Field(ge=2, le=1000)]

    def prepare(self) -> None:
        self.moves = np.arange(self.modulus)
        self.vocabulary = [*map(str, self.moves), BEGIN]
        self.product = np.add.outer(self.moves, self.moves) % self.modulus


class Parity(WordProblem):
    """Tell whether the number of ones is odd; the second line has what a model predicts.

        ^ 1 0 1 1 1
            1 1 0 1

    Hahn 2020, "Theoretical Limitations of Self-Attention in Neural Sequence Models": attention of bounded precision
    cannot, in strings of any length, as one bit of many changes its output little. It is the smallest word problem,
    see `WordProblem`; the state of an RNN is one bit.

    Args:
        lengths: bits; see `Probe`.
    """

    def prepare(self) -> None:
        self.vocabulary, self.product, self.moves = ["0", "1", BEGIN], np.array([[0, 1], [1, 0]]), np.arange(2)


@dataclass(kw_only=True, eq=False)
class Permutations(WordProblem):
    """Apply permutations one after another; the second line has what a model predicts.

        ^ bac acb bac cba    (degree=3, moved=2)
              bac bca cba

    The word problem of a symmetric group; see `WordProblem`. The permutation bca puts the second thing first, the
    third one second and the first one last. With five things (S5), it is complete for NC1. So neither transformers
    nor diagonal state-space models of fixed depth solve every length, unless TC0 is NC1. An RNN can, with a state for
    each permutation. With four things or fewer, it is in TC0.

    Args:
        degree: things that are permuted, so there are 2, 6, 24 or 120 products.
        moved: the most things that a permutation of the row moves. 2 leaves swaps and the identity, as in Grazzi et
            al. 2024; their products are all permutations. 5 leaves all, as in the paper, and needs longer training.
        lengths: permutations; see `Probe`.
    """

    degree: Annotated[int, Field(ge=2, le=5)]
    moved: Annotated[int, Field(ge=2, le=5)]

    def prepare(self) -> None:
        elements = np.array([*itertools.permutations(range(self.degree))])  # in the order of the numbers they spell
        spell = 10 ** np.arange(self.degree)[::-1]
        self.product = np.searchsorted(elements @ spell, elements[:, elements] @ spell)
        self.moves = np.flatnonzero((elements != elements[0]).sum(axis=1) <= self.moved)
        self.vocabulary = ["".join(letters(self.degree)[k] for k in element) for element in elements] + [BEGIN]


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
    "compress": Compress,
    "addition": Addition,
    "recall": Recall,
    "noisy_recall": NoisyRecall,
    "fuzzy_recall": FuzzyRecall,
    "multi_hop": MultiHop,
    "induction": Induction,
    "indirect": Indirect,
    "flip_flop": FlipFlop,
    "selective_copy": SelectiveCopy,
    "majority": Majority,
    "parity": Parity,
    "modular": Modular,
    "s5": Permutations,
    "needle": Needle,
}
