"""RoPE in one pass over the numbers: each pair is a complex number, which is multiplied by exp(i angle).

Su et al. 2021, "RoFormer", equation 12. torch's `layers.positions.turn_pairs` takes a pass for each product, sum and
stacking, and as many in the backward pass; both compute the same products and sums, so results are equal to the bit.

Shapes: see `speechformer.layers.attention`; P pairs, H / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speechformer.layers.positions import turn_pairs

VECTOR = 16  # numbers; a CPU multiplies the rest of a row by other instructions, which round differently


def can_turn_at_once(width: int, table_TR: Tensor, dtype: torch.dtype) -> bool:
    """Return whether complex products rotate heads of this width on a CPU to the same bits as `turn_pairs`."""
    whole_rows = width == table_TR.shape[1] and width % VECTOR == 0
    return whole_rows and dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def factors(table_TR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(i angle) of each position and pair, [T, P], from a table of sines and cosines."""
    sin, cos = table_TR.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.complex(cos, sin)


def turn_in_place(x: Tensor, z_TP: Tensor) -> None:
    """Multiply the pairs of a contiguous tensor, [..., T, H], by the factors of their positions."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(z_TP)


class Rotation(torch.autograd.Function):
    """Multiply pairs of x_BNTH, as complex numbers, by z_TP. The result is contiguous, [B, N, T, H]."""

    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, z_TP: Tensor) -> Tensor:
        ctx.save_for_backward(z_TP)
        pairs = torch.view_as_complex(x_BNTH.unflatten(-1, (-1, 2)))
        product = torch.mul(pairs, z_TP, out=torch.empty(pairs.shape, dtype=pairs.dtype))
        return torch.view_as_real(product).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor, None]:
        (z_TP,) = ctx.saved_tensors
        return Rotation.apply(grad_BNTH.contiguous(), z_TP.conj().resolve_conj()), None


def turn_pairs_at_once(x_BNTH: Tensor, table_TR: Tensor) -> Tensor:
    """Compute `layers.positions.turn_pairs`, by `Rotation` where that gives the same bits."""
    if x_BNTH.device.type != "cpu" or not can_turn_at_once(x_BNTH.shape[-1], table_TR, x_BNTH.dtype):
        return turn_pairs(x_BNTH, table_TR)
    return Rotation.apply(x_BNTH, factors(table_TR, x_BNTH.dtype))
