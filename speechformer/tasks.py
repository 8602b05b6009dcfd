"""The LightningModules: logits in, loss and metrics out.

    Classify        cross-entropy over speakers; accuracy
    LanguageModel   cross-entropy over the next token; perplexity = exp(mean negative log-likelihood per token)

Both are evaluated part by part (train, validation, test, ...) on batches that carry their part's name, and log
one figure for each part. A checkpoint holds their constructor's arguments as plain data, so that it rebuilds
them alone: `load_task(path)`.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from speechformer.cores.classifier import EncoderClassifier
from speechformer.cores.decoder import Decoder
from speechformer.cores.stack import initialise
from speechformer.data import IGNORE, PAD, Batch
from speechformer.refusals import UserError, pick

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def constant(step: int, steps: int) -> float:
    """The same learning rate throughout."""
    return 1.0


def linear(step: int, steps: int) -> float:
    """Down to zero in a straight line."""
    return 1 - step / steps


def cosine(step: int, steps: int) -> float:
    """Down to zero along half a cosine. Loshchilov and Hutter 2017, "SGDR", without restarts."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}


def all_gathered(value: Any) -> list[Any]:
    """The value of each process of a run, by rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def random_state(device: torch.device) -> list[Tensor]:
    """Where torch's random numbers stand, on the CPU and on the device."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Go back to where `random_state` was; a device that had none goes on with its own."""
    torch.set_rng_state(state[0].cpu())
    if device.type == "cuda" and len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu(), device)


class Task(pl.LightningModule):
    """What both tasks share: the core's initialisation, the optimiser and its schedule, and evaluation.

    A subclass sets `core`, and says what a training batch's loss is and what an evaluation batch adds to the
    metrics.

    Attributes: `name` in the config; `metric`, the word for its figure, and `mode`, the direction that is better;
    `tokens`, the real (not padded) tokens trained on so far; `curve`, step and figures of each evaluation;
    `diverged_at`, the step whose loss was NaN or infinite, with which training stops.
    """

    name: str
    metric: str
    mode: str
    core: torch.nn.Module
    tokens: Tensor

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        pick(OPTIMIZERS, recipe["optimizer"], "recipe.optimizer")
        pick(SCHEDULES, recipe["schedule"], "recipe.schedule")
        self.measured: dict[str, Metric] = {}
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.random: list[Tensor] | None = None  # this and the next, of a checkpoint that training goes on from
        self.batches: dict[str, int] = {}
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    def configure_optimizers(self) -> Any:
        """The optimiser over all parameters alike (the reports decay norms and biases too), and its schedule:
        a linear warm-up over `warmup_steps`, then `schedule` down to the last step."""
        recipe = self.recipe
        options = {"lr": recipe["lr"], "weight_decay": recipe["weight_decay"]}
        # Lightning cannot clip the gradients of a fused optimiser in mixed precision.
        options["fused"] = not self.trainer.gradient_clip_val or "mixed" not in str(self.trainer.precision)
        if recipe["optimizer"] != "sgd":
            options["betas"] = tuple(recipe["betas"])
        optimizer = OPTIMIZERS[recipe["optimizer"]](self.core.parameters(), **options)
        warmup, shape = recipe["warmup_steps"], SCHEDULES[recipe["schedule"]]
        if warmup == 0 and shape is constant:
            return optimizer
        if not math.isfinite(self.trainer.estimated_stepping_batches):
            raise UserError("recipe.schedule ends with the run, so set trainer.max_steps or trainer.max_epochs.")
        steps = int(self.trainer.estimated_stepping_batches)
        if warmup >= steps:
            raise UserError(f"recipe.warmup_steps={warmup} is not less than the {steps} steps of the run.")

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return shape(step - warmup, steps - warmup)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def figure_of(self, split: str) -> str:
        """The name of the one figure that says how good the model is on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def better(self, figure: float, than: float) -> bool:
        """Whether one figure is better than another."""
        return figure > than if self.mode == "max" else figure < than

    def diverged(self) -> bool:
        """Whether the loss or a weight is NaN or infinite."""
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.core.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        if "optimizer_states" in checkpoint:  # not of weights alone
            checkpoint["progress"] = {
                "tokens": all_gathered(int(self.tokens)),
                "random": all_gathered(random_state(self.device)),
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

    def on_train_start(self) -> None:
        if self.random is not None:  # as late as this: building a run draws random numbers
            set_random_state(self.random, self.device)
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
        trainer, step = self.trainer, self.global_step + 1
        ends_step = (
            batch_idx + 1
        ) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 == trainer.num_training_batches
        logged = ends_step and step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if (logged or loss.device.type == "cpu") and self.diverged_at is None and not loss.isfinite():
            self.diverged_at = step
        loss = loss * batch["weight"] if "weight" in batch else loss
        # not by `self.log`, which costs as much as a layer, and is written after the checkpoint of its step
        if logged and trainer.logger is not None:
            mean = trainer.strategy.reduce(loss.detach(), reduce_op="mean")
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            trainer.logger.log_metrics({"train_loss": float(mean), "lr": lr}, step)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.measured = defaultdict(self.new_metric)

    def on_validation_epoch_end(self) -> None:
        figures = self.figures()
        self.curve.append({"step": self.global_step, **figures})
        self.log_figures(figures)

    def log_figures(self, figures: dict[str, float]) -> None:
        # Lightning takes "step" as the place on the axis: steps done, as on the screen, and not the last one's index
        self.log_dict({**figures, "step": float(self.global_step)})

    def on_test_epoch_end(self) -> None:
        self.log_figures(self.figures())

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch) -> None:
        self.measure(batch)

    test_step = validation_step

    def new_metric(self) -> Metric:
        raise NotImplementedError

    def measure(self, batch: Batch) -> None:
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        raise NotImplementedError


class Classify(Task):
    """Who said it? An `EncoderClassifier` under cross-entropy.

    Args:
        core: the arguments of `EncoderClassifier`.
        recipe: the config group.
    """

    name, metric, mode = "classify", "accuracy", "max"

    def __init__(self, core: dict[str, Any], recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.classes = core["classes"]
        self.core = EncoderClassifier(**core)
        initialise(self.core, recipe["init"], recipe["init_std"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.core(batch["ids"]), batch["labels"])
        self.tokens += (batch["ids"] != PAD).sum()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MulticlassAccuracy(self.classes, average="micro", validate_args=False, sync_on_compute=False).to(
            self.device
        )

    def measure(self, batch: Batch) -> None:
        (split, _), labels = batch["part"], batch["labels"]
        logits = self.core(batch["ids"])
        self.measured[f"{split}_accuracy"].update(logits, labels)
        if "seen" in batch:
            for name, chosen in (("seen", batch["seen"]), ("unseen", ~batch["seen"])):
                if chosen.any():
                    self.measured[f"{split}_accuracy_{name}"].update(logits[chosen], labels[chosen])

    def figures(self) -> dict[str, float]:
        return {name: metric.compute().item() for name, metric in self.measured.items()}


def next_token_loss(output: torch.nn.Linear, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of R targets under the logits that `output` makes of R hidden states.

    The logits are made a few rows at a time: a CPU then keeps them in its cache, which makes evaluation three
    times as fast as all at once; an accelerator gets as many rows as fit.
    """
    rows = 256 if hidden_RD.device.type == "cpu" else 16384
    losses = [
        F.cross_entropy(output(hidden).float(), targets, reduction="sum")
        for hidden, targets in zip(hidden_RD.split(rows), targets_R.split(rows))
    ]
    return torch.stack(losses).sum() / len(targets_R)


