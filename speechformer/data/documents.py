"""The data of `task=lm` on documents: text of any size as token ids in files that are mapped into memory.

A text is <eos>, then for each document its tokens and <eos>; so <eos> begins and ends a document. The ids of each
part are in a file of int32. The files of a corpus are in a
folder of the user's cache, named by a hash of the text, the tokenizer and the protocol. They are whole if
`counts.json`, which is written last, is there. So the first run tokenizes the text; later ones start at once, and
share its pages.

Evaluation during training reads a fixed sample, so the text may have any size. Shapes: see `batches`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from speechformer import console
from speechformer.corpora.documents import Documents
from speechformer.corpora.files import atomic_write, cache_directory, read_file, write_file
from speechformer.corpora.special_tokens import END, UNKNOWN
from speechformer.corpora.splits import held_out
from speechformer.corpora.subwords import Subwords
from speechformer.data.batches import Part, Stream
from speechformer.data.speeches import DEFAULTS, StreamData, TextSize
from speechformer.errors import UserError

FITTED = 32 << 20  # characters that a vocabulary is fitted on
SLICE = 1 << 20  # characters of a long document that are drawn for the vocabulary together
LINES = 10_000  # that are encoded together
VERSION = 2  # of what is in token files
COUNTS = "counts.json"

Counts = dict[str, int]  # "documents", and "bytes" and "words" of the text


class TokenFiles:
    """The vocabulary and the token files of a corpus under a protocol.

    Args:
        share: of the documents of train that is held out, by a hash of their text.
        removes: whether to remove documents of train that are in a test or validation text.
    """

    def __init__(self, corpus: Documents, share: float, removes: bool) -> None:
        self.corpus, self.share, self.removes = corpus, share, removes

    def path(self, *settings: str | int | None) -> Path:
        """Return a path in the cache that depends on the corpus, the protocol and these settings."""
        corpus = [self.corpus.sha256, self.corpus.separator, self.share, self.removes]
        key = hashlib.sha256(json.dumps([VERSION, *corpus, *settings]).encode()).hexdigest()
        return cache_directory() / "tokens" / key[:32]

    @functools.cached_property
    def tested(self) -> dict[str, list[bytes]]:
        """The hashes of the documents of each test."""
        parts = [f"test_{name}" for name in self.corpus.tests]
        return {part: list(map(hash_of, self.corpus.documents(part))) for part in parts}

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the part and text of each document; what must not be in train is of the part "removed"."""
        excluded = set(map(hash_of, self.corpus.documents("validation"))).union(*self.tested.values())
        for part in self.corpus.parts:
            for text in self.corpus.documents(part):
                if part == "train" and self.removes and hash_of(text) in excluded:
                    yield "removed", text
                else:
                    yield "validation" if part == "train" and held_out(text, self.share) else part, text

    def tokenizer(self, kind: str, size: int | None, min_count: int) -> Subwords:
        """Return the cached tokenizer, or fit one on at most 32 million characters of train, evenly drawn."""
        path = self.path("tokenizer", kind, size, min_count, metadata.version("tokenizers"))
        with locked(path):
            if not path.exists():
                console.say("Fitting a vocabulary, only this once.")
                Subwords.fit(self.vocabulary_texts(), kind, size, min_count).save(path)
        return Subwords.load(path)

    def vocabulary_texts(self) -> Iterator[str]:
        """Yield the documents of train, or if they are too long slices of them, drawn by a hash."""
        share = FITTED / sum(path.stat().st_size for path in self.corpus.parts["train"])
        for text in (text for part, text in self.documents() if part == "train"):
            slices = (text[start : start + SLICE] for start in range(0, len(text), SLICE))
            yield from (piece for piece in slices if held_out(f"vocabulary {piece[:1000]}", share))

    def open(self, tokenizer: Subwords) -> tuple[dict[str, Stream], dict[str, Counts]]:
        """Return the ids of each part, [n], mapped, and its counts; write the files first if they are not there.

        The parts are those of the corpus, and "validation" if a share is held out. The counts of train also have
        "removed", its documents that were removed, and those of a test "in_train", its documents that are in train.
        """
        folder = self.path(tokenizer.tokenizer.to_str())
        with locked(folder):
            if not (folder / COUNTS).exists():
                console.say(f"Tokenizing {self.corpus.where}, only this once, into {folder}")
                folder.mkdir(exist_ok=True)
                write_file(folder / COUNTS, json.dumps(self.write(tokenizer, folder)).encode())
        counts: dict[str, Counts] = json.loads(read_file(folder / COUNTS))
        # copy-on-write: torch warns of arrays that cannot be written
        return {
            part: torch.from_numpy(np.memmap(folder / f"{part}.bin", np.int32, mode="c")) for part in counts
        }, counts

    def write(self, tokenizer: Subwords, folder: Path) -> dict[str, Counter[str]]:
        """Write the files; return their counts."""
        parts = [*self.corpus.parts, *(["validation"] if self.share else [])]
        counts = {part: Counter(documents=0, bytes=0, words=0, removed=0) for part in parts}
        tested, leaked = set[bytes]().union(*self.tested.values()), set[bytes]()

        def lines() -> Iterator[tuple[str, str, bool]]:
            """Yield the part and text of each line, and whether it ends a document; a token never crosses lines."""
            for part, text in self.documents():
                if part == "removed":
                    counts["train"]["removed"] += 1
                    continue
                if part == "train" and hash_of(text) in tested:
                    leaked.add(hash_of(text))
                *others, last = f" {text}".split("\n")
                yield from ((part, f"{line}\n", False) for line in others)
                yield part, last, True

        with contextlib.ExitStack() as stack:
            files = {part: stack.enter_context(atomic_write(folder / f"{part}.bin")) for part in parts}
            bar = stack.enter_context(tqdm(unit="B", unit_scale=True, disable=None))  # None: shown on a terminal
            for file in files.values():
                file.write(np.array([END], np.int32).tobytes())
            remaining = lines()
            while batch := list(itertools.islice(remaining, LINES)):
                for (part, line, is_last), ids in zip(batch, tokenizer.encode_lines([line for _, line, _ in batch])):
                    files[part].write(np.array(ids + [END] * is_last, np.int32).tobytes())
                    content = line.encode()
                    counts[part].update(documents=is_last, bytes=len(content), words=len(content.split()))
                    bar.update(len(content))
        for part, digests in self.tested.items():
            counts[part]["in_train"] = sum(digest in leaked for digest in digests)
        return counts


