"""A run's folder: its files, the process that owns it, and its state.

config.yaml       the resolved config            tokenizer.json    vocabulary
pretrained.json   of `init_from`: the model's small files, for its export
last.ckpt         state to resume from           previous.ckpt     the one before, until the run ends
best.ckpt         weights of the best evaluation average.ckpt      the mean of the last ones, if it is tested
checkpoints/      weights at an interval, if kept weights/          of the last evaluations, until they are averaged
metrics.csv       every logged metric            tensorboard/      the same, as TensorBoard events
run.json          the owner, its progress        run.lock          locked while a process works in the folder
log.txt           output of a sweep's parallel job  ensemble.ckpt    what an ensemble resumes from, until it ends
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
from speechformer.runs.rank import is_first

RESULT, OWNER, LOCK, CONFIG, TOKENIZER = "result.json", "run.json", "run.lock", "config.yaml", "tokenizer.json"
PREDICTIONS = "predictions.tsv"  # of a classifier
PRETRAINED = "pretrained.json"  # the small files of the model that training began with, by name
TERMINAL_STATES = ("finished", "diverged")  # such a run is not run again
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the checkpoint to resume from, and the one before
ENSEMBLE = "ensemble.ckpt"  # what an ensemble resumes from, in the folder of its first run
CHECKPOINTS = ("best.ckpt", LAST, PREVIOUS, ENSEMBLE, "average.ckpt")
OUTPUTS = (*CHECKPOINTS, "metrics.csv", "translations.tsv", PREDICTIONS, RESULT)
LOG = "log.txt"  # the output of a job that runs beside others
CURVES = "tensorboard"
WEIGHTS = "weights"  # the folder of the last evaluations' weights, until they are averaged
HISTORY = "checkpoints"  # the folder of the weights that `keep_every_n_steps` keeps
STEP = r"\d+\.ckpt"  # a file in both
IN_FOLDERS = rf"{STEP}|events\.out\.tfevents\..*|hparams\.yaml|.*\.partial"  # what runs write into these folders
FOLDERS = (CURVES, WEIGHTS, HISTORY)
RUN_FILES = (*OUTPUTS, OWNER, CONFIG, TOKENIZER, PRETRAINED, *FOLDERS)
PARTIAL = "*.????????.partial"  # of a killed process
# The folder of a run that is being replaced: whole, with files on the way there or back, and no longer needed
REPLACED, MOVING, DISCARDED = ".replaced", ".replaced.moving", ".replaced.discarded"


class OccupiedError(UserError):
    """Another process works in this folder."""


class ForeignError(UserError):
    """The folder holds something else than this run."""


class DamagedError(ForeignError):
    """A file is not as speechformer writes it."""


def finite(value: Any) -> Any:
    """Return plain data with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON, atomically; NaN and infinity become null."""
    text = json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode(errors="replace"))


@functools.cache
def validator(definition: str) -> Callable[[object], object]:
    """Return the function that raises a ValueError unless its argument meets a definition in `schema.json`."""
    import fastjsonschema

    schema = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(schema | {"$ref": f"#/definitions/{definition}"})


def read_json(path: Path, definition: str = "object") -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    Args:
        definition: what it must meet in `schema.json`.

    Raises:
        DamagedError: there is something else.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")  # reading a pipe would wait for its writer
        content = json.loads(path.read_bytes())
        validator(definition)(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = one_line(re.sub(r"^data\.? ?", "", getattr(error, "strerror", None) or one_sentence(error)), 300)
        raise DamagedError(f"{path} is damaged: {reason}. Restore it, remove it, or add force=true.") from None
    return content


def read_or_none(path: Path, definition: str) -> dict[str, Any] | None:
    """Return the JSON object in a file as `read_json`; None also if it is damaged."""
    with contextlib.suppress(DamagedError):
        return read_json(path, definition)
    return None


def owner_of(directory: Path) -> dict[str, Any]:
    """Return the content of `run.json`; {} if it is missing or damaged."""
    return read_or_none(directory / OWNER, "owner") or {}


def identity_of(directory: Path) -> str | None:
    """Return the fingerprint of the run in a folder; None if its files do not say it."""
    contents = (read_or_none(directory / name, kind) or {} for name, kind in ((OWNER, "owner"), (RESULT, "result")))
    return next((content["identity"] for content in contents if content.get("identity")), None)


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write `result.json` atomically."""
    write_json(directory / RESULT, result)


