"""Unpadding: the tokens of padded sequences one after another, without the padding.

Linear layers, norms, residuals and activations treat every token alone, so they run on [R, D] instead of [B, T, D].
Only attention needs the sequences; there the tokens go back to their places. About a third of a training batch of
sentences is padding. Zhai et al. 2023, "ByteTransformer", section III.

Shapes: B sequences of T places, R tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from speechformer.layers.attention import Places


class Gather(torch.autograd.Function):
    """Different rows of x by index. The gradient adds none up: it takes the rows `inverse`, or copies its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor | None = None) -> Tensor:
        ctx.rows, ctx.index, ctx.inverse = len(x), index, inverse
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.inverse is not None:
            return grad.index_select(0, ctx.inverse), None, None
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, ctx.index, grad), None, None


class Unpadder(Places):
    """The places of R tokens in B sequences of length T: flat indices b T + t, ascending; for layers of N heads."""

    def __init__(self, B: int, T: int, index_R: Tensor, heads: int) -> None:
        self.B, self.T, self.index_R, self.heads = B, T, index_R, heads

    def unpad(self, x_BTD: Tensor) -> Tensor:
        """Return the tokens alone, [R, D]."""
        return x_BTD.flatten(0, 1).index_select(0, self.index_R)

    def pad(self, x_BTD: Tensor) -> Tensor:
        """Return the tokens [R, D] at their places, [B, T, D], with 0 on padding."""
        padded = x_BTD.new_zeros(self.B * self.T, x_BTD.shape[1]).index_copy(0, self.index_R, x_BTD)
        return padded.view(self.B, self.T, -1)

    @functools.cached_property
    def head_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which rows of [R, 3, N] give [3, B, N, T], where padding takes the first; the inverse; and which
        rows of [B, N, T] give [R, N]."""
        B, N, T = self.B, self.heads, self.T
        places = torch.arange(3 * B * N * T).view(3, B, N, T).permute(1, 3, 0, 2).reshape(B * T, 3 * N)
        inverse = places.index_select(0, self.index_R)
        index = inverse.new_zeros(places.numel()).index_copy_(0, inverse.flatten(), torch.arange(inverse.numel()))
        return index, inverse.flatten(), inverse[:, :N].flatten()

    def split(self, qkv_BTE: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each of as many heads, from those of the tokens, [R, E].

        Those of padding are arbitrary.
        """
        index, inverse, _ = self.head_rows
        rows = Gather.apply(qkv_BTE.view(-1, qkv_BTE.shape[1] // (3 * heads)), index, inverse)
        return rows.view(3, self.B, heads, self.T, -1).unbind()

    def join(self, output_BNTH: Tensor) -> Tensor:
        """Return the outputs of the tokens, [R, D]."""
        return Gather.apply(output_BNTH.flatten(0, 2), self.head_rows[2]).view(len(self.index_R), -1)


@functools.lru_cache(maxsize=8)
def without_padding(B: int, T: int, heads: int) -> Unpadder:
    """Return the places of sequences that have no padding."""
    return Unpadder(B, T, torch.arange(B * T), heads)


def unpadder_for(token_mask_BT: Tensor, heads: int) -> Unpadder | None:
    """Return the places of the tokens of a batch on the CPU; None without padding, or if nothing else is there."""
    index_R = token_mask_BT.flatten().nonzero().flatten()
    B, T = token_mask_BT.shape
    return Unpadder(B, T, index_R, heads) if 0 < len(index_R) < B * T else None
