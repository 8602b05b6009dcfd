"""The tables of the report as text (Markdown), and the same figures as rows of CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from speechformer.report import published
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Difference, Interval, Summary, paired

NONE = "–"
WORDS = {
    "test_accuracy": "test, %",
    "test_accuracy_in_train": "test: in train too, %",
    "test_accuracy_not_in_train": "test: not in train, %",
    "train_accuracy": "train, %",
    "test_perplexity_mean": "test, mean",
    "test_sliding_perplexity_mean": "sliding window, mean",
    "test_bleu": "test, BLEU",
    "test_bleu_interval": "± over sentences",
    "test_chrf": "test, chrF",
    "test_length_ratio": "length ratio",
    "test_exact": "exact, %",
    "validation_bleu": "dev, BLEU (greedy)",
}


def words(figure: str) -> str:
    """A figure's name for a heading."""
    return WORDS.get(figure) or figure.replace("_perplexity_", ", ").replace("_", ", ").removesuffix(", perplexity")


def per_cent(figure: str) -> float:
    """What to multiply a figure by: shares are shown in per cent."""
    return 100.0 if "accuracy" in figure or "exact" in figure else 1.0


def number(figure: str, value: float | None, signed: bool = False) -> str:
    """Shares in per cent, all else as it is; one decimal, of ratios two."""
    if value is None or math.isnan(value):
        return NONE
    value *= per_cent(figure)
    decimals = 2 if "ratio" in figure else 1
    value = round(value, decimals) + 0.0  # no "-0.0"
    text = f"{value:+.{decimals}f}" if signed and value else f"{value:.{decimals}f}"
    return text.replace("-", "−")


def between(figure: str, interval: Interval, signed: bool = False) -> str:
    """An interval, [low, high]; that of a share or a score ends at 0 and 100."""
    if math.isnan(interval[0]):
        return NONE
    if not signed and not any(word in figure for word in ("perplexity", "loss", "ratio")):
        most = 1.0 if per_cent(figure) == 100 else 100.0  # Student's t knows no end of the scale
        interval = (max(interval[0], 0.0), min(interval[1], most))
    return "[" + ", ".join(number(figure, end, signed) for end in interval) + "]"


def mean_and_sd(figure: str, summary: Summary) -> str:
    return number(figure, summary.mean) + (f" ± {number(figure, summary.sd)}" if summary.n > 1 else "")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def results_table(table: Table) -> str:
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
            summary = Summary(values)
            some = f" (of {summary.n})" if summary.n < len(row.finished) else ""
            interval = f"<br>{between(figure, summary.interval)}" if summary.n > 1 else ""
            cells.append(mean_and_sd(figure, summary) + some + interval)
        totals = {run.result["parameters"]["total"] for run in row.finished}
        seconds = [run.result["seconds"] for run in row.finished if "seconds" in run.result]
        reported = published.content()["rows"][row.published].get("parameters") if row.published else None
        total = " or ".join(f"{value:,}" for value in sorted(totals)) or NONE
        cells.append(total + (f"<br>reported {reported:,}" if reported else ""))
        cells.append(f"{Summary(seconds).mean:.0f}" if seconds else NONE)
        rows.append(cells)
    rows += [[label, "not run", *[NONE] * (len(figures) + 2)] for label in table.expected]
    for run in table.baselines:
        cells = [f"*{run.baseline}*", "exact", *(number(figure, run.metrics.get(figure)) for figure in figures)]
        rows.append([*cells, f"{run.result['parameters']['total']:,}", NONE])
    return markdown_table(header, rows)


@dataclass(frozen=True)
class Comparison:
    """A published figure, and ours chosen in the same way; None where we have none."""

    row: Row
    theirs: published.Figure
    ours: Summary | None

    @property
    def inside(self) -> bool | None:
        """Whether theirs lies in the range of one run of ours."""
        return self.ours.holds(self.theirs.value) if self.ours else None

    @property
    def counts(self) -> bool:
        """Whether it is one to judge by: an end result on test, that is not the mean of others."""
        return self.theirs.final and self.theirs.name.startswith("test") and not self.theirs.name.endswith("mean")


def comparisons(table: Table) -> list[Comparison]:
    """Every published figure of a table's rows, with ours; none where they are not to be compared."""
    found = []
    for row in table.rows if table.judged else []:
        for figure in published.figures(row.published) if row.published else []:
            if figure.chosen == "best":
                values = list(row.best_values(figure.name).values())
            elif figure.final:
                values = list(row.values(figure.name).values())
            else:
                values = row.curve(figure.name).get(figure.at or math.nan, [])
            found.append(Comparison(row, figure, Summary(values) if values else None))
    return found


