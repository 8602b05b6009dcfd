"""A run that is killed and started again, at any step, is to the last bit the run that was never stopped; and what
its folder may hold by then."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, run_command
from conftest import TINY, compose, without_biases_of_keys
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.report.load import Run
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.probe import ProbeTask
from speechformer.tasks.registry import load_task
from speechformer.tasks.translate import Translate
from speechformer.training import devices, runtime
from speechformer.training.results import hyperparameters
from speechformer.training.run import execute

LM = ["task=lm", "trainer.max_steps=9", "eval_interval=3", "recipe=cosine", "recipe.warmup_steps=2"]
CLEAN = ["task=lm", "trainer.max_steps=7", "eval_interval=3", "protocol=clean"]
# Every kind of schedule, of evaluation (by epoch, by steps), of accumulation, with rates and dropout that matter
RUNS = {
    "lm": LM,
    "accumulation": [
        *("trainer.max_epochs=3", "trainer.limit_train_batches=5", "eval_interval=2"),
        *("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1.0"),
    ],
    "translation, averaged": [
        *("task=translate", "task.batch_tokens=3000", "task.average_checkpoints=2", "trainer.max_epochs=3"),
        *("recipe.warmup_steps=3", "recipe.lr=1e-2"),
    ],
}
SLOW_RUNS = {
    "epochs, scheduled": [
        *("trainer.max_epochs=3", "trainer.limit_train_batches=4", "recipe.schedule=linear"),
        "recipe.warmup_steps=1",
    ],
    "steps and epochs": [*LM, "trainer.max_epochs=2"],
    "probe": [
        *("task=probe", "probe.max_length=4", "probe.test_lengths=[6]", "task.test_rows=20", "batch_size=4"),
        *("trainer.max_steps=8", "trainer.limit_train_batches=4", "eval_interval=3", "recipe.warmup_steps=2"),
    ],
    "documents": [
        *("task=lm", "corpus=stories", "corpus.documents=30", "corpus.words=40", "task.tokens=bytes"),
        *("task.documents=separate", "trainer.max_steps=7", "eval_interval=3", "model=rope"),
    ],
    "counts and muon": [
        *(*CLEAN, "recipe=muon", "embedding_dropout=0.3", "architecture.output_bias=unigram"),
        *("task.unknown_rate=0.5", "task.ngram_targets=0.5", "task.ngram_mixture=context"),
    ],
    "unknown words": [
        *("trainer.max_epochs=3", "eval_interval=3", "trainer.limit_train_batches=3"),
        *("protocol=clean", "task.unknown_rate=0.5"),
    ],
    "translation by an RNN": [
        *("task=translate", "model=rnn_attention", "task.batch_tokens=null", "batch_size=40"),
        *("trainer.max_steps=7", "eval_interval=3", "recipe.warmup_steps=3"),
    ],
}
PAIRS = ["task.vocab_size=40", "task.beam=2"]
OWN: list[str] = []  # the corpus and size of a run of a tenth of a second
OWN_PAIRS: list[str] = []


class KilledError(BaseException):
    """Stands for `kill -9`: nothing of the run's code handles it."""


@pytest.fixture(scope="module", autouse=True)
def small_corpus(little: Path, little_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # TensorBoard sorts files of one second by this number, as text: 9 after 10
        patch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100_000))
        OWN[:] = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", *TINY[1:], "threads=1"]
        OWN_PAIRS[:] = ["corpus=ted", f"corpus.root={little_pairs}", *PAIRS, *TINY[1:], "threads=1"]
        yield


def options(*overrides: str) -> list[str]:
    generated = {"task=probe", "corpus=stories"} & {*overrides}
    own = OWN_PAIRS if "task=translate" in overrides else OWN[3:] if generated else OWN
    return [*own, "trainer.log_every_n_steps=2", *overrides]


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    return execute(compose(*options(*overrides)), folder)


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
        # a run that resumes after its last step logs its evaluation again
        "events": {tag: {(e.step, str(e.value)) for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]},
        "texts": {
            tag: {(e.step, str(e)[-200:]) for e in events.Tensors(tag)}
            for tag in events.Tags()["tensors"]
            if tag.startswith("translations/")
        },
    }


