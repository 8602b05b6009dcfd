"""A command killed at the points where it opens, writes, syncs, renames or removes a file, and started again.

Oracle: the command that was not killed, to the bit, with the same files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conftest import TINY, compose
from kills import count_points, killed_at
from test_fit import PAIRS, essence

from speechformer import train
from speechformer.report.page import report
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.training.run import execute

RUNS = {
    "lm": ["task=lm", "trainer.max_steps=4", "eval_interval=2", "checkpoint_every=2"],
    "classify": ["trainer.max_epochs=2", "trainer.limit_train_batches=2", "checkpoint_every=2", "protocol=clean"],
    "translate": [
        *("task=translate", "task.beam=1", "task.batch_tokens=60", "task.average_checkpoints=2"),
        *("trainer.max_epochs=-1", "trainer.max_steps=2", "eval_interval=1", "checkpoint_every=2"),
    ],
}
EVERY = {"lm": 1, "classify": 3, "translate": 6}  # a run is killed at every point, every third, every sixth


def names(folder: Path) -> set[str]:
    """The files of a folder; TensorBoard names its own by the time."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return {path for path in paths if "tfevents" not in path}


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_a_run_killed_at_any_point_ends_as_one_that_was_not(
    task: str, little: Path, little_pairs: Path, tmp_path: Path
) -> None:
    if task == "translate":
        pairs = tmp_path / "pairs"
        pairs.mkdir()
        for path in little_pairs.iterdir():  # a model that has learned nothing translates at great length
            lines = path.with_suffix(".en").read_bytes().splitlines()
            short = sorted(range(len(lines)), key=lambda k: len(lines[k]))[:4]
            (pairs / path.name).write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[k] for k in short))
        own = ["corpus=ted", f"corpus.root={pairs}", *PAIRS]
    else:
        own = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]"]
    cfg = compose(*own, *TINY[1:], "threads=1", "trainer.log_every_n_steps=2", *RUNS[task])
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    expected = essence(whole, execute(cfg, whole))
    points = count_points(lambda: execute(cfg, folder), folder)
    assert points > 40
    for point in range(1, points + 1, EVERY[task]):
        shutil.rmtree(folder, ignore_errors=True)
        killed_at(lambda: execute(cfg, folder), folder, point)
        has_result = (folder / runs.RESULT).exists()
        left = essence(folder, execute(cfg, folder))
        if has_result:  # then TensorBoard's table of final metrics, which decorates it, may not be there
            left["events"] |= {
                tag: values for tag, values in expected["events"].items() if tag.startswith("metrics_final/")
            }
        assert left == expected, f"killed at point {point} of {points}"
        assert names(folder) == names(whole), f"killed at point {point} of {points}"
        assert runs.state(folder).status == "finished"


@pytest.mark.slow
def test_a_sweep_killed_at_any_point_of_its_own_ends_as_one_that_was_not(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its report, and without the points inside its runs, which the tests above and below see to."""
    own = [
        "corpus=speeches",
        f"corpus.root={little}",
        "corpus.classes=[a,b,c]",
        *TINY[1:],
        "threads=1",
        "task=lm",
        "trainer.max_steps=1",
    ]
    folder = tmp_path / "sweep"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "-m", *own, "seed=0,1", "hydra.sweep.dir=sweep"])
    monkeypatch.setattr("speechformer.report.page.report", lambda *_, **__: [])
    points = count_points(train.main, folder, without="sweep/lm_")
    expected = names(folder)
    assert points > 5
    for point in range(1, points + 1, 3):
        shutil.rmtree(folder)
        killed_at(train.main, folder, point, without="sweep/lm_")
        count_points(train.main, folder)
        assert [job.state.status for job in sweeps.jobs_of(folder)] == ["finished"] * 2, f"killed at point {point}"
        assert names(folder) == expected, f"killed at point {point} of {points}"


@pytest.mark.slow
def test_a_report_killed_at_any_point_is_written_again(a_language_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"

    def work() -> None:
        report([a_language_model], folder, draw=False)

    points = count_points(work, folder)
    expected = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert points > 20
    for point in range(1, points + 1):
        shutil.rmtree(folder)
        killed_at(work, folder, point)
        report([a_language_model], folder, draw=False)
        left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert left == expected, f"killed at point {point} of {points}"
