"""Train one run, or with `-m` a sweep: `python -m speechformer.train task=classify model=alibi`.

The module composes the config with Hydra, names the run's folder, and reports invalid input in one sentence. Heavy
imports come later, so that `--help`, shell completion and a typo are answered at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import speechformer
from speechformer import console
from speechformer.config import CONF, check_config, explain
from speechformer.corpora.load import load
from speechformer.errors import UserError, fail, run_command
from speechformer.runs import folder as runs
from speechformer.runs import identity, naming
from speechformer.runs.rank import is_first, local_rank
from speechformer.sweeps import launcher, recovery, search, tuned
from speechformer.sweeps.folder import COMMAND
from speechformer.sweeps.job import run_job
from speechformer.training import runtime
from speechformer.training.run import execute
from speechformer.training.runtime import explained
from speechformer.workers import end_with_parent


def run_name(*, _root_: DictConfig) -> str:
    """Return `${run_name:}` in the config: the name of the run's folder."""
    cfg = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    config: Any = OmegaConf.to_container(cfg)
    try:
        config = OmegaConf.to_container(cfg, resolve=True)
        check_config(config)
        corpus = load(config)
        fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    except Exception:  # the run will raise it, and say where
        fingerprint = hashlib.sha256(repr(config).encode()).hexdigest()[:12]
    return naming.folder_name(config, fingerprint)


launcher.register()
search.register()
tuned.register()
OmegaConf.register_new_resolver("run_name", run_name, replace=True)
OmegaConf.register_new_resolver("sweep_name", launcher.sweep_name, replace=True)


def warn_of_sample(cfg: DictConfig, experiment: str) -> None:
    """Say that an experiment's results are those of the speeches, if it falls back to the sample."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with contextlib.suppress(Exception):  # the run will raise it
        if config["corpus"]["name"] == "auto" and load(config).name == "sample":
            console.warn(
                f"The results that experiment={experiment} names are those of the speeches, and this run uses the "
                "generated sample. To get the speeches: python -m speechformer.download speeches"
            )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(cfg: DictConfig) -> float | None:
    """Run one of Hydra's jobs, and return the metric that a sweeper may optimize."""
    hydra_config = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task)  # as typed: interpolations stay
    directory = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        return run_job(cfg, directory, overrides, hydra_config)
    started = time.time()
    if not hydra_config.run.dir.strip():
        fail("hydra.run.dir is empty; name a folder, or omit it.")
    if is_first() and (swept := hydra_config.sweeper.get("params")):
        console.say(f"This is one run of an experiment that sweeps {', '.join(swept)}; -m makes all of them.")
    if is_first() and (experiment := hydra_config.runtime.choices.get("experiment")):
        warn_of_sample(cfg, experiment)
    try:
        with explained():
            result = execute(cfg, directory, overrides, environment=runtime.process_set_up)
    except UserError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()  # Hydra made it; it goes if it is empty
        fail(str(error))
    if not runs.worked_here(directory, started) and is_first():
        console.say(f"Already finished: {directory}. Run it again with force=true.")
        console.say(console.summary(result))
    if result["status"] == "diverged":
        sys.exit(1)
    return result["best"]["value"]


def main() -> None:
    """Run the command line; `speechformer-train` is the same."""
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        console.write(f"speechformer {speechformer.__version__}")
        return
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # Hydra wants it first
    if unknown := get_args_parser().parse_known_args()[1]:
        if not unknown[0].startswith("-"):  # an option stands between the settings
            fail(f"Write {unknown[0]} beside the other settings, before or after all options.")
        fail(f"{unknown[0]} is not an option; a setting is KEY=VALUE, such as width=64.")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print, and we print it
    if "OMP_WAIT_POLICY" not in os.environ:
        # Waiting threads spin, by default for so long that a run crawls beside a busy process. libgomp reads the
        # variable when torch is imported; workers and further devices inherit it.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if local_rank():
        end_with_parent()
    run_command(run_and_explain)


def run_and_explain() -> None:
    """Run the jobs of the command line; an error of Hydra becomes one sentence, and Ctrl-C says what resumes."""
    try:
        recovery.run_to_the_end(run, [sys.executable, "-m", "speechformer.train"])
        if COMMAND.folder is not None:
            sys.exit(recovery.conclude(COMMAND.folder))
    except KeyboardInterrupt:
        sys.exit("Interrupted; the same command resumes." if COMMAND.folder else "Interrupted.")
    except SystemExit as end:
        if type(end).__name__ != "SIGTERMException":  # Lightning's, without an exit code
            raise
        console.warn("Terminated; the same command resumes from the last checkpoint.")
        sys.exit(128 + signal.SIGTERM)
    except (HydraException, OmegaConfBaseException) as error:  # some are OSErrors, too
        fail(explain(error, sys.argv[1:]))
    except (UserError, OSError):
        raise
    except Exception as error:
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        if last.f_globals["__name__"].split(".")[0] not in ("hydra", "omegaconf", "antlr4"):
            raise
        fail(explain(error, sys.argv[1:]))


if __name__ == "__main__":
    # launchers send `run` to other processes by its module's name, which must not be __main__
    from speechformer.train import main as main_by_name

    main_by_name()
