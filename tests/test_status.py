"""The state of a sweep, from the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run_command

from speechformer import status
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps

STATES = ["finished", "diverged", "failed", "killed", "interrupted", "running", "left"]
OWNER = {"identity": "x", "overrides": [], "pid": 1, "host": "somewhere"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A sweep of eight jobs in every state there is; two are finished."""
    jobs = {tmp_path / f"run{k}": ("task=lm", f"seed={k}") for k in range(8)}
    sweeps.add_jobs(tmp_path, jobs)
    for run, state in zip(jobs, [*STATES, "finished"]):
        if state == "left":
            continue
        run.mkdir()
        progress = {"since": time.time() - 90, "step": 30, "steps": 120} if state == "running" else {}
        runs.write_json(run / runs.OWNER, OWNER | progress)
        if state not in ("interrupted", "running"):
            runs.write_result(run, {"status": state, "seconds": 60.0, "error": f"it {state}"})
    with runs.lock(tmp_path / "run5", wait=False):
        yield tmp_path


def test_every_state_is_shown_and_the_time_left_is_estimated(folder: Path) -> None:
    """Runs take a minute: one three quarters from its end, one interrupted and one left take 2.75 minutes."""
    jobs = sweeps.jobs_of(folder)
    assert [job.state.status for job in jobs] == [*STATES, "finished"]
    first, *lines = status.describe(jobs).splitlines()
    counts = "8 runs: 2 finished, 1 diverged, 1 failed, 1 killed, 1 interrupted, 1 running, 1 left"
    assert first == f"{counts}; 0:02:45 left"
    shown = [(state, f"seed={number}") for number, state in enumerate(STATES)][1:6]
    assert [tuple(line.split()[:2]) for line in lines] == shown
    assert "it failed (run2)" in lines[1]
    assert "step 30 of 120, for 0:01:3" in lines[4] and "process 1 on somewhere" in lines[4]


def test_the_command_shows_all_sweeps_and_single_runs_below(tmp_path: Path) -> None:
    """A folder with a result alone is that of a baseline or of an evaluation."""
    for name in ("a", "baselines"):
        (tmp_path / name).mkdir()
        runs.write_result(tmp_path / name, {"status": "finished", "seconds": 1.0})
    runs.write_json(tmp_path / "a" / runs.OWNER, OWNER)
    sweeps.add_jobs(tmp_path / "s", {tmp_path / "s" / f"run{k}": (f"seed={k}",) for k in range(2)})
    done = run_command("speechformer.status", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 's'}\n2 runs: 2 left" in done.stdout
    assert f"{tmp_path}, runs outside sweeps\n1 run: 1 finished" in done.stdout


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_folder_without_runs_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no sweep and no run"):
        status.status(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("run.json", [b"", b"[]", b'{"since": "x"}', b'{"pid": 1}', b"\xff"]),
        ("result.json", [b"", b"{}", b'{"status": "odd"}', b'{"status": "finished", "seconds": "60"}']),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(name: str, contents: list[bytes], folder: Path) -> None:
    for content in contents:
        (folder / "run0" / name).write_bytes(content)
        if name == "run.json":
            (folder / "run0" / runs.RESULT).unlink(missing_ok=True)
        text = status.describe(sweeps.jobs_of(folder))
        assert "8 runs: 1 finished, 1 diverged, 1 failed, 1 killed, 1 damaged, " in text
        assert f"{folder / 'run0' / name} is damaged: " in text


@pytest.mark.parametrize("content", [b"{", b'{"jobs": [1]}', b"{}"])
def test_a_damaged_sweep_is_an_error(content: bytes, folder: Path) -> None:
    (folder / "sweep.json").write_bytes(content)
    for read in (lambda: status.status(folder), lambda: sweeps.add_jobs(folder, {})):
        with pytest.raises(UserError, match=r"sweep\.json is damaged: "):
            read()
