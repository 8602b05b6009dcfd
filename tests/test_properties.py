"""Properties of everything that is read: any input is accepted with nothing lost, or one sentence names the place.

Each function `check_...` judges one input, against an oracle of its own: Python's own text and JSON readers, the
undamaged checkpoint, the undisturbed run. It returns whether the input was accepted, and raises otherwise, also for
any exception that is no UserError. `chaos.py` runs the same checks with other seeds for longer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import strategies as strategy
import torch
from conftest import TINY, compose
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from speechformer import config as configs
from speechformer import status, train
from speechformer.analysis.load import load
from speechformer.corpora import pairs, speeches
from speechformer.errors import UserError
from speechformer.report.results import build_tables, read_results, read_runs
from speechformer.runs import folder as runs
from speechformer.runs import identity, naming
from speechformer.sweeps import folder as sweeps
from speechformer.tasks.registry import load_task, read_checkpoint
from speechformer.training.run import execute

T = TypeVar("T")
SECONDS = 20  # an input that takes longer hangs


class HangError(BaseException):
    """An input takes too long. No reader may catch this, as it would a TimeoutError, which is an OSError."""


@dataclass
class Workshop:
    """Where inputs are written, and the run whose files are damaged."""

    folder: Path
    run: Path
    config: Any
    inputs: Iterator[int]

    def new_folder(self) -> Path:
        """Return a new empty folder."""
        folder = self.folder / str(next(self.inputs)) / "in"
        folder.mkdir(parents=True)
        return folder


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Workshop]:
    """Make a tiny run, whose files are then damaged."""
    own = ["model=alibi", "trainer.max_epochs=-1", "trainer.max_steps=4", "eval_interval=2", "threads=1"]
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (corpus / name).write_text("".join(f"{k % 3}\tword{k} and word{k % 4}\n" for k in range(24)))
    cfg = compose(*TINY, "corpus=speeches", f"corpus.root={corpus}", "corpus.classes=[a,b,c]", *own, "batch_size=4")
    execute(cfg, folder / "run")
    yield Workshop(folder, folder / "run", cfg, itertools.count())


def attempt(read: Callable[[], T], *places: str) -> T | None:
    """Return what a function returns, or None if it raises one sentence that names one of the places."""
    try:
        return read()
    except UserError as error:
        message = str(error)
        assert message.strip() and "\n" not in message and "\r" not in message, f"not one line: {message!r}"
        assert any(place in message for place in places), f"{message!r} names none of {places[:5]}"
        return None


def lines_of(content: bytes) -> list[str]:
    """The lines of a file. Oracle: Python's `open`, which ends them at LF, CRLF and CR."""
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig") as file:
        return [line.removesuffix("\n") for line in file]


def paths(folder: Path, entries: Iterable[str]) -> list[str]:
    """How messages name the entries of a folder: by their paths, or quoted if those cannot be printed."""
    names = [str(folder / name) for name in entries]
    return [text for name in names for text in (name, repr(name), name.replace("\n", r"\n").replace("\r", r"\r"))]


SPEECH_FILE = r"(train|test)_CLS\.tsv|train_LM\.txt|test_LM_.+\.txt"


def is_valid(path: Path, is_line: Callable[[str], object] = str.strip) -> bool:
    """Whether `corpora/files.py` promises to read a file: an oracle against errors without a reason."""
    if not path.is_file() or not path.name.isprintable():
        return False
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    ends = {*re.findall(r"\r\n|\r|\n", text)}
    is_text = text and "\0" not in text and ("\r" not in ends or len(ends) == 1)
    return bool(is_text and all(map(is_line, lines_of(path.read_bytes()))))


