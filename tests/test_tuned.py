"""`hydra/sweeper=tuned`: every row is tuned on the same grid, and fresh seeds run at its choice."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_sweeps import LM, Sweep, results, sweep  # noqa: F401

from speechformer.report.tables import tuned
from speechformer.runs.folder import State
from speechformer.sweeps.tuned import TunedSweeper, choose, score_of

TUNED = [*LM, "protocol=clean", "hydra/sweeper=tuned", "hydra.sweep.dir=sweep", "hydra/launcher=ensemble"]
GRID = "recipe.lr=tag(tune, choice(1e-4,1e-2))"


@pytest.mark.slow
def test_every_row_has_the_same_grid_and_fresh_seeds(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """Oracle: the results of the runs, by hand."""
    words = [*TUNED, GRID, "model=alibi,nope", "seed=3,4", "hydra.sweeper.untuned_seeds=1"]
    code, out, err = sweep(*words)
    assert code == 0, err
    runs = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/result.json")]
    tuning = [run for run in runs if run["config"]["study"] == "lm_tuning"]
    final = [run for run in runs if run["config"]["study"] is None]
    assert len(tuning) == 4 and {run["seed"] for run in tuning} == {100}
    assert Counter(run["seed"] for run in final) == {3: 4, 4: 2}
    content = json.loads((tmp_path / "sweep" / "tuned.json").read_text())
    assert content["points"] == [["recipe.lr=0.0001"], ["recipe.lr=0.01"]] and content["tuning_seeds"] == [100]
    for row in content["rows"]:
        model = row["row"].removeprefix("model=")
        own = {
            run["config"]["recipe"]["lr"]: run["best"]["value"]
            for run in tuning
            if run["config"]["model"]["name"] == model
        }
        assert row["scores"] == [own[1e-4], own[1e-2]]
        best = min(own, key=lambda lr: own[lr])
        assert row["choice"] == [f"recipe.lr={best}"]
        settings = [
            (run["config"]["recipe"]["lr"], run["seed"]) for run in final if run["config"]["model"]["name"] == model
        ]
        assert sorted(settings) == sorted([(best, 3), (best, 4), (1e-3, 3)])  # its choice, and untuned
    page = (tmp_path / "sweep" / "report" / "report.md").read_text()
    assert "## Tuning of sweep" in page and "Each row had the same 2 runs on seeds 100." in page
    code, out, _ = sweep(*words)
    assert code == 0 and "Sweep of 10 runs: 10 finished." in out
    assert len([*(tmp_path / "sweep").glob("*/result.json")]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=alibi,nope"], "hydra/sweeper=tuned needs something to tune, such as 'recipe.lr=tag("),
        ([GRID, "seed=0,100"], "seed=100 is in hydra.sweeper.tuning_seeds, too; tune with other seeds."),
        ([GRID, "protocol=paper"], "protocol=paper holds none out: it would choose on test. Add protocol=clean."),
        ([GRID, "hydra.sweeper.tuning_seeds=[0]"], "seed=0 is in hydra.sweeper.tuning_seeds, too; tune with other"),
        ([GRID, "++seed=0,1"], "hydra/sweeper=tuned takes the seeds of seed=, not of ++seed=."),
        ([GRID, "task=lm,classify"], "hydra/sweeper=tuned tunes one task at a time."),
        ([GRID, "hydra.sweeper.tuning_seeds=[]"], "and hydra.sweeper.tuning_seeds."),
        *(
            (
                [GRID, f"hydra.sweeper.untuned_seeds={wrong}"],
                f"hydra.sweeper.untuned_seeds={shown}: expected a number",
            )
            for wrong, shown in (("-1", "-1"), ("1.5", "1.5"), ("two", "two"), ("true", "True"))
        ),
    ],
)
def test_invalid_studies_are_one_sentence(words: list[str], message: str, sweep: Sweep) -> None:  # noqa: F811
    code, _, err = sweep(*TUNED, *words)
    assert message in f"{code}{err}" and "Traceback" not in err


def test_a_choice_needs_every_tuning_run(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """A run that failed ends the study before the second stage, with one sentence."""
    words = [*TUNED[:-1], "recipe.warmup_steps=tag(tune, choice(0,1000000))", "seed=3"]
    code, _, err = sweep(*words)
    assert "1 of 2 tuning runs in sweep have no score (failed), so nothing is chosen." in f"{code}{err}"
    assert not (tmp_path / "sweep" / "tuned.json").exists()
    assert {run["seed"] for run in results(tmp_path / "sweep").values()} == {100}


def test_a_diverged_run_has_no_score() -> None:
    """Its best value before it diverged does not count."""
    result = {"best": {"metric": "validation_perplexity", "value": 3.0}}
    assert score_of(State("finished", result, {})) == 3.0
    assert math.isnan(score_of(State("diverged", result, {})))


def test_the_best_finite_score_is_chosen() -> None:
    nan = float("nan")
    assert choose({("a=1",): 2.0, ("a=2",): nan, ("a=3",): 3.0}, "max") == ("a=3",)
    assert choose({("a=1",): 2.0, ("a=2",): nan, ("a=3",): 3.0}, "min") == ("a=1",)
    assert choose({("a=1",): nan}, "min") is None


def test_a_tie_changes_nothing() -> None:
    """Oracle: the config has a rate of 3e-3 and init=torch; equal scores choose it, better ones do not."""
    config = OmegaConf.create({"recipe": {"lr": 3e-3, "init": "torch"}})
    sweeper: Any = TunedSweeper([100])
    sweeper.cfg, sweeper.loader = None, SimpleNamespace(load_sweep_config=lambda cfg, row: config)
    points = [(f"recipe.lr={lr}", f"recipe.init={init}") for lr in (0.001, 0.003) for init in ("normal", "torch")]
    ordered = sweeper.default_first(("model=rope",), points)
    assert ordered == [points[3], *points[:3]]
    assert choose(dict.fromkeys(ordered, 1.0), "max") == points[3]
    assert choose({**dict.fromkeys(ordered, 0.9), points[1]: 1.0}, "max") == points[1]


def test_a_study_without_scores_has_a_section(tmp_path: Path) -> None:
    content = {
        "points": [["a=1"]],
        "tuning_seeds": [7],
        "rows": [{"row": "model=*", "choice": None, "scores": [None]}],
    }
    (tmp_path / "tuned.json").write_text(json.dumps(content))
    (table,) = tuned([tmp_path])
    assert table.frame.to_numpy().tolist() == [["model=*", "–"]] and table.heading.startswith("Tuning of")
