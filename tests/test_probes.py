"""Oracles: a solver in plain Python for each probe, enumeration of small spaces, chi-squared tests, and SplitMix64's
published numbers."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compose
from scipy.stats import chisquare

from speechformer.config import CONF, as_plain
from speechformer.config import compose as compose_or_explain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, PAD
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.probes import ProbeBatches, ProbeData
from speechformer.errors import UserError
from speechformer.probes.addition import Addition
from speechformer.probes.base import GOLDEN, PARTS, Draws, Probe, Rows, mix
from speechformer.probes.registry import PROBES, load_probe
from speechformer.runs.folder import result_or_none
from speechformer.tasks.registry import TASKS, build_data
from speechformer.training.run import execute

NAMES = list(PROBES)
KINDS = [*NAMES, "indirect by=content", "addition hints=26", "addition base=3"]
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


def solve_copy(read: list[str]) -> str:
    place = read.index("|")
    return read[1:place][len(read) - place - 1]


def solve_reverse(read: list[str]) -> str:
    place = read.index("|")
    return read[1:place][::-1][len(read) - place - 1]


def solve_addition(read: list[str], base: int = 10) -> str:
    digits = [word for word in read[1:] if not word[0].isalpha()]
    first, second = "".join(before(digits, "=")).split("+")
    place = len(digits) - digits.index("=") - 1
    total = int(first[::-1], base) + int(second[::-1], base)
    return str(total // base**place % base)


def solve_recall(read: list[str]) -> str:
    pairs = before(read, "|")[1:]
    return dict(zip(pairs[0::2], pairs[1::2]))[read[-1]]


def solve_induction(read: list[str]) -> str:
    string = before(read, "|")
    return string[string.index(read[-1]) + 1]


def solve_indirect(read: list[str]) -> str:
    string = before(read, "|")
    return string[int(read[-1])] if read[-1].isdigit() else str(string.index(read[-1]))


def solve_flip_flop(read: list[str]) -> str:
    assert read[-1] == "r"
    return next(bit for kind, bit in list(zip(read[1::2], read[2::2]))[::-1] if kind == "w")


def solve_selective_copy(read: list[str]) -> str:
    place = read.index("|")
    return [word for word in read[1:place] if word != "_"][len(read) - place - 1]


def solve_majority(read: list[str]) -> str:
    return max("ab", key=read.count)


def solve_needle(read: list[str]) -> str:
    return read[read.index(read[-1]) + 1]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_solver_that_reads_only_what_is_before_an_answer_finds_it(kind: str, part: str) -> None:
    """So a causal model can solve the probe, and no answer is asked for that is not determined."""
    own, solve = probe(kind), globals()[f"solve_{kind.split()[0]}"]
    solve = functools.partial(solve, base=own.base) if isinstance(own, Addition) else solve
    for length in (None, *own.test_lengths):
        rows = own.rows(np.arange(30), 0, part, length=length)
        assert (rows.choices > 0).sum(axis=1).min() >= 1
        assert (rows.symbols >= 0).sum(axis=1).max() <= own.symbols_of(own.max_length if length is None else length)
        for symbols, choices in zip(rows.symbols, rows.choices):
            row = words(own, symbols)
            assert list(symbols[len(row) :]) == [-1] * (len(symbols) - len(row)) and not choices[len(row) :].any()
            for place in np.flatnonzero(choices):
                assert solve(row[:place]) == row[place]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_of_the_length_that_they_are_drawn_for(kind: str) -> None:
    """Oracle: the longest row of a batch reaches `symbols_of`, which sets block_size; of one length all do."""
    own, file = probe(kind), config(kind)
    for length in own.test_lengths:
        rows = own.rows(np.arange(20), 0, "test", length=length)
        assert ((rows.symbols >= 0).sum(axis=1) == own.symbols_of(length)).all()
    assert file["block_size"] == own.symbols_of(own.max_length) - 1 or kind == "addition hints=26"


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
}


def small(kind: str) -> Probe:
    return probe(f"{kind} {SMALL[kind]}")


def test_the_length_of_a_test_may_be_left_out() -> None:
    assert probe("copy test_lengths=[]").longest == 20


def everything(own: Probe, part: str, rows: int = 2500) -> Rows:
    return own.rows(np.arange(rows), 0, part)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_have_no_row_in_common_whatever_the_seed_and_epoch(kind: str) -> None:
    """Oracle: the sets of all rows of spaces so small that each row comes up many times."""
    own, sets = small(kind), {}
    for part in PARTS:
        drawn = [own.rows(np.arange(500), seed, part, epoch) for seed in range(2) for epoch in range(2)]
        drawn += [
            own.rows(np.arange(200), 0, part, length=length)
            for length in (own.test_lengths if part == "test" else ())
        ]
        sets[part] = {" ".join(words(own, row)) for rows in drawn for row in rows.symbols}
    for first, second in itertools.combinations(sets.values(), 2):
        assert first and second and not first & second


def test_the_parts_together_have_every_row() -> None:
    """Oracle: all strings of one to six of two symbols."""
    own = probe("copy symbols=2 max_length=6 test_lengths=[]")
    strings = {string for n in range(1, 7) for string in itertools.product("ab", repeat=n)}
    drawn = {
        part: {tuple(before(words(own, row), "|")[1:]) for row in everything(own, part).symbols} for part in PARTS
    }
    assert set.union(*drawn.values()) == strings and all(drawn.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_choices_of_a_place_are_the_symbols_that_come_up_there(kind: str) -> None:
    """Oracle: the set of answers at each place of rows of one length; some places ask only now and then."""
    own, length = small(kind), small(kind).test_lengths[0]
    rows = own.draw(Draws(np.arange(4000), "here"), np.full(4000, length))
    for place in range(rows.symbols.shape[1]):
        asked = rows.choices[:, place] > 0
        if asked.any():
            assert {len(set(rows.symbols[asked, place]))} == set(rows.choices[asked, place])


@pytest.mark.parametrize("kind", KINDS)
def test_chance_is_the_share_of_all_guesses_that_are_right(kind: str) -> None:
    """Oracle: every guess at every test row is made and compared."""
    name, *options = f"{kind} {SMALL[kind]}".split()
    own = config(name, *(f"probe.{option}" for option in options), "task.test_rows=12")
    data: ProbeData = build_data(own, load(own))
    chance, (length,) = data.reference_metrics(), data.probe.test_lengths
    for (_, part), rows in data.tested.items():
        right, exact, symbols = 0.0, 0.0, 0
        for targets, choices in zip(rows["targets"], rows["choices"]):
            answer = targets[targets != IGNORE].tolist()
            alike = [[target, *range(-1, -int(n), -1)] for target, n in zip(answer, choices[choices > 0])]
            guesses = list(itertools.product(*alike))
            right += sum(sum(map(int.__eq__, guess, answer)) for guess in guesses) / len(guesses)
            exact, symbols = exact + guesses.count(tuple(answer)) / len(guesses), symbols + len(answer)
        end = f"_{part}" if part else ""
        assert part in ("", f"length_{length}")
        assert chance[f"chance_accuracy{end}"] == pytest.approx(right / symbols)
        assert chance[f"chance_exact{end}"] == pytest.approx(exact / len(rows["ids"]))


def uniform(values: np.ndarray, number: int, first: int = 0) -> None:
    """Require that integers are as frequent as each other; one in 100,000 true ones would fail."""
    counts = np.bincount(values.ravel() - first, minlength=number)
    assert len(counts) == number and chisquare(counts).pvalue > 1e-5, counts


def drawn(kind: str, rows: int = 2000) -> tuple[Probe, Rows, list[list[str]]]:
    own = probe(kind)
    train = own.rows(np.arange(rows), 0, "train")
    return own, train, [words(own, row) for row in train.symbols]


@pytest.mark.parametrize("kind", ["copy min_length=6", "reverse min_length=6", "addition hints=0 min_length=4"])
def test_lengths_symbols_and_places_are_uniform(kind: str) -> None:
    own, _, rows = drawn(kind)
    strings = [before(row, "+" if "add" in kind else "|")[1:] for row in rows]
    uniform(np.array([len(string) for string in strings]), own.max_length - own.min_length + 1, own.min_length)
    for place in (0, 1, 3):
        uniform(np.array([own.vocabulary.index(string[place]) for string in strings]), 10, 0 if "add" in kind else 2)


def test_what_a_row_asks_is_uniform() -> None:
    """Recall: keys, values, asked pairs; induction: symbols, starts; indirect: places; needle: depths; others."""
    _, _, rows = drawn("recall min_length=8 max_length=8")
    uniform(np.array([int(row[1][1:]) for row in rows]), 32)
    uniform(np.array([int(row[2][1:]) for row in rows]), 32)
    uniform(np.array([row.index(row[before(row, "|").__len__() + 1]) // 2 for row in rows]), 8)
    own, _, rows = drawn("induction min_length=20 max_length=20 test_lengths=[20]")
    uniform(np.array([own.vocabulary.index(row[1]) for row in rows]), 64, 2)
    uniform(np.array([row.index(row[22]) for row in rows]), 20 - config("induction")["probe"]["answers"], 1)
    for by in ("position", "content"):
        _, _, rows = drawn(f"indirect by={by} min_length=16 max_length=16 test_lengths=[16]")
        places = [row[18] if by == "position" else str(row.index(row[18])) for row in rows]
        uniform(np.array(list(map(int, places))), 16, 1)
    own, _, rows = drawn("selective_copy min_length=20 max_length=20 tokens=8 test_lengths=[20]")
    uniform(np.array([k for row in rows for k, word in enumerate(row[1:21]) if word != "_"]), 20)
    own, _, rows = drawn("needle needles=1 min_length=20 max_length=20 test_lengths=[20]")
    uniform(np.array([row.index("M0") for row in rows]), 19, 1)
    _, _, rows = drawn("majority min_length=21 max_length=21")
    uniform(np.array(["ab".index(row[-1]) for row in rows]), 2)


def test_flip_flop_ignores_writes_and_reads_as_often_as_it_says() -> None:
    """Oracle: the probability of each instruction but the first and last, within four standard errors."""
    _, _, rows = drawn("flip_flop ignore=0.7", 2000)
    middle = [kind for row in rows for kind in row[3:-2:2]]
    for kind, share in {"i": 0.7, "w": 0.15, "r": 0.15}.items():
        assert middle.count(kind) / len(middle) == pytest.approx(share, abs=4 * (share / len(middle)) ** 0.5)
    assert {row[1] for row in rows} == {"w"} and {row[-2] for row in rows} == {"r"}
    uniform(np.array([int(row[2]) for row in rows]), 2)


def measured(kind: str) -> Any:
    """Yield the row, the place of the answer and its group's name, of rows of each test length."""
    own = probe(kind)
    for length in own.test_lengths:
        rows = own.rows(np.arange(40), 0, "test", length=length)
        for symbols, choices, groups in zip(rows.symbols, rows.choices, rows.groups):
            for place in np.flatnonzero(choices):
                yield words(own, symbols), place, own.groups[groups[place]], length


