"""Write the report: `report.md`, `report.html` (one file, figures inside), `tables/` (CSV, LaTeX) and `figures/`.

To add a table or figure of your own, give `write_report` one more function from a study to tables or figures:

    studies = load_studies(["outputs/sweeps"])
    write_report(studies, "outputs/report", figures=[*FIGURES, my_figure])
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import markdown
import pandas as pd
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markdown.extensions.toc import TocExtension
from markupsafe import Markup

from speechformer import console
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError
from speechformer.escape import escape_markdown, one_line, spreadsheet_cell
from speechformer.paths import path_of
from speechformer.report.figures import FIGURES, FORMATS, Figures, search_figures, style, write
from speechformer.report.load import FAILED, Study, arrange, build_studies, read_runs
from speechformer.report.tables import (
    INTERVAL,
    TABLES,
    Table,
    differences,
    headline,
    number,
    results,
    searches,
    tuned,
    with_arrow,
)

TEMPLATES = ImmutableSandboxedEnvironment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    finalize=lambda value: value if isinstance(value, Markup) else escape_markdown(str(value)),  # all is from outside
    trim_blocks=True,
    lstrip_blocks=True,
)
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "−": "$-$", "×": r"$\times$"}
    | {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)


@dataclass
class Section:
    """One study, search or tuned sweep in the report.

    Attributes:
        name: of its anchor and files.
        figures: path of the PNG relative to the report, title and caption of each.
        failures: what failed.
    """

    name: str
    heading: str
    about: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def load_studies(folders: Iterable[str | Path], baselines: str | Path | None = None) -> list[Study]:
    """Read the runs under some folders as studies.

    Args:
        baselines: a folder with baselines, which are added to runs on the same corpus.

    Raises:
        UserError: a folder does not exist, or there is no readable result.
    """
    return read_studies(map(path_of, folders), None if baselines is None else path_of(baselines))[0]


def read_studies(folders: Iterable[Path], baselines: Path | None) -> tuple[list[Study], list[str]]:
    """Read the runs under some folders as studies, with remarks on what is left out; see `load_studies`."""
    runs, remarks = read_runs(folders)
    if baselines is not None:
        with suppress(UserError):  # there is none
            runs += [run for run in read_runs([baselines])[0] if run.baseline and run not in runs]
    studies, repeated = build_studies(runs)
    if not studies:
        raise UserError(f"There are {len(runs)} baselines, but no run to compare with them.")
    return studies, remarks + repeated


def write_report(
    studies: Sequence[Study],
    output: str | Path,
    *,
    title: str | None = None,
    remarks: Sequence[str] = (),
    searched: Sequence[Path] = (),
    tables: Sequence[Callable[[Study], Iterator[Table]]] = TABLES,
    figures: Sequence[Callable[[Study], Figures]] = FIGURES,
    formats: Sequence[str] = FORMATS,
) -> None:
    """Write the report of some studies into a folder.

    Args:
        title: of the page; by default that of its only study, or the number of runs.
        remarks: what is left out.
        searched: folders that may hold searches and tuned sweeps, which get sections of their own.
        tables: functions that yield the tables of a study.
        figures: functions that yield the figures of a study, with captions; none gives a report without figures.
        formats: of the figures, beside PNG.

    Raises:
        UserError: a study has not a column that it names, or a file of the folder is not of a report.
    """
    for study in studies:
        for name in study.columns:
            if name not in study.runs:
                raise UserError(f"{study.title} has no column {name}; the names are those of `study.runs`.")
    folder, sections = OutputFolder(Path(output)), []
    document, page = folder.file("report.md"), folder.file("report.html")

    def add(section: Section, name: str, drawn: Figures) -> None:
        for place, (figure, caption) in enumerate(drawn):
            path = write(figure, folder.file, f"{section.name}_{name}" + (f"_{place + 1}" if place else ""), formats)
            heading = f"{section.heading}: {name.replace('_', ' ')}"
            section.figures.append((path.relative_to(folder.path).as_posix(), heading, caption))

    with style():
        for study in studies:
            section = Section(study.name, study.heading, [*about(study)])
            section.tables = [table for function in tables for table in function(study)]
            section.failures = [
                f"{run.status.capitalize()}: {run.variant}, seed {run.seed}: {run.error or 'no reason given'}"
                for run in study.runs[study.runs["status"].isin(FAILED)].itertuples()
            ]
            for function in figures:
                add(section, function.__name__, function(study))
            sections.append(section)
        for place, (table, search) in enumerate(searches(searched)):
            sections.append(Section(f"search{place or ''}", table.heading, tables=[table]))
            add(sections[-1], "search", search_figures(search) if figures else iter(()))
        for place, table in enumerate(tuned(searched)):
            sections.append(Section(f"tuning{place or ''}", table.heading, tables=[table]))
    write_data(studies, folder)
    for section in sections:
        for table in section.tables:
            table.name = f"{section.name}_{table.name}"
            write_csv(table.frame.replace("\n", " ", regex=True), folder.file(f"tables/{table.name}.csv"))
            folder.file(f"tables/{table.name}.tex").write_text(as_latex(table), encoding="utf-8")
    folder.remove_stale("figures/*")
    folder.remove_stale("tables/*")
    runs = {id(run): run for study in studies for run in (*study.results, *study.counted)}.values()
    title = title or (studies[0].heading if len(studies) == 1 else f"Results of {len(runs)} runs")
    found = [(study, sentence) for study in studies if (sentence := headline(study))]
    text = TEMPLATES.get_template("page.md").render(
        title=title,
        sections=sections,
        remarks=remarks,
        found=found,
        states=Counter(run.status for run in runs),
        baselines=sum(run.baseline is not None for run in runs),
        outdated=sum(run.is_outdated for run in runs),
        versions=sorted({f"torch {run.result.get('versions', {}).get('torch', 'unknown')}" for run in runs}),
        table=as_markdown,
    )
    document.write_text(text, encoding="utf-8")
    page.write_text(as_page(title, text, folder.path), encoding="utf-8")


def about(study: Study) -> Iterator[str]:
    """Yield the corpus, protocol, sizes and scoring of a study."""
    protocol = ", ".join(f"{k}={str(v).lower()}" for k, v in sorted(study.protocol.items()) if k != "name")
    translated = f", {study.direction}" if study.direction else ""
    corpus = f"Corpus {study.corpus}{translated}, sha256 {study.sha256[:12] or 'unknown'}"
    parts = [f"{corpus}; protocol={study.protocol['name']} ({protocol})."]
    if counts := study.counts:
        sizes = [run.counts["train"] for run in study.results if run.counts]
        trained = " to ".join(f"{size:,}" for size in dict.fromkeys((min(sizes), max(sizes))))
        parts.append(
            f"Trained on {trained} {study.unit}, tested on {counts['test']:,}, of which {counts['test_in_train']} "
            "also appear in the training set."
        )
        tests = pd.DataFrame([*counts.get("tests", {}).values()])
        if "vocabulary" in counts and "unknown_tokens" in tests:
            rate = number("unknown_rate", tests["unknown_tokens"].sum() / max(1, tests["tokens"].sum()))
            parts.append(f"The vocabulary has {counts['vocabulary']:,} entries; {rate} % of test words are unknown.")
    usual = f"Rows are named by what differs from the usual settings: {study.usual}." if study.usual else ""
    yield " ".join(filter(None, [*parts, study.note, usual]))
    for name, signature in study.example.result.get("scoring", {}).items():
        yield f"{name}: {signature}"


# Files


def write_data(studies: Sequence[Study], folder: OutputFolder) -> None:
    """Write the runs, variants, curves and differences of all studies in full precision to `tables/`."""
    data = {
        "runs": [study.with_baselines for study in studies],
        "variants": [pd.DataFrame(variant_rows(study)) for study in studies],
        "curves": [study.curves for study in studies],
        "differences": [pd.DataFrame(difference_rows(study)) for study in studies],
    }
    for name, frames in data.items():
        keyed = {
            (study.name, study.task, study.protocol["name"], study.sha256): frame
            for study, frame in zip(studies, frames)
            if len(frame)
        }
        if keyed:
            frame = pd.concat(keyed, names=["study", "task", "protocol", "corpus"])
            write_csv(frame.droplevel(-1).reset_index(), folder.file(f"tables/{name}.csv"))


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV in which a spreadsheet finds no formula."""
    frame.rename(columns=spreadsheet_cell).map(spreadsheet_cell).to_csv(path, index=False)