def check_speeches(entries: dict[str, Any], world: Workshop) -> bool:
    folder = world.new_folder()
    strategy.create(folder, entries)
    config = {"name": "speeches", "root": str(folder), "classes": ["a", "b", "c"]}
    corpus = attempt(lambda: speeches.load_corpus(config), *paths(folder, entries), "No speech files")
    names = [name for name in entries if re.fullmatch(SPEECH_FILE, name, re.DOTALL)]
    if corpus is None:
        row = re.compile(r"\s*[012]\s*\t.*\S.*", re.DOTALL)
        valid = [is_valid(folder / name, row.fullmatch if "CLS" in name else str.strip) for name in names]
        assert not names or not all(valid), "there is nothing wrong"
        return False
    lines = {name: lines_of((folder / name).read_bytes()) for name in names}
    for name, rows in (("train_CLS.tsv", corpus.classify_train), ("test_CLS.tsv", corpus.classify_test)):
        parts = [line.partition("\t") for line in lines.pop(name, [])]
        assert rows == [(int(label), text.strip()) for label, _, text in parts]
    assert corpus.lm_train == [line.strip() for line in lines.pop("train_LM.txt", [])]
    assert corpus.lm_test == {name[8:-4]: [line.strip() for line in own] for name, own in lines.items()}
    return True


def check_pairs(case: tuple[dict[str, Any], dict[str, Any]], world: Workshop) -> bool:
    entries, rules = case
    folder = world.new_folder()
    strategy.create(folder, entries)
    config = {"name": "ted", "root": str(folder), "source": "en", "target": "fr", "clean": rules}
    names = [f"{part}.{end}" for part in pairs.PARTS for end in ("en", "fr")]
    corpus = attempt(lambda: pairs.load_pairs(config), *paths(folder, names), f"{folder}: corpus.clean")
    if corpus is None:
        counts = {name: len(lines_of((folder / name).read_bytes())) for name in names if is_valid(folder / name)}
        matching = len(counts) == 6 and all(counts[f"{part}.en"] == counts[f"{part}.fr"] for part in pairs.PARTS)
        assert not matching or rules != NO_RULES, "there is nothing wrong"
        return False
    lines = {name: [line.strip() for line in lines_of((folder / name).read_bytes())] for name in names}
    train, dev, test = (list(zip(lines[f"{part}.en"], lines[f"{part}.fr"], strict=True)) for part in pairs.PARTS)
    assert (corpus.dev, corpus.test) == (dev, test)
    assert corpus.read == len(train) == len(corpus.train) + sum(corpus.cleaned.values())
    rest = iter(train)
    assert all(pair in rest for pair in corpus.train)  # in their order
    return True


def check_json(case: tuple[str, bytes], world: Workshop) -> bool:
    kind, content = case
    path = world.new_folder() / "file.json"
    path.write_bytes(content)
    value = attempt(lambda: runs.read_json(path, kind), str(path))
    if value is None:
        return False
    assert repr(value) == repr(json.loads(content.decode("utf-8-sig")))  # repr tells 1 from 1.0 and True
    runs.write_json(path, value)
    assert repr(runs.read_json(path, kind)) == repr(value)
    return True


def check_run_files(files: dict[str, bytes], world: Workshop) -> bool:
    """`status` and the report answer, whatever is in the JSON files of a sweep and its run."""
    folder = world.new_folder()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    text = attempt(lambda: status.overview(folder)[0], str(folder))
    jobs = attempt(lambda: sweeps.jobs_of(folder), str(folder / "sweep.json"))
    assert text and (jobs is None or all(job.error for job in jobs))
    results = attempt(lambda: read_runs([folder])[0], str(folder))
    if results is None:
        return False
    content = json.loads(files["one/result.json"].decode("utf-8-sig"))
    assert [run.result["status"] for run in results] == [content["status"]]
    (table, *_), _ = build_tables(results)
    assert len(read_results(folder)) == 1 and len(table.rows) == 1
    return True


