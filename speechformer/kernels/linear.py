"""A linear layer that adds its bias after the matrix product.

torch's `linear` first copies the bias into every row of the output, which the product then reads again. Adding it
afterwards is faster, and rounds equally as long as the BLAS sums the inputs of an output at once. A single input is
an exception: there product and bias are rounded together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXACT_WIDTH = 112  # most inputs that are taken to be summed at once; MKL sums 384 with AVX-512, and 112 with SSE


class FastLinear(nn.Linear):
    """A linear layer with the outputs of torch's, to the bit, but faster without gradients on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        same_bits = self.bias is not None and 1 < self.in_features <= EXACT_WIDTH
        if torch.is_grad_enabled() or not same_bits or x.dim() < 2 or not is_eager(x):
            return super().forward(x)
        return torch.mm(x.flatten(0, -2), self.weight.t()).add_(self.bias).view(*x.shape[:-1], -1)


def is_eager(x: Tensor) -> bool:
    """Return whether x is on the CPU, and no compilation, autocast or transform of `torch.func` is at work."""
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return plain and not traced and not torch.is_autocast_enabled("cpu")
