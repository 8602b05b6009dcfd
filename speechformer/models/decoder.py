"""The GPT-style decoder: what word comes next?

Token ids -> causal stack -> linear -> logits over the vocabulary. Radford et al. 2019.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from speechformer.models.recurrent_stack import build_stack
from speechformer.models.stack import Cache, Weights


class Decoder(nn.Module):
    """Ids of a text to logits of the next token.

    Args:
        block_size: the number of positions that the model is trained on.
        tied_output: the output layer uses the embedding table (Press and Wolf 2017) and has no bias. Then
            start small, as with `recipe=normal`: torch's normal(0, 1) embeddings make wild logits.
        stack: the arguments of `Stack`.
    """

    def __init__(self, *, block_size: int, tied_output: bool, **stack: Any) -> None:
        super().__init__()
        self.decoder = build_stack(length=block_size, causal=True, **stack)
        self.output = nn.Linear(stack["width"], stack["vocab_size"], bias=not tied_output)
        if tied_output:
            self.output.weight = self.decoder.embedding.weight

    @property
    def max_length(self) -> int | None:
        """The most tokens that it can take; None for no limit."""
        return self.decoder.max_length

    def hidden(self, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """The states from which `output` makes logits, [B, T, D].

        With `cache` (at first `decoder.new_cache()`), the ids are what follows it, and are added to it.
        """
        return self.decoder(ids_BT, cache=cache)[0]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the token after each, [B, T, vocabulary]."""
        return self.output(self.hidden(ids_BT))

    def attention(self, ids_BT: Tensor) -> Weights:
        """The attention weights of each layer of the "decoder", [B, N, T, T]."""
        return {"decoder": self.decoder(ids_BT, with_weights=True)[1]}
