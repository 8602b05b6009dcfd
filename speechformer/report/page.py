"""Write the report: `report.md`, `report.html` (one file, figures inside), `tables/` (CSV, LaTeX) and `figures/`.

To add a table or figure of your own, give `write_report` one more function from a study to tables or figures:

    studies = load_studies(["outputs/sweeps"])
    write_report(studies, "outputs/report", figures=[*FIGURES, my_figure])
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from speechformer import console
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError
from speechformer.escape import escape_markdown, one_line
from speechformer.report import tables as texts
from speechformer.report.figures import FIGURES, FORMATS, Figures, search_figures, style, write
from speechformer.report.load import (
    FAILED,
    Study,
    arrange,
    build_studies,
    read_runs,
    with_baselines,
)
from speechformer.report.statistics import Summary
from speechformer.report.tables import TABLES, Table

HERE = Path(__file__).parent
LATEX = str.maketrans(
    {"[": "{[}", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "–": "--", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
    | {"†": r"\dag{}", "‡": r"\ddag{}", "§": r"\S{}", "¶": r"\P{}", "…": r"\ldots{}", "≥": r"$\geq$"}
)
SPECIAL = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)
METHODS = (
    "Each row holds the runs of one configuration over several seeds. Weights are those after the last step; under "
    "protocol=clean, those of the checkpoint chosen on the validation part.",
    "86.8 ± 0.5 is the mean over the seeds and the sample standard deviation. The line below is the 95 % confidence "
    "interval of the mean (Student's t, scipy.stats.ttest_1samp).",
    "Differences are between means over seeds. Seeds are paired (ttest_rel) if their values correlate (r, one-sided "
    "5 %, four seeds or more); otherwise the test is Welch's (ttest_ind). Detectable is the smallest difference that "
    "so many seeds find with a probability of 80 %.",
    "Significant at 5 % means after Holm's correction over all differences of the table. The first sentences compare "
    "the best row, by the held-out part if there is one, with its best rival alone.",
    "Two intervals may overlap although the difference is significant: read the difference. Bold is the best value "
    "of a column, not a test.",
    "Test perplexity is the mean over the test files; per word and bits per byte do not depend on the tokenizer; in "
    "a sliding window every token has at least half a block before it.",
    "Intervals cover the spread over seeds, not over other test sets. For translations, ± over sentences is half the "
    "95 % confidence interval of sacreBLEU's bootstrap for one run.",
    "Baselines are exact and have no seed. Perplexities are per token; words outside the vocabulary count as <unk>. "
    "Known words leaves these tokens out, and unknown words is their share.",
    "Under protocol=paper, test sentences that also appear in the training set stay there; not in train is then the "
    "column to trust.",
)


@dataclass
class Section:
    """One study, search or tuned sweep in the report.

    Attributes:
        name: of its anchor.
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
    runs, _ = read_runs(map(Path, folders))
    return build_studies(with_baselines(runs, None if baselines is None else Path(baselines)))[0]


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
    folder = OutputFolder(Path(output))
    document, page = folder.file("report.md"), folder.file("report.html")
    sections = []
    with style():
        for study in studies:
            section = Section(study.name, study.heading, list(about(study)), failures=list(failures(study)))
            section.tables = [rename(table, study.name) for function in tables for table in function(study)]
            for function in figures:
                drawn = list(function(study))
                for number, (figure, caption) in enumerate(drawn, start=1):
                    name = f"{study.name}_{function.__name__}" + (f"_{number}" if len(drawn) > 1 else "")
                    path = write(figure, folder.file, name, formats).relative_to(folder.path).as_posix()
                    section.figures.append((path, f"{study.title}: {function.__name__.replace('_', ' ')}", caption))
            sections.append(section)
    sections += search_sections(searched, folder, formats if figures else None)
    for form in FORMATS:
        folder.remove_stale(f"figures/*.{form}")
    title = title or (studies[0].heading if len(studies) == 1 else f"Results of {total(studies)} runs")
    shown = overview(studies)
    content = {"title": title, "sections": sections, "remarks": remarks, "methods": METHODS, "overview": shown}
    content["found"] = [(study, sentence) for study in studies if (sentence := texts.headline(study))]
    content["summary"] = summary(studies)
    write_tables(studies, [shown, *(table for section in sections for table in section.tables)], folder)
    document.write_text(render("page.md", content, folder.path), encoding="utf-8")
    page.write_text(render("page.html", content, folder.path), encoding="utf-8")


