"""Runs that train as one against the same runs alone: results, curves, checkpoints and files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose

from speechformer.analysis.load import load
from speechformer.runs import folder as runs
from speechformer.training import fit
from speechformer.training.ensemble import Ensemble
from speechformer.training.run import execute, execute_ensemble

EXACT = ["trainer.precision=64-true"]
MEASURED = ("seconds", "seconds_by_phase", "tokens_per_second", "machine", "versions")  # differ from run to run


def own(little: Path) -> list[str]:
    return ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", *TINY[1:], "checkpoint_every=5"]


def both(folder: Path, members: list[list[str]]) -> list[tuple[Path, Path]]:
    """The folders of the runs as one, and of the same alone."""
    pairs = [(folder / f"one{k}", folder / f"alone{k}") for k in range(len(members))]
    done = execute_ensemble([(compose(*words), one, words) for words, (one, _) in zip(members, pairs)])
    assert done == [one for one, _ in pairs]
    for words, (_, alone) in zip(members, pairs):
        execute(compose(*words), alone, words)
    return pairs


def close(one: Any, alone: Any, within: float, path: str = "") -> None:
    """Require that plain data or tensors differ by no more."""
    if isinstance(alone, dict):
        assert set(one) == set(alone), path
        for key in alone:
            close(one[key], alone[key], within, f"{path}/{key}")
    elif isinstance(alone, list | tuple):
        assert len(one) == len(alone), path
        for k, (a, b) in enumerate(zip(one, alone)):
            close(a, b, within, f"{path}/{k}")
    elif isinstance(alone, torch.Tensor) and alone.is_floating_point():
        torch.testing.assert_close(one, alone, atol=within, rtol=within, equal_nan=True, msg=lambda m: f"{path}: {m}")
    elif isinstance(alone, torch.Tensor):
        assert torch.equal(one, alone), path
    elif isinstance(alone, float) and "PhaseTimer" not in path:
        assert one == pytest.approx(alone, abs=within, rel=within, nan_ok=True), path
    elif not isinstance(alone, bytes | float):  # pictures
        assert one == alone, path


def check(one: Path, alone: Path, within: float) -> None:
    """The whole of a run as one is that of the run alone."""
    for path in (alone / "checkpoints").glob("*.ckpt"):
        states = [torch.load(d / "checkpoints" / path.name, weights_only=True)["state_dict"] for d in (one, alone)]
        close(*states, within)
    names = [{f.relative_to(d).as_posix() for f in d.rglob("*") if "tfevents" not in f.name} for d in (one, alone)]
    assert names[0] == names[1]
    results = [runs.read_result(directory) for directory in (one, alone)]
    for result, number in zip(results, (2, 1)):
        assert result["machine"]["ensemble_size"] >= number
        for key in MEASURED:
            del result[key]
    close(*results, 1e-5)  # metrics are kept in single precision
    for name in ("last.ckpt", "best.ckpt"):
        if (alone / name).exists():
            checkpoints = [torch.load(directory / name, weights_only=True) for directory in (one, alone)]
            for key in ("task", "global_step", "hyper_parameters", "state_dict"):
                close(*(checkpoint[key] for checkpoint in checkpoints), within)
    predictions = [[path.read_text() for path in directory.glob("predictions.tsv")] for directory in (one, alone)]
    assert predictions[0] == predictions[1] and len(predictions[0]) == (results[1]["task"] == "classify")
    rows = [(directory / "metrics.csv").read_text().splitlines() for directory in (one, alone)]
    assert len(rows[0]) == len(rows[1]) and rows[0][0] == rows[1][0]


LM = "task=lm trainer.max_steps=12 eval_interval=5 keep_every_n_steps=8"


@pytest.mark.parametrize(
    ("words", "members"),
    [
        ("task=classify architecture.pool=cls protocol=clean trainer.max_epochs=3", []),
        (f"{LM} protocol=clean trainer.gradient_clip_val=0.5 recipe.schedule=cosine", []),
        (f"{LM} architecture.tied_output=true trainer.accumulate_grad_batches=2", ["model=relative seed={}"]),
        (f"{LM} model=alibi", ["model.slopes=learned seed={}"]),
        (f"{LM} corpus=stories corpus.documents=30 corpus.words=40 task.tokens=bytes task.documents=separate", []),
    ],
)
def test_a_member_is_the_run_alone(words: str, members: list[str], little: Path, tmp_path: Path) -> None:
    """Seeds, patterns, positions and learning rates at once; double precision, so that rounding does not hide a
    difference: within 1e-9 after all steps, checkpoints included."""
    shared = [*(own(little)[3:] if "corpus=stories" in words else own(little)), *EXACT, *words.split()]
    different = ["model=alibi seed=0", "model=rope seed=7 recipe.lr=3e-3", "model=alibi model.scale=2 pattern=window"]
    if members:
        different = [members[0].format(seed) for seed in (1, 2)]
    for one, alone in both(tmp_path, [[*shared, *member.split()] for member in different]):
        check(one, alone, 1e-9)


def test_one_that_diverges_does_not_disturb_the_others(little: Path, tmp_path: Path) -> None:
    """Rounding decides at which step the loss overflows, so a member and the run alone may end at different ones."""
    base = [*own(little), *EXACT, "task=lm", "recipe.optimizer=sgd", "trainer.max_steps=40", "eval_interval=5"]
    base += ["trainer.max_epochs=null", "trainer.log_every_n_steps=2"]
    pairs = both(tmp_path, [[*base, f"recipe.lr={lr}", f"seed={k}"] for k, lr in enumerate((1e-2, 1000, 1e-3))])
    for one, alone in (pairs[0], pairs[2]):
        check(one, alone, 1e-9)
    died = [runs.read_result(directory) for directory in pairs[1]]
    assert died[0]["status"] == died[1]["status"] == "diverged"
    for (directory, _), result in zip([pairs[1]], died):
        assert result["error"] == f"The loss was NaN or infinite at step {result['steps']}."
        # A loss that overflows at a step of an evaluation may end the run before it.
        evaluated, steps = [point["step"] for point in result["curve"]], result["steps"]
        assert evaluated in (list(range(5, steps, 5)), list(range(5, steps + 1, 5)))
        assert torch.load(directory / "last.ckpt", weights_only=True)["global_step"] == result["steps"]


def test_all_that_diverge_end_the_training(little: Path, tmp_path: Path) -> None:
    base = [*own(little), "task=lm", "recipe.optimizer=sgd", "recipe.lr=1000", "trainer.max_steps=5000"]
    folders = [tmp_path / str(seed) for seed in range(2)]
    execute_ensemble([(compose(*base, f"seed={k}"), folder, []) for k, folder in enumerate(folders)])
    for folder in folders:
        result = runs.read_result(folder)
        assert result["status"] == "diverged" and result["steps"] < 100


def test_an_ensemble_that_was_interrupted_goes_on(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the ensemble that nothing interrupted, to the bit; a member alone begins anew."""
    base = [*own(little), "task=lm", "trainer.max_steps=14", "recipe=cosine", "recipe.warmup_steps=2"]
    members = [f"seed={k}" for k in range(3)]

    def jobs(place: str) -> list[Any]:
        return [(compose(*base, word), tmp_path / place / str(k), [word]) for k, word in enumerate(members)]

    losses = Ensemble.losses

    def interrupted(self: Ensemble, batch: Any) -> torch.Tensor:
        if self.global_step == 12:
            raise KeyboardInterrupt
        return losses(self, batch)

    execute_ensemble(jobs("whole"))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Ensemble, "losses", interrupted)
        execute_ensemble(jobs("killed"))
    assert not (tmp_path / "killed" / "0" / runs.RESULT).exists()
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    capsys.readouterr()
    assert execute_ensemble(jobs("killed")) == [tmp_path / "killed" / str(k) for k in range(3)]
    assert "resumes from its last checkpoint" in capsys.readouterr().out
    for k in range(3):
        results = [runs.read_result(tmp_path / place / str(k)) for place in ("killed", "whole")]
        assert [results[0][name] for name in ("metrics", "curve", "best")] == [
            results[1][name] for name in ("metrics", "curve", "best")
        ]
        states = [torch.load(tmp_path / p / str(k) / "last.ckpt", weights_only=True) for p in ("killed", "whole")]
        assert all(torch.equal(x, states[1]["state_dict"][name]) for name, x in states[0]["state_dict"].items())
        assert (tmp_path / "killed" / str(k) / "metrics.csv").read_text() == (
            tmp_path / "whole" / str(k) / "metrics.csv"
        ).read_text()
    assert torch.load(tmp_path / "other" / "0" / "ensemble.ckpt", weights_only=True)["identities"] == [
        runs.owner_of(tmp_path / "other" / str(k))["identity"] for k in range(3)
    ]
    cfg, directory, words = jobs("other")[0]
    assert execute(cfg, directory, words)["status"] == "finished"
    assert not (directory / "ensemble.ckpt").exists()
    assert execute_ensemble(jobs("other")) == [tmp_path / "other" / str(k) for k in (1, 2)]


