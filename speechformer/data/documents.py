"""The data of `task=lm` on documents: text of any size as token ids in files that are mapped into memory.

A text is <eos>, then for each document its tokens and <eos>; so <eos> begins and ends a document. If the tokenizer of
a model from elsewhere puts another token in front of a text, that token begins each document, and so the text.

The ids of each part are in a file of int32. The files of a corpus are in a folder of the user's cache, named by a
hash of the text, the tokenizer and the protocol, with `counts.json`. So the first run tokenizes the text; later ones
only compare the sha256 of the files, which takes less than reading the text, and share their pages.

Evaluation during training reads a fixed sample, so the text may have any size. Shapes: see `batches`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from speechformer import console
from speechformer.corpora.documents import Documents
from speechformer.corpora.files import atomic_write, cache_directory, make_once, read_file, write_file
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.splits import held_out
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.batches import Part, Stream
from speechformer.data.speeches import StreamData
from speechformer.errors import UserError

FITTED = 32 << 20  # characters that a vocabulary is fitted on
SLICE = 1 << 20  # characters of a long document that are drawn for the vocabulary together
BATCH = 1 << 20  # characters that are encoded together
VERSION = 4  # of what is in token files
COUNTS, VOCABULARY = "counts.json", "tokenizer.json"

Counts = dict[str, int]  # see `DocumentData.write`


def hash_of(text: str) -> bytes:
    """Return a short hash of a document."""
    return hashlib.sha256(text.encode()).digest()[:16]


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest.

    Of the protocol, `validation` holds out that share of the documents of train, unless the corpus has a validation
    text; `remove_test_sentences` removes documents of train that are in a test or validation text.
    """

    has_folds = False
    sampled = ("train", "validation")
    shortest = 3  # of which two are <eos>
    long_stream = 0
    corpus: Documents  # type: ignore[assignment]
    tokenizer: Subwords | PretrainedTokenizer

    def split(self) -> None:
        if self.task["extra_text"]:
            raise UserError(f"task.extra_text needs labelled sentences, and corpus={self.corpus.name} has none.")
        self.share = 0.0 if "validation" in self.corpus.parts else self.protocol["validation"]

    def path(self, *settings: str | int | None) -> Path:
        """Return a path in the cache that depends on the corpus, the protocol and these settings."""
        corpus = [self.corpus.sha256, self.corpus.separator, self.share, self.protocol["remove_test_sentences"]]
        key = hashlib.sha256(json.dumps([VERSION, *corpus, *settings]).encode()).hexdigest()
        return cache_directory() / "tokens" / key[:32]

    @functools.cached_property
    def test_hashes(self) -> dict[str, list[bytes]]:
        """The hashes of the documents of each test."""
        parts = [f"test_{name}" for name in self.corpus.tests]
        return {part: list(map(hash_of, self.corpus.documents(part))) for part in parts}

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the part and text of each document; what must not be in train is of the part "removed"."""
        excluded = set(map(hash_of, self.corpus.documents("validation"))).union(*self.test_hashes.values())
        for part in self.corpus.parts:
            for text in self.corpus.documents(part):
                if part == "train" and self.protocol["remove_test_sentences"] and hash_of(text) in excluded:
                    yield "removed", text
                else:
                    yield "validation" if part == "train" and held_out(text, self.share) else part, text

    def fit_tokenizer(self) -> Subwords:
        """Return the cached tokenizer, or fit one on at most 32 million characters of train, evenly drawn."""
        settings = [self.task[key] for key in ("tokens", "vocab_size", "min_count")]
        folder = self.path("tokenizer", *settings, metadata.version("tokenizers"))

        def make() -> Iterable[str]:
            console.say("Fitting a vocabulary, only this once.")
            Subwords.fit(self.vocabulary_texts(), *settings).save(folder / VOCABULARY)
            return [VOCABULARY]

        make_once(folder, make)
        return Subwords.load(folder / VOCABULARY)

    def vocabulary_texts(self) -> Iterator[str]:
        """Yield the documents of train, or if they are too long slices of them, drawn by a hash."""
        share = FITTED / sum(path.stat().st_size for path in self.corpus.parts["train"])
        for text in (text for part, text in self.documents() if part == "train"):
            slices = (text[start : start + SLICE] for start in range(0, len(text), SLICE))
            yield from (piece for piece in slices if held_out(f"vocabulary {piece[:1000]}", share))

    def encode_texts(self) -> dict[Part, tuple[Stream, int, int]]:
        """Return the ids of each part, mapped, its bytes and its words; write the files first if they are not there.

        The parts are those of the corpus, and "validation" if a share is held out.
        """
        if isinstance(self.tokenizer, Tokenizer):  # of a run on speeches
            raise UserError(
                "init_from: that run has words of sentences; for documents take one with task.tokens=bpe."
            )
        folder = self.path(self.tokenizer.as_json())

        def make() -> Iterable[str]:
            console.say(f"Tokenizing {self.corpus.where}, only this once, into {folder}")
            counts = self.write(folder)
            write_file(folder / COUNTS, json.dumps(counts).encode())
            return [COUNTS, *(f"{part}.bin" for part in counts)]

        make_once(folder, make)
        self.text_counts: dict[str, Counts] = json.loads(read_file(folder / COUNTS))
        texts: dict[Part, tuple[Stream, int, int]] = {}
        for part, counts in self.text_counts.items():
            split, _, name = part.partition("_")
            stream = torch.from_file(str(folder / f"{part}.bin"), size=counts["tokens"], dtype=torch.int32)
            texts[split, name] = stream, counts["bytes"], counts["words"]
        return texts

    def write(self, folder: Path) -> dict[str, Counter[str]]:
        """Write the files; return the counts of each part.

        These are "rows", its documents, its ids and the bytes and words of its text. Train also has "removed", its
        documents that were removed, and a test "in_train", its documents that are in train.
        """
        end, unknown = self.tokenizer.end, self.tokenizer.unknown
        assert end is not None  # `init_from` needs a tokenizer that has it for this corpus
        parts = [*self.corpus.parts, *(["validation"] if self.share else [])]
        first = [end] if self.tokenizer.start == end else []  # which the first document begins with
        empty = dict.fromkeys(("rows", "unknown_tokens", "bytes", "words", "removed"), 0) | {"tokens": len(first)}
        counts = {part: Counter(empty) for part in parts}
        tested, leaked = set[bytes]().union(*self.test_hashes.values()), set[bytes]()

        def batches() -> Iterator[list[tuple[str, str, bool]]]:
            """Yield pieces of documents that are encoded together: part, text, and whether it ends a document."""
            batch, size = list[tuple[str, str, bool]](), 0
            for part, text in self.documents():
                if part == "removed":
                    counts["train"]["removed"] += 1
                    continue
                if part == "train" and hash_of(text) in tested:
                    leaked.add(hash_of(text))
                pieces = self.tokenizer.pieces(text)
                for number, piece in enumerate(pieces, start=1):
                    batch.append((part, piece, number == len(pieces)))
                    size += len(piece)
                    if size >= BATCH:
                        yield batch
                        batch, size = [], 0
            yield batch

        with contextlib.ExitStack() as stack:
            files = {part: stack.enter_context(atomic_write(folder / f"{part}.bin")) for part in parts}
            bar = stack.enter_context(tqdm(unit="B", unit_scale=True, disable=None))  # None: shown on a terminal
            for file in files.values():
                file.write(np.array(first, np.int32).tobytes())
            for batch in batches():
                encoded = self.tokenizer.encode_pieces([piece for _, piece, _ in batch])
                for (part, piece, is_last), ids in zip(batch, encoded):
                    is_open = is_last and ids[-1:] != [end]  # a tokenizer may put <eos> behind a text by itself
                    ids, content = ids + [end] * is_open, piece.encode()
                    files[part].write(np.array(ids, np.int32).tobytes())
                    counts[part].update(rows=is_last, tokens=len(ids), unknown_tokens=ids.count(unknown))
                    counts[part].update(bytes=len(content), words=len(content.split()))
                    bar.update(len(content))
        for part, digests in self.test_hashes.items():
            counts[part]["in_train"] = sum(digest in leaked for digest in digests)
        return counts

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if self.task["documents"] == "joined":
            return super().segments(stream)
        start, pieces = self.tokenizer.start, stream.split(1 << 24)  # so that little memory is needed
        starts = [(ids == start).nonzero().flatten() + (k << 24) for k, ids in enumerate(pieces)]
        is_shared = start == self.tokenizer.end  # from one <eos> to the next
        places = torch.cat(starts if is_shared else [*starts, torch.tensor([len(stream)])])
        return places[:-1], places[1:] + is_shared

    def count_rows(self) -> dict[str, int]:
        rows = {part: self.text_counts.get(part, {}).get("rows", 0) for part in ("train", "validation")}
        return {**rows, "removed_from_train": self.text_counts["train"]["removed"]}

    def count_tests(self) -> dict[str, dict[str, int]]:
        keys = ("rows", "in_train", "tokens", "unknown_tokens")
        return {name: {key: self.text_counts[f"test_{name}"][key] for key in keys} for name in self.corpus.tests}
