"""Padding left out: the real tokens of padded sequences, one behind the other.

Linear layers, norms, residuals and activations treat each token for itself. Only attention has to know which of them
stand together; for it they go back to their places, by sequence and head. (Zhai et al. 2023, "ByteTransformer",
section III.) Sentences differ in length, and of a training batch of them a third is padding.

Shapes: B sequences of T places, R real tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Unpadder:
    """Where R tokens stand in B sequences of T places.

    Args:
        places_R: the indices of their places, b T + t, in ascending order.
    """

    def __init__(self, B: int, T: int, places_R: Tensor) -> None:
        self.B, self.T, self.places_R = B, T, places_R
        self.rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # the layers of a pass ask for the same

    def unpad(self, x_BTD: Tensor) -> Tensor:
        """The real ones of all, [R, D]."""
        return x_BTD.flatten(0, 1).index_select(0, self.places_R)

    def pad(self, x_RD: Tensor) -> Tensor:
        """All with the real ones at their places, [B, T, D], and 0 at the others."""
        x = x_RD.new_zeros(self.B * self.T, x_RD.shape[1]).index_copy(0, self.places_R, x_RD)
        return x.view(self.B, self.T, -1)

    def by_head(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Between tokens, whose heads stand together, and heads, whose tokens do: which rows of width H to take.

        Returns:
            to_tokens: those of [3, B, N, T] that are the queries, keys and values of tokens, [R, 3, N].
            to_heads: those of [R, 3, N] that are [3, B, N, T]; the first one where there is padding.
            mixed: those of [B, N, T] that are [R, N].
        """
        if N not in self.rows:
            with torch.inference_mode(False):  # what is made in it cannot be trained with
                self.rows[N] = self.rows_by_head(N)
        return self.rows[N]

    def rows_by_head(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """What `by_head` returns, made anew."""
        B, T, R = self.B, self.T, len(self.places_R)
        sequence_R = self.places_R // T
        first_R = self.places_R + sequence_R * (N - 1) * T  # of head 0
        mixed_RN = first_R[:, None] + torch.arange(0, N * T, T)
        to_tokens_R3N = mixed_RN[:, None] + torch.arange(0, 3 * B * N * T, B * N * T)[:, None]
        to_heads = to_tokens_R3N.new_zeros(3 * B * N * T)
        to_heads.index_copy_(0, to_tokens_R3N.flatten(), torch.arange(R * 3 * N))
        return to_tokens_R3N.flatten(), to_heads, mixed_RN.flatten()


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def all_real(B: int, T: int) -> Unpadder:
    """Sequences without padding."""
    return Unpadder(B, T, torch.arange(B * T))


def without_padding(token_mask_BT: Tensor) -> Unpadder | None:
    """The real tokens of a batch on the CPU; None where all are, or none."""
    places_R = token_mask_BT.flatten().nonzero().flatten()
    B, T = token_mask_BT.shape
    return Unpadder(B, T, places_R) if 0 < len(places_R) < B * T else None
