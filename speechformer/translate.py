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

from speechformer import console
from speechformer.analysis.attention_maps import Map, draw
from speechformer.analysis.load import given_texts, load_trained, say_if_unfinished
from speechformer.corpora.special_tokens import BEGIN, END
from speechformer.corpora.subwords import Subwords, on_one_line
from speechformer.errors import UserError, run_command
from speechformer.generation.beam_search import translate_ids
from speechformer.tasks.translate import Translate


@dataclass
class Model:
    """A trained translator: the task with its weights, and its tokenizer."""

    task: Translate
    tokenizer: Subwords

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text and <eos>, cut where the model's positions end; none of a text without words."""
        ids = self.tokenizer.encode_all([text.strip() for text in texts])
        max_length = self.task.model.max_length
        return [[*found, END][:max_length] if text.strip() else [] for text, found in zip(texts, ids)]

    def translate_ids(
        self, sources: Sequence[Sequence[int]], beam: int | None = None, length_penalty: float | None = None
    ) -> list[list[int]]:
        """The translation of each source, without <eos>; beam and penalty are those of the run's test if none are
        given."""
        decoding = self.task.decoding
        chosen = [index for index, source in enumerate(sources) if source]
        translations: list[list[int]] = [[] for _ in sources]
        found = translate_ids(
            self.task.model,
            [sources[index] for index in chosen],
            beam=decoding["beam"] if beam is None else beam,
            alpha=decoding["length_penalty"] if length_penalty is None else length_penalty,
            max_length=self.task.model.max_length,
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
        device = self.task.model.output.weight.device
        inputs = torch.tensor([[BEGIN, *translation]], device=device)
        layers = self.task.model.attention(torch.tensor([source], device=device), inputs).get("cross")
        if not layers:
            raise UserError("This model has no attention to draw: all it knows of the source is one state.")
        tokens = [self.tokenizer.tokens(ids) for ids in (source, [*translation, END])]
        return tokens[0], tokens[1], layers[-1][0].mean(dim=0)


def load_model(run: Path) -> Model:
    """The model of a run's folder, on the CPU, or on a GPU where there is one; of an unfinished run that is said.

    Raises:
        UserError: as for `load_trained`; also for a run of another task.
    """
    trained = load_trained(run, "translate")
    say_if_unfinished(trained)
    return Model(trained.task, trained.tokenizer)  # type: ignore[arg-type]


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
        texts = given_texts(given.text)
        if given.attention and (len(texts) != 1 or not texts[0].strip()):
            raise UserError(f"--attention draws one sentence, and there are {sum(map(bool, map(str.strip, texts)))}.")
        sources, max_length = model.encode(texts), model.task.model.max_length
        for number, source in enumerate(sources, start=1):
            if source and source[-1] != END:
                print(
                    f"Sentence {number} is cut at {max_length} tokens: the model knows no more positions.",
                    file=sys.stderr,
                )
        translations = model.translate_ids(sources, given.beam, given.length_penalty)
        for ids in translations:
            console.say(on_one_line(model.tokenizer.decode(ids)))
        if given.attention:
            tokens, written, weights = model.alignment(sources[0], translations[0])
            seen = torch.ones(weights.shape, dtype=torch.bool)
            part = Map("cross", written, tokens, weights.cpu()[None, None], seen, "mean of the last layer's heads")
            name = model.task.hparams["architecture"]["model"]["name"]
            try:
                draw(part, f"model={name}").save(given.attention)
            except ValueError as error:
                raise UserError(f"--attention {given.attention}: {error}; name a .png file.") from None

    run_command(command)


if __name__ == "__main__":
    main()
