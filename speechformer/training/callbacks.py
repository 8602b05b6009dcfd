"""What accompanies a training: the clock, the record of what was logged, the checkpoints, and the progress bar.

A run that is killed goes on from `last.ckpt` as if nothing had been: everything that later steps or the result depend
on is in that file. Lightning keeps weights, optimiser, schedule and loops in it; the task its random state and curve;
the batches their place; and the classes here what they remember.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from tqdm import tqdm

from speechformer import console
from speechformer.runs import folder as runs

WEIGHTS = "weights"  # the folder of those of the last evaluations, until they are averaged
BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"


class NoProfiler(PassThroughProfiler):
    """Lightning enters its profiler a hundred times in a step; entered and left like this, all of it is free."""

    NOTHING = contextlib.nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.NOTHING


class PhaseTimer(pl.Callback):
    """Where the seconds went, those before an interruption included.

    Attributes: `seconds` by phase: "start-up", "training", "evaluation".
    """

    def __init__(self, started: float) -> None:
        self.seconds = {"start-up": 0.0, "training": 0.0, "evaluation": 0.0}
        self.phase, self.since = "start-up", started
        self.interrupted = "training"

    def turn(self, phase: str) -> None:
        """From now on it is `phase`."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turn("training")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.interrupted = self.phase
        self.turn("evaluation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turn(self.interrupted)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def state_dict(self) -> dict[str, Any]:
        self.turn(self.phase)
        return dict(self.seconds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for phase, seconds in state_dict.items():
            self.seconds[phase] += seconds


class ReplayLogger(pl.Callback, Logger):
    """Hands what is logged to the loggers, and keeps it, so that a run that goes on writes their files anew: without
    what was logged after the checkpoint, which will be logged again, and with what they had not yet written."""

    def __init__(self, loggers: list[Logger]) -> None:
        super().__init__()
        self.loggers = loggers
        self.rows: list[dict[str, float]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.pictures: list[tuple[str, bytes, int]] = []

    name, version = "record", ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {**metrics, "step": int(step or 0)}
        self.rows.append(row)
        self.write(row)

    def write(self, row: dict[str, float]) -> None:
        figures = {name: value for name, value in row.items() if name != "step"}
        for logger in self.loggers:
            logger.log_metrics(figures, int(row["step"]))

    def log_text(self, name: str, text: str, step: int) -> None:
        """A text for TensorBoard, in Markdown."""
        self.texts.append((name, text, step))
        self.write_text(name, text, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        for logger in self.tensorboards():
            logger.experiment.add_text(name, text, step)

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """A picture for TensorBoard."""
        png = io.BytesIO()
        picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(
            png, "PNG", compress_level=3
        )  # a fifth of the time
        self.pictures.append((name, png.getvalue(), step))
        self.write_picture(*self.pictures[-1])

    def write_picture(self, name: str, png: bytes, step: int) -> None:
        # not by `add_image`, which would take it apart and compress it again
        width, height = Image.open(io.BytesIO(png)).size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        for logger in self.tensorboards():
            logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def tensorboards(self) -> list[TensorBoardLogger]:
        return [logger for logger in self.loggers if isinstance(logger, TensorBoardLogger)]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are logged once, with the final figures."""

    def save(self) -> None:
        for logger in self.loggers:
            logger.save()

    def finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "texts": self.texts, "pictures": self.pictures}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.texts = list(state_dict["rows"]), list(state_dict["texts"])
        self.pictures = list(state_dict["pictures"])
        for row in self.rows:
            self.write(row)
        for text in self.texts:
            self.write_text(*text)
        for picture in self.pictures:
            self.write_picture(*picture)


class Checkpoints(Checkpoint):
    """`last.ckpt` every so many optimiser steps, after the evaluation if one falls on that step; `best.ckpt`, weights
    alone, at each evaluation that is the best so far; `weights/<step>.ckpt` at the last few evaluations, to average.

    Args:
        monitor: the figure that says which is best.
        every: steps between writes of `last.ckpt`.
        keep: how many of the last evaluations' weights to keep.

    Attributes: `best` (the figure) and `best_step`, None before the first evaluation.
    """

    def __init__(self, directory: Path, monitor: str, every: int, keep: int = 0) -> None:
        self.directory, self.monitor, self.every, self.keep = directory, monitor, every, keep
        self.best: float | None = None
        self.best_step: int | None = None
        self.saved_at = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # At the end of an epoch or before an evaluation a checkpoint would be of a state between two things.
        last_of_epoch = batch_idx + 1 == trainer.num_training_batches
        if trainer.check_val_every_n_epoch is None:
            evaluated_now = (trainer.fit_loop.total_batch_idx + 1) % trainer.val_check_batch == 0  # type: ignore
        else:
            evaluated_now = last_of_epoch
        if not evaluated_now and not last_of_epoch:
            self.save_last(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # of several devices all go by the first one's figure: theirs may differ in the last bits
        figure = trainer.strategy.broadcast(pl_module.metrics()[self.monitor])  # type: ignore[operator]
        if math.isfinite(figure) and (self.best is None or pl_module.is_better(figure, self.best)):  # type: ignore
            self.best, self.best_step = figure, trainer.global_step
            trainer.save_checkpoint(self.directory / "best.ckpt", weights_only=True)
        if self.keep:
            # by the curve, so that a run that goes on keeps what it would have kept
            first = min(int(point["step"]) for point in pl_module.curve[-self.keep :])  # type: ignore
            (self.directory / WEIGHTS).mkdir(exist_ok=True)
            trainer.save_checkpoint(self.directory / WEIGHTS / f"{trainer.global_step}.ckpt", weights_only=True)
            if trainer.is_global_zero:
                for file in (self.directory / WEIGHTS).glob("*.ckpt"):
                    if int(file.stem) < first:
                        file.unlink(missing_ok=True)
        if trainer.state.fn == "fit":
            self.save_last(trainer)

    def save_last(self, trainer: pl.Trainer) -> None:
        """Write `last.ckpt` if a multiple of `every` steps was passed since the last time, and no gradients are being
        gathered for the next one: those are not in it."""
        step, batches = trainer.global_step, trainer.fit_loop.batch_idx + 1
        stepped = batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches
        if stepped and step // self.every > self.saved_at // self.every:
            self.saved_at = step
            trainer.save_checkpoint(self.directory / "last.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "saved_at": self.saved_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self.saved_at = state_dict["saved_at"]


def average(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights of some checkpoints, as a `state_dict`. Vaswani et al. 2017, section 6.1."""
    states = [torch.load(file, map_location="cpu", weights_only=True)["state_dict"] for file in files]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(value.dtype)
        for name, value in states[0].items()
    }


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are written beside their place and then renamed: the last good one always stands."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # torch says a full disk as a RuntimeError
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror or str(error), str(path)) from error
            raise OSError(
                errno.EIO, "the file could not be written to its end; is the disk full?", str(path)
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> Any:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


class Progress(pl.Callback):
    """One bar over the whole run, on stderr; above it, on stdout, one line for each evaluation. For onlookers
    (`python -m speechformer.status`) it says in `run.json` now and then how far the run is.

    Args:
        claims: the folder and the content of `run.json`, of each run that is trained.
    """

    def __init__(self, claims: Sequence[tuple[Path, dict[str, Any]]]) -> None:
        self.claims = list(claims)
        self.said = 0.0
        self.bar: tqdm | None = None
        self.columns: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        warmup = pl_module.recipe["warmup_steps"]  # type: ignore[index]
        if warmup >= total and trainer.is_global_zero:
            console.say(
                f"The warm-up takes {warmup} steps and the run has {int(total)}, so the learning rate never reaches "
                "its peak; set recipe.warmup_steps lower or trainer.max_epochs higher."
            )
        # disable=None: no bar where stderr is a file, where it would be a thousand lines
        self.bar = tqdm(
            total=int(total) if math.isfinite(total) else None,
            initial=trainer.global_step,
            desc="Training",
            bar_format=BAR,
            disable=None if trainer.is_global_zero else True,
            leave=False,
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self.said > 5 and trainer.is_global_zero:
            self.said, total = now, trainer.estimated_stepping_batches
            so_far = {"step": trainer.global_step, "steps": int(total) if math.isfinite(total) else None}
            with contextlib.suppress(OSError):  # it is a courtesy
                for directory, claim in self.claims:
                    runs.write_json(directory / runs.OWNER, {**claim, **so_far})
        if self.bar is None or self.bar.disable:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.bar.set_postfix_str(f"loss {float(outputs['loss']) / len(self.claims):.3f}", refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        figures = pl_module.progress_columns(pl_module.metrics())  # type: ignore[operator]
        if list(figures) != self.columns:
            self.columns = list(figures)
            self.say("   step  " + "  ".join(self.columns))
        cells = (console.format_metric(name, value).rjust(len(name)) for name, value in figures.items())
        self.say(f"{trainer.global_step:7d}  " + "  ".join(cells))

    @staticmethod
    def say(line: str) -> None:
        with tqdm.external_write_mode():  # above the bar
            console.say(line)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            directory = self.claims[0][0]
            kept = (directory / "last.ckpt").exists()
            then = f"goes on from {directory}" if kept else "begins anew: there is no checkpoint yet"
            console.say(f"Interrupted at step {trainer.global_step}; the same command {then}.")
