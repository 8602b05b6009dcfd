"""Time what a run costs besides its training steps, as a user starts it: in a process of its own, on the corpus here.

    a training step   of `speechformer.train`, with logging and checkpoints, against a loop of forward, backward and
                      update alone, in this process
    start-up          the command without its training and evaluation, and `--help`, against importing torch and
                      lightning alone
    a whole command   15 epochs of the classifier, and 500 steps of the language model, with all evaluations

It takes about 5 minutes on two cores.

    python benchmarks/runs.py --output FOLDER
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import TASKS, Row, main

EXPERIMENTS = {"classify": "singhal_table1", "lm": "singhal_table2"}
STEPS = 300
IMPORTS = "import torch, lightning.pytorch"


def time_command(*arguments: str) -> float:
    """Return the seconds of a Python command, whose errors go to the console."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_run(*overrides: str) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a training command, and the result that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = time_command("-m", "speechformer.train", *overrides, f"hydra.run.dir={folder}/run")
        return seconds, json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))


def time_plain_loop(name: str) -> float:
    """Return the seconds of a training step of the same run in a plain loop."""
    import torch
    from workloads import build_task

    task, data = build_task(name, {})
    optimizer = torch.optim.Adam(task.cpu().parameters(), lr=1e-3, fused=True)
    batches = itertools.chain.from_iterable(data.train_dataloader() for _ in itertools.count())
    started = time.perf_counter()
    for batch in itertools.islice(batches, STEPS):
        optimizer.zero_grad()
        task.training_loss(batch).backward()
        optimizer.step()
    return (time.perf_counter() - started) / STEPS


def measure_runs(rounds: int) -> Iterator[Row]:
    """Measure runs of both tasks and plain loops in turns, then one whole command of each."""
    imports, steps_alone = "importing torch and lightning", ["trainer.max_epochs=-1", f"eval_interval={10**9}"]
    for task, name in TASKS.items():
        overrides = [f"task={task}", "machine=cpu", "vocab_size=5760", f"trainer.max_steps={STEPS}", *steps_alone]
        steps: dict[str, list[float]] = {"speechformer": [], "plain loop": []}
        starts: dict[str, list[float]] = {"speechformer": [], imports: []}
        for _ in range(rounds):
            seconds, result = time_run(*overrides)
            phases = result["seconds_by_phase"]
            steps["speechformer"].append(phases["training"] / STEPS)
            steps["plain loop"].append(time_plain_loop(task))
            starts["speechformer"].append(seconds - phases["training"] - phases["evaluation"])
            starts[imports].append(time_command("-c", IMPORTS))
        yield Row("a training step", name, steps)
        yield Row("start-up", f"{name}, without training and evaluation", starts)
    shown = [time_command("-m", "speechformer.train", "--help") for _ in range(rounds)]
    yield Row("start-up", "`python -m speechformer.train --help`", {"speechformer": shown})
    for task, experiment in EXPERIMENTS.items():
        seconds, _ = time_run(f"experiment={experiment}")
        yield Row("a whole command", f"{TASKS[task]}, `experiment={experiment}`", {"speechformer": [seconds]})


if __name__ == "__main__":
    main(__doc__, [measure_runs], {}, rounds=5)
