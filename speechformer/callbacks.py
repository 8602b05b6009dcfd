"""What watches a training from outside: the clock, the progress bar and the lines above it."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

from speechformer import screen

BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"


class Stopwatch(pl.Callback):
    """How long evaluation took, and at which step the last one was.

    Attributes: `seconds`, `evaluated_at` (None before the first).
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.started = 0.0
        self.evaluated_at: int | None = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds += time.perf_counter() - self.started
        self.evaluated_at = trainer.global_step

    on_test_start, on_test_end = on_validation_start, on_validation_end


class Progress(pl.Callback):
    """One bar over the whole run, on stderr; above it, on stdout, one line for each evaluation."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.columns: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        # disable=None: no bar where stderr is a file, where it would be a thousand lines
        self.bar = tqdm(
            total=int(total) if math.isfinite(total) else None,
            initial=trainer.global_step,
            desc="Training",
            bar_format=BAR,
            disable=None,
            leave=False,
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.bar is None or self.bar.disable:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.bar.set_postfix_str(f"loss {float(outputs['loss']):.3f}", refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = pl_module.figures()  # type: ignore[operator]
        hidden = {"test_accuracy_unseen"} if "test_accuracy_seen" not in figures else set()
        figures = {name: value for name, value in figures.items() if "sliding" not in name and name not in hidden}
        if list(figures) != self.columns:
            self.columns = list(figures)
            self.say("   step  " + "  ".join(self.columns))
        cells = (screen.figure(name, value).rjust(len(name)) for name, value in figures.items())
        self.say(f"{trainer.global_step:7d}  " + "  ".join(cells))

    @staticmethod
    def say(line: str) -> None:
        with tqdm.external_write_mode():  # above the bar
            screen.say(line)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        if isinstance(exception, KeyboardInterrupt):
            screen.say(f"Interrupted at step {trainer.global_step}; the folder has no result.")
