"""Write a page on which a trained run is live: `python -m speechformer.play RUN [RUN ...]`.

The page holds the weights and computes the model in the browser: type a sentence, change positions and patterns,
switch heads off. It is one HTML file that works from disk and loads nothing.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser, short_name
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError


def play(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    text = None if arguments.text is None else read_sentences([arguments.text])[0]
    name = short_name("_and_".join(folder.resolve().name for folder in arguments.run))
    path: Path = arguments.output or Path("outputs/play") / f"{name}.html"
    if path.suffix != ".html":
        raise UserError(f"--output {path}: name a file that ends with .html.")
    runs = load_runs(arguments.run, arguments.checkpoint)

    from speechformer.analysis.play_page import write_page

    lines = write_page(runs, OutputFolder(path.parent).file(path.name), text, alone=bool(arguments.checkpoint))
    console.say("\n".join([*lines, f"{path} ({path.stat().st_size / 1e6:.1f} MB)"]))
    if not arguments.no_open:
        webbrowser.open(path.resolve().as_uri())


def main() -> None:
    """Run the command line."""
    about = "Write one HTML page on which trained runs are live, two of them side by side, and open it."
    parser = run_parser("play", about, "folder of a run; of several, to compare them", nargs="+")
    parser.add_argument("--text", help="the sentence that the page opens with (default: an example)")
    default = "outputs/play/NAMES_OF_RUNS.html"
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"file to write (default: {default})")
    parser.add_argument("--no-open", action="store_true", help="only write the page")
    parser.run(play)


if __name__ == "__main__":
    main()
