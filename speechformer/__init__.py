"""Train small transformers, compare position encodings and attention patterns, and use the trained models.

    run = speechformer.fit("task=lm", "model=rope", "trainer.max_steps=200")   train, or load what is trained already
    run = speechformer.load("outputs/runs/lm_rope_full_seed0_01234567")    load a trained run
    run = speechformer.load_pretrained("FOLDER")            load a model as Hugging Face saves it
    table = speechformer.read_results("outputs/runs")                          results as a pandas DataFrame

Importing the package is fast: torch is imported when a function that needs it is called.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun, load, load_pretrained
    from speechformer.report.load import read_results

__version__: str
__all__ = ["TrainedRun", "__version__", "fit", "load", "load_pretrained", "read_results"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("speechformer.runs.identity").version()
    if name not in __all__:
        raise AttributeError(f"module 'speechformer' has no attribute {name!r}")
    module = "report" if name == "read_results" else "analysis"
    return getattr(importlib.import_module(f"speechformer.{module}.load"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def fit(*overrides: str, directory: str | Path | None = None) -> TrainedRun:
    """Train one run and load it, like `python -m speechformer.train` with the same settings.

    A finished run is loaded without training it again, an interrupted one is resumed. Process-wide settings (random
    states, torch's defaults, warning filters, log levels, number of threads, environment) are as before afterwards. A
    default dtype, device or mode of torch that you have set does not count. Of several threads, one trains at a time.

    Args:
        overrides: settings as on the command line: "task=lm", "model=rope", "trainer.max_steps=200".
        directory: the run's folder; None: the folder that the command would use, under outputs/runs.

    Returns:
        The trained run; `run.result` has its metrics.

    Raises:
        UserError: a setting is invalid, the folder holds another run, or the run diverged.
        KeyboardInterrupt: you pressed Ctrl-C. The same call resumes from the last checkpoint.

    Example:
        >>> run = speechformer.fit("corpus=sample", "model=alibi", "trainer.max_epochs=2")
        >>> run.result["metrics"]["test_accuracy"]
    """
    from speechformer.analysis.load import load
    from speechformer.config import CONF, as_plain, compose, load_plain
    from speechformer.errors import UserError
    from speechformer.paths import path_of
    from speechformer.runs.naming import run_name
    from speechformer.training import runtime
    from speechformer.training.run import execute
    from speechformer.training.runtime import explained

    for override in overrides:
        if override.lstrip("+~").startswith("hydra"):
            raise UserError(f"{override}: fit() has no hydra settings; set the run's folder with directory=.")
    cfg = compose(overrides)
    if directory is None:
        run_directory = load_plain(CONF / "config.yaml")["hydra"]["run"]["dir"]
        directory = run_directory.replace("${run_name:}", run_name(as_plain(cfg)))
    with explained():
        execute(cfg, path_of(directory), overrides, environment=runtime.isolated)
    return load(directory)
