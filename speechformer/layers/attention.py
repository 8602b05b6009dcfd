"""Attention, in the order of the paper.

    attention(q, k, v) = softmax(q k^T / sqrt(H) + bias) v

Vaswani et al. 2017, "Attention Is All You Need", equation 1. The bias is the positional bias (ALiBi, T5) of each pair
of query and key that the mask allows, and minus infinity for every other pair. All layers share it.

`SelfAttention` does this in four steps: project, score, normalise, read. A mechanism (`attention=` in the config)
overrides one of them: see `layers.mechanisms`, and `layers.mixers` for those without scores.

This module is the reference: short, differentiable, correct on every device. Models run the faster subclasses of
`Attention` in `speechformer.kernels`, which are tested against it.

Shapes:
    B  sequences              N  heads
    T  queries                H  width of a head, D / N by default
    S  keys                   E  queries, keys and values side by side, (N + 2 K) H
    D  width of the model     R  target sequences of B sources, R / B for each (`CrossAttention`)
    K  heads of keys and values, of which each serves N / K heads of queries
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from speechformer.errors import UserError, require
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern, Structured, TopBlocks, all_pairs
from speechformer.layers.positions import Positions, Sizes
from speechformer.options import Few, Positive, Whole

Device = torch.device | None
KVCache = dict[str, Tensor] | None


def attention_reference(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    bias: Tensor,
    dropout: nn.Module | None = None,
    mechanism: SelfAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step.

    Args:
        bias: from `Pairs.bias`, [1 or B, 1 or N, T, S].
        dropout: applied to the weights.
        mechanism: scores and normalises otherwise.

    Returns:
        The output, [B, N, T, H], and the weights before dropout, [B, N, T, S].
    """
    if mechanism is None:
        scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1]) + bias
        weights_BNTS = scores_BNTS.softmax(dim=-1)
    else:
        shape = (*q_BNTH.shape[:-1], k_BNSH.shape[2])
        scores_BNTS = checked(mechanism, "score", mechanism.score(q_BNTH, k_BNSH), shape) + bias
        shape = (*v_BNSH.shape[:2], *shape[2:])  # a mechanism may join heads
        weights_BNTS = checked(mechanism, "normalise", mechanism.normalise(scores_BNTS), shape)
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