class MeanPerplexity(Metric):
    """exp of the mean loss per token, from mean losses of batches and their numbers of tokens.

    Not torchmetrics' MeanMetric: it leaves NaN out, so that a diverged model would look well, and where it is told
    not to, it forgets the weights (1.9.0).
    """

    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: int) -> None:
        self.total += loss * tokens
        self.count += tokens

    def compute(self) -> Tensor:
        return (self.total / self.count).exp()


class LanguageModel(Task):
    """What comes next? A `Decoder` under cross-entropy.

    Args:
        core: the arguments of `Decoder`.
        recipe: the config group.
    """

    name, metric, mode = "lm", "perplexity", "min"
    core: Decoder

    def __init__(self, core: dict[str, Any], recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.core = Decoder(**core)
        initialise(self.core, recipe["init"], recipe["init_std"])

    def figure_of(self, split: str) -> str:
        """As in `Task`; over several test texts, the mean of their perplexities."""
        return f"{split}_perplexity" + ("_mean" if split == "test" else "")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets = batch["ids"][:, :-1], batch["ids"][:, 1:]
        loss = next_token_loss(self.core.output, self.core.hidden(ids).flatten(0, 1), targets.flatten())
        self.tokens += ids.numel()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def measure(self, batch: Batch) -> None:
        split, name = batch["part"]
        scored = batch["targets"] != IGNORE
        hidden, targets = self.core.hidden(batch["ids"])[scored], batch["targets"][scored]
        loss = next_token_loss(self.core.output, hidden, targets)
        self.measured["_".join(filter(None, (split, "perplexity", name)))].update(loss, len(targets))

    def figures(self) -> dict[str, float]:
        figures = {name: metric.compute().item() for name, metric in self.measured.items()}
        tests = defaultdict(list)
        for name, value in figures.items():
            split, _, test = name.partition("_perplexity_")
            if test:
                tests[split].append(value)
        means = {f"{split}_perplexity_mean": sum(values) / len(values) for split, values in tests.items()}
        return figures | means


TASKS: dict[str, type[Classify] | type[LanguageModel]] = {"classify": Classify, "lm": LanguageModel}


def load_task(path: Path) -> Classify | LanguageModel:
    """The trained task of a checkpoint, on the CPU and in evaluation mode, from that file alone.

    Raises:
        UserError: the file is missing, or not a checkpoint of speechformer.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        task = TASKS[checkpoint["task"]](**checkpoint["hyper_parameters"])
        task.load_state_dict(checkpoint["state_dict"])
    except (OSError, EOFError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a checkpoint of speechformer ({type(error).__name__}).") from None
    return task.eval()
