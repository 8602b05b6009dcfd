"""Finish a sweep even if its workers are killed.

A killed worker takes joblib's whole pool with it, so the sweep is started again without the jobs that have ended.
Jobs that were under way are first run alone; one that is killed alone as well is given up. No torch here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from speechformer import console
from speechformer.corpora.files import read_yaml
from speechformer.errors import UserError, one_sentence
from speechformer.runs import folder as runs
from speechformer.sweeps.folder import (
    COMMAND,
    CURVES,
    JOBS,
    OPEN,
    Job,
    count_states,
    has_begun,
    jobs_of,
    link_all_curves,
    own_jobs,
    plan,
    register,
    take_back,
)
from speechformer.sweeps.progress import LIVE

KILLED_WORKER = ("TerminatedWorkerError", "BrokenProcessPool")  # loky's
LOST_JOB = ("UncompletedJobError", "FailedJobError")  # submitit's


def run_to_the_end(launch: Callable[[], object], command: Sequence[str]) -> None:
    """Launch a sweep, and again for as long as killed workers break it; `command` starts a single run."""
    COMMAND.started = time.time()
    # Python warns so at the end of a sweep whose workers were killed, when it cleans up what they left
    warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    try:
        launch_until_done(launch, command)
    except (HydraException, OmegaConfBaseException):  # of a misspelt choice, after the jobs are written
        if COMMAND.folder is not None:
            take_back(COMMAND.folder)
        raise
    finally:
        LIVE.stop()


def launch_until_done(launch: Callable[[], object], command: Sequence[str]) -> None:
    """Launch a sweep until all of its jobs have ended; arguments as for `run_to_the_end`."""
    unexplained = 0
    while True:
        lost = ""
        try:
            launch()
        except Exception as error:
            lost = type(error).__name__
            if COMMAND.folder is None or lost not in KILLED_WORKER + LOST_JOB:
                raise
            if lost in LOST_JOB and not any(job.folder for job in own_jobs(COMMAND.folder)):
                raise UserError(f"The launcher could not start the jobs: {one_sentence(error)}") from error
            console.warn("A worker of the sweep was killed.")
            unexplained += lost in KILLED_WORKER and not dead_jobs(COMMAND.folder)
            if unexplained == 3:
                raise
        if COMMAND.folder is None or not needs_another_round(COMMAND.folder, lost, command):
            return
        directory = f"hydra.sweep.dir={quoted(COMMAND.folder)}"  # also where the folder was named by the time
        sys.argv[:] = [*(word for word in sys.argv if word != directory), directory]


def needs_another_round(folder: Path, lost: str, command: Sequence[str]) -> bool:
    """Settle the jobs of a round, ended by the exception `lost` if any; return whether to launch the sweep again."""
    if lost in KILLED_WORKER:
        for job in dead_jobs(folder):
            run_alone(job, command)
        return True
    if lost in LOST_JOB:
        wait_for_queue(folder)
        for job in dead_jobs(folder):
            give_up(job, "its process was killed, by the system (out of memory, out of time) or by a user")
        return False
    return wait_for_other_processes(folder) and any(job.state.status in OPEN for job in own_jobs(folder))


def dead_jobs(folder: Path) -> list[Job]:
    """Return the jobs that this command started and whose process has ended without a result."""
    dead = []
    for job in own_jobs(folder):
        pointer = folder / JOBS / f"{job.number}.json"
        if job.state.status == "interrupted" and job.state.owner.get("since", 0) >= COMMAND.started:
            dead.append(job)
        elif job.state.status == "left" and job.folder is not None and pointer.stat().st_mtime >= COMMAND.started:
            dead.append(job)  # it was killed before it could write run.json
    return [job for job in dead if job.number not in COMMAND.given_up]


def quoted(path: Path) -> str:
    """Return a path as a value on Hydra's command line."""
    return "'" + str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'") + "'"


