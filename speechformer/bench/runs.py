"""Whole runs: the Trainer's loop against a bare one, runs as one against runs one after another, and what a run costs
beside its training: start-up, a place in a sweep; from command to last line.

Each is a run as a user starts it, on the corpus that is found, in a folder for temporary files.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speechformer.bench.timing import Comparison, device, synchronize
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.tasks.registry import TASKS
from speechformer.training.fit import build_data, fit, fit_ensemble

COMMAND = [sys.executable, "-m", "speechformer.train"]
NEVER = 10**9  # steps between evaluations
# seconds, start to end, of a course repository of the same kind on a machine with two cores
COURSE = {"lm": 110.0, "classify": 120.0}
# Says when the first training step begins, and ends there
FIRST_STEP = """
import os, sys, time
from speechformer.training import fit
from speechformer.train import main
def told(self, trainer, task):
    print("BEGUN", time.time(), flush=True)
    os._exit(0)
imports = fit.tune_memory
def imports_and_listens():
    imports()
    from speechformer.training.callbacks import PhaseTimer
    PhaseTimer.on_train_start = told
fit.tune_memory = imports_and_listens
sys.argv = ["train", *sys.argv[1:]]
main()
"""


def quietly(work: Any, *arguments: Any) -> Any:
    """Do something without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return work(*arguments)


def words_of(task: str, steps: int) -> list[str]:
    """A run of so many steps that is evaluated at its end alone."""
    return [f"task={task}", f"trainer.max_steps={steps}", "trainer.max_epochs=-1", f"eval_interval={NEVER}"]


class Laps:
    """When training steps end: the mean seconds of those between the first few and the last."""

    FIRST = 20

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.moments: list[float] = []

    def lap(self, *_: Any) -> None:
        """A step has ended."""
        self.done += 1
        if self.done in (self.FIRST, self.steps):
            synchronize()
            self.moments.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """For each step."""
        begun, ended = self.moments
        return (ended - begun) / (self.steps - self.FIRST)


def bench_loop(rounds: int, steps: int = 120) -> list[Comparison]:
    """Seconds a step in the Trainer, with all that a run does, against a loop with nothing but forward, backward and
    update over the same model, data and loss."""
    from speechformer.training.callbacks import Progress

    found = []
    for task in ("classify", "lm"):
        config = as_plain(compose(words_of(task, steps)))
        data = build_data(config, load(config))
        seconds: dict[str, list[float]] = {"Trainer": [], "bare loop": []}
        for turn in range(rounds + 1):
            laps, own = Laps(steps), Progress.on_train_batch_end

            def note(self: Any, *given: Any, laps: Laps = laps, own: Any = own) -> None:
                own(self, *given)
                laps.lap()

            Progress.on_train_batch_end = note  # type: ignore[method-assign, assignment]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    quietly(fit, compose(words_of(task, steps)), Path(folder) / "run")
            finally:
                Progress.on_train_batch_end = own  # type: ignore[method-assign]
            bare = bare_loop(config, data, steps)
            if turn:  # the first is slower
                seconds["Trainer"].append(laps.seconds)
                seconds["bare loop"].append(bare)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        found.append(Comparison("the Trainer's loop", task, "step", medians))
    return found


def bare_loop(config: dict[str, Any], data: Any, steps: int) -> float:
    """Seconds a step without a Trainer."""
    torch.manual_seed(0)
    task: Any = TASKS[config["task"]["name"]].from_config(config, data).to(device())
    task.track_loss = lambda loss, batch, batch_idx: loss
    optimizer = torch.optim.Adam(task.model.parameters(), lr=config["recipe"]["lr"], fused=True)
    loader, laps = data.train_dataloader(), Laps(steps)
    while laps.done < steps:
        for batch in loader:
            moved = {name: tensor.to(device()) for name, tensor in batch.items()}
            optimizer.zero_grad()
            task.training_step(moved, laps.done).backward()
            optimizer.step()
            laps.lap()
            if laps.done == steps:
                break
    return laps.seconds


