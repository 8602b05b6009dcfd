"""What the console says while a sweep runs, and the names of runs."""

from __future__ import annotations

import io
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
    return [sweeps.Job(k, f"seed={k}", [], None, state) for k, state in enumerate(states)]


def best(*states: Any) -> int | None:
    """Return the number of the best job."""
    job = progress.best_job(jobs(*states))
    return None if job is None else job.number


LEFT = runs.State("left", None, {})


def test_the_score_is_the_metric_that_chose_the_checkpoint_as_measured_at_the_end() -> None:
    assert progress.describe_score(finished(0.613).result) == "validation accuracy 61.3 %"
    assert progress.describe_score({}) == ""


def test_the_best_run_is_that_of_the_best_score() -> None:
    """Oracle: by hand; perplexity is better if lower, and different metrics have no best."""
    lower = [finished(value, "validation_perplexity", False) for value in (400.0, 350.0)]
    assert best(finished(0.5), finished(0.7), LEFT, finished(0.6)) == best(*lower) == 1
    assert best(lower[0], finished(0.5)) is best(LEFT) is None


def test_the_time_left() -> None:
    """Oracle: by hand. Two runs at once of 60 s: 0.75 and 0.5 of a run, and one that waits, are 67.5 s."""
    quarter = running(15, step=30, steps=120)
    two = [finished(0.5), quarter, running(9), LEFT]
    assert progress.seconds_left(jobs(*two)) == pytest.approx(60 * 2.25 / 2, abs=1)
    assert progress.seconds_left(jobs(finished(0.5), LEFT, LEFT), at_once=1) == 120
    # none has finished: 15 s for a quarter
    assert progress.seconds_left(jobs(quarter, LEFT)) == pytest.approx(60 * 1.75, abs=1)
    early = [running(15, step=1, steps=120), LEFT]
    for unknown in (early, [finished(0.5)], [finished(0.5), LEFT]):
        assert progress.seconds_left(jobs(*unknown)) is None


def test_a_line_says_it_all() -> None:
    line = progress.describe(jobs(finished(0.5), runs.State("failed", {}, {}), LEFT), at_once=1)
    begin, _, rest = line.partition(", until ")
    assert begin == "3 runs: 1 finished, 1 failed, 1 left; about 1 min 0 s left"
    assert rest.endswith("; best validation accuracy 50.0 % (seed=0)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_is_replaced_in_a_terminal_and_logged_through_a_pipe(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    runs.write_json(tmp_path / "sweep.json", {"jobs": [["seed=0"], ["seed=1"]], "given_up": [], "command": []})
    sweeps.register(tmp_path, 0, ["seed=0"], tmp_path / "a")
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(console.LINE, "shown", False)
    monkeypatch.setattr(sweeps.COMMAND, "numbers", None)
    monkeypatch.setattr(progress, "EVERY_SECONDS", dict.fromkeys((True, False), 0.02))
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

    live = progress.LiveLine()
    live.start(tmp_path)
    live.start(tmp_path)  # once is enough
    wait_for("2 runs: 2 left")
    runs.write_result(tmp_path / "a", finished(0.25).result)
    wait_for("2 runs: 1 finished, 1 left; best validation accuracy 25.0 %")
    live.stop()
    console.say("after")
    out += capsys.readouterr().out
    assert out.endswith("after\n") and "\x1b" not in out
    assert (stderr.getvalue().endswith("\r\x1b[K") and len(out) == 6) if terminal else stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("task=lm model=rope seed=3 threads=1", "lm_rope_seed3_x"),
        ("model=alibi model.slopes=learned model.scale=0.5", "classify_alibi_slopes-learned_scale-0.5_seed0_x"),
        ("pattern=window pattern.window=3 protocol=clean", "classify_sinusoidal_window_clean_window-3_seed0_x"),
        ("task=translate trainer.max_steps=300", "translate_sinusoidal_max-steps-300_seed0_x"),
    ],
)
def test_a_run_is_named_by_what_differs_from_the_defaults(overrides: str, name: str) -> None:
    assert naming.folder_name(as_plain(compose(*overrides.split())), "x") == name


def test_a_long_name_has_whole_words() -> None:
    assert naming.joined(["task-lm", "max-steps-300", "seed-0"], 16) == "task-lm_seed-0"
