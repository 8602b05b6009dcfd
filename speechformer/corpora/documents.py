"""Read text of any size as documents, one after another, so that memory does not grow with the text.

    train_LM.txt            training text, or a folder train_LM with any number of .txt files
    test_LM_<name>.txt      a test text, or a folder; any number of them
    validation_LM.txt       text that chooses the checkpoint, or a folder; optional

`corpus.separator` stands between the documents of a file; white space around a document is dropped. `files` describes
the encoding.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from speechformer.corpora import stories
from speechformer.corpora.files import decode, find_folder, nfc_bytes
from speechformer.errors import UserError

PART = re.compile(r"(train|validation)_LM|test_LM_.+")
CHUNK = 1 << 20  # bytes that are read at once
BLANK_LINE = rb"\r?\n[ \t]*\r?\n"


@dataclass(frozen=True, eq=False)
class Documents:
    """A corpus of documents on disk.

    Attributes:
        where: the folder, or how the corpus was generated.
        sha256: of the names and contents of its files, in the normal form NFC.
        parts: the files of each part, by name without `_LM`: "train", "validation", "test_NAME".
        separator: between documents: "blank_line" or a text; None: each file is one.
        classes: none; the tasks on speeches have some.
    """

    name: str
    where: str
    sha256: str
    parts: dict[str, list[Path]]
    separator: str | None
    classes: ClassVar[list[str]] = []

    @property
    def identity(self) -> list[str | None]:
        """What the fingerprint of a run includes besides `sha256`."""
        return [self.separator]

    @property
    def tests(self) -> list[str]:
        """The names of the test texts."""
        return [part.removeprefix("test_") for part in self.parts if part.startswith("test_")]

    def documents(self, part: str) -> Iterator[str]:
        """Yield the documents of a part, without empty ones; none if there is no such part.

        Raises:
            UserError: a file is empty, or not as `files` describes it.
        """
        for path in self.parts.get(part, ()):
            yield from split_documents(path, self.separator)


def split_documents(path: Path, separator: str | None) -> Iterator[str]:
    """Yield the documents of a file, which is mapped into memory; see `Documents.documents`."""
    if not path.stat().st_size:
        raise UserError(f"{path}:1: the file is empty; fill it or remove it.")
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    forms = {unicodedata.normalize(form, separator or "") for form in ("NFC", "NFD")}
    written = b"|".join(re.escape(form.encode()) for form in forms)
    boundary = BLANK_LINE if separator == "blank_line" else written
    matches = re.finditer(boundary, content) if separator else ()
    start, line = 0, 1
    for end, after in itertools.chain((match.span() for match in matches), [(len(content), len(content))]):
        if text := decode(content[start:end], str(path), line).strip():
            yield text
        line += content[start:after].count(b"\n")
        start = after


def files_of_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each part that a folder has, by name: "train", "validation", "test_NAME"."""
    parts: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*_LM*.txt"), *folder.glob("*_LM*/*.txt")]):
        name = path.relative_to(folder).parts[0].removesuffix(".txt")
        if PART.fullmatch(name):
            parts.setdefault(name.replace("_LM", "", 1), []).append(path)
    return parts


def load_documents(config: Mapping[str, Any]) -> Documents:
    """Load the corpus of a `corpus` config with `name` "text" (`root`, `separator`) or "stories" (made to order).

    Raises:
        UserError: the folder or a file is missing.
    """
    missing = "No train_LM.txt or test_LM_<name>.txt in {}; set corpus.root=FOLDER, or try corpus=stories."
    folder, _ = find_folder(config, "text", "text", files_of_parts, missing)
    where = str(folder)
    if folder is None:
        folder, where = stories.folder_of(config)
    parts = files_of_parts(folder)
    for beginning, file in (("train", "train_LM.txt"), ("test_", "test_LM_<name>.txt")):
        if not any(part.startswith(beginning) for part in parts):
            raise UserError(f"{where} has no {file}, which task=lm needs.")
    digests = sorted((part, digest_of(files)) for part, files in parts.items())
    sha256 = hashlib.sha256(repr(digests).encode()).hexdigest()
    return Documents(config["name"], where, sha256, parts, config["separator"])


def digest_of(files: list[Path]) -> str:
    """Return the sha256 of the names and contents of text files in the normal form NFC."""
    digest = hashlib.sha256()
    for path in files:
        content, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while text := nfc_bytes(file.read(CHUNK) + file.readline()):  # no character crosses the end of a line
                content.update(text)
                size += len(text)
        digest.update(f"{path.name}\0{size}\0{content.hexdigest()}\0".encode())
    return digest.hexdigest()
