"""Oracle: runs whose perplexity, time and memory are known. Pages in test_results.py have the table of costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import put, result, tables_of

from speechformer.errors import UserError
from speechformer.report.costs import costs_figure, costs_table
from speechformer.report.plots import plt
from speechformer.report.results import Table

# perplexity, seconds and bytes of full attention and of a window, by the length of the context
RUNS = {("full", 32): (400.0, 10.0, 1e9), ("full", 64): (300.0, 40.0, 3e9)}
RUNS |= {("window", 32): (410.0, 9.0, 2e9), ("window", 64): (405.0, 20.0, 2e9)}
UNTRAINED = {("block", 32): (300.0, 0.0, 1e9)}  # without a step; on a logarithmic axis there is no place for it


def table(folder: Path, *contexts: int) -> Table:
    """Return the table of the runs with these contexts, two seeds each."""
    runs = []
    for (pattern, context), (value, seconds, peak) in {**RUNS, **UNTRAINED}.items():
        words = ("study=costs", f"pattern={pattern}", f"block_size={context}", f"batch_size={1024 // context}")
        for seed in range(2 * (context in contexts)):
            run = result("experiment=ladder_lm", *words, f"seed={seed}", value=value + seed)
            run["seconds_by_phase"] = {"training": seconds and seconds + seed}
            run["machine"] = {"peak_bytes": peak}
            runs.append(run)
    (built,) = tables_of(put(folder, *runs))
    return built


def test_the_figure_has_a_line_for_each_pattern(tmp_path: Path) -> None:
    figure, caption = costs_figure(table(tmp_path / "two", 32, 64))  # type: ignore[misc]
    for axis, cost in zip(figure.axes, (1, 2)):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        factor, more = (1e-6, 0.0) if cost == 2 else (1.0, 0.5)
        for pattern, label in (("full", "full attention"), ("window", "window")):
            points = [RUNS[pattern, context] for context in (32, 64)]
            assert lines[label] == [[pytest.approx(own[cost] * factor + more), own[0] + 0.5] for own in points]
    assert "the longer the context: 32, 64 tokens." in caption
    plt.close("all")
    one = table(tmp_path / "one", 32)
    assert costs_figure(one) is None
    with pytest.raises(UserError, match="study=costs has no runs with contexts of different lengths"):
        costs_table(one)
