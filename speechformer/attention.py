"""Draw the attention weights of every layer and head: `python -m speechformer.attention RUN "sentence"`.

The command writes one PNG for each part of the model and one HTML page that needs no network. It prints a sanity
check of the weights and a line for each head. With `--beside RUN ...` the page compares several runs. The page is
that of `python -m speechformer.play`, opened on the sentence; models that it does not compute get a static one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError, fail

if TYPE_CHECKING:
    from speechformer.analysis.attention_maps import AttentionMap, Check
    from speechformer.analysis.load import TrainedRun

MAX_TOKENS = 128  # on each side; larger pictures cannot be read


def format_checks(checks: Sequence[Check]) -> str:
    """Format the sanity check for the terminal."""
    rows: list[tuple[str, ...]] = [("", "worst", "tolerance")]
    for check in checks:
        if check.worst is None:
            rows.append((f"-     {check.description}", "does not apply", ""))
        else:
            verdict = "pass" if check.passed else "FAIL"
            rows.append((f"{verdict}  {check.description}", f"{check.worst:.1e}", f"{check.tolerance:.0e}"))
    return console.table(rows)


def format_heads(maps: Sequence[AttentionMap]) -> str:
    """Format a line for each head: entropy, distance, and the key with the largest mean weight.

    The mean is over the queries that may attend to the key: otherwise causal masks would favour the first keys.
    """
    rows: list[tuple[str, ...]] = [("", "entropy", "distance", "attends most to")]
    for part in maps:
        entropy, distance = part.entropy(), part.distance()
        means = part.weights.sum(dim=2) / part.mask.sum(dim=0).clamp(min=1)
        for layer, n in itertools.product(*map(range, entropy.shape)):
            mean, key = means[layer, n].max(dim=0)
            far = "-" if distance is None else f"{distance[layer, n]:.1f}"
            strongest = f"{part.keys[int(key)]} ({mean:.2f})"
            name = f"{part.name}, layer {layer + 1}, head {n + 1}"
            rows.append((name, f"{entropy[layer, n]:.2f}", far, strongest))
    return console.table(rows)


def examine(run: TrainedRun, text: str) -> tuple[list[AttentionMap], list[str], bool]:
    """Compute, check and print a run's maps; return them, notes on the run, and whether all checks passed."""
    from speechformer.analysis.attention_maps import check_maps

    inputs = run.read(text, MAX_TOKENS)
    maps = run.attention(inputs)
    checks = check_maps(run.model, inputs.ids, maps)
    console.say("; ".join([f"{run.directory.name} ({run.label})", *inputs.notes]))
    console.say(format_checks(checks))
    console.say(format_heads(maps))
    notes = inputs.notes if run.finished else [f"training not finished; weights of {run.checkpoint}", *inputs.notes]
    return maps, notes, all(check.passed for check in checks)


def save_pictures(titles: Sequence[str], maps: Sequence[Sequence[AttentionMap]], output: OutputFolder) -> None:
    """Write a PNG for each map of each run; several runs share one colour scale."""
    from speechformer.analysis.attention_maps import draw
    from speechformer.analysis.fonts import not_drawn

    several = len(maps) > 1
    if letters := not_drawn(token for parts in maps for part in parts for token in (*part.queries, *part.keys)):
        console.say(f"The pictures have boxes for {letters}: install a font with them, such as Noto Sans CJK.")
    scale = max(float(part.weights.max()) for parts in maps for part in parts) if several else None
    for number, (title, parts) in enumerate(zip(titles, maps), start=1):
        for part in parts:
            path = output.file(f"{f'{number}_' if several else ''}{part.name}.png")
            draw(part, title, scale).save(path)
            console.say(str(path))


def folder_name(text: str) -> str:
    """Return a name for the folder of a sentence: its first words, and six digits of its sha256."""
    words = "-".join(re.findall(r"[a-z0-9]+", text.lower()))[:40].strip("-")
    return f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def page_of(
    runs: Sequence[TrainedRun], text: str, shown: Sequence[tuple[str, Sequence[AttentionMap], Sequence[str]]]
) -> str:
    """Return the page on which the runs are live, opened on a sentence; if it cannot compute one, that of the maps.

    `shown` has the label, maps and notes of each run.
    """
    from speechformer.analysis import attention_page, play_page

    try:
        content, _ = play_page.export_runs(runs, alone=True)
    except UserError:
        return attention_page.render_page(text, shown)
    return play_page.render_page(content, text)


def one_sentence(texts: Sequence[str]) -> str:
    """Return the one sentence of `read_sentences`."""
    sentences = read_sentences(texts)
    if len(sentences) != 1:
        raise UserError(f"Give one sentence, not {len(sentences)}; put it in quotes.")
    return sentences[0]


def attention(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    for folder in arguments.beside:
        if not folder.is_dir() and not arguments.text:
            raise UserError(f"--beside {folder}: no such folder. Write the sentence before --beside.")
    text = arguments.text and one_sentence(arguments.text)
    runs = load_runs([arguments.run, *arguments.beside], arguments.checkpoint)

    from speechformer.analysis.load import unique_labels

    if len({run.task.name for run in runs}) > 1:
        tasks = ", ".join(f"task={run.task.name}" for run in runs)
        raise UserError(f"Compare runs of one task; these are of {tasks}.")
    text = text or one_sentence([])
    default = Path("outputs/attention") / runs[0].directory.resolve().name / folder_name(text)
    output = OutputFolder(arguments.output or default)
    examined = []
    for run in runs:
        try:
            examined.append(examine(run, text))
        except UserError as error:
            if not examined:
                raise
            console.say(str(error))
            examined.append(([], [str(error)], True))
    maps, notes, passed = zip(*examined)
    labels = unique_labels(runs)
    page = output.file("attention.html")
    if arguments.output and page.exists():
        console.say(f"The maps that were in {arguments.output} are replaced.")
    save_pictures([f"{runs[0].task.name}, model={label}" for label in labels], maps, output)
    page.write_text(page_of(runs, text, list(zip(labels, maps, notes))), encoding="utf-8")
    console.say(str(page))
    if not all(passed):
        fail("the weights are not valid attention weights; see FAIL above.")


def main() -> None:
    """Run the command line."""
    about = "Draw the attention weights of every layer and head, as PNG and HTML; check them."
    folder = "folder to write to (default: outputs/attention/NAME_OF_RUN/SENTENCE)"
    parser = run_parser("attention", about)
    parser.add_argument("text", nargs="*", help="one sentence (default: a line of standard input)")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="RUN", help="more runs, to compare with"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=folder)
    parser.run(attention)


if __name__ == "__main__":
    main()
