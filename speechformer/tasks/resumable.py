"""Checkpoints from which an interrupted training continues as if nothing had happened, to the last bit."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor


def gather(value: Any) -> list[Any]:
    """Return the value of each process of a run, by rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class ResumableModule(pl.LightningModule):
    """A LightningModule that saves what later steps depend on, besides what Lightning saves itself.

    Attributes:
        tokens: tokens trained on so far, without padding, of this process.
        curve: step and metrics of each evaluation.
        diverged_at: the step whose loss was NaN or infinite, or None.
        generator: of the random numbers that training draws on the CPU.
    """

    name: ClassVar[str]
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.generator = torch.default_generator
        self.loaded_random: list[Tensor] | None = None  # of a checkpoint, until training starts
        self.loaded_batches: dict[str, int] = {}
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        if "optimizer_states" in checkpoint:  # not of weights alone
            checkpoint["progress"] = {
                "tokens": gather(int(self.tokens)),
                "random": gather(self.random_state()),
                "curve": self.curve,
                "diverged_at": self.diverged_at,
                "batches": getattr(self.trainer.train_dataloader, "state_dict", dict)(),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "progress" in checkpoint:
            progress = checkpoint["progress"]
            self.curve, self.diverged_at = list(progress["curve"]), progress["diverged_at"]
            self.loaded_batches = progress["batches"]
            rank = self.global_rank % len(progress["tokens"])
            self.tokens.fill_(progress["tokens"][rank])
            self.loaded_random = progress["random"][rank]

    def random_state(self) -> list[Tensor]:
        """Return the state of the random number generators of the CPU and of the device."""
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [self.generator.get_state(), *on_device]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore `random_state`; a device that it does not contain keeps its own."""
        self.generator.set_state(state[0].cpu())
        if self.device.type == "cuda" and len(state) > 1:
            torch.cuda.set_rng_state(state[1].cpu(), self.device)

    def on_train_start(self) -> None:
        if self.loaded_random is not None:  # as late as this: building a run draws random numbers
            self.set_random_state(self.loaded_random)
            self.loaded_random = None
        if self.loaded_batches:  # Lightning does it too, but not if it had to count the steps for a schedule
            self.trainer.train_dataloader.load_state_dict(self.loaded_batches)  # type: ignore[union-attr]
            self.loaded_batches = {}
