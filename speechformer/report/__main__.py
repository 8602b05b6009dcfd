"""Summarise runs: `python -m speechformer.report FOLDER...`.

Read every `result.json` below the folders, and write report.md, report.html (one file, figures inside), every table
as CSV and LaTeX, and every figure as PNG, SVG and PDF.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer import console
from speechformer.corpora.files import OutputFolder
from speechformer.errors import ArgumentParser, pick, run_command

if TYPE_CHECKING:
    from speechformer.report.labels import Options
    from speechformer.report.results import Run, Table


def read(folders: list[Path], options: Options) -> tuple[list[Table], list[Run], list[str]]:
    """Return the tables of the runs under `folders`, the runs, and what is left out."""
    from speechformer.report.labels import arrange
    from speechformer.report.results import build_tables, read_runs, with_baselines

    runs, remarks = read_runs(folders)
    runs = with_baselines(runs, options.baselines)
    tables, repeated = build_tables(runs)
    arrange(tables, options)
    return tables, runs, remarks + repeated


def write_report(
    folders: list[Path],
    output: Path,
    plots: bool = True,
    pages: Sequence[Path] = (),
    options: Options | None = None,
) -> list[Table]:
    """Read the runs under `folders`, write the report into `output` and render `pages` in place.

    Raises:
        UserError: there is no result, or an option or a page asks for what the results do not have.
    """
    from speechformer.report import probe_map, search, tuning
    from speechformer.report.claims import judge
    from speechformer.report.csv_files import write_tables
    from speechformer.report.document import to_html
    from speechformer.report.labels import Options
    from speechformer.report.page import compose

    options = options or Options()
    tables, runs, remarks = read(folders, options)
    folder = OutputFolder(output)
    page, document = folder.file("report.html"), folder.file("report.md")
    judgements = judge(tables)
    pictures = {}
    if plots:
        from speechformer.report.plots import draw_figures

        for name, figures in draw_figures(tables, folder, judgements, options.formats).items():
            pictures[name] = [(path.relative_to(output).as_posix(), caption) for path, caption in figures]
    formats = options.formats if plots else None
    cells = probe_map.content(tables, folders)
    searched = [*search.sections(folders, folder, formats), *tuning.sections(folders)]
    searched = [*probe_map.sections(cells, options.title, folder, formats), *searched]
    content, exports = compose(tables, judgements, runs, remarks, pictures, options.title, searched)
    write_tables(tables, judgements, exports, folder)
    document.write_text(content, encoding="utf-8")
    page.write_text(to_html(content, exports, output), encoding="utf-8")
    if pages:
        from speechformer.report.pages import all_functions, update

        functions = all_functions(tables, judgements, runs, cells)
        for path in pages:
            console.say(f"{path}: {'updated' if update(path, functions) else 'unchanged'}")
    return tables


def print_table(table: Table) -> None:
    """Print the held-out metric, if there is one, and the main metric of each row."""
    from speechformer.report.tables import heading, result_cell

    metrics = [metric for metric in (table.held_out, table.metric) if metric]
    rows: list[tuple[str, ...]] = [("", "runs", *map(heading, metrics))]
    for row in table.rows:
        rows.append((row.label, row.state, *(str(result_cell(row, own)).partition("<br>")[0] for own in metrics)))
    console.say(f"{table.title} ({table.corpus}, {table.protocol})\n{console.table(rows)}\n")


def main() -> None:
    """Run the command line."""
    about = "Summarise runs in tables, figures and one page."
    parser = ArgumentParser(prog="python -m speechformer.report", description=about)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="searched for result.json files")
    parser.add_argument("--output", type=Path, default=Path("outputs/report"), help="folder (outputs/report)")
    parser.add_argument("--pages", nargs="+", type=Path, default=[], metavar="PAGE", help="Markdown with templates")
    parser.add_argument("--no-plots", action="store_true", help="tables only, which is faster")
    parser.add_argument("--reference", metavar="ROW", help="compare the other rows of its table with this one")
    add = parser.add_argument
    add("--label", action="append", default=[], metavar="NAME=LABEL", help="name a row or setting: model=alibi=ALiBi")
    add("--order", nargs="+", default=[], metavar="ROW", help="rows that come first")
    add("--title", help="of the page")
    add("--formats", default="png,svg,pdf", help="of the figures (png,svg,pdf); png is always written")
    add("--baselines", type=Path, default=Path("outputs/baselines"), metavar="FOLDER", help="(outputs/baselines)")
    arguments = parser.parse_args()

    def command() -> None:
        from speechformer.report.labels import Options

        formats = tuple(arguments.formats.split(","))
        for name in formats:
            pick(dict.fromkeys(("png", "svg", "pdf"), name), name, "--formats")
        about = (arguments.reference, arguments.label, arguments.order, arguments.title, formats, arguments.baselines)
        own = (arguments.folders, arguments.output, not arguments.no_plots, arguments.pages)
        for table in write_report(*own, Options(*about)):
            print_table(table)
        figures = "" if arguments.no_plots else f", figures ({arguments.formats})"
        console.say(f"{arguments.output}: report.md, report.html, tables (CSV, LaTeX){figures}")

    run_command(command)


if __name__ == "__main__":
    main()
