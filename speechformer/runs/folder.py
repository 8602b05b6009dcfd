"""A run's folder: its files, the process that owns it, and its state.

config.yaml       the resolved config            tokenizer.json    vocabulary
last.ckpt         state to resume from           previous.ckpt     the one before, until the run ends
best.ckpt         weights of the best evaluation checkpoints/      weights at an interval, if they are kept
metrics.csv       every logged metric            tensorboard/      the same, as TensorBoard events
run.json          the owner, its progress        run.lock          locked while a process works in the folder
predictions.tsv, translations.tsv                what the tested weights make of each test sentence
.replaced/        the run that force=true replaces, until the first step of the new one
result.json       written last and atomically: if it exists, the run has ended

`schema.json` describes the JSON files. They are checked when they are read, so the code that uses them trusts them.
No torch here: reports, `status` and finished runs read these files quickly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from speechformer import console
from speechformer.corpora.files import write_file
from speechformer.errors import UserError, one_sentence
from speechformer.escape import one_line
from speechformer.runs import identity
from speechformer.runs.legacy import upgrade_result
from speechformer.runs.rank import is_first

RESULT, OWNER, LOCK, CONFIG, TOKENIZER = "result.json", "run.json", "run.lock", "config.yaml", "tokenizer.json"
PREDICTIONS = "predictions.tsv"  # of a classifier
TERMINAL_STATES = ("finished", "diverged")  # such a run is not run again
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the checkpoint to resume from, and the one before
OUTPUTS = ("best.ckpt", LAST, PREVIOUS, "average.ckpt", "metrics.csv", "translations.tsv", PREDICTIONS, RESULT)
WRITTEN = "|".join(map(re.escape, (*OUTPUTS, OWNER, CONFIG, TOKENIZER)))
PARTIAL = rf"({WRITTEN})\.[0-9a-f]{{8}}\.partial"  # of a killed process
LOG = "log.txt"  # the output of a job that runs beside others
WEIGHTS = "weights"  # the folder of the last evaluations' weights, until they are averaged
HISTORY = "checkpoints"  # the folder of the weights that `keep_every_n_steps` keeps
STEP, STEP_PARTIAL = r"\d+\.ckpt", r"\d+\.ckpt\.[0-9a-f]{8}\.partial"  # a file in both; of a killed process
STEPS = f"{STEP}|{STEP_PARTIAL}"
CURVES, EVENTS = "tensorboard", r"events\.out\.tfevents\..*|hparams\.yaml"  # the folder of the curves, a file in it
RUN_FILES = {CURVES: EVENTS, WEIGHTS: STEPS, HISTORY: STEPS, "": f"{WRITTEN}|{PARTIAL}"}  # by the folder inside
# The folder of a run that is being replaced: whole, with files on the way there or back, and no longer needed
REPLACED, MOVING, DISCARDED = ".replaced", ".replaced.moving", ".replaced.discarded"


class OccupiedError(UserError):
    """Another process works in this folder."""


class ForeignError(UserError):
    """The folder holds something else than this run."""


class DamagedError(ForeignError):
    """A file is not as speechformer writes it."""


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON, atomically; NaN, infinity and integers of more than 64 bits become null."""
    text = json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode(errors="replace"))


@functools.cache
def validator(kind: str) -> Callable[[Any], object]:
    """Return the function that raises a ValueError unless its argument is what `schema.json` says of a kind."""
    import fastjsonschema

    schema = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(schema | {"$ref": f"#/definitions/{kind}"})


def check_json(path: Path, content: Any, kind: str) -> None:
    """Raise a `DamagedError` unless the content of a file is what `schema.json` says of a kind."""
    try:
        validator(kind)(content)
    except ValueError as error:
        reason = re.sub(r"^data\.?", "", str(error)).lstrip()
        missing = re.sub(r"must contain \[(.*)\] properties", lambda match: f"lacks {match[1]}", reason)
        raise DamagedError(f"{path} is damaged: {one_line(missing, 300)}. Restore or remove it.") from None


def parse_number(text: str) -> int | float:
    """Return a number in JSON; raise a ValueError unless it is finite and, if whole, has at most 64 bits."""
    whole = text.lstrip("-").isdigit()
    value = int(text) if whole and len(text) <= 20 else float(text)
    if not abs(value) < (2**63 if whole else math.inf):
        raise ValueError(f"the number {text[:30]} is out of range")
    return value


