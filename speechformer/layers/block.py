"""One transformer block: attention and a feed-forward network, each with a residual connection and a norm.

post-norm  x = norm(x + f(x))     Vaswani et al. 2017, section 3.1
pre-norm   x = x + f(norm(x))     Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture"
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from speechformer.errors import UserError, pick
from speechformer.kernels.padding import Unpadder
from speechformer.layers.attention import AttentionBias, CrossAttention, SelfAttention, tokens_of
from speechformer.layers.dropout import Dropout
from speechformer.layers.positions import Positions

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": functools.partial(nn.ReLU, inplace=True), "gelu": nn.GELU}
NORMS = {"pre": True, "post": False}


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch's own


def compile_blocks(module: nn.Module, mode: str, device: torch.device) -> None:
    """Have torch compile the blocks of a model that will be on `device`, in place: they are alike, so one compilation
    serves them all, and the names of the parameters stay. "reduce-overhead" replays them as CUDA graphs.

    Raises:
        UserError: torch has no such mode, or there is no C++ compiler for blocks on a CPU.
    """
    pick(dict.fromkeys(COMPILE_MODES), mode, "compile")
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise UserError(f"compile={mode}: torch compiles for a CPU by a C++ compiler (g++), and there is none here.")
    for block in module.modules():
        if isinstance(block, Block):
            block.compile(mode=mode)
            block.compiled = True


class Block(nn.Module):
    """A block of width D with `heads` heads and a feed-forward network D -> ff -> D.

    `dropout` acts on the attention weights and on each branch before it is added. With `cross`, attention to the
    states of an encoder stands between the two.
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
    ) -> None:
        super().__init__()
        self.compiled = False  # by `compile_blocks`
        self.pre_norm = pick(NORMS, norm, "architecture.norm")
        self.attention = SelfAttention(width, heads, dropout, qkv_bias, bias)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, ff, bias=bias),
            pick(ACTIVATIONS, activation, "architecture.activation")(),
            nn.Linear(ff, width, bias=bias),
        )
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)
        if cross:
            self.cross_attention = CrossAttention(width, heads, dropout, qkv_bias, bias)
            self.cross_attention_norm = nn.LayerNorm(width)

    def places_of_dropout(self, B: int, T: int, D: int) -> list[tuple[Dropout, Sequence[int]]]:
        """Where it acts on x of that shape without cross-attention, in order, and on tensors of what shape."""
        of_weights = self.attention.dropout, (B, self.attention.heads, T, T)
        return [of_weights, (self.dropout, (B, T, D)), (self.dropout, (B, T, D))]

    def branch(
        self,
        x_BTD: Tensor,
        norm: nn.Module,
        function: Callable[[Tensor], tuple[Tensor, Tensor | None]],
        tokens: Unpadder | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x with what a function of it adds, normed before or after; x may be `tokens` alone, [R, D]."""
        added, weights = function(norm(x_BTD) if self.pre_norm else x_BTD)
        x_BTD = x_BTD + self.dropout(added, tokens)
        return x_BTD if self.pre_norm else norm(x_BTD), weights

    def forward(
        self,
        x_BTD: Tensor,
        positions: Positions,
        scores: AttentionBias | Tensor,
        with_weights: bool = False,
        memory: tuple[Tensor, Tensor, Tensor] | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x after the block, [B, T, D], and if they are asked for the weights of self-attention, [B, N, T, S], and of
        cross-attention.

        x may hold the tokens of `scores` alone, [R, D], and is then returned so. `memory` holds keys, values and bias
        for `CrossAttention`, `cache` what `SelfAttention` has seen before.
        """
        tokens = tokens_of(scores)
        x_BTD, weights = self.branch(
            x_BTD, self.attention_norm, lambda x: self.attention(x, positions, scores, with_weights, cache), tokens
        )
        cross_weights = None
        if memory is not None:
            x_BTD, cross_weights = self.branch(
                x_BTD, self.cross_attention_norm, lambda x: self.cross_attention(x, *memory, with_weights), None
            )
        x_BTD, _ = self.branch(x_BTD, self.feed_forward_norm, lambda x: (self.feed_forward(x), None), tokens)
        return x_BTD, weights, cross_weights
