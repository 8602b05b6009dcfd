"""The tables of the report as text (Markdown), and the same figures as rows of CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from speechformer.report import published
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Difference, Interval, Summary, paired, summarise

NONE = "–"
WORDS = {
    "test_accuracy": "test, %",
    "test_accuracy_seen": "test: in train too, %",
    "test_accuracy_unseen": "test: not in train, %",
    "train_accuracy": "train, %",
    "validation_accuracy": "held out, %",
    "majority_accuracy": "commonest class, %",
    "test_perplexity_mean": "test, mean",
    "test_sliding_perplexity_mean": "sliding window, mean",
    "train_perplexity": "train",
    "validation_perplexity": "held out",
}


def words(figure: str) -> str:
    """A figure's name for a heading."""
    return WORDS.get(figure) or "test, " + figure.removeprefix("test_perplexity_")


def number(figure: str, value: float, signed: bool = False) -> str:
    """Accuracies in per cent, perplexities as they are; one decimal."""
    if value is None or math.isnan(value):
        return NONE
    if "accuracy" in figure:
        value *= 100
    text = f"{value:+.1f}" if signed else f"{value:.1f}"
    return text.replace("-", "−")


def between(figure: str, interval: Interval, signed: bool = False) -> str:
    """An interval, [low, high]."""
    if math.isnan(interval[0]):
        return NONE
    return "[" + ", ".join(number(figure, end, signed) for end in interval) + "]"


def mean_and_sd(figure: str, summary: Summary) -> str:
    return number(figure, summary.mean) + (f" ± {number(figure, summary.sd)}" if summary.n > 1 else "")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def ours(table: Table) -> str:
    """Each row's figures: mean ± sd, and under it the 95 % interval of the mean; then the baselines."""
    figures = table.figures()
    header = ["", "runs", *map(words, figures), "parameters", "seconds"]
    rows = []
    for row in table.rows:
        cells = [row.label, row.state]
        for figure in figures:
            values = list(row.values(figure).values())
            if not values:
                cells.append(NONE)
                continue
            summary = summarise(values)
            interval = f"<br>{between(figure, summary.interval)}" if summary.n > 1 else ""
            cells.append(mean_and_sd(figure, summary) + interval)
        totals = {run.result["parameters"]["total"] for run in row.finished}
        seconds = [run.result["seconds"] for run in row.finished]
        reported = published.content()["rows"][row.published].get("parameters") if row.published else None
        total = " or ".join(f"{value:,}" for value in sorted(totals)) or NONE
        cells.append(total + (f"<br>reported {reported:,}" if reported else ""))
        cells.append(f"{summarise(seconds).mean:.0f}" if seconds else NONE)
        rows.append(cells)
    rows += [[label, "not run", *[NONE] * (len(figures) + 2)] for label in table.expected]
    for run in table.baselines:
        cells = [f"*{run.result['baseline']['name']}*", "exact"]
        cells += [number(figure, math.nan if (v := run.metrics.get(figure)) is None else v) for figure in figures]
        rows.append([*cells, f"{run.result['parameters']['total']:,}", NONE])
    return markdown_table(header, rows)


def against(table: Table) -> list[dict[str, Any]]:
    """Each published figure beside ours, chosen in the same way: a row for the CSV file."""
    found = []
    for row in table.rows:
        for figure in published.final_figures(row.published) if row.published else []:
            values = row.best_values(figure.name) if figure.chosen == "best" else row.values(figure.name)
            if not values:
                continue
            summary = summarise(list(values.values()))
            low, high = summary.range
            inside = None if math.isnan(low) else low <= figure.value <= high
            found.append({"row": row, "figure": figure, "summary": summary, "inside": inside})
    return found


def beside(table: Table) -> str:
    """Theirs beside ours; empty where nothing was published."""
    rows = []
    for line in against(table):
        figure, summary = line["figure"], line["summary"]
        name, mean = figure.name, summary.mean
        rows.append(
            [
                line["row"].label,
                words(name),
                f"{figure.report}, {figure.table} ({figure.chosen})",
                number(name, figure.value),
                mean_and_sd(name, summary),
                number(name, mean - figure.value, signed=True),
                between(name, tuple(end - figure.value for end in summary.interval), signed=True),
                between(name, summary.range),
                {True: "yes", False: "no", None: NONE}[line["inside"]],
            ]
        )
    if not rows:
        return ""
    header = ["", "figure", "published in", "theirs", "ours", "ours − theirs", "its 95 % interval"]
    return markdown_table([*header, "95 % range of one run of ours", "theirs in it"], rows)


def compared(table: Table) -> list[str]:
    """The figures by which rows are compared with each other."""
    if table.task == "classify":
        return [name for name in ("test_accuracy", "test_accuracy_unseen") if name in table.figures()]
    return [table.main_figure]


def differences(table: Table, all_pairs: bool = False) -> list[tuple[Row, Row, str, Difference]]:
    """Each row less the first (or all pairs), over the seeds that both have."""
    pairs = combinations(table.rows, 2) if all_pairs else ((table.rows[0], row) for row in table.rows[1:])
    found = []
    for reference, row in pairs:
        for figure in compared(table):
            difference = paired(row.values(figure), reference.values(figure))
            if difference is not None:
                found.append((row, reference, figure, difference))
    return found


