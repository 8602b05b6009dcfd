"""`hydra/launcher=ensemble`: which runs are an ensemble, which are not and why, and what happens if it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, compose
from test_sweeps import Sweep, results, sweep

from speechformer.errors import UserError
from speechformer.sweeps.launcher import common_settings, group_jobs
from speechformer.training.ensemble import Ensemble

__all__ = ["sweep"]  # a fixture
LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3"]
ENSEMBLE = ["hydra/launcher=ensemble", "hydra.sweep.dir=here"]


def groups(*jobs: str) -> tuple[list[list[str]], dict[str, int]]:
    """How jobs are grouped, by their words."""
    ensembles, alone = group_jobs((compose(*job.split()), Path(job), job.split()) for job in jobs)
    return [[str(directory) for _, directory, _ in group] for group in ensembles], alone


def test_runs_whose_parameters_have_the_same_shapes_are_an_ensemble() -> None:
    """Oracle: the list of the module's head."""
    alike = ["model=alibi", "model=rope", "model=nope", "seed=3", "pattern=window", "recipe.lr=1e-2"]
    alike.append("model=alibi model.slopes=[0.5,0.25] model.scale=2.0")
    others = ["model=learned", "model=learned seed=1", "model=alibi model.slopes=learned", "width=128"]
    ensembles, alone = groups(*alike, *others)
    assert ensembles == [alike, ["model=learned", "model=learned seed=1"]]
    assert alone == {"no other run of the sweep has the same shapes and settings": 2}


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "width=32",
            "dropout=0.2",
            "batch_size=8",
            "trainer.max_epochs=3",
            "recipe.weight_decay=0.5",
        ),
        *(
            "protocol=paper",
            "task=lm",
            "architecture.norm=post",
            "trainer.gradient_clip_val=1.0",
        ),
        *("eval_interval=5", "corpus=sample", "block_size=16", "trainer.precision=bf16-mixed"),
    ],
)
def test_all_other_settings_must_be_equal(setting: str) -> None:
    ensembles, _ = groups("seed=0", "seed=1", f"{setting} seed=0", f"{setting} seed=1")
    assert ensembles == [["seed=0", "seed=1"], [f"{setting} seed=0", f"{setting} seed=1"]]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("task=translate", "batches of translation"),
        ("model=rnn", "recurrent layers"),
        ("model=by_layer", "differ by layer"),
        ("model=randomised", "are random"),
        ("force=true", "discards each run"),
        ("width=0", "width must be at least 1, not 0"),
        ("trainer.devices=2", "in a sweep"),
    ],
)
def test_a_run_that_cannot_be_in_an_ensemble_runs_alone_with_a_reason(job: str, why: str) -> None:
    ensembles, alone = groups(job, f"{job} seed=1")
    assert ensembles == [] and len(alone) == 1
    assert why in next(iter(alone)) and next(iter(alone.values())) == 2


@pytest.mark.slow
def test_an_ensemble_sweep_has_the_results_of_an_ordinary_sweep(sweep: Sweep, tmp_path: Path) -> None:
    """Oracle: the same sweep, one run after another."""
    jobs = ["seed=0,1", "model=alibi,rope,learned"]
    code, out, err = sweep(*LM, *jobs, *ENSEMBLE)
    assert code == 0, err
    assert out.count("Ensemble of") == 2 and "Sweep of 6 runs: 6 finished." in out
    assert sweep(*LM, *jobs, "hydra.sweep.dir=there")[0] == 0
    ensemble, plain = results(tmp_path / "here"), results(tmp_path / "there")
    assert sorted(result["machine"]["ensemble_size"] for result in ensemble.values()) == [2, 2, 4, 4, 4, 4]
    assert list(ensemble) == list(plain)
    for name, result in plain.items():
        assert ensemble[name]["metrics"] == pytest.approx(result["metrics"], rel=1e-3)
        for key in ("identity", "overrides", "config", "parameters", "steps", "seed", "status"):
            assert ensemble[name][key] == result[key]
    code, out, _ = sweep(*LM, *jobs, *ENSEMBLE)
    assert code == 0 and results(tmp_path / "here") == ensemble and "Ensemble of" not in out


def test_members_sets_how_many_train_as_one(sweep: Sweep, tmp_path: Path) -> None:
    code, out, _ = sweep(*LM, "seed=range(5)", *ENSEMBLE, "hydra.launcher.members=2")
    assert code == 0 and out.count("Ensemble of 2 runs") == 2
    assert sorted(r["machine"]["ensemble_size"] for r in results(tmp_path / "here").values()) == [1, 2, 2, 2, 2]


@pytest.mark.slow
def test_what_fails_as_one_runs_one_after_another(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Ensemble, batch: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Ensemble, "losses", broken)
    code, out, _ = sweep(*LM, "seed=0,1", *ENSEMBLE)
    assert code == 0 and "The ensemble failed (CUDA out of memory); its runs run one after another." in out
    assert {r["status"] for r in results(tmp_path / "here").values()} == {"finished"}


def test_seeds_with_data_of_their_own_are_not_an_ensemble() -> None:
    """Oracle: the first words of the reason, and that the same runs with one fold have none."""
    fixed, by_seed = (compose(*TINY, "protocol=clean", f"protocol.fold={fold}") for fold in (1, "seed"))
    assert common_settings(fixed)
    with pytest.raises(UserError, match=r"protocol\.fold=seed gives each seed data of its own"):
        common_settings(by_seed)


def test_runs_that_draw_words_are_not_an_ensemble() -> None:
    with pytest.raises(UserError, match=r"^task\.unknown_rate draws or counts words for each run"):
        common_settings(compose(*TINY, "task.unknown_rate=0.5"))
