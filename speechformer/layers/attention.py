"""Attention, in the order of the paper.

    attention(q, k, v) = softmax(q k^T / sqrt(H) + bias) v

Vaswani et al. 2017, "Attention Is All You Need", equation 1. The bias is the positional bias (ALiBi, T5) of each pair
of query and key that the mask allows, and minus infinity for every other pair. All layers share it.

This module is the reference: short, differentiable, correct on every device. Models run the faster versions in
`speechformer.kernels`, which are tested against it.

Shapes:
    B  sequences              N  heads
    T  queries                H  width of a head, D / N
    S  keys                   E  queries, keys and values side by side, 3 D
    D  width of the model     R  target sequences of B sources, R / B for each (`CrossAttention`)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from speechformer.layers.patterns import Pattern, Structured
from speechformer.layers.positions import Positions, query_and_key_indices

Device = torch.device | None
KVCache = dict[str, Tensor] | None


def attention_reference(
    q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, dropout: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step.

    Args:
        bias: from `attention_bias`, [1 or B, 1 or N, T, S].
        dropout: applied to the weights.

    Returns:
        The output, [B, N, T, H], and the weights before dropout, [B, N, T, S].
    """
    scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1]) + bias
    weights_BNTS = scores_BNTS.softmax(dim=-1)
    dropped_BNTS = weights_BNTS if dropout is None else dropout(weights_BNTS)
    return dropped_BNTS.to(v_BNSH.dtype) @ v_BNSH, weights_BNTS


