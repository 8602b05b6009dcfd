"""Oracles: a solver in plain Python for each probe, enumeration of small spaces, and rows that were recorded."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import compose

from speechformer.config import as_plain
from speechformer.config import compose as compose_or_explain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, PAD
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.probes import ProbeBatches, ProbeData
from speechformer.errors import UserError
from speechformer.probes.base import SPLITS, Probe
from speechformer.probes.registry import PROBES, load_probe
from speechformer.tasks.registry import TASKS, build_data
from speechformer.training.run import execute

NAMES = list(PROBES)
KINDS = [*NAMES, "indirect by=content", "addition hints=26", "addition base=3", "s5 degree=3"]
HIDDEN = ["compress", "parity", "modular", "s5"]  # whose answers do not enter the row
TINY = ["task=probe", "width=16", "layers=1", "ff=16", "trainer.accelerator=cpu", "threads=1", "logger=csv"]
TINY += ["batch_size=8", "task.test_rows=20", "recipe.warmup_steps=1", "trainer.max_steps=3"]


@functools.cache
def config(kind: str, *overrides: str) -> dict[str, Any]:
    name, *options = kind.split()
    own = [f"probe={name}", *(f"probe.{option}" for option in options)]
    return as_plain(compose("task=probe", *own, *overrides))


@functools.cache
def probe(kind: str, *overrides: str) -> Probe:
    return load_probe(config(kind, *overrides)).probe


def words(own: Probe, row: np.ndarray) -> list[str]:
    return [own.vocabulary[symbol] for symbol in row if symbol >= 0]


def before(read: list[str], word: str) -> list[str]:
    return read[: read.index(word)]


def solve_addition(read: list[str], base: int = 10) -> str:
    digits = [word for word in read[1:] if not word[0].isalpha()]
    first, second = "".join(before(digits, "=")).split("+")
    place = len(digits) - digits.index("=") - 1
    total = int(first[::-1], base) + int(second[::-1], base)
    return str(total // base**place % base)


def solve_permutations(read: list[str]) -> str:
    """Move things by hand: a permutation such as bca puts the thing at place b first."""
    things = sorted(read[1])
    for permutation in read[1:]:
        things = [things["abcde".index(place)] for place in permutation]
    return "".join(things)


def solve_fuzzy_recall(read: list[str]) -> str:
    """Compare the key that was read last with all keys of the string; the keys and values are runs of one letter."""
    runs = [[*words] for _, words in itertools.groupby(read[1:], key=lambda word: word[0])]
    bar = runs.index(["|"])
    written = runs.pop() if read[-1][0] == "v" else []
    (value,) = (value for key, value in zip(runs[0:bar:2], runs[1:bar:2]) if key == runs[-1])
    assert value[: len(written)] == written
    return value[len(written)]


def solve_multi_hop(read: list[str]) -> str:
    edges, (hops, symbol) = before(read, "|")[1:], read[-2:]
    for _ in range(int(hops)):
        symbol = edges[edges[0::2].index(symbol) * 2 + 1]
    return symbol


def solve(name: str, read: list[str], base: int = 10) -> str:
    """Return the answer after these words of a row of a probe."""
    if name == "addition":
        return solve_addition(read, base)
    if name == "parity":
        return str(read.count("1") % 2)
    if name == "modular":
        return str(sum(map(int, read[1:])) % base)
    if name == "s5":
        return solve_permutations(read)
    if name == "fuzzy_recall":
        return solve_fuzzy_recall(read)
    if name == "multi_hop":
        return solve_multi_hop(read)
    if name == "flip_flop":
        assert read[-1] == "r"
        return next(bit for kind, bit in list(zip(read[1::2], read[2::2]))[::-1] if kind == "w")
    if name == "majority":
        return max("ab", key=read.count)
    if name == "needle":
        return read[read.index(read[-1]) + 1]
    string, query = before(read, "|")[1:], read[-1]
    place = len(read) - len(string) - 2  # of the answer among the answers
    if name in ("recall", "noisy_recall"):
        pairs = [word for word in string if word[0] != "n"]
        return dict(zip(pairs[0::2], pairs[1::2]))[query]
    if name == "induction":
        return string[string.index(query) + 1]
    if name == "indirect":
        return string[int(query) - 1] if query.isdigit() else str(string.index(query) + 1)
    if name == "selective_copy":
        return [word for word in string if word != "_"][place]
    return string[::-1][place] if name == "reverse" else string[place]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_solver_that_reads_only_what_is_before_an_answer_finds_it(kind: str, split: str) -> None:
    """So a causal model can solve the probe. All rows of a length reach `symbols_of`, which sets block_size."""
    own, file = probe(kind), config(kind)
    tokenizer = Tokenizer(["<pad>", "<unk>", *own.vocabulary])  # reads the symbols as they are written
    assert tokenizer.encode(" ".join(own.vocabulary)) == list(range(2, 2 + len(own.vocabulary)))
    assert file["block_size"] == own.symbols_of(own.max_length) - 1 or kind == "addition hints=26"
    for length in (None, *own.test_lengths):
        rows = own.rows(np.arange(30), 0, split, length=length)
        sizes = (rows.symbols >= 0).sum(axis=1)
        assert sizes.max() <= own.symbols_of(length or own.max_length)
        assert length is None or sizes.min() == own.symbols_of(length) or kind == "fuzzy_recall"
        assert (rows.choices > 0).sum(axis=1).min() >= 1
        base = getattr(own, "base", getattr(own, "modulus", 10))
        for symbols, choices, answers in zip(rows.symbols, rows.choices, rows.answers):
            row = words(own, symbols)
            assert list(symbols[len(row) :]) == [-1] * (len(symbols) - len(row)) and not choices[len(row) :].any()
            for place in np.flatnonzero(choices):
                assert solve(kind.split()[0], row[:place], base) == own.vocabulary[answers[place]]
            hidden = (symbols != answers) & (choices > 0)
            assert not hidden.any() or kind.split()[0] in HIDDEN


SMALL = {
    "copy": "symbols=2 max_length=6 test_lengths=[5]",
    "reverse": "symbols=2 max_length=6 test_lengths=[5]",
    "addition": "max_length=2 test_lengths=[2]",
    "addition hints=26": "max_length=2 test_lengths=[2]",
    "addition base=3": "max_length=3 test_lengths=[3]",
    "recall": "keys=3 values=3 queries=2 min_length=2 max_length=3 test_lengths=[3]",
    "induction": "symbols=5 answers=2 min_length=4 max_length=4 test_lengths=[4]",
    "indirect": "symbols=4 queries=2 min_length=3 max_length=4 test_lengths=[4]",
    "indirect by=content": "symbols=4 queries=2 min_length=3 max_length=4 test_lengths=[4]",
    "flip_flop": "min_length=4 max_length=4 test_lengths=[4] ignore=0.3",
    "selective_copy": "symbols=3 tokens=2 min_length=3 max_length=4 test_lengths=[4]",
    "majority": "min_length=3 max_length=7 test_lengths=[7]",
    "needle": "symbols=3 needles=1 min_length=3 max_length=5 test_lengths=[5]",
    "compress": "symbols=2 max_length=6 test_lengths=[5]",
    "noisy_recall": "keys=3 values=2 queries=1 noises=2 min_length=2 max_length=3 test_lengths=[3]",
    "fuzzy_recall": "keys=2 values=2 queries=1 min_length=2 max_length=2 test_lengths=[2]",
    "multi_hop": "symbols=4 hops=2 queries=1 min_length=3 max_length=4 test_lengths=[4]",
    "parity": "max_length=6 test_lengths=[6]",
    "modular": "modulus=3 min_length=2 max_length=4 test_lengths=[4]",
    "s5": "min_length=1 max_length=1 test_lengths=[1]",
    "s5 degree=3": "min_length=2 max_length=3 test_lengths=[3]",
}


def small(kind: str) -> Probe:
    return probe(f"{kind} {SMALL[kind]}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_splits_have_no_row_in_common_whatever_the_seed_and_epoch(kind: str) -> None:
    """Oracle: the sets of all rows of spaces so small that each row comes up many times."""
    own, sets = small(kind), {}
    for split in SPLITS:
        drawn = [own.rows(np.arange(500), seed, split, epoch) for seed in range(2) for epoch in range(2)]
        if split == "test":
            drawn += [own.rows(np.arange(200), 0, split, length=length) for length in own.test_lengths]
        sets[split] = {" ".join(words(own, row)) for rows in drawn for row in rows.symbols}
    for first, second in itertools.combinations(sets.values(), 2):
        assert first and second and not first & second
    if kind == "copy":  # all strings of one to six of two symbols
        assert len(set().union(*sets.values())) == 2 + 4 + 8 + 16 + 32 + 64


DIGESTS = {
    "copy": "c2adb0fc5fc7865c",
    "reverse": "67cc8f7da60406b5",
    "addition": "7311ccf966363eb0",
    "recall": "5a65a824d2674a30",
    "induction": "1c986fe0c8195d65",
    "indirect": "053ff7136842f326",
    "flip_flop": "cbc042ba72c9d45a",
    "selective_copy": "c862b226ef3b9583",
    "majority": "e5371d5888490714",
    "needle": "ed0c90b066656711",
    "indirect by=content": "6a024ec9c64d05f9",
    "addition hints=26": "9d7efe84843e81d9",
    "addition base=3": "cf87d3f1becdaa15",
    "compress": "b23a50c24f315de0",
    "noisy_recall": "18a97f6dfdb0a61f",
    "fuzzy_recall": "00a2ef5486294e08",
    "multi_hop": "7b963bf1b51b953d",
    "parity": "571ccf544ff22df2",
    "modular": "d7cfb957e637a379",
    "s5": "5c93300760eb5830",
    "s5 degree=3": "96f7c934d55ef877",
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_were_recorded(kind: str) -> None:
    """Oracle: digests of rows, of what is asked and of its groups, recorded when tests showed them to be right.

    Rows are part of the identity of every run. A row is a function of seed, split, epoch and index alone.
    """
    digest = hashlib.sha256()
    for split in SPLITS:
        rows, few = (probe(kind).rows(np.array(index), (0, 1), split, epoch=2) for index in (range(200), [63, 2]))
        assert (rows.symbols[[63, 2]] == few.symbols).all()
        hidden = [rows.answers] if kind.split()[0] in HIDDEN else []
        for content in (rows.symbols, rows.choices, rows.groups, *hidden):
            digest.update(content.astype(np.int16).tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", ["parity", "modular", "s5 degree=4", "s5 degree=3 moved=3"])
def test_choices_of_a_word_problem_are_the_products_of_all_words(kind: str) -> None:
    """Oracle: the solver's answers to all words of up to three elements, which move at most two things in s5."""
    own = probe(kind)
    moved = {word: sum(a != b for a, b in zip(word, sorted(word))) for word in own.vocabulary if word != "^"}
    elements = [word for word, things in moved.items() if things <= getattr(own, "moved", 2)]
    modulus = getattr(own, "modulus", 2)
    expected = [
        len({solve(kind.split()[0], ["^", *word], modulus) for word in itertools.product(elements, repeat=k)})
        for k in (1, 2, 3)
    ]
    assert own.rows(np.arange(1), 0, "train", length=3).choices[0].tolist() == [0, 0, *expected]