def read_json(path: Path, kind: str = "object") -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    Args:
        kind: the definition in `schema.json` that it must meet.

    Raises:
        DamagedError: there is something else.
    """
    try:
        if not os.path.isfile(path):  # reading a FIFO would wait for its writer
            if not os.path.lexists(path):
                return None
            raise ValueError("it is not a regular file")
        text = path.read_bytes().decode("utf-8-sig")
        hooks = dict.fromkeys(("parse_float", "parse_int", "parse_constant"), parse_number)
        content = json.loads(text, **hooks)  # type: ignore[arg-type]
        if "\\ud" in text.lower():  # half a surrogate pair cannot be written again
            json.dumps(content, ensure_ascii=False).encode()
        check_json(path, content, kind)
    except FileNotFoundError:  # removed meanwhile
        return None
    except DamagedError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if nested else getattr(error, "strerror", None) or one_sentence(error)
        raise DamagedError(f"{path} is damaged: {reason}. Restore or remove it.") from None
    return content


def read_or_none(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the JSON object in a file as `read_json`; None also if it is damaged."""
    with contextlib.suppress(DamagedError):
        return read_json(path, kind)
    return None


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finite(value: Any) -> Any:
    """Return plain data with None in place of numbers that we do not read from JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    limit = math.inf if isinstance(value, float) else 2**63
    return None if isinstance(value, int | float) and not abs(value) < limit else value


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write `result.json` atomically."""
    write_json(directory / RESULT, result)


def read_result(directory: Path, kind: str = "result") -> dict[str, Any]:
    """Return the content of `result.json`, under today's names; raise a `DamagedError` without a valid one."""
    result = result_or_none(directory, kind)
    if result is None:
        raise DamagedError(f"{directory} has no {RESULT}.")
    return result


def result_or_none(directory: Path, kind: str = "result") -> dict[str, Any] | None:
    """Return the content of `result.json`, under today's names; None if there is no such file."""
    result = read_json(directory / RESULT, kind)
    return None if result is None else upgrade_result(result)


def failure_result(
    config: Mapping[str, Any], overrides: Sequence[str] | None, fingerprint: str | None, error: BaseException
) -> dict[str, Any]:
    """Return the result of a run that raised `error`."""
    reason, task, seed = one_sentence(error) or type(error).__name__, config.get("task"), config.get("seed")
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename}: {error.strerror}"
    return {
        "status": "failed",
        "error": reason,
        "traceback": "".join(traceback.format_exception(error)),
        "task": task.get("name") if isinstance(task, Mapping) else None,
        "config": dict(config),
        "overrides": None if overrides is None else list(overrides),
        "identity": fingerprint,
        "seed": seed if type(seed) is int else None,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }


@contextlib.contextmanager
def lock(directory: Path, wait: bool) -> Iterator[None]:
    """Make a run's folder if needed, and lock it; the operating system releases the lock of a process that ends.

    Raises:
        OccupiedError: another process holds the lock, and `wait` is False.
        OSError: the folder cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(directory / LOCK)
    try:
        file_lock.acquire(timeout=0.5, poll_interval=0.05)  # `is_locked` holds it for a moment
    except Timeout:
        owner = read_or_none(directory / OWNER, "owner") or {}
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} works in {directory}"
        if not wait:
            raise OccupiedError(f"{who}.") from None
        console.say(f"Waiting: {who}.")
        file_lock.acquire(poll_interval=0.5)
    try:
        yield
    finally:
        file_lock.release()


def is_locked(directory: Path) -> bool:
    """Return whether a process works in this folder."""
    if not os.path.exists(directory / LOCK):
        return False
    try:
        with FileLock(directory / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that we may only read: a training process rewrites run.json every few seconds
        with contextlib.suppress(OSError):
            return time.time() - (directory / OWNER).stat().st_mtime < 60
        return False


@dataclass
class RunFolder:
    """A run's folder that this process works in. Of a run on several devices only the first process writes.

    Attributes: `identity`, the run's fingerprint; `overrides` of its command line, None without one; `previous`, what
    an earlier attempt left in `run.json`; `result` of a run that has ended; `owner`, the content of `run.json`; the
    config group `logger`, which is no part of the run's files; `replaces`, whether an earlier run is set aside.
    """

    path: Path
    identity: str
    overrides: Sequence[str] | None = None
    previous: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    owner: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=lambda: {"name": "tensorboard"})
    replaces: bool = False

    def __post_init__(self) -> None:
        self.writes = is_first()

    @property
    def has_ended(self) -> bool:
        """Whether the run has a result that stands."""
        return self.result is not None and self.result["status"] in TERMINAL_STATES

    def begin(self, config: Mapping[str, Any], threads: int | None) -> None:
        """Write `run.json` and `config.yaml`, and remove the result of an attempt that failed."""
        self.owner = {
            "identity": self.identity,
            "overrides": None if self.overrides is None else list(self.overrides),
            "attempts": self.previous.get("attempts", 0) + 1,
            "threads": self.previous.get("threads") or threads,
        }
        if not self.writes:
            return
        self.owner |= {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        write_json(self.path / OWNER, self.owner)
        remove(self.path, RESULT)
        write_file(self.path / CONFIG, OmegaConf.to_yaml(dict(config)).encode(errors="replace"))

    def report_progress(self, **progress: Any) -> None:
        """Write how far the run is into `run.json`."""
        write_json(self.path / OWNER, {**self.owner, **progress})

    def remove_outputs(self, *, keep_results: bool) -> None:
        """Remove what an attempt left and the next one writes again; with `keep_results` what it does not resume."""
        if not keep_results:
            remove_matching(self.path / CURVES, EVENTS)
        remove_matching(self.path, PARTIAL)
        remove(self.path, "metrics.csv", *(() if keep_results else OUTPUTS))
        remove_matching(self.path / HISTORY, STEP_PARTIAL if keep_results else STEPS)

    def set_aside(self) -> None:
        """Move the run that is in the folder into a folder inside. `put_back` undoes it until `discard_replaced`."""
        if any(files_matching(self.path / name, pattern) for name, pattern in RUN_FILES.items()):
            (self.path / MOVING).mkdir()
            move_run(self.path, self.path / MOVING)
            os.replace(self.path / MOVING, self.path / REPLACED)
            self.replaces = True

    def discard_replaced(self) -> None:
        """Remove the run that was set aside: the new one has begun."""
        if self.replaces:
            self.replaces = False
            os.replace(self.path / REPLACED, self.path / DISCARDED)
            shutil.rmtree(self.path / DISCARDED, ignore_errors=True)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, and remove what only an unfinished run needs."""
        self.discard_replaced()
        if self.writes:
            write_result(self.path, result)
            self.clean_up()

    def clean_up(self) -> None:
        """Remove what only an unfinished run needs."""
        if not self.writes:
            return
        remove_matching(self.path / WEIGHTS, STEPS)
        remove(self.path, PREVIOUS)

    def read(self) -> None:
        """Read what an earlier attempt left.

        Raises:
            ForeignError: the folder holds another run, or its files are damaged.
        """
        try:
            self.previous = read_json(self.path / OWNER, "owner") or {}
            self.result = result_or_none(self.path)
            for content in filter(None, (self.previous, self.result)):
                failed_early = content.get("identity") is None and content.get("status") == "failed"
                if content.get("identity") != self.identity and not failed_early:
                    raise ForeignError(
                        f"{self.path} holds another run (of another config, corpus or version of the numerics). "
                        "Choose another folder, or overwrite it with force=true."
                    )
            if self.has_ended:
                check_json(self.path / RESULT, self.result, "ended")  # it can be shown
        except DamagedError as error:
            raise DamagedError(f"{error} Or run it again with force=true.") from None


def check_is_ours(directory: Path) -> None:
    """Raise a `ForeignError` if a folder holds files but no run: a run overwrites and removes only its own."""
    before_owner = "|".join(map(re.escape, (LOCK, LOG)))  # what comes before `run.json`
    allowed, places = f"{before_owner}|{PARTIAL}", (directory, directory / REPLACED, directory / MOVING)
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    others = [name for name in names if not re.fullmatch(allowed, name)]
    files = [(place / name, kind) for place in places for name, kind in ((OWNER, "owner"), (RESULT, "result"))]
    if others and not any("identity" in (read_or_none(path, kind) or {}) for path, kind in files):
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ForeignError(
            f"{directory} holds {shown} and no valid {OWNER}, so it is no run's folder. Choose a new or an empty one."
        )


def check_kinds(directory: Path) -> None:
    """Raise a `ForeignError` if a file or folder of a run is a link, a pipe or the like, which no run makes."""
    files, folders = (*OUTPUTS, OWNER, CONFIG, TOKENIZER, LOCK, LOG), (*RUN_FILES, REPLACED, MOVING, DISCARDED)
    kinds = {**dict.fromkeys(files, Path.is_file), **dict.fromkeys(filter(None, folders), Path.is_dir)}
    for name, is_ours in kinds.items():
        path = directory / name
        if name in (RESULT, OWNER) and not path.is_dir():
            continue  # reading tells, and force=true replaces it
        if path.is_symlink() or (os.path.lexists(path) and not is_ours(path)):
            raise ForeignError(f"{path} is of a kind that speechformer does not make (a link, a pipe). Remove it.")
        for inner in path.iterdir() if path.is_dir() else ():
            if inner.exists() and not (inner.is_file() or inner.is_dir()):  # opening a pipe waits for its other end
                raise ForeignError(f"{inner} is of a kind that speechformer does not make (a pipe). Remove it.")


def files_matching(directory: Path, pattern: str) -> list[Path]:
    """List what is in a folder, except folders, by names that match a regular expression. A link has no files."""
    if not directory.is_dir() or directory.is_symlink():
        return []
    paths = [path for path in directory.iterdir() if re.fullmatch(pattern, path.name)]
    return [path for path in paths if path.is_symlink() or not path.is_dir()]


