"""Sweeps: any job alone is the same job anywhere, failures are results, and killed workers lose nothing."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Command, run_command
from conftest import TINY, compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from test_runs import ENDED

from speechformer import train
from speechformer.report import page
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.runs.folder import RunFolder, read_json, read_result
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import sweeper
from speechformer.training import fit as fit_module
from speechformer.training.run import execute

LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3", "trainer.log_every_n_steps=2"]
DEADLY = """
import os, signal, sys, threading, time
def wrap():
    while not hasattr(sys.modules.get("speechformer.training.run"), "execute"): time.sleep(0.005)
    run = sys.modules["speechformer.training.run"]
    load, begin = run.load, run.RunFolder.begin
    def die(config):
        if config["seed"] == 1 and not ("once" in {when!r} and os.path.exists("killed")):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if {when!r} == "before it locks":
        run.load = lambda config: (die(config), load(config))[1]
    else:
        run.RunFolder.begin = lambda self, config, threads: (begin(self, config, threads), die(config))[0]
threading.Thread(target=wrap, daemon=True).start()
"""
ENDLESS = ["task=lm", "trainer.max_steps=100000", "eval_interval=10000", "checkpoint_every=5"]
PLACE = "hydra.sweep.dir=sweep"
Sweep = Callable[..., tuple[int, str, str]]


def own(little: Path) -> list[str]:
    """The overrides of a run of a tenth of a second."""
    return ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", *TINY[1:]]


@pytest.fixture
def sweep(little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Sweep:
    """Runs `python -m speechformer.train -m` in this process and folder: exit code, output, errors.

    Its reports have no figures, which take longer than its runs.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "report", functools.partial(page.report, draw=False))

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train", "-m", *own(little), *arguments])
        with pytest.raises(SystemExit) as end:
            train.main()
        out, err = capsys.readouterr()
        return end.value.code, out, err  # type: ignore[return-value]

    return command


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {job.name: read_result(job.folder) for job in sweeps.jobs_of(folder) if job.state.result}


def statuses(folder: Path) -> dict[str, str]:
    return {job.name: job.state.status for job in sweeps.jobs_of(folder)}


