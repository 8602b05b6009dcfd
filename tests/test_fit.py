"""A run that is killed and started again, at any step, is to the last bit the run that was never stopped; and what
its folder may hold by then."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose, without_biases_of_keys
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speechformer import console
from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.probe import ProbeTask
from speechformer.tasks.translate import Translate
from speechformer.training import devices, runtime
from speechformer.training.build import hyperparameters, warn_of_slow_precision
from speechformer.training.fit_ensemble import execute_ensemble
from speechformer.training.run import execute
from speechformer.training.threads import ThreadTuner

# Every kind of schedule, of evaluation (by epoch, by steps), of accumulation, with rates and dropout that matter
RUNS = {
    "lm": ["task=lm", "trainer.max_steps=9", "eval_interval=3", "recipe=cosine", "recipe.warmup_steps=2"],
    "probe": [
        *("task=probe", "probe.max_length=4", "probe.test_lengths=[6]", "task.test_rows=20", "batch_size=4"),
        *("trainer.max_steps=6", "trainer.limit_train_batches=4", "eval_interval=3", "recipe.warmup_steps=2"),
    ],
    "documents": [
        *("task=lm", "corpus=stories", "corpus.documents=30", "corpus.words=40", "task.tokens=bytes"),
        *("task.documents=separate", "trainer.max_steps=7", "eval_interval=3", "model=rope"),
    ],
    "counts, noise and muon": [
        "task=lm",
        "protocol=clean",
        "trainer.max_steps=7",
        "eval_interval=3",
        "recipe=muon",
        "embedding_dropout=0.3",
        "architecture.output_bias=unigram",
        "task.unknown_rate=0.5",
        "task.noise=0.2",
        "task.ngram_targets=0.5",
        "task.ngram_mixture=context",
    ],
    "lm, clean": ["task=lm", "trainer.max_steps=7", "eval_interval=3", "protocol=clean"],
    "epochs": ["trainer.max_epochs=3", "trainer.limit_train_batches=4"],
    "epochs, scheduled": [
        "trainer.max_epochs=3",
        "trainer.limit_train_batches=4",
        "recipe.schedule=linear",
        "recipe.warmup_steps=1",
    ],
    "steps and epochs": [
        "task=lm",
        "trainer.max_steps=7",
        "trainer.max_epochs=2",
        "eval_interval=3",
        "recipe.schedule=cosine",
        "recipe.warmup_steps=2",
    ],
    "epochs of few batches": ["trainer.max_epochs=2", "batch_size=20", "trainer.log_every_n_steps=1"],
    "epochs, evaluated by steps": ["trainer.max_epochs=3", "trainer.limit_train_batches=4", "eval_interval=3"],
    "unknown words": [
        *("protocol=clean", "protocol.validation=0.9", "task.unknown_rate=0.5", "batch_size=4"),
        *("trainer.max_epochs=3", "trainer.limit_train_batches=3", "eval_interval=3"),
    ],
    "masked words": [
        *("task.masked_lm=0.5", "task.pretraining_epochs=1", "trainer.max_epochs=3", "trainer.limit_train_batches=3"),
        "eval_interval=3",
    ],
    "accumulation": [
        "trainer.max_epochs=3",
        "trainer.limit_train_batches=5",
        "eval_interval=2",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=1.0",
    ],
    "translation, averaged": [
        "task=translate",
        "task.batch_tokens=3000",
        "task.average_checkpoints=2",
        "trainer.max_epochs=3",
        "recipe.warmup_steps=3",
        "recipe.lr=1e-2",
    ],
    "translation by an RNN": [
        "task=translate",
        "model=rnn_attention",
        "task.batch_tokens=null",
        "batch_size=40",
        "trainer.max_steps=7",
        "eval_interval=3",
        "recipe.warmup_steps=3",
    ],
}
PAIRS = ["task.vocab_size=40", "task.beam=2"]


class KilledError(BaseException):
    """Stands for `kill -9`: nothing of the run's code handles it."""


@pytest.fixture(autouse=True)
def small_corpus(little: Path, little_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a tenth of a second, for there are hundreds of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]"]
    monkeypatch.setattr("test_fit.OWN", [*own, *TINY[1:], "threads=1"])
    pairs = ["corpus=ted", f"corpus.root={little_pairs}", *PAIRS]
    monkeypatch.setattr("test_fit.OWN_PAIRS", [*pairs, *TINY[1:], "threads=1"])


