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

# Raise it when the golden runs (tests/golden_runs.py) show that any config computes other numbers
NUMERICS_VERSION = 9

# Keys that do not change the result: the machine, which checkpoints are written, whether to run again, the logger
NOT_IDENTITY = (
    *("checkpoint_every", "compile", "force", "keep_every_n_steps", "task.data", "threads", "init_from.folder"),
    *("logger", "logger.name", "logger.project", "logger.entity", "logger.offline"),
    *("logger.experiment", "logger.tracking_uri"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
)


# Settings that came later: at these values a run is what it was without them
LATER: dict[str, Any] = {
    "architecture.norm_type": "layer",
    **dict.fromkeys((f"architecture.{key}" for key in ("norm_eps", "head_width", "output_softcap")), None),
    "architecture.embedding_norm": False,
    "architecture.classifier_activation": "relu",
    "model.frequencies": None,
    "model.growth": 1.0,
    "model.init_std": None,
    "model.attention": "luong",
    "attention.kv_heads": None,
    "attention.softcap": None,
    **dict.fromkeys(
        (f"attention.{key}" for key in ("qk_norm", "length_scale", "output_gate", "value_residual")), False
    ),
    "attention.conv": 0,
    "attention.name": "softmax",
    "attention": {},  # nothing of it is left
    "task.longer": 1,
    "init_from": None,
}


def plain_number(value: Any, key: str) -> Any:
    """Return a whole float as an integer: `dropout=0` and `dropout=0.0` are the same setting.

    Lightning's `trainer.limit_*` are left alone, where 1 is one batch and 1.0 all of them.
    """
    is_whole = isinstance(value, float) and value.is_integer() and not key.startswith("trainer.limit_")
    return int(value) if is_whole else value


def identity_settings(value: Any, key: str = "") -> Any:
    """Return the settings that identify a run. The corpus is left out: its files identify it, not their path."""
    if isinstance(value, Mapping):
        paths = {name: f"{key}.{name}" if key else name for name in value}
        excluded = (*NOT_IDENTITY, "corpus")
        kept = {name: identity_settings(value[name], path) for name, path in paths.items() if path not in excluded}
        return {name: each for name, each in kept.items() if LATER.get(paths[name], ...) != each}
    if isinstance(value, list | tuple):
        return [identity_settings(item, key) for item in value]
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
    content = {
        "config": identity_settings(config),
        "corpus": [corpus_sha256, corpus_settings],
        "numerics": NUMERICS_VERSION,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def commit() -> str | None:
    """Return the commit of this code, with "-dirty" if a tracked file differs; None outside a checkout."""
    checkout = Path(__file__).resolve().parents[2]

    if not (checkout / ".git").exists():  # an installed package may lie in somebody else's checkout
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
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
