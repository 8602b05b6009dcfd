"""Benchmark whole runs, as a user starts them, in temporary folders on the corpus that is installed."""

from __future__ import annotations

import contextlib
import functools
import io
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from speechformer.bench.timing import Comparison, device, medians, synchronize
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.runs.folder import read_result
from speechformer.tasks.registry import TASKS, build_data
from speechformer.training.devices import all_threads
from speechformer.training.fit_ensemble import execute_ensemble
from speechformer.training.run import execute
from speechformer.training.runtime import silence_libraries, tune_memory

# A run that prints the time of its first training step and exits there
FIRST_STEP = """
import os, sys, time
from speechformer.training import runtime
from speechformer.train import main
def report(self, trainer, task):
    print("BEGUN", time.time(), flush=True)
    os._exit(0)
tune_memory = runtime.tune_memory
def patch_callback():
    tune_memory()
    from speechformer.training.callbacks import PhaseTimer
    PhaseTimer.on_train_start = report
runtime.tune_memory = patch_callback
sys.argv = ["train", *sys.argv[1:]]
main()
"""
IMPORTS = {
    "python": "",
    "torch": "import torch",
    "torch, lightning": "import torch, lightning.pytorch",
    "all that a run imports": "import speechformer.training.fit",
}


def prepare() -> None:
    """Set up the process as the command for training does."""
    tune_memory()
    silence_libraries()
    warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # of torch's modules with norm_first


def data_of(config: dict[str, Any]) -> Any:
    """Build the LightningDataModule of a config."""
    return build_data(config, load(config))


def task_of(config: dict[str, Any], data: Any) -> Any:
    """Build the LightningModule of a config with seed 0, on the device."""
    torch.manual_seed(0)
    return TASKS[config["task"]["name"]].from_config(config, data).to(device())


