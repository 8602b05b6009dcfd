"""Markdown of the report: text is escaped when it enters a document, so names in results cannot carry markup."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from tabulate import tabulate

from speechformer.escape import escape_markdown, one_line

MARKUP = re.compile(r"`([^`]*)`|\[([^\]]*)\]\([^)]*\)|<br>|</?code>|\*+")
LATEX = {character: rf"\{character}" for character in "&%$#_{}"}  # "[" could be an option of the line break before it
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "−": "$-$"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "–": "--", "…": r"\ldots{}", "<": "$<$", ">": "$>$", "≥": r"$\geq$"}


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


class TableText(Markdown):
    """A table as Markdown; `cells` are its rows as plain text, the header first."""

    cells: list[list[str]]


def plain_text(cell: str) -> str:
    """Return the text of a cell: code as it is, the rest without the markup of ours."""
    return html.unescape(MARKUP.sub(lambda match: match[1] or match[2] or "\n" * (match[0] == "<br>"), cell))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """Return a table: first column to the left, the others to the right; "" without rows."""
    if not rows:
        return Markdown("")
    names, *cells = ([str(Markdown.escape(cell)) for cell in row] for row in (header, *rows))
    align = ("left", *["right"] * (len(header) - 1))
    text = TableText(tabulate(cells, names, tablefmt="pipe", colalign=align, disable_numparse=True))
    text.cells = [[plain_text(cell) for cell in row] for row in (names, *cells)]
    return text


def latex(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of texts, the header first, as a LaTeX table; it needs the package booktabs."""

    def cell(text: str) -> str:
        parts = ["".join(LATEX.get(character, character) for character in part) for part in text.split("\n")]
        return parts[0] if len(parts) == 1 else r"\shortstack[r]{" + r"\\".join(parts) + "}"

    header, *rows = ["    " + " & ".join(map(cell, row)) + r" \\" for row in cells]
    columns = "l" + "r" * (len(cells[0]) - 1)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join([begin, r"    \toprule", header, r"    \midrule", *rows, r"    \bottomrule", end, ""])
