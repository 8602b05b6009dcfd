"""Read text of any size as documents, one piece after another, so that memory does not grow with the text.

    train_LM.txt            training text, or a folder train_LM with any number of .txt files
    test_LM_<name>.txt      a test text, or a folder; any number of them
    validation_LM.txt       text that chooses the checkpoint, or a folder; optional

`corpus.separator` stands between the documents of a file; white space around a document is dropped.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechformer.corpora import stories
from speechformer.corpora.files import cached_digest, check_file, find_folder
from speechformer.errors import UserError

PART = re.compile(r"(train|validation)_LM|test_LM_.+", re.IGNORECASE)
SEPARATORS = {"blank_line": re.compile(r"\n[ \t]*\n")}  # of `corpus.separator`; others are texts
CHUNK = 1 << 20  # characters that are read at once, and about the longest piece


@dataclass(frozen=True)
class Piece:
    """A document, or a piece of a long one that ends before white space.

    Attributes:
        first, last: whether it begins or ends a document.
    """

    text: str
    first: bool
    last: bool


@dataclass(frozen=True, eq=False)
class Documents:
    """A corpus of documents on disk.

    Attributes:
        where: the folder, or how the corpus was generated.
        sha256: of the names and contents of its files.
        parts: the files of each part, by name without `_LM`: "train", "validation", "test_NAME".
        digests: the sha256 of each part.
        separator: between documents; None: each file is one.
        classes: none; the tasks on speeches have some.
    """

    name: str
    where: str
    sha256: str
    parts: dict[str, list[Path]]
    digests: dict[str, str]
    separator: str | None
    classes: list[str] = field(default_factory=list)

    @property
    def identity(self) -> list[str | None]:
        """What the fingerprint of a run includes besides `sha256`."""
        return [self.separator]

    @property
    def tests(self) -> list[str]:
        """The names of the test texts."""
        return [part.removeprefix("test_") for part in self.parts if part.startswith("test_")]

    def pieces(self, part: str, progress: Callable[[int], object] | None = None) -> Iterator[Piece]:
        """Yield the documents of a part; `progress` is called with the bytes read since the last call."""
        for path in self.parts[part]:
            yield from split_documents(read_chunks(path, progress), self.separator)


def split_documents(chunks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """Split a text into documents, and a long document into pieces.

    A piece ends before white space, where every tokenizer of `subwords` begins a token. A stretch of a million
    characters without a space or line break is cut anywhere.
    """
    rest, first = "", True
    boundary = None if separator is None else SEPARATORS.get(separator) or re.compile(re.escape(separator))
    length = 0 if separator is None or separator in SEPARATORS else len(separator)

    def piece(text: str, last: bool) -> Iterator[Piece]:
        nonlocal first
        text = text.lstrip() if first else text
        text = text.rstrip() if last else text
        if text or (last and not first):
            yield Piece(text, first, last)
            first = last

    for chunk in chunks:
        *whole, rest = boundary.split(rest + chunk) if boundary else [rest + chunk]
        for text in whole:
            yield from piece(text, last=True)
        if len(rest) > CHUNK:
            end = len(rest) - length  # the separator may have begun
            cut = max(rest.rfind(" ", 1, end), rest.rfind("\n", 1, end))
            cut = end if cut < 0 else len(rest[:cut].rstrip()) or cut
            yield from piece(rest[:cut], last=False)
            rest = rest[cut:]
    yield from piece(rest, last=True)


def read_chunks(path: Path, progress: Callable[[int], object] | None = None) -> Iterator[str]:
    """Yield the text of a file, with LF at the ends of lines.

    Raises:
        UserError: it cannot be read, is empty, is not UTF-8, or has a NUL character.
    """
    number = 1
    try:
        with open(path, encoding="utf-8-sig") as file:
            empty = True
            while chunk := file.read(CHUNK):
                if "\0" in chunk:
                    number += chunk.count("\n", 0, chunk.index("\0"))
                    raise UserError(
                        f"{path}:{number}: there is a NUL character (is it UTF-16?); save the file as UTF-8."
                    )
                number += chunk.count("\n")
                if progress is not None:
                    progress(len(chunk.encode()))
                empty = False
                yield chunk
            if empty:
                raise UserError(f"{path}:1: the file is empty; fill it or remove it.")
    except UnicodeDecodeError as error:
        number = first_invalid_line(path)
        byte = error.object[error.start]
        raise UserError(f"{path}:{number}: byte {byte:#04x} is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct, rename or remove it.") from None


def first_invalid_line(path: Path) -> int:
    """Return the number of the first line of a file that is not UTF-8."""
    number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return number + error.object.count(b"\n", 0, error.start)
            number += chunk.count(b"\n")
    return number


def files_of_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each part that a folder has, by name: "train", "validation", "test_NAME".

    Raises:
        UserError: a part is both a file and a folder, a folder has no .txt file, or a name is not as it must be.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        name = path.name if path.is_dir() else path.stem if path.suffix.lower() == ".txt" else ""
        if not PART.fullmatch(name):
            continue
        if not re.fullmatch(PART.pattern, name) or (path.suffix != ".txt" and not path.is_dir()):
            raise UserError(f"{path}: rename it to train_LM.txt, validation_LM.txt or test_LM_NAME.txt.")
        part = name.replace("_LM", "", 1)
        if part in parts:
            raise UserError(f"{path}: there are both a file and a folder of this name; remove one.")
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} has no .txt file; put the documents there, or remove the folder.")
        for file in files:
            check_file(file)
        parts[part] = files
    return parts


def digest_of(files: list[Path]) -> str:
    """Return the sha256 of the names and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        content = cached_digest(path, lambda file: hashlib.file_digest(file, "sha256").hexdigest())
        digest.update(f"{path.name}\0{path.stat().st_size}\0{content}\0".encode())
    return digest.hexdigest()


def load_documents(config: Mapping[str, Any]) -> Documents:
    """Load the corpus of a `corpus` config with `name` "text" (`root`, `separator`) or "stories" (made to order).

    Raises:
        UserError: the folder or a file is missing or invalid.
    """
    name, separator = config["name"], config["separator"]
    if name == "stories":
        folder, where = stories.folder_of(config)
    else:
        root, searched = find_folder("text", config["root"], files_of_parts)
        if root is None:
            raise UserError(
                f"No train_LM.txt or test_LM_<name>.txt in {' or in '.join(searched)}; set corpus.root=FOLDER, or "
                "try corpus=stories."
            )
        folder, where = root, str(root.resolve())
    parts = files_of_parts(folder)
    for beginning, file in (("train", "train_LM.txt"), ("test_", "test_LM_<name>.txt")):
        if not any(part.startswith(beginning) for part in parts):
            raise UserError(f"{where} has no {file}, which task=lm needs.")
    if "test_mean" in parts:
        raise UserError("test_LM_mean.txt: 'mean' is the name of the mean over the tests; rename the file.")
    try:
        digests = {part: digest_of(files) for part, files in parts.items()}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); correct or remove it.") from None
    whole = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    return Documents(name, where, whole, parts, digests, separator)
