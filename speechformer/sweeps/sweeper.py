"""Run the jobs of a sweep until each has ended: `hydra/sweeper=grid`, and what all sweepers share.

A killed worker takes joblib's whole pool with it. Then the jobs that were under way run alone, one after another. One
that is killed alone as well is given up, and the sweep goes on with the others. No torch here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from speechformer import console
from speechformer.config import check_sweep, words_of_choice
from speechformer.errors import UserError, one_sentence
from speechformer.keys import quote
from speechformer.runs import folder as runs
from speechformer.runs.naming import plain
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import progress
from speechformer.sweeps.folder import Job, Overrides
from speechformer.workers import end_with_parent

KILLED_BY_SYSTEM = ("TerminatedWorkerError", "BrokenProcessPool")  # loky's
KILLED_WORKER = (*KILLED_BY_SYSTEM, "UncompletedJobError", "FailedJobError")  # the last two are submitit's


class GridSweeper(Sweeper):
    """A sweeper that runs every combination of the swept values; `params` are those of an experiment."""

    config: DictConfig
    launcher: Launcher

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        self.choices = config.hydra.runtime.choices
        if self.choices["hydra/launcher"] == "joblib":
            tie_workers()
        self.folder = Path(config.hydra.sweep.dir)
        self.jobs = dict[Path, Overrides]()  # of this command, by the folders of their runs
        self.errors = dict[Path, str]()  # of those that failed
        self.before = dict[Path, list[Any]]()  # the attempts that were there before this command

    def sweep(self, arguments: list[str]) -> NoReturn:
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(words)
        self.choose_jobs({override.get_key_element(): override for override in overrides})
        sys.exit(self.conclude())

    def choose_jobs(self, overrides: Mapping[str, Override]) -> None:
        """Run the jobs of a command; of overrides of one key, the command's has replaced the experiment's."""
        self.run(combinations(overrides.values()))

    def compose(self, job: Sequence[str], number: int = 0) -> DictConfig:
        """Return the config of a job."""
        cfg = self.loader.load_sweep_config(self.config, list(job))
        with open_dict(cfg):
            cfg.hydra.job.num = number
        return cfg

    def check(self, config: dict[str, Any]) -> None:
        """Raise a `UserError` if a job cannot be one of this sweep."""
        check_sweep(config)

    def run(self, jobs: Iterable[Overrides]) -> dict[Overrides, runs.State]:
        """Run jobs until each has ended or failed. Of those that are the same run, one runs."""
        places, planned, configs = dict[Overrides, Path](), dict[Path, Overrides](), dict[Path, dict[str, Any]]()
        for number, job in enumerate(dict.fromkeys(jobs)):
            cfg = self.compose(job, number)
            folder, config = self.folder / str(cfg.hydra.sweep.subdir), plain(cfg)
            self.check(config)
            if configs.setdefault(folder, config) != config:
                raise UserError(f"{folder} would hold several runs, which differ in nothing that decides a result.")
            places[job] = folder
            planned.setdefault(folder, job)
        sweeps.add_jobs(self.folder, planned)
        self.jobs |= planned
        self.before = {run: runs.attempt(run) for run in planned} | self.before
        waiting, ended = [*planned], {run: runs.state(run) for run in planned if not self.is_open(run)}
        quiet = self.choices["hydra/launcher"] in progress.IN_PROCESS
        with contextlib.nullcontext() if quiet else progress.shown(self.folder, planned.keys(), ended):
            while waiting:
                self.launch_all(waiting)
                self.wait_for_other_processes(waiting)
                waiting = [run for run in waiting if self.is_open(run)]
        states = {job.folder: job.state for job in self.ended_jobs()}
        return {job: states[folder] for job, folder in places.items()}

    def has_begun(self, run: Path) -> bool:
        """Return whether a run began in this command."""
        return runs.attempt(run) != self.before[run]

    def is_open(self, run: Path) -> bool:
        """Return whether a run has yet to begin, or to go on."""
        is_open = runs.state(run).status in sweeps.OPEN or (self.config.force and not self.has_begun(run))
        return is_open and run not in self.errors

    def launch(self, folders: Sequence[Path]) -> None:
        """Launch the jobs of some runs, and note their errors."""
        places = [f"hydra.sweep.subdir={quote(os.path.relpath(run, self.folder))}" for run in folders]
        words = [[*self.jobs[run], place] for run, place in zip(folders, places)]
        for run, returned in zip(folders, self.launcher.launch(words, initial_job_idx=0)):
            if returned.return_value is not None:
                self.errors[run] = returned.return_value

    def launch_all(self, folders: Sequence[Path]) -> None:
        """Launch the jobs of some runs; if a worker is killed, run those alone that it may have worked on."""
        try:
            self.launch(folders)
        except Exception as error:
            launcher, is_killed = self.choices["hydra/launcher"], type(error).__name__ in KILLED_WORKER
            is_launchers = launcher not in progress.IN_PROCESS and type(error).__name__ not in KILLED_BY_SYSTEM
            if is_launchers and not isinstance(error, UserError) and not any(map(self.has_begun, folders)):
                reason = one_sentence(error).rstrip(".") or type(error).__name__
                raise UserError(f"hydra/launcher={launcher} could not start the jobs: {reason}.") from error
            if not is_killed:
                raise
            console.warn("A worker of the sweep was killed.")
            self.wait_for_other_processes(folders)
            waiting = [run for run in folders if self.is_open(run)]
            for run in [run for run in waiting if self.has_begun(run)] or waiting:
                self.run_alone(run)

    def run_alone(self, run: Path) -> None:
        """Run a job whose worker was killed once more: another job may have been the cause. If not, give it up."""
        job = self.jobs[run]
        console.say(f"Running alone: {' '.join(job)}")
        try:
            self.launch([run])
        except Exception as error:
            if type(error).__name__ not in KILLED_WORKER:
                raise
            reason = "Its process was killed twice, the second time alone; perhaps the memory did not suffice."
            self.errors[run] = reason
            identity = runs.state(run).owner.get("identity")
            result = runs.failure_result(plain(self.compose(job)), job, identity, UserError(reason))
            runs.write_result(run, result | {"status": "killed"})

    def wait_for_other_processes(self, folders: Sequence[Path]) -> None:
        """Wait until no other process works on a run."""
        if running := [run for run in folders if runs.state(run).status == "running"]:
            console.say(f"Waiting for {len(running)} runs that other processes work on.")
        while any(runs.state(run).status == "running" for run in running):
            time.sleep(2)

    def ended_jobs(self) -> list[Job]:
        """Return the jobs of this command with their states; one that could not write its error has failed, too."""
        jobs = {job.folder: job for job in sweeps.jobs_of(self.folder) if job.folder in self.jobs}
        for run, error in self.errors.items():
            if (job := jobs[run]).state.status not in ("failed", "killed"):
                jobs[run] = replace(job, state=runs.State("failed", {"error": error}, job.state.owner))
        return [*jobs.values()]

    def conclude(self) -> int:
        """Report on the sweep; return the command's exit code, 0 if every run has finished."""
        from speechformer.report.page import report, say

        jobs, page = self.ended_jobs(), self.folder / "report"
        unfinished = [job for job in jobs if job.state.status not in ("finished", "pruned")]
        console.say(f"Sweep of {len(jobs)} runs: {sweeps.count_states(jobs)}.")
        try:
            with FileLock(self.folder / sweeps.SWEEP_LOCK):  # another command may end in this folder, too
                studies = report([self.folder], page, baselines=Path("outputs/baselines"))
            for study in studies:
                say(study)
            console.say(f"Report: {page / 'report.html'}\nCurves: tensorboard --logdir {self.folder / sweeps.CURVES}")
        except (UserError, OSError) as error:  # no run came to its end, or the disk is full
            console.say(f"There is no report: {one_sentence(error)}")
        except Exception:  # what failed must be named in any case
            traceback.print_exc()
        for job in unfinished:
            console.warn(f"{job.state.status.capitalize()}: {job.name}: {job.error} ({job.folder})")
        if any(job.state.status != "diverged" for job in unfinished):
            console.warn(
                "Run the same command again to run only what is missing, once you have corrected what failed."
            )
        return 1 if unfinished else 0


