"""Who said this? `python -m speechformer.predict RUN "sentence" ...`, or lines from standard input.

With the probability of each speaker stand the words that gave it away. A word's figure is by how much the logarithm
of the probability falls when that word is left out:

    w_t = ln P(c | all words) - ln P(c | all but the t-th)

Li, Monroe and Jurafsky 2016, "Understanding Neural Networks through Representation Erasure", equation 1 (there as a
share of ln P). Above zero a word speaks for the speaker c, below against. It is what this model would have said, not
why: two words that say the same can each be left out at no cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.analysis.load import Trained, given_sentences, load_trained, note_unknown, say_if_unfinished
from speechformer.errors import run_command

ROWS_AT_ONCE = 256


@dataclass
class Prediction:
    """What a classifier says of a sentence.

    `probabilities` by class, `speaker` the greatest of them; `words` that were read, whether each is `known`, and the
    `weights` of each for the speaker, in nats; none of a sentence of one word, which leaves nothing to read without
    it. `left_out` counts the words at the end that the model was not made to read.
    """

    text: str
    speaker: str
    probabilities: dict[str, float]
    words: list[str]
    known: list[bool]
    weights: list[float] | None
    left_out: int

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        weights: list[Any] = self.weights or [None] * len(self.words)
        words = [
            {"word": word, "known": known, "weight": weight}
            for word, known, weight in zip(self.words, self.known, weights)
        ]
        return {
            "text": self.text,
            "speaker": self.speaker,
            "probabilities": self.probabilities,
            "words": words,
            "words_left_out": self.left_out,
        }


@torch.no_grad()
def erasure(model: nn.Module, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
    """ln P of each class, [C], and by how much that of the most probable one falls without each of the T words, [T];
    None of one word."""
    log_C = model(ids_T[None]).log_softmax(dim=-1)[0]
    T = len(ids_T)
    if T == 1:
        return log_C, None
    others = torch.arange(T, device=ids_T.device)
    without = ids_T.expand(T, T)[others[:, None] != others].view(T, T - 1)
    c = log_C.argmax()
    falls = [log_C[c] - model(rows).log_softmax(dim=-1)[:, c] for rows in without.split(ROWS_AT_ONCE)]
    return log_C, torch.cat(falls)


def predict(run: Trained, text: str) -> Prediction:
    """Who said a text, after a run of task=classify. It is cut at the run's `block_size`, as all that it was trained
    and tested on."""
    words, ids = run.words(text)
    read = slice(run.block_size)
    log_C, weights = erasure(run.task.model, torch.tensor(ids[read], device=run.task.device))
    probabilities = dict(zip(run.task.hparams["classes"], log_C.exp().tolist()))
    return Prediction(
        text,
        max(probabilities, key=probabilities.__getitem__),
        probabilities,
        words[read],
        [index != 1 for index in ids[read]],
        None if weights is None else weights.tolist(),
        len(words) - len(words[read]),
    )


def in_words(prediction: Prediction, most: int = 5) -> str:
    """A prediction for the terminal."""
    width = max(len(name) for name in prediction.probabilities)
    lines = [prediction.text if len(prediction.text) <= 200 else f"{prediction.text[:199]}…"]
    for name, share in sorted(prediction.probabilities.items(), key=lambda entry: -entry[1]):
        lines.append(
            f"  {name.ljust(width)}  {console.format_metric('accuracy', share):>7}  {'█' * round(30 * share)}".rstrip()
        )
    if prediction.weights is None:
        lines.append("  one word: there is nothing to compare it with")
    else:
        ranked = sorted(zip(prediction.weights, prediction.words), key=lambda entry: -abs(entry[0]))
        for label, sign in (("for", 1), ("against", -1)):
            chosen = [f"{word} {weight:+.2f}" for weight, word in ranked if sign * weight >= 0.005][:most]
            if chosen:
                lines.append(f"  {label} {prediction.speaker}: {', '.join(chosen)}")
        if all(abs(weight) < 0.005 for weight in prediction.weights):
            lines.append("  no word alone changes it by 0.005 or more: others say the same, or none matters")
    ids = [0 if known else 1 for known in prediction.known]
    if note := note_unknown(prediction.words, ids):
        lines.append(f"  {note}")
    if not any(prediction.known):
        lines.append("  no word of it is known: this is what the model says of <unk>")
    if prediction.left_out:
        read = len(prediction.words)
        lines.append(f"  read were the first {read} words, as in training; {prediction.left_out} were left out")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.predict",
        description="Who said this? Probabilities, and the words that gave it away: by how much ln P of the speaker "
        "falls when a word is left out (Li et al. 2016).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run with task=classify")
    parser.add_argument("text", nargs="*", help="one or more sentences; none: the lines of standard input")
    parser.add_argument("--json", action="store_true", help="a JSON object for each sentence, a line each")
    parser.add_argument("--checkpoint", help="best.ckpt or last.ckpt; else the one that the run's figures are of")
    given = parser.parse_intermixed_args()

    def command() -> None:
        run = load_trained(given.run, "classify", checkpoint=given.checkpoint)
        texts = given_sentences(given.text)
        say_if_unfinished(run)
        for text in texts:
            found = predict(run, text)
            if given.json:
                console.say(json.dumps(found.as_json(), ensure_ascii=False))
            else:
                console.say(in_words(found))
        if not given.json and sys.stdout.isatty():
            console.say("(a word's figure: by how much ln P of that speaker falls without it)")

    run_command(command)


if __name__ == "__main__":
    main()