OWN: list[str] = []
OWN_PAIRS: list[str] = []


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    generated = {"task=probe", "corpus=stories"} & {*overrides}
    own = OWN_PAIRS if "task=translate" in overrides else OWN[3:] if generated else OWN
    return execute(compose(*own, "trainer.log_every_n_steps=2", *overrides), folder)


def essence(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """All that a run leaves and that must not depend on its having been stopped."""
    paths = {name: folder / f"{name}.ckpt" for name in ("last", "best", "average")}
    checkpoints = {name: torch.load(path, weights_only=True) for name, path in paths.items() if path.exists()}
    last = checkpoints["last"]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    weights = {name: checkpoint["state_dict"] for name, checkpoint in checkpoints.items()}
    moments = last["optimizer_states"][0]["state"]
    return {
        **{key: result.get(key) for key in ("status", "metrics", "best", "curve", "steps", "identity", "error")},
        "weights": {
            f"{which} {key}": x.numpy().tobytes() for which, part in weights.items() for key, x in part.items()
        },
        "moments": {f"{k} {key}": x.numpy().tobytes() for k, part in moments.items() for key, x in part.items()},
        "schedule": last["lr_schedulers"],
        "csv": (folder / "metrics.csv").read_text(),
        "predictions": [path.read_text() for path in folder.glob("predictions.tsv")],
        # sorted, for two event files of one second are read in the order of their names
        "events": {
            tag: sorted((e.step, str(e.value)) for e in events.Scalars(tag)) for tag in events.Tags()["scalars"]
        },
        "texts": {
            tag: sorted((e.step, str(e)[-200:]) for e in events.Tensors(tag))
            for tag in events.Tags()["tensors"]
            if tag.startswith("translations/")
        },
    }


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set "step" to be killed in that training step; "taken" counts them."""
    at = {"step": 0, "taken": 0}
    for task in (Classify, LanguageModel, ProbeTask, Translate):
        step = task.training_step

        def counted(self: Task, batch: Any, batch_idx: int, step: Any = step) -> torch.Tensor:
            at["taken"] += 1
            if at["taken"] == at["step"]:
                raise KilledError
            return step(self, batch, batch_idx)

        monkeypatch.setattr(task, "training_step", counted)
    return at


@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in RUNS), ("lm", 3), ("accumulation", 3)])
def test_a_run_killed_at_any_step_goes_on_to_the_same_end(
    name: str, every: int, killed_at: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the run that was not killed. `lm` is killed in each step, the others in every fourth one."""
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *RUNS[name]))
    steps = killed_at["taken"]
    assert steps >= 6
    if "translation" in name:
        assert len(expected["texts"]) >= 5 and not (tmp_path / "whole" / "weights").exists()
    if "averaged" in name:
        assert any(key.startswith("average") for key in expected["weights"])
    for step in range(1 if name == "lm" else 2, steps + 1, 1 if name == "lm" else 4):
        folder, killed_at["step"], killed_at["taken"] = tmp_path / str(step), step, 0
        with pytest.raises(KilledError):
            run(folder, *RUNS[name], f"checkpoint_every={every}")
        assert runs.state(folder).status == "interrupted"
        killed_at["step"] = 0
        capsys.readouterr()
        result = run(folder, *RUNS[name], f"checkpoint_every={every}")
        assert essence(folder, result) == expected, f"killed in step {step}"
        assert result["attempts"] == 2
        went_on = killed_at["taken"] - step
        assert ("resumes from its last checkpoint" in capsys.readouterr().out) == (went_on < steps)


def test_a_run_killed_again_and_again_ends_as_one_that_was_not(killed_at: dict[str, int], tmp_path: Path) -> None:
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *RUNS["lm"]))
    for _ in range(8):
        killed_at["step"], killed_at["taken"] = 2, 0
        with pytest.raises(KilledError):
            run(tmp_path / "a", *RUNS["lm"], "checkpoint_every=1")
    killed_at["step"] = 0
    assert essence(tmp_path / "a", run(tmp_path / "a", *RUNS["lm"], "checkpoint_every=1")) == expected


