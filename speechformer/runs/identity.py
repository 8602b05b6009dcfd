"""What makes a run the same run: its fingerprint, and the name of its folder."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# Raise it when the same config computes other numbers: the golden runs (tests/golden_runs.py) tell when that is so.
# A version instead of a hash of the code: moving a file or editing a docstring leaves every finished run valid.
NUMERICS_VERSION = 1

# The settings that do not decide it: the machine, how often a run is written, whether it is done again.
NOT_IDENTITY = (
    "checkpoint_every",
    "compile",
    "force",
    "threads",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.strategy",
)


def plain_number(value: Any, key: str) -> Any:
    """A whole float as an integer, for `dropout=0` and `dropout=0.0` ask for the same; but for Lightning's
    `trainer.limit_train_batches`, 1 is one batch and 1.0 all of them."""
    whole = isinstance(value, float) and value.is_integer() and not key.startswith("trainer.limit_")
    return int(value) if whole else value


def decisive(value: Any, key: str = "") -> Any:
    """The settings that decide what a run is. The corpus is left out: it is known by its contents, not by the way to
    it."""
    if isinstance(value, Mapping):
        below = {str(name): f"{key}.{name}" if key else str(name) for name in value}
        return {
            name: decisive(value[name], path) for name, path in below.items() if path not in (*NOT_IDENTITY, "corpus")
        }
    if isinstance(value, list | tuple):
        return [decisive(item, key) for item in value]
    return plain_number(value, key)


def fingerprint(config: Mapping[str, Any], corpus_sha256: str, read_as: Any) -> str:
    """The fingerprint of a run: 12 hexadecimal digits of a hash of the resolved config (without machine, launcher and
    folders), the corpus (its files, and in plain data how they are read) and the version of the code that matters."""
    known = {"config": decisive(config), "corpus": [corpus_sha256, read_as], "numerics": NUMERICS_VERSION}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def safe(name: str) -> str:
    """A name as a part of a path on any system."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")


def folder_name(config: Mapping[str, Any], fingerprint: str) -> str:
    """The name of a run's folder: what it is, for the reader, and its identity."""

    def name_of(group: str) -> str:
        choice = config.get(group)
        return safe(str(choice.get("name") if isinstance(choice, Mapping) else choice))[:30]

    seed = safe(str(config.get("seed")))[:12]
    return f"{name_of('task')}_{name_of('model')}_{name_of('pattern')}_seed{seed}_{fingerprint}"


@functools.cache
def commit() -> str | None:
    """The commit of the code that runs, with "-dirty" if a tracked file differs; None outside a checkout."""
    checkout = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout

    try:
        # An installed package may lie inside somebody else's checkout: its commit is not ours.
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != checkout:
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result may depend on."""
    names = (
        "speechformer",
        "torch",
        "lightning",
        "torchmetrics",
        "hydra-core",
        "nltk",
        "tokenizers",
        "sacrebleu",
        "numpy",
    )
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
