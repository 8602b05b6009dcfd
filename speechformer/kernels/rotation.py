"""RoPE in one pass over the numbers: each pair is a complex number, which is multiplied by exp(i angle).

Su et al. 2021, "RoFormer", equation 12. `layers.positions.rotate_pairs` takes a pass for each product, sum and
stacking, and as many in the backward pass. Both compute the same products and sums, so results are equal to the bit
where `is_exact` says so.

Shapes: see `speechformer.layers.attention`; P pairs, H / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speechformer.layers.positions import rotate_pairs

VECTOR = 8  # complex numbers; a CPU multiplies what is left of a row by other instructions, which round differently
SHARED = 32768  # least complex numbers that torch shares among threads (at::internal::GRAIN_SIZE)


def is_exact(table_TR: Tensor, H: int, pairs: int, dtype: torch.dtype) -> bool:
    """Return whether complex products on a CPU rotate heads of width H to the same bits as `rotate_pairs`.

    `pairs` are those of the whole tensor. Rows, and the threads' shares of the tensor, must be whole vectors.
    """
    if torch.compiler.is_compiling():  # it would compile once for each number of pairs
        return False
    share = -(-pairs // min(torch.get_num_threads(), max(1, -(-pairs // SHARED))))
    whole = table_TR.shape[1] == H and H % (2 * VECTOR) == 0 and (pairs < SHARED or share % VECTOR == 0)
    same_type = table_TR.dtype == torch.float32 and dtype in (torch.float32, torch.float64)
    return whole and same_type


def rotation_factors(table_TR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(i angle) of each position and pair, [T, P], from a table of sines and cosines."""
    sin, cos = table_TR.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.complex(cos, sin)


def as_complex(x: Tensor) -> Tensor:
    """Return the pairs of a tensor, [..., P], without a copy where its strides allow."""
    if x.stride(-1) != 1 or any(stride % 2 for stride in x.stride()[:-1]) or x.storage_offset() % 2:
        x = x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotate_in_place(x: Tensor, z_TP: Tensor) -> None:
    """Multiply the pairs of a contiguous tensor, [..., T, H], by the factors of their positions."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(z_TP)


class Rotation(torch.autograd.Function):
    """Multiply pairs of x_BNTH, as complex numbers, by z_TP. The result is contiguous, [B, N, T, H]."""

    @staticmethod
    def forward(x_BNTH: Tensor, z_TP: Tensor) -> Tensor:
        pairs = as_complex(x_BNTH)
        product = torch.mul(pairs, z_TP, out=torch.empty(pairs.shape, dtype=pairs.dtype, device=pairs.device))
        return torch.view_as_real(product).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor, None]:
        (z_TP,) = ctx.saved_tensors
        return Rotation.apply(grad_BNTH, z_TP.conj().resolve_conj()), None


def rotate_pairs_as_complex(x_BNTH: Tensor, table_TR: Tensor) -> Tensor:
    """Compute `layers.positions.rotate_pairs`, by `Rotation` where that gives the same bits."""
    H = x_BNTH.shape[-1]
    if x_BNTH.device.type != "cpu" or not is_exact(table_TR, H, x_BNTH.numel() // 2, x_BNTH.dtype):
        return rotate_pairs(x_BNTH, table_TR)
    return Rotation.apply(x_BNTH, rotation_factors(table_TR, x_BNTH.dtype))
