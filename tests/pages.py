"""The pages of the documentation: their blocks, links and anchors. Used by the tests of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from speechformer.config import CONF

ROOT = CONF.parent
FOLDERS = (".github", "conf", "notebooks", "outputs/reference", "speechformer", "studies", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
PAGES = [page for page in PAGES if page.parent != ROOT / "studies" / "pages"]  # templates of other pages
IS_CHECKOUT = (ROOT / "README.md").exists() and (ROOT / "pyproject.toml").exists()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    """Return a page's path in the repository, which is its name in the tests."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes: `target`, the file that its first line names in a comment; None without one.
    """

    page: Path
    heading: str
    language: str
    content: str

    @property
    def target(self) -> str | None:
        first = self.content.partition("\n")[0]
        match = re.match(r"(?:#|<!--) ([\w./]+\.(?:py|yaml|md))\b", first)
        return match.group(1) if match else None


def blocks(*pages: Path) -> Iterator[Block]:
    """Yield the fenced blocks of some pages, with the heading above each."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text[: match.start()]), re.MULTILINE)
            yield Block(page, headings[-1] if headings else "", match.group(1), match.group(2))


def commands(*pages: Path) -> Iterator[tuple[Path, str]]:
    """Yield the commands of some pages: the lines of shell blocks, and inline code that starts a command."""
    for block in blocks(*pages):
        if block.language == "bash":
            for line in block.content.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield block.page, line
    for page in pages:
        for span in re.findall(r"`((?:python -m speechformer\.|make |bash studies/)[^`\n]+)`", prose(page)):
            yield page, span.replace("\\|", "|")


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and images."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def slug(heading: str) -> str:
    """Return the anchor that GitHub derives from a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those that GitHub derives from its headings, and its own."""
    text, names = prose(page), set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        unique, number = slug(heading), 0
        while unique in names:
            number += 1
            unique = f"{slug(heading)}-{number}"
        names.add(unique)
    return names | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
