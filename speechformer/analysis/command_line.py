"""Arguments and input that the commands for trained runs share. torch is imported when a run is loaded."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.errors import ArgumentParser, UserError
from speechformer.runs.find import find_checkpoint

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun


def run_parser(
    command: str, description: str, run: str = "folder of a run", nargs: str | None = None
) -> ArgumentParser:
    """Return a parser with the arguments RUN and --checkpoint; `run` is the help text of RUN, `nargs` how many."""
    parser = ArgumentParser(prog=f"python -m speechformer.{command}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help=run, nargs=nargs)
    checkpoint = "best.ckpt, last.ckpt or average.ckpt (default: the checkpoint behind the reported metrics)"
    parser.add_argument("--checkpoint", metavar="NAME", help=checkpoint)
    return parser


def load_runs(folders: Sequence[Path], checkpoint: str | None = None, ability: str = "") -> list[TrainedRun]:
    """Load runs that have an ability (see `TrainedRun.require`); warn on stderr of those that are still trained.

    All folders are checked before torch is imported, which takes seconds.
    """
    for folder in folders:
        find_checkpoint(folder, checkpoint)

    from speechformer.analysis.load import load

    loaded = []
    for folder in folders:
        run = load(folder, checkpoint)
        if ability:
            run.require(ability)
        if not run.finished:
            console.warn(f"Training of {folder} has not ended: its weights so far: {run.checkpoint}.")
        loaded.append(run)
    return loaded


def short_name(text: str) -> str:
    """Return a name for a file: the first words of a text, and if they are not all six digits of its sha256."""
    words = "-".join(re.findall(r"[A-Za-z0-9_.]+", text))
    is_whole = words == text and len(text) <= 200
    return words if is_whole else f"{words[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def read_texts(arguments: Sequence[str]) -> list[str]:
    """Return the texts of a command line, or if there are none the lines of standard input, which may be empty."""
    for text in arguments:
        if (broken := text.encode("utf-8", "surrogateescape").decode(errors="replace")) != text:
            raise UserError(f"The text '{broken}' is not UTF-8; set the terminal to UTF-8, or correct the text.")
    if arguments:
        return list(arguments)
    if sys.stdin.isatty():
        console.warn("Enter one sentence per line; Ctrl-D ends the input.")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: byte {error.object[error.start]:#04x} is not UTF-8.") from None
    lines = text.replace("\r\n", "\n").split("\n")  # splitlines() would also split inside a sentence, at U+2028
    return lines if lines[-1] else lines[:-1]


def read_sentences(arguments: Sequence[str]) -> list[str]:
    """Return the texts of `read_texts` that have words, at least one; empty lines of standard input are skipped."""
    texts = read_texts(arguments)
    sentences = [text for text in texts if text.strip()]
    if not sentences or (arguments and len(sentences) < len(texts)):
        raise UserError("A sentence is empty; give some words after RUN, or lines on standard input.")
    return sentences