@pytest.mark.parametrize("kind", [kind for kind in KINDS if PROBES[kind.split()[0]].groups])
def test_groups_are_the_distances_places_and_depths_that_they_name(kind: str) -> None:
    """Oracle: the distance is counted in the words of the row."""
    names = set()
    for row, place, group, length in measured(kind):
        query = row[place - 1]
        number = row[:place].index(query)  # of the key, the symbol, the mark
        if kind in ("recall", "induction"):
            number = place - 1 - number
        elif kind == "needle":
            number = 100 * (number - 1) // length
        elif kind == "flip_flop":
            number = (place - 1) // 2 - max(k for k in range(place // 2) if row[1 + 2 * k] == "w")
        elif kind == "indirect":
            number = int(query)
        low, high = [*map(int, re.findall(r"\d+", group)), 10**9 if group.endswith("513") else 0][:2]
        assert low <= number <= max(low, high) - (kind == "needle"), (group, number)
        names.add(group)
    assert len(names) >= 3


def test_draws_are_splitmix64() -> None:
    """Oracle: the first numbers of java.util.SplittableRandom's algorithm from seed 0, as published with it."""
    counters = np.arange(1, 4, dtype=np.uint64) * GOLDEN
    assert [hex(x) for x in mix(counters)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_a_function_of_seed_part_epoch_and_index_alone(kind: str) -> None:
    own = probe(kind)
    rows = own.rows(np.arange(64), 0, "train", 3).symbols
    for few in ([5], [63, 2], range(20, 40)):
        alone = own.rows(np.array(few), 0, "train", 3).symbols
        assert (rows[list(few)] == alone).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("majority", "flip_flop")])
