"""Text from outside (results, file names, texts, models) on its way to a console, a picture or a document."""

from __future__ import annotations

import contextlib
import re
import unicodedata
import warnings
from collections.abc import Iterator
from typing import TypeVar

# C0 but tab and line feed, DEL, C1; what reverses the direction of text (Unicode TR 9, Bidi_Control) or XML forbids
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
SHAPELESS = ("Cc", "Cn", "Co", "Cs")  # Unicode categories: controls, unassigned, private use, surrogates
# What begins a formula in a spreadsheet, also as a full-width character, and what is no more than numbers
FORMULA = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
NUMBERS = re.compile(r"[-+]\d[\d\s.,eE%±×–−+\[\]-]*")
T = TypeVar("T")
MARKUP = re.compile(r"[\\`*{}\[\]<>|#&$~]|(?<![^\W_])_|_(?![^\W_])")  # "_" inside a word marks nothing


def plain(text: str) -> str:
    """Return a text without the characters that steer a terminal or reverse what follows them."""
    return CONTROL.sub("", text)


def one_line(text: str, limit: int) -> str:
    """Return a plain text on one line of at most `limit` characters."""
    words = " ".join(plain(text.encode("utf-8", "replace").decode()).split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def drawable(text: str, limit: int) -> str:
    """Return a text for a picture, on one line of at most `limit` characters.

    Marks that have no shape, such as those of direction, are left out; other characters that no font has are boxes.
    """
    categories = [(character, unicodedata.category(character)) for character in " ".join(text.split())]
    shown = "".join("□" if kind in SHAPELESS else character for character, kind in categories if kind != "Cf")
    shown = shown or "□" * bool(text)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


@contextlib.contextmanager
def missing_glyphs() -> Iterator[None]:
    """Let matplotlib draw a box for a character that no font has, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font")
        yield


def spreadsheet_cell(value: T) -> T | str:
    """Return a value for a CSV file; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    is_formula = FORMULA.match(value) and not NUMBERS.fullmatch(value)
    return "'" * bool(is_formula) + value.replace("\r", " ")  # pandas does not quote it, and it would begin a row


def on_one_line(text: str) -> str:
    """Replace characters that would begin a new line or column of a file."""
    return re.sub(r"[\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text)


def escape_markdown(text: str) -> str:
    """Return a text on one line, in which neither Markdown nor HTML finds markup."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", one_line(text, 4000))
