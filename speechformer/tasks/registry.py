"""The tasks by name: `task=` in the config."""

from __future__ import annotations

from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {
    "classify": Classify,
    "lm": LanguageModel,
    "translate": Translate,
}