def check_that_jobs_are_those_alone(folder: Path, alone: Path) -> None:
    """Require that each finished run of a sweep has the bits of the same run outside of it."""
    for number, job in enumerate(job for job in sweeps.jobs_of(folder) if job.state.status == "finished"):
        result, place = read_result(job.folder), alone / str(number)
        threads = f"threads={result['machine']['threads']}"
        expected = execute(compose(*result["overrides"], threads), place)
        for key in ("metrics", "best", "curve", "steps", "identity"):
            assert result[key] == runs.finite(expected[key])
        states = [torch.load(path / "last.ckpt", weights_only=True)["state_dict"] for path in (job.folder, place)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_any_job_alone_is_the_same_job_in_any_place_of_a_sweep(sweep: Sweep, tmp_path: Path) -> None:
    """To the last bit, whatever ran before in the same process: another task, one that failed, one that diverged."""
    words = ["recipe.lr=1000,0.001", "task=lm,classify", "recipe.optimizer=sgd", "architecture.norm=post"]
    words += ["architecture.final_norm=false", "heads=2,3", "trainer.max_epochs=-1", "trainer.max_steps=9"]
    code, _, _ = sweep(*words, "eval_interval=9", PLACE)
    ended = [*statuses(tmp_path / "sweep").values()]
    assert code == 1 and len(ended) == 8 and ended.count("finished") >= 2
    assert {*ended} == {"finished", "failed", "diverged"}
    check_that_jobs_are_those_alone(tmp_path / "sweep", tmp_path / "alone")


@pytest.mark.parametrize(
    "launcher",
    [["submitit_slurm"], ["joblib", "hydra.launcher.n_jobs=0"], ["submitit_local", "hydra.launcher.nodes=x"]],
)
def test_a_launcher_that_cannot_start_is_one_sentence(
    launcher: list[str], sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has no program of SLURM's, the others a setting that their library refuses."""
    monkeypatch.setenv("PATH", "")
    code, _, _ = sweep("seed=0,1", f"hydra/launcher={launcher[0]}", *launcher[1:])
    assert re.match(r"Error: .*launcher[^\n]*\.$", str(code))


def test_a_sweep_says_at_its_end_what_failed_and_runs_only_that_again(sweep: Sweep, tmp_path: Path) -> None:
    # 9 is not a multiple of 2 heads: that job fails, the others go on
    code, out, err = sweep(*LM, "width=9,8,16", PLACE)
    assert code == 1
    assert "Sweep of 3 runs: 2 finished, 1 failed." in out
    failed, advice = err.strip().splitlines()[-2:]
    folder: Any = next(job.folder for job in sweeps.jobs_of(tmp_path / "sweep") if job.name == "width=9")
    assert failed.startswith("Failed: width=9: width must be a multiple of heads")
    assert failed.endswith(f"(sweep/{folder.name})")
    assert advice.startswith("Run the same command again")
    assert "UserError" in results(tmp_path / "sweep")["width=9"]["traceback"]
    assert "width must be a multiple of heads" in (tmp_path / "sweep" / "report" / "report.html").read_text()
    files = [path for path in (tmp_path / "sweep").rglob("*") if not path.is_symlink()]
    assert not {sign for path in files for sign in ' :=*?"<>|\\' if sign in path.name}
    links = (tmp_path / "sweep" / "tensorboard").iterdir()
    assert sorted(link.name for link in links if link.exists()) == ["width=16", "width=8"]

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("last.ckpt")}
    code, out, err = sweep(*LM, "width=9,8,16", PLACE)
    assert code == 1 and "Sweep of 3 runs: 2 finished, 1 failed." in out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    code, out, err = sweep(*LM, "width=8,16", "force=true", PLACE)
    assert code == 0
    assert all(path.stat().st_mtime_ns > written[path] for path in written)
    # a second sweep in this folder keeps the jobs of the first, and orders them differently
    code, out, _ = sweep(*LM, "width=24,8", PLACE)
    assert code == 0 and "Sweep of 2 runs: 2 finished." in out and out.count("Parameters: ") == 1
    assert [*statuses(tmp_path / "sweep").values()] == ["failed", "finished", "finished", "finished"]


def test_the_same_sweep_has_the_same_folder(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(*LM, "width=8,16")[0] == 0
    _, out, _ = sweep("width=8,16", *reversed(LM), "machine=cpu", "threads=1", "checkpoint_every=2")
    assert "Sweep of 2 runs: 2 finished." in out and "Parameters: " not in out
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert folder.name.startswith("width-8-16_")
    monkeypatch.setattr(identity, "NUMERICS_VERSION", identity.NUMERICS_VERSION + 1)
    assert sweep(*LM, "width=8,16")[1].count("Parameters: ") == 2
    assert len(list((tmp_path / "outputs" / "sweeps").iterdir())) == 2


@pytest.mark.parametrize(
    ("swept", "jobs"),
    [
        ("pattern=full,{name:window,window:3}", ["pattern=full", "pattern=window pattern.window=3"]),
        ("model={name:alibi,slopes:[0.5,0.1]},rope", ["model=alibi model.slopes=[0.5,0.1]", "model=rope"]),
        ("task.lengths=[40],[50]", ["task.lengths=[40]", "task.lengths=[50]"]),
    ],
)
def test_a_choice_of_a_sweep_can_have_options_of_its_own(swept: str, jobs: list[str]) -> None:
    overrides = OverridesParser.create().parse_overrides([swept])
    assert [" ".join(job) for job in sweeper.combinations(overrides)] == jobs


def test_a_sweep_does_not_take_another_run_for_its_own(sweep: Sweep, tmp_path: Path) -> None:
    place = [PLACE, "hydra.sweep.subdir=one"]
    assert sweep(*LM, *place)[0] == 0
    code, out, err = sweep(*LM, *place, "dropout=0.2")
    assert code == 1 and "sweep/one holds another run" in err and "Sweep of 1 runs: 1 failed." in out
    assert read_result(tmp_path / "sweep" / "one")["config"]["dropout"] == 0.1


def test_a_folder_with_other_files_is_no_sweeps(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "notes.txt").write_text("mine")
    code, _, _ = sweep(*LM, "seed=0,1", PLACE)
    assert str(code).startswith("Error: sweep holds notes.txt and no sweep.json, so it is no sweep's folder.")
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dropout=interval(0,1)"], "dropout=interval(0,1) is no list of values; hydra/sweeper=optuna searches"),
        (["model=alibi,alibii"], "model has no choice 'alibii'"),
        (["width=${nowhere}"], "width: Interpolation key 'nowhere' not found."),
    ],
)
def test_a_sweep_that_cannot_begin_is_one_sentence_and_leaves_nothing(
    words: list[str], message: str, sweep: Sweep, tmp_path: Path
) -> None:
    code, out, _ = sweep(*LM, PLACE, *words)
    assert str(code).startswith("Error: ") and message in str(code) and "\n" not in str(code)
    assert out == "" and not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_two_sweeps_at_once_in_one_folder_both_end(little: Path, tmp_path: Path) -> None:
    """They share a run: every run has one result, and both know all jobs."""
    words = ["speechformer.train", "-m", *own(little), *LM, PLACE]
    for command in [Command(*words, seeds, cwd=tmp_path) for seeds in ("seed=0,1", "seed=1,2")]:
        done = command.wait()
        assert done.returncode == 0, done.stderr
        assert "Sweep of 2 runs: 2 finished." in done.stdout and "report.html" in done.stdout
    ended = results(tmp_path / "sweep")
    assert {name: result["attempts"] for name, result in ended.items()} == {"seed=0": 1, "seed=1": 1, "seed=2": 1}
    assert not list((tmp_path / "sweep").rglob("*.partial"))