def rename(table: Table, name: str) -> Table:
    """Give the file of a table the name of its study."""
    table.name = f"{name}_{table.name}"
    return table


def search_sections(
    folders: Sequence[Path], output: OutputFolder, formats: Sequence[str] | None
) -> Iterator[Section]:
    """Yield a section for each search and tuned sweep below some folders; without figures if `formats` is None."""
    for place, (folder, search) in enumerate(texts.searches(folders)):
        if (table := texts.search_table(folder, search)) is None:
            continue
        name = f"search{place or ''}"
        section = Section(name, table.heading, [table.note], [rename(table, name)])
        table.heading = table.note = ""
        for number, (figure, caption) in enumerate(search_figures(search) if formats is not None else ()):
            path = write(figure, output.file, f"{name}_{('history', 'importance')[number]}", formats or ())
            section.figures.append((path.relative_to(output.path).as_posix(), section.heading, caption))
        yield section
    for place, table in enumerate(texts.tuned(folders)):
        name = f"tuning{place or ''}"
        section = Section(name, table.heading, [table.note], [rename(table, name)])
        table.heading = table.note = ""
        yield section


def about(study: Study) -> Iterator[str]:
    """Yield the corpus, protocol, sizes and scoring of a study."""
    protocol = ", ".join(sorted(f"{k}={str(v).lower()}" for k, v in study.protocol.items() if k != "name"))
    direction = f", {study.direction}" if study.direction else ""
    corpus = f"Corpus {study.corpus}{direction}, sha256 {study.sha256[:12] or 'unknown'}"
    parts = [f"{corpus}; protocol={study.protocol['name']} ({protocol})."]
    if counts := study.counts:
        sizes = sorted({run.counts["train"] for run in study.results if run.counts})
        trained = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(
            f"Trained on {trained} {study.unit}, tested on {counts['test']:,}, of which {counts['test_in_train']} "
            "also appear in the training set."
        )
        tests = counts.get("tests", {}).values()
        if tests and "vocabulary" in counts and all("unknown_tokens" in test for test in tests):
            unknown, tokens = (sum(test[key] for test in tests) for key in ("unknown_tokens", "tokens"))
            rate = texts.number("unknown_rate", unknown / max(1, tokens))
            parts.append(f"The vocabulary has {counts['vocabulary']:,} entries; {rate} % of test words are unknown.")
    parts.append(study.note)
    if study.usual:
        parts.append(f"Rows are named by what differs from the usual settings: {study.usual}.")
    yield " ".join(filter(None, parts))
    for name, signature in study.example.result.get("scoring", {}).items():
        yield f"{name}: {signature}"


def failures(study: Study) -> Iterator[str]:
    """Yield a sentence on each run that failed."""
    for run in study.runs[study.runs["status"].isin(FAILED)].itertuples():
        yield f"{run.status.capitalize()}: {run.variant}, seed {run.seed}: {run.error or 'no reason given'}"


def total(studies: Sequence[Study]) -> int:
    """Return the number of runs and different baselines."""
    return len({id(run) for study in studies for run in (*study.results, *study.counted)})


def summary(studies: Sequence[Study]) -> str:
    """Return what there is: how many results, in which state, made with what."""
    runs = [*{id(run): run for study in studies for run in (*study.results, *study.counted)}.values()]
    states = Counter(run.status for run in runs)
    status = ", ".join(f"{states[word]} {word}" for word in ("finished", "diverged", *FAILED) if states[word])
    counted = sum(run.baseline is not None for run in runs)
    many = "s" if len(studies) != 1 else ""
    parts = [f"{len(runs)} results, {counted} of them baselines ({status}), in {len(studies)} table{many}."]
    names = ("python", "torch", "lightning")
    versions = {f"{name} {run.result.get('versions', {}).get(name)}" for run in runs for name in names}
    known = sorted(version for version in versions if not version.endswith(" None"))
    parts.append(f"Made with {', '.join(known) or 'unknown versions'}.")
    if old := sum(run.is_outdated for run in runs):
        parts.append(f"{old} were computed by an earlier version of the code, whose numbers differ.")
    return " ".join(parts)


