"""One transformer block: attention and a feed-forward network, each with a residual connection and norms.

post        x = norm(x + f(x))                   Vaswani et al. 2017, section 3.1
pre         x = x + f(norm(x))                   Xiong et al. 2020, "On Layer Normalization in the Transformer"
sandwich    x = x + norm'(f(norm(x)))            Ding et al. 2021, "CogView"; Gemma 2
parallel    x = x + f(norm(x)) + g(norm'(x))     Black et al. 2022, "GPT-NeoX-20B", section 2.1

Shapes: see `speechformer.layers.attention`; F is the hidden width of the feed-forward network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.layers.attention import Attention, CrossAttention, KVCache, SelfAttention
from speechformer.layers.dropout import Dropout

Memory = tuple[Tensor, Tensor, Attention]  # of an encoder: keys, values, and the attention to them


class DynamicTanh(nn.Module):
    """w tanh(a x) + b, with a for all channels. Zhu et al. 2025, "Transformers without Normalization"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.alpha * x).tanh() + self.bias


class SquaredReLU(nn.Module):
    """max(0, x)^2. So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling"."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Gated(nn.Module):
    """g(a) b, where a and b are the halves of the input. Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return self.activation(a) * b


class ClampedSwiGLU(nn.Module):
    """a sigmoid(1.702 a) (b + 1), with a at most 7 and b from -7 to 7. OpenAI 2025, "gpt-oss"."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        a, b = a.clamp(max=7), b.clamp(-7, 7)
        return a * (1.702 * a).sigmoid() * (b + 1)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,  # Zhang and Sennrich 2019
    "dyt": lambda width, eps: DynamicTanh(width),
}
EPS = {"layer": 1e-5, "rms": 1e-6, "dyt": 0.0}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": functools.partial(nn.ReLU, inplace=True),
    "gelu": nn.GELU,
    "gelu_tanh": functools.partial(nn.GELU, approximate="tanh"),
    "relu2": SquaredReLU,
    "swiglu": functools.partial(Gated, F.silu),
    "geglu": functools.partial(Gated, F.gelu),
    "geglu_tanh": functools.partial(Gated, functools.partial(F.gelu, approximate="tanh")),
    "swiglu_clamped": ClampedSwiGLU,
}
GATED = (Gated, ClampedSwiGLU)


def new_norm(norm_type: str, norm_eps: float | None, width: int) -> nn.Module:
    """Return a norm by `architecture.norm_type` and `architecture.norm_eps`."""
    return NORMS[norm_type](width, EPS[norm_type] if norm_eps is None else norm_eps)


class Block(nn.Module):
    """A transformer block: self-attention, optional cross-attention, feed-forward network.

    Args:
        attention: of the block.
        ff: F; a gated activation has two linear maps to it.
        dropout: rate, on each branch before it is added.
        norm: where the norms are: "pre", "post", "sandwich" or "parallel".
        norm_type, norm_eps: a choice of `NORMS`, and what its norms add to what they divide by; None: `EPS`.
        qkv_bias, bias: whether the projections to queries, keys and values, and all other linear layers, have a bias.
        cross: whether the block also attends to an encoder.
        dropout_class: the reference, or the fast version of the kernels.
    """

    def __init__(
        self,
        attention: SelfAttention,
        *,
        width: int,
        heads: int,
        ff: int,
        dropout: float,
        norm: str,
        qkv_bias: bool,
        bias: bool,
        activation: str,
        norm_type: str = "layer",
        norm_eps: float | None = None,
        cross: bool = False,
        dropout_class: type[Dropout] = Dropout,
    ) -> None:
        super().__init__()
        self.order, function = norm, ACTIVATIONS[activation]()
        norm_of = functools.partial(new_norm, norm_type, norm_eps)
        self.attention = attention
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * ff if isinstance(function, GATED) else ff, bias=bias),
            function,
            nn.Linear(ff, width, bias=bias),
        )
        self.attention_norm = norm_of(width)
        self.feed_forward_norm = norm_of(width)
        self.dropout = dropout_class(dropout)
        if cross:
            self.cross_attention = CrossAttention(width, heads, dropout_class(dropout), qkv_bias, bias)
            self.cross_attention_norm = norm_of(width)
        if norm == "sandwich":
            self.output_norms = nn.ModuleList(norm_of(width) for _ in range(2 + cross))

    def residual(
        self,
        x_BTD: Tensor,
        norm: nn.Module,
        function: Callable[[Tensor], tuple[Tensor, Tensor | None]],
        index: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Add a function of x to x, with norms where they belong; pass the function's attention weights on."""
        branch_BTD, weights = function(x_BTD if self.order == "post" else norm(x_BTD))
        if self.order == "sandwich":
            branch_BTD = self.output_norms[index](branch_BTD)
        x_BTD = x_BTD + self.dropout(branch_BTD)
        return norm(x_BTD) if self.order == "post" else x_BTD, weights

    def forward(
        self,
        x_BTD: Tensor,
        attention: Attention,
        memory: Memory | None = None,
        cache: KVCache = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return x, [B, T, D], and the weights of self-attention and cross-attention; see `SelfAttention.forward`."""
        before_BTD = x_BTD
        x_BTD, weights = self.residual(x_BTD, self.attention_norm, lambda x: self.attention(x, attention, cache), 0)
        cross_weights = None
        if memory is not None:
            x_BTD, cross_weights = self.residual(
                x_BTD, self.cross_attention_norm, lambda x: self.cross_attention(x, *memory), 2
            )
        if self.order == "parallel":
            x_BTD = x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(before_BTD)))
        else:
            x_BTD, _ = self.residual(x_BTD, self.feed_forward_norm, lambda x: (self.feed_forward(x), None), 1)
        return x_BTD, weights, cross_weights
