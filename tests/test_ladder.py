"""Oracle: a ladder of rungs whose means and differences are known.

The tables and sentences of ladders are those of the pages in test_results.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import put, result, tables_of

from speechformer.errors import UserError
from speechformer.report.ladder import (
    ladder_figure,
    rungs,
    step_in_words,
    steps_table,
)
from speechformer.report.plots import plt
from speechformer.report.results import Table

LADDER = ("experiment=ladder_lm", "study=ladder")
METRIC = "test_perplexity_mean"


def ladder(folder: Path) -> Table:
    """Perplexity falls by 10, 20 and 30 from 400; a branch beside the first rung, and one that mixes counts."""
    runs, words, value = [], LADDER, 400.0
    for place, step in enumerate(([], ["model=rope"], ["width=96"], ["dropout=0.3"])):
        words, value = (*words, *step), value - 10 * place
        runs += [result(*words, f"seed={seed}", value=value + seed) for seed in range(4)]
        if place == 1:
            for branch, start in ((["layers=2"], 500.0), (["layers=2", "heads=4"], 450.0)):
                runs += [result(*words, *branch, f"seed={seed}", value=start - seed) for seed in range(4)]
    mixed = [result(*words, "task.ngram_mixture=fixed", f"seed={seed}", value=340.0 + seed) for seed in range(4)]
    for run in mixed:
        run["metrics"]["test_mixture_perplexity_mean"] = 300.0 + run["seed"]
    (table,) = tables_of(put(folder, *mixed, *reversed(runs)))
    return table


def test_rungs_stand_on_each_other_whatever_the_order_of_the_runs(tmp_path: Path) -> None:
    table = ladder(tmp_path)
    built = rungs(table)
    assert [rung.step for rung in built if rung.on_top][:4] == [(), ("model=rope",), ("width=96",), ("dropout=0.3",)]
    assert [rung.path for rung in built if not rung.on_top] == [("layers=2",), ("layers=2", "heads=4")]
    (branch,) = (rung for rung in built if rung.step == ("heads=4",))
    assert branch.difference(METRIC).mean == pytest.approx(-50)  # type: ignore[union-attr]
    falls = [effect for rung in built if rung.on_top and (effect := rung.difference(METRIC))]
    # the last one is the mixture, less the model below it
    assert [effect.mean for effect in falls] == pytest.approx([-10, -20, -30, 300 - 340])
    assert all(effect.paired for effect in falls[:3])
    cells = steps_table(table, [METRIC]).cells[1:]  # type: ignore[attr-defined]
    assert [row[0] for row in cells] == [
        "the defaults",
        "model=rope",
        "beside: layers=2",
        "beside: layers=2\nheads=4",
        "width=96",
        "dropout=0.3",
        "task.ngram_mixture=fixed",
    ]
    (axis,) = ladder_figure(table)[0].axes  # type: ignore[index]
    means = [401.5, 391.5, 498.5, 448.5, 371.5, 341.5, 301.5]
    assert [dot.get_offsets()[0][0] for dot in axis.collections] == pytest.approx(means) and cells[0][1] == "401.5"
    plt.close("all")


def test_a_step_is_the_same_as_a_sweep_and_as_a_person_write_it(tmp_path: Path) -> None:
    """And a word in a template that is no override is the usual error."""
    words = ("recipe.lr=3e-3", "architecture.tied_output=true")
    runs = [result(*LADDER, value=400.0), result(*LADDER, "recipe.lr=0.003", value=390.0)]
    (table,) = tables_of(put(tmp_path, *runs, result(*LADDER, *words, value=380.0)))
    assert [rung.step for rung in rungs(table)] == [(), ("recipe.lr=0.003",), ("architecture.tied_output=True",)]
    said = step_in_words(table, METRIC, "architecture.tied_output=true")
    assert said == step_in_words(table, METRIC, "architecture.tied_output=True")
    with pytest.raises(UserError, match="study=ladder has no step 'width'"):
        step_in_words(table, METRIC, "width")
