"""Sweeps: any job alone is the same job anywhere, failures are results, and killed workers lose nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose
from omegaconf import OmegaConf

from speechformer import train
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.runs.folder import RunFolder, read_json, read_result
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.folder import write_jobs
from speechformer.training import fit as fit_module
from speechformer.training.run import execute

LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3", "trainer.log_every_n_steps=2"]
TRAIN = [sys.executable, "-m", "speechformer.train"]
Sweep = Callable[..., tuple[int, str, str]]


def own(little: Path) -> list[str]:
    """The overrides of a run of a tenth of a second."""
    return ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", *TINY[1:]]


@pytest.fixture
def sweep(little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Sweep:
    """Runs `python -m speechformer.train -m` in this process and folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train", "-m", *own(little), *arguments])
        monkeypatch.setattr(sweeps.COMMAND, "folder", None)
        monkeypatch.setattr(sweeps.COMMAND, "given_up", [])
        monkeypatch.setattr(sweeps.COMMAND, "started", 0.0)
        monkeypatch.setattr(sweeps.COMMAND, "errors", {})
        monkeypatch.setattr(sweeps.COMMAND, "numbers", None)
        monkeypatch.setattr(sweeps.COMMAND, "before", None)
        with pytest.raises(SystemExit) as end:
            train.main()
        out, err = capsys.readouterr()
        return end.value.code, out, err  # type: ignore[return-value]

    return command


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {job.name: read_result(job.folder) for job in sweeps.jobs_of(folder) if job.folder and job.state.result}


def weights(folder: Path) -> dict[str, list]:
    return {k: x.tolist() for k, x in torch.load(folder / "last.ckpt", weights_only=True)["state_dict"].items()}


def test_any_job_alone_is_the_same_job_in_any_place_of_a_sweep(little: Path, sweep: Sweep, tmp_path: Path) -> None:
    """To the last bit, whatever ran before in the same process: another task, one that failed, one that diverged."""
    wild = "recipe.lr=1000,0.001"
    options = [
        "task=lm,classify",
        "recipe.optimizer=sgd",
        "architecture.norm=post",
        "architecture.final_norm=false",
        "heads=2,3",
    ]
    options += ["model=alibi,learned"]
    short = ["trainer.max_epochs=-1", "trainer.max_steps=9", "eval_interval=9"]
    code, _, _ = sweep(wild, *options, *short, "hydra.sweep.dir=sweep")
    in_sweep = results(tmp_path / "sweep")
    assert code == 1 and len(in_sweep) == 16
    assert {result["status"] for result in in_sweep.values()} == {"finished", "failed", "diverged"}
    finished = [job for job in sweeps.jobs_of(tmp_path / "sweep") if job.state.status == "finished"]
    assert len(finished) >= 4
    for job in finished:
        result = read_result(job.folder)  # type: ignore[arg-type]
        alone = execute(compose(*result["overrides"]), tmp_path / "alone" / str(job.number))
        assert alone["metrics"] == result["metrics"] and alone["identity"] == result["identity"]
        assert weights(tmp_path / "alone" / str(job.number)) == weights(job.folder)  # type: ignore[arg-type]


