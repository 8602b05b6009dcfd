"""What a task is: a network with its loss and its metrics. How its results are shown is in its `View`.

A task is a LightningModule; `speechformer/tasks/README.md` explains how to add one. A checkpoint holds the
constructor's arguments as plain data, so `load_task(path)` rebuilds a task from the checkpoint alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from speechformer.data import pl
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch
from speechformer.models.options import SIZES
from speechformer.tasks.optim import build_optimizer
from speechformer.tasks.text import TextInputs, read_words
from speechformer.tasks.view import View

# What every network takes: keys of the config, and keys of its group `architecture`
COMMON_KEYS = (*SIZES, "block_size", "dropout", "embedding_dropout", "model", "pattern", "attention")
COMMON_OPTIONS = (
    *(
        "norm",
        "norm_type",
        "norm_eps",
        "final_norm",
        "embedding_norm",
        "head_width",
        "qkv_bias",
        "bias",
        "activation",
    ),
    "scale_embedding",
)


def log_of_mean(logs: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean of some probabilities from their logs, element by element."""
    return torch.stack([*logs]).logsumexp(dim=0) - math.log(len(logs))


def scored_rows(is_scored: Tensor) -> Tensor | slice:
    """Return the indices of what is scored, or on an accelerator all: it would wait to learn how many there are."""
    return is_scored.flatten().nonzero().flatten() if is_scored.device.type == "cpu" else slice(None)


def ends_logged_step(trainer: pl.Trainer, batch_idx: int) -> bool:
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


