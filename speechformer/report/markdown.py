"""Markdown of the report: text is escaped when it enters a document, so names in results cannot carry markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from tabulate import tabulate

from speechformer.escape import escape_markdown, one_line


class Markdown(Markup):
    """Text with markup of ours. `format`, `join` and `+` escape what is not Markdown, as those of MarkupSafe.

    The constructor trusts its argument, so it takes only what is written in the source.
    """

    @classmethod
    def escape(cls, s: Any, /) -> Markdown:
        return s if isinstance(s, cls) else cls(escape_markdown(str(s)))


def code(text: str) -> Markdown:
    """Return a text as a code span."""
    text = one_line(text, 4000)
    if re.search(r"[`|<>&\\\[\]]", text) or not text:  # a span in backticks has no escapes
        return Markdown("<code>{}</code>").format(text)
    return Markdown("`{}`").format(Markdown(text))


def lines(parts: Sequence[str]) -> Markdown:
    """Join parts with line breaks inside a paragraph or cell."""
    return Markdown("<br>").join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """Return a table: first column to the left, the others to the right; "" without rows."""
    if not rows:
        return Markdown("")
    names, *cells = ([str(Markdown.escape(cell)) for cell in row] for row in (header, *rows))
    align = ("left", *["right"] * (len(header) - 1))
    return Markdown(tabulate(cells, names, tablefmt="pipe", colalign=align, disable_numparse=True))
