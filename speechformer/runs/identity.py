"""Identity of a run: its fingerprint, and the versions behind its result.

A fingerprint holds the config, the corpus and `NUMERICS_VERSION`, which stands for what the code computes. It is a
number and not a hash of the code: renaming a module or editing a docstring leaves every finished run valid.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# Raise it when the golden runs (tests/golden_runs.py) show that any config computes other numbers. Results of before
# version 9 have one of 1 to 8, by their config.
NUMERICS_VERSION = 9

# Keys that do not change the result: the machine, which checkpoints are written, whether to run again, the logger
NOT_IDENTITY = (
    *("checkpoint_every", "compile", "force", "keep_every_n_steps", "task.data", "threads"),
    *("logger", "logger.name", "logger.project", "logger.entity", "logger.offline"),
    *("logger.experiment", "logger.tracking_uri"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
)
# Keys newer than version 0.2, with the value that computes what runs without the key did: it is not in fingerprints
ADDED: dict[str, Any] = {
    **{"model.fraction": 1, "model.scaling": "none", "model.factor": 4},
    **{"embedding_dropout": None, "recipe.matrix_lr": None, "architecture.output_bias": "init"},
    "protocol.fold": 0,
}
WORDS: dict[str, Any] = {"tokens": "words", "vocab_size": None, "min_count": 1, "evaluation_tokens": 40000}
COUNTS = {"unknown_rate": 0, "ngram": 5, "ngram_targets": 0, "ngram_mixture": "none"}
# Added after version 0.2 and removed since: results of the time between have them
REMOVED: dict[str, dict[str, Any]] = {
    "classify": {"masked_lm": 0, "pretraining_epochs": 0, "extra_text": False},
    "lm": {"noise": 0},
}
ADDED_TO_TASK: dict[str, dict[str, Any]] = {
    "classify": {**WORDS, "unknown_rate": 0, "balanced": False, "naive_bayes": 0, **REMOVED["classify"]},
    "lm": {**WORDS, **COUNTS, "documents": "joined", "extra_text": False, **REMOVED["lm"]},
    "translate": {"bpe_dropout": 0},
}


def added_to(task: str | None) -> dict[str, Any]:
    """Return the keys that runs of a task may lack, with the value that they stand for."""
    return ADDED | {f"task.{key}": value for key, value in ADDED_TO_TASK.get(task or "", {}).items()}


def plain_number(value: Any, key: str) -> Any:
    """Return a whole float as an integer: `dropout=0` and `dropout=0.0` are the same setting.

    Lightning's `trainer.limit_*` are left alone, where 1 is one batch and 1.0 all of them.
    """
    is_whole = isinstance(value, float) and value.is_integer() and not key.startswith("trainer.limit_")
    return int(value) if is_whole else value


def identity_settings(value: Any, key: str = "", added: Mapping[str, Any] = ADDED) -> Any:
    """Return the settings that identify a run. The corpus is left out: its files identify it, not their path.

    Args:
        added: settings that are left out if they have these values.
    """
    if isinstance(value, Mapping):
        settings = {}
        for name, item in value.items():
            path = f"{key}.{name}" if key else name
            setting = identity_settings(item, path, added)
            if path not in (*NOT_IDENTITY, "corpus") and (path not in added or setting != added[path]):
                settings[name] = setting
        return settings
    if isinstance(value, list | tuple):
        return [identity_settings(item, key, added) for item in value]
    return plain_number(value, key)


def flatten(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config with dotted keys."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fingerprint(config: Mapping[str, Any], corpus_sha256: str, corpus_settings: Any) -> str:
    """Return a run's fingerprint, 12 digits of a sha256.

    Args:
        corpus_settings: how the files are read.
    """
    settings = identity_settings(config, added=added_to(config["task"]["name"]))
    content = {"config": settings, "corpus": [corpus_sha256, corpus_settings], "numerics": NUMERICS_VERSION}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def commit() -> str | None:
    """Return the commit of this code, with "-dirty" if a tracked file differs; None outside a checkout."""
    checkout = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout

    try:
        # an installed package may lie in somebody else's checkout, whose commit is not ours
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != checkout:
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("speechformer")
    except metadata.PackageNotFoundError:  # run in a checkout, with only what it requires installed
        return "(not installed)"


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result may depend on."""
    names = ["torch", "lightning", "torchmetrics", "hydra-core", "nltk", "tokenizers", "sacrebleu", "numpy"]
    ours = {"python": platform.python_version(), "speechformer": version()}
    return ours | {name: metadata.version(name) for name in names}