@pytest.fixture(scope="module")
def whole(small_corpus: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The essence of the language model's run that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    return essence(folder, run(folder, *LM))


@pytest.fixture(scope="module")
def left(small_corpus: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the language model's run leaves if it is killed in its eighth step."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        kill_in_step(patch, 8)
        with pytest.raises(KilledError):
            run(folder, *LM, "checkpoint_every=1")
    return folder


@pytest.fixture
def interrupted(left: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(left, tmp_path / "interrupted")


def kill_in_step(patch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let runs be killed in a training step, counted from 1 in each process; 0 for never. Return the steps taken."""
    taken = [0]
    for task in (Classify, LanguageModel, ProbeTask, Translate):
        step = task.training_loss

        def counted(self: Task, batch: Any, step: Any = step) -> torch.Tensor:
            taken[0] += 1
            if taken[0] == number:
                raise KilledError
            return step(self, batch)

        patch.setattr(task, "training_loss", counted)
    return taken


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_a_run_killed_again_and_again_goes_on_to_the_same_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the run that was not killed. Kills come before the first checkpoint, late, and soon after resuming."""
    words, folder = {**RUNS, **SLOW_RUNS}[name], tmp_path / "killed"
    taken = kill_in_step(monkeypatch, 0)
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *words))
    steps = taken[0]
    assert steps >= 6
    if "averaged" in name:
        assert len(expected["texts"]) >= 5 and not (tmp_path / "whole" / "weights").exists()
        assert any(key.startswith("average") for key in expected["weights"])
    for number in (1, steps - 2, 2):
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            kill_in_step(patch, number)
            run(folder, *words, "checkpoint_every=2")
        assert runs.state(folder).status == "interrupted"
    capsys.readouterr()
    result = run(folder, *words, "checkpoint_every=2")
    assert essence(folder, result) == expected and result["attempts"] == 4
    assert "resumes from its last checkpoint" in capsys.readouterr().out


def test_checkpoints_that_are_kept(whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracles: the run that keeps none; the run whose learning rate is 0, for step 0; the run that was not killed."""
    kept, still, killed = (tmp_path / part for part in ("kept", "still", "killed"))
    words = [*LM, "keep_every_n_steps=2"]
    assert essence(kept, run(kept, *words)) == whole
    steps = states(kept)
    assert list(steps) == [0, 2, 4, 6, 8]
    assert not any("optimizer" in key for key in torch.load(kept / "checkpoints" / "2.ckpt", weights_only=True))
    run(still, *words, "recipe.lr=0", "recipe.weight_decay=0")
    assert states(still)[0] == states(still)[8] == steps[0] != steps[2]
    run(tmp_path / "seed", *words, "seed=1")
    assert states(tmp_path / "seed")[0] != steps[0]
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_in_step(patch, 5)
        run(killed, *words, "checkpoint_every=3")
    (killed / "checkpoints" / "2.ckpt.0123abcd.partial").write_bytes(b"half a checkpoint")
    assert essence(killed, run(killed, *words)) == whole and states(killed) == steps
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


def test_a_run_without_checkpoints_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path, *LM)
    run(tmp_path, *LM, "keep_every_n_steps=4")
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} has no checkpoints of 3 steps from 0 to 8: it trained there without")
    run(tmp_path, *LM, "keep_every_n_steps=2", "force=true")
    run(tmp_path, *LM, "keep_every_n_steps=4")
    assert capsys.readouterr().err == ""
    run(tmp_path, *LM, "keep_every_n_steps=3")
    assert "has no checkpoints of 2 steps from 3 to 9: it trained there" in capsys.readouterr().err
    run(tmp_path, *LM, "force=true")
    assert not (tmp_path / "checkpoints").exists()


WILD = [
    *("recipe.optimizer=sgd", "recipe.lr=1000", "architecture.norm=post", "architecture.final_norm=false"),
    *("eval_interval=400", "recipe.schedule=constant", "recipe.warmup_steps=0", "trainer.max_steps=500"),
]


@pytest.mark.parametrize("words", [CLEAN, [*LM, *WILD]], ids=["finished", "diverged"])
def test_a_run_killed_between_its_last_step_and_its_result(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = essence(tmp_path / "whole", run(tmp_path / "whole", *words))
    assert (expected["status"] == "diverged") == ("recipe.lr=1000" in words)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(identity, "commit", lambda: (_ for _ in ()).throw(KilledError()))
        run(tmp_path / "killed", *words)
    assert essence(tmp_path / "killed", run(tmp_path / "killed", *words)) == expected


def test_a_best_checkpoint_that_is_of_another_evaluation_is_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(identity, "commit", lambda: (_ for _ in ()).throw(KilledError()))
        run(tmp_path, *CLEAN)
    best = torch.load(tmp_path / "best.ckpt", weights_only=True)
    torch.save(best | {"global_step": best["global_step"] + 1}, tmp_path / "best.ckpt")
    with pytest.raises(UserError, match=r"best.ckpt is of step \d+, but the best is \d+. Run again .* force=true"):
        run(tmp_path, *CLEAN)


def test_a_best_evaluation_is_kept_with_the_state_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may not find it again, since it adds up in another order."""
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_in_step(patch, 6)
        run(tmp_path, *LM, "checkpoint_every=100")
    steps = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["global_step"] for name in ("best", "last")]
    assert 0 < steps[0] == steps[1] < 6


def test_overfitting_repeats_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], LanguageModel.training_loss

    def noted(self: LanguageModel, batch: Any) -> torch.Tensor:
        seen.append(batch["ids"].tolist())
        return step(self, batch)

    monkeypatch.setattr(LanguageModel, "training_loss", noted)
    run(tmp_path, *LM, "+trainer.overfit_batches=2", "trainer.max_steps=6", "eval_interval=2")
    assert seen == 3 * seen[:2] and seen[0] != seen[1]


def test_a_run_takes_all_threads_or_its_share_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, words = torch.get_num_threads(), [*OWN[:-1], "task=lm", "trainer.max_steps=2", "eval_interval=1"]
    monkeypatch.setattr(devices, "all_threads", lambda: 3)

    def threads(name: str, *overrides: str, share: int | None = None) -> int:
        monkeypatch.setattr(devices, "share_of_threads", lambda: share)
        result = execute(compose(*words, *overrides), tmp_path / name, [*words, *overrides])
        assert Run(tmp_path / name, result).command.endswith(f" threads={result['machine']['threads']}")
        assert torch.get_num_threads() == before
        return result["machine"]["threads"]

    assert threads("all") == 3 and threads("share", share=2) == 2 and threads("fixed", "threads=2") == 2
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_in_step(patch, 2)
        threads("killed", "threads=2")
    assert threads("killed") == 2


def test_a_compiled_run_is_the_same_run(traced: list[str], tmp_path: Path) -> None:
    """Its folder is that of the run, and its checkpoint no other."""
    plain = run(tmp_path / "a", *LM, "dropout=0")
    ours = run(tmp_path / "b", *LM, "dropout=0", "compile=reduce-overhead")
    assert traced == ["reduce-overhead"] * plain["config"]["layers"]
    assert ours["identity"] == plain["identity"]
    figures = [{name: value for name, value in of["metrics"].items() if value is not None} for of in (ours, plain)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    weights = [torch.load(tmp_path / place / "last.ckpt", weights_only=True)["state_dict"] for place in "ab"]
    torch.testing.assert_close(*map(without_biases_of_keys, weights), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer_states/0/state/0/step", {"a": 1}),
        ("progress/curve/0/test_perplexity_mean", torch.tensor(1.0)),
    ],
)
def test_a_checkpoint_of_strange_content_is_named(path: str, value: Any, interrupted: Path) -> None:
    """Words of the path are keys, and in a list numbers."""
    content = part = torch.load(interrupted / "last.ckpt", weights_only=True)
    *outer, last = (int(word) if word.isdecimal() else word for word in path.split("/"))
    for key in outer:
        part = part[key]
    part[last] = value
    torch.save(content, interrupted / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt is not as speechformer writes it .*\. Remove it to resume"):
        run(interrupted, *LM)


@pytest.mark.parametrize(("entry", "value"), [("loops", {}), ("state_dict", "text")])
def test_a_checkpoint_of_something_else_is_done_without(
    entry: str, value: Any, whole: dict[str, Any], interrupted: Path, capsys: pytest.CaptureFixture
) -> None:
    content = torch.load(interrupted / "last.ckpt", weights_only=True)
    torch.save({**content, entry: value}, interrupted / "last.ckpt")
    assert essence(interrupted, run(interrupted, *LM)) == whole
    assert "last.ckpt is not a checkpoint of this run" in capsys.readouterr().out


ANOTHER = ["seed=1", "recipe.lr=1e-2"]  # of the same shapes
AVERAGED = [*RUNS["translation, averaged"], "trainer.limit_train_batches=2", "trainer.max_epochs=2"]


@pytest.mark.parametrize("names", [["last"], ["previous"], ["last", "previous"]], ids=str)
def test_a_run_does_not_resume_from_a_checkpoint_of_another(
    names: list[str], whole: dict[str, Any], interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the run that was not killed."""
    other = run(tmp_path / "other", *LM, *ANOTHER)
    if names == ["previous"]:
        (interrupted / "last.ckpt").write_bytes(b"")
    for name in names:
        (interrupted / f"{name}.ckpt").unlink()  # the other may be the same file
        shutil.copy(tmp_path / "other" / "last.ckpt", interrupted / f"{name}.ckpt")
    result = run(interrupted, *LM)
    both = f"is a checkpoint of run {other['identity']}, and {interrupted} holds run {result['identity']}"
    said = capsys.readouterr().out
    assert [f"{name}.ckpt {both}" in said for name in names] == [True] * len(names)
    assert essence(interrupted, result) == whole


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (CLEAN, "best.ckpt"),
        pytest.param(AVERAGED, "average.ckpt", marks=pytest.mark.slow),
        pytest.param(AVERAGED, "weights/*.ckpt", marks=pytest.mark.slow),
    ],
)
def test_weights_of_another_run_are_not_tested(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed between its last step and its result."""
    for place, more in (("one", []), ("two", ANOTHER)):
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(identity, "commit", lambda: (_ for _ in ()).throw(KilledError()))
            run(tmp_path / place, *words, *more)
    for path in (tmp_path / "one").glob(name):
        shutil.copy(tmp_path / "two" / path.relative_to(tmp_path / "one"), path)
    if name == "average.ckpt":
        shutil.rmtree(tmp_path / "one" / "weights")
    ids = [runs.owner_of(tmp_path / place)["identity"] for place in ("two", "one")]
    message = rf"ckpt is a checkpoint of run {ids[0]}, and .* holds run {ids[1]}: .* Run again .* force=true"
    with pytest.raises(UserError, match=message):
        run(tmp_path / "one", *words)


def test_checkpoints_of_older_versions_name_no_run(whole: dict[str, Any], interrupted: Path, capsys: Any) -> None:
    """Oracle: the run that nothing stopped."""
    for path in interrupted.rglob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        assert content.pop("identities") == [runs.owner_of(interrupted)["identity"]]
        torch.save(content, path)
    assert essence(interrupted, run(interrupted, *LM)) == whole
    assert "resumes from its last checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("both", [False, True])
def test_a_checkpoint_that_is_cut_short_is_said_and_done_without(
    both: bool, whole: dict[str, Any], interrupted: Path, capsys: pytest.CaptureFixture
) -> None:
    last, previous = interrupted / "last.ckpt", interrupted / "previous.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    if both:
        previous.write_bytes(b"")
    result = run(interrupted, *LM)
    said = capsys.readouterr().out
    assert f"{last} is damaged" in said and ("resumes from its last checkpoint" in said) == (not both)
    assert essence(interrupted, result) == whole and not previous.exists()


def test_what_decorates_a_result_cannot_lose_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Neither a name that looks like an interpolation, nor a TensorBoard that fails after training."""

    def fails(*_: Any, **__: Any) -> None:
        assert runs.read_result(tmp_path)["status"] == "finished"  # it is written already
        raise RuntimeError("no table")

    monkeypatch.setattr(TensorBoardLogger, "log_hyperparams", fails)
    result = execute(compose(*OWN, *LM, r"study='\${x}'"), tmp_path, [r"study='\${x}'"])
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
        run(tmp_path, *LM)
    assert "Traceback" not in capsys.readouterr().err
    with runtime.quiet():
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_finished_run_is_not_run_again_unless_forced(
    whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = kill_in_step(monkeypatch, 0)
    first = run(tmp_path, *LM)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = run(tmp_path, *LM, "checkpoint_every=7", "machine=cpu", "threads=2")
    assert again == runs.finite(first) and taken == [9]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    assert essence(tmp_path, run(tmp_path, *LM, "force=true")) == whole
    assert taken == [18]
    with pytest.raises(runs.ForeignError, match="holds another run"):
        run(tmp_path, *LM, "seed=1")
    assert run(tmp_path, *LM, "seed=1", "force=true")["seed"] == 1


def test_a_result_that_is_lost_or_failed_is_made_again(tmp_path: Path) -> None:
    """The weights to average are gone by then, and their mean is there."""
    words = RUNS["translation, averaged"]
    first = run(tmp_path, *words)
    (tmp_path / runs.RESULT).unlink()
    assert run(tmp_path, *words)["metrics"] == first["metrics"]
    text = (tmp_path / runs.RESULT).read_text()
    (tmp_path / runs.RESULT).write_text(text.replace('"finished"', '"failed"'))
    assert run(tmp_path, *words)["metrics"] == first["metrics"]
    assert runs.read_result(tmp_path)["status"] == "finished"


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_afterwards(
    tmp_path: Path,
) -> None:
    """The limit on the size of a file (RLIMIT_FSIZE) fails a write as a full disk does."""
    resource = pytest.importorskip("resource")
    words = ["width=64", *LM, "checkpoint_every=2"]
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path}.*\.ckpt: .*resumes from the last checkpoint"):
            run(tmp_path, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert run(tmp_path, *words)["status"] == "finished"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody may write")
def test_a_folder_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(UserError, match="/proc/run.*No such file or directory.*Fix that"):
        run(Path("/proc/run"), *LM)


@pytest.mark.parametrize("name", ["film.partial", "weights/3.ckpt", "config.yaml", "tensorboard/a"])
def test_a_folder_that_is_no_runs_folder_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    for force in ("false", "true"):
        with pytest.raises(runs.ForeignError, match=f"holds {name.partition('/')[0]} and no valid run.json"):
            run(tmp_path, *LM, f"force={force}")
    assert (tmp_path / name).read_text() == "precious"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_a_run_removes_no_file_but_its_own(tmp_path: Path) -> None:
    """Run again by force; the user's files are in its folder and in all folders that it empties."""
    run(tmp_path, *LM)
    names = ["film.partial", "weights/b.ckpt", "checkpoints/b.ckpt", "tensorboard/notes", "last.ckpt.partial"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    run(tmp_path, *LM, "force=true")
    assert {(tmp_path / name).read_text() for name in names} == {"precious"}


def test_a_run_does_not_write_through_a_link(tmp_path: Path) -> None:
    """Other links in its folder are errors, but Lightning makes this file."""
    parameters = tmp_path / "a" / "tensorboard" / "hparams.yaml"
    run(tmp_path / "a", *LM)
    (tmp_path / "target").write_text("precious")
    parameters.unlink()
    parameters.symlink_to(tmp_path / "target")
    assert run(tmp_path / "a", *LM, "force=true")["status"] == "finished"
    assert (tmp_path / "target").read_text() == "precious"


def test_a_figure_that_is_infinite_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The loss stays finite, and its exponential does not."""
    result = run(tmp_path, "task=lm", "recipe.lr=30", "trainer.max_steps=30", "eval_interval=10")
    assert result["status"] == "diverged" and result["best"]["value"] is None and result["steps"] == 30
    assert "at the end" in result["error"] and "DIVERGED" in capsys.readouterr().out


def test_a_run_that_raises_leaves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(LanguageModel, "training_loss", broken)
        run(tmp_path, *LM)
    result = runs.read_result(tmp_path)
    assert result["status"] == "failed" and result["error"] == "CUDA out of memory."
    assert "in broken" in result["traceback"]
    assert run(tmp_path, *LM)["status"] == "finished"


CLASSIFIER = ["task=classify", "trainer.max_epochs=2", "batch_size=11", "trainer.gradient_clip_val=0.5"]
DOCUMENTS = [*SLOW_RUNS["documents"], "batch_size=9"]
TRANSLATOR = ["task=translate", "trainer.max_epochs=2", "task.batch_tokens=1000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "machine"),
    [(CLASSIFIER, "ddp"), (CLASSIFIER, "fsdp"), (DOCUMENTS, "ddp"), (DOCUMENTS, "fsdp"), (TRANSLATOR, "ddp")],
)
def test_two_processes_on_the_cpu_are_one_at_the_same_global_batch(
    words: list[str], machine: str, tmp_path: Path
) -> None:
    """Oracle: one process. Batches of 9 and 11 do not divide by two, and their parts weigh what they should."""
    words = options(*words, "dropout=0", "trainer.log_every_n_steps=1", "protocol=clean")
    place = [f"hydra.run.dir={tmp_path / 'two'}", f"machine={machine}", "trainer.accelerator=cpu"]
    done = run_command("speechformer.train", *words, *place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Parameters: ") == 1  # one of them speaks
    assert runs.read_result(tmp_path / "two")["config"]["trainer"]["devices"] == 2
    compare_with_one_process(words, tmp_path)


def compare_with_one_process(words: list[str], folder: Path) -> None:
    """Require that the run in the folder `two` is that of one process, up to rounding."""
    one, two = execute(compose(*words), folder / "one"), runs.read_result(folder / "two")
    assert two["steps"] == one["steps"] and two["identity"] == one["identity"]
    figures = {name: value for name, value in one["metrics"].items() if value is not None}
    assert {name: two["metrics"][name] for name in figures} == pytest.approx(figures, rel=1e-4)
    losses = [
        [float(value) for _, value in sorted(essence(folder / name, result)["events"]["training/train_loss"])]
        for name, result in (("one", one), ("two", two))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    checkpoints = [torch.load(folder / name / "last.ckpt", weights_only=True) for name in ("one", "two")]
    shapes = [
        {
            number: {name: tensor.shape for name, tensor in parameter.items()}
            for number, parameter in checkpoint["optimizer_states"][0]["state"].items()
        }
        for checkpoint in checkpoints
    ]
    assert shapes[1] == shapes[0]  # whole, so that it resumes on any devices
    load_task(folder / "two" / "best.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["ddp", "fsdp"])
def test_two_machines_are_one_at_the_same_global_batch(machine: str, tmp_path: Path) -> None:
    """Oracle: one process. Killed, both machines resume the same checkpoint; neither waits if the run has ended.

    Batches of 9 do not divide by two.
    """
    words = options(
        "protocol=clean", "dropout=0", "task=lm", "trainer.max_steps=40", "eval_interval=20", "batch_size=9"
    )
    place = [
        f"hydra.run.dir={tmp_path / 'two'}",
        f"machine={machine}",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
    ]
    for attempt in ("killed", "resumed", "ended"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        both = [
            Command(
                *("speechformer.train", *words, *place, "trainer.num_nodes=2", "checkpoint_every=2"),
                environment={**variables, "NODE_RANK": str(rank)},
            )
            for rank in range(2 if attempt != "ended" else 1)
        ]
        while attempt == "killed" and not (tmp_path / "two" / "last.ckpt").exists():
            assert both[0].poll() is None, both[0].output()
            time.sleep(0.005)
        for command in both if attempt == "killed" else ():
            command.send(signal.SIGKILL)
        done = [command.wait() for command in both]
        assert {end.returncode for end in done} == {-signal.SIGKILL if attempt == "killed" else 0}, done
        if attempt == "resumed":  # the first speaks
            assert [end.stdout.count("it resumes from its last checkpoint") for end in done] == [1, 0]
    assert runs.read_result(tmp_path / "two")["attempts"] == 2
    compare_with_one_process(words, tmp_path)


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
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "2",
        "SLURM_STEP_NODELIST": "gpu[7-8]",
        "SLURM_JOB_ID": "51234",
    }
    for name, value in {**step, "NODE_RANK": "", "MASTER_ADDR": "", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="NODE_RANK=2 must be"):  # as `srun` has it
        run(tmp_path / "a", *several)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu7", "7")
    assert run(tmp_path / "a", *LM)["status"] == "finished"  # a run on one machine ignores them


def test_tensorboards_table_shows_what_a_command_line_sets() -> None:
    overrides = [
        "model=alibi",
        "model.scale=2",
        "recipe=cosine",
        "+trainer.benchmark=true",
        "seed=3",
        "corpus=sample",
    ]
    shown = {"model": "alibi", "pattern": "full", "seed": 3, "model.scale": 2, "recipe": "cosine"}
    expected = {**shown, "trainer.benchmark": True}
    assert hyperparameters(as_plain(compose(*overrides)), overrides) == expected


@pytest.mark.parametrize(
    ("precision", "capabilities", "warns"),
    [
        ("bf16-mixed", {"amx_bf16": False}, True),
        ("bf16-mixed", {"amx_bf16": True}, False),
        ("bf16-mixed", {}, False),  # not known, as on ARM
        ("32-true", {"amx_bf16": False}, False),
    ],
)
def test_a_precision_that_slows_the_run_is_named(
    precision: str, capabilities: dict, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A CPU that is known to have no AMX may multiply bfloat16 slower than float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    run(tmp_path, "task=lm", f"trainer.precision={precision}", "trainer.max_steps=3")
    assert capsys.readouterr().err.count("Compare with trainer.precision=32-true") == warns
