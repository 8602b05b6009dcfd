"""List the commands: `python -m speechformer`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import speechformer
from speechformer import console
from speechformer.errors import fail, run_command

PACKAGE = Path(__file__).parent


def commands() -> Iterator[tuple[str, str]]:
    """Yield the name of each command and what it does, by the first sentence of its module's docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
        text = path.read_text(encoding="utf-8")
        about, says_how, _ = text.removeprefix('"""').partition(f": `python -m {name}")
        if says_how and "\ndef main()" in text and name != "speechformer":
            yield f"python -m {name}", " ".join(about.split())


def main() -> None:
    """Run the command line."""
    run_command(overview)


def overview() -> None:
    """Print the version or the list of the commands."""
    if sys.argv[1:] == ["--version"]:
        console.write(f"speechformer {speechformer.__version__}")
    elif sys.argv[1:] not in ([], ["--help"], ["-h"]):
        fail(f"python -m speechformer only lists the commands; write python -m speechformer.{sys.argv[1]} ....")
    else:
        console.write("\n".join(f"{command.ljust(40)} {about}" for command, about in commands()))
        console.write("\nEach explains itself with --help. python -m speechformer --version names the version.")


if __name__ == "__main__":
    main()
