"""`hydra/sweeper=tuned`: every row is tuned on the same grid, and fresh seeds run at its choice."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_sweeps import LM, Sweep, results, sweep  # noqa: F401

from speechformer.report.tables import tuned
from speechformer.runs.folder import State
from speechformer.sweeps.folder import Overrides
from speechformer.sweeps.sweeper import best_score
from speechformer.sweeps.tuned import TunedSweeper

TUNED = [*LM, "protocol=clean", "hydra/sweeper=tuned", "hydra.sweep.dir=sweep", "hydra/launcher=ensemble"]
GRID = "recipe.lr=tag(tune, choice(1e-4,1e-2))"


@pytest.mark.slow
def test_every_row_has_the_same_grid_and_fresh_seeds(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """Oracle: the results of the runs, by hand."""
    words = [*TUNED, GRID, "model=alibi,nope", "seed=3,4", "hydra.sweeper.untuned_seeds=1"]
    words += ["hydra.sweeper.tuning_seeds=[100]"]
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
        (choice,) = row["choice"]  # which the tests below compare with the scores
        best, name = float(choice.removeprefix("recipe.lr=")), row["row"].removeprefix("model=")
        own = [run for run in final if run["config"]["model"]["name"] == name]
        settings = [(run["config"]["recipe"]["lr"], run["seed"]) for run in own]
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
        ([GRID, "task=lm,classify"], "hydra/sweeper=tuned compares scores of one task at a time."),
        ([GRID, "hydra.sweeper.tuning_seeds=[]"], "and hydra.sweeper.tuning_seeds."),
    ],
)
def test_invalid_studies_are_one_sentence(words: list[str], message: str, sweep: Sweep) -> None:  # noqa: F811
    code, _, err = sweep(*TUNED, *words)
    assert message in f"{code}{err}" and "Traceback" not in err


def test_a_choice_needs_every_tuning_run(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """A run that failed ends the study before the second stage, with one sentence."""
    words = [*TUNED[:-1], "recipe.warmup_steps=tag(tune, choice(0,1000000))", "seed=3"]
    words += ["hydra.sweeper.tuning_seeds=[100]"]
    code, _, err = sweep(*words)
    assert "1 of 2 tuning runs in sweep have no score (failed), so nothing is chosen." in f"{code}{err}"
    assert not (tmp_path / "sweep" / "tuned.json").exists()
    assert {run["seed"] for run in results(tmp_path / "sweep").values()} == {100}


def test_a_diverged_run_has_no_score() -> None:
    """Its best value before it diverged does not count."""
    result = {"best": {"metric": "validation_perplexity", "value": 3.0}}
    assert best_score(State("finished", result, {})) == 3.0
    assert math.isnan(best_score(State("diverged", result, {})))


class Scored(TunedSweeper):
    """A sweeper whose runs take no time: its scores are given by the words of the point."""

    scores: ClassVar[dict[str, float]] = {}

    def run(self, jobs: Iterable[Overrides]) -> dict[Overrides, State]:
        self.rounds = [*getattr(self, "rounds", []), [*jobs]]
        states = {}
        for job in self.rounds[-1]:
            value = next((value for words, value in self.scores.items() if words in " ".join(job)), math.nan)
            result = {"best": {"metric": "validation_perplexity", "value": value}}
            states[job] = State("diverged" if math.isnan(value) else "finished", result, {})
        return states


def chosen(sweeper: Scored, folder: Path, rates: str) -> dict[str, Any]:
    """Let it tune the rate of a language model, and return the row that it writes."""
    sweeper.folder, sweeper.config, sweeper.choices = folder, compose("task=lm"), {"hydra/sweeper": "tuned"}
    sweeper.compose = lambda job, number=0: compose("task=lm", "protocol=clean", *job)  # type: ignore[method-assign]
    parsed = OverridesParser.create().parse_overrides(["seed=1,2", f"recipe.lr=tag(tune, choice({rates}))"])
    sweeper.choose_jobs({override.get_key_element(): override for override in parsed})
    (row,) = json.loads((folder / "tuned.json").read_text())["rows"]
    return row


@pytest.mark.parametrize(
    ("scores", "choice"),
    [
        ({"lr=0.0001": 3.0, "lr=0.001": 2.0, "lr=0.01": 1.0}, "recipe.lr=0.01"),  # of perplexities the lowest
        ({"lr=0.0001": 3.0, "lr=0.001": 2.0}, "recipe.lr=0.001"),  # the others diverged
        ({"lr=0.0001": 2.0, "lr=0.001": 2.0, "lr=0.01": 2.0}, "recipe.lr=0.001"),  # a tie changes nothing
        ({}, None),
    ],
)
def test_the_best_finite_score_is_chosen(scores: dict[str, float], choice: str | None, tmp_path: Path) -> None:
    """Oracle: by hand; the config has a rate of 1e-3."""
    sweeper = Scored([100])
    sweeper.scores = scores
    row = chosen(sweeper, tmp_path, "1e-4,1e-3,1e-2")
    final = [] if choice is None else [(choice, "seed=1"), (choice, "seed=2")]
    assert sweeper.rounds[1] == [*final, ("seed=1",), ("seed=2",)]
    assert row["choice"] == (None if choice is None else [choice])


@pytest.mark.parametrize(
    ("default", "other", "choice"),
    [
        ((2.0, 3.0, 4.0), (1.0, 2.0, 3.0), "recipe.lr=0.01"),  # 1 less with every seed
        ((2.0, 3.0, 4.0), (1.0, 3.5, 3.5), "recipe.lr=0.001"),  # 0.33 less, with a standard error of 0.44
        ((2.0, math.nan, 4.0), (3.0, 3.0, 9.0), "recipe.lr=0.01"),  # the default diverged
    ],
)
def test_a_gain_within_noise_changes_nothing(
    default: tuple[float, ...], other: tuple[float, ...], choice: str, tmp_path: Path
) -> None:
    """Oracle: perplexities of three seeds, by hand; the config has a rate of 1e-3."""
    sweeper = Scored([100, 101, 102])
    sweeper.scores = {
        f"recipe.lr={rate} study=lm_tuning seed={100 + k}": value
        for rate, values in (("0.001", default), ("0.01", other))
        for k, value in enumerate(values)
        if math.isfinite(value)
    }
    assert chosen(sweeper, tmp_path, "1e-3,1e-2")["choice"] == [choice]


def test_a_study_without_scores_has_a_section(tmp_path: Path) -> None:
    content = {
        "points": [["a=1"]],
        "tuning_seeds": [7],
        "rows": [{"row": "model=*", "choice": None, "scores": [None]}],
    }
    (tmp_path / "tuned.json").write_text(json.dumps(content))
    (table,) = tuned([tmp_path])
    assert table.frame.to_numpy().tolist() == [["model=*", "–"]] and table.heading.startswith("Tuning of")
