"""A sweep's folder: which jobs it has, how they stand, and what is said at the end.

sweep.json      the jobs, by their overrides, and those given up
jobs/<n>.json   where job n runs, written when it begins (or what it was refused for, where it had no folder)
<run>/          a folder for each run, named by its identity
report/         tables, plots and one page over all of them, at the end

A job never raises: its failure is a result. What Hydra and its launchers cannot do is done here: a worker that is
killed takes joblib's whole pool with it, so the sweep is started again without what is done; and the last lines name
what failed. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from speechformer.config import check_sweep
from speechformer.errors import UserError, one_sentence
from speechformer.runs import folder as runs
from speechformer.runs import identity

SWEEP, JOBS = "sweep.json", "jobs"
OPEN = ("interrupted", "left")
KILLED_WORKER = ("TerminatedWorkerError", "BrokenProcessPool")  # loky's
LOST_JOB = ("UncompletedJobError", "FailedJobError")  # submitit's

current: Path | None = None  # the folder of the sweep that this process started
begun = 0.0  # when, in seconds since the epoch
given_up: list[int] = []  # its jobs that are not tried again by this command


def sweep_name(*, _root_: DictConfig) -> str:
    """`${sweep_name:}` in the config: the same command with the same code has the same folder, and so goes on there.

    The words of the command for the reader, then a hash of them and of the code.
    """
    cache = OmegaConf.get_cache(_root_)["sweep_name"]  # Hydra hands it to the jobs, whose own overrides are others
    if "name" not in cache:
        ignored = ("machine", *identity.NOT_IDENTITY)
        words = [word for word in _root_.hydra.overrides.task if word.lstrip("+").split("=")[0] not in ignored]
        known = json.dumps([sorted(words), identity.NUMERICS_VERSION])
        words.sort(key=lambda word: not re.search(r"^experiment=|=\w*\(|=[^\[{(]*,", word))  # what is swept first
        said = "_".join(identity.safe(word) for word in words)[:60].rstrip("-_.") or "sweep"
        cache["name"] = f"{said}_{hashlib.sha256(known.encode()).hexdigest()[:8]}"
    return cache["name"]


class SweepCallback(Callback):
    """Hydra's callback at the start of a multirun: refuses what cannot be swept, and writes down the jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global current
        try:
            trainer: Any = OmegaConf.to_container(config.trainer, resolve=True)
            check_sweep({"trainer": trainer})
        except UserError as error:
            sys.exit(f"Error: {error}")
        folder = Path(config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_jobs(folder, expanded(config), config.hydra.runtime.choices["hydra/launcher"])
        except OSError as error:  # Hydra would make a warning of it
            sys.exit(f"Error: {error.filename or folder}: {error.strerror}.")
        current = folder


def expanded(config: DictConfig) -> list[list[str]] | None:
    """The overrides of each job, in order; None for a sweeper that decides as it goes."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return None
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*swept, *config.hydra.overrides.task])
    return [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]


def write_jobs(folder: Path, jobs: list[list[str]] | None, launcher: str) -> None:
    """Write `sweep.json`; the pointers of another command in the same folder go."""
    if plan(folder).get("jobs") != jobs:
        for pointer in (folder / JOBS).glob("*.json"):
            pointer.unlink(missing_ok=True)
    about = {"command": sys.argv[1:], "launcher": launcher, "begun": begun, "given_up": given_up, "jobs": jobs}
    runs.write_json(folder / SWEEP, about)


def plan(folder: Path) -> dict[str, Any]:
    """What `sweep.json` says; empty if there is none."""
    return runs.read_json(folder / SWEEP) or {}


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What tells the jobs of a sweep from each other, in words."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(word for word in job if word not in common) or " ".join(job) for job in jobs]


def register(folder: Path, number: int, overrides: Sequence[str], directory: Path, error: str | None = None) -> None:
    """Say where job `number` runs; with `error`, that it was refused and left no result there."""
    (folder / JOBS).mkdir(exist_ok=True)
    pointer = {"overrides": list(overrides), "folder": os.path.relpath(directory, folder), "error": error}
    path = folder / JOBS / f"{number}.json"
    if runs.read_json(path) != pointer:
        runs.write_json(path, pointer)


@dataclass(frozen=True)
class Job:
    """A job of a sweep: what tells it from the others, its run's folder (None before it began), how that stands."""

    number: int
    name: str
    overrides: list[str]
    folder: Path | None
    state: runs.State

    @property
    def error(self) -> str:
        """Why there is no finished run, in one sentence."""
        if self.state.result is not None:
            return self.state.result.get("error") or "no reason given"
        owner = self.state.claim
        if "pid" in owner:
            return f"process {owner['pid']} on {owner['host']} was interrupted or killed"
        return "it has not begun"


def jobs_of(folder: Path) -> list[Job]:
    """The jobs of a sweep, by number."""
    listed = plan(folder).get("jobs")
    pointers = {
        int(path.stem): runs.read_json(path) for path in (folder / JOBS).glob("*.json") if path.stem.isdigit()
    }
    if listed is None:
        listed = [(pointers.get(k) or {}).get("overrides", []) for k in range(max(pointers, default=-1) + 1)]
    jobs = []
    for number, (name, overrides) in enumerate(zip(names(listed), listed)):
        pointer = pointers.get(number)
        if not pointer:
            jobs.append(Job(number, name, overrides, None, runs.State("left", None, {})))
            continue
        directory = folder / pointer["folder"]
        if pointer["error"]:
            state = runs.State("failed", {"status": "failed", "error": pointer["error"]}, {})
        else:
            state = runs.state(directory)
        jobs.append(Job(number, name, overrides, directory, state))
    return jobs


def counted(jobs: Iterable[Job]) -> str:
    """How many there are of each state, in words."""
    states = [job.state.status for job in jobs]
    order = ("finished", "diverged", "failed", "killed", "interrupted", "running", "left")
    return ", ".join(f"{states.count(word)} {word}" for word in order if word in states)


def conclude(folder: Path) -> int:
    """Report on a sweep that came to its end; returns the command's exit code, 0 if all of it is finished."""
    jobs = jobs_of(folder)
    failed = [job for job in jobs if job.state.status in ("failed", "killed", "diverged", *OPEN)]
    print(f"Sweep of {len(jobs)} runs: {counted(jobs)}.")
    from speechformer.report.__main__ import write_report

    try:
        write_report([folder], folder / "report")
        print(f"Report: {folder / 'report' / 'report.html'}", flush=True)
    except UserError as error:  # no run came to its end
        print(f"There is no report: {one_sentence(error)}", flush=True)
    except Exception:  # whatever it was, what failed is still to be said
        traceback.print_exc()
    for job in failed:
        place = job.folder / runs.RESULT if job.folder and job.state.result else job.folder
        print(f"{job.state.status.capitalize()}: {job.name}: {job.error} ({place or folder})", file=sys.stderr)
    if any(job.state.status != "diverged" for job in failed):
        print("The same command runs only what is missing.", file=sys.stderr, flush=True)
    return 1 if failed else 0


def to_the_end(launch: Callable[[], object], command: Sequence[str]) -> None:
    """Launch a sweep, and again for as long as killed workers break it.

    Args:
        launch: Hydra's main function.
        command: with which a single run is started, up to its overrides.
    """
    global begun
    begun, unexplained = time.time(), 0
    # Python's own, at the end of a sweep whose workers were killed: it cleans up what they left
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])
    )
    while True:
        lost = ""
        try:
            launch()
        except Exception as error:
            lost = type(error).__name__
            if current is None or lost not in KILLED_WORKER + LOST_JOB:
                raise
            if lost in LOST_JOB and not any(job.folder for job in jobs_of(current)):
                raise UserError(f"The launcher could not start the jobs: {one_sentence(error)}") from error
            print("A worker of the sweep was killed.", file=sys.stderr, flush=True)
            unexplained += lost in KILLED_WORKER and not dead_jobs(current)
            if unexplained == 3:
                raise
        if current is None:
            return
        if lost in KILLED_WORKER:
            for job in dead_jobs(current):
                alone(job, command)
        elif lost in LOST_JOB:
            wait_for_the_queue(current)
            for job in dead_jobs(current):
                give_up(job, "its process was killed, by the system (out of memory, out of time) or by somebody")
            return
        elif not wait_for_the_others(current) or all(job.state.status not in OPEN for job in jobs_of(current)):
            return
        place = f"hydra.sweep.dir={quoted(current)}"  # also where it was named by the time
        sys.argv[:] = [*(word for word in sys.argv if word != place), place]