def variant_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant and metric: its final values over the seeds."""
    for variant in study.variants:
        for metric in dict.fromkeys([*(name for run in study.results for name in run.metrics), *study.columns]):
            if (own := study.summary(variant.label, metric)) is None:
                continue
            row = {"variant": variant.label, "metric": metric, "n": own.n, "mean": own.mean, "sd": own.sd}
            row["mean_low_95"], row["mean_high_95"] = own.confidence_interval
            row["prediction_low_95"], row["prediction_high_95"] = own.prediction_interval
            row["lowest"], row["highest"] = own.extremes
            yield row


def difference_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield a row for each difference of the table, in full precision."""
    for found in differences(study):
        effect = found.effect
        row = {"variant": found.label, "reference": found.reference, "metric": found.metric, "n": min(effect.n)}
        row |= {"difference": effect.mean, "low_95": effect.interval[0], "high_95": effect.interval[1]}
        row |= {"p": effect.p, "p_holm": found.p, "paired": effect.paired, "detectable": effect.detectable}
        yield row


def formatted(table: Table, escape: Callable[[str], str], bold: str, line_break: str) -> pd.DataFrame:
    """Return a table with cells and heads escaped, the lines of cells joined, and the first line of the best bold."""
    frame = table.frame.map(lambda cell: [escape(line) for line in cell.split("\n")])
    for row, column in table.bold:
        lines = frame.at[row, column]
        lines[0] = bold.format(lines[0])
    return frame.map(line_break.join).rename(columns=escape)


