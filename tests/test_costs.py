"""Oracle: runs whose perplexity, time and memory are known, in contexts of two lengths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_report import put, result, tables_of

from speechformer.errors import UserError
from speechformer.report.costs import costs_figure, costs_table, frontier
from speechformer.report.results import Table

# perplexity, seconds and bytes of full attention and of a window, by the length of the context
RUNS = {("full", 32): (400.0, 10.0, 1e9), ("full", 64): (300.0, 40.0, 3e9)}
RUNS |= {("window", 32): (410.0, 9.0, 2e9), ("window", 64): (405.0, 20.0, 2e9)}


def table(folder: Path, *contexts: int) -> Table:
    """Return the table of the runs with these contexts, two seeds each."""
    runs = []
    for (pattern, context), (value, seconds, peak) in RUNS.items():
        overrides = ("study=costs", f"pattern={pattern}", f"block_size={context}", f"batch_size={1024 // context}")
        for seed in range(2):
            own = result("experiment=ladder_lm", *overrides, f"seed={seed}", value=value + seed)
            own["seconds_by_phase"], own["machine"] = {"training": seconds + seed}, {"peak_bytes": peak}
            runs += [own] if context in contexts else []
    (table,) = tables_of(put(folder, *runs))
    return table


def test_costs_stand_beside_results_and_the_frontier_is_bold(tmp_path: Path) -> None:
    text = costs_table(table(tmp_path, 32, 64))
    assert text.cells[1:] == [  # type: ignore[attr-defined]
        ["full attention", "32", "400.5 ± 0.7", "10.5 ± 0.7", "1000.0 ± 0.0", "2"],
        ["window", "32", "410.5 ± 0.7", "9.50 ± 0.71", "2000.0 ± 0.0", "2"],
        ["full attention", "64", "300.5 ± 0.7", "40.5 ± 0.7", "3000.0 ± 0.0", "2"],
        ["window", "64", "405.5 ± 0.7", "20.5 ± 0.7", "2000.0 ± 0.0", "2"],
    ]
    bold = [[cell.strip().startswith("**") for cell in line.split("|")[4:6]] for line in str(text).splitlines()[2:]]
    assert bold == [[True, True], [True, False], [True, True], [False, False]]


def test_the_figure_has_a_line_for_each_pattern_and_larger_marks_for_longer_contexts(tmp_path: Path) -> None:
    drawn = costs_figure(table(tmp_path, 32, 64))
    assert drawn
    for axis, cost in zip(drawn[0].axes, (1, 2)):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        factor, more = (1e-6, 0.0) if cost == 2 else (1.0, 0.5)
        for pattern, label in (("full", "full attention"), ("window", "window")):
            points = [RUNS[pattern, context] for context in (32, 64)]
            assert lines[label] == [[pytest.approx(own[cost] * factor + more), own[0] + 0.5] for own in points]
        marks = [line for line in axis.lines if len(line.get_xdata()) == 1]
        assert sorted(line.get_markersize() for line in marks) == [4, 4, 7, 7]
    assert "the longer the context: 32, 64 tokens." in drawn[1]


def test_runs_of_one_context_have_no_costs(tmp_path: Path) -> None:
    own = table(tmp_path, 32)
    assert costs_figure(own) is None
    with pytest.raises(UserError, match="study=costs has no runs with contexts of different lengths"):
        costs_table(own)


def test_a_run_without_a_step_has_no_costs(tmp_path: Path) -> None:
    """On a logarithmic axis there is no place for it."""
    runs = []
    for context, seconds in ((32, 0.0), (64, 40.0), (128, 80.0)):
        overrides = ("study=costs", f"block_size={context}", f"batch_size={1024 // context}")
        own = result("experiment=ladder_lm", *overrides, value=400.0)
        own["seconds_by_phase"], own["machine"] = {"training": seconds}, {"peak_bytes": 1e9}
        runs.append(own)
    (own,) = tables_of(put(tmp_path, *runs))
    assert [cells[1] for cells in costs_table(own).cells[1:]] == ["64", "128"]  # type: ignore[attr-defined]
    assert costs_figure(own)


def test_the_frontier_has_what_nothing_cheaper_equals() -> None:
    """Oracle: every point that no other is as cheap and as good as."""
    rng = random.Random(0)
    for higher in (False, True):
        points = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(20)]
        sign = -1 if higher else 1
        best = {p for p in points if not any(q != p and q[0] <= p[0] and sign * q[1] <= sign * p[1] for q in points)}
        chosen = frontier(points, higher)  # type: ignore[arg-type]
        assert set(chosen) == best and chosen == sorted(chosen)
