"""Read text files strictly, find corpus folders, write files atomically.

Text is UTF-8 with or without byte order mark, and with or without a final newline. Lines end with LF or CRLF, or all
with CR. Any other character, such as U+2028, U+0085, VT or FF, is part of a line, as for `grep`, `wc` and Python's
`open`. Anything else is an error: nothing is repaired or skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import yaml
from filelock import FileLock

from speechformer.errors import UserError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
ENVIRONMENT = "SPEECHFORMER_DATA"


def cache_directory() -> Path:
    """Return the user's cache folder, where `python -m speechformer.download` puts its files."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("speechformer"))


def find_folder(name: str, root: str | None, valid: Callable[[Path], object]) -> tuple[Path | None, list[str]]:
    """Return the first folder that is `valid` for a corpus, or None, and descriptions of the places searched.

    Args:
        name: of the corpus' folder in $SPEECHFORMER_DATA and in the user cache.
        root: `corpus.root`; if it is set, nothing else is searched.
    """
    missing = root is not None and kind_of(Path(os.path.expanduser(root))) == "nothing"
    places = {f"corpus.root ({root})" + ", which does not exist" * missing: str(root)}
    if root is None:
        data, cache = os.environ.get(ENVIRONMENT), str(cache_directory() / name)
        places = {f"${ENVIRONMENT}/{name} ({data or 'not set'})": f"{data}/{name}" if data else ""}
        places[f"the user cache ({cache})"] = cache
    folders = [Path(os.path.expanduser(place)) for place in places.values() if place]
    for folder in folders:
        if (kind := kind_of(folder)) not in ("nothing", "a folder"):
            raise UserError(f"{folder} is {kind}, and must be a folder; correct the path, or what is there.")
    return next((folder for folder in folders if folder.is_dir() and valid(folder)), None), list(places)


def generated_by(seed: int, sought: str, searched: list[str]) -> str:
    """Describe a generated corpus: its seed, and where $SPEECHFORMER_DATA has not what was sought."""
    absent = f"; no {sought} in {searched[0]}" if searched and os.environ.get(ENVIRONMENT) else ""
    return f"made by the package, seed {seed}{absent}"


def on_any_machine(place: str) -> str:
    """Return where a corpus is, with $SPEECHFORMER_DATA and ~ for the folders of this machine, as results say it."""
    folders = {os.environ.get(ENVIRONMENT, ""): f"${ENVIRONMENT}", os.path.expanduser("~"): "~"}
    for folder, name in folders.items():
        folder = folder.rstrip("/")
        if folder and f"{place}/".startswith(f"{folder}/"):
            return name + place.removeprefix(folder)
    return place


