"""What the console says while a sweep runs, and the names of runs."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import compose

from speechformer import console
from speechformer.config import as_plain
from speechformer.runs import folder as runs
from speechformer.runs import naming
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import progress


def finished(value: float, metric: str = "validation_accuracy", higher: bool = True) -> Any:
    result = {"status": "finished", "metrics": {metric: value, "test_accuracy": 1.0}, "seconds": 60}
    result |= {"best": {"metric": metric, "value": 2 * value, "step": 9, "chosen_on": "validation"}}
    return runs.State("finished", result | {"report": {"higher_is_better": higher}}, {})


def running(seconds: float, **done: int) -> Any:
    return runs.State("running", None, {"since": time.time() - seconds, **done})


def jobs(*states: Any) -> list[sweeps.Job]:
    return [sweeps.Job(f"seed={k}", (f"seed={k}",), Path(f"run{k}"), state) for k, state in enumerate(states)]


LEFT = runs.State("left", None, {})


def test_the_time_left() -> None:
    """Oracle: by hand. Two runs at once of 60 s: 0.75 and 0.5 of a run, and one that waits, are 67.5 s."""
    quarter = running(15, step=30, steps=120)
    two = [finished(0.5), quarter, running(9), LEFT]
    assert progress.seconds_left(jobs(*two)) == pytest.approx(60 * 2.25 / 2, abs=1)
    assert progress.seconds_left(jobs(finished(0.5), LEFT, LEFT), at_once=1) == 120
    for unknown in ([quarter, LEFT], [finished(0.5), LEFT]):
        assert progress.seconds_left(jobs(*unknown)) is None


def test_a_line_says_it_all() -> None:
    failed = runs.State("failed", {"error": "no GPU"}, {})
    assert progress.describe(jobs(finished(0.5), failed, LEFT), at_once=1) == (
        "3 runs: 1 finished, 1 failed, 1 left; 0:01:00 left"
    )
    said = ["Finished in 60 s: seed=0: validation accuracy 50.0 %", "Failed: seed=1: no GPU"]
    assert [progress.outcome(job) for job in jobs(finished(0.5), failed)] == said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_is_replaced_in_a_terminal_and_logged_through_a_pipe(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    planned = {tmp_path / name: (f"seed={name}",) for name in ("a", "b")}
    sweeps.add_jobs(tmp_path, planned)
    for run in planned:
        run.mkdir()
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(progress, "PIPE_SECONDS", 0.02)
    stderr, out = Terminal() if terminal else io.StringIO(), ""
    monkeypatch.setattr("sys.stderr", stderr)

    def wait_for(line: str) -> None:
        nonlocal out
        deadline = time.monotonic() + 60
        while not any(
            text.startswith(line) for text in (stderr.getvalue() + out).replace("\r\x1b[K", "\n").split("\n")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
            out += capsys.readouterr().out

    with progress.shown(tmp_path, planned.keys(), {}):
        wait_for("2 runs: 2 left")
        runs.write_result(tmp_path / "a", finished(0.25).result)
        wait_for("2 runs: 1 finished, 1 left")
        runs.write_result(tmp_path / "b", finished(0.5).result)
    console.say("after")
    out += capsys.readouterr().out
    for line in ("Finished in 60 s: seed=a: validation accuracy 25.0 %", "Finished in 60 s: seed=b: "):
        assert out.count(line) == 1
    assert out.endswith("after\n") and "\x1b" not in out
    assert stderr.getvalue().endswith("\r\x1b[K") if terminal else stderr.getvalue() == ""


def test_a_run_is_named_by_its_choices_its_seed_and_a_hash_of_what_decides_it() -> None:
    """The corpus is not read for it."""

    def name(*overrides: str) -> str:
        return naming.run_name(as_plain(compose("corpus=speeches", "corpus.root=nowhere", *overrides)))

    assert re.fullmatch("classify_sinusoidal_full_seed0_[0-9a-f]{8}", name())
    words = ["task=probe", "probe=copy", "model=rope", "pattern=window", "study=my study", "seed=3"]
    probe = naming.run_name(as_plain(compose(*words)))
    assert re.fullmatch("probe_copy_rope_window_my-study_seed3_[0-9a-f]{8}", probe)
    assert name() == name("dropout=0.1", "threads=2", "machine=cpu", "force=true")
    others = ["dropout=0.2", "recipe.lr=1", "corpus.root=elsewhere", "width=32"]
    assert len({name(), *map(name, others)}) == 5