def test_rows_are_fresh_across_indices_epochs_and_seeds(kind: str) -> None:
    """Oracle: a set of all rows of the longest kind; none comes up twice."""
    own, most = probe(kind), []
    for seed, epoch in itertools.product(((0, 0), (1, 0), (0, 1)), range(3)):
        most += [row.tobytes() for row in own.rows(np.arange(300), seed, "train", epoch, own.longest).symbols]
    assert len(set(most)) == len(most)


def test_batches_are_the_rows_of_their_indices_and_do_not_depend_on_the_devices() -> None:
    own = probe("copy")
    batches = ProbeBatches(own, 8, 0)
    batches.set_epoch(2)
    first, second = itertools.islice(iter(batches), 2)
    expected = own.rows(np.arange(8, 16), 0, "train", 2)
    assert torch.equal(
        second["ids"], torch.from_numpy(np.maximum(expected.symbols + 2, 0) * (expected.symbols >= 0))[:, :-1]
    )
    halves = [ProbeBatches(own, 8, 0, (k, 2)) for k in range(2)]
    weights = []
    for k, half in enumerate(halves):
        half.set_epoch(2)
        batch = next(iter(half))
        assert torch.equal(batch["ids"], first["ids"][k::2])
        weights.append(batch["weight"])
    assert sum(weights) == pytest.approx(2)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_the_next_inputs(kind: str) -> None:
    own = config(kind, "task.test_rows=30", "block_size=64")
    data: ProbeData = build_data(own, load(own))
    for rows in [*data.tested.values(), data.validation, next(iter(data.train_dataloader()))]:
        ids, targets = rows["ids"], rows["targets"]
        scored = targets != IGNORE
        inside = scored[:, :-1]
        assert (targets[:, :-1][inside] == ids[:, 1:][inside]).all() and (ids[scored] != PAD).all()
    for example in data.examples():
        assert data.tokenizer.encode(" ".join(example.tokens[0])) == example.ids[0].tolist()


