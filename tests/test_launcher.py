"""`hydra/launcher=ensemble`: what trains as one, what does not and why, and that nothing is lost where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import compose
from test_sweeps import Sweep, results, sweep

from speechformer.sweeps.launcher import grouped
from speechformer.training.ensemble import Ensemble

__all__ = ["sweep"]  # a fixture
LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3"]
PACKED = ["hydra/launcher=ensemble", "hydra.sweep.dir=here"]


def groups(*jobs: str) -> tuple[list[list[str]], dict[str, int]]:
    """How jobs are grouped, by their words."""
    found, alone = grouped((compose(*job.split()), Path(job), job.split()) for job in jobs)
    return [[str(directory) for _, directory, _ in group] for group in found], alone


def test_together_go_runs_whose_parameters_have_the_same_shapes() -> None:
    """Oracle: the list of the module's head."""
    alike = ["model=alibi", "model=rope", "model=nope", "seed=3", "pattern=window", "recipe.lr=1e-2"]
    alike.append("model=alibi model.slopes=[0.5,0.25] model.scale=2.0")
    others = ["model=learned", "model=learned seed=1", "model=alibi model.slopes=learned", "width=128"]
    found, alone = groups(*alike, *others)
    assert found == [alike, ["model=learned", "model=learned seed=1"]]
    assert alone == {"no other run of the sweep has their shapes and settings": 2}


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "width=32",
            "dropout=0.2",
            "batch_size=8",
            "trainer.max_epochs=3",
            "recipe=adamw",
            "recipe.weight_decay=0.5",
        ),
        *(
            "recipe.label_smoothing=0.1",
            "protocol=clean",
            "task=lm",
            "architecture.norm=post",
            "trainer.gradient_clip_val=1.0",
        ),
        *("eval_interval=5", "corpus=sample", "block_size=16", "study=mine", "trainer.precision=bf16-mixed"),
    ],
)
def test_all_else_must_be_alike(setting: str) -> None:
    found, _ = groups("seed=0", "seed=1", f"{setting} seed=0", f"{setting} seed=1")
    assert found == [["seed=0", "seed=1"], [f"{setting} seed=0", f"{setting} seed=1"]]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("task=translate", "batches of translation"),
        ("model=rnn", "recurrent layers"),
        ("force=true", "begins each run anew"),
        ("width=0", "width must be a whole number"),
        ("trainer.devices=2", "in a sweep"),
    ],
)
def test_what_cannot_be_packed_runs_alone_and_it_is_said_why(job: str, why: str) -> None:
    found, alone = groups(job, f"{job} seed=1")
    assert found == [] and len(alone) == 1
    assert why in next(iter(alone)) and next(iter(alone.values())) == 2


def test_a_packed_sweep_is_the_sweep(sweep: Sweep, tmp_path: Path) -> None:
    """Oracle: the same sweep, one run after another."""
    jobs = ["seed=0,1", "model=alibi,rope,learned"]
    code, out, err = sweep(*LM, *jobs, *PACKED)
    assert code == 0, err
    assert out.count("As one:") == 2 and "Sweep of 6 runs: 6 finished." in out
    assert out.count("in one of 4 runs: ") == 4 and out.count("in one of 2 runs: ") == 2
    assert sweep(*LM, *jobs, "hydra.sweep.dir=there")[0] == 0
    packed, plain = results(tmp_path / "here"), results(tmp_path / "there")
    assert list(packed) == list(plain)
    for name, result in plain.items():
        assert packed[name]["metrics"] == pytest.approx(result["metrics"], rel=1e-3)
        for key in ("identity", "overrides", "config", "parameters", "steps", "seed", "status"):
            assert packed[name][key] == result[key]
    code, out, _ = sweep(*LM, *jobs, *PACKED)
    assert code == 0 and out.count("Done before: ") == 6 and "As one" not in out


def test_what_is_not_packed_runs_all_the_same(sweep: Sweep, tmp_path: Path) -> None:
    code, out, err = sweep(*LM, "seed=0,1", "width=8,10,0", "model=alibi,rnn", *PACKED)
    assert "Not packed: 4 of 12 runs, as recurrent layers are not packed." in out
    assert "width must be a whole number of at least 1, not 0" in out
    assert code == 1 and "8 finished, 4 failed" in out and err.count("Failed: ") >= 4


def test_members_sets_how_many_train_as_one(sweep: Sweep, tmp_path: Path) -> None:
    code, out, _ = sweep(*LM, "seed=range(5)", *PACKED, "hydra.launcher.members=2")
    assert code == 0 and out.count("As one: 2 runs") == 2
    assert sorted(r["machine"]["ensemble_size"] for r in results(tmp_path / "here").values()) == [1, 2, 2, 2, 2]


def test_what_fails_as_one_runs_one_after_another(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Ensemble, batch: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Ensemble, "losses", broken)
    code, out, _ = sweep(*LM, "seed=0,1", *PACKED)
    assert code == 0 and "They did not train as one (CUDA out of memory), and go one after another." in out
    assert {r["status"] for r in results(tmp_path / "here").values()} == {"finished"}
