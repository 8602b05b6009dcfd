"""Several runs as one: a LightningModule that trains tasks whose parameters have the same shapes in one go.

The Trainer sees one module, with the members' weights stacked (see `layers/packed.py`) and their batches one behind
the other. Each member stays the task that it is alone: its parameters are views of the stacked ones, it has its own
seed, order of batches, dropout, learning rate and metrics, and its callbacks and files are those of a run alone. They
meet the Trainer through `MemberTrainer`, and a checkpoint is cut out of the whole's.

A member's figures are those of its run alone but for rounding: products of K matrices are summed in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.corpora.special_tokens import PAD
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, TrainingBatches
from speechformer.models.ensemble import Draws, stack_models
from speechformer.tasks.base import Task
from speechformer.tasks.trainable import is_logged
from speechformer.training.callbacks import AtomicCheckpointIO, Checkpoints, PhaseTimer, ReplayLogger


@dataclass
class Member:
    """A run of a pack.

    Attributes: `callbacks`, its own, of which `keep` is one; `over`, the step at which it ended before the others.
    """

    task: Task
    directory: Path
    record: ReplayLogger
    keep: Checkpoints
    callbacks: Sequence[pl.Callback]
    over: int | None = field(default=None, init=False)


class MemberTrainer:
    """The Trainer of a pack as one of its members sees it."""

    def __init__(self, pack: Ensemble, k: int) -> None:
        self.pack, self.k = pack, k
        self.logger = pack.members[k].record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pack.trainer, name)

    @property
    def global_step(self) -> int:
        """The steps that the member has done."""
        over = self.pack.members[self.k].over
        return self.pack.trainer.global_step if over is None else over

    def save_checkpoint(self, path: Path, weights_only: bool = False) -> None:
        """Write the member's own checkpoint; that of one that has ended stays."""
        if self.pack.members[self.k].over is not None:
            return
        self.pack.cut_out = self.k
        self.pack.trainer.save_checkpoint(path, weights_only)


