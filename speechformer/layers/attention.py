"""Attention, in the order of the paper.

    attention(q, k, v) = softmax(q k^T / sqrt(H) + bias) v

Vaswani et al. 2017, "Attention Is All You Need", equation 1. The bias is the positional bias (ALiBi, T5) of each pair
of query and key that the mask allows, and minus infinity for every other pair. All layers share it.

This module is the reference: short, differentiable, correct on every device. Models run the faster subclasses of
`Attention` in `speechformer.kernels`, which are tested against it.

Shapes:
    B  sequences              N  heads
    T  queries                H  width of a head, D / N
    S  keys                   E  queries, keys and values side by side, 3 D
    D  width of the model     R  target sequences of B sources, R / B for each (`CrossAttention`)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechformer.errors import UserError
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern, Structured, all_pairs
from speechformer.layers.positions import Positions

Device = torch.device | None
KVCache = dict[str, Tensor] | None


def attention_reference(
    q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, dropout: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step.

    Args:
        bias: from `Pairs.bias`, [1 or B, 1 or N, T, S].
        dropout: applied to the weights.

    Returns:
        The output, [B, N, T, H], and the weights before dropout, [B, N, T, S].
    """
    scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1]) + bias
    weights_BNTS = scores_BNTS.softmax(dim=-1)
    dropped_BNTS = weights_BNTS if dropout is None else dropout(weights_BNTS)
    return dropped_BNTS.to(v_BNSH.dtype) @ v_BNSH, weights_BNTS


def attention_mask(
    pattern: Pattern,
    i: Tensor,
    j: Tensor,
    causal: bool,
    token_mask_BS: Tensor | None = None,
    b: Tensor | slice = slice(None),
) -> Tensor:
    """Return which query i may attend to which key j of sequences b, [...] or with a token mask [B, ...].

    That is pattern, causality and padding combined.

    Args:
        token_mask_BS: False on padding; or the document of each token, counted from 1, and 0 on padding. Padding
            attends to itself, since a softmax over an empty row would be NaN.
    """
    mask = pattern(i, j)
    if causal:
        mask = mask & (j <= i)
    if token_mask_BS is None:
        return mask
    if token_mask_BS.dtype == torch.bool:
        return mask & (token_mask_BS[b, j] | (i == j))
    return mask & (token_mask_BS[b, i] == token_mask_BS[b, j])


