"""Test trained runs again, or their ensemble: `python -m speechformer.evaluate RUN [RUN ...]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from speechformer import console
from speechformer.analysis.command_line import load_runs, run_parser


def test_again(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    runs = load_runs(arguments.run, arguments.checkpoint)

    from speechformer.training.evaluation import default_folder, evaluate, prepare, results_of, with_corpus, write

    if arguments.corpus is not None:
        runs = [with_corpus(run, arguments.corpus) for run in runs]
    results_of(runs)  # which checks them, before a folder is made
    output = prepare(arguments.output or default_folder(runs))
    result = evaluate(runs, arguments.root)
    if arguments.study is not None:
        result["config"]["study"] = arguments.study
    console.say(console.table(result["summary"]))
    console.write(str(write(result, runs[0], output)))


def main() -> None:
    """Run the command line."""
    about = (
        "Test a trained run again. Of several, test their ensemble: the mean of their probabilities decides. The "
        "first run decides block_size, lengths, beam and mixture with counts. The result is one for `report`."
    )
    parser = run_parser("evaluate", about, "folder of a finished run; of several, an ensemble", nargs="+")
    default = "outputs/evaluate/FIRST_RUN[_and_NUMBER_more]_HASH"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"folder to write (default: {default})")
    parser.add_argument("--root", metavar="FOLDER", help="folder of the corpus (default: where the first run had it)")
    corpus = "folder of text (corpus=text), for models from elsewhere"
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help=corpus)
    parser.add_argument("--study", help="study in which the report shows it (default: that of the first run)")
    parser.run(test_again)


if __name__ == "__main__":
    main()
