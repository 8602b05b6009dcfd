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


class RealTokens:
    """Where R tokens stand in B sequences of T places.

    Args:
        places_R: the indices of their places, b T + t, in ascending order.
    """

    def __init__(self, B: int, T: int, places_R: Tensor) -> None:
        self.B, self.T, self.places_R = B, T, places_R

    def take(self, x_BTD: Tensor) -> Tensor:
        """The real ones of all, [R, D]."""
        return x_BTD.flatten(0, 1).index_select(0, self.places_R)

    def put(self, x_RD: Tensor) -> Tensor:
        """All with the real ones at their places, [B, T, D], and 0 at the others."""
        x = x_RD.new_zeros(self.B * self.T, x_RD.shape[1]).index_copy(0, self.places_R, x_RD)
        return x.view(self.B, self.T, -1)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one entry for all: the layers of a pass ask one after another)
    @torch.inference_mode(False)  # what is made in it cannot be trained with
    def by_head(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows of width H to take, from heads, whose tokens stand together, to tokens, whose heads do, and
        back: those of [3, B, N, T] that are queries, keys and values of tokens, [R, 3, N]; those of [R, 3, N] that
        are [3, B, N, T], the first one for padding; and those of [B, N, T] that are [R, N]."""
        B, T, R = self.B, self.T, len(self.places_R)
        sequence_R = self.places_R // T
        first_R = self.places_R + sequence_R * (N - 1) * T  # of the rows of head 0
        mixed_RN = first_R[:, None] + torch.arange(0, N * T, T)
        to_R3N = mixed_RN[:, None] + torch.arange(0, 3 * B * N * T, B * N * T)[:, None]
        back = to_R3N.new_zeros(3 * B * N * T).index_copy_(0, to_R3N.flatten(), torch.arange(R * 3 * N))
        return to_R3N.flatten(), back, mixed_RN.flatten()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def all_real(B: int, T: int) -> RealTokens:
    """Sequences without padding."""
    return RealTokens(B, T, torch.arange(B * T))


def without_padding(real_BT: Tensor) -> RealTokens | None:
    """The real tokens of a batch on the CPU; None where there is no padding."""
    places_R = real_BT.flatten().nonzero().flatten()
    B, T = real_BT.shape
    return RealTokens(B, T, places_R) if len(places_R) < B * T else None