def run_alone(job: Job, command: Sequence[str]) -> None:
    """Run a job whose worker was killed once more, alone: another job may have been the cause."""
    assert job.folder is not None
    console.say(f"Running alone: {job.name}")
    replaced = has_begun(job.folder, COMMAND.started)
    overrides = [word for word in job.overrides if not (replaced and word.partition("=")[0] == "force")]
    log = job.folder / runs.LOG
    with open(log, "a", encoding="utf-8") as file:
        words = [*command, *overrides, f"hydra.run.dir={quoted(job.folder)}"]
        code = subprocess.run(words, stdout=file, stderr=file).returncode
    if runs.state(job.folder).status not in OPEN:
        return
    if code < 0:
        name = signal.Signals(-code).name
        give_up(job, f"its process was killed twice, the second time alone (signal {name}); out of memory?")
    else:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
        give_up(job, f"its process was killed; run alone it ended with exit code {code} and printed: {last}")


def give_up(job: Job, reason: str) -> None:
    """Write a result that says that a job was killed, and do not try it again in this command."""
    assert job.folder is not None and COMMAND.folder is not None
    COMMAND.given_up.append(job.number)
    reason = f"{reason[0].upper()}{reason[1:]}."
    config = job.folder / runs.CONFIG
    about = {key: value for key, value in job.state.owner.items() if key in ("identity", "overrides", "attempts")}
    try:
        settings = read_yaml(config) if config.is_file() else {}  # it was killed before it could write even that
        about |= {"task": settings["task"]["name"], "seed": settings["seed"], "config": settings}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        register(COMMAND.folder, job.number, job.overrides, job.folder, reason)
    else:
        runs.write_result(job.folder, {"status": "killed", "error": reason, **about})


def wait_for_other_processes(folder: Path) -> bool:
    """Wait until no other process works on a run of the sweep; return whether one did."""
    waited = False
    while elsewhere := [job for job in own_jobs(folder) if job.state.status == "running"]:
        if not waited:
            console.say(f"Waiting for {len(elsewhere)} runs that other processes work on.")
        waited = True
        time.sleep(2)
    return waited


def wait_for_queue(folder: Path) -> None:
    """Wait until no job of a sweep under submitit is queued or running."""
    import submitit

    jobs: list[Any] = []
    if plan(folder).get("launcher") == "submitit_slurm":
        for path in (folder / ".submitit").glob("*/*_submitted.pkl"):
            if path.stat().st_mtime >= COMMAND.started:
                jobs.append(submitit.SlurmJob(folder=folder / ".submitit" / "%j", job_id=path.parent.name))
    while any(job.state.status == "running" for job in own_jobs(folder)) or not all(
        job.done(force_check=True) for job in jobs
    ):
        time.sleep(2)


def conclude(folder: Path) -> int:
    """Report on a sweep that has ended; return the command's exit code, 0 if every run has finished."""
    from speechformer.report.page import report, say

    jobs = own_jobs(folder)
    link_all_curves(folder, jobs_of(folder))
    unfinished = [job for job in jobs if job.state.status in ("failed", "killed", "diverged", "damaged", *OPEN)]
    console.say(f"Sweep of {len(jobs)} runs: {count_states(jobs)}.")
    try:
        for study in report([folder], folder / "report", baselines=Path("outputs/baselines")):
            say(study)
        console.say(f"Report: {folder / 'report' / 'report.html'}")
        if (folder / CURVES).is_dir() and len(unfinished) < len(jobs):
            console.say(f"Curves: tensorboard --logdir {folder / CURVES}")
    except (UserError, OSError) as error:  # no run came to its end, or the disk is full
        console.say(f"There is no report: {one_sentence(error)}")
    except Exception:  # what failed must be named in any case
        traceback.print_exc()
    for job in unfinished:
        place = job.folder / runs.RESULT if job.folder and job.state.result else job.folder
        console.warn(f"{job.state.status.capitalize()}: {job.name}: {job.error} ({place or folder})")
    if any(job.state.status != "diverged" for job in unfinished):
        console.warn("Run the same command again to run only what is missing, once you have corrected what failed.")
    return 1 if unfinished else 0