def test_a_sweep_says_at_its_end_what_failed_and_runs_only_that_again(sweep: Sweep, tmp_path: Path) -> None:
    # 9 is not a multiple of 2 heads: that job fails, the others go on
    code, out, err = sweep(*LM, "width=9,8,16", "hydra.sweep.dir=sweep")
    assert code == 1
    assert "Sweep of 3 runs: 2 finished, 1 failed." in out
    failed, advice = err.strip().splitlines()[-2:]
    folder = next(job.folder for job in sweeps.jobs_of(tmp_path / "sweep") if job.name == "width=9")
    assert failed.startswith("Failed: width=9: width must be a multiple of heads") and failed.endswith(
        f"(sweep/{folder.name}/result.json)"  # type: ignore[union-attr]
    )
    assert advice.startswith("Run the same command again")
    assert "UserError" in results(tmp_path / "sweep")["width=9"]["traceback"]
    page = (tmp_path / "sweep" / "report" / "report.html").read_text()
    assert "width must be a multiple of heads" in page
    files = [path for path in (tmp_path / "sweep").rglob("*") if not path.is_symlink()]
    assert not {sign for path in files for sign in ' :=*?"<>|\\' if sign in path.name}
    assert sorted(link.name for link in (tmp_path / "sweep" / "tensorboard").iterdir()) == ["width=16", "width=8"]

    names = [path for path in (tmp_path / "sweep").rglob("last.ckpt")]
    times = [path.stat().st_mtime_ns for path in names]
    code, out, err = sweep(*LM, "width=9,8,16", "hydra.sweep.dir=sweep")
    assert code == 1 and out.count("Already finished: ") == 2
    assert [path.stat().st_mtime_ns for path in names] == times
    code, out, err = sweep(*LM, "width=8,16", "heads=2", "hydra.sweep.dir=sweep")
    assert code == 0 and out.count("Already finished: ") == 2 and "Sweep of 2 runs: 2 finished." in out
    code, out, err = sweep(*LM, "width=8,16", "force=true", "hydra.sweep.dir=sweep")
    assert code == 0 and "Already finished" not in out


