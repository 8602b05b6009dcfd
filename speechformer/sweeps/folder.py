"""A sweep's folder: its jobs and their states.

sweep.json      the jobs of all commands with this folder: their overrides, and the folders of their runs
<run>/          a folder for each run
tensorboard/    links to the runs' curves, under names that say what differs within the sweep
report/         tables, plots and one page over all runs, written at the end

No torch here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from speechformer.errors import UserError
from speechformer.escape import one_line
from speechformer.runs import folder as runs

SWEEP, SWEEP_LOCK, CURVES = "sweep.json", "sweep.lock", "tensorboard"
CHOOSE = "Choose a new or an empty folder with hydra.sweep.dir=."
OPEN = ("interrupted", "left")  # states of a run that the sweep still has to do
STATES = ("finished", "pruned", "diverged", "failed", "killed", "damaged", "interrupted", "running", "left")
Overrides = tuple[str, ...]  # of a job, as on the command line


@dataclass(frozen=True, eq=False)
class Job:
    """A job of a sweep."""

    name: str  # the overrides that differ from the other jobs'
    overrides: Overrides
    folder: Path  # of its run
    state: runs.State

    @property
    def error(self) -> str:
        """Why there is no finished run, in one sentence."""
        return one_line((self.state.result or {}).get("error") or "it has no result yet", 500)


def plan(sweep: Path) -> dict[Path, Overrides]:
    """Return the jobs of a sweep by the folders of their runs. Raise a `DamagedError` if `sweep.json` is damaged."""
    content = runs.read_json(sweep / SWEEP, "sweep") or {"jobs": {}}
    return {sweep / folder: tuple(job) for folder, job in content["jobs"].items()}


def add_jobs(sweep: Path, jobs: Mapping[Path, Overrides]) -> None:
    """Add jobs, by the folders of their runs, to those of earlier commands, which may be running.

    Raises:
        UserError: the folder holds files and is no sweep's.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in sweep.iterdir()} - {path.name for path in sweep.glob(runs.PARTIAL)} - {SWEEP_LOCK}
    if others and SWEEP not in others:
        raise UserError(
            f"{sweep} holds {', '.join(sorted(others)[:3])} and no {SWEEP}, so it is no sweep's folder. {CHOOSE}"
        )
    known = plan(sweep) if others else {}
    if all(known.get(run) == job for run, job in dict(jobs).items()) and jobs:
        return  # a sweep that is repeated may be read-only
    with FileLock(sweep / SWEEP_LOCK):
        planned = plan(sweep) | dict(jobs)
        runs.write_json(sweep / SWEEP, {"jobs": {os.path.relpath(run, sweep): list(planned[run]) for run in planned}})
        with contextlib.suppress(OSError):  # links are not possible everywhere
            link_curves(sweep / CURVES, dict(zip(names([*planned.values()]), planned)))


def link_curves(folder: Path, runs_by_name: Mapping[str, Path]) -> None:
    """Link the curves of runs anew, as names change with more jobs: TensorBoard shows each under its name."""
    folder.mkdir(exist_ok=True)
    for link in filter(Path.is_symlink, folder.iterdir()):
        link.unlink()
    for name, run in runs_by_name.items():
        link = folder / re.sub(r"[^\w=.,+ -]+", "-", name)[:120]
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(run / runs.CURVES, folder), target_is_directory=True)


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return a name for each job: the overrides that differ between the jobs."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(word for word in job if word not in common) or " ".join(job) for job in jobs]


def jobs_of(sweep: Path, ended: Mapping[Path, runs.State] | None = None) -> list[Job]:
    """Return the jobs of a sweep; raise a `DamagedError` if `sweep.json` is damaged.

    Args:
        ended: states of runs by folder, whose files are not read again.
    """
    planned = plan(sweep)
    return [
        Job(one_line(name, 500), job, folder, (ended or {}).get(folder) or runs.state(folder))
        for name, (folder, job) in zip(names([*planned.values()]), planned.items())
    ]


def count_states(jobs: Iterable[Job]) -> str:
    """Return how many jobs there are in each state, in words."""
    states = [job.state.status for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