def build(*overrides: str) -> tuple[Any, ProbeData]:
    own = as_plain(compose(*TINY, *overrides))
    data: ProbeData = build_data(own, load(own))
    torch.manual_seed(0)
    return TASKS["probe"].from_config(own, data).eval(), data


@pytest.mark.parametrize("model", ["rope", "learned", "rnn", "relative"])
def test_no_model_sees_an_answer_before_its_place(model: str) -> None:
    """Oracle: the logits at a place after all later symbols have been replaced."""
    task, data = build(f"model={model}", "probe.max_length=6", "probe.test_lengths=[]")
    rows = data.validation
    logits = task(rows["ids"])
    for row, place in (rows["targets"][:5] != IGNORE).nonzero().tolist():
        other = rows["ids"][row : row + 1].clone()
        other[:, place + 1 :] = torch.randint(4, 14, other[:, place + 1 :].shape)
        torch.testing.assert_close(task(other)[0, place], logits[row, place])


def test_a_window_cannot_copy_from_beyond_its_reach() -> None:
    """Oracle: two layers of a window of w reach 2 (w - 1) symbols back, and a string of 10 needs 10."""
    for window, reaches in ((5, False), (6, True)):
        task, data = build("layers=2", "model=rope", "pattern=window", f"pattern.window={window}")
        ids = data.tested["test", "length_10"]["ids"][:4]
        for place in range(11, ids.shape[1]):
            other = ids.clone()
            other[:, place - 10] = 4 + (ids[:, place - 10] - 3) % 10  # the symbol that is the answer at this place
            same = torch.equal(task(other)[:, place], task(ids)[:, place])
            assert same != reaches, (window, place)


def by_hand(task: Any, rows: dict[str, torch.Tensor], groups: tuple[str, ...]) -> dict[str, float]:
    """The metrics in a loop over rows and places, each row without padding."""
    right: dict[str, list[bool]] = {"accuracy": [], "exact": []}
    for ids, targets, own in zip(rows["ids"], rows["targets"], rows["groups"]):
        length = int((ids != PAD).sum())
        written = task(ids[None, :length])[0].argmax(dim=-1)
        answers = [bool(written[t] == targets[t]) for t in range(length) if targets[t] != IGNORE]
        right["accuracy"] += answers
        right["exact"].append(all(answers))
        for t in range(length) if groups else ():
            if targets[t] != IGNORE:
                right.setdefault(f"accuracy_{groups[own[t]]}", []).append(bool(written[t] == targets[t]))
    return {name: sum(values) / len(values) for name, values in right.items()}


@pytest.mark.parametrize("kind", ["copy", "flip_flop"])
def test_metrics_are_counted(kind: str) -> None:
    task, data = build(f"probe={kind}", "task.test_rows=80")
    task.on_validation_epoch_start()
    with torch.no_grad():
        for batch in data.test_dataloader():
            task.evaluate_batch(batch)
        metrics = task.compute_metrics()
        for (_, name), rows in data.tested.items():
            for metric, value in by_hand(task, rows, data.probe.groups).items():
                kind_of, _, group = metric.partition("_")
                assert metrics["_".join(filter(None, ("test", kind_of, name, group)))] == pytest.approx(value)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_probe_shows_its_options_and_its_page_an_example(name: str) -> None:
    """Oracle of the example in the docstring: the solver, and the dots below the answers."""
    options = set(inspect.signature(PROBES[name]).parameters) | set(inspect.signature(Probe).parameters)
    assert set(config(name)["probe"]) == options - {"lengths"} | {"name"}
    assert {path.stem for path in (CONF / "probe").glob("*.yaml")} == set(NAMES)
    described = inspect.getdoc(PROBES[name]) or ""
    example, dots = re.findall(r"^    (.*)$", described.split("Args:")[0], re.MULTILINE)[:2]
    if name == "indirect":  # two examples side by side
        example, dots = example[:28], dots[:28]
    places = [place for place, dot in enumerate(dots) if dot == "."]
    for place in places:
        read, answer = example.split("(")[0][:place].split(), example[place:].split()[0]
        assert globals()[f"solve_{name}"](read) == answer
    assert places and re.search(r"(19|20)\d\d", described) and "perfect solution" in described


