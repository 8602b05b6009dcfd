"""Checkpoints: when they are written, how they are read.

A run that is killed resumes from `last.ckpt` exactly: the file holds everything that later steps or the result depend
on. Lightning saves weights, optimizer, schedule and loops; the task its random state, curve and the position in the
batches; callbacks and loggers their state.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from speechformer import console
from speechformer.corpora.files import atomic_write
from speechformer.errors import UserError, one_sentence
from speechformer.runs.folder import HISTORY, LAST, PREVIOUS, WEIGHTS
from speechformer.tasks.base import Task
from speechformer.tasks.registry import read_checkpoint


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at an interval, and weights alone: `best.ckpt`, those to average, and those of the history.

    `weights/<step>.ckpt` are averaged at the end and removed; `checkpoints/<step>.ckpt` stay.

    Args:
        monitor: the metric that decides which evaluation is best.
        every: steps between writes of `last.ckpt`.
        keep: how many of the last evaluations' weights to keep.
        keep_every: steps between checkpoints of the history, from step 0 on; None: no history.

    Attributes: `best` (the metric) and `best_step`, None before the first evaluation.
    """

    def __init__(
        self, directory: Path, monitor: str, every: int, keep: int = 0, keep_every: int | None = None
    ) -> None:
        self.directory, self.monitor, self.every, self.keep = directory, monitor, every, keep
        self.keep_every = keep_every
        self.best: float | None = None
        self.best_step: int | None = None
        self.saved_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.save_history(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_stepped(trainer):
            self.save_history(trainer)  # before last.ckpt: a run that resumes there has all of its history
        # at the end of an epoch, or before an evaluation, a checkpoint would hold a state between two others
        ends = batch_idx + 1 == trainer.num_training_batches
        if trainer.check_val_every_n_epoch is None:
            ends |= (trainer.fit_loop.total_batch_idx + 1) % trainer.val_check_batch == 0  # type: ignore[operator]
        if not ends:
            self.save_last(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # every device uses the first one's metric, because the last bits of theirs may differ
        metric = trainer.strategy.broadcast(pl_module.compute_metrics()[self.monitor])
        better = self.best is None or (metric > self.best if pl_module.mode == "max" else metric < self.best)
        better |= pl_module.later_if_equal and metric == self.best
        if math.isfinite(metric) and better:
            self.best, self.best_step = metric, trainer.global_step
            trainer.save_checkpoint(self.directory / "best.ckpt", weights_only=True)
        if self.keep:
            self.save_weights(trainer, pl_module)
        if trainer.state.fn == "fit":
            self.save_last(trainer)

    def save_weights(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the weights of this evaluation, and remove those that are no longer among the last `keep`."""
        # by the curve, so that a resumed run keeps the same files
        first = min(int(point["step"]) for point in pl_module.curve[-self.keep :])
        (self.directory / WEIGHTS).mkdir(exist_ok=True)
        trainer.save_checkpoint(self.directory / WEIGHTS / f"{trainer.global_step}.ckpt", weights_only=True)
        if trainer.is_global_zero:
            for file in (self.directory / WEIGHTS).glob("*.ckpt"):
                if file.stem.isdecimal() and int(file.stem) < first:
                    file.unlink(missing_ok=True)

    def save_history(self, trainer: pl.Trainer) -> None:
        """Write the weights of this step if it is a multiple of `keep_every`. A resumed run writes the same again."""
        if self.keep_every is not None and trainer.global_step % self.keep_every == 0:
            (self.directory / HISTORY).mkdir(exist_ok=True)
            trainer.save_checkpoint(self.directory / HISTORY / f"{trainer.global_step}.ckpt", weights_only=True)

    def save_last(self, trainer: pl.Trainer) -> None:
        """Write `last.ckpt` if a multiple of `every` steps has passed since the last write."""
        step = trainer.global_step
        if is_stepped(trainer) and step // self.every > self.saved_at // self.every:
            self.saved_at = step
            trainer.save_checkpoint(self.directory / LAST)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "saved_at": self.saved_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        if self.best is not None and not (type(self.best) is float and type(self.best_step) is int):
            raise ValueError("its best metric is no number")
        if self.best is not None and not (self.directory / "best.ckpt").is_file():
            raise ValueError("best.ckpt, which belongs to it, is missing")
        self.saved_at = state_dict["saved_at"]


def is_stepped(trainer: pl.Trainer) -> bool:
    """Return whether no gradients are being accumulated, which a checkpoint does not hold."""
    batches = trainer.fit_loop.batch_idx + 1
    return batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are written atomically and read with `weights_only=True`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            with atomic_write(Path(path)) as file:
                torch.save(checkpoint, file)
                if Path(path).name == LAST and Path(path).exists():
                    keep_previous(Path(path))
        except RuntimeError as error:  # torch reports a full disk so
            reason = "the file could not be written to its end, perhaps because the disk is full"
            raise OSError(errno.EIO, reason, str(path)) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> Any:
        return read_checkpoint(Path(path))


def keep_previous(path: Path) -> None:
    """Give a checkpoint a second name, `previous.ckpt`, which it keeps when another one replaces it."""
    previous = path.with_name(PREVIOUS)
    previous.unlink(missing_ok=True)
    try:
        os.link(path, previous)
    except OSError:  # a file system without hard links
        os.replace(path, previous)


def average(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights of some checkpoints, as a `state_dict`. Vaswani et al. 2017, section 6.1."""
    states = [read_checkpoint(file)["state_dict"] for file in files]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(value.dtype)
        for name, value in states[0].items()
    }


def load_chosen_weights(task: Task, directory: Path, averaged: int) -> None:
    """Load the weights to test: those of `best.ckpt`, or the mean of the last `averaged` evaluations'.

    Raises:
        UserError: the file cannot be read.
    """
    path = directory / ("best.ckpt" if averaged == 1 else "average.ckpt")
    if averaged > 1:
        steps = list(dict.fromkeys(int(point["step"]) for point in task.curve))[-averaged:]
        files = [directory / WEIGHTS / f"{step}.ckpt" for step in steps]
        if not path.exists() or all(file.exists() for file in files):
            task.load_state_dict(average(files))
            task.trainer.save_checkpoint(path, weights_only=True)
            return
    try:  # an average.ckpt is of this run, whose result was lost
        task.load_state_dict(read_checkpoint(path)["state_dict"])
    except (UserError, RuntimeError) as error:
        raise UserError(f"{one_sentence(error)} Run again from the start with force=true.") from error


def resumable(task: Task, directory: Path) -> Path | None:
    """Return the checkpoint of `task` to resume from, the last that is not damaged; None if there is none."""
    shapes = {name: tensor.shape for name, tensor in task.state_dict().items()}
    for path in (directory / LAST, directory / PREVIOUS):
        if not path.exists():
            continue
        try:
            checkpoint = read_checkpoint(path)
            saved_shapes = {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()}
            (optimizer,) = checkpoint["optimizer_states"]
            if saved_shapes == shapes and optimizer["param_groups"] and checkpoint["loops"]["fit_loop"]:
                return path
            reason = f"{path} is not a checkpoint of this run."
        except UserError as error:
            reason = str(error)
        except (KeyError, ValueError, TypeError, AttributeError):
            reason = f"{path} is not a checkpoint of this run."
        console.say(f"{reason} The run goes back to an earlier checkpoint, or to its beginning.")
    return None
