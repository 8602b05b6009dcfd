"""What the console says while a sweep runs."""

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


def finished(value: float, metric: str = "validation_accuracy", higher: bool = True, seconds: float = 60) -> Any:
    result = {"status": "finished", "metrics": {metric: value, "test_accuracy": 1.0}, "seconds": seconds}
    result |= {"best": {"metric": metric, "value": 2 * value, "step": 9, "chosen_on": "validation"}}
    result |= {"report": {"higher_is_better": higher}}
    return runs.State("finished", result, {})


def running(since: float, step: int | None = None, steps: int | None = None) -> Any:
    owner = {"since": since, "step": step, "steps": steps}
    return runs.State("running", None, {name: value for name, value in owner.items() if value is not None})


def jobs(*states: Any) -> list[sweeps.Job]:
    return [sweeps.Job(k, f"seed={k}", [], None, state) for k, state in enumerate(states)]


LEFT = runs.State("left", None, {})


def test_the_score_is_the_metric_that_chose_the_checkpoint_as_measured_at_the_end() -> None:
    assert progress.describe_score(finished(0.613).result) == "validation accuracy 61.3 %"
    assert progress.describe_score({"metrics": {}, "best": {"metric": "a", "value": None}}) == ""
    assert progress.describe_score({}) == ""


def test_the_best_run_is_that_of_the_best_score() -> None:
    """Oracle: by hand; perplexity is better if lower, and different metrics have no best."""
    assert progress.best_job(jobs(finished(0.5), finished(0.7), LEFT, finished(0.6))).number == 1  # type: ignore[union-attr]
    lower = [finished(value, "validation_perplexity", False) for value in (400.0, 350.0)]
    assert progress.best_job(jobs(*lower)).number == 1  # type: ignore[union-attr]
    assert progress.best_job(jobs(lower[0], finished(0.5))) is None and progress.best_job(jobs(LEFT)) is None


def test_the_time_left() -> None:
    """Oracle: by hand. Two runs at once of 60 s: 0.75 and 0.5 of a run, and one that waits, are 67.5 s."""
    now = time.time()
    two = [running(now - 15, 30, 120), running(now - 9)]
    assert progress.seconds_left(jobs(finished(0.5), *two, LEFT)) == pytest.approx(60 * 2.25 / 2)
    assert progress.seconds_left(jobs(finished(0.5), LEFT, LEFT), at_once=1) == 120
    # none has finished: 15 s for a quarter
    assert progress.seconds_left(jobs(two[0], LEFT)) == pytest.approx(60 * 1.75, abs=1)
    assert progress.seconds_left(jobs(running(now - 15, 1, 120), LEFT)) is None  # too early
    assert (
        progress.seconds_left(jobs(finished(0.5))) is None
        and progress.seconds_left(jobs(finished(0.5), LEFT)) is None
    )


def test_a_line_says_it_all() -> None:
    line = progress.describe(jobs(finished(0.5), runs.State("failed", {}, {}), LEFT), at_once=1)
    until = time.strftime("%H:%M", time.localtime(time.time() + 60))
    assert line == (
        f"3 runs: 1 finished, 1 failed, 1 left; about 1 min 0 s left, until {until}; "
        "best validation accuracy 50.0 % (seed=0)"
    )


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
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    line = progress.LiveLine()
    line.start(tmp_path)
    line.start(tmp_path)  # once is enough
    time.sleep(0.3)
    runs.write_result(tmp_path / "a", finished(0.25).result)
    time.sleep(0.3)
    line.stop()
    console.say("after")
    out, shown = capsys.readouterr().out, stderr.getvalue()
    texts = (shown if terminal else out).replace("\n", "\r\x1b[K").split("\r\x1b[K")
    assert "2 runs: 2 left" in texts
    assert any(text.startswith("2 runs: 1 finished, 1 left; best validation accuracy 25.0 %") for text in texts)
    assert out.endswith("after\n") and ("\x1b" in out) is False
    assert (shown.endswith("\r\x1b[K") and len(out) == 6) if terminal else shown == ""


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "classify_sinusoidal_seed0_x"),
        (["task=lm", "model=rope", "seed=3", "threads=1"], "lm_rope_seed3_x"),
        (
            ["model=alibi", "model.slopes=learned", "model.scale=0.5"],
            "classify_alibi_slopes-learned_scale-0.5_seed0_x",
        ),
        (
            ["pattern=window", "pattern.window=3", "protocol=clean"],
            "classify_sinusoidal_window_clean_window-3_seed0_x",
        ),
        (["task=lm", "trainer.max_steps=300"], "lm_sinusoidal_max-steps-300_seed0_x"),
        (["task=translate", "dropout=0"], "translate_sinusoidal_dropout-0_seed0_x"),
    ],
)
def test_a_run_is_named_by_what_differs_from_the_defaults(overrides: list[str], name: str) -> None:
    assert naming.folder_name(as_plain(compose(*overrides)), "x") == name


def test_a_long_name_has_whole_words() -> None:
    assert naming.joined(["task-lm", "max-steps-300", "seed-0"], 16) == "task-lm_seed-0"
