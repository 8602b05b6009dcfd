"""Cache the tokenised texts of a corpus on disk, so that the processes of a sweep tokenise it once.

The user's cache folder holds one file for each corpus and version of the tokenizer: a header line, then a line of
JSON for each text. A file that is incomplete or belongs to something else is ignored and rewritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from speechformer import console
from speechformer.corpora import tokenizer
from speechformer.corpora.files import cache_directory, read_file, write_cache
from speechformer.corpora.speeches import Corpus
from speechformer.workers import start_worker

MANY, CHUNK = 20_000, 2000  # texts that are worth several processes, and texts of each of their jobs


def cache_file(corpus: Corpus) -> Path:
    """Return the path of the cache of a corpus."""
    return cache_directory() / "tokens" / f"{corpus.sha256[:16]}-{tokenizer.settings()[:16]}.jsonl"


def texts_of(corpus: Corpus) -> list[str]:
    """List all different texts of a corpus, in order."""
    sentences = [text for _, text in corpus.classify_train + corpus.classify_test]
    return list(dict.fromkeys(itertools.chain(sentences, corpus.lm_train, *corpus.lm_test.values())))


def remember_words(corpus: Corpus) -> bool:
    """Fill the memory of `split_words` with all texts of a corpus; return whether their words were cached.

    If the cache cannot be written, it is skipped.
    """
    texts, path = texts_of(corpus), cache_file(corpus)
    new = [text for text in texts if text not in tokenizer.WORDS]
    if not new:
        return True
    with contextlib.suppress(OSError, ValueError):
        first, _, lines = read_file(path).partition(b"\n")
        if json.loads(first) == header(corpus, lines):
            rows = map(json.loads, lines.splitlines())
            tokenizer.WORDS.update({text: tuple(words.split(" ")) if words else () for text, words in rows})
            return True
    split_in_parallel(new)
    lines = "".join(json.dumps([text, " ".join(tokenizer.split_words(text))]) + "\n" for text in texts).encode()
    write_cache(path, json.dumps(header(corpus, lines)).encode() + b"\n" + lines)
    return False


def split_in_parallel(texts: Sequence[str]) -> None:
    """Fill the memory of `split_words` with these texts, in as many processes as there are cores, if they are many.

    OMP_NUM_THREADS, which a sweep sets to the share of a run, limits their number.
    """
    if len(texts) < MANY:
        return
    from joblib import cpu_count
    from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

    console.say(f"Tokenizing {len(texts):,} texts.")
    share = os.environ.get("OMP_NUM_THREADS", "")
    processes = min(-(-len(texts) // CHUNK), cpu_count(), int(share) if share.isdecimal() else cpu_count())
    with (
        contextlib.suppress(BrokenProcessPool),  # one was killed: this process does the rest
        ProcessPoolExecutor(max(1, processes), initializer=start_worker, initargs=(os.getpid(),)) as pool,
    ):
        words = pool.map(tokenizer.split_words, texts, chunksize=CHUNK)
        bar = tqdm(words, total=len(texts), unit=" texts", leave=False, disable=None)  # None: shown on a terminal
        tokenizer.WORDS.update(zip(texts, bar))


def header(corpus: Corpus, lines: bytes) -> dict[str, str]:
    """Return the first line of a cache: its corpus, its tokenizer, and the sha256 of the other lines."""
    sha256 = hashlib.sha256(lines).hexdigest()
    return {"corpus": corpus.sha256, "tokenizer": tokenizer.settings(), "sha256": sha256}
