"""Callbacks of every training: the phase timer and the progress bar."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from tqdm import tqdm

from speechformer import console
from speechformer.runs.folder import RunFolder

BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
OnEvaluation = Callable[[int, dict[str, float], str], None]  # of the step, metrics, and the name of the main one
PROGRESS_EVERY = 5  # seconds between updates of run.json


class NoProfiler(PassThroughProfiler):
    """A profiler that costs nothing: Lightning enters its profiler a hundred times in a step."""

    NOTHING = contextlib.nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.NOTHING


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

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.enter("training")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stepped = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.interrupted = self.phase
        self.enter("evaluation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.enter(self.interrupted)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def state_dict(self) -> dict[str, Any]:
        self.enter(self.phase)
        return dict(self.seconds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for phase, seconds in state_dict.items():
            self.seconds[phase] += seconds


class Progress(pl.Callback):
    """A progress bar on stderr, a line on stdout for each evaluation, and the step in the run's `run.json`."""

    def __init__(self, folder: RunFolder, on_evaluation: OnEvaluation | None = None) -> None:
        self.folder, self.on_evaluation = folder, on_evaluation
        self.reported_at = 0.0
        self.bar: tqdm | None = None
        self.steps: int | None = None  # of the whole run
        self.columns: list[str] = []

    def report(self, **progress: Any) -> None:
        """Write how far the run is into its `run.json`."""
        self.folder.report_progress(**progress)

    def loss_of(self, outputs: Any) -> float:
        """Return the loss of a training step."""
        return float(outputs["loss"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        warmup = pl_module.recipe["warmup_steps"]
        if warmup >= total and trainer.is_global_zero:
            console.say(
                f"recipe.warmup_steps={warmup} is at least the run's {int(total)} steps, so the learning rate never "
                "reaches its peak. Set recipe.warmup_steps lower or trainer.max_epochs higher."
            )
        self.steps = int(total) if math.isfinite(total) else None
        # disable=None: no bar where stderr is a file, in which it would be a thousand lines
        self.bar = tqdm(
            total=self.steps,
            initial=trainer.global_step,
            desc="Training",
            bar_format=BAR,
            disable=None if trainer.is_global_zero else True,
            leave=False,
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.folder.discard_replaced()
        now = time.monotonic()
        if now - self.reported_at > PROGRESS_EVERY and trainer.is_global_zero:
            self.reported_at = now
            with contextlib.suppress(OSError):  # a lost update does not matter
                self.report(step=trainer.global_step, steps=self.steps)
        if self.bar is None or self.bar.disable:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.bar.set_postfix_str(f"loss {self.loss_of(outputs):.3f}", refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        measured = pl_module.compute_metrics()
        metrics = pl_module.progress_columns(measured)
        cells = (console.format_metric(name, value).rjust(len(name)) for name, value in metrics.items())
        with tqdm.external_write_mode():  # above the bar
            if list(metrics) != self.columns:
                self.columns = list(metrics)
                console.say("   step  " + "  ".join(self.columns))
            console.say(f"{trainer.global_step:7d}  " + "  ".join(cells))
        if self.on_evaluation is not None:
            self.on_evaluation(trainer.global_step, measured, pl_module.metric_name("validation"))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            last = self.folder.path / "last.ckpt"
            then = f"resumes from {last}" if last.exists() else "starts again: no checkpoint yet"
            console.say(f"Interrupted at step {trainer.global_step}; the same command {then}.")