class Task(pl.LightningModule):
    """A task. A subclass declares the class variables, and its constructor builds `model`.

    The constructor takes `architecture`, the arguments of the network, and `recipe`, the config group, and calls
    `save_hyperparameters`. A subclass must define `training_loss`, `new_metric`, `forward_batch` and
    `update_metrics`; the other methods have defaults. It is evaluated split by split (train, validation, ...), on
    batches that name theirs.

    Attributes:
        model: the network. `hparams["architecture"]` rebuilds it.
        counts: counts of words beside the network, whose `add(ids, logits)` combines both; None for none.
        tokens: tokens trained on so far, without padding, of this process.
        metrics, curve: the metrics of the last evaluation; step and metrics of each evaluation during training.
        diverged_at: the step whose loss was NaN or infinite, or None.
        generator: of the random numbers that training draws on the CPU.
        ensemble: trained tasks, the mean of whose probabilities is evaluated in place of this network; usually none.
    """

    name: ClassVar[str]  # as in conf/task/<name>.yaml
    metric: ClassVar[str]
    mode: ClassVar[str]  # "max" or "min": the direction in which the metric is better
    later_if_equal: ClassVar[bool] = False  # whether the last of equally good evaluations is the best
    purpose: ClassVar[str]  # completes "a run of task=<name>, which ..."
    datamodule: ClassVar[type[TaskData]]
    abilities: ClassVar[frozenset[str]] = frozenset()  # methods of a trained run: "predict", "generate", "translate"
    inputs: ClassVar[dict[str, str]]  # of the network, by name
    output: ClassVar[str]
    pads_input: ClassVar[bool] = True  # whether batches of the first input are padded
    options: ClassVar[tuple[str, ...]] = ()  # keys of `architecture` that the network takes besides COMMON_OPTIONS
    no_ensemble: ClassVar[str | None] = "the task does not define member_losses"  # None: runs can be an ensemble
    view_class: ClassVar[type[View]] = View
    model: Any  # an nn.Module, whose own attributes the subclass knows
    tokens: Tensor

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        self.counts: Any = None
        self.measured: dict[str, Metric] = {}  # of the current evaluation, by name
        self.metrics: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.generator = torch.default_generator
        self.averaged_tasks: Sequence[Any] = ()
        self.resumes_from: dict[str, Any] | None = None  # random state and batches, until training starts
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    # Building

    @classmethod
    def data_class(cls, corpus: Any) -> type[TaskData]:
        """Return the LightningDataModule for a corpus."""
        return cls.datamodule

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> Task:
        """Build a new task. Override this if the constructor has further arguments, which must be plain data."""
        return cls(architecture=cls.architecture_arguments(config, data), recipe=config["recipe"])  # type: ignore

    @classmethod
    def architecture_arguments(cls, config: dict[str, Any], data: TaskData, **more: Any) -> dict[str, Any]:
        """Return the arguments of the network as plain data, `more` included."""
        keys = (*COMMON_OPTIONS, *cls.options)
        arguments = {key: value for key, value in config["architecture"].items() if key in keys}
        return arguments | {key: config[key] for key in COMMON_KEYS} | more | {"vocab_size": data.vocab_size}

    def attach(self, data: TaskData) -> None:
        """Take from the data what training and evaluation need besides batches."""

    # Several devices that split the parameters: `models.split`

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            from speechformer.models.split import split

            split(self, self.device_mesh["data_parallel"], ("training_step", "validation_step", "test_step"))

    def keep_whole(self, whole: bool = True) -> None:
        """Gather all parameters on each device, if devices split them; or split them again."""
        if self.device_mesh is not None:
            from speechformer.models.split import keep_whole

            keep_whole(self, whole)

    def load_whole(self, state: dict[str, Tensor]) -> None:
        """Load a `state_dict` of whole tensors."""
        if self.device_mesh is None:
            self.load_state_dict(state)
        else:
            from speechformer.models.split import load_whole

            load_whole(self, state)

    def on_validation_start(self) -> None:
        self.diverged_at = next(filter(None, gather(self.diverged_at)), None)
        self.keep_whole()

    def on_validation_end(self) -> None:
        self.keep_whole(self.trainer.state.fn != "fit")

    def on_test_start(self) -> None:
        self.keep_whole()

    # Training: a batch becomes a loss

    def training_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, and add the number of its tokens to `tokens`."""
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        trainer: Any = self.trainer
        if trainer.overfit_batches:  # the same ones in each epoch
            trainer.train_dataloader.load_state_dict({"epoch": 0, "given": 0})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss to differentiate. On several devices it is weighted by the device's part of the batch.

        On a CPU every loss is checked for divergence; on an accelerator, which would have to synchronize, those of
        logged steps.
        """
        loss = self.training_loss(batch)
        logged, recorded = ends_logged_step(self.trainer, batch_idx), loss.detach()
        if logged and "weight" in batch:
            recorded = self.trainer.strategy.reduce(recorded * batch["weight"], reduce_op="mean")
        if logged or loss.device.type == "cpu":
            value, step = float(recorded), self.global_step + 1
            self.check_loss(value, step)
            if logged:  # not `self.log`, which costs as much as a layer and writes after the checkpoint of its step
                rate = self.trainer.optimizers[0].param_groups[0]["lr"]
                for logger in self.loggers:
                    logger.log_metrics({"train_loss": value, "lr": rate}, step)
        return loss * batch["weight"] if "weight" in batch else loss

    def check_loss(self, loss: float, step: int) -> None:
        """Record divergence."""
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = step

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        stop = self.diverged_at is not None
        if self.trainer.world_size > 1:
            stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        self.trainer.should_stop |= stop
        return -1 if stop else None

    def diverged(self) -> bool:
        """Return whether the loss or a weight is NaN or infinite. All devices ask, because it takes whole weights."""
        self.keep_whole()
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.model.parameters())

    def configure_optimizers(self) -> Any:
        width = self.hparams["architecture"]["width"]
        return build_optimizer(self.model, self.recipe, width, self.trainer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # here and not after the next forward pass, which can then use the memory

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: `optimizer_step` has cleared the gradients."""

    def gradient_norms(self) -> list[float]:
        """Return the norm of the gradients."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return [float(getattr(norm, "full_tensor", norm.detach)())]  # of gradients that devices split

    # Evaluation: batches become metrics, once

    def metric_name(self, split: str) -> str:
        """Return the name of the main metric on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def new_metric(self) -> Metric:
        """Return an empty metric on the device of the module."""
        raise NotImplementedError

    def forward_batch(self, model: Any, batch: Batch) -> Tensor:
        """Return the output of a network, the module's or another, for an evaluation batch, [B, ...]."""
        raise NotImplementedError

    def update_metrics(self, output: Tensor, batch: Batch) -> None:
        """Add what `forward_batch` returned to `measured`."""
        raise NotImplementedError

    def update_members(self, tasks: Sequence[Any], model: Any, output: Tensor, batch: Batch) -> None:
        """Add an evaluation batch to `measured` of some tasks, from what `forward_batch` returned for their ensemble.

        Override this if an accelerator can do it for all at once.
        """
        for task, rows in zip(tasks, output.chunk(len(tasks))):
            if task.diverged_at is None:
                task.update_metrics(rows, batch)

    def evaluate_average(self, batch: Batch) -> None:
        """Add an evaluation batch to `measured`, where the mean of the probabilities of `averaged_tasks` decides.

        Override this if `forward_batch` does not return logits.
        """
        logs = [task.forward_batch(task.model, batch).float().log_softmax(dim=-1) for task in self.averaged_tasks]
        self.update_metrics(log_of_mean(logs), batch)

    def evaluate_batch(self, batch: Batch) -> None:
        """Add an evaluation batch to `measured`."""
        if self.averaged_tasks:
            self.evaluate_average(batch)
        else:
            self.update_metrics(self.forward_batch(self.model, batch), batch)

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the current evaluation."""
        return {name: metric.compute().item() for name, metric in self.measured.items()}

    def begin_evaluation(self) -> None:
        """Forget what the last evaluation measured."""
        self.measured = defaultdict(self.new_metric)

    def end_evaluation(self, step: int | None = None) -> None:
        """Compute `metrics`, and add them to the curve, unless `step` is None."""
        self.metrics = self.compute_metrics()
        if step is not None:
            self.curve.append({"step": step, **self.metrics})

    def on_validation_epoch_start(self) -> None:
        self.begin_evaluation()

    def validation_step(self, batch: Batch) -> None:
        self.evaluate_batch(batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.end_evaluation(self.global_step)
            self.log_evaluation()

    def on_test_epoch_end(self) -> None:
        self.end_evaluation()
        self.log_evaluation()

    def log_evaluation(self) -> None:
        """Give the metrics to the loggers; Lightning would name the step before."""
        self.log_dict({**self.metrics, "step": float(self.global_step)})

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    # Checkpoints: what later steps depend on, besides what Lightning saves

    def progress(self) -> dict[str, Any]:
        """Return the state of training as plain data and tensors."""
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return {
            "tokens": gather(int(self.tokens)),
            "random": gather([self.generator.get_state(), *on_device]),
            "curve": self.curve,
            "diverged_at": self.diverged_at,
        }

    def restore(self, progress: dict[str, Any], batches: dict[str, int]) -> None:
        """Restore what `progress` returned; the random state and the place in the `batches` when training starts.

        Raises:
            ValueError, KeyError: it is not as `progress` returned it.
        """
        self.curve, self.diverged_at = list(progress["curve"]), progress["diverged_at"]
        if any(type(value) not in (int, float) for point in self.curve for value in point.values()):
            raise ValueError("its curve has values that are no numbers")
        rank = self.global_rank % len(progress["tokens"]) if self._trainer is not None else 0
        self.tokens.fill_(progress["tokens"][rank])
        self.resumes_from = {"random": progress["random"][rank], "batches": batches}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        checkpoint["progress"] = self.progress()
        checkpoint["batches"] = getattr(self.trainer.train_dataloader, "state_dict", dict)()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "progress" in checkpoint:
            self.restore(checkpoint["progress"], checkpoint["batches"])

    def resume(self, loader: Any) -> None:
        """Restore the random state and the place in the batches, as late as possible: a run draws numbers before."""
        if self.resumes_from is None:
            return
        on_cpu, *on_device = self.resumes_from["random"]
        self.generator.set_state(on_cpu.cpu())
        if self.device.type == "cuda" and on_device:
            torch.cuda.set_rng_state(on_device[0].cpu(), self.device)
        if self.resumes_from["batches"]:  # Lightning does it too, unless it had to count the steps for a schedule
            loader.load_state_dict(self.resumes_from["batches"])
        self.resumes_from = None

    def on_train_start(self) -> None:
        self.resume(self.trainer.train_dataloader)

    # Use of the trained network

    @property
    def view(self) -> View:
        """How the results of this task are shown."""
        return self.view_class(self)

    def forward(self, *ids: Tensor) -> Tensor:
        """Compute the logits of the network for its inputs; with counts of words, those of both."""
        logits = self.model(*ids)
        return logits if self.counts is None else self.counts.add(ids[0], logits)

    def read(self, text: str, tokenizer: Any, max_tokens: int) -> TextInputs:
        """Return a text as inputs of the network, of at most `max_tokens` tokens per side."""
        return read_words(text, tokenizer, min(max_tokens, self.model.max_length or max_tokens))

    def write_artifacts(self, directory: Path) -> dict[str, Any]:
        """Write further files of the run, and return further entries of its result."""
        return {}

    def member_losses(self, model: Any, batch: Batch, members: int) -> tuple[Tensor, Tensor | int]:
        """Return the mean loss of each of K `members` of an ensemble, [K], and the tokens that each trains on.

        `model` is their stacked network; `batch` has their batches concatenated along the first dimension.
        """
        raise NotImplementedError