def check_trained_run(files: dict[str, bytes], world: Workshop) -> bool:
    """A trained run with other files beside its weights. Oracle: with the run's own vocabulary, its prediction."""
    folder = world.new_folder()
    shutil.copytree(world.run, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tensorboard"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    texts = ["word1 and word2"]
    probabilities = attempt(lambda: [load(folder).predict(text).probabilities for text in texts], str(folder))
    if probabilities is None:
        return False
    if json.loads((folder / "tokenizer.json").read_text()) == read(world, "tokenizer.json"):
        assert probabilities == [
            load(world.run, load(folder).checkpoint).predict(text).probabilities for text in texts
        ]
    return True


def tensors(content: Any, name: str = "") -> dict[str, tuple[Any, ...]]:
    """All tensors of a checkpoint, by their place in it: type, shape and bytes."""
    if isinstance(content, torch.Tensor):
        return {name: (content.dtype, content.shape, content.numpy().tobytes())}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {path: own for key, value in items for path, own in tensors(value, f"{name}.{key}").items()}


def check_checkpoint(content: bytes, world: Workshop) -> bool:
    """Oracle: the undamaged file."""
    path = world.new_folder() / "last.ckpt"
    path.write_bytes(content)
    checkpoint = attempt(lambda: read_checkpoint(path), str(path))
    task = attempt(lambda: load_task(path), str(path))
    if checkpoint is None or task is None:
        assert checkpoint is None, "it is damaged for one reader alone"
        return False
    original = torch.load(world.run / "last.ckpt", weights_only=True)
    assert tensors(checkpoint) == tensors(original) and checkpoint["hyper_parameters"] == original["hyper_parameters"]
    assert tensors(dict(task.state_dict())) == tensors(dict(original["state_dict"]))
    return True


OURS = re.compile(
    r"(result\.json|run\.json|config\.yaml|tokenizer\.json|(best|last|previous|average)\.ckpt|metrics\.csv"
    r"|(translations|predictions)\.tsv)"
    r"(\.[0-9a-f]{8}\.partial)?|run\.lock|log\.txt|tensorboard/(events\.out\.tfevents\..*|hparams\.yaml)"
    r"|(weights|checkpoints)/\d+\.ckpt(\.[0-9a-f]{8}\.partial)?"
)


BEFORE = re.compile(r"run\.lock|log\.txt|.*\.[0-9a-f]{8}\.partial")  # what a run may write before it owns a folder


def contents(folder: Path, ours: re.Pattern[str]) -> dict[str, bytes | str]:
    """What is in a folder but has none of our names: the content of each file, the target of each link, pipes."""
    content: dict[str, bytes | str] = {}
    for place, below, files in os.walk(folder):
        for path in (Path(place) / name for name in (*below, *files)):
            name = path.relative_to(folder).as_posix()
            if not ours.fullmatch(name) and (path.is_symlink() or not path.is_dir()):
                target = os.readlink(path) if path.is_symlink() else "pipe"
                content[name] = path.read_bytes() if path.is_file() and not path.is_symlink() else target
    return content


def check_run_folder(case: tuple[str, dict[str, Any], bool], world: Workshop) -> bool:
    """Oracle for the result: the undisturbed run."""
    kind, entries, force = case
    folder = world.new_folder()
    if kind != "empty":
        shutil.copytree(world.run, folder, dirs_exist_ok=True)
        for name in {"begun": os.listdir(folder), "interrupted": ["result.json"]}.get(kind, []):
            if name != "run.json":
                shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    for name in entries:
        if (folder / name).is_file():
            (folder / name).unlink()
    strategy.create(folder, entries)
    is_run = kind != "empty" or entries.get("run.json") == b'{"identity": "x"}'
    before, cfg = contents(folder, OURS if is_run else BEFORE), copy.deepcopy(world.config)
    cfg.force = force
    result = attempt(lambda: execute(cfg, folder), str(folder))
    after = contents(folder, OURS if is_run else BEFORE)
    assert all(OURS.fullmatch(name) for name in after.keys() - before.keys())
    assert after.items() >= before.items() and folder.with_name("outside").read_bytes() == b"precious"
    if result is None:
        return False
    expected = runs.read_result(world.run)
    assert all(result[key] == expected[key] for key in ("status", "metrics", "curve"))
    if kind != "finished" or force:
        weights = [torch.load(of / "last.ckpt", weights_only=True)["state_dict"] for of in (folder, world.run)]
        assert tensors(dict(weights[0])) == tensors(dict(weights[1]))
    return True


def numbers_of(value: Any) -> Iterator[float]:
    """All numbers of plain data."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(item)
    elif isinstance(value, int | float):
        yield value


def check_accepted_config(config: dict[str, Any]) -> None:
    assert all(math.isfinite(number) for number in numbers_of(config))
    own = {key: value for key, value in config.items() if key != "force"}
    assert re.fullmatch("[0-9a-f]{12}", identity.fingerprint(own, "0" * 64, ["a"]))
    assert Path(naming.folder_name(own, "0" * 12)).name == naming.folder_name(own, "0" * 12)


def check_command_line(words: list[str], world: Workshop) -> bool:
    """The command up to the run; Hydra and OmegaConf must not let an exception out either."""
    composed: list[Any] = []
    out, err = io.StringIO(), io.StringIO()
    original, arguments = train.execute, sys.argv
    folder = world.new_folder()
    sys.argv = ["train", *words, f"hydra.run.dir={folder}"]
    train.execute = lambda cfg, *_, **__: composed.append(configs.as_plain(cfg)) or runs.read_result(world.run)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            train.main()
    except SystemExit as end:
        message = str(end.code)
        assert re.fullmatch(r"Error: [^\n\r]+", message), f"{message!r} is not one line"
        keys = [key for word in words for key in re.findall(r"\w+", word.partition("=")[0])]
        assert any(key in message for key in [*keys, *map(repr, words), *filter(None, words)]), (
            f"{message!r} names nothing of {words}"
        )
        composed.clear()
    finally:
        train.execute, sys.argv = original, arguments
    try:
        called = configs.as_plain(configs.compose(words))
        configs.check_overrides(words)
    except UserError:
        called = None
    assert not composed or composed == [called], "the command and the function disagree"
    if composed:
        check_accepted_config(composed[0])
    return bool(composed)


def check_plain_config(config: Any, world: Workshop) -> bool:
    keys = re.findall(r"\w+", repr(config))
    if attempt(lambda: configs.check_config(config) or True, *keys, "missing") is None:
        return False
    check_accepted_config(config)
    return True


def leaves(value: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys of a config."""
    return [
        key
        for name, own in value.items()
        for key in (leaves(own, f"{prefix}{name}.") if isinstance(own, dict) and own else [f"{prefix}{name}"])
    ]


CHOICES = "task=lm model=rnn model=alibi model=relative pattern=bigbird pattern=window protocol=clean recipe=vaswani"
GROUPS = [[], ["task=translate"], ["task=translate", "corpus=digits"], *([word] for word in CHOICES.split())]


@functools.cache
def plain_configs() -> list[dict[str, Any]]:
    return [configs.as_plain(compose(*words)) for words in GROUPS]


NO_RULES = {"markup": False, "words": None, "ratio": None, "duplicates": False}
RULES = st.just(NO_RULES) | st.fixed_dictionaries(
    {
        "markup": st.booleans(),
        "words": st.none() | st.integers(1, 4),
        "ratio": st.none() | st.sampled_from([1, 1.5, 3]),
        "duplicates": st.booleans(),
    }
)
SWEEP = {"command": ["a=1,2"], "launcher": "basic", "begun": 1.5, "given_up": [1], "jobs": [["a=1"], ["a=2"]]}
JOB = {"overrides": ["a=1"], "folder": "one", "error": None}


def json_cases(world: Workshop) -> st.SearchStrategy[tuple[str, bytes]]:
    documents = {"sweep": SWEEP, "job": JOB, "owner": read(world, "run.json"), "result": read(world, "result.json")}
    kinds = {**documents, "reported": documents["result"], "object": JOB}
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.tuples(st.just(kind), strategy.json_files(kinds[kind]))
    )