def shares_text(tokens_BS: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return whether key j is a token that query i may attend to, as far as padding and documents decide, [B, ...].

    Args:
        tokens_BS: False on padding; or the document of each token, counted from 1, and 0 on padding. Padding attends
            to itself, since a softmax over an empty row would be NaN.
    """
    if tokens_BS.dtype == torch.bool:
        return tokens_BS[:, j] | (i == j)
    return tokens_BS[:, i] == tokens_BS[:, j]


def attention_mask(
    pattern: Pattern, T: int, S: int, causal: bool, token_mask_BS: Tensor | None = None, device: Device = None
) -> Tensor:
    """Return which query may attend to which key, [1 or B, 1, T, S]: pattern, causality and padding combined.

    Args:
        T, S: numbers of queries and keys; the queries are the last T of S positions.
        token_mask_BS: False on padding, or the documents of the tokens; see `shares_text`.
    """
    i, j = query_and_key_indices(T, S, device)
    mask_TS = pattern(i, j)
    if causal:
        mask_TS = mask_TS & (j <= i)
    if token_mask_BS is None:
        return mask_TS[None, None]
    return (mask_TS & shares_text(token_mask_BS, i, j))[:, None]


def attention_bias(positions: Positions, mask: Tensor) -> Tensor:
    """Return what is added to the scores, [1 or B, 1 or N, T, S].

    That is the positional bias of each pair that the mask (from `attention_mask`) allows, and -inf for the others.
    """
    T, S = mask.shape[-2:]
    bias_NTS = positions.bias(*query_and_key_indices(T, S, mask.device))
    if bias_NTS is None:
        bias_NTS = torch.zeros((), device=mask.device)
    return torch.where(mask, bias_NTS, -math.inf)


def cached_tokens(cache: dict[str, Tensor]) -> int:
    """Return the number of tokens before those of this pass."""
    if "tokens" in cache:
        return int(cache["tokens"][0])
    return cache["k"].shape[2] if "k" in cache else 0


def forget_hidden_keys(cache: KVCache, pattern: Pattern, S: int) -> None:
    """Drop cached keys and values that no query from position S on may attend to.

    The first `tokens` of the pattern and those within its window stay. With gates all stay, because gates add up over
    the tokens between two.
    """
    if cache is None or not isinstance(pattern, Structured) or pattern.window is None or "z" in cache:
        return
    first, last = min(pattern.tokens, S), pattern.window - 1
    for name in ("k", "v"):
        x = cache[name]
        if x.shape[2] > first + last:
            cache[name] = torch.cat((x[:, :, :first], x[:, :, x.shape[2] - last :]), dim=2)
    cache["tokens"] = torch.full((len(cache["k"]),), S, device=cache["k"].device)  # a row for each sequence


def cached_positions(cache: dict[str, Tensor], pattern: Pattern, device: Device) -> Tensor | None:
    """Return the positions of the cached keys after `forget_hidden_keys`, or None if it has forgotten none."""
    tokens, size = cached_tokens(cache), cache["k"].shape[2] if "k" in cache else 0
    if size == tokens:
        return None
    assert isinstance(pattern, Structured)
    recent = torch.arange(tokens - (size - pattern.tokens), tokens, device=device)
    return torch.cat((torch.arange(pattern.tokens, device=device), recent))


class MultiHeadAttention(nn.Module):
    """What `SelfAttention` and `CrossAttention` share: N heads, and dropout of the weights."""

    def __init__(self, heads: int, dropout: nn.Module) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout

    def attention(
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `attention_reference`. `speechformer.kernels` overrides this method."""
        return attention_reference(q_BNTH, k_BNSH, v_BNSH, bias, self.dropout)


class SelfAttention(MultiHeadAttention):
    """Multi-head self-attention. Vaswani et al. 2017, section 3.2.2.

    Args:
        width: D, a multiple of `heads`.
        dropout: module for the attention weights.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        bias: whether the output projection has a bias.
        gated: whether the encoding has a gate; see `layers.positions`.
    """

    def __init__(
        self, width: int, heads: int, dropout: nn.Module, qkv_bias: bool, bias: bool, gated: bool = False
    ) -> None:
        super().__init__(heads, dropout)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)
        self.gate = nn.Linear(width, heads) if gated else None

    def forward(
        self, x_BTD: Tensor, positions: Positions, bias: Tensor, with_weights: bool = False, cache: KVCache = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each token of x to those that the bias allows; return the output, [B, T, D], and the weights.

        Args:
            with_weights: whether you need the weights, [B, N, T, S]; the kernels skip them otherwise. S counts the
                keys that the cache still has.
            cache: keys and values of the S - T tokens before x, [B, N, S - T, H], and their gates, [B, S - T, N],
                extended in place. Start with {}. See `forget_hidden_keys`.
        """
        if self.gate is not None:
            z_BSN = self.gates(x_BTD, cache)
            bias = bias + positions.gate(z_BSN, *query_and_key_indices(x_BTD.shape[1], z_BSN.shape[1], z_BSN.device))
        output_BTD, weights = self.attention_of_projections(self.qkv(x_BTD), positions, bias, with_weights, cache)
        return self.output(output_BTD), weights

    def gates(self, x_BTD: Tensor, cache: KVCache) -> Tensor:
        """Return the gates of all S tokens, cached ones included, [B, S, N]."""
        assert self.gate is not None
        z_BSN = self.gate(x_BTD)
        if cache:
            z_BSN = torch.cat((cache["z"], z_BSN), dim=1)
        if cache is not None:
            cache["z"] = z_BSN
        return z_BSN

    def attention_of_projections(
        self, qkv_BTE: Tensor, positions: Positions, bias: Tensor, with_weights: bool, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Split into heads, rotate, extend the cache, compute attention, and join the heads: [B, T, D]."""
        q, k, v = qkv_BTE.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        earlier = cache or {}
        q, k = positions.rotate(q, k, cached_tokens(earlier))
        if "k" in earlier:
            k, v = torch.cat((earlier["k"], k), dim=2), torch.cat((earlier["v"], v), dim=2)
        if cache is not None:
            cache["k"], cache["v"] = k, v
        output_BNTH, weights = self.attention(q, k, v, bias, with_weights)
        return output_BNTH.transpose(1, 2).flatten(2), weights


class CrossAttention(MultiHeadAttention):
    """Multi-head attention from a decoder to the states of an encoder. Vaswani et al. 2017, section 3.2.3.

    It uses neither position nor pattern. Both depend on the distance i - j, which has no meaning between word i of
    one language and word j of another. The decoder attends to the whole source except its padding.
    """

    def __init__(self, width: int, heads: int, dropout: nn.Module, qkv_bias: bool, bias: bool) -> None:
        super().__init__(heads, dropout)
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.kv = nn.Linear(width, 2 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def keys_and_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Project encoder states to keys and values, [B, N, S, H] each. All decoding steps share them."""
        k, v = self.kv(memory_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(
        self, x_RTD: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias_B11S: Tensor, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each target token to its source; return the output, [R, T, D], and weights, [R, N, T, S].

        The bias is -inf on padding. The R / B hypotheses that a beam search holds for a source, one after another,
        share its keys and values.
        """
        R, T, _ = x_RTD.shape
        B = k_BNSH.shape[0]  # torch.export would take len() for a constant
        q = self.q(x_RTD).view(B, R // B * T, self.heads, -1).transpose(1, 2)
        output, weights = self.attention(q, k_BNSH, v_BNSH, bias_B11S, with_weights)
        if weights is not None:
            weights = weights.unflatten(2, (R // B, T)).transpose(1, 2).flatten(0, 1)
        return self.output(output.transpose(1, 2).reshape(R, T, -1)), weights