def kind_of(path: Path) -> str:
    """Return in words what is at a path: nothing, a file, a folder, a broken symbolic link, a pipe, ..."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a broken symbolic link" if path.is_symlink() else "nothing"
    except (OSError, ValueError) as error:
        return f"unreadable ({getattr(error, 'strerror', None) or error})"
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def check_file(path: Path) -> None:
    """Raise a UserError for what is no file: a broken link, a folder, a pipe (which could block), a device."""
    if (kind := kind_of(path)) != "a file":
        raise UserError(f"{path} is {kind}, and must be a file; correct, rename or remove it.")
    if not path.name.isprintable():
        raise UserError(f"The name of {str(path)!r} has characters that cannot be printed; rename it.")


def read_file(path: Path) -> bytes:
    """Read a file of a corpus.

    Raises:
        UserError: it is no file, or cannot be read.
    """
    check_file(path)
    try:
        return path.read_bytes()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "it does not fit into memory"
        raise UserError(f"{path} cannot be read ({reason}); correct, rename or remove it.") from None


def checksum(files: Mapping[str, bytes]) -> str:
    """Return the sha256 of the names and contents of files."""
    digest = hashlib.sha256()
    for file, content in sorted(files.items()):
        digest.update(f"{file}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def cached_digest(path: Path, compute: Callable[[BufferedReader], str]) -> str:
    """Return `compute(file)`, a digest of a large file, from the user's cache if the file has not changed since.

    Size, time of change and inode tell. If the cache cannot be written, the digest is computed each time.
    """
    about, place = path.stat(), str(path.resolve())
    state = [place, about.st_size, about.st_mtime_ns, about.st_ino]
    name = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
    cached = cache_directory() / "digests" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):  # a UserError is a ValueError
        *known, digest = json.loads(read_file(cached))
        if known == state:
            return str(digest)
    with open(path, "rb") as file:
        digest = compute(file)
    write_cache(cached, json.dumps([*state, digest]).encode())
    return digest


def parse_lines(content: bytes, where: str, fix: str = "remove it") -> list[str]:
    """Split the content of a text file into its lines.

    Args:
        where: path of the file, for error messages.
        fix: what to do with an empty line, for the error message.

    Raises:
        UserError: the file is not UTF-8, is empty, mixes line ends, or has a NUL character or a line without text.
    """
    lines = split_lines(content, where)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{where}:{number}: the line has no text; {fix}.")
    return lines


def split_lines(content: bytes, where: str) -> list[str]:
    """Split the content of a text file into lines, of which some may have no text; raise as `parse_lines` else."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise UserError(f"{where}:{number}: byte {byte:#04x} is not UTF-8; save the file as UTF-8.") from None
    if not text:
        raise UserError(f"{where}:1: the file is empty; fill it or remove it.")
    if "\0" in text:
        number = len(re.findall(r"\r\n?|\n", text[: text.index("\0")])) + 1
        raise UserError(f"{where}:{number}: there is a NUL character (is it UTF-16?); save the file as UTF-8.")
    # Not splitlines(): it also splits at U+2028, U+0085 and others, which may occur inside a sentence.
    text = text.replace("\r\n", "\n")
    if "\r" in text:
        if "\n" in text:
            number = text.count("\n", 0, text.index("\r")) + 1
            raise UserError(f"{where}:{number}: there is a carriage return (CR) in the line; save the file with LF.")
        text = text.replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


PARSED: dict[str, Any] = {}


def parse_once(parse: Callable[..., T], files: Mapping[str, bytes], name: str, where: str, **settings: Any) -> T:
    """Return `parse(files, name, where, **settings)`, memoised: the jobs of a sweep share one corpus object."""
    key = json.dumps([parse.__module__, checksum(files), name, where, settings], sort_keys=True, default=str)
    if key not in PARSED:
        PARSED[key] = parse(files, name, where, **settings)
    return PARSED[key]


def read_yaml(path: Path) -> dict[str, Any]:
    """Load a YAML file, with the fast parser where libyaml is installed."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def delete_leftovers(path: Path) -> None:
    """Delete the temporary files for `path` whose writers were killed; the others hold a lock on theirs."""
    leftovers = path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial")
    for leftover in filter(Path.is_file, leftovers):  # opening a pipe would wait
        with contextlib.suppress(OSError), open(leftover, "rb") as file:
            lock_file(file)
            leftover.unlink()


def lock_file(file: BinaryIO) -> None:
    """Lock an open file until it is closed or the process ends; raise an OSError if another process has it."""
    if fcntl is None:  # not on Windows
        raise OSError(errno.ENOTSUP, "no locks")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_partial(path: Path) -> BinaryIO:
    """Return a new temporary file for `path`, locked where the system can."""
    while True:
        file = open(path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial"), "xb")  # noqa: SIM115
        with contextlib.suppress(OSError):
            lock_file(file)
        if os.path.lexists(file.name):  # another process has not taken it for a leftover before it was locked
            return file
        file.close()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends; readers see the old content or the new one.

    The data goes to a file `NAME.RANDOM.partial` in the same folder first. If the block raises, that file is deleted
    and `path` stays as it was. A killed process leaves its file behind; the next write to `path` deletes it.

    Raises:
        OSError: the file cannot be written; its `errno` is that of the cause, its `filename` is `path`.
    """
    partial: Path | None = None
    try:
        delete_leftovers(path)
        with open_partial(path) as file:
            partial = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(partial, path)
        if fcntl is None:  # Windows renames no open file
            os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError, AttributeError):
            partial.unlink()  # type: ignore[union-attr]
        if isinstance(error, OSError) and (partial is None or error.filename in (None, str(partial))):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a file by `atomic_write`."""
    with atomic_write(path) as file:
        file.write(content)


def write_cache(path: Path, content: bytes) -> None:
    """Write a file of the user's cache, if that can be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def is_inside(folder: Path, name: str) -> bool:
    """Return whether a name, which may come from a file of somebody else, leads to a place inside a folder."""
    try:
        return ".." not in Path(name).parts and (folder / name).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL character, links in a circle
        return False


class OutputFolder:
    """A folder that a command writes to. It overwrites and removes only files that a command of ours has written.

    `.speechformer.json` in the folder lists those. What it names outside the folder is ignored.

    Raises:
        UserError: the path is a file.
    """

    LIST = ".speechformer.json"

    def __init__(self, path: Path) -> None:
        self.path, self.ours = path, set[str]()
        self.lock = FileLock(path / ".speechformer.lock", is_singleton=True)  # until nobody has this object
        self.written = set[str]()  # by this command
        if os.path.lexists(path) and not path.is_dir():
            raise UserError(f"{path} is a file; name a folder.")
        self._read()

    def file(self, name: str) -> Path:
        """Return the path of a file to write, and list it. Its folder exists then.

        Raises:
            UserError: there is a file of this name, or something else, that we have not written.
        """
        path = self.path / name
        if not is_inside(self.path, name):
            raise UserError(
                f"{path} is outside {self.path}, through a link. Choose another folder, or remove the link."
            )
        if os.path.lexists(path) and not self.ours:
            self._reject(path)  # before anything is written into somebody's folder
        if not self.lock.is_locked:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()  # another command may be writing here
            self._read()
            delete_leftovers(self.path / self.LIST)
        if os.path.lexists(path) and (name not in self.ours or path.is_symlink() or not path.is_file()):
            self._reject(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.written.add(name)
        if name not in self.ours:
            self.ours.add(name)
            self._save()
        return path

    def remove_stale(self, pattern: str) -> None:
        """Remove our files whose names match a pattern and that this command has not written."""
        stale = set(fnmatch.filter(self.ours, pattern)) - self.written
        for path in (self.path / name for name in stale):
            if path.is_file() and not path.is_symlink():
                path.unlink()
        if stale:
            self.ours -= stale
            self._save()

    def _reject(self, path: Path) -> NoReturn:
        raise UserError(
            f"{path} is there already, and speechformer has not written it. Choose another folder, or remove it."
        )

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a UserError is a ValueError
            listed = json.loads(read_file(self.path / self.LIST))["files"]
            self.ours |= {name for name in map(str, listed) if is_inside(self.path, name)}

    def _save(self) -> None:
        content = json.dumps({"files": sorted(self.ours)}, indent=1) + "\n"
        write_file(self.path / self.LIST, content.encode())