class Ensemble(pl.LightningModule):
    """K tasks as one.

    Args:
        members: of one kind, with parameters of the same shapes; their recipes differ in `lr` at most.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__()
        self.members, self.cut_out = list(members), 0
        self.tasks = [member.task for member in members]
        self.draws = Draws([task.generator for task in self.tasks])
        self.model = stack_models([task.model for task in self.tasks], self.draws)
        self.register_buffer("tokens", torch.zeros(len(members), dtype=torch.int64), persistent=False)
        rates = [task.recipe["lr"] for task in self.tasks]
        self.first = self.tasks[rates.index(max(rates))]
        self.rates = [rate / (max(rates) or 1.0) for rate in rates]  # of learning, as parts of the first's
        self.recipe, self.progress_columns = self.first.recipe, self.first.progress_columns

    tokens: Tensor

    def alive(self) -> list[tuple[int, Member]]:
        """The members that have not ended, by number."""
        return [(k, member) for k, member in enumerate(self.members) if member.over is None]

    def tie(self) -> None:
        """Make the members' parameters views of the stacked ones, wherever those are now."""
        for k, task in enumerate(self.tasks):
            task.to(self.device)
            task.trainer = MemberTrainer(self, k)  # type: ignore[assignment]
            for parameter, stacked in zip(task.model.parameters(), self.model.parameters()):
                parameter.data = stacked.detach()[k]
            task.tokens = self.tokens[k]

    def configure_optimizers(self) -> Any:
        self.tie()
        parameters = list(self.model.parameters())
        found = self.first.build_optimizer(parameters)
        optimizer = found["optimizer"] if isinstance(found, dict) else found
        if set(self.rates) != {1.0}:
            # Each of the optimisers' steps is a multiple of the learning rate, so a member's is a part of the first's
            before: list[Tensor] = []

            def remember(*_: Any) -> None:
                before[:] = [parameter.detach().clone() for parameter in parameters]

            def go_a_part_of_the_way(*_: Any) -> None:
                with torch.no_grad():
                    for parameter, old in zip(parameters, before):
                        parts = old.new_tensor(self.rates).view(-1, *[1] * (old.ndim - 1))
                        parameter.copy_(torch.lerp(old, parameter, parts.expand_as(old)))

            optimizer.register_step_pre_hook(remember)
            optimizer.register_step_post_hook(go_a_part_of_the_way)
        return found

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.draws.padding = batch["padding"]
        losses_K = self.losses(batch)
        logged = is_logged(self.trainer, batch_idx)
        if logged or losses_K.device.type == "cpu":
            step = self.global_step + 1
            for (k, member), loss in zip(enumerate(self.members), losses_K.tolist()):
                if member.over is None:
                    member.task.record_loss(loss, step, logged, self.rates[k])
        return losses_K.sum()

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each member, [K]."""
        losses_K, tokens = self.first.member_losses(self.model, batch, len(self.tasks))
        self.tokens += tokens
        return losses_K

    def gradient_norms(self) -> Tensor:
        """Of each member, over all of its parameters, [K]."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.global_step + 1
        if step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            norms = self.gradient_norms().tolist()
            for k, member in self.alive():
                member.record.log_metrics({"gradient_norm": norms[k]}, step)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), gradient_clip_val)
            return
        parts = (gradient_clip_val / (self.gradient_norms() + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= parts.view(-1, *[1] * (parameter.ndim - 1))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        for _, member in self.alive():
            if member.task.diverged_at is not None:
                member.task.trainer.save_checkpoint(member.directory / "last.ckpt")
                member.over = self.global_step
        if self.alive():
            return None
        self.trainer.should_stop = True
        return -1

    def on_validation_epoch_start(self) -> None:
        self.tie()
        for _, member in self.alive():
            member.task.on_validation_epoch_start()

    def validation_step(self, batch: Batch) -> None:
        if self.device.type == "cpu":  # a member's rows fit into the cache
            for _, member in self.alive():
                member.task.eval().evaluate_batch(batch)
            return
        K = len(self.tasks)
        repeated = {**batch, "ids": batch["ids"].repeat(K, 1)}
        outputs = self.first.forward_batch(self.model, repeated).chunk(K)
        for k, member in self.alive():
            member.task.update_metrics(outputs[k], batch)

    def on_validation_epoch_end(self) -> None:
        for _, member in self.alive():
            member.task.on_validation_epoch_end()

    def on_test_epoch_end(self) -> None:
        for _, member in self.alive():
            member.task.on_test_epoch_end()

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation, averaged over the members."""
        each = [member.task.metrics() for _, member in self.alive()]
        return {name: sum(metrics[name] for metrics in each) / len(each) for name in (each[0] if each else {})}

    def cut(self, whole: dict[str, Any], stopwatch: PhaseTimer) -> dict[str, Any]:
        """The checkpoint of the member that is to be cut out, as its run alone would write it, from the whole's."""
        k, member = self.cut_out, self.members[self.cut_out]
        task, own = member.task, dict(whole)
        own["state_dict"] = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        own[task.CHECKPOINT_HYPER_PARAMS_NAME] = task._hparams_name
        own[task.CHECKPOINT_HYPER_PARAMS_KEY] = dict(task.hparams)
        if "callbacks" in own:
            states = {each.state_key: each.state_dict() for each in (member.record, stopwatch, *member.callbacks)}
            own["callbacks"] = {name: state for name, state in states.items() if state}
        if "optimizer_states" in own:
            own["optimizer_states"] = [self.cut_optimizer(state, k) for state in own["optimizer_states"]]
            rate = self.rates[k]
            own["lr_schedulers"] = [
                {
                    name: [rate * lr for lr in value] if name in ("base_lrs", "_last_lr") else value
                    for name, value in s.items()
                }
                for s in own["lr_schedulers"]
            ]
        task.on_save_checkpoint(own)
        return own

    def cut_optimizer(self, state: dict[str, Any], k: int) -> dict[str, Any]:
        """The state of one member's optimiser."""
        groups = [dict(group) for group in state["param_groups"]]
        for group in groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] *= self.rates[k]
        moments = {
            index: {name: value[k].clone() if value.ndim else value for name, value in of_one.items()}
            for index, of_one in state["state"].items()
        }
        return {"state": moments, "param_groups": groups}


class EnsembleCheckpointIO(AtomicCheckpointIO):
    """Writes, where a checkpoint of a pack is asked for, that of one member."""

    def __init__(self, pack: Ensemble, stopwatch: PhaseTimer) -> None:
        super().__init__()
        self.pack, self.stopwatch = pack, stopwatch

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(self.pack.cut(checkpoint, self.stopwatch), path, storage_options)


class Forward(pl.Callback):
    """Hands what happens to a pack to the callbacks of its members."""

    def __init__(self, pack: Ensemble) -> None:
        self.pack = pack

    def each(self, hook: str, *arguments: Any) -> None:
        for _, member in self.pack.alive():
            for callback in member.callbacks:
                getattr(callback, hook)(member.task.trainer, member.task, *arguments)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.each("on_fit_start")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.each("on_train_batch_end", outputs, batch, batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.each("on_validation_end")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.each("on_train_end")


class EnsembleBatches:
    """The training batches of all members, one behind the other; a shorter one is padded.

    A batch's `padding` says by how many tokens each was made longer.
    """

    def __init__(self, loaders: Sequence[TrainingBatches]) -> None:
        self.loaders = list(loaders)
        self.sampler = self

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[Batch]:
        for batches in zip(*self.loaders, strict=True):  # strict: so that each comes to its end
            lengths = [batch["ids"].shape[1] for batch in batches]
            padding = [max(lengths) - length for length in lengths]
            ids = [F.pad(batch["ids"], (0, more), value=PAD) for batch, more in zip(batches, padding)]
            others = [name for name in batches[0] if name != "ids"]
            rest = {name: torch.cat([batch[name] for batch in batches]) for name in others}
            yield {"ids": torch.cat(ids), **rest, "padding": padding}

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, in all."""
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """That of each of them: they are all as far."""
        return self.loaders[0].state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)


class EnsembleData(pl.LightningDataModule):
    """The data of all members, which differ in the order of training alone."""

    def __init__(self, data: TaskData, seeds: Sequence[int]) -> None:
        super().__init__()
        self.data, self.seeds = data, list(seeds)

    def train_dataloader(self) -> EnsembleBatches:
        loaders = []
        for seed in self.seeds:
            data = copy.copy(self.data)
            data.seed = seed
            loaders.append(data.train_dataloader())
        return EnsembleBatches(loaders)

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.data.test_dataloader()
