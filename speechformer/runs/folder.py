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
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from speechformer.errors import UserError

RESULT, OWNER, LOCK = "result.json", "run.json", "run.lock"


TERMINAL_STATES = ("finished", "diverged")  # what is not run again


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
def lock(directory: Path, wait: bool) -> Iterator[dict[str, Any]]:
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
    file_lock = FileLock(directory / LOCK)
    try:
        file_lock.acquire(timeout=0.5, poll_interval=0.05)  # `is_held` may be looking
    except Timeout:
        owner = read_json(directory / OWNER) or {}
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} works on it ({directory})"
        if not wait:
            raise OccupiedError(f"{who}.") from None
        print(f"Waiting: {who}.", flush=True)
        file_lock.acquire(poll_interval=0.5)
    try:
        yield read_json(directory / OWNER) or {}
    finally:
        file_lock.release()


def write_owner(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write into `run.json` that this process works here since now; returns its content."""
    owner = {**about, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    write_json(directory / OWNER, owner)
    return owner


def worked_here(directory: Path, since: float) -> bool:
    """Whether it was this process that worked in the folder, at or after a time in seconds since the epoch."""
    owner = read_json(directory / OWNER) or {}
    ours = owner.get("pid") == os.getpid() and owner.get("host") == socket.gethostname()
    return ours and owner.get("since", 0.0) >= since


def is_held(directory: Path) -> bool:
    """Whether a process works in this folder."""
    if not (directory / LOCK).exists():
        return False
    file_lock = FileLock(directory / LOCK)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # a folder that we may only read: a process that trains writes there every few seconds
        with contextlib.suppress(OSError):
            return time.time() - (directory / OWNER).stat().st_mtime < 60
        return False
    file_lock.release()
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
    owner, result = read_json(directory / OWNER) or {}, result_or_none(directory)
    if result is not None and result["status"] in TERMINAL_STATES:
        return State(result["status"], result, owner)
    if is_held(directory):
        return State("running", None, owner)
    if result is not None:
        return State(result["status"], result, owner)
    return State("interrupted" if owner else "left", None, owner)
