"""A sweep's folder: its jobs and their states.

sweep.json      the jobs of all commands with this folder, by their overrides, and those given up
jobs/<n>.json   the folder of job n, written when it begins (or why it has none)
<run>/          a folder for each run, named by its identity
tensorboard/    links to the runs' curves, under names that say what differs within the sweep
report/         tables, plots and one page over all runs, written at the end

No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from speechformer.errors import UserError
from speechformer.escape import one_line
from speechformer.runs import folder as runs

SWEEP, JOBS, SWEEP_LOCK, CURVES = "sweep.json", "jobs", "sweep.lock", "tensorboard"
PLACE = ("hydra.sweep.dir=", "force=", "hydra.sweeper.trials=")  # words of a command that say nothing about its jobs
CHOOSE = "Choose a new or an empty folder with hydra.sweep.dir=."
OPEN = ("interrupted", "left")  # states of a run that the sweep still has to do
STATES = ("finished", "pruned", "diverged", "failed", "killed", "damaged", "interrupted", "running", "left")


@dataclass
class SweepCommand:
    """The sweep that this process started."""

    folder: Path | None = None  # None without a sweep
    started: float = 0.0  # in seconds since the epoch
    given_up: list[int] = field(default_factory=list)  # the numbers of jobs that this command does not try again
    errors: dict[int, str] = field(default_factory=dict)  # of jobs by number, where no file can be written
    numbers: list[int] | None = None  # of the command's jobs in `sweep.json`; None if the sweeper chooses them
    before: dict[str, Any] | None = None  # the content of `sweep.json` before this command


COMMAND = SweepCommand()


def write_jobs(folder: Path, command: Sequence[str], jobs: list[list[str]] | None, launcher: str) -> None:
    """Write `sweep.json`. It keeps the jobs of earlier commands, which may be running, before those that are new.

    Args:
        jobs: the overrides of each job of this command; None if the sweeper chooses them one by one.

    Raises:
        UserError: the folder holds files and is no sweep's, or holds a sweep that cannot be continued so.
    """
    ours = rf"{re.escape(SWEEP)}\.[0-9a-f]{{8}}\.partial|{re.escape(SWEEP_LOCK)}"  # of a killed process
    others = sorted(path.name for path in folder.iterdir() if not re.fullmatch(ours, path.name))
    if others and not {"jobs", "command"} <= plan(folder).keys():
        raise UserError(
            f"{folder} holds {', '.join(others[:3])} and no {SWEEP}, so it is no sweep's folder. {CHOOSE}"
        )
    with FileLock(folder / SWEEP_LOCK):
        before = plan(folder)
        COMMAND.before = before if COMMAND.before is None else COMMAND.before
        earlier, earlier_command = before.get("jobs"), before.get("command", [])
        about_jobs = [{word for word in words if not word.startswith(PLACE)} for words in (earlier_command, command)]
        if before and (earlier is None or jobs is None) and about_jobs[0] != about_jobs[1]:
            raise UserError(f"{folder} holds another sweep: {' '.join(earlier_command)}. {CHOOSE}")
        content = {"command": list(command), "launcher": launcher, "begun": COMMAND.started}
        if jobs is not None:
            merged = [list(job) for job in dict.fromkeys(map(tuple, [*(earlier or []), *jobs]))]
            COMMAND.numbers = [*(COMMAND.numbers or []), *(merged.index(job) for job in jobs)]
            content["jobs"] = merged
        runs.write_json(folder / SWEEP, {"jobs": None, **content, "given_up": COMMAND.given_up})


def take_back(folder: Path) -> None:
    """Undo what this command has written, if none of its jobs has begun."""
    with FileLock(folder / SWEEP_LOCK):
        begun = any(path.stat().st_mtime >= COMMAND.started for path in (folder / JOBS).glob("*.json"))
        if begun or plan(folder).get("begun") != COMMAND.started:
            return
        if COMMAND.before:
            runs.write_json(folder / SWEEP, COMMAND.before)
            return
        runs.remove(folder, SWEEP, "multirun.yaml")
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [SWEEP_LOCK]:
            runs.remove(folder, SWEEP_LOCK)
            folder.rmdir()


def plan(folder: Path) -> dict[str, Any]:
    """Return the content of `sweep.json`; empty without one. Raise a `DamagedError` if it is damaged."""
    return runs.read_json(folder / SWEEP, "sweep") or {}


def has_begun(directory: Path, since: float) -> bool:
    """Return whether a run began since a time and took a step, so that `force=true` has replaced the one before."""
    owner = runs.read_or_none(directory / runs.OWNER, "owner") or {}
    return owner.get("since", 0) >= since and not (directory / runs.REPLACED).exists()


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return a name for each job: the overrides that differ between the jobs."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(word for word in job if word not in common) or " ".join(job) for job in jobs]


def link_curves(folder: Path, name: str, directory: Path) -> None:
    """Link a run's curves, where links are possible: TensorBoard shows the run under its name in the sweep."""
    link = folder / CURVES / re.sub(r"[^\w=.,+ -]+", "-", name)[:120]
    target = os.path.relpath(directory / "tensorboard", folder / CURVES)
    with contextlib.suppress(OSError):
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target, target_is_directory=True)


