"""Tokenize the parts of a corpus of documents, once: a vocabulary and token files in the user's cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from speechformer import console
from speechformer.corpora.documents import CHUNK, Documents, digest_of
from speechformer.corpora.files import cache_directory, delete_leftovers
from speechformer.corpora.special_tokens import END
from speechformer.corpora.splits import held_out
from speechformer.corpora.subwords import Subwords
from speechformer.data.token_file import TokenFile, open_token_file, write_token_files
from speechformer.errors import UserError
from speechformer.runs.rank import local_rank

FITTED, ENCODED = 32 << 20, 4 << 20  # characters that a vocabulary is fitted on, and that are encoded together
VERSION = 1  # of what is in token files


def cache_key(*settings: Any) -> str:
    """Return the name of a cached file that depends on these settings, as plain data."""
    return hashlib.sha256(json.dumps([VERSION, *settings]).encode()).hexdigest()


class TokenCache:
    """The vocabulary and the token files of a corpus under a protocol.

    Of the protocol, `validation` holds out that share of the documents of train, by a hash of their text, unless the
    corpus has a validation text; `remove_test_sentences` removes documents of train that are in a test text.

    Raises:
        UserError: the share is no share.
    """

    def __init__(self, corpus: Documents, protocol: Mapping[str, Any]) -> None:
        share = protocol["validation"]
        if not 0 <= share < 1:
            raise UserError(f"protocol.validation is a share of train in [0, 1), not {share}.")
        self.corpus, self.removes = corpus, bool(protocol["remove_test_sentences"])
        self.share = 0.0 if "validation" in corpus.parts else share
        self.folder = cache_directory() / "tokens"

    @property
    def train_key(self) -> list[Any]:
        """What decides which documents train and validation have."""
        others = sorted(digest for part, digest in self.corpus.digests.items() if part != "train")
        return [self.corpus.digests["train"], self.corpus.separator, self.share, self.removes, others]

    @functools.cached_property
    def tested_documents(self) -> Counter[bytes]:
        """How often each document is in a test text, by its hash."""
        parts = [f"test_{name}" for name in self.corpus.tests]
        return Counter(hash_of(piece.text) for part in parts for piece in self.corpus.pieces(part) if piece.first)

    @functools.cached_property
    def excluded_documents(self) -> set[bytes]:
        """The hashes of the documents that may not be in train."""
        if not self.removes:
            return set()
        pieces = self.corpus.pieces("validation") if "validation" in self.corpus.parts else ()
        return {*self.tested_documents} | {hash_of(piece.text) for piece in pieces if piece.first}

    def part_of(self, text: str) -> str | None:
        """Return whether a document of train, which begins with this text, is for train or validation, or removed."""
        if self.excluded_documents and hash_of(text) in self.excluded_documents:
            return None
        return "validation" if self.share and held_out(beginning(text), self.share) else "train"

    def tokenizer(self, kind: str, size: int | None, min_count: int) -> Subwords:
        """Return the cached tokenizer, or fit one on at most 32 million characters of train, evenly drawn."""
        settings = [kind, size, min_count]
        key = cache_key(*self.train_key, *settings, metadata.version("tokenizers"))
        path = self.folder / f"{key[:32]}.json"
        with locked(path):
            if path.exists():
                return Subwords.load(path)
            console.say("Fitting a vocabulary, only this once.")
            tokenizer = Subwords.fit(self.vocabulary_texts(), kind, size, min_count)
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

    def files(self, part: str, tokenizer: Subwords) -> dict[str, TokenFile]:
        """Open the token files of a part of the corpus, or tokenize it: "train" may have one of validation, too."""
        names = ["validation", "train"] if part == "train" and self.share else [part]
        text = self.train_key if part == "train" else [self.corpus.digests[part], self.corpus.separator]
        key = cache_key(*text, hashlib.sha256(tokenizer.tokenizer.to_str().encode()).hexdigest())
        paths = {name: self.folder / f"{key[:32]}-{name.partition('_')[0]}.bin" for name in names}

        def open_files() -> dict[str, TokenFile] | None:
            opened = {name: file for name, path in paths.items() if (file := open_token_file(path, key)) is not None}
            return opened if len(opened) == len(paths) else None

        files = open_files()
        if files is None:
            with locked(paths[part]):
                files = open_files()
                if files is None:  # no other process has made them since
                    self.tokenize(part, tokenizer, paths, key)
                    files = open_files()
        if files is None:
            raise UserError(f"{paths[part]} cannot be read after it was written; is the disk full or damaged?")
        return files

    def tokenize(self, part: str, tokenizer: Subwords, paths: Mapping[str, Path], key: str) -> None:
        """Write the token files of a part of the corpus."""
        size = sum(path.stat().st_size for path in self.corpus.parts[part])
        console.say(f"Tokenizing {part} ({size / 1e6:,.1f} MB), only this once, into {paths[part]}")
        for leftover in self.folder.glob("*.partial"):  # of processes that were killed
            delete_leftovers(self.folder / leftover.name.rsplit(".", 2)[0])
        disable = True if local_rank() else None  # None: shown on a terminal
        with (
            tqdm(total=size, unit="B", unit_scale=True, desc=part, leave=False, disable=disable) as bar,
            write_token_files([*paths.values()], key, len(tokenizer)) as writers,
        ):
            destination: str | None = part
            trained, removed = set[bytes](), 0  # documents of tests that are in train; those that are left out
            for pieces in in_batches(self.corpus.pieces(part, bar.update)):
                encoded = tokenizer.encode_pieces([piece.text for piece in pieces], [piece.first for piece in pieces])
                ids, texts = defaultdict[str, list[np.ndarray]](list), defaultdict[str, list[str]](list)
                for piece, ids_of_piece in zip(pieces, encoded):
                    if part == "train" and piece.first:
                        destination, digest = self.part_of(piece.text), hash_of(piece.text)
                        removed += destination is None
                        if destination == "train" and digest in self.tested_documents:
                            trained.add(digest)
                    if destination is not None:
                        ids[destination].append(np.append(ids_of_piece, END) if piece.last else ids_of_piece)
                        texts[destination].append(f"{piece.text}\n" if piece.last else piece.text)
                for writer, name in zip(writers, paths):
                    if ids[name]:
                        writer.add(ids[name], "".join(texts[name]).encode())
            self.check_unchanged()
            leaked = sum(self.tested_documents[digest] for digest in trained) if part == "train" else 0
            writers[-1].counts.update(leaked=leaked, removed=removed)


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
    """Return a short hash of the beginning of a document."""
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