def run_files(world: Workshop) -> st.SearchStrategy[dict[str, bytes]]:
    own = {"sweep.json": SWEEP, "jobs/0.json": JOB}
    own |= {f"one/{name}": read(world, name) for name in ("run.json", "result.json")}
    whole = {name: st.just(json.dumps(document).encode()) for name, document in own.items()}
    files = {name: whole[name] | whole[name] | strategy.json_files(own[name]) for name in own}
    return st.fixed_dictionaries({"one/result.json": files.pop("one/result.json")}, optional=files)


def trained_runs(world: Workshop) -> st.SearchStrategy[dict[str, bytes]]:
    names = ("tokenizer.json", "result.json")
    return st.fixed_dictionaries({}, optional={name: strategy.json_files(read(world, name)) for name in names})


def read(world: Workshop, name: str) -> Any:
    return json.loads((world.run / name).read_text())


def command_lines(world: Workshop) -> st.SearchStrategy[list[str]]:
    keys = sorted({key for config in plain_configs() for key in leaves(config)})
    return strategy.overrides(keys, [word for words in GROUPS for word in words])


# Each kind: its inputs, its check, and how many inputs `make test` tries
PROPERTIES: dict[str, tuple[Callable[[Workshop], st.SearchStrategy[Any]], Callable[[Any, Workshop], bool], int]] = {
    "speeches": (lambda world: strategy.speech_folders(), check_speeches, 120),
    "pairs": (lambda world: st.tuples(strategy.pair_folders(), RULES), check_pairs, 100),
    "json": (json_cases, check_json, 120),
    "run files": (run_files, check_run_files, 40),
    "checkpoint": (lambda world: strategy.checkpoints((world.run / "last.ckpt").read_bytes()), check_checkpoint, 100),
    "trained run": (trained_runs, check_trained_run, 40),
    "run folder": (lambda world: strategy.run_folders(), check_run_folder, 25),
    "command line": (command_lines, check_command_line, 24),
    "plain config": (
        lambda world: (
            st.sampled_from(plain_configs()).flatmap(strategy.mutated) | st.dictionaries(strategy.TEXT, strategy.JSON)
        ),
        check_plain_config,
        120,
    ),
}


