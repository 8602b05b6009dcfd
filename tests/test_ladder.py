"""Oracle: a ladder of four rungs and two branches whose means and differences are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from test_report import put, result, tables_of

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

STEPS = ([], ["model=rope"], ["width=96"], ["dropout=0.3"])


def ladder(folder: Path) -> list:
    """Perplexity falls by 10, 20 and 30 from 400; a branch beside the first rung, and one that mixes counts."""
    runs, overrides, value = [], ["experiment=ladder_lm", "study=ladder"], 400.0
    for k, step in enumerate(STEPS):
        overrides, value = [*overrides, *step], value - 10 * k
        runs += [result(*overrides, f"seed={seed}", value=value + seed) for seed in range(4)]
        if k == 1:
            runs += [result(*overrides, "layers=2", f"seed={seed}", value=500 - seed) for seed in range(4)]
            other = [*overrides, "layers=2", "heads=4"]
            runs += [result(*other, f"seed={seed}", value=450.0 - seed) for seed in range(4)]
    mixed = [result(*overrides, "task.ngram_mixture=fixed", f"seed={seed}", value=340.0 + seed) for seed in range(4)]
    for run in mixed:
        run["metrics"]["test_mixture_perplexity_mean"] = 300.0 + run["seed"]
    return tables_of(put(folder, *mixed, *reversed(runs)))


def test_rungs_stand_on_each_other_whatever_the_order_of_the_runs(tmp_path: Path) -> None:
    (table,) = ladder(tmp_path)
    built = rungs(table)
    assert [rung.step for rung in built if rung.on_top][:4] == [tuple(step) for step in STEPS]
    assert [rung.path for rung in built if not rung.on_top] == [("layers=2",), ("layers=2", "heads=4")]
    (branch,) = (rung for rung in built if rung.step == ("heads=4",))
    assert branch.difference("test_perplexity_mean").mean == pytest.approx(-50)  # type: ignore[union-attr]
    place = [rung.step for rung in built].index(("layers=2",))
    assert built[place - 1].step == ("model=rope",)
    falls = [rung.difference("test_perplexity_mean") for rung in built if rung.on_top][1:]
    assert [effect.mean for effect in falls[:3] if effect] == pytest.approx([-10, -20, -30])
    assert all(effect and effect.paired for effect in falls[:3])
    last = falls[3]
    assert last and last.mean == pytest.approx(300 - 340)  # the mixture, less the model below it


def test_a_step_is_the_same_as_a_sweep_and_as_a_person_write_it(tmp_path: Path) -> None:
    """And a word in a template that is no override is the usual error."""
    base = ["experiment=ladder_lm", "study=ladder"]
    runs = [result(*base, value=400.0)]
    runs += [result(*base, "recipe.lr=0.003", f"seed={seed}", value=390.0) for seed in range(2)]
    raw = ("recipe.lr=3e-3", "architecture.tied_output=true")
    runs += [result(*base, *raw, f"seed={seed}", value=380.0 + seed) for seed in range(2)]
    (table,) = tables_of(put(tmp_path, *runs))
    assert [rung.step for rung in rungs(table)] == [(), ("recipe.lr=0.003",), ("architecture.tied_output=True",)]
    said = step_in_words(table, "test_perplexity_mean", "architecture.tied_output=true")
    assert said == step_in_words(table, "test_perplexity_mean", "architecture.tied_output=True")
    with pytest.raises(UserError, match="study=ladder has no step 'width'"):
        step_in_words(table, "test_perplexity_mean", "width")


def test_a_lower_perplexity_is_better_where_a_higher_score_is(tmp_path: Path) -> None:
    """Oracle: accuracies and perplexities that both fall by far."""
    runs = []
    for step, value in (((), 0.9), (("model=rope",), 0.5)):
        for seed in range(4):
            value += value * seed / 100  # so that differences differ
            own = result("task=classify", "study=ladder", *step, f"seed={seed}", value=value)
            own["metrics"]["validation_perplexity"] = 100 * value
            runs.append(own)
    (table,) = tables_of(put(tmp_path, *runs))
    assert steps_in_words(table, table.metric).startswith("- **Worse**: `model=rope`")
    assert steps_in_words(table, "validation_perplexity").startswith("- **Better**: `model=rope`")


def test_steps_in_words(tmp_path: Path) -> None:
    """Oracle: means far apart over seeds of a small spread, and one step that changes less than the spread."""
    base = ["experiment=ladder_lm", "study=ladder"]
    means = {("model=rope",): 380.0, ("model=rope", "width=96"): 380.5, ("layers=2",): 420.0}
    runs = [result(*base, f"seed={seed}", value=400 + seed) for seed in range(4)]
    for step, mean in means.items():
        runs += [result(*base, *step, f"seed={seed}", value=mean + (seed + 2) % 4) for seed in range(4)]
    (table,) = tables_of(put(tmp_path, *runs))
    assert steps_in_words(table, "test_perplexity_mean").splitlines() == [
        "- **Better**: `model=rope` (−20.0).",
        "- **Worse**: `layers=2`, beside (+20.0).",
        "- **Inconclusive**: `width=96`.",
        "- **The whole ladder**: −19.5 [−21.7, −17.3].",  # 2.447 sqrt(2 * 5 / 3 / 4): Welch
    ]
    assert step_in_words(table, "test_perplexity_mean", "model=rope") == "better, −20.0 [−22.2, −17.8]"
    with pytest.raises(UserError, match="study=ladder has no step 'width=97'"):
        step_in_words(table, "test_perplexity_mean", "width=97")


def test_the_table_and_the_figure_have_every_rung(tmp_path: Path) -> None:
    (table,) = ladder(tmp_path)
    cells = steps_table(table, ["test_perplexity_mean"]).cells  # type: ignore[attr-defined]
    assert [row[0] for row in cells[1:]] == [
        *(
            "the defaults",
            "model=rope",
            *("beside: layers=2", "beside: layers=2\nheads=4"),
            "width=96",
            "dropout=0.3",
        ),
        "task.ngram_mixture=fixed",
    ]
    assert cells[1][1] == "401.5"
    drawn = ladder_figure(table)
    assert drawn is not None
    (axis,) = drawn[0].axes
    widths = [dot.get_offsets()[0][0] for dot in axis.collections]
    assert widths == pytest.approx([401.5, 391.5, 498.5, 448.5, 371.5, 341.5, 301.5])
    assert all(math.isfinite(width) for width in widths)


def test_of_two_mixtures_the_better_one_on_the_held_out_part_is_shown(tmp_path: Path) -> None:
    """Also where it stands beside the ladder, and the last rung is the better one on test."""
    base, runs = ["experiment=ladder_lm", "study=ladder", "protocol=clean"], []
    rows = {(): (400.0, 0), ("task.ngram_targets=0.5",): (390.0, 0), ("task.ngram_mixture=fixed",): (300.0, 299.0)}
    rows |= {("task.ngram_targets=0.5", "task.ngram_mixture=fixed"): (310.0, 280.0)}
    for step, (held_out, test) in rows.items():
        for seed in range(3):
            own = result(*base, *step, f"seed={seed}", value=held_out + seed)
            own["metrics"]["validation_perplexity"] = held_out + seed
            own["report"] = {"columns": ["test_perplexity_mean", "validation_perplexity"]}
            if test:
                own["metrics"] |= {"validation_mixture_perplexity": held_out, "test_mixture_perplexity_mean": test}
            runs.append(own)
    (table,) = tables_of(put(tmp_path, *runs))
    shown = highest(table)
    assert {kind: rung.step for kind, rung in shown.items()} == {
        "model alone": ("task.ngram_targets=0.5",),
        "with counts": ("task.ngram_mixture=fixed",),
    }
    assert not shown["with counts"].on_top


def test_a_study_of_mixtures_shows_the_model_within(tmp_path: Path) -> None:
    """Oracle: perplexities 340 of the model and 300 of its mixture, over a baseline of 250."""
    runs = []
    for seed in range(3):
        own = result("experiment=ladder_lm", "study=mixed", f"seed={seed}", value=340.0)
        own["metrics"] |= {"test_mixture_perplexity_mean": 300.0, "test_known_perplexity_mean": 200.0}
        own["metrics"] |= {"test_mixture_known_perplexity_mean": 100.0}
        runs.append(own)
    baseline = result("task=lm", "protocol=clean", value=250.0)
    baseline |= {"baseline": {"name": "kneser_ney_5"}, "seed": None}
    baseline["metrics"] |= {"test_known_perplexity_mean": 250.0}
    (table,) = tables_of(put(tmp_path, baseline, *runs))
    assert ratios_in_words(table, ["kneser_ney_5"]) == (
        "1.360 (model alone; over known words 0.800) and 1.200 (with counts; over known words 0.400)"
    )


def test_ratios_to_a_baseline(tmp_path: Path) -> None:
    """Oracle: the mean of the top model, 341.5, and of the mixture, 301.5, over a baseline of 250.

    A better baseline over known words alone, 80 of 300, takes part over these alone.
    """
    (table,) = ladder(tmp_path)
    baseline = {
        **result("task=lm", "protocol=clean", value=250.0),
        "baseline": {"name": "kneser_ney_5"},
        "seed": None,
    }
    baseline["metrics"] |= {"test_known_perplexity_mean": 100.0}
    results = [run.result for row in table.rows for run in row.runs]
    for own in results:
        own["metrics"]["test_known_perplexity_mean"] = 200.0
    (table,) = tables_of(put(tmp_path / "more", baseline, *results))
    alone, mixed = (f"{value / 250:.3f}" for value in (341.5, 301.5))
    assert ratios_in_words(table, ["kneser_ney_5"]) == (
        f"{alone} (model alone; over known words 2.000) and {mixed} (with counts; over known words 2.000)"
    )
    with pytest.raises(UserError, match="study=ladder has no baseline unigram"):
        ratios_in_words(table, ["kneser_ney_5", "unigram"])
    other = {**baseline, "baseline": {"name": "kneser_ney_3"}, "metrics": {**baseline["metrics"]}}
    other["metrics"] |= {"test_perplexity_mean": 300.0, "test_known_perplexity_mean": 80.0}
    (table,) = tables_of(put(tmp_path / "two", baseline, other, *results))
    assert ratios_in_words(table, ["kneser_ney_5", "kneser_ney_3"]) == (
        f"{alone} (model alone; over known words 2.500) and {mixed} (with counts; over known words 2.500)"
    )
    cells = against_table(table, ["kneser_ney_5"]).cells  # type: ignore[attr-defined]
    assert [row[0] for row in cells[1:]] == [
        *("model alone, all words", "model alone, known words", "with counts, all words", "with counts, known words")
    ]
    place = cells[0].index("mean")
    assert cells[1][place].startswith(f"{341.5 / 250:.3f}")
    assert cells[3][place].startswith(f"{301.5 / 250:.3f}")
