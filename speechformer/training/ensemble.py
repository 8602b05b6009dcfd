"""Model ensembling: a LightningModule that trains tasks whose parameters have the same shapes as one.

The Trainer sees one module with the members' weights stacked (`models/ensemble.py`) and their batches concatenated.
Each member remains the task that it is alone. Its parameters are views of the stacked ones. It has its own seed,
order of batches, dropout, learning rate and metrics, and the callbacks and files of an ordinary run. A member meets
the Trainer as `MemberTrainer`, and its checkpoints are extracted from those of the ensemble.

A member's metrics equal those of its ordinary run up to rounding: products of K matrices add up in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.corpora.special_tokens import PAD
from speechformer.data.batches import Batch
from speechformer.models.ensemble import DropoutGenerators, stack_models
from speechformer.runs.folder import RunFolder
from speechformer.tasks.optim import build_optimizer
from speechformer.tasks.trainable import is_logged
from speechformer.training.build import Run
from speechformer.training.callbacks import Progress


class MemberTrainer:
    """The Trainer of an ensemble as member k sees it."""

    def __init__(self, ensemble: Ensemble, k: int) -> None:
        self.ensemble, self.k, self.logger = ensemble, k, ensemble.members[k].logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ensemble.trainer, name)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizer, as far as it has the member's learning rate."""
        rate, (optimizer,) = self.ensemble.rates[self.k], self.ensemble.trainer.optimizers
        return [SimpleNamespace(param_groups=[{"lr": rate * group["lr"]} for group in optimizer.param_groups])]

    @property
    def global_step(self) -> int:
        """The steps that the member has done."""
        return self.ensemble.ended_at.get(self.k, self.ensemble.trainer.global_step)

    def save_checkpoint(self, path: Path, weights_only: bool = False) -> None:
        """Write the member's own checkpoint, unless the member has ended."""
        if self.k not in self.ensemble.ended_at:
            self.ensemble.saved_member = self.k
            self.ensemble.trainer.save_checkpoint(path, weights_only)


class Ensemble(pl.LightningModule):
    """The tasks of K runs as one module; they are of one class, with parameters of the same shapes.

    Attributes:
        saved_member: the member whose checkpoint is being saved.
        ended_at: the step at which a member diverged, by its number.
        rates: the learning rates as fractions of the highest, which is that of `first`.
    """

    tokens: Tensor

    def __init__(self, members: Sequence[Run]) -> None:
        super().__init__()
        self.members, self.saved_member = list(members), 0
        self.ended_at: dict[int, int] = {}
        self.tasks = [member.task for member in members]
        self.generators = DropoutGenerators([task.generator for task in self.tasks])
        self.model = stack_models([task.model for task in self.tasks], self.generators)
        self.register_buffer("tokens", torch.zeros(len(members), dtype=torch.int64), persistent=False)
        rates = [task.recipe["lr"] for task in self.tasks]
        self.first = self.tasks[rates.index(max(rates))]
        self.rates = [rate / (max(rates) or 1.0) for rate in rates]
        self.recipe, self.progress_columns = self.first.recipe, self.first.progress_columns

    def active(self) -> list[tuple[int, Run]]:
        """Return the members that have not ended, with their numbers."""
        return [(k, member) for k, member in enumerate(self.members) if k not in self.ended_at]

    def tie(self) -> None:
        """Make the members' parameters views of the stacked ones, on the current device."""
        for k, task in enumerate(self.tasks):
            task.to(self.device)
            task.trainer = MemberTrainer(self, k)  # type: ignore[assignment]
            for parameter, stacked in zip(task.model.parameters(), self.model.parameters()):
                parameter.data = stacked.detach()[k]
            task.tokens = self.tokens[k]

    def train_dataloader(self) -> EnsembleBatches:
        return EnsembleBatches(self.members)

    def val_dataloader(self) -> Any:
        return self.members[0].data.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.members[0].data.test_dataloader()

    def configure_optimizers(self) -> Any:
        self.tie()
        width = self.first.hparams["architecture"]["width"]
        configured = build_optimizer(self.model, self.recipe, width, self.trainer)
        if set(self.rates) != {1.0}:
            optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
            scale_steps(optimizer, list(self.model.parameters()), self.rates)
        return configured

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.generators.padding = batch["padding"]
        losses_K = self.losses(batch)
        logged = is_logged(self.trainer, batch_idx)
        if logged or losses_K.device.type == "cpu":
            losses = losses_K.tolist()
            for k, member in self.active():
                member.task.record_loss(losses[k], self.global_step + 1, logged)
        return losses_K.sum()

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each member, [K]."""
        losses_K, tokens = self.first.member_losses(self.model, batch, len(self.tasks))
        self.tokens += tokens
        return losses_K

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.global_step + 1
        if step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            norms = gradient_norms(self.model).tolist()
            for k, member in self.active():
                member.logger.log_metrics({"gradient_norm": norms[k]}, step)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), gradient_clip_val)
        elif gradient_clip_val:
            clip_member_norms(self.model, gradient_clip_val)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        for k, member in self.active():
            if member.task.diverged_at is not None:
                member.task.trainer.save_checkpoint(member.folder.path / "last.ckpt")
                self.ended_at[k] = self.global_step
        if self.active():
            return None
        self.trainer.should_stop = True
        return -1

    def on_validation_epoch_start(self) -> None:
        self.tie()
        for _, member in self.active():
            member.task.on_validation_epoch_start()

    def validation_step(self, batch: Batch) -> None:
        if self.device.type == "cpu":  # one member's rows at a time fit into the cache
            for _, member in self.active():
                member.task.eval().evaluate_batch(batch)
            return
        K = len(self.tasks)
        repeated = {**batch, "ids": batch["ids"].repeat(K, 1)}
        outputs = self.first.forward_batch(self.model, repeated).chunk(K)
        for k, member in self.active():
            member.task.update_metrics(outputs[k], batch)

    def on_validation_epoch_end(self) -> None:
        for _, member in self.active():
            member.task.on_validation_epoch_end()

    def on_test_epoch_end(self) -> None:
        for _, member in self.active():
            member.task.on_test_epoch_end()

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        make_member_checkpoint(self, checkpoint)

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation, averaged over the members."""
        each = [member.task.compute_metrics() for _, member in self.active()]
        return {name: sum(metrics[name] for metrics in each) / len(each) for name in (each[0] if each else {})}


