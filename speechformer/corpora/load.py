"""The corpus that a config asks for: pairs of sentences for translation, speeches for the other tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.errors import UserError


def load(config: Mapping[str, Any]) -> Corpus | Pairs:
    """The corpus of a config, for its task.

    Raises:
        UserError: the corpus is not there, or not one for this task.
    """
    task = config["task"]
    if isinstance(task, Mapping) and task.get("name") == "translate":
        return load_pairs(config["corpus"])
    if config["corpus"].get("name") in ("ted", "digits"):
        raise UserError(
            f"corpus={config['corpus']['name']} holds pairs of sentences, for task=translate; take corpus=speeches, "
            "sample or auto."
        )
    return load_corpus(config["corpus"])
