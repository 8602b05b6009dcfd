"""The state of a sweep, from the files in its folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from speechformer import status
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps

STATES = ["finished", "diverged", "failed", "killed", "interrupted", "running", "left"]
OWNER = {"identity": "x", "overrides": [], "pid": 1, "host": "somewhere"}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A sweep of eight jobs in every state there is; two are finished."""
    jobs = [["task=lm", f"seed={k}"] for k in range(8)]
    runs.write_json(tmp_path / "sweep.json", {"jobs": jobs, "given_up": [], "command": []})
    for number, state in enumerate([*STATES, "finished"]):
        run = tmp_path / f"run{number}"
        if state == "left":
            continue
        sweeps.register(tmp_path, number, jobs[number], run)
        run.mkdir(exist_ok=True)
        progress = {"since": time.time() - 90, "step": 30, "steps": 120} if state == "running" else {}
        runs.write_json(run / runs.OWNER, OWNER | progress)
        if state not in ("interrupted", "running"):
            runs.write_result(run, {"status": state, "seconds": 60.0, "error": f"it {state}"})
    with runs.lock(tmp_path / "run5", wait=False):
        yield tmp_path


def test_every_state_is_shown_and_the_time_left_is_estimated(folder: Path) -> None:
    """Runs take a minute: one three quarters from its end, one interrupted and one left take 2.75 minutes."""
    assert [job.state.status for job in sweeps.jobs_of(folder)] == [*STATES, "finished"]
    text, under_way = status.overview(folder)
    first, *lines = text.splitlines()[1:]
    counts = "8 runs: 2 finished, 1 diverged, 1 failed, 1 killed, 1 interrupted, 1 running, 1 left"
    assert first.startswith(f"{counts}; about 2 min 45 s left, until ") and under_way
    shown = [(state, f"seed={number}") for number, state in enumerate(STATES)][1:6]
    assert [tuple(line.split()[:2]) for line in lines] == shown
    assert "it failed (run2)" in lines[1]
    assert "step 30 of 120, for 1 min 3" in lines[4] and "process 1 on somewhere" in lines[4]


def test_the_command_shows_all_sweeps_and_single_runs_below(tmp_path: Path) -> None:
    for name, more in {"a": {}, "evaluate": {"members": []}, "baselines": {"baseline": {"name": "x"}}}.items():
        (tmp_path / name).mkdir()
        runs.write_result(tmp_path / name, {"status": "finished", "seconds": 1.0, **more})
    (tmp_path / "s").mkdir()
    runs.write_json(tmp_path / "s" / "sweep.json", {"jobs": [["seed=0"], ["seed=1"]]})
    done = run_command("speechformer.status", tmp_path, "--watch")
    assert done.returncode == 0, done.stderr
    assert "2 runs: 2 left" in done.stdout and "1 run: 1 finished" in done.stdout
    assert f"2 more under {tmp_path} are of baselines or evaluations." in done.stdout


def test_watching_shows_what_runs_and_counts_the_others(tmp_path: Path) -> None:
    watched = set[str]()
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        runs.write_json(tmp_path / name / "sweep.json", {"jobs": [["seed=0"]], "given_up": [], "command": []})
    sweeps.register(tmp_path / "b", 0, ["seed=0"], tmp_path / "b" / "run")
    with runs.lock(tmp_path / "b" / "run", wait=False):
        text, under_way = status.overview(tmp_path, watched)
    assert under_way and watched == {str(tmp_path / "b")}
    assert text.startswith(f"2 more under {tmp_path}, where nothing runs.\n\n{tmp_path / 'b'}\n1 run: 1 running")
    assert status.overview(tmp_path, watched)[0].endswith("1 run: 1 left")  # it is still shown when it has ended
    assert status.overview(tmp_path)[0].count("1 run: 1 left") == 3


def test_watching_ends_when_nothing_runs_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def finish(_: float) -> None:
        runs.write_result(folder / "run5", {"status": "finished", "seconds": 60.0})

    monkeypatch.setattr(status.time, "sleep", finish)
    monkeypatch.setattr(sys, "argv", ["status", str(folder), "--watch"])
    status.main()
    assert "3 finished" in capsys.readouterr().out.split("2 finished")[1]


@pytest.mark.parametrize(("name", "message"), [("nowhere", "no such folder"), ("", "contains no sweep and no run")])
def test_a_folder_without_runs_is_an_error(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        status.overview(tmp_path / name)


def test_durations() -> None:
    said = {0.4: "0 s", 59: "59 s", 90: "1 min 30 s", 3600 * 5 + 125: "5 h 2 min"}
    assert {seconds: status.duration(seconds) for seconds in said} == said


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        (
            "run.json",
            [b"", b"[]", b'{"since": "x"}', b'{"pid": 1}', b'{"step": 1e999}', b"\xff", os.mkdir, os.mkfifo],
        ),
        ("result.json", [b"", b"{}", b'{"status": "odd"}', b'{"status": "finished", "seconds": "60"}']),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    name: str, contents: list[bytes | Callable[[Path], None]], folder: Path
) -> None:
    for number, content in enumerate(contents):
        path = folder / "single" / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
    text, _ = status.overview(folder / "single")
    assert f"{len(contents)} runs: {len(contents)} damaged" in text
    assert all(f"{folder / 'single' / str(k) / name} is damaged: " in text for k in range(len(contents)))
    (folder / "run0" / runs.RESULT).write_bytes(b"{")
    assert "8 runs: 1 finished, 1 diverged, 1 failed, 1 killed, 1 damaged, " in status.overview(folder)[0]


@pytest.mark.parametrize("content", [b"{", b'{"jobs": [1]}', b'{"jobs": null, "given_up": 3}'])
def test_a_damaged_sweep_is_named_and_its_runs_are_shown(content: bytes, folder: Path) -> None:
    path = folder / "sweep.json"
    path.write_bytes(content)
    text, _ = status.overview(folder)
    assert text.startswith(f"{path} is damaged: ") and "7 runs: 2 finished, 1 diverged, 1 failed, 1 killed" in text
    with pytest.raises(UserError, match="sweep.json is damaged"):
        sweeps.write_jobs(folder, [], [["seed=0"]], "basic")


@pytest.mark.parametrize("planned", [True, False])
def test_a_damaged_job_is_one_of_the_sweep(planned: bool, folder: Path) -> None:
    if not planned:  # by a sweeper that chooses the jobs one by one
        runs.write_json(folder / "sweep.json", {"jobs": None})
    for content in (b"", b'{"overrides": [], "error": null, "folder": "a\\u0000b"}', b'{"folder": "run0"}'):
        for name in ("0", "²", "x", "99999999999"):
            (folder / "jobs" / f"{name}.json").write_bytes(content)
        jobs = {job.number: job for job in sweeps.jobs_of(folder)}
        assert jobs[0].state.status == "damaged" and "0.json is damaged" in jobs[0].error
        assert jobs[1].state.status == "diverged" and len(jobs) == 8