def quietly(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and discard its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return work(*arguments)


def overrides_of(task: str, steps: int) -> list[str]:
    """Return the overrides of a run that evaluates only at its end."""
    return [f"task={task}", f"trainer.max_steps={steps}", "trainer.max_epochs=-1", f"eval_interval={10**9}"]


class Laps:
    """A clock for training steps, which skips the first ones; after the last, `seconds` is the mean per step.

    `begin` is called when the clock starts.
    """

    def __init__(self, steps: int, skipped: int = 20, begin: Callable[[], object] = lambda: None) -> None:
        self.steps, self.skipped, self.begin, self.done, self.seconds = steps, skipped, begin, 0, 0.0

    def lap(self) -> None:
        """Count a step that has ended."""
        self.done += 1
        if self.done in (self.skipped, self.steps):
            synchronize()
            if self.done == self.skipped:
                self.begin()
            begun, self.seconds = self.seconds, time.perf_counter()
            if self.done == self.steps:
                self.seconds = (self.seconds - begun) / (self.steps - self.skipped)


def bench_loop(rounds: int, steps: int = 120) -> list[Comparison]:
    """Compare a step in the Trainer, with all that a run does, to a loop of forward, backward and update alone."""
    rows = []
    for task in ("classify", "lm"):
        cfg = compose(overrides_of(task, steps))
        config = as_plain(cfg)
        sides = {
            "Trainer": functools.partial(seconds_in_trainer, cfg, steps),
            "bare loop": functools.partial(bare_loop, config, data_of(config), steps),
        }
        rows.append(Comparison("the Trainer's loop", task, "step", medians(sides, rounds)))
    return rows


def seconds_in_trainer(cfg: Any, steps: int) -> float:
    """Measure the seconds per step of a run."""
    return trainer_loop(cfg, Laps(steps))[0]


def trainer_loop(cfg: Any, laps: Laps) -> tuple[float, dict[str, Any]]:
    """Return the seconds per step of a run, measured with `laps`, and its result."""
    from speechformer.training.callbacks import Progress

    original = Progress.on_train_batch_end

    def on_train_batch_end(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        laps.lap()

    patch = mock.patch.object(Progress, "on_train_batch_end", on_train_batch_end)
    with patch, tempfile.TemporaryDirectory() as folder:
        result = quietly(execute, cfg, Path(folder) / "run")
    return laps.seconds, result


def bare_loop(config: dict[str, Any], data: Any, steps: int) -> float:
    """Measure the seconds per step without a Trainer."""
    task = task_of(config, data)
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


def bench_ensemble(members: int, alone: int, steps: int = 60) -> list[Comparison]:
    """Compare an ensemble to the first `alone` of its runs in sequence: the training alone, and the whole runs."""
    rows = []
    for task in ("classify", "lm"):
        cfgs = [compose([*overrides_of(task, steps), f"seed={seed}"]) for seed in range(members)]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            quietly(execute, cfgs[0], folder / "first")  # warm-up
            begun = time.perf_counter()
            quietly(execute_ensemble, [(cfg, folder / f"member{k}", []) for k, cfg in enumerate(cfgs)])
            between = time.perf_counter()
            results = [quietly(execute, cfg, folder / f"alone{k}") for k, cfg in enumerate(cfgs[:alone])]
            ended = time.perf_counter()
            whole = {"ensemble": (between - begun) / members, "sequential": (ended - between) / len(results)}
            member = read_result(folder / "member0")
        training = {
            "ensemble": member["seconds_by_phase"]["training"] / (members * steps),
            "sequential": sum(own["seconds_by_phase"]["training"] for own in results) / (len(results) * steps),
        }
        what = f"{task}, {members} seeds"
        rows.append(Comparison("ensemble", f"{what}, training", "step of a run", training))
        rows.append(Comparison("ensemble", f"{what}, whole runs", "run", whole))
    return rows


def seconds_of_command(*arguments: str) -> float:
    """Measure the seconds of a training command."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "speechformer.train", *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def seconds_until_printed(code: str, *arguments: str) -> float:
    """Measure the seconds from starting a process to the time that its code prints."""
    started = time.time()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("BEGUN")]
    return float(line.split()[1]) - started


def bench_startup(rounds: int) -> list[Comparison]:
    """Compare the command up to its first training step to importing torch and lightning alone."""
    imports = {
        name: functools.partial(seconds_until_printed, f"{code}\nimport time; print('BEGUN', time.time())")
        for name, code in IMPORTS.items()
    }
    rows = []
    for task in ("classify", "lm"):
        ours = functools.partial(seconds_to_first_step, task)
        sides = {"command to first step": ours, "bare imports": imports["torch, lightning"]}
        rows.append(Comparison("start-up", task, "start", medians(sides, rounds)))
    rows[0].more["phases"] = {name: seconds() for name, seconds in imports.items()}
    return rows


def seconds_to_first_step(task: str) -> float:
    """Measure the seconds from the command to its first training step."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds_until_printed(FIRST_STEP, f"task={task}", f"hydra.run.dir={folder}/run")


def bench_sweep(runs: Sequence[int] = (2, 8)) -> list[Comparison]:
    """Compare what a run adds to a sweep to its training, from two sweeps of different length."""
    whole, trained = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in runs:
            overrides = [*overrides_of("lm", 20), f"seed=range({number})", f"hydra.sweep.dir={folder}/{number}"]
            whole.append(seconds_of_command("-m", *overrides))
            results = [read_result(path.parent) for path in Path(folder).glob(f"{number}/*/result.json")]
            phases = [result["seconds_by_phase"] for result in results]
            trained.append(sum(sum(seconds.values()) - seconds["start-up"] for seconds in phases))
    overhead = (whole[1] - whole[0] - trained[1] + trained[0]) / (runs[1] - runs[0])
    seconds = {"overhead": overhead, "training, evaluation": trained[1] / runs[1]}
    return [Comparison("a run of a sweep", "lm, 20 steps", "run", seconds)]


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep processes busy, each with one core."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def bench_threads(loops: Sequence[int] = (0, 1, 2, 4)) -> list[Comparison]:
    """Compare the training of a run with all threads to runs with a fixed number, beside busy processes.

    In the last row a process becomes busy after half of the steps; the other half is measured.
    """
    rows, most = [], all_threads()
    for task, steps in (("classify", 600), ("lm", 250)):
        for number, middle in [*((number, False) for number in loops), (1, True)]:
            seconds = {}
            for threads in ("null", *(str(most >> k) for k in range(most.bit_length()))):
                cfg = compose([*overrides_of(task, 2 * steps if middle else steps), f"threads={threads}"])
                name = "own choice" if threads == "null" else f"threads={threads}"
                seconds[name] = seconds_beside(cfg, number, steps, middle)
            what = f"{task}, {number} busy" + (", from the middle on" if middle else "")
            rows.append(Comparison("threads", what, "step", seconds))
    return rows


def seconds_beside(cfg: Any, number: int, steps: int, middle: bool) -> float:
    """Measure the seconds per step of a run beside busy processes, or of its second half if they begin then."""
    with contextlib.ExitStack() as stack:
        if middle:
            laps = Laps(2 * steps, steps, lambda: stack.enter_context(busy_loops(number)))
            return trainer_loop(cfg, laps)[0]
        stack.enter_context(busy_loops(number))
        return float(trainer_loop(cfg, Laps(steps))[1]["seconds_by_phase"]["training"] / steps)


def bench_whole() -> list[Comparison]:
    """Measure the command up to its last line.

    The runs are 500 steps of the language model with all evaluations, and 15 epochs of the classifier.
    """
    rows = []
    for task, experiment in (("lm", "singhal_table2"), ("classify", "singhal_table1")):
        with tempfile.TemporaryDirectory() as folder:
            ours = seconds_of_command(f"experiment={experiment}", f"hydra.run.dir={folder}/run")
            result = read_result(Path(folder) / "run")
        seconds = {"speechformer": ours}
        more = {key: result[key] for key in ("steps", "seconds_by_phase")} | {"corpus": result["corpus"]["name"]}
        rows.append(Comparison("start to end", f"{task}, experiment={experiment}", "run", seconds, more))
    return rows
