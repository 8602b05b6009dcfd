"""A text as token ids in a file that is mapped into memory: it opens at once, and processes share its pages.

    ids          uint16, or uint32 for a vocabulary of more than 65,536 tokens
    documents    int64: the places of <eos>
    header       JSON: key, type, counts, and the sha256 of the two above and the counts
    its length   8 bytes

A text is <eos>, then for each document its tokens and <eos>. So <eos> begins and ends a document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from speechformer.corpora.files import atomic_write, cached_digest
from speechformer.corpora.special_tokens import END, UNKNOWN

IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))  # as for bytes.split


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file.

    Attributes:
        ids: of all n tokens, mapped, [n].
        ends: the places of <eos>: 0, and after each document.
        counts: "tokens" (n), "unknown" ones, "documents", and "bytes" and "words" of the text.
    """

    ids: np.ndarray
    ends: np.ndarray
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, places: Tensor) -> Tensor:
        """Return the ids at some places, int64, of the same shape."""
        return torch.from_numpy(self.ids[places.numpy()].astype(np.int64))


class TokenWriter:
    """Appends pieces of documents to a token file; `write_token_files` opens and closes it."""

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self.file, self.dtype = file, np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.digest, self.ends, self.counts = hashlib.sha256(), array("q"), Counter[str]()
        self.write(np.array([END]))

    def write(self, ids: np.ndarray) -> None:
        """Append ids, of which <eos> ends a document."""
        content = ids.astype(self.dtype).tobytes()
        self.digest.update(content)
        self.file.write(content)
        ends = np.flatnonzero(ids == END) + self.counts["tokens"]
        self.ends.frombytes(ends.astype(np.int64).tobytes())
        self.counts["tokens"] += len(ids)
        self.counts["unknown"] += int(np.count_nonzero(ids == UNKNOWN))

    def add(self, pieces: Sequence[np.ndarray], text: bytes) -> None:
        """Append the ids of pieces; their text, with white space between them, is for the counts."""
        self.write(np.concatenate(pieces))
        is_space = IS_SPACE[np.frombuffer(text, np.uint8)]
        self.counts["bytes"] += len(text)
        self.counts["words"] += int(np.count_nonzero(is_space[:-1] & ~is_space[1:])) + int(not is_space[0])

    def close(self, key: str) -> None:
        """Append what describes the ids."""
        ends = self.ends.tobytes()
        self.digest.update(ends)
        self.counts["documents"] = len(self.ends) - 1
        self.digest.update(json.dumps(self.counts).encode())
        header = {
            "key": key,
            "dtype": self.dtype.name,
            "counts": dict(self.counts),
            "sha256": self.digest.hexdigest(),
        }
        content = json.dumps(header).encode()
        self.file.write(ends + content + len(content).to_bytes(8, "little"))


@contextlib.contextmanager
def write_token_files(paths: Sequence[Path], key: str, vocabulary: int) -> Iterator[list[TokenWriter]]:
    """Write token files atomically, the last one last; none is replaced if the block raises."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(atomic_write(path)) for path in reversed(paths)]
        writers = [TokenWriter(file, vocabulary) for file in reversed(files)]
        yield writers
        for writer in writers:
            writer.close(key)


def open_token_file(path: Path, key: str) -> TokenFile | None:
    """Map a token file into memory; None if there is none, or it is incomplete, damaged or of another text."""
    try:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # an empty file
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UnicodeDecodeError):
        size = int.from_bytes(content[-8:], "little")
        header: dict[str, Any] = json.loads(content[-8 - size : -8])
        counts, dtype = header["counts"], np.dtype(header["dtype"])
        middle, end = counts["tokens"] * dtype.itemsize, len(content) - 8 - size
        if header["key"] == key and middle + 8 * (counts["documents"] + 1) == end:

            def digest_of(_: BinaryIO) -> str:
                digest = hashlib.sha256(memoryview(content)[:end])
                digest.update(json.dumps(counts).encode())
                return digest.hexdigest()

            if cached_digest(path, digest_of) == header["sha256"]:
                ids = np.frombuffer(content, dtype, counts["tokens"])
                return TokenFile(ids, np.frombuffer(content, np.int64, counts["documents"] + 1, middle), counts)
    return None