@pytest.mark.parametrize("name", ["lm", "accumulation", "translation, averaged"])
def test_checkpoints_that_are_kept(name: str, killed_at: dict[str, int], tmp_path: Path) -> None:
    """Oracles: the run that keeps none; the run whose learning rate is 0, for step 0; the run that was not killed."""
    plain, whole, still, killed = (tmp_path / part for part in ("plain", "whole", "still", "killed"))
    expected = essence(plain, run(plain, *RUNS[name]))
    options = [*RUNS[name], "keep_every_n_steps=2"]
    assert essence(whole, run(whole, *options)) == expected and not (plain / "checkpoints").exists()
    steps, last = states(whole), expected["steps"]
    assert list(steps) == list(range(0, last + 1, 2))
    assert not any("optimizer" in key for key in torch.load(whole / "checkpoints" / "2.ckpt", weights_only=True))
    run(still, *options, "recipe.lr=0", "recipe.weight_decay=0")
    assert states(still)[0] == states(still)[last - last % 2] == steps[0] != steps[2]
    killed_at["taken"], killed_at["step"] = 0, 5
    with pytest.raises(KilledError):
        run(killed, *options, "checkpoint_every=3")
    (killed / "checkpoints" / "2.ckpt.0123abcd.partial").write_bytes(b"half a checkpoint")
    killed_at["step"] = 0
    assert essence(killed, run(killed, *options, "checkpoint_every=3")) == expected and states(killed) == steps
    assert not list(killed.rglob("*.partial"))


def states(folder: Path) -> dict[int, dict[str, bytes]]:
    """The weights of each checkpoint that a run keeps, by step."""
    paths = sorted((int(path.stem), path) for path in (folder / "checkpoints").glob("*.ckpt"))
    loaded = {step: torch.load(path, weights_only=True) for step, path in paths}
    assert all(checkpoint["global_step"] == step for step, checkpoint in loaded.items())
    return {
        step: {name: value.numpy().tobytes() for name, value in checkpoint["state_dict"].items()}
        for step, checkpoint in loaded.items()
    }


def test_a_run_without_checkpoints_says_so(
    killed_at: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run(tmp_path / "a", *RUNS["lm"])
    run(tmp_path / "a", *RUNS["lm"], "keep_every_n_steps=2")
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'a'} has no checkpoints of steps 0, 2, ")
    assert said.endswith(": it trained there without keep_every_n_steps=2. Add force=true to train it again.\n")
    last = run(tmp_path / "a", *RUNS["lm"], "keep_every_n_steps=2", "force=true")["steps"]
    assert len(states(tmp_path / "a")) > 2
    run(tmp_path / "a", *RUNS["lm"], "keep_every_n_steps=4")
    run(tmp_path / "a", *RUNS["lm"], "keep_every_n_steps=2")
    assert capsys.readouterr().err == ""
    run(tmp_path / "a", *RUNS["lm"], "keep_every_n_steps=3")
    odd = console.list_steps(range(3, last + 1, 6))
    assert f"has no checkpoints of {odd}: it trained there" in capsys.readouterr().err
    run(tmp_path / "a", *RUNS["lm"], "force=true")
    assert not (tmp_path / "a" / "checkpoints").exists() and capsys.readouterr().err == ""
    killed_at["taken"], killed_at["step"] = 0, 5
    with pytest.raises(KilledError):
        run(tmp_path / "killed", *RUNS["lm"], "checkpoint_every=4")
    killed_at["step"] = 0
    run(tmp_path / "killed", *RUNS["lm"], "keep_every_n_steps=2")
    assert "has no checkpoints of steps 0, 2: it trained there" in capsys.readouterr().err
    assert 4 in states(tmp_path / "killed")


@pytest.mark.parametrize("where", ["best.ckpt", "last.ckpt", "checkpoints/"])
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*RUNS["lm"], "checkpoint_every=2", *(["keep_every_n_steps=2"] if where == "checkpoints/" else [])]
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *options))
    for write in range(1, 4):
        save, folder, written = torch.save, tmp_path / str(write), []

        def half(checkpoint: Any, file: Any) -> None:
            if where in file.name:
                written.append(file.name)  # noqa: B023
                if len(written) == write:  # noqa: B023
                    file.write(b"half a checkpoint")
                    file.flush()
                    raise KilledError
            save(checkpoint, file)  # noqa: B023

        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(torch, "save", half)
            run(folder, *options)
        name = "checkpoints/2.ckpt" if where == "checkpoints/" else where
        (folder / f"{name}.0123abcd.partial").write_bytes(b"half a checkpoint")  # only an exception takes it away
        assert essence(folder, run(folder, *options)) == expected
        assert not list(folder.rglob("*.partial")) and states(folder) == states(tmp_path / "whole")