def remove_matching(directory: Path, pattern: str) -> None:
    """Remove the files of a folder whose names match a regular expression, and the folder if that leaves it empty."""
    for path in files_matching(directory, pattern):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def move_run(source: Path, target: Path) -> None:
    """Move the files of a run from one folder to another, and remove the folders that this leaves empty."""
    for name, pattern in RUN_FILES.items():
        for path in files_matching(source / name, pattern):
            (target / name).mkdir(exist_ok=True)
            os.replace(path, target / name / path.name)
        with contextlib.suppress(OSError):
            (source / name).rmdir()


def put_back(directory: Path) -> None:
    """Put a run that was set aside back, in place of the new one, which took no step; continue if that was killed."""
    shutil.rmtree(directory / DISCARDED, ignore_errors=True)
    if (directory / REPLACED).is_dir():
        for name, pattern in RUN_FILES.items():
            remove_matching(directory / name, pattern)
        os.replace(directory / REPLACED, directory / MOVING)
    move_run(directory / MOVING, directory)


def remove(directory: Path, *names: str) -> None:
    """Remove files, if they exist."""
    for name in names:
        (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def failure_recorded(folder: RunFolder, config: Mapping[str, Any], is_new: bool) -> Iterator[None]:
    """Make an exception the run's result; a `UserError` removes what the run has written into a new folder."""
    try:
        yield
    except UserError:
        if is_new:
            remove(folder.path, CONFIG, TOKENIZER, OWNER)  # the last one says that the others are ours
        raise
    except Exception as error:
        with contextlib.suppress(OSError):
            write_result(folder.path, failure_result(config, folder.overrides, folder.identity, error))
        raise


@contextlib.contextmanager
def own(
    directory: Path,
    config: Mapping[str, Any],
    fingerprint: str,
    overrides: Sequence[str] | None = None,
    *,
    force: bool = False,
    wait: bool = True,
) -> Iterator[RunFolder]:
    """Own a run's folder: lock it, check it, and account for whatever happens inside.

    An exception becomes the run's result ("failed"), unless it is a `UserError`; then a new folder is removed again.
    `force` replaces the run that is in the folder as soon as the new one has taken a step; before, whatever ends the
    new one, the old one comes back. `wait` waits for a process that works in the folder.

    Yields:
        The folder. The caller returns its `result` if the run `has_ended`, else it calls `begin` and `finish`.

    Raises:
        OccupiedError: another process works in the folder, and `wait` is False.
        ForeignError: the folder holds another run, or its files are damaged.
        UserError: a file cannot be written.
    """
    is_new = not directory.exists() or not any(directory.iterdir())
    try:
        check_is_ours(directory)
        check_kinds(directory)
        with lock(directory, wait):
            folder = RunFolder(directory, fingerprint, overrides)
            put_back(directory)  # a process was killed before the first step of its run
            try:
                if force:
                    folder.set_aside()
                else:
                    folder.read()
                with failure_recorded(folder, config, is_new):
                    yield folder
            finally:
                put_back(directory)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: {error.strerror or one_sentence(error)}. Fix that, and run the same "
            "command again: it resumes from the last checkpoint."
        ) from error
    except UserError:
        if is_new and not (directory / OWNER).exists():
            with contextlib.suppress(OSError):
                remove(directory, LOCK)
                directory.rmdir()
        raise


def worked_here(directory: Path, since: float) -> bool:
    """Return whether this process worked in the folder at or after a time, in seconds since the epoch."""
    owner = read_or_none(directory / OWNER, "owner") or {}
    is_ours = owner.get("pid") == os.getpid() and owner.get("host") == socket.gethostname()
    return is_ours and owner.get("since", 0.0) >= since


@dataclass(frozen=True)
class State:
    """The state of a run's folder: `status`, and the content of `result.json` and `run.json`.

    `status` is "finished", "diverged", "failed" or "killed", as in the result; without a result "running",
    "interrupted" (a process began the run and has gone) or "left" (none has). It is "damaged" if one of the files is;
    then the result has the error alone.
    """

    status: str
    result: dict[str, Any] | None
    owner: dict[str, Any]


def state(directory: Path) -> State:
    """Return the state of the run in a folder."""
    owner = read_or_none(directory / OWNER, "owner") or {}
    try:
        result = result_or_none(directory)
        has_ended = result is not None and result["status"] in TERMINAL_STATES
        if not has_ended and is_locked(directory):
            return State("running", None, owner)
        if result is not None:
            return State(result["status"], result, owner)
        return State("interrupted" if read_json(directory / OWNER, "owner") else "left", None, owner)
    except DamagedError as error:
        return State("running" if is_locked(directory) else "damaged", {"error": str(error)}, owner)
