"""The GPT-style decoder: which token comes next?

token ids -> causal stack -> linear -> logits over the vocabulary

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from speechformer.errors import UserError
from speechformer.models.stack import Cache, Stack, Weights, build_stack


class CappedLinear(nn.Linear):
    """c tanh(y / c) of a linear map's y, with c = `softcap`: no logit is larger. Gemma 2, 2024."""

    def __init__(self, inputs: int, outputs: int, bias: bool, softcap: float) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        return self.softcap * (super().forward(x) / self.softcap).tanh()


class Decoder(nn.Module):
    """A causal language model.

    Args:
        block_size: number of positions the model is trained on.
        tied_output: whether the output layer shares the embedding table (Press and Wolf 2017), without a bias unless
            `output_bias` is "unigram". Use `recipe=normal` with it, since torch's normal(0, 1) embeddings would give
            huge logits.
        output_bias: "unigram" if the task starts the output bias at log frequencies, "none" for no bias, else "init".
        output_softcap: the largest logit, by `CappedLinear`; None for no limit.
        stack: other arguments of `Stack`.
    """

    def __init__(
        self,
        *,
        block_size: int,
        tied_output: bool,
        output_bias: str = "init",
        output_softcap: float | None = None,
        **stack: Any,
    ) -> None:
        super().__init__()
        self.decoder = build_stack(length=block_size, causal=True, **stack)
        self.max_length = self.decoder.max_length
        has_bias = output_bias == "unigram" or (output_bias == "init" and not tied_output)
        self.softcap, sizes = output_softcap, (stack["width"], stack["vocab_size"], has_bias)
        self.output = nn.Linear(*sizes) if output_softcap is None else CappedLinear(*sizes, output_softcap)
        if tied_output:
            self.output.weight = self.decoder.embedding.weight

    def hidden(
        self,
        ids_BT: Tensor,
        cache: Cache | None = None,
        token_mask_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states that `output` turns into logits, [B, T, D].

        Args:
            cache: what the model has read before, extended in place; start with `decoder.new_cache()`.
            token_mask_BT: False on padding at the end, which training on a CPU then leaves out; its states are
                undefined. The states of the tokens do not depend on it.
            documents_BT: the document of each token, counted from 1. Attention then stays within documents.

        Raises:
            UserError: a recurrent network is to keep documents apart.
        """
        if documents_BT is not None:
            if not isinstance(self.decoder, Stack):
                raise UserError("model=rnn reads one document after another; set task.documents=joined.")
            return self.decoder(ids_BT, documents_BT)[0]
        if not self.decoder.can_unpad:  # a mask would only keep other kernels from being taken
            token_mask_BT = None
        return self.decoder(ids_BT, token_mask_BT, cache=cache)[0]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits of the token after each position, [B, T, vocabulary]."""
        return self.output(self.hidden(ids_BT))

    def attention(self, ids_BT: Tensor) -> Weights:
        """Return the attention weights of each layer, "decoder": [B, N, T, T]."""
        return {"decoder": self.decoder(ids_BT, with_weights=True)[1]}