def gate_bias(gates_BNS: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return what gates, summed from the first token on, add to the scores of queries i and keys j, [B, N, ...]."""
    return -(gates_BNS[..., i] - gates_BNS[..., j]).abs()


def checked(positions: Positions, place: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what an encoding returned in a place, or raise a `UserError` if it has another shape than it must."""
    if x.shape != shape:
        raise UserError(
            f"{type(positions).__name__}.{place} returned the shape {[*x.shape]}; it must return {[*shape]}."
        )
    return x


@dataclass
class Pairs:
    """The queries and keys of a pass through layers of one encoding and pattern.

    Args:
        token_positions: of all S tokens, from `Positions.prepare`.
        i_T, j_S: indices of queries and keys among the tokens; the cache may have forgotten some keys.
        token_mask_BS: as for `attention_mask`.
    """

    positions: Positions
    pattern: Pattern
    causal: bool
    token_positions: Tensor
    i_T: Tensor
    j_S: Tensor
    token_mask_BS: Tensor | None = None

    @staticmethod
    def of_text(
        positions: Positions, pattern: Pattern, causal: bool, T: int, token_mask_BT: Tensor | None, device: Device
    ) -> Pairs:
        """Return all pairs of T tokens."""
        i_T = torch.arange(T, device=device)
        return Pairs(positions, pattern, causal, positions.prepare(T, device), i_T, i_T, token_mask_BT)

    def bias(self, i: Tensor, j: Tensor, pattern: Pattern | None = None) -> Tensor:
        """Return what is added to the scores of queries i and keys j, [1 or B, 1 or N, ...].

        That is the positional bias of each pair that a pattern, by default the layers', allows; -inf for the others.
        """
        mask = attention_mask(pattern or self.pattern, i, j, self.causal, self.token_mask_BS)
        mask = mask[None, None] if self.token_mask_BS is None else mask[:, None]
        i, j = self.token_positions[i], self.token_positions[j]
        bias = self.positions.bias(i, j)
        if bias is None:
            return torch.where(mask, 0.0, -math.inf)
        shape = (self.positions.heads, *(i - j).shape)
        return torch.where(mask, checked(self.positions, "bias", bias, shape), -math.inf)

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the T queries' tokens with their positions, [B, N, T, H] each."""
        q, k = self.positions.rotate(q_BNTH, k_BNTH, self.query_positions)
        return checked(self.positions, "rotate", q, q_BNTH.shape), checked(self.positions, "rotate", k, k_BNTH.shape)

    @property
    def all(self) -> tuple[Tensor, Tensor]:
        """The indices of all pairs: i, [T, 1], and j, [1, S]."""
        return self.i_T[:, None], self.j_S[None, :]

    @property
    def is_plain(self) -> bool:
        """Whether causality alone decides the bias."""
        biased = self.positions.overrides("bias") or self.positions.overrides("gate")
        return self.pattern is all_pairs and self.token_mask_BS is None and not biased

    @functools.cached_property
    def query_positions(self) -> Tensor:
        """The positions of the queries."""
        return self.token_positions[self.i_T]


class Places:
    """How tokens lie in the tensors between layers: at their places in padded sequences, [B, T, D]."""

    def split(self, qkv_BTE: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values from their projections, [B, N, T, H] each."""
        return qkv_BTE.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def join(self, output_BNTH: Tensor) -> Tensor:
        """Return the outputs of the heads side by side, [B, T, D]."""
        return output_BNTH.transpose(1, 2).flatten(2)

    def pad(self, x_BTD: Tensor) -> Tensor:
        """Return the tokens in padded sequences."""
        return x_BTD


class Attention:
    """Attention of the layers that share a bias, by the reference. The kernels are subclasses.

    Args:
        bias: [1 or B, 1 or N, T, S]; a kernel may do without.
        pairs: the queries and keys; None for cross-attention.
        places: how tokens lie in the input of the layers.
    """

    def __init__(self, bias: Tensor | None, pairs: Pairs | None = None, places: Places | None = None) -> None:
        self.bias, self.pairs, self.places = bias, pairs, places or Places()

    def bias_with(self, gates_BNS: Tensor | None) -> Tensor:
        """Return the bias of a layer with these gates."""
        assert self.bias is not None
        if gates_BNS is None:
            return self.bias
        assert self.pairs is not None
        return self.bias + gate_bias(gates_BNS, *self.pairs.all)

    def of_projections(self, qkv_BTE: Tensor, heads: int, dropout: Dropout) -> Tensor | None:
        """Return the output, [B, T, D], of queries, keys and values as they are projected, or None.

        A kernel that has it saves what splitting and joining cost.
        """
        return None

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, [B, N, T, H], and the weights, [B, N, T, S], which a kernel may leave out."""
        return attention_reference(q_BNTH, k_BNSH, v_BNSH, self.bias_with(gates_BNS), dropout)


def extend(cache: KVCache, name: str, x: Tensor, dim: int) -> Tensor:
    """Return what the cache holds under a name with x behind it, which the cache holds from now on."""
    if cache is None:
        return x
    cache[name] = torch.cat((cache[name], x), dim=dim) if name in cache else x
    return cache[name]


def forget_hidden_keys(cache: dict[str, Tensor], pattern: Pattern) -> None:
    """Drop cached keys that no later query may attend to.

    The first `tokens` of the pattern and those within its window stay. With gates all stay, because gates add up over
    the tokens between two.
    """
    if not isinstance(pattern, Structured) or pattern.window is None or "gates" in cache:
        return
    j = cache["j"][0]
    kept = (j < pattern.tokens) | (j > j[-1] - max(pattern.window - 1, 1))  # the last one counts the tokens
    if not kept.all():
        cache |= {"k": cache["k"][:, :, kept], "v": cache["v"][:, :, kept], "j": cache["j"][:, kept]}


class SelfAttention(nn.Module):
    """Multi-head self-attention. Vaswani et al. 2017, section 3.2.2.

    Args:
        width: D, a multiple of `heads`.
        dropout: module for the attention weights.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        bias: whether the output projection has a bias.
        gated: whether the encoding has a gate; see `layers.positions`.
    """

    def __init__(
        self, width: int, heads: int, dropout: Dropout, qkv_bias: bool, bias: bool, gated: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)
        self.gate = nn.Linear(width, heads) if gated else None

    def forward(self, x_BTD: Tensor, attention: Attention, cache: KVCache = None) -> tuple[Tensor, Tensor | None]:
        """Attend from each token of x to those that the bias allows; return the output, [B, T, D], and the weights.

        The weights are [B, N, T, S], where S counts the keys that the cache still has; kernels skip them.

        Args:
            cache: keys and values of earlier tokens, [B, N, S - T, H], and their gates, [B, S - T, N], extended in
                place. Start with {}. See `forget_hidden_keys`.
        """
        pairs, places, gates_BNS = attention.pairs, attention.places, None
        assert pairs is not None
        qkv_BTE = self.qkv(x_BTD)
        if cache is None and self.gate is None and not pairs.positions.overrides("rotate"):
            output_BTD = attention.of_projections(qkv_BTE, self.heads, self.dropout)
            if output_BTD is not None:
                return self.output(output_BTD), None
        q, k, v = places.split(qkv_BTE, self.heads)
        q, k = pairs.rotate(q, k)
        k, v = extend(cache, "k", k, 2), extend(cache, "v", v, 2)
        if self.gate is not None:
            z_BTN = places.pad(self.gate(x_BTD))
            z_BTN = z_BTN.to(torch.promote_types(z_BTN.dtype, torch.float32))  # sums of half precision are too coarse
            gates_BTN = checked(pairs.positions, "gate", pairs.positions.gate(z_BTN), z_BTN.shape)
            gates_BNS = extend(cache, "gates", gates_BTN, 1).cumsum(dim=1).transpose(1, 2)
        output_BNTH, weights = attention(q, k, v, self.dropout, gates_BNS)
        return self.output(places.join(output_BNTH)), weights


class CrossAttention(nn.Module):
    """Multi-head attention from a decoder to the states of an encoder. Vaswani et al. 2017, section 3.2.3.

    It uses neither position nor pattern. Both depend on the distance i - j, which has no meaning between word i of
    one language and word j of another. The decoder attends to the whole source except its padding.
    """

    def __init__(self, width: int, heads: int, dropout: Dropout, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.kv = nn.Linear(width, 2 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def keys_and_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Project encoder states to keys and values, [B, N, S, H] each. All decoding steps share them."""
        k, v = self.kv(memory_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(
        self, x_RTD: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each target token to its source; return the output, [R, T, D], and weights, [R, N, T, S].

        The bias is -inf on padding. The R / B hypotheses that a beam search holds for a source, one after another,
        share its keys and values.
        """
        R, T, _ = x_RTD.shape
        B = k_BNSH.shape[0]  # torch.export would take len() for a constant
        q = self.q(x_RTD).view(B, R // B * T, self.heads, -1).transpose(1, 2)
        output, weights = attention(q, k_BNSH, v_BNSH, self.dropout)
        if weights is not None:
            weights = weights.unflatten(2, (R // B, T)).transpose(1, 2).flatten(0, 1)
        return self.output(output.transpose(1, 2).reshape(R, T, -1)), weights
