"""Model ensembling: a LightningModule that trains tasks whose parameters have the same shapes as one.

The Trainer sees one module with the tasks' weights stacked (`models/ensemble.py`) and their batches concatenated.
Each task remains what it is alone: its parameters are views of the stacked ones; it has its own seed, order of
batches, dropout, learning rate, metrics and curve. Metrics equal those of ordinary runs up to rounding: products of K
matrices add up in another order.

Shapes: K tasks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, EvaluationBatches
from speechformer.models.ensemble import DropoutGenerators, stack_models
from speechformer.tasks.base import ends_logged_step
from speechformer.tasks.optim import build_optimizer

if TYPE_CHECKING:
    from speechformer.training.results import Run


class Ensemble(pl.LightningModule):
    """The tasks of K runs as one module; they are of one class, with parameters of the same shapes.

    Attributes:
        tasks: each with its own state of training; parameters are views of the stacked ones.
        rates: the learning rates as fractions of the highest, which is that of `first`.
    """

    tokens: Tensor

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__()
        self.runs, self.tasks = list(runs), [run.task for run in runs]
        self.generators = DropoutGenerators([task.generator for task in self.tasks])
        self.model = stack_models([task.model for task in self.tasks], self.generators)
        self.register_buffer("tokens", torch.zeros(len(runs), dtype=torch.int64), persistent=False)
        rates = [task.recipe["lr"] for task in self.tasks]
        self.first = self.tasks[rates.index(max(rates))]
        self.rates = [rate / (max(rates) or 1.0) for rate in rates]

    @property
    def active(self) -> list[Run]:
        """The runs that have not diverged."""
        return [run for run in self.runs if run.task.diverged_at is None]

    def tie(self) -> None:
        """Make the parameters of the tasks views of the stacked ones, on the current device."""
        for k, task in enumerate(self.tasks):
            task.to(self.device)
            for parameter, stacked in zip(task.model.parameters(), self.model.parameters()):
                parameter.data = stacked.detach()[k]
            task.tokens = self.tokens[k]

    def configure_optimizers(self) -> Any:
        self.tie()
        width = self.first.hparams["architecture"]["width"]
        configured = build_optimizer(self.model, self.first.recipe, width, self.trainer)
        if set(self.rates) != {1.0}:
            optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
            scale_steps(optimizer, list(self.model.parameters()), self.rates)
        return configured

    def on_train_start(self) -> None:
        self.tie()
        for task in self.tasks:
            task.resume(self.trainer.train_dataloader)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        if self.active:
            return None
        self.trainer.should_stop = True
        return -1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.generators.padding = batch["padding"]
        losses_K = self.losses(batch)
        logged = ends_logged_step(self.trainer, batch_idx)
        if logged or losses_K.device.type == "cpu":
            losses, step = losses_K.tolist(), self.global_step + 1
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            for run, loss, factor in zip(self.runs, losses, self.rates):
                if run.task.diverged_at is None:
                    run.task.check_loss(loss, step)
                    if logged:
                        run.loggers.log_metrics({"train_loss": loss, "lr": factor * rate}, step)
        return losses_K.sum()

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each task, [K]."""
        losses_K, tokens = self.first.member_losses(self.model, batch, len(self.tasks))
        self.tokens += tokens
        return losses_K

    def gradient_norms(self) -> list[float]:
        """Return the norm of the gradients of each task."""
        return gradient_norms(self.model).tolist()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of each task by themselves."""
        if gradient_clip_val and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), gradient_clip_val)
        elif gradient_clip_val:
            factors_K = (gradient_clip_val / (gradient_norms(self.model) + 1e-6)).clamp(max=1.0)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= by_task(factors_K, parameter)

    def on_validation_epoch_start(self) -> None:
        self.tie()
        for run in self.active:
            run.task.eval().begin_evaluation()

    def validation_step(self, batch: Batch) -> None:
        if self.device.type == "cpu":  # one task's rows at a time fit into the cache
            for run in self.active:
                run.task.evaluate_batch(batch)
            return
        K = len(self.tasks)
        output = self.first.forward_batch(self.model, {**batch, "ids": batch["ids"].repeat(K, 1)})
        self.first.update_members(self.tasks, self.model, output, batch)

    def on_validation_epoch_end(self) -> None:
        for run in self.active if not self.trainer.sanity_checking else ():
            run.task.end_evaluation(self.global_step)
            run.loggers.log_metrics(run.task.metrics, self.global_step)

    def on_test_epoch_end(self) -> None:
        for run in self.active:
            run.task.end_evaluation()
            run.loggers.log_metrics(run.task.metrics, self.global_step)

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"task": "ensemble", "hyper_parameters": {}}
        checkpoint["progress"] = [task.progress() for task in self.tasks]
        checkpoint["batches"] = getattr(self.trainer.train_dataloader, "state_dict", dict)()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for k, (task, progress) in enumerate(zip(self.tasks, checkpoint["progress"], strict=True)):
            task.restore(progress, checkpoint["batches"])
            self.tokens[k] = task.tokens


def by_task(values_K: Tensor, parameter: Tensor) -> Tensor:
    """Return a number for each task in the shape that multiplies a stacked parameter, [K, 1, ...]."""
    return values_K.view(-1, *[1] * (parameter.ndim - 1))


def gradient_norms(model: nn.Module) -> Tensor:
    """Return the norm of the gradients of each task, over all of its parameters, [K]."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)


def scale_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rates: list[float]) -> None:
    """Let each task take its fraction of the optimizer's step, which is proportional to the learning rate."""
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    def interpolate(*_: Any) -> None:
        with torch.no_grad():
            for parameter, old in zip(parameters, before):
                parameter.copy_(torch.lerp(old, parameter, by_task(old.new_tensor(rates), old).expand_as(old)))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(interpolate)


class EnsembleData(pl.LightningDataModule):
    """The data of some runs, which differ only in the order of the training batches; `data` is that of the first."""

    def __init__(self, data: TaskData, seeds: Sequence[int]) -> None:
        super().__init__()
        self.data, self.seeds = data, seeds

    def train_dataloader(self) -> EnsembleBatches:
        each = [copy.copy(self.data) for _ in self.seeds]
        for data, seed in zip(each, self.seeds):
            data.seed = seed
        return EnsembleBatches([data.train_dataloader() for data in each])

    def val_dataloader(self) -> EvaluationBatches:
        return self.data.val_dataloader()

    def test_dataloader(self) -> EvaluationBatches:
        return self.data.test_dataloader()


class EnsembleBatches:
    """The training batches of all runs, concatenated; shorter ones are padded.

    `batch["padding"]` holds the number of tokens that each run's batch was padded by.
    """

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self.sampler = self

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[Batch]:
        for batches in zip(*self.loaders, strict=True):  # strict, so that each loader reaches its end
            lengths = [batch["ids"].shape[1] for batch in batches]
            padding = [max(lengths) - length for length in lengths]
            ids = [F.pad(batch["ids"], (0, more), value=PAD) for batch, more in zip(batches, padding)]
            others = [name for name in batches[0] if name != "ids"]
            rest = {name: torch.cat([batch[name] for batch in batches]) for name in others}
            yield {"ids": torch.cat(ids), **rest, "padding": padding}

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch in all loaders."""
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self.loaders[0].state_dict()  # the same in all

    def load_state_dict(self, state: dict[str, int]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)
