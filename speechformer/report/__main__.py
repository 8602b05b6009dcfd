"""`python -m speechformer.report FOLDER...`: what the runs in some folders say, and how far to believe it.

Reads `result.json` files alone. Writes report.md, report.html (one file, pictures inside), tables/*.csv and
figures/*.png.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
from pathlib import Path

from speechformer import console
from speechformer.errors import run_command
from speechformer.report import tables as text
from speechformer.report.results import Run, Table, build_tables, read_runs
from speechformer.report.statistics import Summary

METHODS = """\
**How to read it.** A row holds the runs of one configuration over several seeds. *86.8 ± 0.5* is the mean over the
seeds and the sample standard deviation, of the weights after the last step (under `clean`: of the checkpoint that the
held-out part chose); under it stands the 95 % interval of the mean, Student's t on n − 1 degrees of freedom
(`scipy.stats.ttest_1samp`). The *range of one run* is where one more run of ours would fall 95 times in a hundred,
mean ± t sd √(1 + 1/n) (`scipy.stats.t`): a published figure is one run, so it is held against that. Where a report
gives the best figure on test in the course of its run, ours is chosen in the same way. Our figures on train are
measured after the epoch, without dropout; the reports do not say how theirs were, and a running average would be
lower, so those do not count in the sentence above. *Differences* are between runs of the same seed
(`scipy.stats.ttest_rel`); *told apart* says that the 95 % interval leaves out nought. No interval is widened for
there being many. All hold the spread over seeds alone, not that over other test sets; for translations that is *±
over sentences*, half the width of the 95 % interval of sacreBLEU's bootstrap of one run (mean over runs). *Italic*
rows are baselines, exact and without a seed. Perplexities are per token, over all but the first token of each test
text.

