"""Predict who said a sentence, and show which words decide: `python -m speechformer.predict RUN "sentence" ...`.

`analysis.erasure` defines the importance of a word.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser
from speechformer.corpora.special_tokens import PAD, UNKNOWN

if TYPE_CHECKING:
    from speechformer.analysis.erasure import Prediction


def format_prediction(prediction: Prediction, most: int = 5) -> str:
    """Format a prediction for the terminal, with up to `most` words for the class and as many against it."""
    from speechformer.tasks.text import note_unknown

    width = max(len(name) for name in prediction.probabilities)
    lines = [prediction.text if len(prediction.text) <= 200 else f"{prediction.text[:199]}…"]
    for name, share in sorted(prediction.probabilities.items(), key=lambda entry: -entry[1]):
        bar = "█" * round(30 * share)
        lines.append(f"  {name.ljust(width)}  {console.format_metric('accuracy', share):>7}  {bar}".rstrip())
    notes = important_words(prediction, most)
    ids = [PAD if known else UNKNOWN for known in prediction.known]
    if note := note_unknown(prediction.words, ids):
        notes.append(note)
    if not any(prediction.known):
        notes.append("no word is in the vocabulary: this is the prediction for <unk> alone")
    if prediction.left_out:
        notes.append(
            f"cut at {len(prediction.words)} words, as in training; {prediction.left_out} words were left out"
        )
    return "\n".join([*lines, *(f"  {note}" for note in notes)])


def important_words(prediction: Prediction, most: int) -> list[str]:
    """Return a line with the words that support the class, and one with those that speak against it."""
    if prediction.weights is None:
        return ["one word only: no importance without another word"]
    ranked = sorted(zip(prediction.weights, prediction.words), key=lambda entry: -abs(entry[0]))
    lines = []
    for label, direction in (("for", 1), ("against", -1)):
        words = [f"{word} {weight:+.2f}" for weight, word in ranked if direction * weight >= 0.005][:most]
        if words:
            lines.append(f"{label} {prediction.speaker}: {', '.join(words)}")
    return lines or ["no single word changes ln P by 0.005 or more"]


def predict(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    texts = arguments.text and read_sentences(arguments.text)
    (run,) = load_runs([arguments.run], arguments.checkpoint, "predict")
    for text in texts or read_sentences([]):
        prediction = run.predict(text)
        as_json = arguments.json and json.dumps(prediction.as_json(), ensure_ascii=False)
        console.say(as_json or format_prediction(prediction))
    if not arguments.json and sys.stdout.isatty():
        console.say("(the number after a word: the drop of ln P without it)")


def main() -> None:
    """Run the command line."""
    about = (
        "Predict who said a sentence. Print the probability of each speaker and the words that decide: by how much "
        "ln P of the predicted speaker drops when a word is left out (Li et al. 2016)."
    )
    parser = run_parser("predict", about, "folder of a run with task=classify")
    parser.add_argument("text", nargs="*", help="one or more sentences (default: the lines of standard input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sentence")
    parser.run(predict)


if __name__ == "__main__":
    main()
