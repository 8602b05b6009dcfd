"""A run's folder and what `result.json` says besides the figures. No torch here: reports read this quickly.

config.yaml       the resolved config            tokenizer.json    words and ids
last.ckpt         weights and optimiser          best.ckpt         weights of the best evaluation
metrics.csv       every evaluation               tensorboard/      the same, as TensorBoard events
result.json       written last, in one piece: its presence says that the run is over
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

RESULT = "result.json"


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write `result.json` so that a reader sees all of it or nothing."""
    partial = directory / f"{RESULT}.partial"
    partial.write_text(json.dumps(finite(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, directory / RESULT)


def read_result(directory: Path) -> dict[str, Any]:
    """What `write_result` wrote."""
    return json.loads((directory / RESULT).read_text(encoding="utf-8"))


def is_over(directory: Path) -> bool:
    """Whether a run came to its end here, finished or diverged; one that failed, or whose result is cut short, may be
    run again."""
    try:
        return (directory / RESULT).exists() and read_result(directory)["status"] != "failed"
    except (ValueError, KeyError, TypeError):
        return False


def finite(value: Any) -> Any:
    """The same plain data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result may depend on."""
    names = ("speechformer", "torch", "lightning", "torchmetrics", "hydra-core", "nltk", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
