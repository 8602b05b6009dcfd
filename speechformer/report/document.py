"""The report as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechformer.report.csv_files import as_csv
from speechformer.report.markdown import Markdown, TableText, latex

TEMPLATE = Path(__file__).parent / "page.html"
TITLED = re.compile(r'<p><a id="([^"]+)"></a></p>\s*<h2 id="[^"]*">(.*?)</h2>')  # where a table of the report begins
PICTURE = re.compile(r'<p><img alt="([^"]*)" src="([^":]+)\.png" ?/?></p>\s*<p><em>(.*?)</em></p>', re.DOTALL)


def to_html(document: Markdown, exports: Mapping[str, TableText], folder: Path) -> str:
    """Return the page.

    Args:
        document: the report.
        exports: its tables in order, by the names of their files.
        folder: that paths of figures are relative to.
    """
    import markdown

    converter = markdown.Markdown(extensions=["tables", "md_in_html", "toc"])
    body = converter.convert(str(document))
    remaining = iter(exports.items())
    body = re.sub(r"<table>.*?</table>", lambda match: with_tools(match[0], *next(remaining)), body, flags=re.DOTALL)
    body = PICTURE.sub(lambda match: embed(folder, *match.groups()), body)
    head, *rest = TITLED.split(body)
    own = list(zip(rest[::3], rest[1::3], rest[2::3]))
    body = head + "".join(folded(*part, is_open=len(own) == 1) for part in own)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    digest = hashlib.sha256(script[1].encode() if script else b"").digest()
    title, *chapters = [token for top in converter.toc_tokens for token in (top, *top["children"])]
    parts = {"TITLE": title["name"], "DIGEST": base64.b64encode(digest).decode(), "BODY": body}
    parts["CONTENTS"] = "\n".join(contents(chapters, {heading: name for name, heading, _ in own}))
    return re.sub("|".join(parts), lambda match: parts[match[0]], template)


def contents(chapters: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the links of the list of contents; `names` are the anchors of tables by heading."""
    for token in chapters:
        yield f'<li><a href="#{names.get(token["html"], token["id"])}">{token["name"]}</a></li>'


def folded(name: str, heading: str, content: str, is_open: bool) -> str:
    """Return a table with all that belongs to it, which the reader opens."""
    state = " open" if is_open else ""
    return f'<details class="part" id="{name}"{state}><summary><h2>{heading}</h2></summary>{content}</details>\n'


def with_tools(table: str, name: str, export: TableText) -> str:
    """Return a table in a box that scrolls, with buttons that copy it and the names of its files."""
    table = re.sub(r" ± |(?<=\d), (?=[+−\d])", lambda match: match[0].replace(" ", "&nbsp;"), table)
    copies = {"LaTeX": latex(export.cells), "CSV": as_csv(export.cells)}
    buttons = "".join(
        f'<button type="button" data-copy="{html.escape(text)}">Copy {kind}</button>' for kind, text in copies.items()
    )
    return f'<div class="wide">{table}</div><div class="tools">{buttons}<code>tables/{name}.tex, .csv</code></div>'


def embed(folder: Path, title: str, path: str, caption: str) -> str:
    """Return a figure with its picture inside, its caption and the names of its files."""
    content = (folder / f"{path}.png").read_bytes()
    width = 2 * int.from_bytes(content[16:20], "big") // 3  # of a PNG, whose dots are finer than those of a page
    files = ", ".join(f".{form}" for form in ("png", "svg", "pdf") if (folder / f"{path}.{form}").exists())
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return (
        f'<figure><div class="wide"><img alt="{title}" width="{width}" src="{source}"></div>'
        f"<figcaption>{caption} <code>{path}{files}</code></figcaption></figure>"
    )
