"""What the reports published, and which of our runs it stands beside: `published.yaml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "published.yaml"


@dataclass(frozen=True)
class Figure:
    """One published figure, accuracies as fractions: the last one of a table's column."""

    report: str
    table: str
    name: str
    value: float
    chosen: str


@functools.cache
def content() -> dict[str, Any]:
    """The file: `studies`, `rows` and `tables`; its head says what they hold."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def row_of(config: dict[str, Any]) -> str | None:
    """The name of the published row that has all settings of a config, or None.

    Args:
        config: flat, with dotted keys: {"model.name": "alibi", ...}.
    """
    for name, row in content()["rows"].items():
        if all(config.get(key) == value for key, value in row["where"].items()):
            return name
    return None


def final_figures(row: str) -> list[Figure]:
    """The figures that a report ends with for one row: the last line of each of its tables."""
    figures = []
    for table in tables_of(row):
        for name, value in zip(table["columns"], table["rows"][-1]):
            if name not in ("epoch", "step"):
                figures.append(Figure(table["report"], table["table"], name, fraction(name, value), table["chosen"]))
    return figures


def curve(row: str, name: str) -> list[tuple[float, float]]:
    """(epoch or step, figure) of each line of the row's tables that has both."""
    points = []
    for table in tables_of(row):
        if name in table["columns"] and table["columns"][0] in ("epoch", "step"):
            k = table["columns"].index(name)
            points += [(line[0], fraction(name, line[k])) for line in table["rows"]]
    return points


def tables_of(row: str) -> list[dict[str, Any]]:
    return [table for table in content()["tables"] if table["row"] == row]


def fraction(name: str, value: float) -> float:
    """Accuracies as result.json has them; everything else as it is printed."""
    return value / 100 if "accuracy" in name and value > 1 else value
