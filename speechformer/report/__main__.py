"""Summarise runs: `python -m speechformer.report FOLDER...`.

Read every `result.json` below the folders, and write report.md, report.html (one file, figures inside), tables/*.csv
and figures/*.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.corpora.files import OutputFolder
from speechformer.errors import ArgumentParser, run_command

if TYPE_CHECKING:
    from speechformer.report.results import Table


def write_report(folders: list[Path], output: Path, plots: bool = True, pages: Sequence[Path] = ()) -> list[Table]:
    """Read the runs under `folders`, write the report into `output` and render `pages` in place.

    Raises:
        UserError: there is no result, or a page asks for what the results do not have.
    """
    from speechformer.report.claims import judge
    from speechformer.report.csv_files import write_csv_files
    from speechformer.report.page import compose, to_html
    from speechformer.report.results import build_tables, read_runs

    runs, remarks = read_runs(folders)
    tables, repeated = build_tables(runs)
    folder = OutputFolder(output)
    page, document = folder.file("report.html"), folder.file("report.md")
    judgements = judge(tables)
    write_csv_files(tables, judgements, folder)
    pictures = {}
    if plots:
        from speechformer.report.plots import draw_figures

        for name, figures in draw_figures(tables, folder, judgements).items():
            pictures[name] = [(path.relative_to(output).as_posix(), caption) for path, caption in figures]
    content = compose(tables, judgements, runs, remarks + repeated, pictures)
    document.write_text(content, encoding="utf-8")
    page.write_text(to_html(content, output), encoding="utf-8")
    if pages:
        from speechformer.report.pages import Context, update

        functions = Context(tables, judgements, runs).functions()
        for path in pages:
            console.say(f"{path}: {'updated' if update(path, functions) else 'unchanged'}")
    return tables


def print_table(table: Table) -> None:
    """Print the main metric of each row."""
    from speechformer.report.tables import result_cell

    cells = (str(result_cell(row, table.metric)).partition("<br>")[0] for row in table.rows)
    rows: list[tuple[str, ...]] = [("", "runs", table.metric)]
    rows += [*((row.label, row.state, cell) for row, cell in zip(table.rows, cells))]
    console.say(f"{table.title} ({table.corpus}, {table.protocol})\n{console.table(rows)}\n")


def main() -> None:
    """Run the command line."""
    about = "Summarise runs in tables, figures and one page."
    parser = ArgumentParser(prog="python -m speechformer.report", description=about)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="searched for result.json files")
    parser.add_argument("--output", type=Path, default=Path("outputs/report"), help="folder (outputs/report)")
    parser.add_argument("--pages", nargs="+", type=Path, default=[], metavar="PAGE", help="Markdown with templates")
    parser.add_argument("--no-plots", action="store_true", help="tables only, which is faster")
    arguments = parser.parse_args()

    def command() -> None:
        for table in write_report(arguments.folders, arguments.output, not arguments.no_plots, arguments.pages):
            print_table(table)
        console.say(f"{arguments.output}: report.md, report.html, tables/*.csv, figures/*.png")

    run_command(command)


if __name__ == "__main__":
    main()
