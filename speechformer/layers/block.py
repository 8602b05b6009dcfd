"""One transformer block: attention and a feed-forward network, each with a residual connection and a norm.

post-norm  x = norm(x + f(x))     Vaswani et al. 2017, section 3.1
pre-norm   x = x + f(norm(x))     Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture"

Shapes: see `speechformer.layers.attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from speechformer.layers.attention import Attention, CrossAttention, KVCache, SelfAttention
from speechformer.layers.dropout import Dropout

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": functools.partial(nn.ReLU, inplace=True), "gelu": nn.GELU}
Memory = tuple[Tensor, Tensor, Attention]  # of an encoder: keys, values, and the attention to them


class Block(nn.Module):
    """A transformer block: self-attention, optional cross-attention, feed-forward network.

    Args:
        ff: hidden width of the feed-forward network.
        dropout: rate, on the attention weights and on each branch before it is added.
        qkv_bias, bias: whether the projections to queries, keys and values, and all other linear layers, have a bias.
        cross: whether the block also attends to an encoder.
        gated: whether the encoding of this layer has a gate.
        dropout_class: the reference, or the fast version of the kernels.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        ff: int,
        dropout: float,
        norm: str,
        qkv_bias: bool,
        bias: bool,
        activation: str,
        cross: bool = False,
        gated: bool = False,
        dropout_class: type[Dropout] = Dropout,
    ) -> None:
        super().__init__()
        self.pre_norm = norm == "pre"
        self.attention = SelfAttention(width, heads, dropout_class(dropout), qkv_bias, bias, gated)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, ff, bias=bias),
            ACTIVATIONS[activation](),
            nn.Linear(ff, width, bias=bias),
        )
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = dropout_class(dropout)
        if cross:
            self.cross_attention = CrossAttention(width, heads, dropout_class(dropout), qkv_bias, bias)
            self.cross_attention_norm = nn.LayerNorm(width)

    def residual(
        self, x_BTD: Tensor, norm: nn.Module, function: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Add a function of x to x, with the norm before or after; pass the function's attention weights on."""
        branch_BTD, weights = function(norm(x_BTD) if self.pre_norm else x_BTD)
        x_BTD = x_BTD + self.dropout(branch_BTD)
        return x_BTD if self.pre_norm else norm(x_BTD), weights

    def forward(
        self,
        x_BTD: Tensor,
        attention: Attention,
        memory: Memory | None = None,
        cache: KVCache = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return x, [B, T, D], and the weights of self-attention and cross-attention; see `SelfAttention.forward`."""
        x_BTD, weights = self.residual(x_BTD, self.attention_norm, lambda x: self.attention(x, attention, cache))
        cross_weights = None
        if memory is not None:
            x_BTD, cross_weights = self.residual(
                x_BTD, self.cross_attention_norm, lambda x: self.cross_attention(x, *memory)
            )
        x_BTD, _ = self.residual(x_BTD, self.feed_forward_norm, lambda x: (self.feed_forward(x), None))
        return x_BTD, weights, cross_weights