def overview(studies: Sequence[Study]) -> Table:
    """Return the table of the studies."""
    rows = []
    for study in studies:
        counts = sorted({len(study.finished(variant.label)) for variant in study.variants})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rows.append([study.heading, study.corpus, study.protocol["name"], str(len(study.variants)), seeds])
    columns = ["table", "corpus", "protocol", "rows", "runs per row"]
    return Table("overview", "", pd.DataFrame(rows, columns=columns))


# Files


def write_tables(studies: Sequence[Study], shown: Sequence[Table], output: OutputFolder) -> None:
    """Write to `tables/` the runs, variants, curves and differences in full precision, and each table as shown."""
    data = {
        "runs": [pd.concat([s.runs, s.baselines]) if len(s.baselines) else s.runs for s in studies],
        "variants": [pd.DataFrame(variant_rows(study)) for study in studies],
        "curves": [study.curves for study in studies],
        "differences": [pd.DataFrame(difference_rows(study)) for study in studies],
    }
    for name, frames in data.items():
        named = []
        for study, frame in zip(studies, frames):
            place = {
                "study": study.name,
                "task": study.task,
                "protocol": study.protocol["name"],
                "corpus": study.sha256,
            }
            if len(frame):
                named.append(pd.concat([pd.DataFrame(place, index=frame.index), frame], axis="columns"))
        if named:
            frame = pd.concat(named)
            frame.to_csv(output.file(f"tables/{name}.csv"), index=False)
    for table in shown:
        output.file(f"tables/{table.name}.csv").write_text(as_csv(table), encoding="utf-8")
        output.file(f"tables/{table.name}.tex").write_text(as_latex(table), encoding="utf-8")
    for form in ("csv", "tex"):
        output.remove_stale(f"tables/*.{form}")


def variant_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant and metric: its final values over the seeds."""
    names = dict.fromkeys([*(name for run in study.results for name in run.metrics), *study.columns])
    for variant in study.variants:
        for metric in names:
            if (own := study.summary(variant.label, metric)) is not None:
                row = {"variant": variant.label, "metric": metric, **statistics_row(own)}
                if "¶" in texts.cautions(study, variant.label, metric):  # no normal distribution
                    row |= {"prediction_low_95": math.nan, "prediction_high_95": math.nan}
                yield row


def statistics_row(own: Summary) -> dict[str, Any]:
    """Return the statistics of some values by name."""
    names = ("mean_low_95", "mean_high_95", "prediction_low_95", "prediction_high_95", "lowest", "highest")
    ends = (*own.confidence_interval, *own.prediction_interval, *own.extremes)
    return {"n": own.n, "mean": own.mean, "sd": own.sd, **dict(zip(names, ends))}


def difference_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield a row for each difference of the table, in full precision."""
    for own in texts.differences(study):
        effect = own.effect
        low, high = effect.interval
        about = {"variant": own.label, "reference": own.reference, "metric": own.metric, "n": min(effect.n)}
        about |= {"difference": effect.mean, "low_95": low, "high_95": high, "p": effect.p, "p_holm": own.p}
        yield {**about, "paired": effect.paired, "correlation": effect.correlation, "detectable": effect.detectable}


def as_csv(table: Table) -> str:
    """Return a table as CSV; a line break inside a cell becomes a space."""
    return table.frame.map(lambda cell: cell.replace("\n", " ")).to_csv(index=False)


def as_latex(table: Table) -> str:
    """Return the columns of a table that fit a paper, without the second lines of cells; it needs booktabs."""
    frame = table.frame[table.latex or list(table.frame)].map(lambda cell: one_line(cell.partition("\n")[0], 4000))
    bold = pd.DataFrame("", frame.index, frame.columns)
    for row, column in table.bold:
        if column in frame:
            bold.loc[row, column] = "textbf:--rwrap;"
    styler = frame.style.apply(lambda _: bold, axis=None).hide(axis="index")
    styler = styler.format(escape="latex").format_index(one_line_of_column, escape="latex", axis="columns")
    columns = "l" + "r" * (len(frame.columns) - 1)
    text = "% needs \\usepackage{booktabs}\n" + styler.to_latex(hrules=True, column_format=columns)
    if table.note:  # cells have one line, so no interval
        note = one_line(table.note, 4000).replace(f", and the {texts.INTERVAL} of the mean", "").translate(SPECIAL)
        last = rf"\multicolumn{{{len(frame.columns)}}}{{l}}{{\footnotesize {note}}} \\"
        text = text.replace(r"\end{tabular}", f"{last}\n" r"\end{tabular}")
    return text.translate(LATEX)


