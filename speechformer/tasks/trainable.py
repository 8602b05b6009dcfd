"""How a task trains: optimizer, logging of the loss, and the end of a training that diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from speechformer.data.batches import Batch
from speechformer.errors import pick
from speechformer.tasks.optim import OPTIMIZERS, SCHEDULES, build_optimizer
from speechformer.tasks.resumable import ResumableModule


def is_logged(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether this batch completes an optimizer step that is logged."""
    batches = batch_idx + 1
    ends_step = batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches
    return ends_step and (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


class TrainableModule(ResumableModule):
    """A LightningModule with the optimizer of a recipe.

    Args:
        recipe: the config group.

    Attributes:
        model: the network. `hparams["architecture"]` rebuilds it.
    """

    model: Any  # an nn.Module, whose own attributes the subclass knows

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        pick(OPTIMIZERS, recipe["optimizer"], "recipe.optimizer")
        pick(SCHEDULES, recipe["schedule"], "recipe.schedule")

    def configure_optimizers(self) -> Any:
        return self.build_optimizer(self.model.parameters())

    def build_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> Any:
        """Build the recipe's optimizer and schedule for these parameters."""
        return build_optimizer(parameters, self.recipe, self.hparams["architecture"]["width"], self.trainer)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # here and not after the next forward pass, which can then use the memory

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: `optimizer_step` has cleared the gradients."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        stop = self.diverged_at is not None
        if self.trainer.world_size > 1:
            stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        if not stop:
            return None
        self.trainer.should_stop = True
        return -1

    def track_loss(self, loss: Tensor, batch: Batch, batch_idx: int) -> Tensor:
        """Record the loss of a training batch, and return the loss to differentiate.

        On a CPU every loss is checked for divergence; on an accelerator, which would have to synchronize, those of
        logged steps. On several devices the loss is weighted by the device's part of the batch.
        """
        logged = is_logged(self.trainer, batch_idx)
        recorded = loss.detach()
        if logged and "weight" in batch:
            recorded = self.trainer.strategy.reduce(recorded * batch["weight"], reduce_op="mean")
        if logged or loss.device.type == "cpu":
            self.record_loss(float(recorded), self.global_step + 1, logged)
        return loss * batch["weight"] if "weight" in batch else loss

    def record_loss(self, loss: float, step: int, logged: bool, lr_factor: float = 1.0) -> None:
        """Record divergence; optionally log the training loss and the optimizer's learning rate times `lr_factor`."""
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = step
        # `self.log` costs as much as a layer, and writes only after the checkpoint of its step.
        if logged and self.trainer.logger is not None:
            lr = lr_factor * self.trainer.optimizers[0].param_groups[0]["lr"]
            self.trainer.logger.log_metrics({"train_loss": loss, "lr": lr}, step)

    def diverged(self) -> bool:
        """Return whether the loss or a weight is NaN or infinite."""
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.model.parameters())
