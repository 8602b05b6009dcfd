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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from speechformer import runs
from speechformer.config import check_sweep
from speechformer.refusals import UserError, one_sentence

SWEEP, JOBS = "sweep.json", "jobs"
GAVE_UP = ("failed", "killed", "interrupted", "left")
KILLED_WORKER = ("TerminatedWorkerError", "BrokenProcessPool")  # loky's
LOST_JOB = ("UncompletedJobError", "FailedJobError")  # submitit's

current: Path | None = None  # the folder of the sweep that this process started
given_up: list[int] = []  # its jobs that are not tried again by this command


def sweep_name(*, _root_: DictConfig) -> str:
    """`${sweep_name:}` in the config: the same command with the same code has the same folder, and so goes on there.

    The words of the command for the reader, then a hash of them and of the code.
    """
    cache = OmegaConf.get_cache(_root_)["sweep_name"]  # Hydra hands it to the jobs, whose own overrides are others
    if "name" not in cache:
        ignored = ("machine", *runs.NOT_IDENTITY)
        words = [word for word in _root_.hydra.overrides.task if word.lstrip("+").split("=")[0] not in ignored]
        known = json.dumps([sorted(words), runs.code_version()])
        words.sort(key=lambda word: not re.search(r"^experiment=|=\w*\(|=[^\[{(]*,", word))  # what is swept first
        said = "_".join(runs.safe(word) for word in words)[:60].rstrip("-_.") or "sweep"
        cache["name"] = f"{said}_{hashlib.sha256(known.encode()).hexdigest()[:8]}"
    return cache["name"]


class Watch(Callback):
    """Hydra's callback at the start of a multirun: refuses what cannot be swept, and writes down the jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global current
        try:
            trainer: Any = OmegaConf.to_container(config.trainer, resolve=True)
            check_sweep({"trainer": trainer})
        except UserError as error:
            sys.exit(f"Error: {error}")
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        current = folder
        write_jobs(folder, expanded(config), config.hydra.runtime.choices["hydra/launcher"])


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
    about = {"command": sys.argv[1:], "launcher": launcher, "given_up": given_up, "jobs": jobs}
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
    for number, name in enumerate(names(listed)):
        pointer = pointers.get(number)
        if not pointer:
            jobs.append(Job(number, name, None, runs.State("left", None, {})))
            continue
        directory = folder / pointer["folder"]
        if pointer["error"]:
            state = runs.State("failed", {"status": "failed", "error": pointer["error"]}, {})
        else:
            state = runs.state(directory)
        jobs.append(Job(number, name, directory, state))
    return jobs


def counted(jobs: Iterable[Job]) -> str:
    """How many there are of each state, in words."""
    states = [job.state.status for job in jobs]
    order = ("finished", "diverged", "failed", "killed", "interrupted", "running", "left")
    return ", ".join(f"{states.count(word)} {word}" for word in order if word in states)


def conclude(folder: Path) -> int:
    """Report on a sweep that came to its end; returns the command's exit code, 0 if all of it is finished."""
    jobs = jobs_of(folder)
    failed = [job for job in jobs if job.state.status in (*GAVE_UP, "diverged")]
    print(f"Sweep of {len(jobs)} runs: {counted(jobs)}.")
    from speechformer.report.__main__ import write_report

    try:
        write_report([folder], folder / "report")
        print(f"Report: {folder / 'report' / 'report.html'}")
    except (UserError, OSError) as error:  # no run came to its end, or there is no room
        print(f"There is no report: {one_sentence(error)}")
    for job in jobs:
        if job.state.status == "running":
            owner = job.state.claim
            print(f"Running elsewhere: {job.name} (process {owner.get('pid')} on {owner.get('host')})")
    sys.stdout.flush()
    for job in failed:
        place = job.folder / runs.RESULT if job.folder and job.state.result else job.folder
        print(f"{job.state.status.capitalize()}: {job.name}: {job.error} ({place or folder})", file=sys.stderr)
    if failed:
        print("The same command runs only what is missing (what diverged would again).", file=sys.stderr, flush=True)
    return 1 if failed else 0


def to_the_end(launch: Callable[[], object], command: Sequence[str]) -> None:
    """Launch a sweep, and again for as long as killed workers break it.

    Args:
        launch: Hydra's main function.
        command: with which a single run is started, up to its overrides.
    """
    started = time.time()
    # Python's own, at the end of a sweep whose workers were killed: it cleans up what they left
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])
    )
    while True:
        try:
            launch()
            return
        except Exception as error:
            lost = type(error).__name__
            if current is None or lost not in KILLED_WORKER + LOST_JOB:
                raise
            print(f"A worker of the sweep was killed ({one_sentence(error)})"[:200], file=sys.stderr, flush=True)
        if lost in LOST_JOB:
            wait_for_the_others(current, started)
            for job in jobs_of(current):
                if job.state.status == "interrupted":
                    give_up(job, "its process was killed, by the system (out of memory, out of time) or by somebody")
            return
        for job in jobs_of(current):
            if job.state.status == "interrupted" and job.state.claim.get("since", 0) >= started:
                alone(job, command)
        sys.argv[:] = [word for word in sys.argv if word.partition("=")[0] != "force"]  # it has been done


def alone(job: Job, command: Sequence[str]) -> None:
    """Run a job whose worker was killed once more, by itself: either it was another's fault, or it now says whose."""
    assert job.folder is not None
    print(f"Going on, alone: {job.name}", flush=True)
    place = str(job.folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    own = [word for word in job.state.claim["overrides"] if word.partition("=")[0] != "force"]
    with open(job.folder / "log.txt", "a", encoding="utf-8") as log:
        code = subprocess.run([*command, *own, f"hydra.run.dir='{place}'"], stdout=log, stderr=log).returncode
    if runs.state(job.folder).status == "interrupted":
        if code < 0:
            by = signal.Signals(-code).name
            give_up(job, f"its process was killed twice, the second time alone (signal {by}); out of memory?")
        else:
            said = (job.folder / "log.txt").read_text(encoding="utf-8").strip().splitlines() or ["nothing"]
            give_up(job, f"its process was killed, and alone it ended with exit code {code} and said: {said[-1]}")
        given_up.append(job.number)


def give_up(job: Job, why: str) -> None:
    """Leave a result that says that a job was killed."""
    assert job.folder is not None
    config: Any = OmegaConf.to_container(OmegaConf.load(job.folder / "config.yaml"))
    about = {key: job.state.claim.get(key) for key in ("identity", "overrides", "attempts")}
    about |= {"task": config["task"]["name"], "seed": config["seed"], "config": config}
    runs.write_result(job.folder, {"status": "killed", "error": f"{why[0].upper()}{why[1:]}.", **about})


def wait_for_the_others(folder: Path, started: float) -> None:
    """Wait until no job of a sweep under submitit is queued or running."""
    import submitit

    def queued() -> list[Any]:
        own = (path for path in (folder / ".submitit").glob("*/*_submitted.pkl") if path.stat().st_mtime >= started)
        return [submitit.SlurmJob(folder=folder / ".submitit" / "%j", job_id=path.parent.name) for path in own]

    jobs = queued() if plan(folder).get("launcher") == "submitit_slurm" else []
    while any(job.state.status == "running" for job in jobs_of(folder)) or not all(
        job.done(force_check=True) for job in jobs
    ):
        time.sleep(2)
