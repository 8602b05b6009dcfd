"""The LightningModules: logits in, loss and metrics out.

    Classify        cross-entropy over speakers; accuracy
    LanguageModel   cross-entropy over the next token; perplexity = exp(mean negative log-likelihood per token)
    Translate       the same over the next token of the translation; BLEU and chrF of what it translates

All are evaluated part by part (train, validation, test, ...) on batches that carry their part's name, and log
one figure for each part. A checkpoint holds their constructor's arguments as plain data, so that it rebuilds
them alone: `load_task(path)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from speechformer.data.batches import Batch
from speechformer.errors import UserError, pick
from speechformer.tasks.optim import ENDLESS, OPTIMIZERS, SCHEDULES, constant


def all_gathered(value: Any) -> list[Any]:
    """The value of each process of a run, by rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def logs_after(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this batch ends an optimiser step that is logged."""
    batches = batch_idx + 1
    ends_step = batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches
    return ends_step and (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


class Task(pl.LightningModule):
    """What both tasks share: the core's initialisation, the optimiser and its schedule, and evaluation.

    A subclass sets `core`, and says what a training batch's loss is and what an evaluation batch adds to the
    metrics.

    Attributes: `name` in the config; `metric`, the word for its figure, and `mode`, the direction that is better;
    `tokens`, the real (not padded) tokens trained on so far; `curve`, step and figures of each evaluation;
    `diverged_at`, the step whose loss was NaN or infinite, with which training stops; `generator`, of the random
    numbers that it draws on the CPU.
    """

    name: str
    metric: str
    mode: str
    model: torch.nn.Module
    tokens: Tensor

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        pick(OPTIMIZERS, recipe["optimizer"], "recipe.optimizer")
        pick(SCHEDULES, recipe["schedule"], "recipe.schedule")
        self.measured: dict[str, Metric] = {}
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.generator = torch.default_generator
        self.random: list[Tensor] | None = None  # this and the next, of a checkpoint that training goes on from
        self.batches: dict[str, int] = {}
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self.model.parameters())

    def optimizers_of(self, parameters: Iterable[torch.nn.Parameter]) -> Any:
        """The optimiser over all parameters alike (the reports decay norms and biases too), and its schedule:
        a linear warm-up over `warmup_steps`, then `schedule` down to the last step.

        "vaswani" is the schedule of Vaswani et al. 2017, equation 3: "inverse_sqrt" whose peak follows from the width
        and the warm-up, lr / sqrt(width * warmup_steps); `lr` is then a factor, theirs is 1.
        """
        recipe, peak = self.recipe, self.recipe["lr"]
        if recipe["schedule"] == "vaswani":
            if not recipe["warmup_steps"]:
                raise UserError("recipe.schedule=vaswani needs recipe.warmup_steps, of which its rate follows.")
            width = self.hparams["architecture"]["width"]
            peak /= math.sqrt(width * recipe["warmup_steps"])
        options = {"lr": peak, "weight_decay": recipe["weight_decay"]}
        # Lightning cannot clip the gradients of a fused optimiser in mixed precision.
        options["fused"] = not self.trainer.gradient_clip_val or "mixed" not in str(self.trainer.precision)
        if recipe["optimizer"] != "sgd":
            options["betas"] = tuple(recipe["betas"])
        optimizer = OPTIMIZERS[recipe["optimizer"]](parameters, **options)
        warmup, shape = recipe["warmup_steps"], SCHEDULES[recipe["schedule"]]
        if warmup == 0 and shape is constant:
            return optimizer
        steps = 0
        if recipe["schedule"] not in ENDLESS:
            if not math.isfinite(self.trainer.estimated_stepping_batches):
                raise UserError("recipe.schedule ends with the run, so set trainer.max_steps or trainer.max_epochs.")
            steps = int(self.trainer.estimated_stepping_batches)
            if warmup >= steps:
                raise UserError(f"recipe.warmup_steps={warmup} is not less than the {steps} steps of the run.")

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            # the endless ones go by the number of the step, from 1, at which the warm-up reaches 1
            return shape(step + (recipe["schedule"] in ENDLESS) - warmup, steps - warmup, warmup)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # at once: what is forgotten before the next forward pass leaves it the memory

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Lightning's place for that, after the forward pass."""

    def metric_name(self, split: str) -> str:
        """The name of the one figure that says how good the model is on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def better(self, figure: float, than: float) -> bool:
        """Whether one figure is better than another."""
        return figure > than if self.mode == "max" else figure < than

    def diverged(self) -> bool:
        """Whether the loss or a weight is NaN or infinite."""
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.model.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        if "optimizer_states" in checkpoint:  # not of weights alone
            checkpoint["progress"] = {
                "tokens": all_gathered(int(self.tokens)),
                "random": all_gathered(self.random_state()),
                "curve": self.curve,
                "diverged_at": self.diverged_at,
                "batches": getattr(self.trainer.train_dataloader, "state_dict", dict)(),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "progress" in checkpoint:
            progress = checkpoint["progress"]
            self.curve, self.diverged_at = list(progress["curve"]), progress["diverged_at"]
            self.batches = progress["batches"]
            rank = self.global_rank % len(progress["tokens"])
            self.tokens.fill_(progress["tokens"][rank])
            self.random = progress["random"][rank]

    def random_state(self) -> list[Tensor]:
        """Where the random numbers stand, on the CPU and on the device."""
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [self.generator.get_state(), *on_device]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Go back to where `random_state` was; a device that had none goes on with its own."""
        self.generator.set_state(state[0].cpu())
        if self.device.type == "cuda" and len(state) > 1:
            torch.cuda.set_rng_state(state[1].cpu(), self.device)

    def on_train_start(self) -> None:
        if self.random is not None:  # as late as this: building a run draws random numbers
            self.set_random_state(self.random)
            self.random = None
        if self.batches:  # Lightning does so too, but not where it had to count the steps for a schedule before
            self.trainer.train_dataloader.load_state_dict(self.batches)  # type: ignore[union-attr]
            self.batches = {}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        stop = self.diverged_at is not None
        if self.trainer.world_size > 1:
            stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        if not stop:
            return None
        self.trainer.should_stop = True
        return -1

    def watched(self, loss: Tensor, batch: Batch, batch_idx: int) -> Tensor:
        """The loss to differentiate, looked at and, every `log_every_n_steps` optimiser steps, logged.

        A CPU is asked at each step whether it is finite; an accelerator, which would have to wait for the answer, at
        the steps that are logged. Over several devices each share of a batch counts as its rows.
        """
        logged = logs_after(self.trainer, batch_idx)
        looked_at = loss.detach()
        if logged and "weight" in batch:
            looked_at = self.trainer.strategy.reduce(looked_at * batch["weight"], reduce_op="mean")
        if logged or loss.device.type == "cpu":
            self.look_at(float(looked_at), self.global_step + 1, logged)
        return loss * batch["weight"] if "weight" in batch else loss

    def look_at(self, loss: float, step: int, logged: bool, part: float = 1.0) -> None:
        """See whether a loss is finite, and log it if it is to be; the learning rate is `part` of the optimiser's."""
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = step
        # not by `self.log`, which costs as much as a layer, and is written after the checkpoint of its step
        if logged and self.trainer.logger is not None:
            lr = part * self.trainer.optimizers[0].param_groups[0]["lr"]
            self.trainer.logger.log_metrics({"train_loss": loss, "lr": lr}, step)

    def on_validation_epoch_start(self) -> None:
        self.measured = defaultdict(self.new_metric)

    def on_validation_epoch_end(self) -> None:
        figures = self.figures()
        self.curve.append({"step": self.global_step, **figures})
        self.write(figures)

    def write(self, figures: dict[str, float]) -> None:
        """Hand figures to the loggers, at the step that was done."""
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(figures, self.global_step)

    def on_test_epoch_end(self) -> None:
        self.write(self.figures())

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch) -> None:
        self.measure(batch)

    test_step = validation_step

    def new_metric(self) -> Metric:
        raise NotImplementedError

    def measure(self, batch: Batch) -> None:
        """Add what a batch of an evaluation shows to `measured`."""
        self.add(self.forward_batch(self.model, batch), batch)

    def forward_batch(self, model: Any, batch: Batch) -> Tensor:
        """What the model makes of a batch of an evaluation, a row for each of the batch."""
        raise NotImplementedError

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add what `forward_batch` returned to `measured`."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        raise NotImplementedError