def tie_workers() -> None:
    """Let joblib's workers end with this process; one that waits for a job would keep our output open for ever."""
    from joblib import register_parallel_backend
    from joblib.parallel import LokyBackend

    tied = functools.partial(LokyBackend, initializer=end_with_parent, initargs=(os.getpid(),))
    register_parallel_backend("loky", tied)


class HeldOutSweeper(GridSweeper):
    """A sweeper that chooses by held-out scores."""

    def check(self, config: dict[str, Any]) -> None:
        super().check(config)
        if config["task"]["data"] != "pairs" and not config["protocol"]["validation"]:
            raise UserError(
                f"hydra/sweeper={self.choices['hydra/sweeper']} chooses by the score on held-out data, and "
                f"protocol={config['protocol']['name']} holds none out: it would choose on test. Add protocol=clean."
            )

    def mode_of(self, jobs: Iterable[Sequence[str]]) -> str:
        """Return the direction of the metric of jobs, "max" or "min"; raise a `UserError` if their tasks differ."""
        from speechformer.tasks.registry import TASKS

        configs = [plain(self.compose(job)) for job in jobs]
        for config in configs:
            self.check(config)
        tasks = {config["task"]["name"] for config in configs}
        if len(tasks) > 1:
            raise UserError(f"hydra/sweeper={self.choices['hydra/sweeper']} compares scores of one task at a time.")
        return TASKS[tasks.pop()].mode


def combinations(overrides: Iterable[Override]) -> list[Overrides]:
    """Return every combination of the values of some overrides."""
    values = []
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(f"{override.input_line} is no list of values; hydra/sweeper=optuna searches an interval.")
        values.append([*map(words_of_choice, words_of(override))])
    return [tuple(itertools.chain(*words)) for words in itertools.product(*values)]


def words_of(override: Override) -> list[str]:
    """Return the overrides that a discrete override stands for, one for each value."""
    key = override.get_key_element()
    if override.is_sweep_override():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [f"{key}={override.get_value_element_as_str()}" if override.value_type else key]


def best_score(state: runs.State) -> float:
    """Return the best score of a run that has finished; NaN if it diverged or has none."""
    value = (state.result or {})["best"]["value"] if state.status == "finished" else None
    return math.nan if value is None else value