def dead_jobs(folder: Path) -> list[Job]:
    """The jobs that this command began and that nobody works on any more, without a result."""
    dead = []
    for job in jobs_of(folder):
        pointer = folder / JOBS / f"{job.number}.json"
        if job.state.status == "interrupted" and job.state.claim.get("since", 0) >= begun:
            dead.append(job)
        elif job.state.status == "left" and job.folder is not None and pointer.stat().st_mtime >= begun:
            dead.append(job)  # it was killed before it could sign
    return [job for job in dead if job.number not in given_up]


def quoted(path: Path) -> str:
    """A path as a value on Hydra's command line."""
    return "'" + str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'") + "'"


def alone(job: Job, command: Sequence[str]) -> None:
    """Run a job whose worker was killed once more, by itself: either it was another's fault, or it now says whose."""
    assert job.folder is not None
    print(f"Going on, alone: {job.name}", flush=True)
    forced = job.state.claim.get("since", 0) >= begun  # if it is to be: what was there before is gone already
    own = [word for word in job.overrides if not (forced and word.partition("=")[0] == "force")]
    with open(job.folder / "log.txt", "a", encoding="utf-8") as log:
        words = [*command, *own, f"hydra.run.dir={quoted(job.folder)}"]
        code = subprocess.run(words, stdout=log, stderr=log).returncode
    if runs.state(job.folder).status in OPEN:
        if code < 0:
            by = signal.Signals(-code).name
            give_up(job, f"its process was killed twice, the second time alone (signal {by}); out of memory?")
        else:
            said = (job.folder / "log.txt").read_text(encoding="utf-8").strip().splitlines() or ["nothing"]
            give_up(job, f"its process was killed, and alone it ended with exit code {code} and said: {said[-1]}")


