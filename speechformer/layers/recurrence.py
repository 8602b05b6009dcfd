"""The linear recurrence behind linear attention, retention, gated linear attention, the delta rule and Mamba-2.

    without delta:  S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T,   u_t = b_t v_t
    with delta:     the same,                                   u_t = b_t (v_t - S_{t-1}^T diag(exp(g_t)) k_t)
    output:         o_t = S_t^T q_t

A state S maps keys to values. A token forgets some of it, writes its value under its key and reads with its query.
The delta rule writes only the difference to what the state already returns for the key.

    layer                     decay g                delta  paper
    linear attention          none                   no     Katharopoulos et al. 2020
    retention                 constant of each head  no     Sun et al. 2023, "Retentive Network"
    gated linear attention    of each key channel    no     Yang et al. 2023
    Mamba-2 (SSD)             of each head           no     Dao and Gu 2024, "Transformers are SSMs"
    DeltaNet                  none                   yes    Yang et al. 2024, "Parallelizing Linear Transformers with
                                                            the Delta Rule over Sequence Length"
    Gated DeltaNet            of each head           yes    Yang et al. 2025

`step_by_step` is the definition. Generation uses it, because its memory does not grow with the text. `chunked`
computes the same with few large products of matrices. Training uses it. Both compute in at least single precision,
also under autocast.

Shapes:
    B  sequences    H  width of a key      L  tokens of a chunk
    N  heads        V  width of a value    i  a token that reads
    T  tokens       C  chunks              j  a token that has written
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, b: Tensor | None, state: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the arguments of a recurrence in at least single precision, with defaults for those that are None."""
    B, N, T, H = q.shape
    g = q.new_zeros(1, 1, T, 1) if g is None else g
    b = q.new_ones(1, 1, T, 1) if b is None else b
    state = q.new_zeros(B, N, H, v.shape[-1]) if state is None else state
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, g, b, state))


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    b: Tensor | None = None,
    delta: bool = False,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, as the module defines it.

    Args:
        q, k: queries and keys, [B, N, T, H]. The delta rule is stable if b |k|^2 is at most 2.
        v: values, [B, N, T, V].
        g: logarithm of the decay, at most 0, [1 or B, 1 or N, T, 1 or H]; None for no decay, -inf to forget all.
        b: how strongly a token writes, [1 or B, 1 or N, T, 1]; None for 1.
        delta: whether to write by the delta rule.
        state: that of the text before, [B, N, H, V]; None at the start.

    Returns:
        The output, [B, N, T, V], in the type of v, and the state after the last token, in at least single precision.
    """
    outputs, dtype = [], v.dtype
    q, k, v, g, b, state = prepare(q, k, v, g, b, state)
    with torch.autocast(q.device.type, enabled=False):
        for q_t, k_t, v_t, g_t, b_t in zip(*(x.split(1, dim=2) for x in (q, k, v, g, b))):
            state = g_t.exp().mT * state
            u_t = b_t * (v_t - k_t @ state if delta else v_t)
            state = state + k_t.mT @ u_t
            outputs.append(q_t @ state)
    return torch.cat(outputs, dim=2).to(dtype), state


def decayed_scores(q: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Return q_i^T diag(exp(G_i - G_j)) k_j for j <= i and 0 for j > i, [..., L, L].

    A decay of the head scales the product of query and key. Decays of the channels would take L x L x H numbers. So
    the second half of the tokens reads the first by one product of matrices, with the decays up to the middle m and
    from there on: G_i - G_j = (G_i - G_m) + (G_m - G_j). Both terms are at most 0. Each half then does the same.

    Args:
        q, k: [..., L, H].
        G: sums of the logarithm of the decay from the first token on, [..., L, 1 or H].
    """
    L = k.shape[-2]
    if L == 1:
        return q @ k.mT
    if G.shape[-1] == 1:
        later = torch.ones(L, L, dtype=torch.bool, device=k.device).triu(1)
        return q @ k.mT * (G - G.mT).masked_fill(later, -math.inf).exp()  # exp first would give inf, and nan backward
    q, k, G = (x.unflatten(-2, (2, L // 2)) for x in (q, k, G))
    (_, q_late), (k_early, _), (G_early, G_late) = (x.unbind(-3) for x in (q, k, G))
    G_middle = G_early[..., -1:, :]
    across = (q_late * (G_late - G_middle).exp()) @ (k_early * (G_middle - G_early).exp()).mT
    early, late = decayed_scores(q, k, G).unbind(-3)
    return torch.cat((F.pad(early, (0, L // 2)), torch.cat((across, late), dim=-1)), dim=-2)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    b: Tensor | None = None,
    delta: bool = False,
    state: Tensor | None = None,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """Compute `step_by_step` chunk by chunk. Yang et al. 2024, section 3; Dao and Gu 2024, section 6.

    With G_i the sum of g from the first token of a chunk to token i, and S the state before the chunk,

        S_i = diag(exp(G_i)) S + sum over j <= i of diag(exp(G_i - G_j)) k_j u_j^T

    so the output of a chunk is masked attention to its own tokens plus what its queries read from S. With delta,

        u_i + b_i sum over j < i of (k_i^T diag(exp(G_i - G_j)) k_j) u_j = b_i (v_i - S^T diag(exp(G_i)) k_i)

    is a unit triangular system (the UT transform). It is solved for all chunks at once, for the terms in v and in S
    apart, as only then does the loop over chunks know S.

    The exponents G_i - G_j are at most 0, so nothing overflows. exp(-G_j) alone would.

    Args:
        chunk: the largest L, which is rounded down to a power of two if channels decay. The cost within chunks grows
            with L, the number of steps with 1 / L.
    """
    T, V, dtype = *v.shape[2:], v.dtype
    q, k, v, g, b, state = prepare(q, k, v, g, b, state)
    L = -(-T // -(-T // chunk))  # as few chunks, of equal lengths
    if g.shape[-1] > 1:
        L = 1 << (L.bit_length() - 1)  # a power of two can be halved down to 1
    q, k, v, g, b = (F.pad(x, (0, 0, 0, -T % L)).unflatten(2, (-1, L)) for x in (q, k, v, g, b))  # [B, N, C, L, ...]
    states, writes = [], []
    with torch.autocast(q.device.type, enabled=False):
        # exp(-104) is 0 in single precision. A sum with -10,000 in it would round what is added to it.
        G = g.clamp(min=-104.0).cumsum(dim=3)
        G_end = G[..., -1:, :]
        k_end = k * (G_end - G).exp()
        u, w = b * v, b * k * G.exp()
        if delta:
            overlap = b * decayed_scores(k, k, G)
            solution = torch.linalg.solve_triangular(overlap, torch.cat((u, w), -1), upper=False, unitriangular=True)
            u, w = solution.tensor_split((V,), dim=-1)
        for u_c, w_c, k_c, g_c in zip(*(x.unbind(2) for x in (u, w, k_end, G_end))):
            states.append(state)
            writes.append(u_c - w_c @ state if delta else u_c)
            state = g_c.exp().mT * state + k_c.mT @ writes[-1]
        inside = decayed_scores(q, k, G) @ torch.stack(writes, dim=2)
        output = inside + (q * G.exp()) @ torch.stack(states, dim=2)
    return output.flatten(2, 3)[:, :, :T].to(dtype), state
