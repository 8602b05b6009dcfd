"""How a task trains: optimizer, loss, divergence, and checkpoints that resume an interrupted run to the last bit."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from speechformer.data.batches import Batch
from speechformer.errors import pick
from speechformer.tasks.optim import OPTIMIZERS, SCHEDULES, build_optimizer


def is_logged(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether this batch completes an optimizer step that is logged."""
    batches = batch_idx + 1
    ends_step = batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches
    return ends_step and (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


def gather(value: Any) -> list[Any]:
    """Return the value of each process of a run, by rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class TrainableModule(pl.LightningModule):
    """A LightningModule with a recipe's optimizer. It saves what later steps depend on, besides what Lightning saves.

    Attributes:
        model: the network. `hparams["architecture"]` rebuilds it.
        recipe: the config group.
        tokens: tokens trained on so far, without padding, of this process.
        curve: step and metrics of each evaluation.
        diverged_at: the step whose loss was NaN or infinite, or None.
        generator: of the random numbers that training draws on the CPU.
    """

    name: ClassVar[str]  # as in conf/task/<name>.yaml
    model: Any  # an nn.Module, whose own attributes the subclass knows
    tokens: Tensor

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        pick(OPTIMIZERS, recipe["optimizer"], "recipe.optimizer")
        pick(SCHEDULES, recipe["schedule"], "recipe.schedule")
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.generator = torch.default_generator
        self.loaded: dict[str, Any] | None = None  # random state and batches of a checkpoint, until training starts
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        if "optimizer_states" in checkpoint:  # not of weights alone
            on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
            checkpoint["progress"] = {
                "tokens": gather(int(self.tokens)),
                "random": gather([self.generator.get_state(), *on_device]),
                "curve": self.curve,
                "diverged_at": self.diverged_at,
                "batches": getattr(self.trainer.train_dataloader, "state_dict", dict)(),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "progress" in checkpoint:
            progress = checkpoint["progress"]
            self.curve, self.diverged_at = list(progress["curve"]), progress["diverged_at"]
            if any(type(value) not in (int, float) for point in self.curve for value in point.values()):
                raise ValueError("its curve has values that are no numbers")
            rank = self.global_rank % len(progress["tokens"])
            self.tokens.fill_(progress["tokens"][rank])
            self.loaded = {"random": progress["random"][rank], "batches": progress["batches"]}

    def on_train_start(self) -> None:
        if self.loaded is None:
            return
        (on_cpu, *on_device), batches = self.loaded["random"], self.loaded["batches"]
        self.generator.set_state(on_cpu.cpu())  # as late as this: building a run draws random numbers
        if self.device.type == "cuda" and on_device:
            torch.cuda.set_rng_state(on_device[0].cpu(), self.device)
        if batches:  # Lightning does it too, but not if it had to count the steps for a schedule
            self.trainer.train_dataloader.load_state_dict(batches)  # type: ignore[union-attr]
        self.loaded = None

    def configure_optimizers(self) -> Any:
        width = self.hparams["architecture"]["width"]
        return build_optimizer(self.model, self.recipe, width, self.trainer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # here and not after the next forward pass, which can then use the memory

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: `optimizer_step` has cleared the gradients."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        stop = self.diverged_at is not None
        if self.trainer.world_size > 1:
            stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        self.trainer.should_stop |= stop
        return -1 if stop else None

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

    def record_loss(self, loss: float, step: int, logged: bool) -> None:
        """Record divergence; optionally log the training loss and the learning rate."""
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = step
        # `self.log` costs as much as a layer, and writes only after the checkpoint of its step.
        if logged and self.trainer.logger is not None:
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.trainer.logger.log_metrics({"train_loss": loss, "lr": lr}, step)

    def diverged(self) -> bool:
        """Return whether the loss or a weight is NaN or infinite."""
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.model.parameters())
