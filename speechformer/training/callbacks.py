"""What accompanies every training: the phase timer, and progress on the console and in `run.json`.

A training has one run, or the runs of an ensemble.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

from speechformer import console

if TYPE_CHECKING:
    from speechformer.training.results import Run

OnEvaluation = Callable[[int, dict[str, float], str], None]  # of the step, metrics, and the name of the main one
PROGRESS_EVERY = 5  # seconds between updates of run.json


class PhaseTimer(pl.Callback):
    """The seconds spent in each phase, including those before an interruption.

    Attributes: `seconds` by phase: "start-up", "training", "evaluation"; `stepped`, whether a step has been taken.
    """

    def __init__(self, started: float) -> None:
        self.seconds = {"start-up": 0.0, "training": 0.0, "evaluation": 0.0}
        self.phase, self.since = "start-up", started
        self.interrupted = "training"
        self.stepped = False

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter("training")

    def on_train_batch_end(self, *args: Any) -> None:
        self.stepped = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.interrupted = self.phase
        self.enter("evaluation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter(self.interrupted)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def state_dict(self) -> dict[str, Any]:
        self.enter(self.phase)
        return dict(self.seconds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for phase, seconds in state_dict.items():
            self.seconds[phase] += seconds


class Bar(TQDMProgressBar):
    """Lightning's progress bar, with the mean loss of some runs."""

    def __init__(self, runs: int) -> None:
        super().__init__(refresh_rate=10, leave=False)
        self.runs, self.loss = runs, math.nan

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.refresh_rate == 0:
            self.loss = float(outputs["loss"]) / self.runs
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return {"loss": f"{self.loss:.3f}"}


def progress_bars(runs: int) -> list[pl.Callback]:
    """Return a progress bar where somebody sees it; in a file it would be a thousand lines."""
    return [Bar(runs)] if sys.stdout.isatty() else []


class Progress(pl.Callback):
    """A line on stdout for each evaluation, and how far the runs are in their `run.json`."""

    def __init__(self, runs: Sequence[Run], on_evaluation: OnEvaluation | None) -> None:
        self.runs, self.on_evaluation = runs, on_evaluation
        self.reported_at = 0.0
        self.steps: int | None = None  # of the whole run
        self.columns: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total, warmup = trainer.estimated_stepping_batches, self.runs[0].config["recipe"]["warmup_steps"]
        self.steps = int(total) if math.isfinite(total) else None
        if warmup >= total and trainer.is_global_zero:
            console.say(
                f"recipe.warmup_steps={warmup} is at least the run's {self.steps} steps, so the learning rate never "
                "reaches its peak. Set recipe.warmup_steps lower or trainer.max_epochs higher."
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        now = time.monotonic()
        for run in self.runs:
            run.folder.discard_replaced()
        if now - self.reported_at > PROGRESS_EVERY and trainer.is_global_zero:
            self.reported_at = now
            for run in self.runs:
                with contextlib.suppress(OSError):  # a lost update does not matter
                    run.folder.report_progress(step=trainer.global_step, steps=self.steps)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        active = [run.task for run in self.runs if run.task.diverged_at is None]
        shown = [task.view.progress_columns(task.metrics) for task in active]
        names = list(shown[0]) if shown else []
        means = {name: sum(metrics[name] for metrics in shown) / len(shown) for name in names}
        with tqdm.external_write_mode():  # above the bar
            if names != self.columns:
                self.columns = names
                console.say("   step  " + "  ".join(names))
            cells = (console.format_metric(name, value).rjust(len(name)) for name, value in means.items())
            console.say(f"{trainer.global_step:7d}  " + "  ".join(cells))
        if self.on_evaluation is not None:
            task = self.runs[0].task
            self.on_evaluation(trainer.global_step, task.metrics, task.metric_name("validation"))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            last = self.runs[0].folder.path / "last.ckpt"
            then = f"resumes from {last}" if last.exists() else "starts again: no checkpoint yet"
            console.say(f"Interrupted at step {trainer.global_step}; the same command {then}.")
