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
    plain = x_BNTH.device.type == "cpu" and x_BNTH.dtype in (torch.float32, torch.float64)
    whole_rows = x_BNTH.shape[-1] == table_TR.shape[1] and table_TR.shape[1] % VECTOR == 0
    if not plain or not whole_rows or torch.compiler.is_compiling():
        return turn_pairs(x_BNTH, table_TR)
    sin, cos = table_TR.to(x_BNTH.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return Rotation.apply(x_BNTH, torch.complex(cos, sin))
