"""What the course reports published, and which of our rows it belongs to: the content of `published.yaml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "published.yaml"
TESTS = tuple(f"test_perplexity_{name}" for name in ("obama", "wbush", "hbush"))


@dataclass(frozen=True)
class Figure:
    """One published value; accuracies are fractions.

    Attributes:
        at: the epoch or step, or None if the report gives none.
        chosen: "last", or "best" on test during the run.
        final: whether it is in the last line of its table.
    """

    report: str
    table: str
    name: str
    value: float
    at: float | None
    chosen: str
    final: bool


@functools.cache
def content() -> dict[str, Any]:
    """Return the file: `studies`, `corpus`, `rows` and `tables`, explained at its top."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def row_of(settings: dict[str, Any]) -> str | None:
    """Return the name of the published row with these settings (dotted keys), apart from `free` ones, or None."""
    own = settings.keys() - set(content()["free"])
    for name, row in content()["rows"].items():
        where = row["where"]
        if own <= where.keys() and all(settings.get(key) == value for key, value in where.items()):
            return name
    return None


@functools.cache
def figures(row: str) -> list[Figure]:
    """Return all values that were published for a row."""
    values = []
    for table in (table for table in content()["tables"] if table["row"] == row):
        for number, line in enumerate(table["rows"], start=1):
            metrics = dict(zip(table["columns"], line))
            at = next((metrics.pop(axis) for axis in ("epoch", "step") if axis in metrics), None)
            about = (at, table["chosen"], number == len(table["rows"]))
            for name, value in metrics.items():
                unit = table.get("unit", 100) if "accuracy" in name else 1
                values.append(Figure(table["report"], table["table"], name, value / unit, *about))
    return values


def curve(row: str, name: str) -> list[tuple[float, float]]:
    """Return (epoch or step, value) pairs of a row's run; an unpublished mean over tests is computed."""
    points: dict[float, dict[str, float]] = {}
    for figure in figures(row):
        if figure.at is not None and figure.chosen == "last":
            points.setdefault(figure.at, {})[figure.name] = figure.value
    return [(at, value) for at, values in points.items() if (value := _value(values, name)) is not None]


def final(row: str, name: str, chosen: str) -> float | None:
    """Return the final value of a row, "last" or "best"; an unpublished mean over tests is computed."""
    return _value({line.name: line.value for line in figures(row) if line.final and line.chosen == chosen}, name)


def _value(values: dict[str, float], name: str) -> float | None:
    if name == "test_perplexity_mean" and name not in values and all(test in values for test in TESTS):
        return sum(values[test] for test in TESTS) / len(TESTS)
    return values.get(name)
