"""Properties of what is read: any input is accepted with nothing lost, or one sentence names the place.

Each function `check_...` judges one input, against an oracle of its own: Python's own JSON reader, the undamaged
checkpoint, the undisturbed run. It returns whether the input was accepted, and raises otherwise, also for
any exception that is no UserError. `-m slow` tries five times as many inputs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import strategies as strategy
import torch
from conftest import TINY, compose
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.tasks.registry import load_task, read_checkpoint
from speechformer.training.run import execute

T = TypeVar("T")
SECONDS = 120  # an input that takes longer hangs


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
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (corpus / name).write_text("".join(f"{k % 3}\tword{k} and word{k % 4}\n" for k in range(24)))
    words = ["corpus=speeches", f"corpus.root={corpus}", "corpus.classes=[a,b,c]", "batch_size=4", "threads=1"]
    cfg = compose(*TINY, *words, "trainer.max_epochs=-1", "trainer.max_steps=4", "eval_interval=2")
    execute(cfg, folder / "run")
    yield Workshop(folder, folder / "run", cfg, itertools.count())


def attempt(read: Callable[[], T], *places: str) -> T | None:
    """Return what a function returns, or None if it raises one sentence that names one of the places."""
    try:
        return read()
    except UserError as error:
        message = str(error)
        assert re.fullmatch(r"[^\n\r]+", message), f"not one line: {message!r}"
        assert any(place in message for place in places), f"{message!r} names none of {places[:5]}"
        return None


def check_json(case: tuple[str, bytes], world: Workshop) -> bool:
    kind, content = case
    path = world.new_folder() / "file.json"
    path.write_bytes(content)
    value = attempt(lambda: runs.read_json(path, kind), str(path))
    if value is None:
        return False
    assert repr(value) == repr(json.loads(content.decode("utf-8-sig")))  # repr tells 1 from 1.0 and True
    runs.write_json(path, value)
    if b"\\ud" not in content:  # half a surrogate pair becomes a question mark
        assert repr(json.loads(path.read_bytes())) == repr(runs.finite(value))
    return True


def tensors(content: Any, name: str = "") -> dict[str, tuple[Any, ...]]:
    """All tensors of a checkpoint, by their place in it: type, shape and bytes."""
    if isinstance(content, torch.Tensor):
        return {name: (content.dtype, content.shape, content.numpy().tobytes())}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {path: found for key, value in items for path, found in tensors(value, f"{name}.{key}").items()}


def weights(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The weights of a run."""
    return tensors(dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]))


def check_checkpoint(content: bytes, world: Workshop) -> bool:
    """Oracle: the undamaged file."""
    path = world.new_folder() / "last.ckpt"
    path.write_bytes(content)
    checkpoint = attempt(lambda: read_checkpoint(path), str(path))
    task = attempt(lambda: load_task(path), str(path))
    if checkpoint is None or task is None:
        assert checkpoint is None, "it is damaged for one reader alone"
        return False
    assert tensors(checkpoint) == tensors(torch.load(world.run / "last.ckpt", weights_only=True))
    assert tensors(dict(task.state_dict())) == weights(world.run)
    return True


OURS = re.compile(
    r"(result\.json|run\.json|config\.yaml|tokenizer\.json|(best|last|previous|average)\.ckpt|metrics\.csv"
    r"|(translations|predictions)\.tsv)(\.[0-9a-f]{8}\.partial)?|run\.lock|log\.txt"
    r"|(tensorboard|weights|checkpoints)/.*|(metrics\.csv|[a-z]+\.ckpt|result\.json|config\.yaml)/mine"
    r"|\.replaced(\.moving|\.discarded)?/.*"
)


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
    """Nothing of others is lost. Oracle for the result: the undisturbed run."""
    kind, entries, force = case
    folder = world.new_folder()
    if kind != "empty":
        shutil.copytree(world.run, folder, dirs_exist_ok=True)
        for name in {"begun": {*os.listdir(folder)} - {"run.json"}, "interrupted": {"result.json"}}.get(kind, ()):
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    for name in entries:
        if (folder / name).is_file():
            (folder / name).unlink()
    strategy.create(folder, entries)
    is_run = kind != "empty" or b'{"identity": "x"}' in entries.values()
    ours = OURS if is_run else re.compile(r"run\.lock|log\.txt|.*\.[0-9a-f]{8}\.partial")  # what comes before a run
    before, cfg = contents(folder, ours), copy.deepcopy(world.config)
    cfg.force = force
    result = attempt(lambda: execute(cfg, folder), str(folder))
    after = contents(folder, ours)
    assert all(OURS.fullmatch(name) for name in after.keys() - before.keys())
    assert after.items() >= before.items()
    if result is None:
        return False
    expected = runs.read_result(world.run)
    assert all(result[key] == expected[key] for key in ("status", "metrics", "curve"))
    if kind != "finished" or force:
        assert weights(folder) == weights(world.run)
    return True


def json_cases(world: Workshop) -> st.SearchStrategy[tuple[str, bytes]]:
    owner, result = (json.loads((world.run / name).read_text()) for name in ("run.json", "result.json"))
    sweep = {"jobs": {"one": ["a=1"], "two": ["a=2"]}}
    kinds = {"sweep": sweep, "owner": owner, "result": result, "reported": result, "object": sweep}
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.tuples(st.just(kind), strategy.json_files(kinds[kind]))
    )


# Each kind: its inputs, its check, and how many inputs `make test` tries
PROPERTIES: dict[str, tuple[Callable[[Workshop], st.SearchStrategy[Any]], Callable[[Any, Workshop], bool], int]] = {
    "json": (json_cases, check_json, 60),
    "checkpoint": (lambda world: strategy.damaged((world.run / "last.ckpt").read_bytes()), check_checkpoint, 30),
    "run folder": (lambda world: strategy.run_folders(), check_run_folder, 25),
}


def search(kind: str, world: Workshop, examples: int) -> dict[bool, int]:
    """Judge many inputs, always the same ones; return how many were accepted (True) and rejected (False).

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

    settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(given(case=inputs(world))(judge))()
    return outcomes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with workshop(tmp_path_factory.mktemp("properties")) as place:
        yield place


@pytest.mark.parametrize("kind", PROPERTIES)
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_every_input_is_accepted_whole_or_rejected_in_one_sentence(kind: str, times: int, world: Workshop) -> None:
    outcomes = search(kind, world, PROPERTIES[kind][2] * times)
    assert min(outcomes.values()) >= (1 if times == 1 else 3), f"the inputs are all alike: {outcomes}"
