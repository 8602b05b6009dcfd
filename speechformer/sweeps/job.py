"""One job of a sweep. It never raises: a failure is its result, and the sweep continues."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechformer import console
from speechformer.errors import UserError, one_sentence
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import progress, search
from speechformer.training import runtime
from speechformer.training.run import execute

NO_VALUE = float("nan")  # what a sweeper gets of a job without a result


def run_job(cfg: DictConfig, directory: Path, overrides: Sequence[str], hydra_config: Any) -> float:
    """Run one job, and return the metric that a sweeper may optimize.

    A job that runs beside others writes its output into `log.txt` in its folder, and prints one line.
    """
    sweep = Path(hydra_config.runtime.cwd) / hydra_config.sweep.dir
    launcher, plan = hydra_config.runtime.choices["hydra/launcher"], sweeps.plan(sweep)
    number, name, planned = hydra_config.job.num, " ".join(overrides), plan.get("jobs") or []
    if planned:  # its number is not Hydra's if the folder holds the jobs of other commands, too
        number = planned.index(list(overrides))
        name = sweeps.names(planned)[number]
    if launcher == "basic" and len(planned) > 1:
        console.say(f"Run {number + 1} of {len(planned)}: {name}")
    if number in plan.get("given_up", []):
        console.say(f"Given up: {name}")
        return NO_VALUE
    if launcher == "submitit_local":  # it starts all at once: each has its share of the cores, or waits for one
        share = os.environ.get("OMP_NUM_THREADS") or hydra_config.launcher.cpus_per_task or 1
        os.environ["OMP_NUM_THREADS"] = str(share)
    started = time.time()
    if cfg.get("force") and sweeps.has_begun(directory, plan.get("begun", 0)):  # and its worker was killed
        cfg.force = False
    try:
        sweeps.register(sweep, number, overrides, directory)
        sweeps.link_curves(sweep, name, directory)
        with contextlib.ExitStack() as stack:
            if launcher != "basic":
                stack.enter_context(console.log_to_file(directory / runs.LOG))
            report = search.reporter(sweep, number, hydra_config.sweeper)
            result = execute(cfg, directory, overrides, launcher, runtime.process_set_up, report)
    except runs.OccupiedError as error:
        console.say(f"Left to another process: {name}: {error}")
        return NO_VALUE
    except search.PrunedError as error:
        identity = (runs.read_or_none(directory / runs.OWNER, "owner") or {}).get("identity")
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        runs.write_result(directory, runs.failure_result(config, overrides, identity, error) | {"status": "pruned"})
        console.say(f"Pruned: {name}: {error}")
        return NO_VALUE
    except Exception as error:
        console.warn(f"Failed: {name}: {one_sentence(error)}")
        record_failure(cfg, sweep, number, directory, overrides, error)
        gc.collect()  # perhaps it failed for lack of memory
        if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return NO_VALUE
    if line := outcome(result, directory, started, plan.get("begun", started), launcher):
        console.say(": ".join(filter(None, (line, name, progress.describe_score(result)))))
    elif len(planned) > 1:
        console.say(progress.describe(sweeps.own_jobs(sweep), at_once=1) + "\n")
    value = result["best"]["value"]
    return NO_VALUE if value is None else value


def outcome(result: dict[str, Any], directory: Path, started: float, sweep_started: float, launcher: str) -> str:
    """Return how a job ended, in words; empty if its output says so already."""
    status = result["status"].capitalize()
    if not runs.worked_here(directory, sweep_started):
        return "Already finished"
    if not runs.worked_here(directory, started):
        return f"{status} in an ensemble of {result['machine']['ensemble_size']} runs"
    return f"{status} in {result['seconds']:.0f} s" if launcher != "basic" else ""


def record_failure(
    cfg: DictConfig, sweep: Path, number: int, directory: Path, overrides: Sequence[str], error: Exception
) -> None:
    """Write a result that says what went wrong, where the run has not done so.

    If its folder holds another run or one that has ended, or cannot be written, the sweep's folder says it.
    """
    try:
        result = runs.result_or_none(directory)
        has_ended = result is not None and result["status"] in runs.TERMINAL_STATES  # an earlier run, which stands
        if isinstance(error, runs.ForeignError) or has_ended:
            raise error
        if result is not None and not isinstance(error, UserError):
            return  # the run has
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        directory.mkdir(parents=True, exist_ok=True)
        runs.write_result(directory, runs.failure_result(config, overrides, None, error))
    except Exception:
        sweeps.COMMAND.errors[number] = one_sentence(error)
        with contextlib.suppress(OSError):
            sweeps.register(sweep, number, overrides, directory, one_sentence(error))
