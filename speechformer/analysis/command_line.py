"""Arguments and input that the commands for trained runs share. torch is imported when a run is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.analysis.find import find_checkpoint
from speechformer.errors import ArgumentParser, UserError

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


def read_texts(arguments: Sequence[str]) -> list[str]:
    """Return the texts of a command line, or if there are none the lines of standard input, which may be empty."""
    for text in arguments:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"The text {text!a} is not UTF-8.") from None
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
    numbered = dict(enumerate(read_texts(arguments), start=1))
    sentences = {number: text for number, text in numbered.items() if text.strip()}
    if empty := min(numbered.keys() - sentences.keys(), default=0) if arguments else 0:
        raise UserError(f"Sentence {empty} is empty; give it some words.")
    if not sentences:
        raise UserError("There is no sentence; give one after RUN, or lines on standard input.")
    return list(sentences.values())