def link_all_curves(folder: Path, jobs: Iterable[Job]) -> None:
    """Link the curves of all runs anew: names change when a sweep gets more jobs."""
    if (folder / CURVES).is_symlink():
        return
    with contextlib.suppress(OSError):
        for link in filter(Path.is_symlink, (folder / CURVES).iterdir()):
            link.unlink()
    for job in jobs:
        if job.folder is not None and (job.folder / "tensorboard").is_dir():
            link_curves(folder, job.name, job.folder)


def register(folder: Path, number: int, overrides: Sequence[str], directory: Path, error: str | None = None) -> None:
    """Write where job `number` runs; with `error`, why it has no result there."""
    (folder / JOBS).mkdir(exist_ok=True)
    pointer = {"overrides": list(overrides), "folder": os.path.relpath(directory, folder), "error": error}
    path = folder / JOBS / f"{number}.json"
    if runs.read_or_none(path, "job") != pointer:
        runs.write_json(path, pointer)


@dataclass(frozen=True)
class Job:
    """A job of a sweep."""

    number: int
    name: str  # the overrides that differ from the other jobs'
    overrides: list[str]
    folder: Path | None  # of its run; None before it began
    state: runs.State

    @property
    def error(self) -> str:
        """Why there is no finished run, in one sentence."""
        if self.state.result is not None:
            return one_line(self.state.result.get("error") or "no reason given", 500)
        if self.number in COMMAND.errors:
            return COMMAND.errors[self.number]
        owner = self.state.owner
        if "pid" in owner:
            return f"process {owner['pid']} on {owner['host']} ended without a result: it was interrupted or killed"
        return "it has not begun"


def jobs_of(folder: Path, ended: Mapping[int, Job] | None = None) -> list[Job]:
    """Return the jobs of a sweep, by number; raise a `DamagedError` if `sweep.json` is damaged.

    Args:
        ended: jobs by number whose files are not read again.
    """
    planned = plan(folder).get("jobs")
    if planned is None:
        numbers = sorted(int(path.stem) for path in (folder / JOBS).glob("*.json") if path.stem.isdecimal())
    else:
        numbers = [*range(len(planned))]
    read = [(ended or {}).get(number) or read_job(folder, number) for number in numbers]
    overrides = [job.overrides for job in read] if planned is None else planned
    return [
        dataclasses.replace(job, name=one_line(name, 500), overrides=words)
        for job, name, words in zip(read, names(overrides), overrides)
    ]


def read_job(folder: Path, number: int) -> Job:
    """Return what the file of a job says, without the job's name; it has not begun if there is no file."""
    path = folder / JOBS / f"{number}.json"
    overrides, directory, state = list[str](), None, runs.State("left", None, {})
    try:
        if pointer := runs.read_json(path, "job"):
            overrides = pointer["overrides"]
            directory = folder / pointer["folder"]
            state = runs.State("failed", pointer, {}) if pointer["error"] else runs.state(directory)
    except runs.DamagedError as error:
        state = runs.State("damaged", {"error": str(error)}, {})
    return Job(number, "", overrides, directory, state)


def own_jobs(folder: Path, ended: Mapping[int, Job] | None = None) -> list[Job]:
    """Return the jobs of the sweep that this process started, which may share its folder with others."""
    return [job for job in jobs_of(folder, ended) if COMMAND.numbers is None or job.number in COMMAND.numbers]


def count_states(jobs: Iterable[Job]) -> str:
    """Return how many jobs there are in each state, in words."""
    states = [job.state.status for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
