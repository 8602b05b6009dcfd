"""Next-token loss over a large vocabulary, without all logits in memory at once.

Shapes: R hidden states of width D, V tokens in the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.corpora.special_tokens import IGNORE
from speechformer.kernels.flex import compiled_function

CPU_ROWS, CACHED_ROWS = 128, 64  # least rows of logits in a product; rows of these for a thread's cache
ACCELERATOR_ROWS = 16_384  # of logits in memory at once


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy on the CPU, which computes the gradient of each chunk of logits at once and keeps no logits.

    torch's `linear_cross_entropy` does so, too, in more time. With logits z, targets y and P = softmax(z):
    loss = mean(log sum exp z - z_y),   dz = (P - onehot(y)) / R
    """

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_R: Tensor) -> Tensor:
        (R, D), V = hidden_RD.shape, len(weight_VD)
        loss, share_R = hidden_RD.new_zeros(()), hidden_RD.new_full((R,), -1.0 / max(R, 1))
        grad_hidden = weight_VD.index_select(0, targets_R).mul_(share_R[:, None])
        grad_weight = torch.zeros_like(weight_VD)
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V)
        # with more rows, a wide gradient of the weights is added to less often
        rows, cached_rows = max(CPU_ROWS, D), CACHED_ROWS * torch.get_num_threads()
        buffer = hidden_RD.new_empty(min(R, rows), V)
        chunks = (tensor.split(rows) for tensor in (hidden_RD, grad_hidden, targets_R, share_R))
        for hidden, grad, targets, share in zip(*chunks):
            logits = torch.mm(hidden, weight_VD.t(), out=buffer[: len(hidden)])
            target_logits, sums = [], []
            for z, y in zip(logits.split(cached_rows), targets.split(cached_rows)):
                if bias_V is not None:
                    z.add_(bias_V)
                z.sub_(z.amax(dim=1, keepdim=True))
                target_logits.append(z.gather(1, y[:, None])[:, 0])
                sums.append(z.exp_().sum(dim=1))
                z.mul_((share[:1] / sums[-1])[:, None])
            loss.add_(share.dot(torch.cat(target_logits))).sub_(share.dot(torch.cat(sums).log_()))
            if grad_bias is not None:
                grad_bias.sub_(logits.sum(dim=0)).index_add_(0, targets, share)
            grad.addmm_(logits, weight_VD, alpha=-1)
            grad_weight.addmm_(logits.t(), hidden, alpha=-1)
            grad_weight.index_add_(0, targets, hidden * share[:, None])
        ctx.gradients = [grad_hidden, grad_weight, grad_bias]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # so that autograd need not copy them
        if grad != 1:
            gradients = [None if gradient is None else gradient.mul_(grad) for gradient in gradients]
        return *gradients, None


def next_token_loss(
    weight_VD: Tensor,
    bias_V: Tensor | None,
    hidden_RD: Tensor,
    targets_R: Tensor,
    smoothing: float = 0.0,
    softcap: float | None = None,
    ignored: int = IGNORE,
    compiled: bool = False,
) -> Tensor:
    """Return the mean cross-entropy, in nats, of R targets under the logits of R hidden states and a linear layer.

    The logits are computed in chunks that fit into the cache of a CPU or the memory of an accelerator. `smoothing` is
    the probability that all tokens share (Szegedy et al. 2016, section 7), and `softcap` that of `CappedLinear`.

    Args:
        ignored: targets that do not count; while a CPU trains there must be none.
        compiled: whether an accelerator trains with the output layer and the loss as one compiled function.
    """
    on_cpu = hidden_RD.device.type == "cpu"
    is_plain = hidden_RD.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if on_cpu and is_plain and smoothing == 0 and softcap is None and torch.is_grad_enabled():
        return ChunkedLoss.apply(hidden_RD, weight_VD, bias_V, targets_R)
    total = compiled_function(total_loss) if compiled and not on_cpu and torch.is_grad_enabled() else total_loss
    rows = CPU_ROWS if on_cpu else ACCELERATOR_ROWS
    chunks = zip(hidden_RD.split(rows), targets_R.split(rows))
    losses = [total(weight_VD, bias_V, *chunk, smoothing, softcap, ignored) for chunk in chunks]
    return torch.stack(losses).sum() / (targets_R != ignored).sum().clamp(min=1)


def total_loss(
    weight_VD: Tensor,
    bias_V: Tensor | None,
    hidden_RD: Tensor,
    targets_R: Tensor,
    smoothing: float,
    softcap: float | None,
    ignored: int,
) -> Tensor:
    """Return the sum of the cross-entropies of `next_token_loss`."""
    logits = F.linear(hidden_RD, weight_VD, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    return F.cross_entropy(logits, targets_R, ignore_index=ignored, reduction="sum", label_smoothing=smoothing)
