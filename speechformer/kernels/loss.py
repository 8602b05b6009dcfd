"""Next-token loss over a large vocabulary, without all logits in memory at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(
    weight_VD: Tensor, bias_V: Tensor | None, hidden_RD: Tensor, targets_R: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy, in nats, of R targets under the logits of R hidden states and a linear layer.

    The logits are computed in chunks that fit into the cache of a CPU or the memory of an accelerator. torch's own
    chunked loss (from 2.13) also computes the gradient of each chunk at once, so a CPU keeps no logits in training.
    `smoothing` is the probability that all tokens share (Szegedy et al. 2016, section 7).
    """
    on_cpu = hidden_RD.device.type == "cpu"
    rows = 128 if on_cpu else 16384
    plain = hidden_RD.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if on_cpu and plain and smoothing == 0 and torch.is_grad_enabled() and hasattr(F, "linear_cross_entropy"):
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(hidden_RD, weight_VD, targets_R, linear_bias=bias_V, options=chunks)
    losses = []
    for hidden, targets in zip(hidden_RD.split(rows), targets_R.split(rows)):
        logits = F.linear(hidden, weight_VD, bias_V).float()
        losses.append(F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing))
    return torch.stack(losses).sum() / len(targets_R)