def bench_packed(members: int, steps: int = 60) -> list[Comparison]:
    """Seconds a step and member of runs as one, against the same one after another: of training, and of all."""
    found = []
    for task in ("classify", "lm"):
        jobs = [compose([*words_of(task, steps), f"seed={seed}"]) for seed in range(members)]
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            quietly(fit, jobs[0], place / "first")  # the first is slower
            started = time.perf_counter()
            quietly(fit_ensemble, [(cfg, place / f"one{k}", []) for k, cfg in enumerate(jobs)], "packed")
            whole = [time.perf_counter() - started]
            one = json.loads((place / "one0" / "result.json").read_text(encoding="utf-8"))
            started = time.perf_counter()
            alone = [quietly(fit, cfg, place / f"alone{k}") for k, cfg in enumerate(jobs)]
            whole.append(time.perf_counter() - started)
        trained = [one["seconds_by_phase"]["training"], sum(r["seconds_by_phase"]["training"] for r in alone)]
        for what, (ours, theirs) in (("training", trained), ("whole runs", whole)):
            per = members * steps if what == "training" else members
            seconds = {"as one": ours / per, "one after another": theirs / per}
            unit = "step of a run" if what == "training" else "run"
            found.append(Comparison("runs as one", f"{task}, {members} seeds, {what}", unit, seconds))
    return found


def began(code: str, *arguments: str) -> float:
    """Seconds from starting a process to the time that its code prints."""
    started = time.time()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("BEGUN")]
    return float(line.split()[1]) - started


def bench_startup(rounds: int) -> list[Comparison]:
    """Seconds from the command to the first training step, against importing torch and lightning and no more."""
    bare = "import time, torch, lightning.pytorch; print('BEGUN', time.time())"
    phases = {
        "python": "import time; print('BEGUN', time.time())",
        "torch": "import time, torch; print('BEGUN', time.time())",
        "torch, lightning": bare,
        "all that a run imports": "import time, speechformer.dashboard; print('BEGUN', time.time())",
    }
    found = []
    for task in ("classify", "lm"):
        seconds: dict[str, list[float]] = {"command to first step": [], "bare imports": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(rounds + 1):
                place = f"hydra.run.dir={folder}/{turn}"
                ours, theirs = began(FIRST_STEP, f"task={task}", place), began(bare)
                if turn:  # the first reads files from the disk
                    seconds["command to first step"].append(ours)
                    seconds["bare imports"].append(theirs)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        more = {"phases": {name: began(code) for name, code in phases.items()}} if task == "classify" else {}
        found.append(Comparison("start-up", task, "start", medians, more))
    return found


def bench_sweep(runs: Sequence[int] = (2, 8)) -> list[Comparison]:
    """Seconds that a run adds to a sweep, against those of its training: from two sweeps of different lengths."""
    whole, trained = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in runs:
            words = ["-m", *words_of("lm", 20), f"seed=range({number})", f"hydra.sweep.dir={folder}/{number}"]
            started = time.perf_counter()
            subprocess.run([*COMMAND, *words], check=True, capture_output=True)
            whole.append(time.perf_counter() - started)
            results = [json.loads(path.read_text()) for path in Path(folder, str(number)).glob("*/result.json")]
            trained.append(
                sum(sum(r["seconds_by_phase"].values()) - r["seconds_by_phase"]["start-up"] for r in results)
            )
    more = runs[1] - runs[0]
    seconds = {
        "beside it": (whole[1] - whole[0] - trained[1] + trained[0]) / more,
        "training, evaluation": trained[1] / runs[1],
    }
    return [Comparison("a run of a sweep", "lm, 20 steps", "run", seconds)]


def bench_whole() -> list[Comparison]:
    """Seconds from the command to its last line: 500 steps of the language model with all evaluations, 15 epochs
    of the classifier; against those of a course repository."""
    found = []
    for task, experiment in (("lm", "singhal_table2"), ("classify", "singhal_table1")):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            words = [f"experiment={experiment}", f"hydra.run.dir={folder}/run"]
            subprocess.run([*COMMAND, *words], check=True, capture_output=True)
            seconds = time.perf_counter() - started
            result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
        more = {
            "steps": result["steps"],
            "corpus": result["corpus"]["name"],
            "seconds_by_phase": result["seconds_by_phase"],
        }
        both = {"speechformer": seconds, "a course repository": COURSE[task]}
        found.append(Comparison("start to end", f"{task}, experiment={experiment}", "run", both, more))
    return found
