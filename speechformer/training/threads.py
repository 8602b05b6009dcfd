"""The number of CPU threads of a run whose config leaves it open.

All cores are fastest on an idle machine. Beside other processes, or for a small model on many cores, threads mostly
wait for each other, and fewer are many times faster. So a run rehearses: it computes the loss and the gradients of a
batch with all threads, half of them and so on, and trains with the fastest number. A rehearsal leaves no trace in the
run. Unless the number changes during training, the result is to the bit that of a run with `threads=` this number.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.config import uses_several_devices
from speechformer.runs.folder import RunFolder
from speechformer.training import devices

MARGIN = 1.2  # how many times as fast as all threads fewer must be to be taken
SLOWER = 1.3  # how many times as long as before steps must take for another rehearsal
LONG_ENOUGH = 0.03  # seconds of rehearsals that measure a number
WINDOW = 0.5  # seconds of steps that are compared with earlier ones
REST = 50  # times as long as a rehearsal took pass before the next one, unless steps become slower


class ThreadTuner(pl.Callback):
    """Rehearses before the first step, when steps become slower, and now and then while not all threads are in use.

    Args:
        folders: of the runs that train, whose `run.json` names the threads.
        begins: whether to rehearse before the first step; a resumed run begins with the number that it had.

    Attributes: `number`, the threads in use; `changes`, the step and number of each change during training.
    """

    def __init__(self, folders: Sequence[RunFolder], begins: bool) -> None:
        most = devices.all_threads()
        self.numbers = [most >> k for k in range(most.bit_length())]
        self.number, self.folders = torch.get_num_threads(), folders
        self.is_due, self.not_before = begins, 0.0
        self.changes: list[list[int]] = []
        self.expected = float("inf")  # seconds per token; known after the first rehearsal
        self.seconds, self.tokens_before = 0.0, 0  # of the current window

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.strategy.root_device.type != "cpu":
            self.is_due, self.numbers = False, [self.number]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self.is_due and now >= self.not_before:
            self.choose(trainer, pl_module, batch, batch_idx)
            self.not_before = time.perf_counter() + REST * (time.perf_counter() - now)
            self.is_due, self.seconds = False, 0.0
        if not self.seconds:
            self.tokens_before = int(pl_module.tokens.sum())
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds += time.perf_counter() - self.began
        if self.seconds < WINDOW:
            return
        per_token = self.seconds / max(1, int(pl_module.tokens.sum()) - self.tokens_before)
        if per_token > SLOWER * self.expected:  # without a rest: another one needs steps that are slower still
            self.is_due, self.not_before, self.expected = True, 0.0, per_token
        if self.number < self.numbers[0] or (len(self.numbers) > 1 and math.isinf(self.expected)):
            self.is_due = True
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"changes": self.changes} if self.changes else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.changes = list(state_dict["changes"])

    def choose(self, trainer: pl.Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        """Rehearse, and take the fastest number: all threads, unless fewer are faster by a margin."""
        seconds: dict[int, float] = {}
        with without_trace(task):
            before = int(task.tokens.sum())
            self.rehearse(trainer, task, batch, batch_idx)  # memory is allocated, kernels are prepared
            tokens = max(1, int(task.tokens.sum()) - before)
            for number in self.numbers:
                torch.set_num_threads(number)
                times: list[float] = []
                while not is_enough(times):
                    times.append(self.rehearse(trainer, task, batch, batch_idx))
                seconds[number] = sum(times) / len(times)
                if seconds[number] > 2 * min(seconds.values()):
                    break  # even fewer would be slower still
        best = min(seconds, key=seconds.__getitem__)
        number = best if MARGIN * seconds[best] < seconds[self.numbers[0]] else self.numbers[0]
        torch.set_num_threads(number)
        if number != self.number or not math.isfinite(self.expected):
            self.expected = SLOWER * seconds[number] / tokens  # a step does more than a rehearsal
        if number != self.number:
            console.say(f"Threads: {number}, now faster than {self.number}; threads=N fixes the number.")
            self.changes += [[trainer.global_step, number]] if trainer.global_step else []
            self.number = number
            for folder in self.folders:
                folder.owner["threads"] = number

    def rehearse(self, trainer: pl.Trainer, task: Any, batch: Any, batch_idx: int) -> float:
        """Compute the loss and the gradients of a batch; return the seconds that it took."""
        started = time.perf_counter()
        with trainer.precision_plugin.train_step_context():
            loss = task.training_step(batch, batch_idx)
        parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return time.perf_counter() - started


def is_enough(times: Sequence[float]) -> bool:
    """Return whether the mean of some times, in seconds, tells how long they take; if they differ, it needs more."""
    differ = len(times) < 3 or max(times[1:]) > SLOWER * min(times[1:])  # the first prepares the threads
    return sum(times) > (10 * LONG_ENOUGH if differ else LONG_ENOUGH)


def tuners(config: dict[str, Any], folders: Sequence[RunFolder]) -> list[pl.Callback]:
    """Return the callback of a run whose number of threads neither the config nor a launcher decides, in a list.

    Compiled code has the number built in, and on several devices each process has its share.
    """
    several = uses_several_devices(config)
    if config["threads"] or devices.share_of_threads() or config["compile"] is not None or several:
        return []
    return [ThreadTuner(folders, begins=not folders[0].previous)] if devices.all_threads() > 1 else []


@contextlib.contextmanager
def without_trace(module: Any) -> Iterator[None]:
    """Restore the random states and buffers of a task, or of an ensemble's tasks, and record none of their losses."""
    tasks = getattr(module, "tasks", [module])
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    all_generators = {torch.default_generator, *(task.generator for task in tasks)}
    generators = [(generator, generator.get_state()) for generator in all_generators]
    for task in tasks:
        task.rehearses = True
    try:
        yield
    finally:
        for task in tasks:
            task.rehearses = False
        for generator, state in generators:
            generator.set_state(state)
        for buffer, content in buffers:
            buffer.copy_(content)
