"""Unpadding: the tokens of padded sequences one after another, without the padding.

Linear layers, norms, residuals and activations treat every token alone, so they run on [R, D] instead of [B, T, D].
Only attention needs the sequences; there the tokens go back to their places. About a third of a training batch of
sentences is padding. Zhai et al. 2023, "ByteTransformer", section III.

Shapes: B sequences of T places, R tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadRows:
    """Row indices that convert between the order of tokens and that of heads, in rows of width H.

    Args:
        to_tokens: rows of [3, B, N, T] that give [R, 3, N].
        to_heads: rows of [R, 3, N] that give [3, B, N, T]; padding takes row 0.
        output: rows of [B, N, T] that give [R, N].
        inverse: rows of [R, N] that give [B, N, T]; None if the batch has padding.
        count: B N T.
    """

    to_tokens: Tensor
    to_heads: Tensor
    output: Tensor
    inverse: Tensor | None
    count: int

    def output_to_heads(self, rows: Tensor) -> Tensor:
        """Return rows in the order of heads, [B N T, H], from [R N, H], with 0 on padding."""
        if self.inverse is not None:
            return rows.index_select(0, self.inverse)
        return rows.new_zeros(self.count, rows.shape[1]).index_copy_(0, self.output, rows)


class Unpadder:
    """The places of R tokens in B sequences of length T: flat indices b T + t, ascending."""

    def __init__(self, B: int, T: int, index_R: Tensor) -> None:
        self.B, self.T, self.index_R = B, T, index_R
        self.rows: dict[int, HeadRows] = {}  # all layers of a pass share them

    def unpad(self, x_BTD: Tensor) -> Tensor:
        """Return the tokens alone, [R, D]."""
        return x_BTD.flatten(0, 1).index_select(0, self.index_R)

    def pad(self, x_RD: Tensor) -> Tensor:
        """Return the tokens at their places, [B, T, D], with 0 on padding."""
        padded = x_RD.new_zeros(self.B * self.T, x_RD.shape[1]).index_copy(0, self.index_R, x_RD)
        return padded.view(self.B, self.T, -1)

    def head_rows(self, N: int) -> HeadRows:
        """Return the row indices of N heads."""
        if N in self.rows:
            return self.rows[N]
        B, T, R = self.B, self.T, len(self.index_R)
        with torch.inference_mode(False):  # autograd cannot save tensors made in inference mode
            places_R3N = head_places(B, T, N).index_select(0, self.index_R)
            to_tokens, output = places_R3N.flatten(), places_R3N[:, :N].flatten()
            to_heads = to_tokens.new_zeros(3 * B * N * T).index_copy_(0, to_tokens, torch.arange(R * 3 * N))
            inverse = torch.arange(R * N).view(B, T, N).transpose(1, 2).flatten() if R == B * T else None
            self.rows[N] = HeadRows(to_tokens, to_heads, output, inverse, B * N * T)
        return self.rows[N]


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def head_places(B: int, T: int, N: int) -> Tensor:
    """Return the rows of [3, B, N, T] that hold the queries, keys and values of each place, [B T, 3 N]."""
    return torch.arange(3 * B * N * T).view(3, B, N, T).permute(1, 3, 0, 2).reshape(B * T, 3 * N)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def without_padding(B: int, T: int) -> Unpadder:
    """Return the places of sequences that have no padding."""
    return Unpadder(B, T, torch.arange(B * T))


def unpadder_for(token_mask_BT: Tensor) -> Unpadder | None:
    """Return the places of the tokens of a batch on the CPU; None without padding, or if nothing else is there."""
    index_R = token_mask_BT.flatten().nonzero().flatten()
    B, T = token_mask_BT.shape
    return Unpadder(B, T, index_R) if 0 < len(index_R) < B * T else None
