"""Load the corpus that a config names, as its task reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.errors import UserError, pick

if TYPE_CHECKING:
    from speechformer.probes.registry import GeneratedRows

LOADERS: dict[str, Callable[[Mapping[str, Any]], Corpus | Pairs]] = {"speeches": load_corpus, "pairs": load_pairs}
CORPORA = {"speeches": ("auto", "speeches", "sample"), "pairs": ("auto", "ted", "sample", "digits")}  # `corpus=`


def load(config: Mapping[str, Any]) -> Corpus | Pairs | GeneratedRows:
    """Load the corpus of a config as `task.data` says.

    Raises:
        UserError: the corpus is missing or invalid, or holds no such data.
    """
    task, name = config["task"], config["corpus"]["name"]
    if task["data"] == "probe":
        from speechformer.probes.registry import load_probe  # not for every command: it takes numpy

        return load_probe(config)
    loader, valid = pick(LOADERS, task["data"], "task.data"), CORPORA[task["data"]]
    if name not in valid and any(name in names for names in CORPORA.values()):
        raise UserError(
            f"task={task['name']} reads {task['data']}, and corpus={name} has none; set corpus="
            f"{', '.join(valid[:-1])} or {valid[-1]}."
        )
    return loader(config["corpus"])


def load_any(config: Mapping[str, Any]) -> Corpus | Pairs:
    """Load the corpus of a config as its task reads it or, if it cannot, as other tasks do; raises as `load`."""
    name, data = config["corpus"]["name"], config["task"]["data"]
    if data not in CORPORA:
        raise UserError(f"task={config['task']['name']} reads no corpus that could have a leak.")
    if name not in CORPORA[data]:
        data = next((other for other, names in CORPORA.items() if name in names), data)
    return LOADERS[data](config["corpus"])
