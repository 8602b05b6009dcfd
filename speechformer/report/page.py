"""Compose the report as a Markdown document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from speechformer.report import claims, findings, published
from speechformer.report import tables as text
from speechformer.report.claims import Judgement
from speechformer.report.markdown import Markdown, TableText, code, lines
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import FAILED, Run, Table

Pictures = Mapping[str, Sequence[tuple[str, str]]]
HERE = Path(__file__).parent
ORDER = ("finished", "diverged", *FAILED)
PARAGRAPHS = Markdown("\n\n")
FEW = 6  # tables whose differences are shown before the tables
LIBRARIES = ("python", "torch", "lightning")
METHODS = Markdown((HERE / "methods.md").read_text(encoding="utf-8").strip())


def compose(
    tables: list[Table],
    judgements: Sequence[Judgement],
    runs: list[Run],
    remarks: list[str],
    pictures: Pictures,
    title: str | None = None,
    searched: Sequence[tuple[str, Markdown]] = (),
) -> tuple[Markdown, dict[str, TableText]]:
    """Return the report as Markdown, and its tables by name in the order of the page.

    Args:
        pictures: paths and captions by name of a table, and those of the claims by "".
        remarks: what is left out.
        searched: what searches have found; tables with their name, other parts with "".
        title: of the page; by default that of its only table, or the number of results.
    """
    title = title or (tables[0].heading if len(tables) == 1 else f"Results of {len(runs)} runs")
    sentences = Markdown("\n").join(map(Markdown("- {}").format, findings.found(tables, judgements)))
    parts = [Markdown("# {}").format(title), Markdown("## What was found") if sentences else "", sentences]
    shown = {name: list(own) for name, own in pictures.items()}
    if not shown.get("") and len(tables) <= FEW:
        for table in tables:  # the differences are what a table concludes, so they come first
            first = [own for own in shown.get(table.name, []) if "_differences." in own[0]]
            parts += [picture(f"{table.heading}: differences", *own) for own in first]
            shown[table.name] = [own for own in shown.get(table.name, []) if own not in first]
    parts += [picture("Claims", *own) for own in shown.get("", [])]
    exports: dict[str, TableText] = {}
    parts += claims_by_family(judgements, exports)
    parts += [export(name, content, exports) for name, content in searched]
    summary = overview(tables, runs, remarks, exports)
    parts += [Markdown("## Tables"), summary, fold("How to read it", METHODS)]
    parts += [section(table, shown.get(table.name, []), exports) for table in tables]
    return PARAGRAPHS.join(part for part in parts if part) + Markdown("\n"), exports


def export(name: str, content: Markdown, exports: dict[str, TableText]) -> Markdown:
    """Return a table, and note it under a name, which its files have."""
    if isinstance(content, TableText):
        exports[name] = content
    return content


def claims_by_family(judgements: Sequence[Judgement], exports: dict[str, TableText]) -> Iterator[Markdown]:
    """Yield the folded table of each family of claims."""
    for family, title in claims.content()["families"].items():
        if own := [claim for claim in judgements if claim.family == family]:
            yield fold(title, export(f"claims_{family}", findings.claims_table(own), exports))
    if {claim.by for claim in judgements} & {own["by"] for own in claims.content()["untested"]}:
        untested = export("claims_untested", findings.untested_table(), exports)
        yield fold("Conclusions of the reports that no claim tests", untested)


def fold(summary: str, content: Markdown) -> Markdown:
    """Return a part of the page that the reader opens."""
    return Markdown('<details markdown="1">\n<summary>{}</summary>\n\n{}\n\n</details>').format(summary, content)


def picture(title: str, path: str, caption: str) -> Markdown:
    return Markdown("![{}]({})\n\n*{}*").format(title, path, caption)


def section(table: Table, pictures: Sequence[tuple[str, str]], exports: dict[str, TableText]) -> Markdown:
    """Return one table with all that belongs to it."""
    title = Markdown('<a id="{}"></a>\n\n## {}').format(table.name, table.heading)
    parts = [title, about(table), export(f"{table.name}_results", text.results_table(table), exports)]
    parts += [picture(table.title, *own) for own in pictures]
    for name, heading, content in (
        ("lengths", "Train short, test long", text.lengths_table(table)),
        ("sources", "By the length of the source", text.source_lengths_table(table)),
        ("published", "Comparison with published results", text.published_table(table)),
        ("differences", "Differences", text.differences_table(table)),
    ):
        shown = export(f"{table.name}_{name}", content, exports)
        parts += [Markdown("### {}").format(heading), shown] if shown else []
    for place, run in ((row, run) for row in table.rows for run in row.runs if run.status in FAILED):
        reason = run.result.get("error") or "no reason given"
        parts.append(Markdown.escape(f"{run.status.capitalize()}: {place.label}, seed {run.seed}: {reason}"))
    commands = export(f"{table.name}_commands", text.commands_table(table), exports)
    return PARAGRAPHS.join([*parts, fold("How to repeat each row", commands)])


def about(table: Table) -> Markdown:
    """Return the corpus, protocol, sizes and scoring of a table."""
    settings = sorted(
        f"{key}={str(value).lower()}" for key, value in table.protocol_settings.items() if key != "name"
    )
    direction = f", {table.direction}" if table.direction else ""
    where = f"Corpus {table.corpus}{direction}, sha256 {table.sha256[:12] or 'unknown'}"
    protocol = code(f"protocol={table.protocol}")
    parts: list[str] = [Markdown("{}; {} ({}).").format(where, protocol, ", ".join(settings))]
    if counts := table.counts:
        sizes = sorted({run.result["corpus"]["counts"]["train"] for run in table.finished})
        trained = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(
            f"Trained on {trained} {table.report['unit']}, tested on {counts['test']:,}, of which "
            f"{counts['test_in_train']} also appear in the training set."
        )
    parts += filter(None, (vocabulary(table), table.report["note"]))
    if table.usual:
        parts.append(Markdown("Rows are named by what differs from the usual settings: {}.").format(table.usual))
    scoring: dict[str, str] = next((run.result["scoring"] for run in table.finished if "scoring" in run.result), {})
    signatures = (Markdown("{}: {}").format(name, code(signature)) for name, signature in scoring.items())
    return lines([Markdown(" ").join(parts), *signatures])


def vocabulary(table: Table) -> str:
    """Return the size of the vocabulary and the share of test words outside it, or "" if that was not counted."""
    tests = table.counts.get("tests", {}).values()
    if not tests or "vocabulary" not in table.counts or any("unknown_tokens" not in test for test in tests):
        return ""
    unknown, tokens = (sum(test[key] for test in tests) for key in ("unknown_tokens", "tokens"))
    theirs = f" (that of the reports: {published.content()['corpus']['vocabulary']:,})" if table.comparable else ""
    rate = text.number("unknown_rate", unknown / max(1, tokens))
    return (
        f"The vocabulary has {table.counts['vocabulary']:,} entries{theirs}; {rate} % of the test words are unknown."
    )


def overview(tables: list[Table], runs: list[Run], remarks: list[str], exports: dict[str, TableText]) -> Markdown:
    """Return what there is, and what is left out."""
    states = Counter(run.status for run in runs)
    status = ", ".join(f"{states[word]} {word}" for word in ORDER if states[word])
    baselines = sum(run.baseline is not None for run in runs)
    many = "s" if len(tables) > 1 else ""
    sentences = [f"{len(runs)} results, {baselines} of them baselines ({status}), in {len(tables)} table{many}."]
    groups = (own for table in tables for own in (table.baselines, *(row.runs for row in table.rows)))
    shown = {id(run): run for own in groups for run in own}
    if repeated := len(shown) - len(findings.distinct([*shown.values()])):
        repeat = "repeats" if repeated == 1 else "repeat"
        sentences.append(f"{repeated} of them {repeat} a run of another study, bit by bit.")
    known = [(name, run.result.get("versions", {}).get(name)) for run in runs for name in LIBRARIES]
    versions = sorted({f"{name} {version}" for name, version in known if version is not None})
    sentences.append(f"Made with {', '.join(versions) or 'unknown versions'}.")
    if old := sum(run.is_outdated for run in runs):
        sentences.append(f"{old} were computed by an earlier version of the code, whose numbers differ.")
    rows = []
    for table in tables:
        n = sorted({len(row.finished) for row in table.rows})
        seeds = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
        link = Markdown("[{}](#{})").format(table.heading, table.name)
        rows.append([link, table.corpus, table.protocol, str(len(table.rows)), seeds])
    content = markdown_table(["table", "corpus", "protocol", "rows", "runs per row"], rows)
    parts = [" ".join(sentences), export("overview", content, exports)]
    if remarks:
        parts += [Markdown("**Left out.**"), Markdown("\n").join(map(Markdown("- {}").format, remarks))]
    return PARAGRAPHS.join(parts)