def give_up(job: Job, why: str) -> None:
    """Leave a result that says that a job was killed, and do not try it again in this command."""
    assert job.folder is not None and current is not None
    given_up.append(job.number)
    why = f"{why[0].upper()}{why[1:]}."
    config = job.folder / "config.yaml"
    if not config.exists():  # killed before it could write even that
        register(current, job.number, job.overrides, job.folder, why)
        return
    settings: Any = OmegaConf.to_container(OmegaConf.load(config))
    about = {key: job.state.claim.get(key) for key in ("identity", "overrides", "attempts")}
    about |= {"task": settings["task"]["name"], "seed": settings["seed"], "config": settings}
    runs.write_result(job.folder, {"status": "killed", "error": why, **about})


def wait_for_the_others(folder: Path) -> bool:
    """Wait until no other process works on a run of the sweep; whether one did."""
    waited = False
    while elsewhere := [job for job in jobs_of(folder) if job.state.status == "running"]:
        if not waited:
            print(f"Waiting for {len(elsewhere)} runs that other processes work on.", flush=True)
        waited = True
        time.sleep(2)
    return waited


def wait_for_the_queue(folder: Path) -> None:
    """Wait until no job of a sweep under submitit is queued or running."""
    import submitit

    def queued() -> list[Any]:
        own = (path for path in (folder / ".submitit").glob("*/*_submitted.pkl") if path.stat().st_mtime >= begun)
        return [submitit.SlurmJob(folder=folder / ".submitit" / "%j", job_id=path.parent.name) for path in own]

    jobs = queued() if plan(folder).get("launcher") == "submitit_slurm" else []
    while any(job.state.status == "running" for job in jobs_of(folder)) or not all(
        job.done(force_check=True) for job in jobs
    ):
        time.sleep(2)
