"""A trained run, to use: its model and its tokenizer, from the run's folder alone.

Nothing that a folder holds is executed: checkpoints are read with `weights_only=True`, the rest is JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import UNKNOWN_TOKEN, Tokenizer, split_words
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.tasks.base import Task
from speechformer.tasks.load import load_task

CHECKPOINTS = ("average.ckpt", "best.ckpt", "last.ckpt")


@dataclass
class Trained:
    """The task with its weights, on the CPU or on a GPU where there is one, and its tokenizer.

    `checkpoint` is the file that the weights are from, `finished` whether the run came to its end.
    """

    directory: Path
    task: Task
    tokenizer: Tokenizer | Subwords
    checkpoint: str
    finished: bool

    @property
    def label(self) -> str:
        """The run in a few words, for a picture."""
        model = self.task.hparams["architecture"]
        named = [model["model"]["name"]]
        for name, value in model["model"].items():
            if name in ("scale", "cell") or (name == "slopes" and value != "geometric"):
                named.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        if model["pattern"]["name"] != "full":
            named.append(model["pattern"]["name"])
        return ", ".join(named)

    @property
    def block_size(self) -> int:
        """The most tokens that it was trained on at once."""
        return self.task.hparams["architecture"]["block_size"]

    def words(self, text: str) -> tuple[list[str], list[int]]:
        """The words of a text as a model of speeches reads them, and their ids."""
        assert isinstance(self.tokenizer, Tokenizer)
        return list(split_words(text)), self.tokenizer.encode(text)


def load_trained(directory: Path, *tasks: str, checkpoint: str | None = None) -> Trained:
    """The model of a run's folder, with the weights that its figures are of: the average if the run made one, the
    best if it was chosen on a held-out part, otherwise the last; and the last of a run that is not finished.

    Args:
        tasks: the tasks that it may be of; none for any.
        checkpoint: one of `CHECKPOINTS` to take instead.

    Raises:
        UserError: the folder is no run, or one of another task, has no checkpoint yet, or has diverged.
    """
    if directory.is_file():
        raise UserError(
            f"{directory} is a file; give the run's folder, {directory.parent} (a checkpoint: --checkpoint)."
        )
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such folder; give that of a run, as outputs/runs/...")
    if checkpoint is not None and checkpoint not in CHECKPOINTS:
        raise UserError(f"--checkpoint {checkpoint}: it is one of {', '.join(CHECKPOINTS)}.")
    result = runs.result_or_none(directory) or {}
    if result.get("status") == "diverged":
        raise UserError(f"{directory} diverged: its weights mean nothing; train it again with a lower recipe.lr.")
    best = result.get("best") or {}
    order = CHECKPOINTS if best.get("chosen_on") == "validation" else CHECKPOINTS[::-1]
    names = [name for name in ([checkpoint] if checkpoint else order) if (directory / name).exists()]
    if not names:
        if checkpoint is not None and result:
            raise UserError(f"{directory} has no {checkpoint}; leave --checkpoint away.")
        wanted = checkpoint or ", ".join(CHECKPOINTS)
        raise UserError(f"{directory} has no {wanted}: it is no run, or one that has just begun.")
    task = load_task(directory / names[0])
    if tasks and task.name not in tasks:
        wanted = " or ".join(tasks)
        raise UserError(
            f"{directory} is a run of task={task.name}, which {task.purpose}; this needs one of task={wanted}."
        )
    if task.diverged():
        raise UserError(f"{directory}: weights of {names[0]} are NaN or infinite, and mean nothing.")
    tokenizer = task.tokenizer_class.load(directory / "tokenizer.json")
    task.to("cuda" if torch.cuda.is_available() else "cpu")
    return Trained(directory, task, tokenizer, names[0], result.get("status") == "finished")


def say_if_unfinished(run: Trained) -> None:
    """Tell on stderr that these are not the weights of the end."""
    if not run.finished:
        print(f"This run is not finished: its weights so far ({run.checkpoint}).", file=sys.stderr)


def given_texts(arguments: Sequence[str]) -> list[str]:
    """The texts of a command line, or if there are none the lines of standard input, which may be empty.

    Raises:
        UserError: they are not UTF-8.
    """
    if not arguments:
        if sys.stdin.isatty():
            print("One sentence a line; Ctrl-D ends.", file=sys.stderr)
        return read_lines()
    for text in arguments:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"The text {text!a} is not UTF-8.") from None
    return list(arguments)


def read_lines() -> list[str]:
    """The lines of standard input, which may be empty.

    Raises:
        UserError: they are not UTF-8.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: byte {error.object[error.start]:#04x} is not UTF-8.") from None
    lines = text.replace("\r\n", "\n").split("\n")  # not splitlines(): see corpora.files
    return lines if lines[-1] else lines[:-1]


def given_sentences(arguments: Sequence[str]) -> list[str]:
    """As `given_texts`, at least one and all with words: empty lines of standard input are no sentences.

    Raises:
        UserError: there is none, one is empty, or not UTF-8.
    """
    texts = given_texts(arguments)
    if arguments:
        for number, text in enumerate(texts, start=1):
            if not split_words(text):
                raise UserError(f"Sentence {number} is empty; give it some words.")
    texts = [text for text in texts if split_words(text)]
    if not texts:
        raise UserError("There is no sentence; give one behind the run, or lines on standard input.")
    return texts


def note_unknown(words: Sequence[str], ids: Sequence[int]) -> str | None:
    """A sentence that names the words that the model does not know; None if it knows all."""
    unknown = list(dict.fromkeys(word for word, index in zip(words, ids) if index == 1))
    if not unknown:
        return None
    named = [word if len(word) <= 30 else f"{word[:29]}…" for word in unknown[:20]]
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    return f"not in the vocabulary, read as {UNKNOWN_TOKEN}: {', '.join(named)}{more}"
