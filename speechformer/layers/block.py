"""One transformer block: attention and a feed-forward network, each with a residual connection and a norm.

post-norm  x = norm(x + f(x))     Vaswani et al. 2017, section 3.1
pre-norm   x = x + f(norm(x))     Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture"
"""

from __future__ import annotations

from torch import Tensor, nn

from speechformer.layers.attention import SelfAttention
from speechformer.layers.dropout import Dropout
from speechformer.layers.positions import Positions
from speechformer.refusals import pick

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
NORMS = {"pre": True, "post": False}


class Block(nn.Module):
    """A block of width D with `heads` heads and a feed-forward network D -> ff -> D.

    `dropout` acts on the attention weights and on each branch before it is added.
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
    ) -> None:
        super().__init__()
        self.pre_norm = pick(NORMS, norm, "core.norm")
        self.attention = SelfAttention(width, heads, dropout, qkv_bias, bias)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, ff, bias=bias),
            pick(ACTIVATIONS, activation, "core.activation")(),
            nn.Linear(ff, width, bias=bias),
        )
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(
        self, x_BTD: Tensor, positions: Positions, bias: Tensor, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x after the block, [B, T, D], and the attention weights, [B, N, T, T], if they are asked for."""
        if self.pre_norm:
            mixed, weights = self.attention(self.attention_norm(x_BTD), positions, bias, with_weights)
            x_BTD = x_BTD + self.dropout(mixed)
            return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD))), weights
        mixed, weights = self.attention(x_BTD, positions, bias, with_weights)
        x_BTD = self.attention_norm(x_BTD + self.dropout(mixed))
        return self.feed_forward_norm(x_BTD + self.dropout(self.feed_forward(x_BTD))), weights
