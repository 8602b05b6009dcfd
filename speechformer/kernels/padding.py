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
    """Rows of x by index; the gradient takes those of the rows `inverse`, and need not add any up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


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
    def head_rows(self) -> tuple[Tensor, Tensor]:
        """Return which rows of [R, 3, N] give [3, B, N, T], where padding takes the first, and the inverse."""
        rows = torch.arange(3 * self.B * self.heads * self.T).view(3, self.B, self.heads, self.T)
        inverse = rows.permute(1, 3, 0, 2).reshape(self.B * self.T, -1).index_select(0, self.index_R).flatten()
        index = torch.zeros(rows.numel(), dtype=torch.long)
        return index.index_copy_(0, inverse, torch.arange(len(inverse))), inverse

    def split(self, qkv_BTE: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values from those of the tokens, [R, E]; padding has those of the first token."""
        rows = qkv_BTE.view(-1, qkv_BTE.shape[1] // (3 * heads))
        return Gather.apply(rows, *self.head_rows).view(3, self.B, heads, self.T, -1).unbind()

    def join(self, output_BNTH: Tensor) -> Tensor:
        """Return the outputs of the tokens, [R, D]."""
        return self.unpad(super().join(output_BNTH))


def unpadder_for(token_mask_BT: Tensor, heads: int) -> Unpadder | None:
    """Return the places of the tokens of a batch on the CPU; None without padding, or if nothing else is there."""
    index_R = token_mask_BT.flatten().nonzero().flatten()
    B, T = token_mask_BT.shape
    return Unpadder(B, T, index_R, heads) if 0 < len(index_R) < B * T else None
