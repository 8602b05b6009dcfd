"""Files of text: where they lie, their lines, their checksum. Strict: nothing is repaired, and nothing is skipped.

UTF-8 with or without byte order mark, LF or CRLF, the last line with or without its newline.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from speechformer.errors import UserError

ENVIRONMENT = "SPEECHFORMER_DATA"


def cache_directory() -> Path:
    """Where `python -m speechformer.download` puts its files: the user's cache folder."""
    import pooch

    return Path(pooch.os_cache("speechformer"))


def places(folder: str, root: str | None) -> dict[str, Path | None]:
    """Where a corpus may lie, by what to call the place: `root` alone if it is given, else `folder` of
    $SPEECHFORMER_DATA and of the user cache."""
    if root is not None:
        return {f"corpus.root ({root})": Path(str(root)).expanduser()}
    data, cache = os.environ.get(ENVIRONMENT), cache_directory() / folder
    return {
        f"${ENVIRONMENT}/{folder} ({data or 'not set'})": Path(data).expanduser() / folder if data else None,
        f"the user cache ({cache})": cache,
    }


def checksum(files: Mapping[str, bytes]) -> str:
    """sha256 of the names and bytes of some files."""
    digest = hashlib.sha256()
    for file, content in sorted(files.items()):
        digest.update(f"{file}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def parse_lines(content: bytes, where: str, mend: str = "remove it") -> list[str]:
    """The lines of a text file; `where` names it in a refusal, `mend` says what to do with a line without text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}:{number}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8."
        ) from None
    # Not splitlines(): it also cuts at U+2028, U+0085 and others, which may stand inside a sentence.
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"{where}:1: the file is empty; fill it or remove it.")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{where}:{number}: the line has no text; {mend}.")
    return lines
