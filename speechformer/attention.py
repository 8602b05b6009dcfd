"""Draw the attention weights of every layer and head: `python -m speechformer.attention RUN "sentence"`.

The command writes one PNG or SVG for each part of the model, and the page of `python -m speechformer.play`, opened on
the sentence, if that page computes the model. It prints a sanity check of the weights and a line for each head. With
`--beside RUN ...` it compares several runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser, short_name
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError, fail

if TYPE_CHECKING:
    from speechformer.analysis.attention_maps import AttentionMap, Check
    from speechformer.analysis.heads import HeadScores

MAX_TOKENS = 128  # on each side; larger pictures cannot be read


def format_checks(checks: Sequence[Check]) -> str:
    """Format the sanity check for the terminal."""
    rows = [["", "worst", "tolerance"]]
    for check in checks:
        verdict = "-" if check.worst is None else "pass" if check.passed else "FAIL"
        worst = "does not apply" if check.worst is None else f"{check.worst:.1e}"
        rows.append([f"{verdict:4}  {check.description}", worst, f"{check.tolerance:.0e}"])
    return console.table(rows)


def format_heads(maps: Sequence[AttentionMap], scores: HeadScores | None = None) -> str:
    """Format a line for each head: entropy, distance, its scores if there are any, and the key with the largest mean.

    The mean is over the queries that may attend to the key: otherwise causal masks would favour the first keys.
    """
    shown = {"previous": "to previous", "first": "to first", "induction": "induction", "cost": "loss without"}
    columns = [] if scores is None else [name for name in shown if getattr(scores, name) is not None]
    rows = [["", "entropy", "distance", *(shown[name] for name in columns), "attends most to"]]
    for part in maps:
        entropy, distance = part.entropy(), part.distance()
        means = part.weights.sum(dim=2) / part.mask.sum(dim=0).clamp(min=1)
        for layer, n in itertools.product(*map(range, entropy.shape)):
            mean, key = means[layer, n].max(dim=0)
            far = "-" if distance is None else f"{distance[layer, n]:.1f}"
            name = f"{part.name}, layer {layer + 1}, head {n + 1}"
            own = [f"{getattr(scores, column)[layer, n]:{'+' * (column == 'cost')}.3f}" for column in columns]
            rows.append([name, f"{entropy[layer, n]:.2f}", far, *own, f"{part.keys[int(key)]} ({mean:.2f})"])
    return console.table(rows)


def attention(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    sentences = arguments.text and read_sentences(arguments.text)
    runs = load_runs([arguments.run, *arguments.beside], arguments.checkpoint)
    sentences = sentences or read_sentences([])
    if len(sentences) != 1:
        raise UserError(f"Give one sentence, not {len(sentences)}; put it in quotes, before --beside.")

    from speechformer.analysis.attention_maps import check_maps, save
    from speechformer.analysis.play_page import write_page

    (text,) = sentences
    default = Path("outputs/attention") / runs[0].directory.resolve().name / short_name(text)
    output, passed, maps_of_runs = OutputFolder(arguments.output or default), True, []
    for run in runs:
        inputs = run.read(text, MAX_TOKENS)
        maps = run.attention(inputs)
        checks = check_maps(run.model, inputs.ids, maps)
        scores, notes = None, list(inputs.notes)
        try:
            scores = run.heads(inputs)
        except UserError as error:
            notes.append(str(error).rstrip("."))
        console.say("; ".join([f"{run.directory.name} ({run.label})", *notes]))
        console.say(f"{format_checks(checks)}\n{format_heads(maps, scores)}")
        passed = passed and all(check.passed for check in checks)
        maps_of_runs.append(maps)
    largest = (
        max(float(part.weights.abs().max()) for maps in maps_of_runs for part in maps) if len(runs) > 1 else None
    )
    for number, (run, maps) in enumerate(zip(runs, maps_of_runs), start=1):
        for part in maps:
            name = f"{number}_{part.name}" if len(runs) > 1 else part.name
            path = output.file(f"{name}.{arguments.format}")
            save(part, run.title, path, largest)
            console.say(str(path))
    try:
        write_page(runs, output.file("attention.html"), text, alone=True)
        console.say(str(output.path / "attention.html"))
    except UserError as error:
        console.say(f"No page was written. {error}")
    if not passed:
        fail("the weights are not valid attention weights; see FAIL above.")


def main() -> None:
    """Run the command line."""
    parser = run_parser(
        "attention", "Draw the attention weights of every layer and head, as pictures and HTML; check them."
    )
    parser.add_argument("text", nargs="*", help="one sentence (default: a line of standard input)")
    beside = "more runs, to compare with"
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="RUN", help=beside)
    folder = "folder to write to (default: outputs/attention/NAME_OF_RUN/SENTENCE)"
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the pictures (default: png)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=folder)
    parser.run(attention)


if __name__ == "__main__":
    main()