def hash_of(text: str) -> bytes:
    """Return a short hash of a document."""
    return hashlib.sha256(text.encode()).digest()[:16]


def locked(path: Path) -> FileLock:
    """Return a lock of a path of the cache against other processes; its folder exists then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest.

    Of the protocol, `validation` holds out that share of the documents of train, unless the corpus has a validation
    text; `remove_test_sentences` removes documents of train that are in a test text.
    """

    has_folds = False
    sampled = ("train", "validation")
    shortest = 3  # of which two are <eos>
    long_stream = 0
    corpus: Documents  # type: ignore[assignment]
    tokenizer: Subwords

    def split(self) -> None:
        if self.task.get("extra_text"):
            raise UserError(f"task.extra_text needs labelled sentences, and corpus={self.corpus.name} has none.")
        self.task = DEFAULTS | self.task
        share = 0.0 if "validation" in self.corpus.parts else self.protocol["validation"]
        self.files = TokenFiles(self.corpus, share, bool(self.protocol["remove_test_sentences"]))

    def fit_tokenizer(self) -> Subwords:
        return self.files.tokenizer(*(self.task[key] for key in ("tokens", "vocab_size", "min_count")))

    def encode_texts(self) -> dict[Part, tuple[Stream, TextSize]]:
        streams, self.text_counts = self.files.open(self.tokenizer)
        texts: dict[Part, tuple[Stream, TextSize]] = {}
        for part, stream in streams.items():
            split, _, name = part.partition("_")
            counts = self.text_counts[part]
            texts[split, name] = stream, TextSize(len(stream) - 1, counts["bytes"], counts["words"])
        return texts

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if self.task["documents"] == "joined":
            return super().segments(stream)
        pieces = stream.split(1 << 24)  # so that little memory is needed
        ends = torch.cat([(ids == END).nonzero().flatten() + (k << 24) for k, ids in enumerate(pieces)])
        return ends[:-1], ends[1:] + 1  # from one <eos> to the next

    def count_rows(self) -> dict[str, int]:
        documents = {part: counts["documents"] for part, counts in self.text_counts.items()}
        counts = {"train": documents["train"], "validation": documents.get("validation", 0)}
        return {**counts, "removed_from_train": self.text_counts["train"]["removed"]}

    def count_tests(self) -> dict[str, dict[str, int]]:
        tests = {}
        for name in self.corpus.tests:
            stream, counts = self.streams["test", name], self.text_counts[f"test_{name}"]
            unknown = int((stream == UNKNOWN).sum())
            tests[name] = {"rows": counts["documents"], "in_train": counts["in_train"]}
            tests[name] |= {"tokens": len(stream), "unknown_tokens": unknown}
        return tests