def test_the_words_of_all_probes_are_read_as_they_are_written() -> None:
    for kind in KINDS:
        vocabulary = probe(kind).vocabulary
        assert len(set(vocabulary)) == len(vocabulary)
        assert Tokenizer(["<pad>", "<unk>", *vocabulary]).encode(" ".join(vocabulary)) == list(
            range(2, 2 + len(vocabulary))
        )


@pytest.mark.parametrize("kind", ["rnn", "learned", "rope", "clean"])
def test_a_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every part of a result, and the lengths that learned positions do not reach."""
    own = ["protocol=clean"] if kind == "clean" else [f"model={kind}"]
    result = execute(compose(*TINY, *own, "probe.test_lengths=[20,21]"), tmp_path / "run")
    assert result["status"] == "finished" and result_or_none(tmp_path / "run") is not None
    metrics, said = result["metrics"], capsys.readouterr().out
    reached = [20] if kind == "learned" else [20, 21]
    for metric, length in itertools.product(("test_accuracy", "test_exact", "chance_accuracy"), reached):
        assert 0 <= metrics[f"{metric}_length_{length}"] <= 1
    assert ("test_accuracy_length_21" in metrics) == (kind != "learned")
    assert ("The positions of the model end before length 21." in said) == (kind == "learned")
    assert ("out of reach" in said) == (kind == "learned")
    assert result["best"]["chosen_on"] == ("validation" if kind == "clean" else "test")
    assert ("validation_accuracy" in metrics) == (kind == "clean")
    assert result["report"]["compare"] == ["test_accuracy", *(f"test_accuracy_length_{n}" for n in reached)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("probe=null", "probe=null: a config group needs the name of a choice"),
        ("block_size=40", "block_size must be at least 41"),
        ("probe.min_length=30", "probe.min_length must be at most probe.max_length=20, not 30"),
        ("probe.test_lengths=[7,7]", "probe.test_lengths must be a list of different lengths"),
        ("probe.test_lengths=[0]", "probe.test_lengths must be a whole number of at least 1"),
        ("probe.symbols=1 probe.test_lengths=[1]", "probe.*too few different rows exist"),
        ("corpus=speeches", "task=probe generates its rows and reads no corpus"),
        ("corpus.root=/tmp", "task=probe generates its rows and reads no corpus"),
        ("probe=addition probe.hints=10", "probe.hints must be 0 or at least 11"),
        ("probe=recall probe.keys=9", "probe.keys must be at least 32"),
        ("probe=induction probe.symbols=40", "probe.symbols must be at least 64"),
        ("probe=induction probe.answers=10", "probe.answers must be below 10"),
        ("probe=indirect probe.by=name", "probe.by has no choice 'name'"),
        ("probe=indirect probe.test_lengths=[33]", "probe.test_lengths must be at most probe.max_length=32"),
        ("probe=indirect probe.symbols=31", "probe.symbols must be at least 32"),
        ("probe=majority probe.max_length=30", "probe.max_length must be odd"),
        ("probe=majority probe.test_lengths=[11,20]", "probe.test_lengths must be odd"),
        ("probe=indirect probe.queries=5", "probe.queries must be at most 4"),
        ("probe=flip_flop probe.test_lengths=[1]", "at least 2, not 1"),
        ("probe=flip_flop probe.ignore=1.0", "probe.ignore must be a number between 0 and 0.999"),
        ("probe=selective_copy probe.tokens=17", "probe.tokens must be at most 16"),
        ("probe=needle probe.symbols=30 probe.needles=9", "probe.needles must be at most 8"),
        ("model=rnn_attention", "model=rnn_attention attends from a decoder to an encoder"),
    ],
)
def test_errors(overrides: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        execute(compose_or_explain([*TINY, *overrides.split()]), tmp_path / "run")


def test_other_tasks_have_no_probe() -> None:
    with pytest.raises(UserError, match="probe=copy needs task=probe"):
        as_plain(compose("task=lm", "probe=copy"))
