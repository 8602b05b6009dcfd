"""How the rows of a study were tuned (`hydra/sweeper=tuned`): the grid, the scores on held-out data, the choices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.runs import folder as runs

TUNED = "tuned.json"
TUNING = "_tuning"  # what the study of tuning runs ends with


def sections(folders: Sequence[Path]) -> Iterator[tuple[str, Markdown]]:
    """Yield the parts of the page on each tuned study below some folders: tables by name, others with ""."""
    for place, (file, content) in enumerate(studies(folders)):
        points, rows = [" ".join(point) for point in content["points"]], content["rows"]
        seeds = ", ".join(map(str, content["tuning_seeds"]))
        text = (
            "Each row had the same {} runs on seeds {}. The best mean score on held-out data, in bold, is its choice."
        )
        yield "", Markdown("## Tuning of {}").format(file.parent.name)
        yield "", Markdown(text).format(str(len(points) * len(content["tuning_seeds"])), seeds)
        yield f"tuning{place or ''}", markdown_table(["", *points], [cells(row, points) for row in rows])
        if edge := [row["row"] for row in rows if at_edge(row, content["points"])]:
            yield (
                "",
                Markdown("At the edge of the grid, where a wider one may be better: {}.").format("; ".join(edge)),
            )


def studies(folders: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each `tuned.json` below some folders, with its content."""
    files = [Path(top) / TUNED for folder in folders for top, _, names in os.walk(folder) if TUNED in names]
    for file in sorted(files):
        yield file, runs.read_json(file) or {}


def tuned_keys(folders: Sequence[Path]) -> dict[Path, set[str]]:
    """Return the settings that each study below some folders has tuned, by its folder."""
    return {
        file.parent: {word.partition("=")[0] for point in content["points"] for word in point}
        for file, content in studies(folders)
    }


def cells(row: Mapping[str, Any], points: Sequence[str]) -> list[Any]:
    """Return the name and the scores of a row."""
    choice = " ".join(row["choice"] or ())
    scores = ["–" if score is None else f"{score:.4g}" for score in row["scores"]]
    return [row["row"], *(Markdown("**{}**").format(s) if p == choice else s for p, s in zip(points, scores))]


def at_edge(row: Mapping[str, Any], points: Sequence[Sequence[str]]) -> bool:
    """Return whether a choice has the least or greatest of three or more numbers of a setting."""
    for k, word in enumerate(row["choice"] or ()):
        try:
            values = {float(point[k].partition("=")[2]) for point in points}
        except ValueError:
            continue
        if len(values) > 2 and float(word.partition("=")[2]) in (min(values), max(values)):
            return True
    return False