@pytest.mark.parametrize("kind", ["copy", "parity"])
def test_batches_are_the_rows_of_their_indices_and_do_not_depend_on_the_devices(kind: str) -> None:
    def batch(shard: tuple[int, int]) -> dict[str, Any]:
        batches = ProbeBatches(probe(kind), 8, 0, shard)
        batches.set_epoch(2)
        return next(itertools.islice(batches, 1, None))

    whole, *shards = map(batch, ((0, 1), (0, 2), (1, 2)))
    rows = probe(kind).rows(np.arange(8, 16), 0, "train", 2)
    ids = np.where(rows.symbols >= 0, rows.symbols + 2, PAD)
    assert whole["ids"].tolist() == ids[:, :-1].tolist()
    assert whole["targets"].tolist() == np.where(rows.choices > 0, rows.answers + 2, IGNORE)[:, 1:].tolist()
    for k, shard in enumerate(shards):
        assert torch.equal(shard["ids"], whole["ids"][k::2])
    assert sum(shard["weight"] for shard in shards) == pytest.approx(2)


def build(*overrides: str) -> tuple[Any, ProbeData]:
    own = as_plain(compose(*TINY, *overrides))
    data: ProbeData = build_data(own, load(own))
    torch.manual_seed(0)
    return TASKS["probe"].from_config(own, data).eval(), data