def search(kind: str, world: Workshop, examples: int, number: int | None = None) -> dict[bool, int]:
    """Judge many inputs; return how many were accepted (True) and rejected (False).

    Args:
        number: the seed of the inputs; None: always the same ones.

    Raises:
        Exception: whatever a check raises for the simplest input that fails; its notes show that input.
    """
    inputs, check, _ = PROPERTIES[kind]
    outcomes = {True: 0, False: 0}

    def judge(case: Any) -> None:
        def hang(*_: Any) -> None:
            raise HangError(f"it takes more than {SECONDS} s: {case!r}")

        before = signal.signal(signal.SIGALRM, hang)
        signal.alarm(SECONDS)
        try:
            outcomes[check(case, world)] += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            for folder in world.folder.glob("[0-9]*"):
                shutil.rmtree(folder)

    test = given(case=inputs(world))(judge)
    if number is not None:
        test = seed(number)(test)
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    settings(
        max_examples=examples,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )(test)()
    return outcomes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with workshop(tmp_path_factory.mktemp("properties")) as place:
        yield place


@pytest.mark.parametrize("kind", PROPERTIES)
def test_every_input_is_accepted_whole_or_rejected_in_one_sentence(
    kind: str, world: Workshop, pytestconfig: pytest.Config
) -> None:
    outcomes = search(kind, world, PROPERTIES[kind][2] * pytestconfig.getoption("--examples"))
    assert min(outcomes.values()) >= 3, f"the inputs are all alike: {outcomes}"