class CallMemberCallbacks(pl.Callback):
    """Calls the callbacks of each member of an ensemble that has not ended."""

    def call(self, ensemble: Any, hook: str, *arguments: Any) -> None:
        """Call a hook of the members' callbacks."""
        for _, member in ensemble.active():
            for callback in member.callbacks:
                getattr(callback, hook)(member.task.trainer, member.task, *arguments)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.call(pl_module, "on_fit_start")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.call(pl_module, "on_train_start")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.call(pl_module, "on_train_batch_end", outputs, batch, batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.call(pl_module, "on_validation_end")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.call(pl_module, "on_train_end")


class EnsembleProgress(Progress):
    """The progress of an ensemble: in the `run.json` of each member, with the mean of their losses."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        super().__init__(folders[0])
        self.folders = folders

    def report(self, **progress: Any) -> None:
        for folder in self.folders:
            folder.report_progress(**progress)

    def loss_of(self, outputs: Any) -> float:
        return super().loss_of(outputs) / len(self.folders)


def gradient_norms(model: torch.nn.Module) -> Tensor:
    """Return the norm of the gradients of each member, over all of its parameters, [K]."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)


def clip_member_norms(model: torch.nn.Module, largest: float) -> None:
    """Scale the gradients of each member whose norm is above `largest`, as torch's `clip_grad_norm_` does."""
    factors_K = (largest / (gradient_norms(model) + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factors_K.view(-1, *[1] * (parameter.ndim - 1))


def scale_steps(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rates: list[float]) -> None:
    """Let each member take its fraction of the optimizer's step, which is proportional to the learning rate."""
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    def interpolate(*_: Any) -> None:
        with torch.no_grad():
            for parameter, old in zip(parameters, before):
                fractions = old.new_tensor(rates).view(-1, *[1] * (old.ndim - 1))
                parameter.copy_(torch.lerp(old, parameter, fractions.expand_as(old)))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(interpolate)


def make_member_checkpoint(ensemble: Ensemble, checkpoint: dict[str, Any]) -> None:
    """Make the checkpoint of an ensemble that of `saved_member`, as its ordinary run would write it."""
    k = ensemble.saved_member
    member, rate, task = ensemble.members[k], ensemble.rates[k], ensemble.tasks[k]
    checkpoint["state_dict"] = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    checkpoint[task.CHECKPOINT_HYPER_PARAMS_NAME] = task._hparams_name
    checkpoint[task.CHECKPOINT_HYPER_PARAMS_KEY] = dict(task.hparams)
    if "callbacks" in checkpoint:
        states = {each.state_key: each.state_dict() for each in (member.logger, *member.callbacks)}
        checkpoint["callbacks"] |= {name: state for name, state in states.items() if state}
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            member_optimizer(state, k, rate) for state in checkpoint["optimizer_states"]
        ]
        for schedule in checkpoint["lr_schedulers"]:
            schedule |= {name: [rate * lr for lr in schedule[name]] for name in ("base_lrs", "_last_lr")}
    task.on_save_checkpoint(checkpoint)


def member_optimizer(state: dict[str, Any], k: int, rate: float) -> dict[str, Any]:
    """Extract the state of member k's optimizer."""
    groups = [dict(group) for group in state["param_groups"]]
    for group in groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] *= rate
    moments = {
        index: {name: value[k].clone() if value.ndim else value for name, value in of_one.items()}
        for index, of_one in state["state"].items()
    }
    return {"state": moments, "param_groups": groups}


class EnsembleBatches:
    """The training batches of all members, which differ only in their order, concatenated; shorter ones are padded.

    `batch["padding"]` holds the number of tokens that each member's batch was padded by.
    """

    def __init__(self, members: Sequence[Run]) -> None:
        data = [copy.copy(member.data) for member in members]
        for member_data, member in zip(data, members):
            member_data.seed = member.config["seed"]
        self.loaders = [member_data.train_dataloader() for member_data in data]
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
