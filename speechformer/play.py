"""Write a page on which a trained run is live: `python -m speechformer.play RUN [RUN ...]`.

The page holds the weights and computes the model in the browser: type a sentence, change positions and patterns,
switch heads off. It is one HTML file that works from disk and loads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun


def write_page(
    runs: Sequence[TrainedRun], path: Path | str, text: str | None = None, alone: bool = False
) -> list[str]:
    """Write the page of some runs, and return lines on what it holds.

    Args:
        text: the sentence that it opens with; None: an example.
        alone: only the loaded checkpoint of each run, without those beside it.

    Raises:
        UserError: the page cannot compute a model, would be too large, or the path is not ours to write.
    """
    from speechformer.analysis.play_page import choose_text, export_runs, render_page

    path = Path(path)
    check_name(path)
    content, lines = export_runs(runs, alone)
    page = OutputFolder(path.parent).file(path.name)
    page.write_text(render_page(content, text or choose_text(runs[0].tokenizer)), encoding="utf-8")
    return lines


def check_name(path: Path) -> None:
    """Require that the file of a page ends with .html."""
    if path.suffix != ".html":
        raise UserError(f"--output {path}: name a file that ends with .html.")


def play(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    text = None if arguments.text is None else read_sentences([arguments.text])[0]
    if arguments.output:
        check_name(arguments.output)
    runs = load_runs([arguments.run, *arguments.more], arguments.checkpoint)
    default = Path("outputs/play") / page_name([run.directory.resolve().name for run in runs])
    path = arguments.output or default
    console.say("\n".join(write_page(runs, path, text, alone=arguments.checkpoint is not None)))
    console.write(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if not arguments.no_open and can_open():
        webbrowser.open(path.resolve().as_uri())


def page_name(names: Sequence[str]) -> str:
    """Return the name of the page of runs; of one that is too long, its beginning and digits of its sha256."""
    joined = "_and_".join(names)
    digits = hashlib.sha256(joined.encode()).hexdigest()[:6]
    return f"{joined if len(joined.encode()) <= 240 else f'{joined[:58]}_{digits}'}.html"


def can_open() -> bool:
    """Return whether this machine has a browser with a window."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return not isinstance(browser, webbrowser.GenericBrowser) or isinstance(browser, webbrowser.BackgroundBrowser)


def main() -> None:
    """Run the command line."""
    about = "Write one HTML page on which trained runs are live, two of them side by side, and open it."
    parser = run_parser("play", about)
    parser.add_argument("more", type=Path, nargs="*", metavar="RUN", help="more runs, to compare with")
    parser.add_argument("--text", help="the sentence that the page opens with (default: an example)")
    default = "outputs/play/NAMES_OF_RUNS.html"
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"file to write (default: {default})")
    parser.add_argument("--no-open", action="store_true", help="only write the page")
    parser.run(play)


if __name__ == "__main__":
    main()