Runs on different corpora or protocols stand in different tables. Under `paper`, as in the reports, test sentences
that stand in train stay there, and *not in train* is the column to believe; under `clean` they are taken out of
train."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1180px; }
body { margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-top: 1px solid #d5dce3; padding-top: 1.5rem; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e3e8ed; vertical-align: top; }
th { background: #f4f6f8; } td { font-variant-numeric: tabular-nums; white-space: nowrap; }
img { max-width: 100%; } code { background: #f4f6f8; padding: .1em .3em; }
summary { cursor: pointer; color: #0072B2; }
"""


def section(table: Table, pictures: list[tuple[str, str]]) -> str:
    """One table with all that belongs to it, as Markdown."""
    counts = next((run.result["corpus"]["counts"] for row in table.rows for run in row.finished), None)
    protocol = {key: value for key, value in json.loads(table.protocol_settings).items() if key != "name"}
    settings = ", ".join(f"{key}={str(value).lower()}" for key, value in protocol.items())
    direction = f", {table.direction}" if table.direction else ""
    about = (
        f"Corpus {table.corpus}{direction}, sha256 {table.sha256[:12] or 'unknown'}; "
        f"`protocol={table.protocol}` ({settings})."
    )
    if counts:
        what = "pairs" if table.task == "translate" else "lines"
        about += (
            f" Trained on {counts['train']:,} {what}, tested on {counts['test']:,}, of which "
            f"{counts['test_in_train']} stand word for word in train."
        )
    scoring: dict[str, str] = next(
        (run.result["scoring"] for row in table.rows for run in row.finished if "scoring" in run.result), {}
    )
    about += "".join(f"<br>{name}: `{signature}`" for name, signature in scoring.items())
    if table.task == "lm":
        about += " Perplexity per token; lower is better."
    parts = [
        f'<a id="{table.name}"></a>\n\n## {table.title}' + (" (clean)" if table.protocol != "paper" else ""),
        about,
    ]
    parts.append(text.results_table(table))
    for heading, content in (
        ("Train short, test long", text.lengths_table(table)),
        ("By the length of the source", text.source_lengths_table(table)),
        ("Beside what was published", text.published_table(table)),
        ("Differences over the same seeds", text.differences_table(table)),
    ):
        if content:
            parts += [f"### {heading}", content]
    for row in table.rows:
        for run in row.runs:
            if run.status in ("failed", "killed"):
                why = run.result.get("error", "no reason given")
                parts.append(f"{run.status.capitalize()}: {row.label}, seed {run.seed}: {why}")
    parts += [f"![{table.title}]({path})\n\n*{caption}*" for path, caption in pictures]
    parts.append(
        '<details markdown="1">\n<summary>How each row was made</summary>\n\n'
        + text.commands_table(table)
        + "\n\n</details>"
    )
    return "\n\n".join(parts)


def overview(tables: list[Table], runs: list[Run], remarks: list[str]) -> str:
    """What there is, and what does not count."""
    status = {word: sum(run.status == word for run in runs) for word in ("finished", "diverged", "failed", "killed")}
    said = ", ".join(f"{n} {word}" for word, n in status.items() if n)
    inside = [line.inside for table in tables for line in text.comparisons(table) if line.counts]
    judged = [value for value in inside if value is not None]
    many = "s" if len(tables) > 1 else ""
    baselines = sum(run.baseline is not None for run in runs)
    lines = [f"{len(runs)} results, {baselines} of them baselines ({said}) in {len(tables)} table{many}."]
    if judged:
        lines.append(
            f"Of {len(judged)} published end results on test (means over texts left out), {sum(judged)} lie in the "
            "range of one run of ours."
        )
    versions = {
        f"{name} {run.result['versions'][name]}"
        for run in runs
        for name in ("python", "torch", "lightning")
        if name in run.result.get("versions", {})
    }
    lines.append(f"Made with {', '.join(sorted(versions)) or 'unknown versions'}.")
    rows = []
    for table in tables:
        n = sorted({len(row.finished) for row in table.rows})
        seeds = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
        link = f"[{table.title}{' (clean)' if table.protocol == 'clean' else ''}](#{table.name})"
        rows.append([link, table.corpus, table.protocol, str(len(table.rows)), seeds])
    parts = [" ".join(lines), text.markdown_table(["table", "corpus", "protocol", "rows", "runs a row"], rows)]
    if remarks:
        parts.append("**Not counted.**\n\n" + "\n".join(f"- {remark}" for remark in remarks))
    return "\n\n".join(parts)


def page(markdown_text: str, folder: Path) -> str:
    """The report as one HTML page that needs no other file."""
    import markdown

    body = markdown.markdown(markdown_text, extensions=["tables", "md_in_html"])

    def embed(match: re.Match[str]) -> str:
        content = (folder / match[1]).read_bytes()
        width = int.from_bytes(content[16:20], "big")  # of a PNG, in pixels; half of it, for sharp screens
        return f'width="{width // 2}" src="data:image/png;base64,{base64.b64encode(content).decode()}"'

    body = re.sub(r'src="([^":]+\.png)"', embed, body)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>speechformer: report</title>\n<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def write_report(folders: list[Path], output: Path, plots: bool = True) -> list[Table]:
    """Read the runs under `folders` and write the report into `output`.

    Raises:
        UserError: a folder is not there, or holds no run.
    """
    runs, remarks = read_runs(folders)
    tables, twice = build_tables(runs)
    output.mkdir(parents=True, exist_ok=True)
    text.write_all_csv(tables, output / "tables")
    pictures: dict[str, list[tuple[str, str]]] = {table.name: [] for table in tables}
    if plots:
        from speechformer.report.plots import draw_all

        for kind in ("bars", "curves", "lengths", "sources"):  # of another time
            for left in (output / "figures").glob(f"*_{kind}.png"):
                left.unlink()
        for table in tables:
            drawn = draw_all(table, output / "figures")
            pictures[table.name] = [(path.relative_to(output).as_posix(), caption) for path, caption in drawn]
    parts = ["# Report", overview(tables, runs, remarks + twice), METHODS]
    parts += [section(table, pictures[table.name]) for table in tables]
    markdown_text = "\n\n".join(parts) + "\n"
    (output / "report.md").write_text(markdown_text, encoding="utf-8")
    (output / "report.html").write_text(page(markdown_text, output), encoding="utf-8")
    return tables


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.report", description="Tables, plots and one page from the runs in some folders."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="searched for result.json files")
    parser.add_argument("--output", type=Path, default=Path("outputs/report"), help="folder (outputs/report)")
    parser.add_argument("--no-plots", action="store_true", help="tables only, which is quicker")
    given = parser.parse_args()

    def command() -> None:
        for table in write_report(given.folders, given.output, not given.no_plots):
            console.say(f"{table.title} ({table.corpus}, {table.protocol})")
            rows: list[tuple[str, ...]] = [("", "runs", table.main_figure)]
            for row in table.rows:
                values = list(row.values(table.main_figure).values())
                figure = text.mean_and_sd(table.main_figure, Summary(values)) if values else text.NONE
                rows.append((row.label, row.state, figure))
            console.say(console.table(rows) + "\n")
        console.say(f"{given.output}: report.md, report.html, tables/*.csv, figures/*.png")

    run_command(command)


if __name__ == "__main__":
    main()