def test_a_run_killed_between_its_last_step_and_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = [
        "recipe.optimizer=sgd",
        "recipe.lr=1000",
        "architecture.norm=post",
        "architecture.final_norm=false",
        "eval_interval=400",
    ]
    diverging = [*RUNS["lm"], *wild, "recipe.schedule=constant", "recipe.warmup_steps=0", "trainer.max_steps=500"]
    for name, options in (("lm", RUNS["lm"]), ("clean", RUNS["lm, clean"]), ("diverging", diverging)):
        expected = essence(tmp_path / name, run(tmp_path / name, *options))
        assert (expected["status"] == "diverged") == (name == "diverging")
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(identity, "commit", lambda: (_ for _ in ()).throw(KilledError()))
            run(tmp_path / f"{name}, killed", *options)
        assert essence(tmp_path / f"{name}, killed", run(tmp_path / f"{name}, killed", *options)) == expected


def test_a_process_that_is_really_killed_goes_on(tmp_path: Path) -> None:
    """`kill -9`, three times, wherever it strikes; oracle: the run that was not killed."""
    options = [*OWN, "task=lm", "trainer.max_steps=400", "eval_interval=100", "checkpoint_every=5"]
    expected = essence(tmp_path / "whole", execute(compose(*options), tmp_path / "whole"))
    command = [sys.executable, "-m", "speechformer.train", *options, f"hydra.run.dir={tmp_path / 'a'}"]
    kills, written = 0, 0.0
    while kills < 3:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        last = tmp_path / "a" / "last.ckpt"
        while not last.exists() or last.stat().st_mtime == written:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.01)
        time.sleep(0.05 * kills)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills, written = kills + 1, last.stat().st_mtime
        assert runs.state(tmp_path / "a").status == "interrupted"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumes from its last checkpoint" in done.stdout
    result = runs.read_result(tmp_path / "a")
    assert result["attempts"] == 4
    assert essence(tmp_path / "a", result) == expected


def test_a_run_goes_on_with_the_threads_that_it_began_with(killed_at: dict[str, int], tmp_path: Path) -> None:
    every = devices.all_threads()
    killed_at["step"] = 5
    with pytest.raises(KilledError):
        execute(compose(*OWN, *RUNS["lm"]), tmp_path / "a")
    killed_at["step"] = 0
    assert execute(compose(*OWN[:-1], *RUNS["lm"]), tmp_path / "a")["machine"]["threads"] == 1
    assert execute(compose(*OWN[:-1], *RUNS["lm"]), tmp_path / "b")["machine"]["threads"] == every  # it does not leak


