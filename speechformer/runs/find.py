"""Find the checkpoint of a run's folder, without torch: what is wrong with the folder is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechformer.corpora.pretrained import CONFIG, WEIGHTS
from speechformer.errors import UserError
from speechformer.runs import folder as runs

CHECKPOINTS = ("average.ckpt", "best.ckpt", "last.ckpt")


def find_checkpoint(run: str | Path, checkpoint: str | None = None) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the checkpoint that `load` reads, and the run's result, None if it has none.

    A model of Hugging Face's, whose folder has a config.json, has neither.

    Raises:
        UserError: the folder is not a run's, has no such checkpoint, its result is damaged, or the run diverged.
    """
    directory = Path(run)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder. Name that of a run, or of a model as Hugging Face saves it.")
    if (directory / CONFIG).exists():
        if checkpoint is not None:
            raise UserError(f"{directory} is a model from elsewhere, which has no {checkpoint}; name no checkpoint.")
        return WEIGHTS, None  # of a model from elsewhere
    result = runs.result_or_none(directory)
    if result is not None and result["status"] == "diverged":
        raise UserError(f"{directory}: the run diverged. Train again with a lower recipe.lr.")
    if checkpoint is not None and checkpoint not in CHECKPOINTS:
        raise UserError(f"There is no checkpoint {checkpoint}; choose one of {', '.join(CHECKPOINTS)}.")
    chosen_on = ((result or {}).get("best") or {}).get("chosen_on")
    order = [checkpoint] if checkpoint else CHECKPOINTS[:2] if chosen_on == "validation" else CHECKPOINTS[::-1]
    for name in order:
        if (directory / name).exists():
            return name, result
    if not (directory / runs.OWNER).exists() and result is None:
        raise UserError(
            f"{directory} is neither a run's folder (it has no {' or '.join(order)}) nor that of a model from "
            "elsewhere (it has no config.json)."
        )
    raise UserError(
        f"{directory} has no {' or '.join(order)}: no step has been saved yet, or a file is missing. "
        "Another one is loaded if you name it."
    )