def test_an_ensemble_that_is_killed_after_its_last_step_takes_none_again(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [*own(little), "task=lm", "protocol=clean", "trainer.max_steps=6", "eval_interval=4"]
    jobs = [(compose(*base, f"seed={k}"), tmp_path / str(k), []) for k in range(2)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fit, "make_result", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt()))
        execute_ensemble(jobs)
    monkeypatch.setattr(Ensemble, "losses", lambda *arguments: pytest.fail("a step"))
    assert execute_ensemble(jobs) == [tmp_path / str(k) for k in range(2)]
    for _, folder, _ in jobs:
        assert runs.read_result(folder)["steps"] == 6 and not (folder / "ensemble.ckpt").exists()


def test_what_was_trained_as_one_is_used_like_any_run(little: Path, tmp_path: Path) -> None:
    base = [*own(little), "task=classify", "trainer.max_epochs=1"]
    folders = [tmp_path / str(seed) for seed in range(2)]
    execute_ensemble([(compose(*base, f"seed={k}"), folder, []) for k, folder in enumerate(folders)])
    first, second = (load(folder).task.model.head[0].weight for folder in folders)
    assert first.isfinite().all() and not torch.equal(first, second)
    assert first.untyped_storage().nbytes() == first.nbytes  # the file holds its own weights and no others'