@pytest.mark.parametrize("kind", ["lm", "epochs"])
def test_a_compiled_run_is_the_same_run(kind: str, traced: list[str], tmp_path: Path) -> None:
    """Its folder is that of the run, and its checkpoint no other."""
    plain = run(tmp_path / "a", *RUNS[kind])
    ours = run(tmp_path / "b", *RUNS[kind], "compile=reduce-overhead")
    assert traced == ["reduce-overhead"] * plain["config"]["layers"]
    assert ours["identity"] == plain["identity"]
    figures = [{name: value for name, value in of["metrics"].items() if value is not None} for of in (ours, plain)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    weights = [torch.load(tmp_path / place / "last.ckpt", weights_only=True)["state_dict"] for place in "ab"]
    torch.testing.assert_close(*map(without_biases_of_keys, weights), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "fastest"),
    [("lm", 1), ("lm", 2), ("epochs", 1), ("accumulation", 2), ("translation, averaged", 2), ("of two", 1)],
)
def test_a_run_that_rehearses_is_that_with_its_number_of_threads(
    kind: str, fastest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rehearsals are real, only the clock's times are not: neither weights nor random numbers nor logs know."""
    rehearse, rehearsed = ThreadTuner.rehearse, []

    def timed(*arguments: Any) -> float:
        rehearse(*arguments)
        rehearsed.append(torch.get_num_threads())
        return 0.5 if rehearsed[-1] == fastest else 1.0

    monkeypatch.setattr(ThreadTuner, "rehearse", timed)
    monkeypatch.setattr(devices, "share_of_threads", lambda: None)
    monkeypatch.setattr(devices, "all_threads", lambda: 2)
    words = RUNS["lm" if kind == "of two" else kind]
    if kind == "of two":
        jobs = [[*OWN[:-1], "trainer.log_every_n_steps=2", *words, f"seed={seed}"] for seed in (0, 1)]
        execute_ensemble([(compose(*job), tmp_path / f"a{k}", job) for k, job in enumerate(jobs)])
        execute_ensemble(
            [(compose(*job, f"threads={fastest}"), tmp_path / f"b{k}", job) for k, job in enumerate(jobs)]
        )
        ours, fixed = (runs.read_result(tmp_path / name) for name in ("a0", "b0"))
        places = ["a0", "b0"]
    else:
        ours = run(tmp_path / "a", *words, "threads=null")
        assert set(rehearsed) == {1, 2}
        rehearsed.clear()
        fixed = run(tmp_path / "b", *words, f"threads={fastest}")
        places = ["a", "b"]
        assert not rehearsed
    assert ours["machine"]["threads"] == fixed["machine"]["threads"] == fastest
    for result in (ours, fixed):
        result["overrides"] = None
    assert essence(tmp_path / places[0], ours) == essence(tmp_path / places[1], fixed)


def edit(checkpoint: Any, path: str, value: Any) -> None:
    """Set an entry of nested data; words are keys, and in a list numbers."""
    *outer, last = (int(word) if word.isdecimal() else word for word in path.split("/"))
    for key in outer:
        checkpoint = checkpoint[key]
    checkpoint[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer_states/0/param_groups/0/params", -1),
        ("optimizer_states/0/state/0", "x"),
        ("optimizer_states/0/state/0/step", {"a": 1}),
        ("loops/fit_loop/epoch_loop.val_loop.batch_progress/current", -1),
        ("pytorch-lightning_version", {"a": 1}),
        ("progress/curve/0/test_perplexity_mean", torch.tensor(1.0)),
        ("callbacks/ReplayLogger/images", 3),
        ("callbacks/PhaseTimer/evaluation", None),
        ("callbacks/Checkpoints/best", {}),
        ("best.ckpt", None),
    ],
)
def test_a_checkpoint_of_strange_content_is_named(
    path: str, value: Any, killed_at: dict[str, int], tmp_path: Path
) -> None:
    killed_at["step"] = 8
    with pytest.raises(KilledError):
        run(tmp_path / "a", *RUNS["lm"], "checkpoint_every=3")
    killed_at["step"] = 0
    if path == "best.ckpt":
        (tmp_path / "a" / path).unlink()
    else:
        checkpoint = torch.load(tmp_path / "a" / "last.ckpt", weights_only=True)
        edit(checkpoint, path, value)
        torch.save(checkpoint, tmp_path / "a" / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt is not as speechformer writes it .*\. Remove it to resume"):
        run(tmp_path / "a", *RUNS["lm"])


def test_what_decorates_a_result_cannot_lose_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Neither a name that looks like an interpolation, nor a TensorBoard that fails after training."""

    def fails(*_: Any, **__: Any) -> None:
        assert runs.read_result(tmp_path / "a")["status"] == "finished"  # it is written already
        raise RuntimeError("no table")

    monkeypatch.setattr(TensorBoardLogger, "log_hyperparams", fails)
    result = execute(compose(*OWN, *RUNS["lm"], r"study='\${x}'"), tmp_path / "a", [r"study='\${x}'"])
    assert result["config"]["study"] == "${x}" and result["status"] == "finished"
    assert "Warning: TensorBoard's table of hyperparameters could not be written: no table" in capsys.readouterr().out


def test_a_writer_of_tensorboard_that_fails_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its exception reaches the main thread, as on a full disk; other threads' are printed as ever."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    with pytest.raises(UserError, match="No space left on device"):
        run(tmp_path / "a", *RUNS["lm"])
    assert "Traceback" not in capsys.readouterr().err
    with runtime.quiet():
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_finished_run_is_not_run_again_unless_forced(
    killed_at: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = run(tmp_path / "a", *RUNS["lm"])
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    killed_at["taken"] = 0
    again = run(tmp_path / "a", *RUNS["lm"], "checkpoint_every=7", "machine=cpu", "threads=2")
    assert again == runs.finite(first) and killed_at["taken"] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == written
    assert run(tmp_path / "a", *RUNS["lm"], "force=true")["metrics"] == first["metrics"]
    assert killed_at["taken"] == 9
    with pytest.raises(runs.ForeignError, match="holds another run"):
        run(tmp_path / "a", *RUNS["lm"], "seed=1")
    assert run(tmp_path / "a", *RUNS["lm"], "seed=1", "force=true")["seed"] == 1


def test_an_averaged_run_whose_result_is_damaged_has_it_again(tmp_path: Path) -> None:
    """Its weights to average are gone by then, and their mean is there."""
    first = run(tmp_path / "a", *RUNS["translation, averaged"])
    (tmp_path / "a" / runs.RESULT).write_text('{"status": "fini')
    with pytest.raises(runs.DamagedError, match="result.json is damaged: .* Restore or remove it"):
        run(tmp_path / "a", *RUNS["translation, averaged"])
    (tmp_path / "a" / runs.RESULT).unlink()
    assert run(tmp_path / "a", *RUNS["translation, averaged"])["metrics"] == first["metrics"]


def test_a_failed_result_is_computed_again(tmp_path: Path) -> None:
    first = run(tmp_path / "a", *RUNS["lm"])
    text = (tmp_path / "a" / "result.json").read_text()
    (tmp_path / "a" / "result.json").write_text(text.replace('"finished"', '"failed"'))
    again = run(tmp_path / "a", *RUNS["lm"])
    assert again["metrics"] == first["metrics"] and runs.read_result(tmp_path / "a")["status"] == "finished"


def test_a_checkpoint_that_is_cut_short_is_said_and_done_without(
    killed_at: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *RUNS["lm"]))
    killed_at["step"], killed_at["taken"] = 8, 0
    with pytest.raises(KilledError):
        run(tmp_path / "a", *RUNS["lm"], "checkpoint_every=1")
    killed_at["step"] = 0
    last, previous = tmp_path / "a" / "last.ckpt", tmp_path / "a" / "previous.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    result = run(tmp_path / "a", *RUNS["lm"])
    said = capsys.readouterr().out
    assert f"{last} is damaged" in said and "resumes from its last checkpoint" in said
    assert essence(tmp_path / "a", result) == expected and not previous.exists()
    (tmp_path / "b" / "previous.ckpt").write_bytes(b"")
    result = run(tmp_path / "b", *RUNS["lm"])
    said = capsys.readouterr().out
    assert said.count("is damaged") == 2 and "resumes from" not in said
    assert essence(tmp_path / "b", result) == expected


def test_no_flipped_bit_of_a_checkpoint_changes_a_resumed_run(killed_at: dict[str, int], tmp_path: Path) -> None:
    """Oracle: the run that was not killed. A zip has a checksum of each part, which `torch.load` does not look at."""
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *RUNS["lm"]))
    killed_at["step"], killed_at["taken"] = 8, 0
    with pytest.raises(KilledError):
        run(tmp_path / "killed", *RUNS["lm"], "checkpoint_every=1")
    killed_at["step"], chance = 0, random.Random(0)
    content = (tmp_path / "killed" / "last.ckpt").read_bytes()
    for trial in range(24):
        folder, damaged = tmp_path / str(trial), bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        shutil.copytree(tmp_path / "killed", folder)
        (folder / "last.ckpt").write_bytes(damaged)
        assert essence(folder, run(folder, *RUNS["lm"])) == expected


@pytest.mark.parametrize("entry", ["loops", "optimizer_states", "state_dict", "hyper_parameters"])
@pytest.mark.parametrize("value", [{}, [], None, 3, "text"], ids=str)
def test_a_strange_checkpoint_is_done_without(
    entry: str, value: Any, killed_at: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    killed_at["step"] = 8
    with pytest.raises(KilledError):
        run(tmp_path, *RUNS["lm"], "checkpoint_every=1")
    killed_at["step"] = 0
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    torch.save({**content, entry: value}, tmp_path / "last.ckpt")
    assert run(tmp_path, *RUNS["lm"])["status"] == "finished"
    if entry != "hyper_parameters":  # the config has them
        assert "last.ckpt is not a checkpoint of this run" in capsys.readouterr().out


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_afterwards(tmp_path: Path) -> None:
    """The limit on the size of a file (RLIMIT_FSIZE) fails a write as a full disk does."""
    options = [*OWN, "width=64", *RUNS["lm"], "checkpoint_every=2", f"hydra.run.dir={tmp_path / 'a'}"]
    command = [sys.executable, "-m", "speechformer.train", *options]

    resource = pytest.importorskip("resource")

    def little() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    failed = subprocess.run(command, capture_output=True, text=True, preexec_fn=little)
    assert failed.returncode == 1
    line = failed.stderr.strip().splitlines()[-1]
    assert (
        line.startswith(f"Error: {tmp_path / 'a'}")
        and ".ckpt: " in line
        and "resumes from the last checkpoint" in line
    )
    assert "Traceback" not in failed.stderr
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert runs.read_result(tmp_path / "a")["status"] == "finished"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody may write")
def test_a_folder_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(UserError, match="/proc/run.*No such file or directory.*Fix that"):
        run(Path("/proc/run"), *RUNS["lm"])


@pytest.mark.parametrize(
    "name",
    ["film.partial", "weights/a", "weights/3.ckpt", "config.yaml", "tokenizer.json", "average.ckpt", "tensorboard/a"],
)
def test_a_folder_that_is_no_runs_folder_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    for force in ("false", "true"):
        with pytest.raises(runs.ForeignError, match=f"holds {name.partition('/')[0]} and no valid run.json"):
            run(tmp_path, *RUNS["lm"], f"force={force}")
    assert (tmp_path / name).read_text() == "precious"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_a_run_removes_no_file_but_its_own(tmp_path: Path) -> None:
    """Run again by force, and resumed; the user's files are in its folder and in all folders that it empties."""
    folder = tmp_path / "a"
    run(folder, *RUNS["translation, averaged"])
    names = [
        "film.partial",
        "weights/a",
        "weights/b.ckpt",
        "checkpoints/b.ckpt",
        "tensorboard/notes",
        "notes.txt",
        "last.ckpt.partial",
    ]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
    run(folder, *RUNS["translation, averaged"], "force=true")
    assert {(folder / name).read_text() for name in names} == {"precious"}


def test_a_run_does_not_write_through_a_link(tmp_path: Path) -> None:
    """Other links in its folder are errors, but Lightning makes this file."""
    for target in ("target", "nowhere"):
        run(tmp_path / "a", *RUNS["lm"], "force=true")
        (tmp_path / "target").write_text("precious")
        (tmp_path / "a" / "tensorboard" / "hparams.yaml").unlink()
        (tmp_path / "a" / "tensorboard" / "hparams.yaml").symlink_to(tmp_path / target)
        assert run(tmp_path / "a", *RUNS["lm"], "force=true")["status"] == "finished"
    assert (tmp_path / "target").read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_figure_that_is_infinite_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The loss stays finite, and its exponential does not."""
    result = run(tmp_path / "a", "task=lm", "recipe.lr=30", "trainer.max_steps=30", "eval_interval=10")
    assert result["status"] == "diverged" and result["best"]["value"] is None and result["steps"] == 30
    assert "at the end" in result["error"] and "DIVERGED" in capsys.readouterr().out


def test_a_run_with_an_invalid_config_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="width must be a multiple of heads"):
        run(tmp_path / "a", "heads=3")
    assert not list(tmp_path.iterdir())


def test_a_run_that_raises_leaves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(LanguageModel, "training_step", broken)
        run(tmp_path / "a", *RUNS["lm"])
    left = runs.read_result(tmp_path / "a")
    assert left["status"] == "failed" and left["error"] == "CUDA out of memory."
    assert "in broken" in left["traceback"]
    assert run(tmp_path / "a", *RUNS["lm"])["status"] == "finished"


def test_two_processes_on_the_cpu_are_one_at_the_same_global_batch(tmp_path: Path) -> None:
    """Oracle: one process. Batches of 9 and 11 do not divide by two, and their parts weigh what they should."""
    options = [*OWN, "dropout=0", "trainer.log_every_n_steps=1", "protocol=clean"]
    for task in (
        ["task=lm", "trainer.max_steps=8", "eval_interval=4", "batch_size=9"],
        ["task=lm", *RUNS["documents"][1:6], "trainer.max_steps=8", "eval_interval=4", "batch_size=9"],
        ["task=classify", "trainer.max_epochs=2", "batch_size=11"],
        ["task=translate", "trainer.max_epochs=2", "task.batch_tokens=1000"],
    ):
        own = [*OWN_PAIRS, *options[len(OWN) :]] if task[0] == "task=translate" else options
        own = options[3:] if "corpus=stories" in task else own
        folder = tmp_path / "".join(task[:2]).replace("=", "-")
        one = execute(compose(*own, *task), folder / "one")
        place = [f"hydra.run.dir={folder / 'two'}", "machine=ddp", "trainer.accelerator=cpu"]
        environment = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
        done = subprocess.run(
            [sys.executable, "-m", "speechformer.train", *own, *task, *place],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        two = runs.read_result(folder / "two")
        assert two["config"]["trainer"]["devices"] == 2 and two["identity"] == one["identity"]
        figures = {name: value for name, value in one["metrics"].items() if value is not None}
        assert {name: two["metrics"][name] for name in figures} == pytest.approx(figures, rel=1e-4)
        assert two["steps"] == one["steps"]
        losses = [
            [float(value) for _, value in essence(folder / name, result)["events"]["training/train_loss"]]
            for name, result in (("one", one), ("two", two))
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert done.stdout.count("Parameters: ") == 1  # one of them speaks


def start_on(machine: int, port: int, overrides: list[str]) -> subprocess.Popen[str]:
    """Start the command of a run on one of two machines, which are both this one."""
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    environment |= {"NODE_RANK": str(machine), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "speechformer.train", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_two_machines_are_one_at_the_same_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one process. Killed, both machines resume the same checkpoint; neither waits if the run has ended."""
    own = [*OWN, "protocol=clean", "dropout=0", "task=lm", "trainer.max_steps=40", "eval_interval=20", "batch_size=9"]
    one = execute(compose(*own), tmp_path / "one")
    place = [f"hydra.run.dir={tmp_path / 'two'}", "machine=ddp", "trainer.accelerator=cpu", "trainer.devices=1"]
    outputs = []
    for attempt in ("killed", "resumed"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = [*own, *place, "trainer.num_nodes=2", "checkpoint_every=2"]
        both, until = [start_on(machine, port, options) for machine in (0, 1)], time.time() + 120
        try:
            while attempt == "killed" and not (tmp_path / "two" / "last.ckpt").exists():
                assert both[0].poll() is None and time.time() < until
                time.sleep(0.005)
            for process in both if attempt == "killed" else ():
                process.kill()
            outputs.append([process.communicate(timeout=120)[0] for process in both])
        finally:
            for process in both:
                process.kill()
        codes = [process.returncode for process in both]
        assert codes == ([-signal.SIGKILL] * 2 if attempt == "killed" else [0, 0]), outputs
    two = runs.read_result(tmp_path / "two")
    figures = {name: value for name, value in one["metrics"].items() if value is not None}
    assert {name: two["metrics"][name] for name in figures} == pytest.approx(figures, rel=1e-4)
    assert two["steps"] == one["steps"] == 40 and two["attempts"] == 2 and two["identity"] == one["identity"]
    assert [text.count("it resumes from its last checkpoint") for text in outputs[1]] == [1, 0]  # the first speaks
    for name, value in (("NODE_RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert execute(compose(*own, *place[1:], "trainer.num_nodes=2"), tmp_path / "two") == two


def test_a_run_on_several_machines_needs_to_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = ["task=lm", "machine=ddp", "trainer.num_nodes=2"]
    with pytest.raises(UserError, match="needs NODE_RANK and MASTER_ADDR and MASTER_PORT in the environment"):
        run(tmp_path / "a", *several)
    for name, value in (("NODE_RANK", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="NODE_RANK=2 must be a whole number from 0, below trainer.num_nodes=2"):
        run(tmp_path / "a", *several)
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(UserError, match="remove the run's folder"):
        run(tmp_path / "a", *several, "force=true")
    assert not list(tmp_path.iterdir())
    assert run(tmp_path / "a", *RUNS["lm"])["status"] == "finished"  # a run on one machine ignores them
    assert runs.read_result(tmp_path / "a")["status"] == "finished"


def test_tensorboards_table_shows_what_a_command_line_sets() -> None:
    overrides = [
        "model=alibi",
        "model.scale=2",
        "recipe=cosine",
        "+trainer.benchmark=true",
        "seed=3",
        "corpus=sample",
    ]
    config = as_plain(compose(*overrides))
    assert hyperparameters(config, overrides) == {
        "model": "alibi",
        "pattern": "full",
        "seed": 3,
        "model.scale": 2,
        "recipe": "cosine",
        "trainer.benchmark": True,
    }


@pytest.mark.parametrize(
    ("precision", "device", "capabilities", "warns"),
    [
        ("bf16-mixed", "cpu", {"amx_bf16": False}, True),
        ("bf16-true", "cpu", {"amx_bf16": False}, True),
        ("bf16-mixed", "cpu", {"amx_bf16": True}, False),
        ("bf16-mixed", "cpu", {}, False),  # not known, as on ARM
        ("bf16-mixed", "cuda", {"amx_bf16": False}, False),
        ("32-true", "cpu", {"amx_bf16": False}, False),
    ],
)
def test_a_precision_that_slows_the_run_is_named(
    precision: str, device: str, capabilities: dict, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Oracle: the table; a CPU that is known to have no AMX may multiply bfloat16 slower than float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    warn_of_slow_precision(precision, torch.device(device))
    assert ("Compare with trainer.precision=32-true" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("together", [False, True])
def test_a_run_warns_of_its_precision(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Oracle: one sentence for a run, and one for all runs of an ensemble."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False}, raising=False)
    overrides = (*OWN, *RUNS["lm"], "trainer.precision=bf16-mixed", "trainer.accelerator=cpu", "trainer.max_steps=3")
    if together:
        execute_ensemble([(compose(*overrides, f"seed={k}"), tmp_path / str(k), ()) for k in (0, 1)])
    else:
        execute(compose(*overrides), tmp_path)
    assert capsys.readouterr().err.count("Compare with trainer.precision=32-true") == 1
