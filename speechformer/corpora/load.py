"""Load the corpus that a config names, as its task reads it, and the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.corpora.documents import Documents, load_documents
from speechformer.corpora.files import read_file
from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError, pick

if TYPE_CHECKING:
    from speechformer.probes.registry import GeneratedRows

CORPORA = {  # `corpus=` by `task.data`
    "speeches": ("auto", "speeches", "sample"),
    "texts": ("auto", "speeches", "sample", "text", "stories"),
    "pairs": ("auto", "ted", "sample", "digits"),
}


def load_tokenizer(path: Path) -> Tokenizer | Subwords:
    """Load the tokenizer of a run, of either kind; a `UserError` if the file is missing, or no tokenizer."""
    is_subwords = read_file(path).startswith(b'{"version"')  # the format of the library `tokenizers`
    return Subwords.load(path) if is_subwords else Tokenizer.load(path)


def load(config: Mapping[str, Any]) -> Corpus | Pairs | Documents | GeneratedRows:
    """Load the corpus of a config as `task.data` says.

    Raises:
        UserError: the corpus is missing or invalid, or holds no such data.
    """
    task, name = config["task"], config["corpus"]["name"]
    if task["data"] == "probe":
        from speechformer.probes.registry import load_probe  # not for every command: it takes numpy

        return load_probe(config)
    names = pick(CORPORA, task["data"], "task.data")
    if name not in names:
        raise UserError(
            f"task={task['name']} reads {task['data']}, and corpus={name} has none; set corpus="
            f"{', '.join(names[:-1])} or {names[-1]}, or another task."
        )
    load_one: Callable[[Mapping[str, Any]], Corpus | Pairs | Documents] = load_corpus
    if task["data"] == "pairs":
        load_one = load_pairs
    elif name in ("text", "stories"):
        load_one = load_documents
    return load_one(config["corpus"])