def one_line_of_column(name: str) -> str:
    """Return the head of a column on one line."""
    return one_line(name, 200)


def as_markdown(table: Table) -> Markup:
    """Return a table as Markdown."""
    frame = table.frame.map(markdown_cell).rename(columns=escape_markdown)
    for row, column in table.bold:
        first, *rest = frame.loc[row, escape_markdown(column)].split("<br>")
        frame.loc[row, escape_markdown(column)] = "<br>".join([f"**{first}**", *rest])
    align = ["left", *["right"] * (len(frame.columns) - 1)]
    return Markup(frame.to_markdown(index=False, colalign=align, disable_numparse=True))


def markdown_cell(text: str) -> str:
    """Return a text as a cell."""
    return "<br>".join(map(escape_markdown, text.split("\n")))


def as_html(table: Table) -> Markup:
    """Return a table as HTML."""

    def cell(text: str, is_bold: bool) -> str:
        first, *rest = (str(escape(one_line(line, 4000))) for line in text.split("\n"))
        text = "<br>".join([f"<strong>{first}</strong>" if is_bold else first, *rest])
        return re.sub(r" ± |(?<=\d), (?=[+−\d])| (?=[†‡§¶])", lambda match: match[0].replace(" ", "&nbsp;"), text)

    heads = "".join(f"<th>{escape(one_line(name, 200))}</th>" for name in table.frame)
    lines = []
    for place, row in enumerate(table.frame.itertuples(index=False)):
        cells = (cell(text, (place, name) in table.bold) for name, text in zip(table.frame, row))
        lines.append("<tr>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>")
    return Markup(f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>")


def image(folder: Path, path: str) -> dict[str, Any]:
    """Return the data of a PNG as a URL, its width on a page, and its files."""
    content = (folder / path).read_bytes()
    width = 2 * int.from_bytes(content[16:20], "big") // 3  # of a PNG, whose dots are finer than those of a page
    stem = path.removesuffix(".png")
    files = ", ".join(f".{form}" for form in FORMATS if (folder / f"{stem}.{form}").exists())
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"source": source, "width": width, "files": stem + files}


def render(name: str, content: dict[str, Any], folder: Path) -> str:
    """Return a page: texts from outside are escaped when they enter it."""
    is_html = name.endswith(".html")
    to_text: Callable[[Any], Any] = escape_markdown if not is_html else functools.partial(one_line, limit=4000)

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else to_text(str(value))

    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=is_html, finalize=finalize, trim_blocks=True, lstrip_blocks=True
    )
    own = {"latex": as_latex, "csv": as_csv}
    environment.filters |= own if is_html else {}
    environment.filters["table"] = as_html if is_html else as_markdown
    environment.filters["image"] = functools.partial(image, folder)
    script = re.search(r"<script>(.*?)</script>", (HERE / name).read_text(encoding="utf-8"), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() if script else ""
    return environment.get_template(name).render(content, digest=digest)


def say(study: Study) -> None:
    """Print the held-out metric, if there is one, and the main metric of each variant."""
    metrics = [metric for metric in (study.held_out, study.metric) if metric]
    rows = [("", "runs", *(texts.with_arrow(study, metric) for metric in metrics))]
    marks = ""
    for variant in study.variants:
        cells = []
        for metric in metrics:
            own, mark = study.summary(variant.label, metric), texts.cautions(study, variant.label, metric)
            cells.append(texts.NONE if own is None else f"{texts.mean_and_sd(metric, own)} {mark}".rstrip())
            marks += mark
        rows.append((variant.label, texts.state(study, variant.label), *cells))
    notes = "mean ± standard deviation over the runs; ↑ higher is better, ↓ lower is better"
    explained = f"\n{texts.legend(marks)}" if marks else ""
    head = f"{study.title} ({study.corpus}, {study.protocol['name']}); {notes}"
    console.say(f"{head}\n{console.table(rows)}{explained}\n")
    if sentence := texts.headline(study):
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
    runs, remarks = read_runs(folders)
    studies, repeated = build_studies(with_baselines(runs, baselines))
    if not studies:
        raise UserError(f"{', '.join(map(str, folders))}: {len(runs)} baselines, but no run to compare with them.")
    arrange(studies, **arrangement)
    shown: dict[str, Any] = {"remarks": remarks + repeated, "searched": folders, "figures": FIGURES if draw else []}
    write_report(studies, output, title=title, formats=formats, **shown)
    return studies
