"""The encoder-classifier: who said this sentence?

token ids -> bidirectional stack -> one vector for the sentence -> linear, ReLU, linear -> class logits
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.models.stack import Weights, build_stack


class EncoderClassifier(nn.Module):
    """An encoder with a classification head.

    Args:
        classes: number of classes.
        block_size: length of the longest sentence, in tokens.
        pool: "mean" over the tokens, "cls", the state of a trained token in front of the sentence, or "first", that
            of the sentence's first token.
        classifier_width, classifier_activation: of the hidden layer of the head.
        stack: other arguments of `Stack`.
    """

    def __init__(
        self,
        *,
        classes: int,
        block_size: int,
        pool: str,
        classifier_width: int,
        classifier_activation: str = "relu",
        **stack: Any,
    ) -> None:
        super().__init__()
        self.first_token, self.pool = pool == "cls", pool
        self.encoder = build_stack(length=block_size, causal=False, first_token=self.first_token, **stack)
        most = self.encoder.max_length
        self.max_length = None if most is None else most - self.first_token
        self.head = nn.Sequential(
            nn.Linear(stack["width"], classifier_width),
            nn.ReLU() if classifier_activation == "relu" else nn.Tanh(),
            nn.Linear(classifier_width, classes),
        )

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits of sentences padded with `PAD`, [B, classes]."""
        x_BTD = self.encoder(ids_BT, ids_BT != PAD)[0]
        if self.pool != "mean":
            return self.head(x_BTD[:, 0])
        token_mask_BT1 = (ids_BT != PAD)[:, :, None]
        return self.head((x_BTD * token_mask_BT1).sum(dim=1) / token_mask_BT1.sum(dim=1))

    def attention(self, ids_BT: Tensor) -> Weights:
        """Return the attention weights of each layer, "encoder": [B, N, T, T]. A CLS token counts as the first."""
        return {"encoder": self.encoder(ids_BT, ids_BT != PAD, with_weights=True)[1]}
