"""Predict who said a sentence, and show which words decide: `python -m speechformer.predict RUN "sentence" ...`.

`analysis.leave_one_out` defines the importance of a word.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from tabulate import tabulate

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser

if TYPE_CHECKING:
    from speechformer.analysis.leave_one_out import Prediction


def format_prediction(prediction: Prediction, most: int = 5) -> str:
    """Format a prediction for the terminal, with up to `most` words for the class and as many against it."""
    shares = sorted(prediction.probabilities.items(), key=lambda item: -item[1])
    rows = [(name, console.format_metric("accuracy", share), "█" * round(30 * share)) for name, share in shares]
    bars = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "left")).splitlines()
    notes = []
    ranked = sorted(zip(prediction.weights or [], prediction.words), key=lambda pair: -abs(pair[0]))
    for label, sign in (("for", 1), ("against", -1)):
        if words := [f"{word} {weight:+.2f}" for weight, word in ranked if sign * weight >= 0.005][:most]:
            notes.append(f"{label} {prediction.speaker}: {', '.join(words)}")
    if prediction.weights and not notes:
        notes = ["no single word changes ln P by 0.005 or more"]
    text = prediction.text if len(prediction.text) <= 200 else f"{prediction.text[:199]}…"
    return "\n".join([text, *(f"  {line}".rstrip() for line in (*bars, *notes, *prediction.notes))])


def predict(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    texts = arguments.text and read_sentences(arguments.text)
    (run,) = load_runs([arguments.run], arguments.checkpoint, "predict")
    for text in texts or read_sentences([]):
        prediction = run.predict(text)
        as_json = arguments.json and json.dumps(prediction.as_json(), ensure_ascii=False)
        console.say(as_json or format_prediction(prediction))


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
