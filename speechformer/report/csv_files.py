"""The values of the report in full precision, accuracies as fractions as in `result.json`; its tables as shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from speechformer.corpora.files import OutputFolder
from speechformer.report.claims import Judgement
from speechformer.report.markdown import TableText, latex
from speechformer.report.results import Table
from speechformer.report.statistics import Effect, Summary
from speechformer.report.tables import comparisons, differences

Line = dict[str, Any]


def write_tables(
    tables: list[Table], judgements: Sequence[Judgement], exports: Mapping[str, TableText], output: OutputFolder
) -> None:
    """Write to `tables/`: runs, rows, curves, published, differences and claims, and each table of the page."""
    import pandas as pd

    contents = {"claims": list(map(claim_line, judgements))}
    for lines in (runs, rows, curves, published, differences_of_all_pairs):
        name = lines.__name__.partition("_")[0]
        contents[name] = [{"table": table.name, **line} for table in tables for line in lines(table)]
    for name, content in contents.items():
        if content:
            pd.DataFrame(content, dtype=object).to_csv(
                output.file(f"tables/{name}.csv"), index=False
            )  # integers stay
    for name, export in exports.items():
        output.file(f"tables/{name}.csv").write_text(as_csv(export.cells), encoding="utf-8")
        output.file(f"tables/{name}.tex").write_text(latex(export.cells), encoding="utf-8")
    for form in ("csv", "tex"):
        output.remove_stale(f"tables/*.{form}")


def as_csv(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as CSV; a line break inside a cell becomes a space."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell.replace("\n", " ") for cell in row] for row in cells)
    return text.getvalue()


def place(table: Table) -> Line:
    """Return what is measured in a table."""
    return {"task": table.task, "protocol": table.protocol, "corpus_sha256": table.sha256}


def summarise(summary: Summary) -> Line:
    names = ("mean_low_95", "mean_high_95", "prediction_low_95", "prediction_high_95", "lowest", "highest")
    ends = (*summary.confidence_interval, *summary.prediction_interval, *summary.extremes)
    return {"n": summary.n, "mean": summary.mean, "sd": summary.sd, **dict(zip(names, ends))}


def runs(table: Table) -> Iterator[Line]:
    """Yield a line for each run and baseline."""
    labelled = [(row.label, run) for row in table.rows for run in row.runs]
    for label, run in [*labelled, *((run.baseline, run) for run in table.baselines)]:
        commit, seconds, error = (run.result.get(name) for name in ("commit", "seconds", "error"))
        command = run.command if run.seed is None else f"{run.command} seed={run.seed}"
        about = {"row": label, "seed": run.seed, "status": run.status, "commit": commit, "command": command}
        yield {**place(table), **about, "seconds": seconds, "error": error, **run.metrics}


def rows(table: Table) -> Iterator[Line]:
    """Yield a line for each row and metric: its final values over the seeds."""
    for row in table.rows:
        for metric in row.metrics:
            if summary := row.summary(metric):
                yield {**place(table), "row": row.label, "metric": metric, **summarise(summary)}


def curves(table: Table) -> Iterator[Line]:
    """Yield a line for each row, metric and evaluation."""
    for row in table.rows:
        for metric in row.metrics:
            for x, summary in row.curve(metric).items():
                about = {"row": row.label, "metric": metric, "x_axis": table.report["x_axis"], "x": f"{x:g}"}
                yield {**about, "n": summary.n, "mean": summary.mean, "sd": summary.sd}


def published(table: Table) -> Iterator[Line]:
    """Yield a line for each published value, with ours."""
    for line in comparisons(table):
        theirs = line.theirs
        about = {"row": line.row.label, "report": theirs.report, "published_table": theirs.table}
        value = {"metric": theirs.name, "x": theirs.at, "chosen": theirs.chosen, "published": theirs.value}
        ours = summarise(line.ours) if line.ours else {"n": 0}
        yield {**place(table), **about, **value, **ours, "inside_prediction_interval": line.inside}


def differences_of_all_pairs(table: Table) -> Iterator[Line]:
    """Yield a line for each pair of rows and compared metric; Holm's correction counts all pairs of the metric."""
    for own in differences(table, all_pairs=True):
        about = {"row": own.row.label, "reference": own.reference.label, "metric": own.metric}
        yield {**place(table), **about, **effect_line(own.effect, own.corrected)}


def effect_line(effect: Effect, corrected: float) -> Line:
    low, high = effect.interval
    line = {"n": min(effect.n), "difference": effect.mean, "low_95": low, "high_95": high, "p": effect.p}
    more = {"p_holm": corrected, "paired": effect.paired, "correlation": effect.correlation}
    return {**line, **more, "detectable": effect.detectable}


def claim_line(own: Judgement) -> Line:
    about = {"claim": own.name, "family": own.family, "by": own.by, "says": own.says, "verdict": own.verdict}
    terms = " ".join(
        f"{term.times:+g} * {term.row.label} [{term.table.name}]" + (f" at {term.at:g}" if term.at else "")
        for term in own.terms
    )
    return {**about, "metric": own.metric, "terms": terms, **effect_line(own.effect, own.corrected)}
