"""Compare the numbers in the pages with those of a commit: `python -m studies.compare HEAD`.

For each page, print the numbers that it has lost and gained, with how many of each. Addresses of links do not count.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections import Counter

from studies.render import PAGES, ROOT

NUMBER = re.compile(r"[−+-]?\d[\d,]*(?:\.\d+)?")


def numbers(page: str) -> Counter[str]:
    """Return how often each number is in a page."""
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", html.unescape(page), flags=re.DOTALL)
    return Counter(NUMBER.findall(text))


def main() -> None:
    """Run the command line."""
    commit = sys.argv[1] if len(sys.argv) == 2 else sys.exit("Usage: python -m studies.compare COMMIT")
    for page in PAGES.values():
        name = page.relative_to(ROOT).as_posix()
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True)
        if shown.returncode == 128 and "exists on disk, but not in" in shown.stderr:
            continue
        if shown.returncode:
            sys.exit(shown.stderr.strip())
        before, after = numbers(shown.stdout), numbers(page.read_text(encoding="utf-8"))
        print(f"{name}: {after.total()} numbers; lost {dict(before - after)}, new {dict(after - before)}")


if __name__ == "__main__":
    main()