def test_chance_is_the_share_of_all_guesses_that_are_right() -> None:
    """Oracle: by hand. One row asks for one of two symbols and one of four, the other for one of five."""
    _, data = build("probe=copy")
    rows = {
        "targets": torch.tensor([[IGNORE, 3, 4], [5, IGNORE, IGNORE]]),
        "choices": torch.tensor([[0, 2, 4], [5, 0, 0]]),
    }
    data.tested = {("test", ""): rows}
    data.extra_tests = {("test", "length_9"): {name: column[:1] for name, column in rows.items()}}
    chance = {"accuracy": (1 / 2 + 1 / 4 + 1 / 5) / 3, "exact": (1 / 8 + 1 / 5) / 2}
    chance |= {"accuracy_length_9": (1 / 2 + 1 / 4) / 2, "exact_length_9": 1 / 8}
    assert data.reference_metrics() == pytest.approx({f"chance_{name}": value for name, value in chance.items()})


@pytest.mark.parametrize(
    ("words_of_run", "lengths"),
    [
        ("copy", range(2, 42)),
        ("copy task.longer=1.5", [61]),  # a start, two strings of 30 symbols, and a mark between; without the last
        ("copy task.longer=100", [161]),  # at most the longest test
        ("copy task.longer=1.5 model=learned", range(2, 42)),  # block_size positions
        ("indirect task.longer=1.5", range(9, 42)),  # no test is longer than in training
    ],
)
def test_validation_rows_can_be_longer_than_in_training(words_of_run: str, lengths: Iterable[int]) -> None:
    """Oracle: lengths by hand; no row is one of a test."""
    name, *options = words_of_run.split()
    own = config(name, "protocol=clean", *options)
    data = build_data(own, load_probe(own))
    data.limit_length(own["block_size"] if "model=learned" in options else None)
    (rows,) = data.monitored.values()
    assert {*(rows["ids"] != PAD).sum(dim=1).tolist()} <= {*lengths}
    tests = {tuple(row) for own in data.extra_tests.values() for row in own["ids"].tolist()}
    assert not tests & {tuple(row) for row in rows["ids"].tolist()}


