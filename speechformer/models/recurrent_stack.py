"""A recurrent network in place of a transformer stack: `model=rnn`.

Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from speechformer.errors import UserError, build
from speechformer.kernels.dropout import FastDropout
from speechformer.layers.recurrent import Recurrent
from speechformer.models.stack import Cache, Stack


class RecurrentStack(nn.Module):
    """A stack of recurrent layers, from token ids to hidden states.

    It takes the arguments of `Stack` and ignores those of attention and blocks.

    Raises:
        UserError: the config asks for a pattern or a CLS token, which need attention.
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
                "architecture.pool=cls needs attention: a CLS token in front of a sentence that a recurrent network "
                "reads from left to right would know nothing of it. Set architecture.pool=mean."
            )
        self.embedding = nn.Embedding(vocab_size, width) if embedding is None else embedding
        self.scale = math.sqrt(width) if scale_embedding else 1.0
        self.dropout = FastDropout(dropout)
        arguments = {"width": width, "layers": layers, "dropout": FastDropout(dropout)}
        self.cells = build({model["name"]: Recurrent}, model, "model", **arguments)

    def forward(
        self,
        ids_BT: Tensor,
        token_mask_BT: Tensor | None = None,
        with_weights: bool = False,
        memory: None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the stack.

        Args:
            token_mask_BT: False on padding.
            with_weights, memory: ignored; they are arguments of `Stack`.
            cache: the state before these tokens, replaced by the state after them; starts as `new_cache()`.

        Returns:
            Hidden states, [B, T, D], and two empty lists in place of attention weights.
        """
        state = cache[0] if cache and cache[0] else None
        x_BTD, state = self.cells(self.dropout(self.embedding(ids_BT) * self.scale), state, token_mask_BT)
        if cache is not None:
            cache[0].update(state)
        return self.dropout(x_BTD), [], []

    def new_cache(self) -> Cache:
        """Return the cache of an empty sequence."""
        return [{}]


def build_stack(*, model: dict[str, Any], **arguments: Any) -> Stack | RecurrentStack:
    """Build the stack of a `model` config: recurrent for "rnn", else a transformer with that encoding."""
    if model["name"] == "rnn_attention":
        raise UserError(
            "model=rnn_attention attends from a decoder to an encoder, so it needs task=translate. "
            "Use model=rnn for this task."
        )
    stack_class = RecurrentStack if model["name"] == "rnn" else Stack
    return stack_class(model=model, **arguments)
