"""Paths as users write them: `~` is their home folder, also where no shell has seen it."""

from __future__ import annotations

import os
import re
from pathlib import Path

# an override: key, quote, path or URI
OF_HOME = re.compile(r"""(\+*[\w./@]+=)(["']?)((?:\w+:/{2,3})?~(?:[\w./-][^,]*)?)\2""")


def path_of(text: str | Path) -> Path:
    """Return a path, with the home folder of the user in place of `~`, or of another one in place of `~NAME`."""
    return Path(os.path.expanduser(text))


def expand_uri(text: str) -> str:
    """Return a URI, or a path in its place, whose path is not that of `~`: sqlite:///~/runs.db."""
    scheme, path = re.fullmatch(r"(\w+:/{2,3}(?=~))?(.*)", text, re.DOTALL).groups("")  # type: ignore[union-attr]
    return f"{scheme}{os.path.expanduser(path)}"


def expand_override(word: str) -> str:
    """Return a word of a command line, KEY=VALUE, with a path that begins with `~` expanded, and in quotes."""
    if match := OF_HOME.fullmatch(word):
        key, quote, path = match.groups()
        quote = quote or '"'
        return f"{key}{quote}{expand_uri(path)}{quote}"
    return word
