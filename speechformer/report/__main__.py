"""Summarise runs: `python -m speechformer.report FOLDER...`.

Read every `result.json` below the folders, and write report.md, report.html (one file, figures inside), every table
as CSV and LaTeX, and every figure as PNG, SVG and PDF.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from speechformer import console
from speechformer.errors import ArgumentParser, pick

FORMATS = ("png", "svg", "pdf")


def summarise(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    arguments.formats = arguments.formats.split(",")
    for name in arguments.formats:
        pick(dict.fromkeys(FORMATS, name), name, "--formats")

    from speechformer.report.page import report, say

    for study in report(**vars(arguments)):
        say(study)
    figures = ", figures" if arguments.draw else ""
    console.say(f"{arguments.output}: report.md, report.html, tables (CSV, LaTeX){figures}")


def main() -> None:
    """Run the command line."""
    about = "Summarise runs in tables, figures and one page."
    parser = ArgumentParser(prog="python -m speechformer.report", description=about)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="searched for result.json files")
    add("--output", type=Path, default=Path("outputs/report"), help="folder (outputs/report)")
    add("--columns", nargs="+", default=[], metavar="METRIC", help="metrics of the tables: test_accuracy")
    add("--reference", metavar="ROW", help="compare the other rows of its table with this one")
    label = "name a row or setting: model=alibi=ALiBi"
    add("--label", dest="labels", action="append", default=[], metavar="NAME=LABEL", help=label)
    add("--order", nargs="+", default=[], metavar="ROW", help="rows that come first")
    add("--title", help="of the page")
    add("--formats", default="png,svg,pdf", help="of the figures (png,svg,pdf); png is always written")
    add("--no-plots", dest="draw", action="store_false", help="tables only, which is faster")
    add("--baselines", type=Path, default=Path("outputs/baselines"), metavar="FOLDER", help="(outputs/baselines)")
    parser.run(summarise)


if __name__ == "__main__":
    main()
