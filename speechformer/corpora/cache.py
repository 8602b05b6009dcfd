"""The words of a corpus on disk, so that it is cut into words once, and not by every process of a sweep.

One file for each corpus and each way of cutting, in the user's cache folder: a line that says what it is, then a line
for each text. It is believed only if it is whole and of this corpus; otherwise the corpus is cut again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from speechformer.corpora import tokenizer
from speechformer.corpora.files import cache_directory
from speechformer.corpora.speeches import Corpus


def cache_file(corpus: Corpus) -> Path:
    """Where the words of a corpus are kept."""
    return cache_directory() / "tokens" / f"{corpus.sha256[:16]}-{tokenizer.settings()[:16]}.jsonl"


def texts_of(corpus: Corpus) -> list[str]:
    """All texts of a corpus, each once, in order."""
    sentences = [text for _, text in corpus.classify_train + corpus.classify_test]
    lines = [text for part in (corpus.lm_train, *corpus.lm_test.values()) for text in part]
    return list(dict.fromkeys(sentences + lines))


def remember_words(corpus: Corpus) -> bool:
    """Let `split_words` know the words of all texts of a corpus, from the cache or by cutting them.

    Returns:
        Whether they were in the cache. A cache that cannot be written is done without.
    """
    texts = texts_of(corpus)
    if all(text in tokenizer.WORDS for text in texts):
        return True
    path = cache_file(corpus)
    known = read(path, corpus)
    if known is not None and known.keys() >= set(texts):
        tokenizer.WORDS.update(known)
        return True
    lines = "".join(json.dumps([text, " ".join(tokenizer.split_words(text))]) + "\n" for text in texts).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(json.dumps(header(corpus, lines)).encode() + b"\n" + lines)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
    return False


def header(corpus: Corpus, lines: bytes) -> dict[str, str]:
    """What the first line of a cache says: whose words these are, and the sha256 of what follows."""
    own = {"corpus": corpus.sha256, "tokenizer": tokenizer.settings()}
    return {**own, "sha256": hashlib.sha256(lines).hexdigest()}


def read(path: Path, corpus: Corpus) -> dict[str, tuple[str, ...]] | None:
    """The words by text; None if the file is not there, cut short, or of something else."""
    try:
        first, _, lines = path.read_bytes().partition(b"\n")
        if json.loads(first) != header(corpus, lines):
            return None
        return {text: tuple(words.split(" ")) if words else () for text, words in map(json.loads, lines.splitlines())}
    except (OSError, ValueError):
        return None