def test_the_same_sweep_has_the_same_folder(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(*LM, "width=8,16")[0] == 0
    _, out, _ = sweep("width=8,16", *reversed(LM), "machine=cpu", "threads=1", "checkpoint_every=2")
    assert out.count("Already finished") == 2
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert folder.name.startswith("width-8-16_")
    monkeypatch.setattr(identity, "NUMERICS_VERSION", 2)
    assert sweep(*LM, "width=8,16")[1].count("Already finished") == 0
    assert len(list((tmp_path / "outputs" / "sweeps").iterdir())) == 2


def test_a_sweep_does_not_take_another_run_for_its_own(sweep: Sweep, tmp_path: Path) -> None:
    place = ["hydra.sweep.dir=sweep", "hydra.sweep.subdir=one"]
    assert sweep(*LM, *place)[0] == 0
    code, _, err = sweep(*LM, *place, "dropout=0.2")
    assert code == 1 and "sweep/one holds another run" in err
    assert read_result(tmp_path / "sweep" / "one")["config"]["dropout"] == 0.1
    first, second = sweeps.jobs_of(tmp_path / "sweep")
    assert first.state.status == "finished"
    assert second.state.status == "failed" and "holds another run" in second.error


def test_sweeps_with_one_folder_keep_each_others_jobs(sweep: Sweep, tmp_path: Path) -> None:
    """The first has a job that fails, the second shares one with it and orders them differently."""
    assert sweep(*LM, "width=9,8", "hydra.sweep.dir=sweep")[0] == 1
    code, out, _ = sweep(*LM, "width=16,8", "hydra.sweep.dir=sweep")
    assert code == 0 and "Sweep of 2 runs: 2 finished." in out and out.count("Already finished") == 1
    states = {job.name: job.state.status for job in sweeps.jobs_of(tmp_path / "sweep")}
    assert states == {"width=9": "failed", "width=8": "finished", "width=16": "finished"}


def test_a_misspelt_choice_leaves_no_jobs_behind(sweep: Sweep, tmp_path: Path) -> None:
    """A sweep's folder that is new goes, and one with jobs keeps those that it had."""
    assert "has no choice 'alibii'" in str(sweep(*LM, "model=alibi,alibii", "hydra.sweep.dir=sweep")[0])
    assert not (tmp_path / "sweep").exists()
    assert sweep(*LM, "hydra.sweep.dir=sweep")[0] == 0
    before = (tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8")
    assert "has no choice 'alibii'" in str(sweep(*LM, "model=alibi,alibii", "hydra.sweep.dir=sweep")[0])
    assert (tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8") == before
    assert [job.state.status for job in sweeps.jobs_of(tmp_path / "sweep")] == ["finished"]


@pytest.mark.parametrize("other", [[["seed=0"]], None])
def test_a_sweep_that_chooses_its_jobs_has_a_folder_of_its_own(other: list[list[str]] | None, tmp_path: Path) -> None:
    write_jobs(tmp_path, ["-m", "one"], other, "basic")
    with pytest.raises(UserError, match=r"holds another sweep: -m one\. Choose a new"):
        write_jobs(tmp_path, ["-m", "two"], None, "basic")
    if other is None:
        write_jobs(tmp_path, ["-m", "one", f"hydra.sweep.dir={tmp_path}"], None, "basic")  # it goes on


def test_two_sweeps_at_once_in_one_folder_both_end(little: Path, tmp_path: Path) -> None:
    """They share a run: every run has one result, and both know all jobs."""
    commands = [
        [*TRAIN, "-m", *own(little), *LM, seeds, "hydra.sweep.dir=sweep"] for seeds in ("seed=0,1", "seed=1,2")
    ]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Sweep of 2 runs: 2 finished." in out and "report.html" in out
    jobs = sweeps.jobs_of(tmp_path / "sweep")
    assert sorted(job.name for job in jobs) == ["seed=0", "seed=1", "seed=2"]
    assert {job.state.status for job in jobs} == {"finished"}
    attempts = [read_result(job.folder)["attempts"] for job in jobs if job.folder]
    assert attempts == [1] * len(jobs)
    assert not list((tmp_path / "sweep").rglob("*.partial"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_workers_end_with_their_sweep(little: Path, tmp_path: Path) -> None:
    """Oracle: the processes that the system lists, after `kill -9` of the command alone."""
    words = ["task=lm", "trainer.max_steps=100000", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = [*TRAIN, "-m", *own(little), *words, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 60

    def workers() -> list[int]:
        owners = [read_json(path) or {} for path in (tmp_path / "sweep").glob("*/run.json")]
        return [owner["pid"] for owner in owners if "step" in owner and Path(f"/proc/{owner['pid']}").exists()]

    while len(workers()) < 2 and time.time() < until:
        time.sleep(0.2)
    pids = workers()
    process.kill()
    process.wait()
    assert len(pids) == 2
    until = time.time() + 5
    while workers() and time.time() < until:
        time.sleep(0.2)
    assert not workers()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("later", [0.0, 0.3, 0.6])
def test_workers_that_have_no_job_yet_end_with_their_sweep(later: float, little: Path, tmp_path: Path) -> None:
    """Oracle: the end of the pipe that all of them write to."""
    words = ["task=lm", "trainer.max_steps=100000", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = [*TRAIN, "-m", *own(little), *words, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:  # the tracker of resources, and a worker
        time.sleep(0.002)
    time.sleep(later)
    process.kill()
    process.communicate(timeout=20)


def test_later_jobs_of_a_sweep_begin_at_once(sweep: Sweep, tmp_path: Path) -> None:
    """From one run's result to the next one's first step, the quickest of four: about 0.2 s, or 0.5 s on a busy
    machine. With the imports it would be four."""
    assert sweep(*LM, "seed=range(5)", "hydra.sweep.dir=sweep")[0] == 0
    folders = [job.folder for job in sweeps.jobs_of(tmp_path / "sweep") if job.folder]
    gaps = [
        (runs.read_json(later / "run.json") or {})["since"]
        + read_result(later)["seconds_by_phase"]["start-up"]
        - (before / "result.json").stat().st_mtime
        for before, later in itertools.pairwise(folders)
    ]
    assert len(gaps) == 4 and min(gaps) < 2


def test_several_devices_in_a_sweep_are_an_error_that_names_alternatives(sweep: Sweep, tmp_path: Path) -> None:
    """Before anything is launched; where a job asks for it, it is that job's failure."""
    code, out, _ = sweep(*LM, "machine=ddp", "seed=0,1", "hydra.sweep.dir=sweep")
    assert str(code).startswith("Error: trainer.devices=2 in a sweep: ") and "hydra/launcher=submitit_slurm" in str(
        code
    )
    assert out == "" and not (tmp_path / "sweep").exists()
    code, _, err = sweep(*LM, "machine=cpu,ddp", "hydra.sweep.dir=sweep")
    assert code == 1 and "Failed: machine=ddp: trainer.devices=2 in a sweep" in err
    assert results(tmp_path / "sweep")["machine=cpu"]["status"] == "finished"


@pytest.mark.parametrize("subdir", [".", "''", "jobs", "report/x", "../up", "/tmp/x", "sweep.json"])
def test_a_sweeps_runs_have_folders_of_their_own(subdir: str, sweep: Sweep, tmp_path: Path) -> None:
    code, out, _ = sweep(*LM, "seed=0,1", "hydra.sweep.dir=sweep", f"hydra.sweep.subdir={subdir}")
    assert str(code).startswith(f"Error: hydra.sweep.subdir={subdir.strip(chr(39))} is not a folder of its own")
    assert out == "" and not (tmp_path / "sweep").exists()


def test_a_failed_job_is_tried_again(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for example, is no longer full."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "fit", full)
        code, _, err = sweep(*LM, "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 1 and err.count("somewhere: No space left on device. Fix that") == 4
    code, out, _ = sweep(*LM, "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 0 and "Sweep of 2 runs: 2 finished." in out


def test_a_sweep_whose_corpus_is_not_there_says_so_for_each_job(sweep: Sweep, tmp_path: Path) -> None:
    code, _, err = sweep(*LM, "corpus.root=nowhere", "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 1 and err.count("No speech files") == 4  # as it happens, and at the end
    assert {result["status"] for result in results(tmp_path / "sweep").values()} == {"failed"}


def test_side_by_side_each_talks_into_its_own_file_on_its_share_of_the_cores(little: Path, tmp_path: Path) -> None:
    """Oracle for the figures: the same runs alone, on one thread."""
    options = [*own(little), *LM]
    arguments = [*options, "seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep"]
    done = subprocess.run([*TRAIN, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished in ") == 3 and "Parameters" not in done.stdout
    for job in sweeps.jobs_of(tmp_path / "sweep"):
        result = read_result(job.folder)  # type: ignore[arg-type]
        assert "Parameters: " in (job.folder / "log.txt").read_text()  # type: ignore[operator]
        threads = result["machine"]["threads"]
        assert threads == max(1, (os.cpu_count() or 1) // 2)
        alone = execute(compose(*options, f"seed={result['seed']}", f"threads={threads}"), tmp_path / str(job.number))
        assert alone["metrics"] == result["metrics"]


def test_a_local_executor_that_starts_all_at_once_gives_each_its_share(little: Path, tmp_path: Path) -> None:
    arguments = [*own(little), *LM, "seed=0,1,2", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep"]
    done = subprocess.run([*TRAIN, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {result["machine"]["threads"] for result in results(tmp_path / "sweep").values()} == {1}
    assert len(results(tmp_path / "sweep")) == 3


def kill_one_worker(folder: Path) -> bool:
    """`kill -9` of a process that works on a run of a sweep; whether there was one."""
    running = [job.state.owner.get("pid") for job in sweeps.jobs_of(folder) if job.state.status == "running"]
    for pid in filter(None, running):
        try:
            os.kill(pid, signal.SIGKILL)
            return True
        except ProcessLookupError:
            continue
    return False


def test_a_job_that_kills_its_worker_is_given_up_and_the_others_finish(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job of seed 1 is killed whenever it runs, as one that needs too much memory is."""
    arguments = [*own(little), *LM, "seed=0,1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, threading, time\n"
        "def deadly():\n"
        "    import sys\n"
        "    while not hasattr(sys.modules.get('speechformer.runs.folder'), 'own'): time.sleep(0.005)\n"
        "    folder = sys.modules['speechformer.runs.folder'].RunFolder\n"
        "    begin = folder.begin\n"
        "    def kill(self, config, threads):\n"
        "        begin(self, config, threads)\n"
        "        if config['seed'] == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    folder.begin = kill\n"
        "threading.Thread(target=deadly, daemon=True).start()\n"
    )
    done = subprocess.run(
        [*TRAIN, "-m", *arguments, "hydra.sweep.dir=sweep"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    states = {job.name: job.state.status for job in sweeps.jobs_of(tmp_path / "sweep")}
    assert states == {"seed=0": "finished", "seed=1": "killed", "seed=2": "finished", "seed=3": "finished"}
    line = done.stderr.strip().splitlines()[-2]
    assert line.startswith("Killed: seed=1: Its process was killed twice, the second time alone (signal SIGKILL)")
    assert (tmp_path / "sweep" / "report" / "report.html").exists()
    again = subprocess.run(
        [*TRAIN, "-m", *arguments, "hydra.sweep.dir=sweep"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 0 and again.stdout.count("Already finished: ") == 3


def test_a_sweep_whose_workers_are_killed_at_random_ends_like_one_undisturbed(little: Path, tmp_path: Path) -> None:
    """4 jobs; workers and the whole command are killed at random times until it is done. Oracle: 4 runs alone."""
    options = [*own(little), "threads=1", "checkpoint_every=20", "task=lm", "trainer.max_steps=200"]
    options += ["eval_interval=100"]
    swept = ["seed=0,1", "model=alibi,learned"]
    arguments = [*options, *swept, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep"]
    chance, kills, code, end = random.Random(0), 0, -1, time.monotonic() + 240
    while code != 0:
        process = subprocess.Popen(
            [*TRAIN, "-m", *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and kills < 4 and time.monotonic() < end:
            time.sleep(chance.uniform(0.2, 1.5))
            if kills == 2:  # the command itself
                process.kill()
                kills += 1
            else:
                kills += kill_one_worker(tmp_path / "sweep")
        code = process.wait()
    assert kills == 4
    ended = results(tmp_path / "sweep")
    assert len(ended) == 4 and sum(result["attempts"] > 1 for result in ended.values()) >= 1
    for job in sweeps.jobs_of(tmp_path / "sweep"):
        result = read_result(job.folder)  # type: ignore[arg-type]
        alone = execute(compose(*result["overrides"]), tmp_path / "alone" / str(job.number))
        for key in ("status", "metrics", "best", "curve", "steps", "identity"):
            assert runs.finite(alone[key]) == result[key]
        assert weights(tmp_path / "alone" / str(job.number)) == weights(job.folder)  # type: ignore[arg-type]


def start(cfg: Any, folder: Path, told: Any) -> None:
    """One of many starts of the same run; `fit` is replaced by a function that takes no time."""

    def trained(config: Any, corpus: Any, run_folder: RunFolder, launcher: Any, begin: Any, told: Any) -> dict:
        with open(run_folder.path / "trained", "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        best = {"metric": "test_accuracy", "value": None, "step": None, "chosen_on": "test"}
        empty = {"metrics": {}, "config": {"task": {}}, "seconds_by_phase": {}, "machine": {"ensemble_size": 1}}
        own = {"identity": run_folder.identity, "pid": os.getpid(), "best": best, **empty}
        result = {"status": "finished", **own, **dict.fromkeys(("steps", "seconds", "tokens_per_second"), 0)}
        run_folder.finish(result)
        return result

    fit_module.fit = trained  # type: ignore[assignment]
    told.put(execute(cfg, folder)["pid"])


def test_two_hundred_simultaneous_starts_of_one_run_leave_one_result(little: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    cfg = compose(*own(little))
    processes = [context.Process(target=start, args=(cfg, tmp_path / "run", told)) for _ in range(200)]
    for process in processes:
        process.start()
    pids = [told.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} == {0}
    (trained,) = (tmp_path / "run" / "trained").read_text().split()
    assert set(pids) == {int(trained)} == {read_result(tmp_path / "run")["pid"]}
    left = {"config.yaml", "result.json", "run.json", "run.lock", "trained"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == left
    assert json.loads((tmp_path / "run" / "run.json").read_text())["pid"] == int(trained)


def test_a_run_of_a_sweep_steps_aside_for_another_process(little: Path, tmp_path: Path) -> None:
    cfg = compose(*own(little), *LM)
    with runs.lock(tmp_path / "run", wait=False):
        assert runs.state(tmp_path / "run").status == "running"
        with pytest.raises(runs.OccupiedError, match="works in"):
            execute(cfg, tmp_path / "run", launcher="basic")
    assert execute(cfg, tmp_path / "run", launcher="basic")["status"] == "finished"


def test_what_does_not_decide_a_run_is_not_in_its_identity() -> None:
    def fingerprint(*overrides: str, sha: str = "0" * 64, classes: tuple[str, ...] = ("a", "b")) -> str:
        return identity.fingerprint(OmegaConf.to_container(compose(*overrides), resolve=True), sha, classes)  # type: ignore

    same = fingerprint("model=alibi")
    no_identity = ["machine=cpu", "threads=2", "force=true", "checkpoint_every=3", "keep_every_n_steps=3"]
    for override in (*no_identity, "corpus=sample", "machine=ddp"):
        assert fingerprint("model=alibi", override) == same, override
    assert fingerprint("model=alibi", "dropout=0") == fingerprint("model=alibi", "dropout=0.0") != same
    whole, one = (fingerprint(f"trainer.limit_train_batches={n}") for n in ("1.0", "1"))
    assert whole != one  # all batches, and a single one
    for override in ("seed=1", "model.scale=2", "study=x", "trainer.precision=64-true", "task.name=x"):
        assert fingerprint("model=alibi", override) != same, override
    assert fingerprint("model=alibi", sha="1" * 64) != same != fingerprint("model=alibi", classes=("b", "a"))


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("task", ["classify", "lm", "translate"])
def test_a_run_has_the_fingerprint_of_its_numbers(task: str, protocol: str) -> None:
    """Oracle: the hash of versions before clean translation removed more pairs. Its runs alone have another now.

    Narrow language models have another, too: see test_claims.py.
    """
    config: Any = OmegaConf.to_container(compose(f"task={task}", f"protocol={protocol}", "width=128"), resolve=True)
    content = {"config": identity.identity_settings(before_tokens(config)), "corpus": ["0", []], "numerics": 1}
    before = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    assert (identity.fingerprint(config, "0", []) == before) == ((task, protocol) != ("translate", "clean"))


@pytest.mark.parametrize(
    ("overrides", "is_kept"),
    [
        ("model=rope", True),
        ("model=rope model.scaling=yarn", False),
        ("model=rope model.fraction=0.5", False),
        ("model=relative", False),  # starts otherwise
        ("model=relative recipe=xavier", True),
    ],
)
def test_options_that_are_new_change_no_fingerprint_by_their_defaults(overrides: str, is_kept: bool) -> None:
    """Oracle: the hash of version 0.2, whose RoPE had one option."""
    config: Any = OmegaConf.to_container(compose(*overrides.split()), resolve=True)
    plain = before_tokens(config)
    plain |= {"model": {"name": "rope", "base": 10000.0}} if "rope" in overrides else {}
    content = {"config": identity.identity_settings(plain), "corpus": ["0", []], "numerics": 1}
    before = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    assert (identity.fingerprint(config, "0", []) == before) == is_kept


def before_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it was before classifiers and language models had kinds of tokens, and the latter counts."""
    newer = ["tokens", "vocab_size", "min_count", "evaluation_tokens", "documents", "unknown_rate", "noise", "ngram"]
    newer += ["ngram_targets", "ngram_mixture", "balanced", "naive_bayes", "extra_text"]
    newer += ["masked_lm", "pretraining_epochs"]
    newer = {"translate": ["bpe_dropout"], "probe": []}.get(config["task"]["name"], newer)
    config = config | {"protocol": {key: value for key, value in config["protocol"].items() if key != "fold"}}
    return config | {"task": {key: value for key, value in config["task"].items() if key not in newer}}


def deadly(folder: Path, code: str) -> dict[str, str]:
    """Return an environment in which `code` runs once `run`, the module that executes runs, is imported."""
    (folder / "sitecustomize.py").write_text(
        "import threading, time\n"
        "def wrap():\n"
        "    import os, signal, sys\n"
        "    while not hasattr(sys.modules.get('speechformer.training.run'), 'execute'): time.sleep(0.005)\n"
        "    run = sys.modules['speechformer.training.run']\n"
        "    begin = run.RunFolder.begin\n"
        f"{code}"
        "threading.Thread(target=wrap, daemon=True).start()\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_a_worker_killed_before_it_locks_its_run_is_given_up_too(little: Path, tmp_path: Path) -> None:
    """While it reads the corpus, for example."""
    code = "    run.load = lambda config: os.kill(os.getpid(), signal.SIGKILL)\n"
    arguments = [*own(little), *LM, "seed=0,1", "hydra/launcher=joblib", "hydra.sweep.dir=sweep"]
    command = [*TRAIN, "-m", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=deadly(tmp_path, code), timeout=120
    )
    assert done.returncode == 1
    assert "2 killed" in done.stdout or "2 failed" in done.stdout, done.stdout
    assert "Its process was killed twice, the second time alone" in done.stderr


def test_a_forced_sweep_is_forced_once_also_if_a_worker_is_killed(little: Path, sweep: Sweep, tmp_path: Path) -> None:
    """Every run is made again, and only the killed one more than once."""
    assert sweep(*LM, "seed=range(4)", "hydra.sweep.dir=sweep")[0] == 0
    before = {job.name: (runs.read_json(job.folder / "run.json") or {})["since"] for job in jobs(tmp_path)}
    code = (
        "    def kill(self, config, threads):\n"
        "        begin(self, config, threads)\n"
        "        if config['seed'] == 1 and not os.path.exists('killed'):\n"
        "            open('killed', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "    run.RunFolder.begin = kill\n"
    )
    arguments = [*own(little), *LM, "seed=range(4)", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    forced = [*TRAIN, "-m", *arguments, "hydra.sweep.dir=sweep", "force=true"]
    done = subprocess.run(forced, cwd=tmp_path, capture_output=True, text=True, env=deadly(tmp_path, code))
    assert done.returncode == 0, done.stderr
    after = {job.name: (runs.read_json(job.folder / "run.json") or {})["since"] for job in jobs(tmp_path)}
    assert all(after[name] > before[name] for name in before)
    assert (tmp_path / "killed").exists()


def jobs(tmp_path: Path) -> list[Any]:
    return sweeps.jobs_of(tmp_path / "sweep")


def test_a_sweep_waits_for_what_another_process_works_on(sweep: Sweep, little: Path, tmp_path: Path) -> None:
    """And finishes it, if that process dies."""
    assert sweep(*LM, "seed=0", "hydra.sweep.dir=sweep")[0] == 0
    (folder,) = (job.folder for job in jobs(tmp_path))
    (folder / "result.json").unlink()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, pathlib; from speechformer.runs import folder as runs\n"
            "with runs.lock(pathlib.Path(sys.argv[1]), wait=False): print('held', flush=True); time.sleep(4)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    code, out, _ = sweep(*LM, "seed=0", "hydra.sweep.dir=sweep")
    assert code == 0 and "Left to another process" in out and "Waiting for 1 runs" in out
    assert "Sweep of 1 runs: 1 finished." in out
    holder.wait()


@pytest.mark.parametrize("many", [[], ["-m"]], ids=["run", "sweep"])
def test_a_terminated_command_says_so_and_goes_on_later(many: list[str], little: Path, tmp_path: Path) -> None:
    arguments = [
        *many,
        *own(little),
        "task=lm",
        "trainer.max_steps=100000",
        "eval_interval=10000",
        "checkpoint_every=5",
    ]
    place = ["hydra.run.dir=run", "hydra.sweep.dir=run", "hydra.sweep.subdir=one"]
    process = subprocess.Popen([*TRAIN, *arguments, *place], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.rglob("last.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.strip().splitlines()[-1].startswith("Terminated; the same command resumes")
    folder = tmp_path / "run" / "one" if many else tmp_path / "run"
    assert runs.state(folder).status == "interrupted"
