"""Load the corpus that a config names, as its task reads it, and the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.corpora.documents import Documents, load_documents
from speechformer.corpora.files import read_file
from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.pretrained import CONFIG, START, TOKENIZER, PretrainedTokenizer
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError

if TYPE_CHECKING:
    from speechformer.probes.registry import GeneratedRows

AnyTokenizer = Tokenizer | Subwords | PretrainedTokenizer
Loader = Callable[[Mapping[str, Any]], Corpus | Pairs | Documents]
SPEECHES: dict[str, Loader] = dict.fromkeys(("auto", "speeches", "sample"), load_corpus)
CORPORA: dict[str, dict[str, Loader]] = {  # `task.data`, and what loads `corpus=`
    "speeches": SPEECHES,
    "texts": {**SPEECHES, "text": load_documents, "stories": load_documents},
    "pairs": dict.fromkeys(("auto", "ted", "sample", "digits"), load_pairs),
}


def load_tokenizer(path: Path) -> AnyTokenizer:
    """Load the tokenizer of a run, of any kind; a `UserError` if the file is missing, or no tokenizer."""
    content = read_file(path)
    if content.startswith(START):
        return PretrainedTokenizer.load(path)
    is_subwords = content.startswith(b'{"version"')  # the format of the library `tokenizers`
    return Subwords.load(path) if is_subwords else Tokenizer.load(path)


def tokenizer_of(folder: Path) -> AnyTokenizer:
    """Load the tokenizer of a run's folder, or of a model from elsewhere, which has a config.json."""
    is_pretrained = (folder / CONFIG).exists()
    return PretrainedTokenizer.of_folder(folder) if is_pretrained else load_tokenizer(folder / TOKENIZER)


def load(config: Mapping[str, Any]) -> Corpus | Pairs | Documents | GeneratedRows:
    """Load the corpus of a config as `task.data` says.

    Raises:
        UserError: the corpus is missing or invalid, or holds no such data.
    """
    task, name = config["task"], config["corpus"]["name"]
    if task["data"] == "probe":
        from speechformer.probes.registry import load_probe  # not for every command: it takes numpy

        return load_probe(config)
    loaders = CORPORA[task["data"]]
    if name not in loaders:
        raise UserError(
            f"task={task['name']} reads {task['data']}, and corpus={name} has none; set corpus="
            f"{', '.join(loaders)}, or another task."
        )
    return loaders[name](config["corpus"])