def checked(module: nn.Module, method: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the result of a method of an encoding or a mechanism, or raise a `UserError` if its shape is wrong."""
    if x.shape != shape:
        raise UserError(
            f"{type(module).__name__}.{method} returned the shape {[*x.shape]}; it must return {[*shape]}."
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
        """Return queries and keys of the T queries' tokens with their positions; see `Positions.rotate`."""
        rotated = self.positions.rotate(q_BNTH, k_BNTH, self.query_positions)
        wide = self.positions.widening * q_BNTH.shape[-1]
        q, k = (
            checked(self.positions, "rotate", x, (*y.shape[:-1], wide)) for x, y in zip(rotated, (q_BNTH, k_BNTH))
        )
        return q, k

    @property
    def all(self) -> tuple[Tensor, Tensor]:
        """The indices of all pairs: i, [T, 1], and j, [1, S]."""
        return self.i_T[:, None], self.j_S[None, :]

    def visible(self) -> Tensor:
        """Return how many keys each query may see by causality and token mask, whatever the pattern, [1 or B, T]."""
        if self.token_mask_BS is not None:
            return attention_mask(all_pairs, *self.all, self.causal, self.token_mask_BS).sum(dim=-1)
        return (self.i_T + 1 if self.causal else torch.full_like(self.i_T, self.j_S.shape[0]))[None]

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

    def split(self, qkv_BTE: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        """Return queries, [B, N, T, H], keys and values, [B, K, T, H] each, from their projections."""
        qkv = qkv_BTE.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
        return qkv.split((heads, kv_heads, kv_heads), dim=1)

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
        with_weights: whether the pass returns the weights.

    Attributes:
        shared: what a layer leaves for later ones of the pass.
    """

    def __init__(
        self,
        bias: Tensor | None,
        pairs: Pairs | None = None,
        places: Places | None = None,
        with_weights: bool = False,
    ) -> None:
        self.bias, self.pairs, self.places, self.with_weights = bias, pairs, places or Places(), with_weights
        self.shared: dict[str, Tensor] = {}

    def bias_with(self, gates_BNS: Tensor | None) -> Tensor:
        """Return the bias of a layer with these gates."""
        assert self.bias is not None
        if gates_BNS is None:
            return self.bias
        assert self.pairs is not None
        return self.bias + gate_bias(gates_BNS, *self.pairs.all)

    def fuses(self, x_BTD: Tensor, dropout: Dropout) -> bool:
        """Return whether the kernel takes projections of x as they are, which saves splitting and joining."""
        return False

    def of_projections(self, qkv_BTE: Tensor, heads: int, dropout: Dropout) -> Tensor:
        """Return the output, [B, T, D], of queries, keys and values as they are projected."""
        raise NotImplementedError

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
        mechanism: SelfAttention | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, [B, N, T, H], and the weights, [B, N, T, S], which a kernel may leave out.

        Only the reference knows a mechanism that scores or normalises otherwise.
        """
        bias = self.bias_with(gates_BNS)
        return attention_reference(q_BNTH, k_BNSH, v_BNSH, bias, dropout, mechanism)


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
    if "state" in cache:  # a mixer's, in place of keys
        cache["j"] = cache["j"][:, -1:]
    if not isinstance(pattern, Structured) or pattern.window is None or cache.keys() & {"gates", "state"}:
        return
    j = cache["j"][0]
    kept = (j < pattern.tokens) | (j > j[-1] - max(pattern.window - 1, 1))  # the last one counts the tokens
    if not kept.all():
        cache |= {"k": cache["k"][:, :, kept], "v": cache["v"][:, :, kept], "j": cache["j"][:, kept]}


class Layer(NamedTuple):
    """What the attention of a layer is built for.

    Args:
        sizes: those of the encodings; the width is a multiple of `heads`.
        depth: of the layer, from 0.
        dropout: module for the attention weights.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        bias: whether the output projection has a bias.
        gated: whether the encoding has a gate; see `layers.positions`.
        norm_eps: of the norms of queries and keys.
    """

    sizes: Sizes
    depth: int
    dropout: Dropout
    qkv_bias: bool
    bias: bool
    gated: bool = False
    norm_eps: float = 1e-6


class ShortConvolution(nn.Module):
    """y_t = x_t + sum over s < size of w_s x_{t-s}, for each channel by itself.

    Allen-Zhu 2025, "Physics of Language Models: Part 4.1, Canon Layers" (Canon-B); So et al. 2021, "Primer".
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        # in two dimensions torch is twice as fast on a CPU
        self.convolution = nn.Conv2d(channels, channels, (1, size), groups=channels, bias=False)

    def forward(self, x_BTE: Tensor, cache: KVCache) -> Tensor:
        """Return [B, T, E]; the cache keeps the last tokens, [B, size - 1, E]."""
        before = x_BTE.new_zeros(x_BTE.shape[0], self.size - 1, x_BTE.shape[2])
        padded = torch.cat(((cache or {}).get("convolution", before), x_BTE), dim=1)
        if cache is not None:
            cache["convolution"] = padded[:, x_BTE.shape[1] :]
        return x_BTE + self.convolution(padded.transpose(1, 2)[:, :, None])[:, :, 0].transpose(1, 2)


class SelfAttention(nn.Module):
    """Multi-head self-attention with a softmax, `attention=softmax`. Vaswani et al. 2017, section 3.2.2.

        project      q, k, v = W x, [B, N, T, H] each     then the encoding rotates q and k
        score        q k^T / sqrt(H)                      then the encoding and the mask are added
        normalise    weights = softmax(scores)
        read         W (weights v), heads side by side

    Args:
        layer: what it is built for.
        kv_heads: K, heads of keys and values, each of which serves N / K heads of queries: grouped-query attention
            (Ainslie et al. 2023, "GQA"); 1 is multi-query attention (Shazeer 2019). None: N.
        qk_norm: RMS norm of each query and key, with trained gains. Henry et al. 2020, "Query-Key Normalization",
            make their lengths 1, and replace 1 / sqrt(H) by one trained scale.
        conv: tokens that a short causal convolution over queries, keys and values covers; 0: none.
        softcap: c tanh(score / c), with c this number (Gemma 2, 2024). None: no limit.
        length_scale: multiply queries by s_n log(n), with a trained s_n for each head that starts at 1 / log(length)
            and the number n of keys that the query may see with full attention, whatever the pattern: Nakanishi
            2025, "Scalable-Softmax Is Superior for Attention".
        output_gate: multiply the heads' output by sigmoid(W x), element by element (Qiu et al. 2025, "Gated
            Attention for Large Language Models").
        value_residual: v = a v + b v_1, with trained a and b that start at 1/2 and the values v_1 of the first layer
            (Zhou et al. 2024, "Value Residual Learning"); of `by_layer`, of the first layer with this option.
    """

    sums_to_one = True  # whether the weights of a query do
    pairs_heads = False  # whether two heads share an output

    def __init__(
        self,
        layer: Layer,
        kv_heads: Few | None = None,
        qk_norm: bool = False,
        conv: Whole = 0,
        softcap: Positive | None = None,
        length_scale: bool = False,
        output_gate: bool = False,
        value_residual: bool = False,
    ) -> None:
        super().__init__()
        sizes, H = layer.sizes, layer.sizes.head_width
        self.heads, self.kv_heads, self.dropout = sizes.heads, kv_heads or sizes.heads, layer.dropout
        require(sizes.heads % self.kv_heads == 0, "attention.kv_heads", f"a divisor of heads={sizes.heads}", kv_heads)
        self.softcap = softcap
        read, channels = H * sizes.heads, H * (sizes.heads + 2 * self.kv_heads)
        self.qkv = nn.Linear(sizes.width, channels, bias=layer.qkv_bias)
        self.output = nn.Linear(read, sizes.width, bias=layer.bias)
        self.gate = nn.Linear(sizes.width, sizes.heads) if layer.gated else None
        self.convolution = ShortConvolution(channels, conv) if conv else None
        self.q_norm, self.k_norm = (nn.RMSNorm(H, eps=layer.norm_eps) if qk_norm else None for _ in "qk")
        scale = torch.full((sizes.heads,), 1 / math.log(max(2, sizes.length)))
        self.length_scale = nn.Parameter(scale) if length_scale else None
        self.output_gate = nn.Linear(sizes.width, read, bias=False) if output_gate else None
        self.shares_values = value_residual
        options = (conv, qk_norm, softcap, length_scale, output_gate, value_residual, self.kv_heads < sizes.heads)
        self.is_plain = type(self) is SelfAttention and not layer.gated and not any(options)
        self.value_residual = nn.Parameter(torch.full((2,), 0.5)) if value_residual and layer.depth else None

    @property
    def kernel(self) -> Literal["any", "reference", "none"]:
        """What computes it: any kernel, which knows a softmax of scaled products alone; the reference; or itself."""
        kind = type(self)
        softmax = kind.score is SelfAttention.score and kind.normalise is SelfAttention.normalise
        return "any" if softmax and self.softcap is None else "reference"

    @property
    def can_unpad(self) -> bool:
        """Whether tokens may lie one after another, without the padding between sequences."""
        plain = self.convolution is None and self.kv_heads == self.heads
        return plain and type(self).attend is SelfAttention.attend

    def check(self, positions: Positions, pattern: Pattern) -> None:
        """Raise a `UserError` if the mechanism does not go together with an encoding or a pattern."""

    def kernel_for(self, pattern: Pattern) -> str:
        """Return `kernel`; a pattern by content needs the reference."""
        return "reference" if isinstance(pattern, TopBlocks) else self.kernel

    def refuse_documents(self, pairs: Pairs) -> None:
        """Raise a `UserError` if documents are to be kept apart by what reads across them."""
        mask = pairs.token_mask_BS
        crosses = self.convolution is not None or self.kernel == "none" or isinstance(pairs.pattern, TopBlocks)
        if crosses and mask is not None and mask.dtype != torch.bool:
            raise UserError(
                "attention.conv, attention without scores and pattern=top_blocks read across documents; set "
                "task.documents=joined."
            )

    def projections(self, x_BTD: Tensor, cache: KVCache) -> Tensor:
        """Return queries, keys and values side by side, [B, T, E]."""
        qkv_BTE = self.qkv(x_BTD)
        return qkv_BTE if self.convolution is None else self.convolution(qkv_BTE, cache)

    def project(self, x_BTD: Tensor, attention: Attention, cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, [B, N, T, H], keys and values, [B, K, T, H] each, without positions."""
        q, k, v = attention.places.split(self.projections(x_BTD, cache), self.heads, self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.shares_values:
            first = attention.shared.setdefault("values", v)
            heads = first.shape[1]
            require(
                heads == self.kv_heads, "attention.kv_heads", f"{heads} as where value_residual begins", v.shape[1]
            )
            if self.value_residual is not None:
                v = self.value_residual[0] * v + self.value_residual[1] * first
        return q, k, v

    def score(self, q_BNTH: Tensor, k_BNSH: Tensor) -> Tensor:
        """Return the scores of all pairs, [B, N, T, S]."""
        scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1])
        return scores_BNTS if self.softcap is None else self.softcap * (scores_BNTS / self.softcap).tanh()

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        """Return the weights of scores, which are -inf for hidden keys."""
        return scores_BNTS.softmax(dim=-1)

    def read(self, output_BNTH: Tensor, x_BTD: Tensor, places: Places) -> Tensor:
        """Return the layer's output, [B, T, D], from that of the heads and its input."""
        output_BTD = places.join(output_BNTH)
        if self.output_gate is not None:
            output_BTD = output_BTD * self.output_gate(x_BTD).sigmoid()
        return self.output(output_BTD)

    def attend(
        self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the heads, [B, N, T, H], and the weights, from what `project` returns."""
        pairs, gates_BNS = attention.pairs, None
        assert pairs is not None
        if self.length_scale is not None:
            log_B1T1 = pairs.visible().to(q.dtype).log()[:, None, :, None]
            q = q * self.length_scale[:, None, None] * log_B1T1
        k, v = extend(cache, "k", k, 2), extend(cache, "v", v, 2)
        if self.gate is not None:
            z_BTN = attention.places.pad(self.gate(x_BTD))
            z_BTN = z_BTN.to(torch.promote_types(z_BTN.dtype, torch.float32))  # sums of half precision are too coarse
            gates_BTN = checked(pairs.positions, "gate", pairs.positions.gate(z_BTN), z_BTN.shape)
            gates_BNS = extend(cache, "gates", gates_BTN, 1).cumsum(dim=1).transpose(1, 2)
        if self.kv_heads < self.heads:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        if isinstance(pairs.pattern, TopBlocks):
            assert attention.bias is not None
            hidden_BNTS = ~pairs.pattern.select(q, k, pairs)
            bias = attention.bias.masked_fill(hidden_BNTS, -math.inf)
            attention = Attention(bias, pairs, attention.places, attention.with_weights)
        return attention(q, k, v, self.dropout, gates_BNS, self)

    def forward(self, x_BTD: Tensor, attention: Attention, cache: KVCache = None) -> tuple[Tensor, Tensor | None]:
        """Attend from each token of x to those that the bias allows; return the output, [B, T, D], and the weights.

        The weights are [B, N, T, S], where S counts the keys that the cache still has; kernels skip them.

        Args:
            cache: keys and values of earlier tokens, [B, K, S - T, H], and their gates, [B, S - T, N], extended in
                place. Start with {}. See `forget_hidden_keys`.
        """
        assert attention.pairs is not None
        self.refuse_documents(attention.pairs)
        if cache is None and self.is_plain and attention.fuses(x_BTD, self.dropout):
            return self.output(attention.of_projections(self.qkv(x_BTD), self.heads, self.dropout)), None
        q, k, v = self.project(x_BTD, attention, cache)
        q, k = attention.pairs.rotate(q, k)
        output_BNTH, weights = self.attend(x_BTD, q, k, v, attention, cache)
        return self.read(output_BNTH, x_BTD, attention.places), weights


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
