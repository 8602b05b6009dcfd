"""Translate with a run: `python -m speechformer.translate RUN "text"`, or lines from standard input.

`--attention FILE.png` draws where the decoder looked in the source for each token that it wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speechformer import screen
from speechformer.corpora.subwords import BEGIN, END, Subwords, on_one_line
from speechformer.decoding import translate_ids
from speechformer.refusals import UserError, run_or_refuse
from speechformer.tasks import Translate, load_task

CHECKPOINTS = ("average.ckpt", "best.ckpt", "last.ckpt")  # the first that a run has is what it was tested with


@dataclass
class Model:
    """A trained translator: the task with its weights, and its tokenizer."""

    task: Translate
    tokenizer: Subwords

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text and <eos>, cut where the model's positions end; none of a text without words."""
        ids = self.tokenizer.encode_all([text.strip() for text in texts])
        longest = self.task.core.longest
        return [[*found, END][:longest] if text.strip() else [] for text, found in zip(texts, ids)]

    def translate_ids(
        self, sources: Sequence[Sequence[int]], beam: int | None = None, length_penalty: float | None = None
    ) -> list[list[int]]:
        """The translation of each source, without <eos>; beam and penalty are those of the run's test if none are
        given."""
        decoding = self.task.decoding
        chosen = [index for index, source in enumerate(sources) if source]
        translations: list[list[int]] = [[] for _ in sources]
        found = translate_ids(
            self.task.core,
            [sources[index] for index in chosen],
            beam=decoding["beam"] if beam is None else beam,
            alpha=decoding["length_penalty"] if length_penalty is None else length_penalty,
            longest=self.task.core.longest,
        )
        for index, ids in zip(chosen, found):
            translations[index] = ids
        return translations

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The translation of each text; `options` are those of `translate_ids`."""
        return [self.tokenizer.decode(ids) for ids in self.translate_ids(self.encode(texts), **options)]

    @torch.no_grad()
    def alignment(self, source: list[int], translation: list[int]) -> tuple[list[str], list[str], torch.Tensor]:
        """The tokens of a source and of its translation (<eos> added), and the weights [target, source] with which
        the last layer of the decoder, in the mean over its heads, looked at the source when it wrote each.

        Raises:
            UserError: the model has no attention.
        """
        device = self.task.core.output.weight.device
        inputs = torch.tensor([[BEGIN, *translation]], device=device)
        layers = self.task.core.cross_attention(torch.tensor([source], device=device), inputs)
        if not layers:
            raise UserError("This model has no attention to draw: all it knows of the source is one state.")
        tokens = [self.tokenizer.tokens(ids) for ids in (source, [*translation, END])]
        return tokens[0], tokens[1], layers[-1][0].mean(dim=0)


def load_model(run: Path) -> Model:
    """The model of a run's folder, on the CPU, or on a GPU where there is one.

    Raises:
        UserError: the folder is no run of a translation, or has no checkpoint yet.
    """
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder; give that of a run, as outputs/runs/translate_...")
    checkpoint = next((run / name for name in CHECKPOINTS if (run / name).exists()), None)
    if checkpoint is None:
        raise UserError(f"{run} has no {', '.join(CHECKPOINTS)}: it is no run, or one that has just begun.")
    task = load_task(checkpoint)
    if not isinstance(task, Translate):
        raise UserError(f"{run} is a run of task={task.name}; translating needs one of task=translate.")
    return Model(task.to("cuda" if torch.cuda.is_available() else "cpu"), Subwords.load(run / "tokenizer.json"))


def draw_alignment(source: Sequence[str], target: Sequence[str], weights: Any, path: Path, title: str) -> None:
    """The weights [target, source] as a picture: a row for each token that was written."""
    import logging
    import warnings

    import matplotlib

    matplotlib.use("Agg")
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it draws a box
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})
    width, height = 2.4 + 0.34 * len(source), 1.8 + 0.3 * len(target)
    figure, axes = pyplot.subplots(figsize=(max(4.5, width), max(3.0, height)), layout="constrained")
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # a space shows as a low dot, so that it is seen where a word begins
    axes.set_xticks(range(len(source)), [token.replace(" ", "·") for token in source], rotation=60, ha="right")
    axes.set_yticks(range(len(target)), [token.replace(" ", "·") for token in target])
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    axes.set_title(title, fontsize=10)
    axes.set_xticks([k - 0.5 for k in range(1, len(source))], minor=True)
    axes.set_yticks([k - 0.5 for k in range(1, len(target))], minor=True)
    axes.grid(which="minor", color="#e3e8ed", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"--attention {path}: {error}; name a .png, .pdf or .svg file.") from None
    finally:
        pyplot.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m speechformer.translate", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run with task=translate")
    parser.add_argument("text", nargs="*", help="one or more sentences; none: the lines of standard input")
    parser.add_argument("--beam", type=int, help="hypotheses kept (as in the run's test); 1 is greedy")
    parser.add_argument("--length-penalty", type=float, help="alpha of Wu et al. 2016 (as in the run's test)")
    parser.add_argument("--attention", type=Path, metavar="FILE", help="draw the alignment of one sentence")
    given = parser.parse_intermixed_args()

    def command() -> None:
        if given.beam is not None and given.beam < 1:
            raise UserError(f"--beam must be at least 1, not {given.beam}.")
        if given.length_penalty is not None and not 0 <= given.length_penalty <= 10:
            raise UserError(f"--length-penalty must be between 0 and 10, not {given.length_penalty}.")
        model = load_model(given.run)
        texts = given.text or read_lines()
        if given.attention and (len(texts) != 1 or not texts[0].strip()):
            raise UserError(f"--attention draws one sentence, and there are {sum(map(bool, map(str.strip, texts)))}.")
        if not (given.run / "result.json").exists():
            print("This run is not finished: its best weights so far.", file=sys.stderr)
        sources, longest = model.encode(texts), model.task.core.longest
        for number, source in enumerate(sources, start=1):
            if source and source[-1] != END:
                print(
                    f"Sentence {number} is cut at {longest} tokens: the model knows no more positions.",
                    file=sys.stderr,
                )
        translations = model.translate_ids(sources, given.beam, given.length_penalty)
        for ids in translations:
            screen.say(on_one_line(model.tokenizer.decode(ids)))
        if given.attention:
            tokens, written, weights = model.alignment(sources[0], translations[0])
            name = model.task.hparams["core"]["model"]["name"]
            draw_alignment(tokens, written, weights.cpu(), given.attention, f"model={name}: where it looked")

    run_or_refuse(command)


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


if __name__ == "__main__":
    main()
