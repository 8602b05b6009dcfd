"""A run: what makes it the same run, its folder, who works in it, and what `result.json` says besides the figures.

config.yaml       the resolved config            tokenizer.json    words and ids
last.ckpt         where training stands          best.ckpt         weights of the best evaluation
metrics.csv       every figure logged            tensorboard/      the same, as TensorBoard events
run.json          who works here, since when     run.lock          held while somebody does
result.json       written last, in one piece: its presence says that the run is over

No torch here: reports, `status` and a run that is done already read this quickly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from speechformer.refusals import UserError

RESULT, CLAIM, LOCK = "result.json", "run.json", "run.lock"
OVER = ("finished", "diverged")  # what is not run again

# The code that decides what a run computes; a change in it makes other runs. What it prints or draws is not here.
CODE = (
    "callbacks.py",
    "corpora",
    "cores",
    "data.py",
    "decoding.py",
    "fit.py",
    "layers",
    "pack.py",
    "pair_data.py",
    "quality.py",
    "tasks.py",
)
# The settings that do not decide it: the machine, how often a run is written, whether it is done again.
NOT_IDENTITY = (
    "checkpoint_every",
    "compile",
    "force",
    "threads",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.strategy",
)


@functools.cache
def code_version() -> str:
    """sha256 over the names and contents of the files that `CODE` names."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for name in CODE:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = file.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def plain_number(value: Any, key: str) -> Any:
    """A whole float as an integer, for `dropout=0` and `dropout=0.0` ask for the same; but for Lightning's
    `trainer.limit_train_batches`, 1 is one batch and 1.0 all of them."""
    whole = isinstance(value, float) and value.is_integer() and not key.startswith("trainer.limit_")
    return int(value) if whole else value


def decisive(value: Any, key: str = "") -> Any:
    """The settings that decide what a run is. The corpus is left out: it is known by its contents, not by the way to
    it."""
    if isinstance(value, Mapping):
        below = {str(name): f"{key}.{name}" if key else str(name) for name in value}
        return {
            name: decisive(value[name], path) for name, path in below.items() if path not in (*NOT_IDENTITY, "corpus")
        }
    if isinstance(value, list | tuple):
        return [decisive(item, key) for item in value]
    return plain_number(value, key)


def identity(config: Mapping[str, Any], corpus_sha256: str, read_as: Any) -> str:
    """The fingerprint of a run: 12 hexadecimal digits of a hash of the resolved config (without machine, launcher and
    folders), the corpus (its files, and in plain data how they are read) and the version of the code that matters."""
    known = {"config": decisive(config), "corpus": [corpus_sha256, read_as], "code": code_version()}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def safe(name: str) -> str:
    """A name as a part of a path on any system."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")


def folder_name(config: Mapping[str, Any], fingerprint: str) -> str:
    """The name of a run's folder: what it is, for the reader, and its identity."""

    def name_of(group: str) -> str:
        choice = config.get(group)
        return safe(str(choice.get("name") if isinstance(choice, Mapping) else choice))[:30]

    seed = safe(str(config.get("seed")))[:12]
    return f"{name_of('task')}_{name_of('model')}_{name_of('pattern')}_seed{seed}_{fingerprint}"


def write_json(path: Path, content: Any) -> None:
    """Write a file so that a reader sees all of it or nothing, also after a crash."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None if it is not there, or no whole JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write `result.json` in one piece."""
    write_json(directory / RESULT, result)


def read_result(directory: Path) -> dict[str, Any]:
    """What `write_result` wrote."""
    return json.loads((directory / RESULT).read_text(encoding="utf-8"))


def result_or_none(directory: Path) -> dict[str, Any] | None:
    """The result of a run; None if there is none, or one that was cut short."""
    result = read_json(directory / RESULT)
    return result if result is not None and "status" in result else None


def finite(value: Any) -> Any:
    """The same plain data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class OccupiedError(UserError):
    """Another process works in this folder."""


class ForeignError(UserError):
    """The folder holds another run."""


@contextlib.contextmanager
def claim(directory: Path, wait: bool) -> Iterator[dict[str, Any]]:
    """Hold a run's folder, which is made if need be, so that no other process works in it.

    The operating system lets go of `run.lock` when the process ends, however it ends; `run.json`, which `sign`
    writes, stays and says who it was.

    Args:
        wait: for a process that holds it; otherwise step aside.

    Yields:
        What an earlier process left in `run.json`; empty if this is the first.

    Raises:
        OccupiedError: another process holds it, and we are not to wait.
        OSError: the folder cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0.5, poll_interval=0.05)  # `is_held` may be looking
    except Timeout:
        owner = read_json(directory / CLAIM) or {}
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} works on it ({directory})"
        if not wait:
            raise OccupiedError(f"{who}.") from None
        print(f"Waiting: {who}.", flush=True)
        lock.acquire(poll_interval=0.5)
    try:
        yield read_json(directory / CLAIM) or {}
    finally:
        lock.release()


def sign(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write into `run.json` that this process works here since now; returns its content."""
    owner = {**about, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    write_json(directory / CLAIM, owner)
    return owner


def worked_here(directory: Path, since: float) -> bool:
    """Whether it was this process that worked in the folder, at or after a time in seconds since the epoch."""
    owner = read_json(directory / CLAIM) or {}
    ours = owner.get("pid") == os.getpid() and owner.get("host") == socket.gethostname()
    return ours and owner.get("since", 0.0) >= since


def is_held(directory: Path) -> bool:
    """Whether a process works in this folder."""
    if not (directory / LOCK).exists():
        return False
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # a folder that we may only read: a process that trains writes there every few seconds
        with contextlib.suppress(OSError):
            return time.time() - (directory / CLAIM).stat().st_mtime < 60
        return False
    lock.release()
    return False


@dataclass(frozen=True)
class State:
    """How a run's folder stands.

    Attributes: `status`: "finished", "diverged", "failed" or "killed", as the result says; without a result
    "running", "interrupted" (somebody began, and nobody works on it) or "left"; `result`, `claim`: the content of
    the files.
    """

    status: str
    result: dict[str, Any] | None
    claim: dict[str, Any]


def state(directory: Path) -> State:
    """How the run in this folder stands."""
    owner, result = read_json(directory / CLAIM) or {}, result_or_none(directory)
    if result is not None and result["status"] in OVER:
        return State(result["status"], result, owner)
    if is_held(directory):
        return State("running", None, owner)
    if result is not None:
        return State(result["status"], result, owner)
    return State("interrupted" if owner else "left", None, owner)


@functools.cache
def commit() -> str | None:
    """The commit of the code that runs, with "-dirty" if a tracked file differs; None outside a checkout."""
    checkout = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout

    try:
        # An installed package may lie inside somebody else's checkout: its commit is not ours.
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != checkout:
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result may depend on."""
    names = (
        "speechformer",
        "torch",
        "lightning",
        "torchmetrics",
        "hydra-core",
        "nltk",
        "tokenizers",
        "sacrebleu",
        "numpy",
    )
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
