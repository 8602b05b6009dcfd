"""Oracle: a ladder of four rungs and two branches whose means and differences are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import baseline, put, result, tables_of

from speechformer.errors import UserError
from speechformer.report.ladder import (
    against_table,
    highest,
    ladder_figure,
    ratios_in_words,
    rungs,
    step_in_words,
    steps_in_words,
    steps_table,
)
from speechformer.report.plots import plt
from speechformer.report.results import Table

LADDER = ("experiment=ladder_lm", "study=ladder")
METRIC = "test_perplexity_mean"


def ladder(folder: Path, *more: dict) -> Table:
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
    (table,) = tables_of(put(folder, *more, *mixed, *reversed(runs)))
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


def test_a_lower_perplexity_is_better_where_a_higher_score_is(tmp_path: Path) -> None:
    """Oracle: accuracies and perplexities that both fall by far."""
    runs = []
    for step, value in (((), 0.9), (("model=rope",), 0.5)):
        for seed in range(4):
            value += value * seed / 100  # so that differences differ
            run = result("task=classify", "study=ladder", *step, f"seed={seed}", value=value)
            run["metrics"]["validation_perplexity"] = 100 * value
            runs.append(run)
    (table,) = tables_of(put(tmp_path, *runs))
    assert steps_in_words(table, table.metric).startswith("- **Worse**: `model=rope`")
    assert steps_in_words(table, "validation_perplexity").startswith("- **Better**: `model=rope`")


def test_steps_in_words(tmp_path: Path) -> None:
    """Oracle: means far apart over seeds of a small spread, and one step that changes less than the spread."""
    means = {("model=rope",): 380.0, ("model=rope", "width=96"): 380.5, ("layers=2",): 420.0}
    runs = [result(*LADDER, f"seed={seed}", value=400 + seed) for seed in range(4)]
    for step, mean in means.items():
        runs += [result(*LADDER, *step, f"seed={seed}", value=mean + (seed + 2) % 4) for seed in range(4)]
    (table,) = tables_of(put(tmp_path, *runs))
    assert steps_in_words(table, METRIC).splitlines() == [
        "- **Better**: `model=rope` (−20.0).",
        "- **Worse**: `layers=2`, beside (+20.0).",
        "- **Inconclusive**: `width=96`.",
        "- **The whole ladder**: −19.5 [−21.7, −17.3].",  # 2.447 sqrt(2 * 5 / 3 / 4): Welch
    ]
    assert step_in_words(table, METRIC, "model=rope") == "better, −20.0 [−22.2, −17.8]"


def test_of_two_mixtures_the_better_one_on_the_held_out_part_is_shown(tmp_path: Path) -> None:
    """Also where it stands beside the ladder, and the last rung is the better one on test."""
    runs, mixture = [], "task.ngram_mixture=fixed"
    rows = {(): (400.0, 0), ("task.ngram_targets=0.5",): (390.0, 0), (mixture,): (300.0, 299.0)}
    rows |= {("task.ngram_targets=0.5", mixture): (310.0, 280.0)}
    for step, (held_out, test) in rows.items():
        run = result(*LADDER, "protocol=clean", *step, value=held_out)
        run["metrics"]["validation_perplexity"] = held_out
        run["report"] = {"columns": [METRIC, "validation_perplexity"]}
        if test:
            run["metrics"] |= {"validation_mixture_perplexity": held_out, "test_mixture_perplexity_mean": test}
        runs.append(run)
    (table,) = tables_of(put(tmp_path, *runs))
    steps = {kind: rung.step for kind, rung in highest(table).items()}
    assert steps == {"model alone": ("task.ngram_targets=0.5",), "with counts": (mixture,)}


def test_ratios_to_a_baseline(tmp_path: Path) -> None:
    """Oracle: the mean of the top model, 341.5, and of the mixture, 301.5, over a baseline of 250.

    A better baseline over known words alone, 80 of 300, takes part over these alone.
    """
    baselines = []
    for name, value, known in (("kneser_ney_5", 250.0, 100.0), ("kneser_ney_3", 300.0, 80.0)):
        baselines.append(baseline(name, "task=lm", "protocol=clean", value=value))
        baselines[-1]["metrics"]["test_known_perplexity_mean"] = known
    table = ladder(tmp_path / "ladder", *baselines)
    for run in table.finished:
        run.metrics["test_known_perplexity_mean"] = 200.0
    for names, known in ((["kneser_ney_5"], "2.000"), (["kneser_ney_5", "kneser_ney_3"], "2.500")):
        assert ratios_in_words(table, names) == (
            f"1.366 (model alone; over known words {known}) and 1.206 (with counts; over known words {known})"
        )
    with pytest.raises(UserError, match="study=ladder has no baseline unigram"):
        ratios_in_words(table, ["kneser_ney_5", "unigram"])
    head, *cells = against_table(table, ["kneser_ney_5"]).cells  # type: ignore[attr-defined]
    assert [row[0] for row in cells][1:3] == ["model alone, known words", "with counts, all words"]
    assert [row[head.index("mean")].split()[0] for row in cells] == ["1.366", "2.000", "1.206", "2.000"]
    run = result(*LADDER, "study=mixed", value=340.0)  # a study of mixtures shows the model within
    run["metrics"] |= {"test_mixture_perplexity_mean": 300.0, "test_known_perplexity_mean": 80.0}
    (table,) = tables_of(put(tmp_path / "mixed", baselines[0], run))
    assert ratios_in_words(table, ["kneser_ney_5"]).startswith("1.360 (model alone; over known words 0.800)")