def test_metrics_are_counted() -> None:
    """Oracle: counted by hand in two rows, whose last input is padding or is asked nothing."""
    task, _ = build("probe=flip_flop")
    targets = torch.tensor([[5, IGNORE, 6, IGNORE], [7, 8, 9, 4]])
    written = torch.tensor([[5, 3, 6, 3], [7, 2, 9, 2]])
    groups = torch.tensor([[0, 0, 1, 0], [1, 1, 0, 0]])
    task.on_validation_epoch_start()
    for name in ("", "length_4"):
        task.update_metrics(
            F.one_hot(written, 10).double(), {"part": ("test", name), "targets": targets, "groups": groups}
        )
    expected = {"accuracy": 4 / 6, "exact": 1 / 2}
    for name, share in zip(task.groups, (2 / 3, 2 / 3)):
        expected[f"accuracy_{name}"] = share
    metrics = task.compute_metrics()
    del metrics["test_loss"]
    both = {f"test_{key}": value for key, value in expected.items()}
    for key, value in expected.items():
        kind, _, group = key.partition("_")
        both[f"test_{kind}_length_4" + (f"_{group}" if group else "")] = value
    assert metrics == pytest.approx(both)


@pytest.mark.parametrize("words_of_run", ["model=learned protocol=paper", "model=rope protocol=clean"])
def test_a_run(words_of_run: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every part of a result, and the lengths that learned positions do not reach."""
    is_clean = "clean" in words_of_run
    result = execute(compose(*TINY, *words_of_run.split(), "probe.test_lengths=[20,21]"), tmp_path / "run")
    assert result["status"] == "finished"
    metrics, shown = result["metrics"], capsys.readouterr().out
    reached = [20, 21] if is_clean else [20]
    for metric, length in itertools.product(("test_accuracy", "test_exact", "chance_accuracy"), reached):
        assert 0 <= metrics[f"{metric}_length_{length}"] <= 1
    assert ("test_accuracy_length_21" in metrics) == ("validation_accuracy" in metrics) == is_clean
    assert ("out of reach" in shown) != is_clean
    assert result["best"]["chosen_on"] == ("validation" if is_clean else "test")
    assert result["report"]["compare"] == ["test_accuracy", *(f"test_accuracy_length_{n}" for n in reached)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("block_size=40", "block_size must be at least 41"),
        ("probe.test_lengths=[7,7]", "probe.test_lengths must be a list of different lengths"),
        ("probe.symbols=1 probe.test_lengths=[1]", "probe.*too few different rows exist"),
        ("corpus=speeches", "task=probe generates its rows and reads no corpus"),
        ("probe=addition probe.hints=10", "probe.hints must be 0 or at least 11"),
        ("probe=recall probe.keys=9", "probe.keys must be at least 32"),
        ("probe=induction probe.answers=10", "probe.answers must be below 10"),
        ("probe=indirect probe.test_lengths=[33]", "probe.test_lengths must be at most probe.max_length=32"),
        ("probe=indirect probe.queries=5", "probe.queries must be at most 4"),
        ("probe=majority probe.test_lengths=[11,20]", "probe.test_lengths must be odd"),
        ("probe=flip_flop probe.test_lengths=[1]", "at least 2, not 1"),
        ("probe=selective_copy probe.tokens=17", "probe.tokens must be at most 16"),
        ("probe=needle probe.symbols=30 probe.needles=9", "probe.needles must be at most 8"),
        ("probe=fuzzy_recall probe.keys=2", "probe.keys must be such that there are 16 to 10000 keys"),
        ("probe=fuzzy_recall probe.size=5", "probe.size must be at most 4"),
        ("probe=multi_hop probe.symbols=9", "probe.symbols must be at least 16"),
        ("probe=multi_hop probe.hops=4", "probe.hops must be below 4"),
        ("probe=s5 probe.degree=6", "probe.degree must be at most 5"),
        ("model=rnn_attention", "model=rnn_attention attends from a decoder to an encoder"),
    ],
)
def test_errors(overrides: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        execute(compose_or_explain([*TINY, *overrides.split()]), tmp_path / "run")


def test_other_tasks_have_no_probe() -> None:
    with pytest.raises(UserError, match="task=probe and a choice of probe need each other"):
        as_plain(compose("task=lm", "probe=copy"))