def as_markdown(table: Table) -> Markup:
    """Return a table as Markdown."""
    frame = formatted(table, escape_markdown, "**{}**", "<br>")
    align = ["left", *["right"] * (len(frame.columns) - 1)]
    return Markup(frame.to_markdown(index=False, colalign=align, disable_numparse=True))


def latex_text(text: str) -> str:
    """Return a text on one line as LaTeX."""
    return one_line(text, 4000).translate(LATEX)


def first_lines(table: Table) -> Table:
    """Return a table without the second lines of cells, which have the intervals."""
    frame = table.frame.map(lambda cell: cell.partition("\n")[0])
    return replace(table, frame=frame, note=table.note.replace(f", and the {INTERVAL} of the mean", ""))


def as_latex(table: Table) -> str:
    """Return the columns of a table that fit a paper, without the second lines of cells; it needs booktabs."""
    short, columns = first_lines(table), table.latex or list(table.frame)
    bold = {(row, column) for row, column in table.bold if column in columns}
    frame = formatted(replace(short, frame=short.frame[columns], bold=bold), latex_text, r"\textbf{{{}}}", " ")
    layout = "l" + "r" * (len(columns) - 1)
    text = frame.to_latex(index=False, column_format=layout, caption=latex_text(short.note) or None)
    return "% needs \\usepackage{booktabs}\n" + text


def as_page(title: str, text: str, folder: Path) -> str:
    """Return the report as one HTML page, with its figures inside."""

    def inline(match: re.Match[str]) -> str:
        data = (folder / match[1]).read_bytes()
        width = 2 * int.from_bytes(data[16:20], "big") // 3  # of a PNG, whose dots are finer than those of a page
        return f'src="data:image/png;base64,{base64.b64encode(data).decode()}" width="{width}"'

    converter = markdown.Markdown(extensions=["tables", "md_in_html", TocExtension(toc_depth="2-2")])
    body = re.sub('src="(figures/[^"]+)"', inline, converter.convert(text))
    toc: str = converter.toc
    return TEMPLATES.get_template("page.html").render(title=title, contents=Markup(toc), body=Markup(body))


def say(study: Study) -> None:
    """Print the held-out metric, if there is one, and the main metric of each variant."""
    table = first_lines(next(results(study)))
    heads = {"", "runs", *(with_arrow(study, metric) for metric in (study.held_out, study.metric) if metric)}
    frame = table.frame[[name for name in table.frame if name in heads]]
    console.say(f"{study.title} ({study.corpus}, {study.protocol['name']}). {table.note}")
    console.say(f"{console.table([list(frame), *frame.to_numpy().tolist()])}\n")
    if sentence := headline(study):
        console.say(f"{sentence}\n")


def report(
    folders: Sequence[Path],
    output: Path,
    *,
    title: str | None = None,
    baselines: Path | None = None,
    draw: bool = True,
    formats: Sequence[str] = FORMATS,
    **arrangement: Any,
) -> list[Study]:
    """Read the runs under some folders, write their report and return the studies; see `arrange` and `write_report`.

    Raises:
        UserError: there is no result, or an option asks for what the results do not have.
    """
    studies, remarks = read_studies(folders, baselines)
    arrange(studies, **arrangement)
    shown: dict[str, Any] = {"remarks": remarks, "searched": folders, "figures": FIGURES if draw else []}
    write_report(studies, output, title=title, formats=formats, **shown)
    return studies
