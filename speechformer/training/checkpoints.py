"""Checkpoints: when they are written, how they are read.

A run that is killed resumes from `last.ckpt` exactly: the file holds everything that later steps or the result depend
on. Lightning saves weights, optimizer, schedule and loops; the task its random state, curve and the position in the
batches; callbacks their state. An ensemble has `ensemble.ckpt` in the folder of its first run until it ends.

The other files hold weights alone, of each run: `best.ckpt`, `weights/<step>.ckpt` of the evaluations to average,
which are removed at the end, and `checkpoints/<step>.ckpt`, which stay.

Each file names its run by its fingerprint, and no file of another run is read (`tasks.registry.read_checkpoint`).
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from speechformer import console
from speechformer.corpora.files import atomic_write
from speechformer.errors import UserError, one_sentence
from speechformer.runs.folder import ENSEMBLE, HISTORY, LAST, PREVIOUS, WEIGHTS
from speechformer.runs.rank import is_first
from speechformer.tasks.base import Task
from speechformer.tasks.registry import read_checkpoint

if TYPE_CHECKING:
    from speechformer.training.results import Run


class Checkpoints(Checkpoint):
    """Writes the checkpoints of some runs, and keeps the rows of their `metrics.csv` in `last.ckpt`.

    Lightning's `ModelCheckpoint` would not do: it forgets the best evaluation if the folder is moved, passes over an
    evaluation outside `fit`, and saves between a step and the evaluation that belongs to it.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.config = runs, runs[0].config
        self.saved_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save_history(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_stepped(trainer):
            self.save_history(trainer)  # before last.ckpt: a run that resumes there has all of its history
        # at the end of an epoch, or before an evaluation, a checkpoint would hold a state between two others
        ends = batch_idx + 1 == trainer.num_training_batches
        if trainer.check_val_every_n_epoch is None:
            ends |= (trainer.fit_loop.total_batch_idx + 1) % trainer.val_check_batch == 0  # type: ignore[operator]
        if not ends:
            self.save_last(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        for run in self.runs:
            if run.task.diverged_at is None:
                if run.best[1] == trainer.global_step:
                    run.save_weights("best.ckpt")
                if run.averaged > 1:
                    self.keep_weights(run, trainer.global_step)
        if trainer.state.fn == "fit":
            found_best = any(run.best[1] == trainer.global_step for run in self.runs)
            self.save_last(trainer, at_once=found_best)  # a run that resumes may not find it again

    def keep_weights(self, run: Run, step: int) -> None:
        """Write the weights of this evaluation, and remove those that are no longer among the last `averaged`."""
        run.save_weights(f"{WEIGHTS}/{step}.ckpt")
        # by the curve, so that a resumed run keeps the same files
        first = min(int(point["step"]) for point in run.task.curve[-run.averaged :])
        for file in (run.folder.path / WEIGHTS).glob("*.ckpt"):
            if file.stem.isdecimal() and int(file.stem) < first:
                file.unlink(missing_ok=True)

    def save_history(self, trainer: pl.Trainer) -> None:
        """Write the weights at a multiple of `keep_every_n_steps`. A resumed run writes the same again."""
        every = self.config["keep_every_n_steps"]
        if every is not None and trainer.global_step % every == 0:
            for run in self.runs:
                run.save_weights(f"{HISTORY}/{trainer.global_step}.ckpt")

    def save_last(self, trainer: pl.Trainer, at_once: bool = False) -> None:
        """Write `last.ckpt`, at once or if a multiple of `checkpoint_every` steps has passed since the last write."""
        step, every = trainer.global_step, self.config["checkpoint_every"]
        if is_stepped(trainer) and (at_once or step // every > self.saved_at // every):
            self.saved_at = step
            trainer.save_checkpoint(resumed_file(self.runs))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["rows"] = [run.loggers.csv.rows for run in self.runs]
        checkpoint["identities"] = identities_of(self.runs)
        for run in self.runs if trainer.is_global_zero else ():
            run.loggers.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"saved_at": self.saved_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved_at = state_dict["saved_at"]


def resumed_file(runs: Sequence[Run]) -> Path:
    """Return the file that a run, or an ensemble of some, resumes from."""
    return runs[0].folder.path / (LAST if len(runs) == 1 else ENSEMBLE)


def identities_of(runs: Sequence[Run]) -> list[str]:
    """Return the fingerprints of some runs."""
    return [run.folder.identity for run in runs]


def is_stepped(trainer: pl.Trainer) -> bool:
    """Return whether no gradients are being accumulated, which a checkpoint does not hold."""
    batches = trainer.fit_loop.batch_idx + 1
    return batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are written atomically and read with `weights_only=True`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> Any:
        return read_checkpoint(Path(path))


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically; the `last.ckpt` before becomes `previous.ckpt`."""
    path.parent.mkdir(exist_ok=True)
    try:
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
            if path.name in (LAST, ENSEMBLE) and path.exists():
                keep_previous(path)
    except RuntimeError as error:  # torch reports a full disk so
        reason = "the file could not be written to its end, perhaps because the disk is full"
        raise OSError(errno.EIO, reason, str(path)) from error


def save_weights(task: Task, path: Path, step: int, identity: str) -> None:
    """Write the weights of a run's task and what rebuilds it, as Lightning's `load_from_checkpoint` reads it.

    All devices of the run call it, because they may have split the weights; the first one writes.
    """
    state = {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in task.state_dict().items()}
    if not is_first():
        return
    checkpoint = {
        "task": task.name,
        "identities": [identity],
        "global_step": step,
        "pytorch-lightning_version": pl.__version__,
        "hyper_parameters": dict(task.hparams),
        "state_dict": state,  # copies: of an ensemble they are views
    }
    save(checkpoint, path)


def keep_previous(path: Path) -> None:
    """Give a checkpoint a second name, `previous.ckpt`, which it keeps when another one replaces it."""
    previous = path.with_name(PREVIOUS)
    previous.unlink(missing_ok=True)
    try:
        os.link(path, previous)
    except OSError:  # a file system without hard links
        os.replace(path, previous)


def best_of(curve: Sequence[dict[str, float]], metric: str, task: Task) -> tuple[float | None, int | None]:
    """Return the best value of a metric on a curve, and its step; None if no value is finite."""
    best, best_step = None, None
    for point in curve:
        value = point.get(metric, math.nan)
        if not math.isfinite(value):
            continue
        better = best is None or (value > best if task.mode == "max" else value < best)
        if better or (task.later_if_equal and value == best):
            best, best_step = value, int(point["step"])
    return best, best_step


def average(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights of some checkpoints, as a `state_dict`. Vaswani et al. 2017, section 6.1."""
    states = [read_checkpoint(file)["state_dict"] for file in files]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(value.dtype)
        for name, value in states[0].items()
    }


def load_chosen_weights(run: Run) -> None:
    """Load the weights to test: those of `best.ckpt`, or the mean of the last evaluations'.

    Raises:
        UserError: the file cannot be read, or is not of the best evaluation.
    """
    path = run.folder.path / ("best.ckpt" if run.averaged == 1 else "average.ckpt")
    try:
        if run.averaged > 1:
            steps = list(dict.fromkeys(int(point["step"]) for point in run.task.curve))[-run.averaged :]
            files = [run.folder.path / WEIGHTS / f"{step}.ckpt" for step in steps]
            if not path.exists() or all(file.exists() for file in files):
                run.task.load_whole(average(files))
                run.save_weights(path.name)
                return
        checkpoint = read_checkpoint(path)  # an average.ckpt is there if the run's result was lost
        if run.averaged == 1 and checkpoint["global_step"] != run.best[1]:
            raise UserError(f"{path} is of step {checkpoint['global_step']}, but the best is {run.best[1]}.")
        run.task.load_whole(checkpoint["state_dict"])
    except (UserError, RuntimeError) as error:
        raise UserError(f"{one_sentence(error)} Run again from the start with force=true.") from error


def resumable(module: pl.LightningModule, runs: Sequence[Run]) -> tuple[Path | None, dict[str, Any]]:
    """Return the last checkpoint of some runs that is not damaged, to resume from, and its content; None and {}.

    Args:
        module: the task of a run, or the ensemble of some.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    last, identities = resumed_file(runs), identities_of(runs)
    for path in (last, last.with_name(PREVIOUS)):
        if not path.exists():
            continue
        try:
            checkpoint = read_checkpoint(path)
            saved_shapes = {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()}
            (optimizer,) = checkpoint["optimizer_states"]
            is_ours = checkpoint.get("identities", identities) == identities  # of all runs of an ensemble
            has_parts = (
                optimizer["param_groups"] and checkpoint["loops"]["fit_loop"] and checkpoint["global_step"] >= 0
            )
            if is_ours and saved_shapes == shapes and has_parts:
                return path, checkpoint
            reason = f"{path} is not a checkpoint of this run."
        except UserError as error:
            reason = str(error)
        except (KeyError, ValueError, TypeError, AttributeError):
            reason = f"{path} is not a checkpoint of this run."
        console.say(f"{reason} The run goes back to an earlier checkpoint, or to its beginning.")
    return None, {}