def apart(table: Table) -> str:
    """The paired differences from the first row; empty for a table of one row."""
    rows = []
    for row, reference, figure, difference in differences(table):
        rows.append(
            [
                f"{row.label} less {reference.label}",
                words(figure),
                str(difference.n),
                number(figure, difference.mean, signed=True),
                between(figure, difference.interval, signed=True),
                NONE if math.isnan(difference.p) else f"{difference.p:.3f}" if difference.p >= 0.001 else "< 0.001",
                {True: "yes", False: "no", None: NONE}[difference.apart],
            ]
        )
    header = ["", "figure", "seeds", "difference", "95 % interval", "p", "told apart"]
    return markdown_table(header, rows) if rows else ""


def lengths(table: Table) -> str:
    """Test perplexity, mean over the tests, in longer contexts than training had; empty where none was tested."""
    if not table.lengths():
        return ""
    trained = sorted({row.settings["block_size"] for row in table.rows})
    header = ["context, tokens", f"{' or '.join(map(str, trained))} (trained)", *map(str, table.lengths())]
    rows = []
    for row in table.rows:
        cells = [row.label]
        for figure in [table.main_figure, *(length_figure(length) for length in table.lengths())]:
            values = list(row.values(figure).values())
            cells.append(mean_and_sd(figure, summarise(values)) if values else "cannot run")
        rows.append(cells)
    return markdown_table(header, rows)


def length_figure(length: int) -> str:
    return f"test_length_{length}_perplexity_mean"


def made(table: Table) -> str:
    """How each row can be made again: command, seeds, commit."""
    rows = []
    for row in table.rows:
        first = row.runs[0]
        command = " ".join(part for part in first.command.split(" ") if not part.startswith("seed="))
        if not first.result.get("overrides"):
            command = "called from Python: see config in result.json"
        seeds = ", ".join(str(run.seed) for run in row.runs)
        rows.append([row.label, f"`{command}`", seeds, ", ".join(commits(row.runs))])
    rows += [
        [f"*{run.result['baseline']['name']}*", f"`{run.command}`", NONE, ", ".join(commits([run]))]
        for run in table.baselines
    ]
    return markdown_table(["", "command, and seed=", "seeds", "commit"], rows)


def commits(runs: list[Run]) -> list[str]:
    """The commits that runs were made with, in short."""
    found = {run.result.get("commit") or "unknown" for run in runs}
    return sorted("unknown" if name == "unknown" else name[:10] + name[40:] for name in found)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys; nothing for no rows."""
    if rows:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
            writer.writeheader()
            writer.writerows(rows)


def write_all_csv(tables: list[Table], folder: Path) -> None:
    """runs, rows, curves, published and differences: every figure of the report in full precision.

    Accuracies are fractions here, as in result.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    beside_published: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for table in tables:
        place: dict[str, Any] = {
            "table": table.name,
            "task": table.task,
            "protocol": table.protocol,
            "corpus_sha256": table.sha256,
        }
        for row in table.rows:
            for run in row.runs:
                about: dict[str, Any] = {
                    "row": row.label,
                    "seed": run.seed,
                    "status": run.status,
                    "commit": run.result.get("commit"),
                }
                more = {
                    "command": run.command,
                    "seconds": run.result.get("seconds"),
                    "error": run.result.get("error"),
                }
                runs.append({**place, **about, **more, **run.metrics})
            names = dict.fromkeys(name for run in row.finished for name in run.metrics)
            for name in names:
                values = list(row.values(name).values())
                if values:
                    rows.append({**place, "row": row.label, "figure": name, **columns(summarise(values))})
                unit = "epoch" if table.task == "classify" else "step"
                for at, values in row.curve(name).items():
                    summary = summarise(values)
                    own = {"unit": unit, "at": f"{at:g}", "n": summary.n, "mean": summary.mean, "sd": summary.sd}
                    curves.append({"table": table.name, "row": row.label, "figure": name, **own})
        for run in table.baselines:
            about = {"row": run.result["baseline"]["name"], "seed": "", "status": run.status}
            more = {"commit": run.result.get("commit"), "command": run.command}
            runs.append({**place, **about, **more, **run.metrics})
        for line in against(table):
            figure, summary = line["figure"], line["summary"]
            about = {"row": line["row"].label, "report": figure.report, "published_table": figure.table}
            own = {"figure": figure.name, "chosen": figure.chosen, "theirs": figure.value, **columns(summary)}
            beside_published.append({**place, **about, **own, "theirs_in_range": line["inside"]})
        for row, reference, name, difference in differences(table, all_pairs=True):
            about = {"row": row.label, "less": reference.label, "figure": name, "seeds": difference.n}
            ends = dict(zip(("low_95", "high_95"), difference.interval))
            pairs.append({**place, **about, "difference": difference.mean, **ends, "p": difference.p})
    for file, content in (
        ("runs", runs),
        ("rows", rows),
        ("curves", curves),
        ("published", beside_published),
        ("differences", pairs),
    ):
        write_csv(folder / f"{file}.csv", content)


def columns(summary: Summary) -> dict[str, float]:
    """A summary's entries for a CSV file."""
    return {
        "n": summary.n,
        "mean": summary.mean,
        "sd": summary.sd,
        "mean_low_95": summary.interval[0],
        "mean_high_95": summary.interval[1],
        "one_run_low_95": summary.range[0],
        "one_run_high_95": summary.range[1],
        "lowest": summary.extremes[0],
        "highest": summary.extremes[1],
    }
