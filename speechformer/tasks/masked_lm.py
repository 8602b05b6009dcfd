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

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.errors import UserError
from speechformer.kernels.loss import next_token_loss
from speechformer.models.classifier import EncoderClassifier

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
