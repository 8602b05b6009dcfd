"""Multi-head attention, and the one place where pattern, causality, padding and positional bias meet.

    weights = softmax(q k^T / sqrt(H) + bias),  output = weights v

Vaswani et al. 2017, "Attention Is All You Need", equation 1. The bias is the positions' (ALiBi, relative)
where a key may be seen, and minus infinity where not; it is the same for all layers, so a core builds it
once for each forward pass. Attention from one sequence to another (`CrossAttention`) has padding alone.

Shapes: B sequences, T queries, S keys, N heads, H width of a head, D width of the model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern
from speechformer.layers.positions import Positions, query_and_key_indices


def visible(
    pattern: Pattern,
    T: int,
    S: int,
    causal: bool,
    real_BS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Where a query may see a key, boolean [1 or B, 1, T, S]; the queries are the last T of S positions.

    `real_BS` is False on padding. A padding query still sees itself: its row would otherwise be empty under a
    sparse pattern, and a softmax over nothing is NaN. No real query ever sees it.
    """
    i, j = query_and_key_indices(T, S, device)
    seen_TS = pattern(i, j)
    if causal:
        seen_TS = seen_TS & (j <= i)
    seen = seen_TS[None, None]
    if real_BS is not None:
        seen = seen & (real_BS[:, None, None, :] | (i == j))
    return seen


def score_bias(
    positions: Positions,
    pattern: Pattern,
    T: int,
    S: int,
    causal: bool,
    real_BS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """What is added to the scores, [1 or B, 1 or N, T, S]: the positions' bias, or -inf where unseen."""
    seen = visible(pattern, T, S, causal, real_BS, device)
    bias_NTS = positions.bias(T, S)
    if bias_NTS is None:
        bias_NTS = torch.zeros((), device=device)
    return torch.where(seen, bias_NTS, -math.inf)


def attend(
    q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Attention written out: the output [B, N, T, H] and the weights [B, N, T, S] before `dropout`."""
    scores = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1]) + bias
    weights = scores.softmax(dim=-1)
    return (weights if dropout is None else dropout(weights)) @ v_BNSH, weights


def mix(
    q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, dropout: Dropout, with_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """`attend`, by torch's fused kernel where it is the quicker way; the weights if they are asked for."""
    rate = dropout.rate if dropout.training else 0.0
    # on the CPU it has no kernel with dropout, and its fallback is slower than `attend`
    if not with_weights and (rate == 0 or q_BNTH.is_cuda):
        bias = bias.to(q_BNTH.dtype)
        return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=rate), None
    return attend(q_BNTH, k_BNSH, v_BNSH, bias, dropout)


class SelfAttention(nn.Module):
    """Multi-head self-attention.

    Args:
        width: D; must be a multiple of `heads`.
        heads: N.
        rate: of dropout on the attention weights.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        bias: whether the output projection has one.
    """

    def __init__(self, width: int, heads: int, rate: float, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, Dropout(rate)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        positions: Positions,
        bias: Tensor,
        with_weights: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended x, [B, T, D], and the weights, [B, N, T, S], if they are asked for.

        `cache` holds the keys and values of what stands before x, [B, N, S - T, H], already with their positions; it
        may be empty, and is added to.
        """
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = positions.rotate(q, k, cache["k"].shape[2] if cache else 0)
        if cache is not None:
            if cache:
                k, v = torch.cat((cache["k"], k), dim=2), torch.cat((cache["v"], v), dim=2)
            cache["k"], cache["v"] = k, v
        mixed, weights = mix(q, k, v, bias, self.dropout, with_weights)
        return self.output(mixed.transpose(1, 2).flatten(2)), weights


class CrossAttention(nn.Module):
    """Multi-head attention from a decoder to the states of an encoder. Vaswani et al. 2017, section 3.2.3.

    It takes neither position nor pattern. Both are functions of the distance i - j, and the distance between the
    i-th word of one language and the j-th word of another means nothing; where a word stands the encoder's states
    say themselves. All of the source may be seen, but its padding.

    Args: as for `SelfAttention`.
    """

    def __init__(self, width: int, heads: int, rate: float, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, Dropout(rate)
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.kv = nn.Linear(width, 2 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def keys_and_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """What the states of an encoder are attended by, [B, N, S, H] each; the same for all steps of a decoder."""
        k, v = self.kv(memory_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(
        self, x_RTD: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias_B11S: Tensor, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """What x draws from the source, [R, T, D], and the weights, [R, N, T, S], if they are asked for.

        R is a multiple of B: a beam search holds R / B unfinished translations of each source, one after another,
        and its keys and values are not copied for them.
        """
        R, T, _ = x_RTD.shape
        B = k_BNSH.shape[0]  # not len(), which torch.export takes for a constant
        q = self.q(x_RTD).view(B, R // B * T, self.heads, -1).transpose(1, 2)
        mixed, weights = mix(q, k_BNSH, v_BNSH, bias_B11S, self.dropout, with_weights)
        if weights is not None:
            weights = weights.unflatten(2, (R // B, T)).transpose(1, 2).flatten(0, 1)
        return self.output(mixed.transpose(1, 2).reshape(R, T, -1)), weights
