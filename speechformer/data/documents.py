"""The data of `task=lm` on documents: token files, of which a batch reads what it needs, so that any text will do.

The first run tokenizes each part of the text, into a token file in the user's cache folder. Later runs, and other
processes, map it into memory. Evaluation during training reads a fixed sample, so the text may have any size.

Shapes: see `batches`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from speechformer import console
from speechformer.corpora.documents import CHUNK, Documents, digest_of
from speechformer.corpora.files import cache_directory, delete_leftovers
from speechformer.corpora.special_tokens import END
from speechformer.corpora.splits import held_out
from speechformer.corpora.subwords import Subwords
from speechformer.data.batches import Example, StreamRows, WindowBatches, Windows, sample_blocks
from speechformer.data.speeches import StreamData, TextSize, check_length
from speechformer.data.token_file import TokenFile, open_token_file, write_token_files
from speechformer.errors import UserError

FITTED, ENCODED = 32 << 20, 4 << 20  # characters that a vocabulary is fitted on, and that are encoded together
VERSION = 1  # of what is in token files


def cache_key(*settings: Any) -> str:
    """Return the name of a cached file that depends on these settings, as plain data."""
    return hashlib.sha256(json.dumps([VERSION, *settings]).encode()).hexdigest()


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest.

    Of the protocol, `validation` holds out that share of the documents of train, by a hash of their text, unless the
    corpus has a validation text; `remove_test_sentences` removes documents of train that are in a test text.
    """

    corpus: Documents

    def split(self) -> None:
        share = self.protocol["validation"]
        if not 0 <= share < 1:
            raise UserError(f"protocol.validation is a share of train in [0, 1), not {share}.")
        self.share = 0.0 if "validation" in self.corpus.parts else share
        self.folder = cache_directory() / "tokens"

    @property
    def train_key(self) -> list[Any]:
        """What decides which documents train and validation have."""
        others = sorted(digest for part, digest in self.corpus.digests.items() if part != "train")
        removes = self.protocol["remove_test_sentences"]
        return [self.corpus.digests["train"], self.corpus.separator, self.share, removes, others]

    @functools.cached_property
    def tested_documents(self) -> Counter[bytes]:
        """How often each document is in a test text, by its hash."""
        parts = [f"test_{name}" for name in self.corpus.tests]
        return Counter(hash_of(piece.text) for part in parts for piece in self.corpus.pieces(part) if piece.first)

    @functools.cached_property
    def excluded_documents(self) -> set[bytes]:
        """The hashes of the documents that may not be in train."""
        if not self.protocol["remove_test_sentences"]:
            return set()
        pieces = self.corpus.pieces("validation") if "validation" in self.corpus.parts else ()
        return {*self.tested_documents} | {hash_of(piece.text) for piece in pieces if piece.first}

    def part_of(self, text: str) -> str | None:
        """Return whether a document of train, which begins with this text, is for train or validation, or removed."""
        if self.excluded_documents and hash_of(text) in self.excluded_documents:
            return None
        return "validation" if self.share and held_out(beginning(text), self.share) else "train"

    def fit_tokenizer(self) -> Subwords:
        """Return the cached tokenizer, or fit one on at most 32 million characters of train, evenly drawn."""
        settings = [self.task[key] for key in ("tokens", "vocab_size", "min_count")]
        key = cache_key(*self.train_key, *settings, metadata.version("tokenizers"))
        path = self.folder / f"{key[:32]}.json"
        with locked(path):
            if path.exists():
                return Subwords.load(path)
            console.say("Fitting a vocabulary, only this once.")
            tokenizer = Subwords.fit(self.vocabulary_texts(), *settings)
            self.check_unchanged()
            tokenizer.save(path)
        return tokenizer

    def check_unchanged(self) -> None:
        """Require that the text is still that of the corpus."""
        for part, files in self.corpus.parts.items():
            if digest_of(files) != self.corpus.digests[part]:
                raise UserError(f"{files[0]}: the text changed while it was read; run the command again.")

    def vocabulary_texts(self) -> Iterator[str]:
        """Yield the pieces of train, or if they are too many a part of them, drawn by a hash."""
        size = sum(path.stat().st_size for path in self.corpus.parts["train"])
        part: str | None = None
        for piece in self.corpus.pieces("train"):
            part = self.part_of(piece.text) if piece.first else part
            if part == "train" and (size <= FITTED or held_out(f"vocabulary {piece.text[:1000]}", FITTED / size)):
                yield piece.text

    def encode(self) -> None:
        stride = self.checked_stride()
        files = self.token_files("train")
        self.files = {("train", ""): files["train"]}
        if "validation" in self.corpus.parts or self.share:
            own = files if self.share else self.token_files("validation")
            self.files["validation", ""] = own["validation"]
        self.files |= {("test", name): self.token_files(f"test_{name}")[f"test_{name}"] for name in self.corpus.tests}
        self.check_split()
        for (split, name), file in self.files.items():
            least = self.block_size + 1 if split == "train" else 3  # of which two are <eos>
            check_length(len(file), f"test_LM_{name}.txt" if name else split, least)
        self.stream = self.files["train", ""]
        self.monitored, self.tested, self.longer_contexts, self.text_sizes = {}, {}, {}, {}
        for (split, name), file in self.files.items():
            if split != "test":
                blocks = sample_blocks(*self.segments(file), self.block_size, self.task["evaluation_tokens"])
                self.monitored[split, name] = StreamRows(file, blocks)
                continue
            self.tested["test", name] = self.cover(file, self.block_size, self.block_size)
            self.tested["test_sliding", name] = self.cover(file, self.block_size, stride)
            for length in self.task["lengths"]:
                self.longer_contexts[f"test_length_{length}", name] = self.cover(file, length, length)
            self.text_sizes[name] = TextSize(len(file) - 1, file.counts["bytes"], file.counts["words"])

    def check_split(self) -> None:
        """Require documents on both sides, if some are held out."""
        counts = {split: file.counts["documents"] for (split, _), file in self.files.items()}
        if self.share and not (counts["train"] and counts["validation"]):
            raise UserError(
                f"{self.corpus.where}: {counts['train']} documents are left to train and {counts['validation']} are "
                "held out, and both need some. Name the text between documents with corpus.separator, add "
                "validation_LM.txt, or choose the checkpoint on test with protocol.validation=0."
            )

    def segments(self, file: TokenFile) -> tuple[Tensor, Tensor]:
        """Return where what is evaluated by itself begins and ends: all of a text, or each document of it."""
        if self.task["documents"] == "joined":
            return torch.tensor([0]), torch.tensor([len(file)])
        places = torch.from_numpy(np.array(file.ends))
        return places[:-1], places[1:] + 1  # from one <eos> to the next

    def cover(self, file: TokenFile, length: int, stride: int) -> StreamRows:
        """Return the windows that evaluate a text."""
        return StreamRows(file, Windows.cover(*self.segments(file), length, stride))

    def token_files(self, part: str) -> dict[str, TokenFile]:
        """Open the token files of a part of the corpus, or tokenize it: "train" may have one of validation, too."""
        names = ["validation", "train"] if part == "train" and self.share else [part]
        text = self.train_key if part == "train" else [self.corpus.digests[part], self.corpus.separator]
        key = cache_key(*text, hashlib.sha256(self.tokenizer.tokenizer.to_str().encode()).hexdigest())
        paths = {name: self.folder / f"{key[:32]}-{name.partition('_')[0]}.bin" for name in names}
        opened = {name: open_token_file(path, key) for name, path in paths.items()}
        if None in opened.values():
            with locked(paths[part]):
                opened = {name: open_token_file(path, key) for name, path in paths.items()}
                if None in opened.values():  # no other process has made them since
                    self.tokenize(part, list(paths.values()), names, key)
                    opened = {name: open_token_file(path, key) for name, path in paths.items()}
        if None in opened.values():
            raise UserError(f"{paths[part]} cannot be read after it was written; is the disk full or damaged?")
        return {name: file for name, file in opened.items() if file is not None}

    def tokenize(self, part: str, paths: list[Path], names: list[str], key: str) -> None:
        """Write the token files of a part of the corpus."""
        size = sum(path.stat().st_size for path in self.corpus.parts[part])
        console.say(f"Tokenizing {part} ({size / 1e6:,.1f} MB), only this once, into {paths[-1]}")
        for leftover in self.folder.glob("*.partial"):  # of processes that were killed
            delete_leftovers(self.folder / leftover.name.rsplit(".", 2)[0])
        disable = True if int(os.environ.get("LOCAL_RANK", 0)) else None  # None: shown on a terminal
        with (
            tqdm(total=size, unit="B", unit_scale=True, desc=part, leave=False, disable=disable) as bar,
            write_token_files(paths, key, len(self.tokenizer)) as writers,
        ):
            own: str | None = part
            trained, removed = set[bytes](), 0  # documents of tests that are in train; those that are left out
            for pieces in in_batches(self.corpus.pieces(part, bar.update)):
                ids = self.tokenizer.encode_pieces(
                    [piece.text for piece in pieces], [piece.first for piece in pieces]
                )
                chosen: dict[str | None, tuple[list[np.ndarray], list[str]]] = {name: ([], []) for name in names}
                for piece, ids_of_piece in zip(pieces, ids):
                    if part == "train" and piece.first:
                        own, digest = self.part_of(piece.text), hash_of(piece.text)
                        removed += own is None
                        if own == "train" and digest in self.tested_documents:
                            trained.add(digest)
                    if own in chosen:
                        chosen[own][0].append(np.append(ids_of_piece, END) if piece.last else ids_of_piece)
                        chosen[own][1].append(f"{piece.text}\n" if piece.last else piece.text)
                for writer, name in zip(writers, names):
                    if chosen[name][0]:
                        writer.add(chosen[name][0], "".join(chosen[name][1]).encode())
            self.check_unchanged()
            leaked = sum(self.tested_documents[digest] for digest in trained) if part == "train" else 0
            writers[-1].counts.update(leaked=leaked, removed=removed)

    @property
    def chosen_on(self) -> str:
        return "validation" if ("validation", "") in self.files else "test"

    def count(self) -> dict[str, Any]:
        tests = {}
        for name in self.corpus.tests:
            own = self.files["test", name].counts
            tests[name] = {"rows": own["documents"], "tokens": own["tokens"], "unknown_tokens": own["unknown"]}
        held = self.files.get(("validation", ""))
        evaluated = {split: rows.windows.tokens for (split, _), rows in self.monitored.items()}
        train = self.files["train", ""].counts
        return {
            "train": train["documents"],
            "validation": held.counts["documents"] if held else 0,
            "removed_from_train": train["removed"],
            "test": sum(test["rows"] for test in tests.values()),
            "test_in_train": train["leaked"],
            "tests": tests,
            "train_tokens": len(self.files["train", ""]) - 1,
            "evaluated_tokens": evaluated,
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": 0,
        }

    def examples(self) -> list[Example]:
        """Return the beginning of the first text of the part that selects the checkpoint."""
        first = next(file for (split, _), file in self.files.items() if split == self.chosen_on)
        ids = first[torch.arange(1, min(17, len(first)))]
        return [Example([ids], [self.tokenizer.tokens(ids.tolist())])]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the fraction of unknown tokens in the validation text and in each test."""
        rates: dict[str, float | None] = {}
        for (split, name), file in self.files.items():
            if split != "train":
                rate = file.counts["unknown"] / (len(file) - 1)
                rates["_".join(filter(None, (split, "unknown_rate", name)))] = rate
        tests = [
            file.counts["unknown"] / (len(file) - 1) for (split, _), file in self.files.items() if split == "test"
        ]
        return rates | {"test_unknown_rate_mean": sum(tests) / len(tests)}

    def corpus_line(self) -> str:
        corpus, counts = self.corpus, self.counts
        held = f", selects on {counts['validation']:,}" if counts["validation"] else ""
        return (
            f"Corpus {corpus.name} ({corpus.where}): trains on {counts['train']:,} documents of "
            f"{counts['train_tokens']:,} tokens{held}, tests on {counts['test']:,}, of which "
            f"{counts['test_in_train']:,} appear verbatim in the training set."
        )

    def train_dataloader(self) -> WindowBatches:
        return WindowBatches(self.stream, self.block_size + 1, self.batch_size, self.seed, self.shard)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file of the cache against other processes; a `UserError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield
    except OSError as error:
        if error.filename is not None and Path(error.filename).parent != path.parent:
            raise UserError(
                f"{error.filename}: {error.strerror}; correct the file, or run the command again."
            ) from None
        raise UserError(
            f"{error.filename or path}: {error.strerror}. Tokens need a cache folder; make room, or set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error


def hash_of(text: str) -> bytes:
    """Return a short hash of the first piece of a document."""
    return hashlib.sha256(beginning(text).encode()).digest()[:16]


def beginning(text: str) -> str:
    """Return what a document is known by: all of a short one, wherever a long one is cut into pieces."""
    return text[: CHUNK // 2]


def in_batches(pieces: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield pieces in lists of about `ENCODED` characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= ENCODED:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
