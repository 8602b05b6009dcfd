"""The command: `python -m speechformer.train task=classify model=alibi`, and with `-m` a sweep.

Here is the Hydra edge: it composes the config, answers bad input in one sentence, names the run's folder, and hands
over to `fit`, a plain function from a config and a folder to a result. Heavy imports stand inside functions, so that
`--help`, shell completion and a typo are answered at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechformer import console
from speechformer.config import CONF, check_overrides, check_sweep, explain
from speechformer.corpora.load import load
from speechformer.errors import UserError, one_sentence
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import launcher
from speechformer.training.fit import failure, fit


def run_name(*, _root_: DictConfig) -> str:
    """`${run_name:}` in the config: the name of the run's folder."""
    cfg = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    try:
        corpus = load(config)
        fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    except (UserError, OSError, KeyError, TypeError):  # it will be refused, and that says where
        fingerprint = identity.fingerprint(config, "", [])
    return identity.folder_name(config, fingerprint)


launcher.register()
OmegaConf.register_new_resolver("run_name", run_name, replace=True)
OmegaConf.register_new_resolver("sweep_name", sweeps.sweep_name, replace=True)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(cfg: DictConfig) -> float | None:
    """One job of Hydra's; returns the figure that a sweeper may optimise."""
    hydra_config = HydraConfig.get()
    overrides, directory = hydra_config.overrides.task, Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        return job(cfg, directory, overrides, hydra_config)
    begun = time.time()
    try:
        check_overrides(overrides)
        result = fit(cfg, directory, overrides)
    except UserError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()  # Hydra made it; it goes if it is empty
        sys.exit(f"Error: {error}")
    if not runs.worked_here(directory, begun) and not int(os.environ.get("LOCAL_RANK", 0)):
        console.say(f"Done before: {directory}. To do it again: force=true.")
        console.say(console.summary(result))
    if result["status"] == "diverged":
        sys.exit(1)
    return result["best"]["value"]


def job(cfg: DictConfig, directory: Path, overrides: Sequence[str], hydra_config: Any) -> float:
    """One run of a sweep. It never raises: what goes wrong is its result, and the sweep goes on.

    What runs side by side with others talks to `log.txt` in its folder, and says one line.
    """
    sweep, number = Path(hydra_config.runtime.cwd) / hydra_config.sweep.dir, hydra_config.job.num
    launched_by, plan = hydra_config.runtime.choices["hydra/launcher"], sweeps.plan(sweep)
    name = sweeps.names(plan["jobs"])[number] if plan.get("jobs") else " ".join(overrides)
    if number in plan.get("given_up", []):
        print(f"Given up: {name}", flush=True)
        return float("nan")
    if launched_by == "submitit_local":  # it starts all at once: each has its share of the cores, or waits for one
        os.environ.setdefault("OMP_NUM_THREADS", str(hydra_config.launcher.cpus_per_task or 1))
    begun = time.time()
    if cfg.get("force") and (runs.read_json(directory / runs.OWNER) or {}).get("since", 0) >= plan.get("begun", 0):
        cfg.force = False  # this command has done so, before a worker was killed
    try:
        sweeps.register(sweep, number, overrides, directory)
        check_overrides(overrides)
        check_sweep(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        with contextlib.ExitStack() as stack:
            if launched_by != "basic":
                log = stack.enter_context(open(directory / "log.txt", "a", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(log))
                stack.enter_context(contextlib.redirect_stderr(log))
            result: dict[str, Any] | None = fit(cfg, directory, overrides, launched_by)
    except runs.OccupiedError as error:
        print(f"Left to another: {name}: {error}", flush=True)
        return float("nan")
    except Exception as error:
        print(f"Failed: {name}: {one_sentence(error)}", file=sys.stderr, flush=True)
        record_failure(cfg, sweep, number, directory, overrides, error)
        result = None
    if result is None:
        forget()
        return float("nan")
    if not runs.worked_here(directory, plan.get("begun", begun)):
        print(f"Done before: {name}", flush=True)
    elif not runs.worked_here(directory, begun):
        print(
            f"{result['status'].capitalize()} in one of {result['machine']['ensemble_size']} runs: {name}", flush=True
        )
    elif launched_by != "basic":
        print(f"{result['status'].capitalize()} in {result['seconds']:.0f} s: {name}", flush=True)
    value = result["best"]["value"]
    return float("nan") if value is None else value


def record_failure(
    cfg: DictConfig, sweep: Path, number: int, directory: Path, overrides: Sequence[str], error: Exception
) -> None:
    """Leave a result that says what went wrong, where the run has not done so; if its folder holds another run, or
    one that is done, or cannot be written, say it in the sweep's."""
    left = runs.result_or_none(directory)
    if left is not None and not isinstance(error, UserError):
        return  # `fit` has
    try:
        if isinstance(error, runs.ForeignError) or (left is not None and left["status"] in runs.TERMINAL_STATES):
            raise OSError
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        directory.mkdir(parents=True, exist_ok=True)
        runs.write_result(directory, failure(config, overrides, None, error))
    except OSError:
        with contextlib.suppress(OSError):
            sweeps.register(sweep, number, overrides, directory, one_sentence(error))


def forget() -> None:
    """Give back the memory that a job took, also one that ran out of it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """The command line; `speechformer-train` is the same."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print, and we print it
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other spin, by default so long that beside a busy process a run crawls
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    try:
        sweeps.to_the_end(run, [sys.executable, "-m", "speechformer.train"])
        if sweeps.current is not None:
            sys.exit(sweeps.conclude(sweeps.current))
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"Error: {explain(error)}")
    except UserError as error:
        sys.exit(f"Error: {error}")
    except OSError as error:
        sys.exit(f"Error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}.")
    except ValueError as error:
        if "Config group override must be" not in str(error):  # Hydra's, for GROUP=null
            raise
        sys.exit("Error: a group takes the name of a choice; for no experiment, leave experiment= away.")
    except KeyboardInterrupt:
        sys.exit("Interrupted; the same command goes on." if sweeps.current else "Interrupted.")
    except SystemExit as end:
        if type(end).__name__ != "SIGTERMException":  # Lightning's, without an exit code
            raise
        print("Terminated; the same command goes on from the last checkpoint.", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # Launchers send `run` to other processes: by name, as that of a module, and not by value, as one of __main__
    from speechformer.train import main as by_name

    by_name()
