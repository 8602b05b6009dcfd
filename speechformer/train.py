"""Train one run, or with `-m` a sweep: `python -m speechformer.train task=classify model=alibi`.

Compose the config with Hydra, which names the run's folder, execute the run there, and report invalid input in one
sentence. Heavy imports come later, so that `--help`, shell completion and a typo are answered at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import speechformer
from speechformer import console
from speechformer.config import expand_words, explain, with_pretrained
from speechformer.errors import UserError, fail, run_command
from speechformer.keys import CONF
from speechformer.runs import identity, naming
from speechformer.runs.rank import expect_processes, is_first, local_rank
from speechformer.sweeps.job import run_job
from speechformer.training import runtime
from speechformer.training.run import execute
from speechformer.training.runtime import explained
from speechformer.workers import end_with_parent


def run_name(*, _root_: DictConfig) -> str:
    """Return `${run_name:}` in the config: the name of the run's folder."""
    return naming.run_name(with_pretrained(naming.plain(_root_)))


def sweep_name(overrides: Sequence[str]) -> str:
    """Return the name of a sweep's folder: the swept words of the command, and a hash of all: so it resumes there."""
    ignored = ("machine", *identity.NOT_IDENTITY)
    words = sorted(word for word in overrides if word.lstrip("+").partition("=")[0] not in ignored)
    swept = [naming.safe(word) for word in words if re.search(r"^experiment=|=\w*\(|=[^\[{(]*,", word)]
    digest = hashlib.sha256(json.dumps([words, identity.NUMERICS_VERSION]).encode()).hexdigest()[:8]
    return "_".join([*swept[:3], digest])


OmegaConf.register_new_resolver("run_name", run_name, replace=True)
OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True, use_cache=True)  # jobs have other overrides


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(cfg: DictConfig) -> str | None:
    """Run one of Hydra's jobs; of a sweep, return the error of a job that failed."""
    hydra_config = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task)  # as typed: interpolations stay
    directory = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        return run_job(cfg, directory, overrides, hydra_config)
    expect_processes(naming.plain(cfg))
    if local_rank():
        end_with_parent()
    if is_first() and (swept := hydra_config.sweeper.get("params")):
        console.say(f"This is one run of an experiment that sweeps {', '.join(swept)}; -m makes all of them.")
    try:
        with explained():
            result = execute(cfg, directory, overrides, environment=runtime.process_set_up)
    except UserError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()  # Hydra made it; it goes if it is empty
        fail(str(error))  # Hydra would print more, were it raised
    experiment = hydra_config.runtime.choices.get("experiment")
    if is_first() and experiment and cfg.corpus.name == "auto" and result["corpus"]["name"] == "sample":
        console.warn(
            f"The results that experiment={experiment} names are those of the speeches, and this run used the "
            "generated sample. To get the speeches: python -m speechformer.download speeches"
        )
    if result["status"] == "diverged":
        sys.exit(1)
    return None


def main() -> None:
    """Run the command line; `speechformer-train` is the same."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print, and we print it
    if "OMP_WAIT_POLICY" not in os.environ:
        # Waiting threads spin, by default for so long that a run crawls beside a busy process. libgomp reads the
        # variable when torch is imported; workers and further devices inherit it.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    run_command(run_and_explain)


def run_and_explain() -> None:
    """Run the jobs of the command line; an error of Hydra becomes one sentence, and Ctrl-C says what resumes."""
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        console.write(f"speechformer {speechformer.__version__}")
        return
    try:
        # argparse takes no words on both sides of an option
        sys.argv[1:] = sorted(expand_words(sys.argv[1:]), key=lambda word: word not in ("-m", "--multirun"))
        run()
    except KeyboardInterrupt:
        sys.exit("Interrupted; the same command resumes.")
    except SystemExit as end:
        if type(end).__name__ != "SIGTERMException":  # Lightning's, without an exit code
            raise
        console.warn("Terminated; the same command resumes.")
        sys.exit(128 + signal.SIGTERM)
    except BrokenPipeError:
        raise
    except (HydraException, OmegaConfBaseException) as error:  # some are OSErrors, too
        fail(explain(error, sys.argv[1:]))
    except Exception as error:
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        if last.f_globals["__name__"].partition(".")[0] not in ("hydra", "omegaconf", "antlr4"):
            raise
        fail(explain(error, sys.argv[1:]))


if __name__ == "__main__":
    # launchers send `run` to other processes by its module's name, which must not be __main__
    from speechformer.train import main as main_by_name

    main_by_name()