def read_result(directory: Path, definition: str = "result") -> dict[str, Any]:
    """Return the content of `result.json`; raise a `DamagedError` without a valid one."""
    result = read_json(directory / RESULT, definition)
    if result is None:
        raise DamagedError(f"{directory} has no {RESULT}.")
    return result


def result_or_none(directory: Path) -> dict[str, Any] | None:
    """Return the content of `result.json`; None if there is no such file."""
    return read_json(directory / RESULT, "result")


def failure_result(
    config: Mapping[str, Any], overrides: Sequence[str] | None, fingerprint: str | None, error: BaseException
) -> dict[str, Any]:
    """Return the result of a run that raised `error`."""
    task, seed = config.get("task"), config.get("seed")
    return {
        "status": "failed",
        "error": one_sentence(error) or type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "task": task.get("name") if isinstance(task, Mapping) else None,
        "config": dict(config),
        "overrides": None if overrides is None else list(overrides),
        "identity": fingerprint,
        "seed": seed if type(seed) is int else None,
        "commit": identity.commit(),
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
        owner = owner_of(directory)
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
    if not (directory / LOCK).exists():
        return False
    try:
        with FileLock(directory / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that we may only read
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
    writes: bool = field(default_factory=is_first)

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
        if self.writes:
            self.owner |= {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            self.report_progress()
            remove(self.path, RESULT)
            write_file(self.path / CONFIG, OmegaConf.to_yaml(dict(config)).encode(errors="replace"))

    def report_progress(self, **progress: Any) -> None:
        """Write how far the run is into `run.json`."""
        write_json(self.path / OWNER, {**self.owner, **progress})

    def remove_outputs(self, *, keep_results: bool) -> None:
        """Remove what an attempt left and the next one writes again; with `keep_results` what it does not resume."""
        remove(self.path, "metrics.csv", *(() if keep_results else (*OUTPUTS, HISTORY, CURVES)))
        for partial in (*self.path.glob(PARTIAL), *(self.path / HISTORY).glob(PARTIAL)):
            partial.unlink()

    def set_aside(self) -> None:
        """Move the run that is in the folder into a folder inside. `put_back` undoes it until `discard_replaced`."""
        if any(os.path.lexists(self.path / name) for name in RUN_FILES):
            (self.path / MOVING).mkdir()
            move_run(self.path, self.path / MOVING)
            os.replace(self.path / MOVING, self.path / REPLACED)
            self.replaces = True

    def discard_replaced(self) -> None:
        """Remove the run that was set aside: the new one has begun."""
        if self.replaces:
            self.replaces = False
            os.replace(self.path / REPLACED, self.path / DISCARDED)  # at once, or half of it could come back
            shutil.rmtree(self.path / DISCARDED, ignore_errors=True)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, and remove what only an unfinished run needs."""
        self.discard_replaced()
        if self.writes:
            write_result(self.path, result)
        self.clean_up()

    def clean_up(self) -> None:
        """Remove what only an unfinished run needs."""
        if self.writes:
            remove(self.path, WEIGHTS, PREVIOUS, ENSEMBLE)

    def is_at_rest(self) -> bool:
        """Read what an earlier attempt left; return whether the run has ended, and nothing is left to do."""
        names = (WEIGHTS, PREVIOUS, ENSEMBLE, REPLACED, MOVING, DISCARDED)
        if any(os.path.lexists(self.path / name) for name in names):
            return False
        with contextlib.suppress(ForeignError):  # whoever has the lock reads again
            self.read()
            return self.has_ended
        return False

    def read(self) -> None:
        """Read what an earlier attempt left.

        Raises:
            ForeignError: the folder holds another run, or its files are damaged.
        """
        self.previous = read_json(self.path / OWNER, "owner") or {}
        self.result = result_or_none(self.path)
        for content in (self.previous, self.result or {}):  # a run that failed early has no identity
            if content.get("identity") not in (None, self.identity):
                raise ForeignError(
                    f"{self.path} holds another run (of another config, corpus or version of the numerics). "
                    "Choose another folder, or overwrite it with force=true."
                )


def check_is_ours(directory: Path) -> None:
    """Raise a `ForeignError` if a folder holds files but no run: a run overwrites and removes only its own."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    others = sorted(names - {LOCK, LOG, *(path.name for path in directory.glob(PARTIAL))})
    places = (directory, directory / REPLACED, directory / MOVING)
    files = [(place / name, kind) for place in places for name, kind in ((OWNER, "owner"), (RESULT, "result"))]
    if others and not any("identity" in (read_or_none(path, kind) or {}) for path, kind in files):
        raise ForeignError(
            f"{directory} holds {', '.join(others[:3])} and no valid {OWNER}, so it is no run's folder. "
            "Choose a new or an empty one."
        )


def move_run(source: Path, target: Path) -> None:
    """Move the files of a run from one folder to another; those of a user in its folders stay."""
    for name in RUN_FILES:
        if name in FOLDERS:
            for path in ours(source / name):
                (target / name).mkdir(exist_ok=True)
                os.replace(path, target / name / path.name)
            with contextlib.suppress(OSError):  # a user's file is there
                (source / name).rmdir()
        elif (source / name).is_dir():  # not ours
            with contextlib.suppress(OSError):
                (source / name).rmdir()
        elif os.path.lexists(source / name):
            os.replace(source / name, target / name)


def ours(directory: Path) -> list[Path]:
    """Return the files of a folder inside a run's folder that runs write."""
    paths = directory.iterdir() if directory.is_dir() and not directory.is_symlink() else ()
    return [path for path in paths if re.fullmatch(IN_FOLDERS, path.name)]


def put_back(directory: Path) -> None:
    """Put a run that was set aside back, in place of the new one, which took no step; continue if that was killed."""
    shutil.rmtree(directory / DISCARDED, ignore_errors=True)
    if (directory / REPLACED).is_dir():
        remove(directory, *RUN_FILES, *(path.name for path in directory.glob(PARTIAL)))
        os.replace(directory / REPLACED, directory / MOVING)
    if (directory / MOVING).is_dir():
        move_run(directory / MOVING, directory)
        (directory / MOVING).rmdir()


def remove(directory: Path, *names: str) -> None:
    """Remove files, and what runs write into folders, if they exist."""
    for path in filter(os.path.lexists, (directory / name for name in names)):  # of a file system to read, no others
        if path.name not in FOLDERS:
            path.unlink(missing_ok=True)
        elif path.is_dir() and not path.is_symlink():
            for file in ours(path):
                file.unlink()
            with contextlib.suppress(OSError):  # a user's file is there
                path.rmdir()


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
    A run that has ended is not locked, because we may be allowed only to read it. `force` replaces the run that is in
    the folder as soon as the new one has taken a step; before, whatever ends the new one, the old one comes back.
    `wait` waits for a process that works in the folder.

    Yields:
        The folder. The caller returns its `result` if the run `has_ended`, else it calls `begin` and `finish`.

    Raises:
        OccupiedError: another process works in the folder, and `wait` is False.
        ForeignError: the folder holds another run, or its files are damaged.
        UserError: a file cannot be written.
    """
    try:
        check_is_ours(directory)
        folder = RunFolder(directory, fingerprint, overrides)
        if not force and folder.is_at_rest():
            yield folder
            return
        with lock(directory, wait):
            is_new = [path.name for path in directory.iterdir()] == [LOCK]
            put_back(directory)  # a process was killed before the first step of its run
            try:
                folder.set_aside() if force else folder.read()
                yield folder
            except UserError:
                if is_new and not (directory / LAST).exists():
                    remove(directory, *RUN_FILES, LOCK)
                    with contextlib.suppress(OSError):
                        directory.rmdir()
                raise
            except Exception as error:
                with contextlib.suppress(OSError):
                    write_result(directory, failure_result(config, overrides, fingerprint, error))
                raise
            finally:
                put_back(directory)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: {error.strerror or one_sentence(error)}. Fix that, and run the same "
            "command again: it resumes from the last checkpoint."
        ) from error


def attempt(directory: Path) -> list[Any]:
    """Return what tells an attempt from any other one. Compare for equality: clocks may be wrong."""
    owner = owner_of(directory)
    return [owner.get(name) for name in ("host", "pid", "since")]


@dataclass(frozen=True)
class State:
    """The state of a run's folder: `status`, and the content of `result.json` and `run.json`.

    `status` is that of the result; without a result "running", "interrupted" (a process began the run and has gone)
    or "left" (none has). It is "damaged" if a file is; then the result has the error alone.
    """

    status: str
    result: dict[str, Any] | None
    owner: dict[str, Any]


def state(directory: Path) -> State:
    """Return the state of the run in a folder."""
    owner = owner_of(directory)
    try:
        result = result_or_none(directory)
        if (result is None or result["status"] not in TERMINAL_STATES) and is_locked(directory):
            return State("running", None, owner)
        if result is not None:
            return State(result["status"], result, owner)
        return State("interrupted" if read_json(directory / OWNER, "owner") else "left", None, owner)
    except DamagedError as error:
        return State("damaged", {"error": str(error)}, owner)
