"""A recurrent network in the place of a stack of transformer blocks: `model=rnn`."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from speechformer.errors import UserError, build
from speechformer.layers.dropout import Dropout
from speechformer.layers.recurrent import Recurrent
from speechformer.models.stack import Cache, Stack


class RecurrentStack(nn.Module):
    """Token ids to hidden states, from left to right. It takes the arguments of `Stack`, and uses none of those that
    are of attention and blocks: order is known by going along, and there is nothing to attend to.

    Raises:
        UserError: a pattern or a CLS token is asked for, or the model is not "rnn".
    """

    max_length: int | None = None

    def __init__(
        self,
        *,
        vocab_size: int,
        model: dict[str, Any],
        pattern: dict[str, Any],
        width: int,
        layers: int,
        dropout: float,
        scale_embedding: bool = False,
        first_token: bool = False,
        embedding: nn.Embedding | None = None,
        **of_a_transformer: Any,
    ) -> None:
        super().__init__()
        if pattern["name"] != "full":
            raise UserError(f"model={model['name']} has no self-attention, so pattern must be full.")
        if first_token:
            raise UserError(
                "architecture.pool=cls needs a model that attends: a CLS token before a sentence that is read from left to "
                "right sees nothing of it. Take architecture.pool=mean."
            )
        self.embedding = nn.Embedding(vocab_size, width) if embedding is None else embedding
        self.scale = math.sqrt(width) if scale_embedding else 1.0
        self.dropout = Dropout(dropout)
        options = {"width": width, "layers": layers, "dropout": dropout}
        self.cells = build({model["name"]: Recurrent}, model, "model", **options)

    def forward(
        self,
        ids_BT: Tensor,
        token_mask_BT: Tensor | None = None,
        with_weights: bool = False,
        memory: None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Hidden states [B, T, D], and no attention weights.

        `cache` holds the state at the end of what stands before, or an empty dictionary for nothing, and gets that at
        the end of these.
        """
        before = cache[0] if cache and cache[0] else None
        x_BTD, end = self.cells(self.dropout(self.embedding(ids_BT) * self.scale), before, token_mask_BT)
        if cache is not None:
            cache[0].update(end)
        return self.dropout(x_BTD), [], []

    def new_cache(self) -> Cache:
        """That of a sequence of which nothing was seen yet."""
        return [{}]


def build_stack(*, model: dict[str, Any], **arguments: Any) -> Stack | RecurrentStack:
    """The stack of a `model` config: recurrent for "rnn", else a transformer's with that positional encoding."""
    if model["name"] == "rnn_attention":
        raise UserError(
            "model=rnn_attention attends from a decoder to an encoder, so it is for task=translate; for this task "
            "take model=rnn."
        )
    kind = RecurrentStack if model["name"] == "rnn" else Stack
    return kind(model=model, **arguments)
