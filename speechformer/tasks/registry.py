"""The tasks by name, `task=` in the config, and the trained task of a checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from speechformer.errors import UserError
from speechformer.runs.legacy import upgrade_checkpoint
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {
    "classify": Classify,
    "lm": LanguageModel,
    "translate": Translate,
}


def load_task(path: Path) -> Task:
    """Load the trained task of a checkpoint, from that file alone, on the CPU and in evaluation mode.

    Raises:
        UserError: the file is missing, or not a checkpoint of speechformer.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    try:
        checkpoint = upgrade_checkpoint(torch.load(path, map_location="cpu", weights_only=True))
        task = TASKS[checkpoint["task"]](**checkpoint["hyper_parameters"])
        task.load_state_dict(checkpoint["state_dict"])
    except (OSError, EOFError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} is not a checkpoint of speechformer, or one of an older version ({type(error).__name__})."
        ) from None
    return task.eval()
