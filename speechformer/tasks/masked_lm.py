"""Masked language modelling: a classifier learns to predict words that its input lacks.

    task.masked_lm            weight of this loss beside that of the classes (multi-task learning)
    task.pretraining_epochs   the first epochs, in which this loss is the only one
    task.extra_text           sentences without a class, for this loss alone

Devlin et al. 2019, "BERT", section 3.1: of the tokens RATE are predicted. Of these 80 % are masked, 10 % become
another word, and 10 % stay. The mask is <unk>, so an unknown word of a test is read as a masked one. The output layer
is the table of embeddings with a bias. Both losses come from one forward pass, so the classes are predicted from
masked sentences, too.

Shapes: B sentences, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import PAD, UNKNOWN
from speechformer.kernels.loss import next_token_loss
from speechformer.models.classifier import EncoderClassifier

RATE = 0.15


class MaskedLM:
    """Masks training batches, and computes the loss of the masked words.

    Args:
        weight: of the loss beside that of the classes.
        epochs: number of first epochs in which it is the only loss.
        vocabulary: number of words that can occur, special tokens included.
    """

    def __init__(self, weight: float, epochs: int, vocabulary: int) -> None:
        self.weight, self.epochs, self.vocabulary = weight, epochs, vocabulary

    def mask(self, ids_BT: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the inputs, [B, T], and which of their tokens to predict, [B, T]: at least one."""
        drawn_BT = torch.rand(ids_BT.shape, generator=generator).to(ids_BT.device)
        others_BT = torch.randint(UNKNOWN + 1, self.vocabulary, ids_BT.shape, generator=generator).to(ids_BT.device)
        chosen_BT = (drawn_BT < RATE) & (ids_BT != PAD)
        chosen_BT[0, 0] |= ~chosen_BT.any()
        masked_BT = ids_BT.where(~chosen_BT | (drawn_BT >= 0.9 * RATE), others_BT)
        return masked_BT.where(~chosen_BT | (drawn_BT >= 0.8 * RATE), UNKNOWN), chosen_BT

    def loss(self, model: EncoderClassifier, x_BTD: Tensor, ids_BT: Tensor, chosen_BT: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the chosen words after these hidden states, in nats."""
        hidden_RD = x_BTD[:, int(model.first_token) :][chosen_BT]
        return next_token_loss(model.encoder.embedding.weight, model.word_bias, hidden_RD, ids_BT[chosen_BT])
