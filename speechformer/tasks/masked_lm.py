"""Masked language modelling: a classifier learns to predict words that its input lacks.

    task.masked_lm            weight of this loss beside that of the classes (multi-task learning)
    task.pretraining_epochs   number of first epochs in which this loss is the only one; then optimizer and schedule
                              begin again
    task.extra_text           lines of running text, without a class, for this loss alone

Devlin et al. 2019, "BERT", section 3.1: of the tokens RATE are predicted. Of these 80 % are masked, 10 % become
another token, drawn by its frequency in train, and 10 % stay. The mask is <unk>, so an unknown word of a test is read
as a masked one. <unk> itself is never predicted. Both losses come from one forward pass, so the classes are predicted
from masked sentences, too.

Shapes: B sentences, T tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speechformer.console import say
from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.data.batches import Batch
from speechformer.errors import UserError
from speechformer.kernels.loss import next_token_loss
from speechformer.models.classifier import EncoderClassifier
from speechformer.tasks.base import Task

RATE = 0.15


class MaskedLM:
    """Masks training batches, and computes the loss of the masked words.

    Args:
        weight: of the loss beside that of the classes.
        epochs: number of first epochs in which it is the only loss.
    """

    def __init__(self, weight: float, epochs: int) -> None:
        self.weight, self.epochs = weight, epochs

    def attach(self, ids: Tensor) -> None:
        """Take the ids of the training text, of any shape, padding included; a `UserError` if all are <unk>."""
        self.stream = ids[ids > UNKNOWN].long()
        if not len(self.stream):
            raise UserError("Masked language modelling needs words to predict, but all of train is <unk>.")

    def mask(self, ids_BT: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the inputs, [B, T], and which of their tokens to predict, [B, T]."""
        drawn_BT = torch.rand(ids_BT.shape, generator=generator).to(ids_BT.device)
        others_BT = self.stream[torch.randint(len(self.stream), ids_BT.shape, generator=generator)].to(ids_BT.device)
        chosen_BT = (drawn_BT < RATE) & (ids_BT > UNKNOWN)
        masked_BT = ids_BT.where(~chosen_BT | (drawn_BT >= 0.9 * RATE), others_BT)
        return masked_BT.where(~chosen_BT | (drawn_BT >= 0.8 * RATE), UNKNOWN), chosen_BT

    def loss(self, model: EncoderClassifier, x_BTD: Tensor, ids_BT: Tensor, chosen_BT: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, in nats, of the chosen words given these states; 0 if none is."""
        hidden_RD = x_BTD[:, int(model.first_token) :][chosen_BT]
        if not len(hidden_RD):
            return x_BTD.sum() * 0
        assert model.words is not None
        return next_token_loss(model.words.weight, model.words.bias, hidden_RD, ids_BT[chosen_BT])


class PretrainedTask(Task):
    """A task whose first epochs may train masked words alone.

    Attributes:
        masked_lm: None for a task without masked words.
    """

    masked_lm: MaskedLM | None

    def attach_words(self, ids: Tensor) -> None:
        """Take the ids of the training text, from which masked words are replaced."""
        if self.masked_lm is not None:
            self.masked_lm.attach(ids)

    @property
    def is_pretraining(self) -> bool:
        return self.masked_lm is not None and self.current_epoch < self.masked_lm.epochs

    def pretraining_steps(self) -> int:
        if self.masked_lm is None or not self.masked_lm.epochs:
            return 0
        total, accumulated = self.trainer.estimated_stepping_batches, self.trainer.accumulate_grad_batches
        steps = self.masked_lm.epochs * math.ceil(self.trainer.num_training_batches / accumulated)
        if steps >= total:
            raise UserError(
                f"task.pretraining_epochs={self.masked_lm.epochs} takes {steps} steps, and the run has {int(total)}, "
                "which leaves none for the classes; set fewer, or a higher trainer.max_epochs or trainer.max_steps."
            )
        return steps

    def on_train_start(self) -> None:
        super().on_train_start()
        if steps := self.pretraining_steps():
            say(f"The first {steps} steps predict masked words alone; only later ones learn the classes.")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        if batch_idx == 0 and self.masked_lm is not None and self.current_epoch == self.masked_lm.epochs:
            self.trainer.optimizers[0].state.clear()  # its moments are those of another loss
        return super().on_train_batch_start(batch, batch_idx)
