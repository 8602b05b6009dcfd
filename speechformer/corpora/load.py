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


def load_texts(config: Mapping[str, Any]) -> Corpus | Documents:
    """Load a corpus of running text: speeches, or documents of any size."""
    return load_documents(config) if config["name"] in ("text", "stories") else load_corpus(config)


LOADERS: dict[str, Callable[[Mapping[str, Any]], Corpus | Pairs | Documents]] = {
    "speeches": load_corpus,
    "texts": load_texts,
    "pairs": load_pairs,
}
CORPORA = {  # `corpus=`
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
    corpus = LOADERS[data](config["corpus"])
    if isinstance(corpus, Documents):
        raise UserError(f"corpus={name} holds documents; this command reads corpus=speeches, sample or pairs.")
    return corpus
