"""A linear layer that adds its bias after the matrix product.

torch's `linear` first copies the bias into every row of the output, which the product then reads again. Adding it
afterwards is faster. It rounds equally if the product sums all inputs of an output at once: MKL does so up to
`EXACT_WIDTH` inputs. Layers of one input or one output may round otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HAS_MKL = torch.backends.mkl.is_available()
EXACT_WIDTH = 112  # the least that MKL sums at once: with SSE; AVX2 and AVX-512 sum more


class FastLinear(nn.Linear):
    """A linear layer with the outputs of torch's, to the bit, but faster without gradients on a CPU with MKL."""

    def forward(self, x: Tensor) -> Tensor:
        exact = HAS_MKL and 1 < self.in_features <= EXACT_WIDTH and self.out_features > 1
        if not exact or self.bias is None or torch.is_grad_enabled() or x.dim() < 2 or not is_eager_on_cpu(x):
            return super().forward(x)
        output = torch.mm(x.flatten(0, -2), self.weight.t()).add_(self.bias)
        return output.view(*x.shape[:-1], self.out_features)


def is_eager_on_cpu(x: Tensor) -> bool:
    """Return whether x is on the CPU, in single or double precision, and computed with as it is.

    That is without compilation, autocast and transforms of `torch.func`, about which torch has no public question.
    """
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return plain and not traced and not torch.is_autocast_enabled("cpu")
