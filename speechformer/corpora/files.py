"""Read text files strictly, find corpus folders, write files atomically.

Text is UTF-8 with or without byte order mark, and with or without a final newline. Lines end with LF or CRLF. Any
other character, such as U+2028, U+0085, VT or FF, is part of a line, as for `grep` and `wc`. Anything else is an
error: nothing is repaired or skipped.

Text is read in the normal form NFC, because a character such as "é" has two forms in Unicode: one code point, or a
letter and an accent. Two copies of a sentence are equal in whatever form they were saved.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from filelock import FileLock

from speechformer import console
from speechformer.errors import UserError
from speechformer.paths import path_of

ENVIRONMENT = "SPEECHFORMER_DATA"
SUMS = "sha256.json"  # of the files in a folder of the cache


def cache_directory() -> Path:
    """Return the user's cache folder, where `python -m speechformer.download` puts its files."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("speechformer"))


def find_folder(
    config: Mapping[str, Any], name: str, folder_name: str, valid: Callable[[Path], object], missing: str
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the folder of an installed corpus, or None for a generated one, and the settings of that corpus.

    Args:
        config: the group `corpus`; with the name "auto" it has the settings of the installed corpus under `name`, and
            those of the sample, which is the second choice, under "sample".
        name: of the installed corpus.
        folder_name: of its folder in $SPEECHFORMER_DATA and in the user cache. If `corpus.root` is set, nothing else
            is searched.
        valid: whether a folder has such a corpus.
        missing: the error if `config` demands the installed corpus, and it is nowhere; {} stands for the places.
    """
    is_auto = config["name"] == "auto"
    if not is_auto and config["name"] != name:
        return None, config
    settings = config[name] if is_auto else config
    data, cache, root = os.environ.get(ENVIRONMENT), cache_directory() / folder_name, settings["root"]
    places = {f"${ENVIRONMENT}/{folder_name} ({data or 'not set'})": path_of(data or os.devnull) / folder_name}
    places[f"the user cache ({cache})"] = cache
    if root is not None:
        folder = path_of(root)
        places = {f"corpus.root ({root})" + ", which does not exist" * (not folder.exists()): folder}
    for folder in places.values():
        if folder.is_dir() and valid(folder):
            return folder, settings
    if not is_auto or root is not None:
        raise UserError(missing.format(" or in ".join(places)))
    return None, config["sample"]


def on_any_machine(place: str) -> str:
    """Return where a corpus is, with $SPEECHFORMER_DATA and ~ for the folders of this machine, as results say it."""
    for folder, name in ((os.environ.get(ENVIRONMENT), f"${ENVIRONMENT}"), (os.path.expanduser("~"), "~")):
        if folder and Path(place).is_relative_to(folder):
            return (name / Path(place).relative_to(folder)).as_posix()
    return place


def read_file(path: Path) -> bytes:
    """Read a file; a `UserError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct, rename or remove it.") from None


def nfc(text: str) -> str:
    """Return a text in the normal form NFC."""
    return unicodedata.normalize("NFC", text)


def nfc_bytes(content: bytes) -> bytes:
    """Return the content of a text file in the normal form NFC; bytes that are not UTF-8 stay."""
    if content.isascii():
        return content
    return nfc(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; a `UserError` if it is missing, or holds something else."""
    try:
        content = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; save the model again.")
    return content


def checksum(files: Mapping[str, bytes]) -> str:
    """Return the sha256 of the names and contents of text files in the normal form NFC."""
    digest = hashlib.sha256()
    for file, content in sorted((file, nfc_bytes(content)) for file, content in files.items()):
        digest.update(f"{file}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def file_sums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of files in a folder, by name; those that are missing are left out."""
    sums = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError), open(folder / name, "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def make_once(folder: Path, make: Callable[[], Iterable[str]]) -> None:
    """Make the files of a folder of the cache, unless they are there, to the byte as they were made.

    Their sha256 are in the folder, too, written last. A file that has changed since is said, and all are made anew.

    Args:
        make: writes the files, and returns their names.
    """
    sums = folder / SUMS

    def are_whole() -> bool:
        known = dict[str, str]()
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = json.loads(sums.read_bytes())
        return bool(known) and isinstance(known, dict) and file_sums(folder, known) == known

    if are_whole():  # nothing is locked then, because we may be allowed only to read
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if are_whole():  # by now
            return
        if sums.exists():
            console.say(f"{folder} is damaged: a file is not as it was written. All of it is made anew.")
            sums.unlink()
        write_file(sums, json.dumps(file_sums(folder, make()), indent=1).encode())


def decode(content: bytes, where: str, line: int = 1) -> str:
    """Decode text, in the normal form NFC and with LF at the ends of lines.

    Args:
        where: path of the file, for error messages.
        line: number of the first line.

    Raises:
        UserError: it is not UTF-8, or has a NUL character or a carriage return inside a line.
    """
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line, byte = line + content.count(b"\n", 0, error.start), content[error.start]
        raise UserError(f"{where}:{line}: byte {byte:#04x} is not UTF-8; save the file as UTF-8.") from None
    for sign, name in (("\0", "NUL character (is it UTF-16?)"), ("\r", "carriage return (CR) in the line")):
        if sign in text:
            line += text.count("\n", 0, text.index(sign))
            raise UserError(f"{where}:{line}: there is a {name}; save the file as UTF-8, with LF.")
    return nfc(text)


def parse_lines(content: bytes, where: str, fix: str = "remove it") -> list[str]:
    """Split the content of a text file into its lines.

    Args:
        where: path of the file, for error messages.
        fix: what to do with an empty line, for the error message.

    Raises:
        UserError: as `decode`; or the file is empty, or has a line without text.
    """
    # Not splitlines(): it also splits at U+2028, U+0085 and others, which may occur inside a sentence.
    lines = decode(content, where).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{where}:{number}: the line has no text; {fix}.")
    return lines


@functools.cache
def word_tables(name: str) -> dict[str, Any]:
    """Load the word tables of a generated corpus, with the fast parser where libyaml is installed."""
    content = Path(__file__).with_name(f"{name}.yaml").read_bytes()
    return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends; readers see the old content or the new one.

    The data goes to a file `NAME.PROCESS.partial` in the same folder first. If the block raises, that file is deleted
    and `path` stays as it was. A killed process leaves its file behind; the next write to `path` deletes it. Of two
    processes that write to the same path at once, the first one to begin raises an error.

    Raises:
        OSError: the file cannot be written; if no other file is the cause, its `filename` is `path`.
    """
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
        leftover.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid():08x}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a file by `atomic_write`."""
    with atomic_write(path) as file:
        file.write(content)


class OutputFolder:
    """A folder that a command writes to. It overwrites and removes only files that a command of ours has written.

    `.speechformer.json` in the folder lists those.

    Raises:
        UserError: the path is a file.
    """

    def __init__(self, path: Path) -> None:
        path = path_of(path)
        if path.is_file():
            raise UserError(f"{path} is a file; name a folder.")
        self.path, self.list, self.written = path, path / ".speechformer.json", set[str]()  # by this command
        self.ours = set(json.loads(read_file(self.list))["files"]) if self.list.exists() else set[str]()

    def file(self, name: str) -> Path:
        """Return the path of a file to write, and list it. Its folder exists then.

        Raises:
            UserError: there is a file of this name that we have not written.
        """
        path = self.path / name
        if name not in self.ours and os.path.lexists(path):
            raise UserError(
                f"{path} is there already, and speechformer has not written it. Choose another folder, or remove it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self.written.add(name)
        self._list(self.ours | {name})
        return path

    def remove_stale(self, pattern: str) -> None:
        """Remove our files whose names match a pattern and that this command has not written."""
        stale = set(fnmatch.filter(self.ours, pattern)) - self.written
        for name in stale:
            (self.path / name).unlink(missing_ok=True)
        self._list(self.ours - stale)

    def _list(self, names: set[str]) -> None:
        if names != self.ours:
            self.ours = names
            write_file(self.list, (json.dumps({"files": sorted(names)}, indent=1) + "\n").encode())