def published_table(table: Table) -> str:
    """What the reports end with beside ours; empty where nothing was published."""
    rows = []
    for line in comparisons(table):
        theirs, ours, name = line.theirs, line.ours, line.theirs.name
        if not theirs.final:
            continue
        cells = [line.row.label, words(name), f"{theirs.report}, {theirs.table} ({theirs.chosen})"]
        value = f"{theirs.value:.3f}" if name.endswith("loss") else number(name, theirs.value)
        if ours is None:
            rows.append([*cells, value, "not measured", *[NONE] * 4])
            continue
        low, high = (end - theirs.value for end in ours.interval)
        cells += [value, mean_and_sd(name, ours), number(name, ours.mean - theirs.value, signed=True)]
        inside = {True: "yes", False: "no", None: NONE}[line.inside]
        rows.append([*cells, between(name, (low, high), signed=True), between(name, ours.range), inside])
    header = ["", "figure", "published in", "theirs", "ours", "ours − theirs", "its 95 % interval"]
    return markdown_table([*header, "95 % range of one run of ours", "theirs in it"], rows) if rows else ""


def compared(table: Table) -> list[str]:
    """The figures by which rows are compared with each other."""
    if table.task == "classify":
        return [name for name in ("test_accuracy", "test_accuracy_not_in_train") if name in table.figures()]
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


def differences_table(table: Table) -> str:
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


def lengths_table(table: Table) -> str:
    """Test perplexity, mean over the tests, in contexts of other lengths than that of training; or empty."""
    rows = []
    for row in table.rows:
        cells = [row.label, str(row.settings["block_size"])]
        for length in table.lengths():
            values = row.at_length(length)
            untested = "not tested" if values is None else "cannot run" if row.finished else NONE
            cells.append(mean_and_sd(table.main_figure, Summary(values)) if values else untested)
        rows.append(cells)
    header = ["", "trained on, tokens", *(f"tested on {length}" for length in table.lengths())]
    return markdown_table(header, rows) if table.lengths() else ""


AT_LENGTHS = {"bleu": "", "chrf": "chrF ", "length_ratio": "ratio ", "exact": "exact % "}  # figures of a bucket


def source_lengths_table(table: Table) -> str:
    """The figures of a translation by the words of the source; empty for other tasks."""
    buckets = table.source_lengths()
    rows = []
    for row in table.rows:
        cells = [row.label]
        for bucket in buckets:
            found = {name: list(row.values(f"test_{name}_at_{bucket}").values()) for name in AT_LENGTHS}
            lines = [
                AT_LENGTHS[name] + mean_and_sd(name, Summary(values)) for name, values in found.items() if values
            ]
            cells.append("<br>".join(lines) or NONE)
        rows.append(cells)
    for run in table.baselines:
        cells = [f"*{run.baseline}*"]
        for bucket in buckets:
            figures = {name: run.metrics.get(f"test_{name}_at_{bucket}") for name in AT_LENGTHS}
            cells.append("<br>".join(AT_LENGTHS[name] + number(name, value) for name, value in figures.items()))
        rows.append(cells)
    header = ["BLEU", *(f"{bucket} words ({count})" for bucket, count in buckets.items())]
    return markdown_table(header, rows) if buckets else ""


def commands_table(table: Table) -> str:
    """How each row can be made again: commands, seeds, commits."""
    rows = []
    for row in table.rows:
        commands = "<br>".join(f"`{command}`" for command in dict.fromkeys(run.command for run in row.runs))
        seeds = ", ".join(str(run.seed) for run in row.runs)
        rows.append([row.label, commands, seeds, ", ".join(commits(row.runs))])
    rows += [[f"*{run.baseline}*", f"`{run.command}`", NONE, ", ".join(commits([run]))] for run in table.baselines]
    return markdown_table(["", "command, and seed=", "seeds", "commit"], rows)


def commits(runs: list[Run]) -> list[str]:
    """The commits that runs were made with, in short."""
    found = {run.result.get("commit") or "unknown" for run in runs}
    return sorted("unknown" if name == "unknown" else name[:10] + name[40:] for name in found)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, their keys as columns; for no rows there is no file, not even one of another time."""
    path.unlink(missing_ok=True)
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
                    rows.append({**place, "row": row.label, "figure": name, **columns(Summary(values))})
                unit = "epoch" if table.task == "classify" else "step"
                for at, values in row.curve(name).items():
                    summary = Summary(values)
                    own = {"unit": unit, "at": f"{at:g}", "n": summary.n, "mean": summary.mean, "sd": summary.sd}
                    curves.append({"table": table.name, "row": row.label, "figure": name, **own})
        for run in table.baselines:
            about = {"row": run.baseline, "seed": "", "status": run.status}
            more = {"commit": run.result.get("commit"), "command": run.command}
            runs.append({**place, **about, **more, **run.metrics})
        for line in comparisons(table):
            theirs = line.theirs
            about = {"row": line.row.label, "report": theirs.report, "published_table": theirs.table}
            own = {"figure": theirs.name, "at": theirs.at, "chosen": theirs.chosen, "theirs": theirs.value}
            numbers = columns(line.ours) if line.ours else {"n": 0}
            beside_published.append({**place, **about, **own, **numbers, "theirs_in_range": line.inside})
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
