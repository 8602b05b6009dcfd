"""Text from outside (results, file names, texts, models) on its way to a console, a picture or a document."""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL, C1; what reverses the direction of text (Unicode TR 9, Bidi_Control) or XML forbids
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
MARKUP = re.compile(r"[\\`*{}\[\]<>|#&$~]|(?<![^\W_])_|_(?![^\W_])")  # "_" inside a word marks nothing


def plain(text: str) -> str:
    """Return a text without the characters that steer a terminal or reverse what follows them."""
    return CONTROL.sub("", text)


def one_line(text: str, limit: int) -> str:
    """Return a plain text on one line of at most `limit` characters."""
    words = " ".join(plain(text.encode("utf-8", "replace").decode()).split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def escape_markdown(text: str) -> str:
    """Return a text on one line, in which neither Markdown nor HTML finds markup."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", one_line(text, 4000))
