"""Tables of a page from bench.json, in Markdown."""

from __future__ import annotations

from typing import Any

from speechformer.bench.timing import Comparison, format_seconds

NAMES = {
    "classify": "classifier",
    "lm": "language model",
    "report": "reports' size",
    "large": "512 wide, 1,024 tokens",
}


def markdown(lines: list[list[str]]) -> str:
    """Format a table, whose first line is its head."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def steps_rows(content: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of steps in the content of bench.json."""
    fields = ("part", "what", "unit", "seconds", "more")
    rows = [Comparison(*(row[name] for name in fields)) for row in content["rows"]]
    return [row for row in rows if row.part.startswith("steps")]


def name_of(row: Comparison) -> str:
    """Return the name of a row for readers."""
    task, what = row.what.split(", ")
    return f"{NAMES[task]}, {NAMES[row.part.removeprefix('steps, ')]}, {what}"


def steps_table(content: dict[str, Any]) -> str:
    """Return the table of times, ratios with intervals, and limits.

    Args:
        content: of bench.json, after the part steps.
    """
    rows = steps_rows(content)
    lines = [["", *rows[0].seconds, "times as fast", "limit"]]
    for row in rows:
        times = [*map(format_seconds, row.seconds.values())]
        lines.append([name_of(row), *times, row.formatted_ratio, format_seconds(row.limit(content["machine"]) or 0)])
    return markdown(lines)


def settings_table(content: dict[str, Any]) -> str:
    """Return the table of the peers' fastest settings; arguments as for `steps_table`."""
    rows = steps_rows(content)
    peers = [*rows[0].more["changed"]]
    lines = [[name_of(row), *(row.more["settings"][peer] for peer in peers)] for row in rows]
    return markdown([["fastest setting", *peers], *lines])


def changed_table(content: dict[str, Any]) -> str:
    """Return the table of what the peers' own options do not offer; arguments as for `steps_table`."""
    changed = steps_rows(content)[0].more["changed"]
    return markdown([["peer", "changed to compute the same"], *([name, what] for name, what in changed.items())])
