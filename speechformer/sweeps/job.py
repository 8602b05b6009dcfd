"""One job of a sweep. It never raises: a failure is its result, and the sweep continues."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import DictConfig

from speechformer import console
from speechformer.errors import one_sentence
from speechformer.runs import folder as runs
from speechformer.runs.naming import plain
from speechformer.sweeps import progress, search
from speechformer.sweeps.folder import jobs_of
from speechformer.training import runtime
from speechformer.training.run import execute


def run_job(cfg: DictConfig, directory: Path, overrides: Sequence[str], hydra_config: HydraConf) -> str | None:
    """Run one job, and return the error of a job that failed.

    A job that runs beside others writes its output into `log.txt` in its folder.
    """
    sweep, launcher = Path(hydra_config.sweep.dir), hydra_config.runtime.choices["hydra/launcher"]
    in_process = launcher in progress.IN_PROCESS
    names = {job.overrides: f"{number}: {job.name}" for number, job in enumerate(jobs_of(sweep), start=1)}
    if in_process and len(names) > 1:
        console.say(f"Run {names.get(tuple(overrides))}")
    message = None
    try:
        with contextlib.nullcontext() if in_process else console.log_to_file(directory / runs.LOG):
            report = search.reporter(sweep, overrides, hydra_config.sweeper)
            execute(cfg, directory, overrides, launcher, runtime.process_set_up, report)
    except runs.OccupiedError:
        return None  # the sweep waits for the other process
    except Exception as error:
        message = record(error, cfg, directory, overrides)
        runtime.free_memory()
    if in_process and len(names) > 1:
        jobs = jobs_of(sweep)
        for job in jobs:
            if job.overrides == tuple(overrides):
                console.say(f"{progress.outcome(job)}\n{progress.describe(jobs, at_once=1)}\n")
    return message


def record(error: Exception, cfg: DictConfig, directory: Path, overrides: Sequence[str]) -> str | None:
    """Make an exception the run's result, unless the folder holds another run, or one that stands.

    Returns:
        The error in one sentence; None of a run that was pruned.
    """
    pruned = isinstance(error, search.PrunedError)
    with contextlib.suppress(Exception):  # such as a full disk; the sweep names the first error
        if not isinstance(error, runs.ForeignError) and runs.state(directory).status not in runs.TERMINAL_STATES:
            identity = runs.owner_of(directory).get("identity")
            result = runs.failure_result(plain(cfg), overrides, identity, error)
            directory.mkdir(exist_ok=True)
            runs.write_result(directory, result | ({"status": "pruned"} if pruned else {}))
    return None if pruned else one_sentence(error) or type(error).__name__
