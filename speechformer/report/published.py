"""What the reports published, and which of our runs it stands beside: `published.yaml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "published.yaml"
TESTS = ("obama", "wbush", "hbush")


@dataclass(frozen=True)
class Figure:
    """One published figure: accuracies as fractions.

    Attributes:
        at: the epoch or step; None where the report gives none.
        chosen: "last", or "best" on test in the course of the run.
        final: whether the report ends with it: the last line of its table.
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
    """The file: `studies`, `corpus`, `rows` and `tables`; its head says what they hold."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def row_of(settings: dict[str, Any]) -> str | None:
    """The name of the published row that has just these settings, but for those that are free, or None.

    Args:
        settings: of a row, with dotted keys: {"model.name": "alibi", ...}.
    """
    for name, row in content()["rows"].items():
        where = row["where"]
        if settings.keys() - where.keys() <= set(content()["free"]) and all(
            settings.get(key) == value for key, value in where.items()
        ):
            return name
    return None


@functools.cache
def figures(row: str) -> list[Figure]:
    """All figures that were published for a row."""
    found = []
    for table in (table for table in content()["tables"] if table["row"] == row):
        for line in table["rows"]:
            place = dict(zip(table["columns"], line))
            at = next((place[axis] for axis in ("epoch", "step") if axis in place), None)
            for name, value in place.items():
                if name not in ("epoch", "step"):
                    unit = table.get("unit", 100) if "accuracy" in name else 1
                    last = line is table["rows"][-1]
                    chosen = table["chosen"]
                    found.append(Figure(table["report"], table["table"], name, value / unit, at, chosen, last))
    return found


def curve(row: str, name: str) -> list[tuple[float, float]]:
    """(epoch or step, figure) along a row's run; a mean over the tests that was not published is worked out."""
    along = [figure for figure in figures(row) if figure.at is not None and figure.chosen == "last"]
    points = [(figure.at, figure.value) for figure in along if figure.name == name]
    if not points and name == "test_perplexity_mean":
        tests = {figure.at: [] for figure in along}  # type: ignore[var-annotated]
        for figure in along:
            if figure.name in {f"test_perplexity_{test}" for test in TESTS}:
                tests[figure.at].append(figure.value)
        points = [(at, sum(values) / len(TESTS)) for at, values in tests.items() if len(values) == len(TESTS)]
    return points  # type: ignore[return-value]


def final(row: str, name: str, chosen: str) -> float | None:
    """The figure that a report ends with, chosen in one way; a mean over the tests may be worked out, as above."""
    ends = {figure.name: figure.value for figure in figures(row) if figure.final and figure.chosen == chosen}
    tests = [ends[f"test_perplexity_{test}"] for test in TESTS if f"test_perplexity_{test}" in ends]
    if name == "test_perplexity_mean" and name not in ends and len(tests) == len(TESTS):
        return sum(tests) / len(TESTS)
    return ends.get(name)
