"""Follow the pages for a new position, pattern, mechanism, task and metric, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import IS_CHECKOUT, ROOT, Block, blocks

PAGES = (ROOT / "speechformer" / "README.md", ROOT / "speechformer" / "tasks" / "README.md")
HEADINGS = ("Adding a position", "Adding a pattern", "Adding a mechanism", "Adding a task", "Adding a metric")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (IS_CHECKOUT and (ROOT / ".git").exists()), reason="not a checkout with git"),
]


def copy_repository(folder: Path) -> None:
    """Copy the files that git tracks or would track, without outputs and notebooks, and what Python has compiled."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("outputs/", "notebooks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for package in ("speechformer", "tests"):
        for cache in (ROOT / package).rglob("__pycache__"):
            shutil.copytree(cache, folder / cache.relative_to(ROOT), dirs_exist_ok=True)


def apply(block: Block, root: Path) -> None:
    """Do what the page says of a block: append it to the file that its first line names, or create that file.

    A row of a page goes below the last row of the table under the heading in quotes. The lines of a registry go where
    the alphabet puts them.
    """
    assert block.target is not None
    first, _, rest = block.content.partition("\n")
    path = root / block.target
    if "in alphabetical order" in first:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in filter(None, rest.splitlines()):
            insert_sorted(lines, line)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif block.language == "markdown":
        heading = re.search('"(.+)"', first)
        assert heading
        before, title, after = path.read_text(encoding="utf-8").partition(f"# {heading.group(1)}\n")
        rows = list(re.finditer(r"^\|.*\n", after.partition("\n#")[0] + "\n", re.MULTILINE))
        end = rows[-1].end()
        path.write_text(before + title + after[:end] + rest + after[end:], encoding="utf-8")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n\n" if path.exists() else ""
        path.write_text(text + rest.strip("\n") + "\n", encoding="utf-8")


def insert_sorted(lines: list[str], line: str) -> None:
    """Insert an import among the imports, or a row of a dict among its rows."""
    alike = [k for k, other in enumerate(lines) if other[:5] == line[:5] and ("." in other) == ("." in line)]
    greater = [k for k in alike if lines[k] > line]
    lines.insert(greater[0] if greater else alike[-1] + 1, line)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("heading", HEADINGS)
def test_following_the_page_to_the_letter_works(heading: str, tmp_path: Path) -> None:
    own = [block for block in blocks(*PAGES) if block.heading == heading]
    copy_repository(tmp_path)
    targets = [block for block in own if block.target]
    assert len(targets) >= 2
    for block in targets:
        apply(block, tmp_path)
    lines = [line for block in own if block.language == "bash" for line in block.content.splitlines()]
    assert lines[0].startswith("python -m pytest -k ")
    for line in reversed(lines):
        done = run([sys.executable, *line.split()[1:]], tmp_path)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= (1 if "metric" in heading else 5)  # type: ignore[union-attr]
    python = [block.target for block in targets if block.language == "python"]
    for check in (["check"], ["format", "--check"]):
        done = run([sys.executable, "-m", "ruff", *check, *python], tmp_path)
        assert done.returncode == 0, done.stdout