def test_several_devices_in_a_sweep_are_an_error_that_names_alternatives(sweep: Sweep, tmp_path: Path) -> None:
    """Before anything is launched."""
    for words in (["machine=ddp", "seed=0,1"], ["machine=cpu,ddp"]):
        code, out, _ = sweep(*LM, *words, PLACE)
        assert str(code).startswith("Error: trainer.devices or trainer.num_nodes above 1 in a sweep: ")
        assert "hydra/launcher=submitit_slurm" in str(code)
        assert out == "" and not (tmp_path / "sweep").exists()


def test_runs_that_would_share_a_folder_are_an_error(sweep: Sweep, tmp_path: Path) -> None:
    code, out, _ = sweep(*LM, "seed=0,1", PLACE, "hydra.sweep.subdir=one")
    assert str(code).startswith("Error: sweep/one would hold several runs")
    assert out == "" and not (tmp_path / "sweep").exists()


def test_a_failed_job_is_tried_again(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for example, is no longer full."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "fit", full)
        code, _, err = sweep(*LM, "seed=0,1", PLACE)
    assert code == 1 and err.count("somewhere: No space left on device. Fix that") == 2
    code, out, _ = sweep(*LM, "seed=0,1", PLACE)
    assert code == 0 and "Sweep of 2 runs: 2 finished." in out


@pytest.mark.slow
def test_side_by_side_each_talks_into_its_own_file_on_its_share_of_the_cores(little: Path, tmp_path: Path) -> None:
    """Oracle for the figures: the same runs alone, with as many threads."""
    words = [*own(little), *LM, "seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", PLACE]
    done = run_command("speechformer.train", "-m", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished in ") == 3 and "Parameters" not in done.stdout
    ended = results(tmp_path / "sweep").values()
    assert [result["machine"]["threads"] for result in ended] == [max(1, (os.cpu_count() or 1) // 2)] * 3
    for job in sweeps.jobs_of(tmp_path / "sweep"):
        assert "Parameters: " in (job.folder / "log.txt").read_text()
    check_that_jobs_are_those_alone(tmp_path / "sweep", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it locks", "at its start", "at its start, once"])
def test_a_job_that_kills_its_worker_runs_alone_and_is_given_up_if_it_dies_again(
    when: str, sweep: Sweep, little: Path, tmp_path: Path
) -> None:
    """Seed 1 kills its process, as one that needs too much memory is. A forced sweep makes every run again."""
    forced = ["force=true"] if "once" in when else []
    began = {}
    if forced:
        assert sweep(*LM, "seed=0,1,2", PLACE)[0] == 0
        began = {job.name: job.state.owner["since"] for job in sweeps.jobs_of(tmp_path / "sweep")}
    (tmp_path / "sitecustomize.py").write_text(DEADLY.format(when=when))
    words = ["-m", "speechformer.train", "-m", *own(little), *LM, "seed=0,1,2", "hydra/launcher=joblib", PLACE]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command, variables = [sys.executable, *words, *forced], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    jobs = sweeps.jobs_of(tmp_path / "sweep")
    if forced:
        assert done.returncode == 0 and all(job.state.owner["since"] > began[job.name.split()[0]] for job in jobs)
    else:
        assert done.returncode == 1 and [job.state.status for job in jobs] == ["finished", "killed", "finished"]
        assert "Its process was killed twice, the second time alone" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_workers_end_with_their_sweep(little: Path, tmp_path: Path) -> None:
    """Oracle: the processes that the system lists, after `kill -9` of the command alone."""
    words = [*own(little), *ENDLESS, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1", PLACE]
    command = Command("speechformer.train", "-m", *words, cwd=tmp_path)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")

    def under_way() -> int:
        return sum("step" in (read_json(path) or {}) for path in (tmp_path / "sweep").glob("*/run.json"))

    # the tracker of resources and two workers
    while len(pids := children.read_text().split()) < 3 or under_way() < 2:
        assert command.poll() is None, command.output()
        time.sleep(0.005)
    command.send(signal.SIGKILL)
    command.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.1)


def start(cfg: Any, folder: Path, told: Any) -> None:
    """One of many starts of the same run; `fit` is replaced by a function that takes no time."""

    def trained(members: list[tuple[dict, RunFolder]], *others: Any) -> list[dict]:
        run_folder = members[0][1]
        with open(run_folder.path / "trained", "a") as file:
            file.write(f"{os.getpid()}\n")
        result = {**ENDED, "identity": run_folder.identity, "pid": os.getpid()}
        run_folder.finish(result)
        return [result]

    fit_module.fit = trained  # type: ignore[assignment]
    told.put(execute(cfg, folder)["pid"])


@pytest.mark.slow
def test_many_simultaneous_starts_of_one_run_leave_one_result(little: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    cfg = compose(*own(little))
    processes = [context.Process(target=start, args=(cfg, tmp_path / "run", told)) for _ in range(30)]
    for process in processes:
        process.start()
    pids = [told.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    (trained,) = (tmp_path / "run" / "trained").read_text().split()
    assert {*pids} == {int(trained)} == {read_result(tmp_path / "run")["pid"]}
    files = {"config.yaml", "result.json", "run.json", "run.lock", "trained"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == files
    assert json.loads((tmp_path / "run" / "run.json").read_text())["pid"] == int(trained)


def test_a_sweep_waits_for_what_another_process_works_on(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finishes it, if that process dies."""
    assert sweep(*LM, "seed=0", PLACE)[0] == 0
    (folder,) = (job.folder for job in sweeps.jobs_of(tmp_path / "sweep"))
    assert folder
    (folder / "result.json").unlink()
    context = multiprocessing.get_context("fork")
    held, released = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(folder, held, released))
    holder.start()
    assert held.wait(60)
    waits = SimpleNamespace(time=time.time, sleep=lambda seconds: (released.set(), holder.join()))
    monkeypatch.setattr(sweeper, "time", waits)
    code, out, _ = sweep(*LM, "seed=0", PLACE)
    assert code == 0 and "Waiting for 1 runs" in out
    assert "Sweep of 1 runs: 1 finished." in out


def hold(folder: Path, held: Any, released: Any) -> None:
    with runs.lock(folder, wait=False):
        held.set()
        released.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("many", [[], ["-m"]], ids=["run", "sweep"])
def test_a_terminated_command_says_so_and_goes_on_later(many: list[str], little: Path, tmp_path: Path) -> None:
    place = ["hydra.run.dir=run", "hydra.sweep.dir=run", "hydra.sweep.subdir=one"]
    command = Command("speechformer.train", *many, *own(little), *ENDLESS, *place, cwd=tmp_path)
    while not list(tmp_path.rglob("last.ckpt")):
        assert command.poll() is None, command.output()
        time.sleep(0.02)
    command.send(signal.SIGTERM)
    done = command.wait()
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.strip().splitlines()[-1].startswith("Terminated; the same command resumes")
    assert runs.state(tmp_path / "run" / ("one" if many else "")).status == "interrupted"


@pytest.mark.parametrize("since", [0.0, 1e12])
def test_a_forced_run_is_open_until_it_has_begun_whatever_the_clocks_say(since: float, tmp_path: Path) -> None:
    sweep, owner = sweeper.GridSweeper(), {"host": "h", "pid": 1, "since": since}
    runs.write_json(tmp_path / runs.OWNER, owner)
    runs.write_result(tmp_path, {"status": "finished"})
    sweep.config, sweep.errors = OmegaConf.create({"force": True}), {}
    sweep.before = {tmp_path: runs.attempt(tmp_path)}
    assert sweep.is_open(tmp_path)
    for progress in ({}, {"step": 3}):
        runs.write_json(tmp_path / runs.OWNER, owner | {"since": 5e11} | progress)
        assert not sweep.is_open(tmp_path)


def test_what_does_not_decide_a_run_is_not_in_its_identity() -> None:
    def fingerprint(*overrides: str, sha: str = "0" * 64, classes: tuple[str, ...] = ("a", "b")) -> str:
        return identity.fingerprint(OmegaConf.to_container(compose(*overrides), resolve=True), sha, classes)  # type: ignore

    same = fingerprint("model=alibi")
    no_identity = ["machine=cpu", "threads=2", "force=true", "checkpoint_every=3", "keep_every_n_steps=3"]
    for override in (*no_identity, "corpus=sample", "machine=ddp", "machine=fsdp"):
        assert fingerprint("model=alibi", override) == same, override
    assert fingerprint("model=alibi", "dropout=0") == fingerprint("model=alibi", "dropout=0.0") != same
    whole, one = (fingerprint(f"trainer.limit_train_batches={n}") for n in ("1.0", "1"))
    assert whole != one  # all batches, and a single one
    for override in ("seed=1", "model.scale=2", "study=x", "trainer.precision=64-true", "task.name=x"):
        assert fingerprint("model=alibi", override) != same, override
    assert fingerprint("model=alibi", sha="1" * 64) != same != fingerprint("model=alibi", classes=("b", "a"))
