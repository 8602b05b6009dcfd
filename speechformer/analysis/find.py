"""Find the checkpoint of a run's folder, without torch: what is wrong with the folder is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechformer.errors import UserError
from speechformer.runs import folder as runs

CHECKPOINTS = ("average.ckpt", "best.ckpt", "last.ckpt")


def find_checkpoint(run: str | Path, checkpoint: str | None = None) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the checkpoint that `load` reads, and the run's result, None if it has none.

    Raises:
        UserError: the folder is not a run's, has no such checkpoint, its result is damaged, or the run diverged.
    """
    directory = Path(run)
    if directory.is_file():
        parent = directory.resolve().parent
        example = parent if (parent / runs.TOKENIZER).is_file() else "outputs/runs/..."
        raise UserError(f"{directory} is a file. Name a run's folder, such as {example}.")
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder. Name a run's folder, such as outputs/runs/....")
    result = runs.result_or_none(directory)
    if result is not None and result["status"] == "diverged":
        raise UserError(f"{directory}: the run diverged. Train again with a lower recipe.lr.")
    if checkpoint is not None and checkpoint not in CHECKPOINTS:
        raise UserError(f"There is no checkpoint {checkpoint}; choose one of {', '.join(CHECKPOINTS)}.")
    chosen_on = ((result or {}).get("best") or {}).get("chosen_on")
    order = CHECKPOINTS[:2] if chosen_on == "validation" else CHECKPOINTS[::-1]
    for name in [checkpoint] if checkpoint else order:
        if (directory / name).exists():
            return name, result
    if checkpoint and result:
        raise UserError(f"{directory} has no {checkpoint}. Leave out the checkpoint to load the run's own.")
    if (directory / CHECKPOINTS[-1]).exists() and not checkpoint:
        raise UserError(
            f"{directory} has no best.ckpt, which its metrics are of. Restore it, or load last.ckpt instead."
        )
    if any(directory.glob(f"*/{runs.RESULT}")) or any(directory.glob(f"*/{runs.OWNER}")):
        raise UserError(f"{directory} is a folder of runs; name one of them.")
    wanted = checkpoint or ", ".join(CHECKPOINTS)
    raise UserError(f"{directory} has no {wanted}: it is not a run's folder, or no step has been saved yet.")
