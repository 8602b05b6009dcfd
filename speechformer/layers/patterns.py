"""Attention patterns: which query may attend to which key, `pattern=` in the config.

A pattern is a function of query indices i and key indices j, integer tensors that broadcast. It returns True where i
may attend to j. `attention.attention_mask` adds causality and padding, so `window` covers the most recent keys in a
decoder and the keys on both sides in an encoder.

Patterns combine with & and |, work at any length, and are the same in training and evaluation. Every pattern keeps
the diagonal i == j, so that no query is left without a key.

Any function is a pattern. A `Structured` pattern also describes itself. The sparse kernel computes neighbouring
queries together, so it is fast where these see much the same keys; if the keys are `stride` apart, it puts every
`stride`-th token next to each other. Generation caches only the keys within the `window` and the first `tokens`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speechformer.layers.by_layer import per_layer_configs
from speechformer.options import Size, Whole, build

if TYPE_CHECKING:
    from speechformer.layers.attention import Pairs

Pattern = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Structured:
    """The union of patterns that share no pair, and what kernels and caches can use of their structure.

    Args:
        parts: the patterns, each with the stride of its keys. One of them keeps the diagonal.
        window: in a decoder, no query attends to keys that are `window` or more before it; None for no limit.
        tokens: first positions for which this does not hold.
    """

    parts: tuple[tuple[Pattern, int], ...]
    window: int | None = None
    tokens: Whole = 0

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        first, *others = (pattern(i, j) for pattern, _ in self.parts)
        return functools.reduce(torch.logical_or, others, first)


def parts(pattern: Pattern) -> tuple[tuple[Pattern, int], ...]:
    """Return the parts of a pattern with their strides: of any function one, with stride 1."""
    return pattern.parts if isinstance(pattern, Structured) else ((pattern, 1),)


def all_pairs(i: Tensor, j: Tensor) -> Tensor:
    """Allow every pair."""
    return torch.ones_like(i - j, dtype=torch.bool)


def full() -> Pattern:
    """Full attention. Kernels recognise this pattern by identity and build no mask for it."""
    return all_pairs


def window(window: Size = 5) -> Pattern:
    """Sliding window, |i - j| < window: in a decoder the `window` most recent keys, including i itself.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers"; Beltagy et al. 2020,
    "Longformer", figure 2b.
    """
    return Structured(((lambda i, j: (i - j).abs() < window, 1),), window)


def block(block: Size = 8) -> Pattern:
    """Blocks of `block` tokens: i attends to its own block and the one before.

    Marsol Torrent 2026, section 4.2; local attention with one block of memory.
    """

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        blocks_back = i // block - j // block
        return (blocks_back == 0) | (blocks_back == 1)

    return Structured(((allowed, 1),), 2 * block)


def strided(stride: Size = 6) -> Pattern:
    """The nearest `stride` keys and every `stride`-th key beyond them, merged in one head.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3.
    """

    def far(i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() >= stride) & ((i - j) % stride == 0)

    return Structured(((lambda i, j: (i - j).abs() < stride, 1), (far, stride)))


def dilated(window: Size = 5, dilation: Size = 2) -> Pattern:
    """Sliding window with gaps: `window` keys on each side, including i itself, `dilation` apart.

    Beltagy et al. 2020, "Longformer", figure 2c.
    """
    span = window * dilation
    return Structured(((lambda i, j: ((i - j).abs() < span) & ((i - j) % dilation == 0), dilation),), span)


def global_(window: Size = 5, tokens: Whole = 2) -> Pattern:
    """Sliding window plus global tokens: the first `tokens` positions attend to all, and all attend to them.

    Beltagy et al. 2020, "Longformer", figure 2d.
    """
    return Structured(((lambda i, j: ((i - j).abs() < window) | (i < tokens) | (j < tokens), 1),), window, tokens)


def sinks(window: Size = 5, tokens: Whole = 4) -> Pattern:
    """Sliding window plus attention sinks: all attend to the first `tokens` positions. In a decoder it is `global`.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2.
    """
    return Structured(((lambda i, j: ((i - j).abs() < window) | (j < tokens), 1),), window, tokens)


def bigbird(window: Size = 3, tokens: Whole = 2, links: Whole = 3, seed: Whole = 0) -> Pattern:
    """Sliding window, global tokens and random links.

    Each position draws `links` times, with replacement, from the earlier positions outside its window. A link works
    in both directions. The draws hash position and `seed`, so a link stays in place in longer sequences.

    Zaheer et al. 2020, "Big Bird", section 2.
    """
    local_and_global = global_(window, tokens)

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        mask = local_and_global(i, j)
        for link, (later, earlier) in itertools.product(range(links), ((i, j), (j, i))):
            choices = later - window - tokens + 1  # earlier positions outside window and global tokens
            drawn = tokens + hashed(later, seed, link) % choices.clamp(min=1)
            mask = mask | (earlier == torch.where(choices > 0, drawn, -1))
        return mask

    return allowed


@dataclass(frozen=True)
class TopBlocks:
    """A pattern by content: each query chooses blocks of keys beside its own by their mean key.

    Of i and j alone it allows every pair; `select` hides those that were not chosen. `first` is whether position 0
    sees all and all see it.
    """

    block: int
    top: int
    first: bool = False

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return all_pairs(i, j)

    def select(self, q_BNTH: Tensor, k_BNSH: Tensor, pairs: Pairs) -> Tensor:
        """Return which keys each query sees, [B, N, T, S]: those of its block, and of the `top` best others."""
        own_T1, block_S = pairs.i_T[:, None] // self.block, pairs.j_S // self.block
        blocks_C = torch.arange(-(-pairs.j_S.shape[0] // self.block), device=pairs.j_S.device)
        members_BSC = (block_S[:, None] == blocks_C)[None]
        if pairs.token_mask_BS is not None:
            members_BSC = members_BSC & pairs.token_mask_BS[:, :, None]
        counts_BC = members_BSC.sum(dim=1)
        sums_BNCH = members_BSC.transpose(1, 2)[:, None].to(k_BNSH.dtype) @ k_BNSH
        means_BNCH = sums_BNCH / counts_BC.clamp(min=1)[:, None, :, None]
        others_TC = blocks_C < own_T1 if pairs.causal else blocks_C != own_T1
        others_B1TC = others_TC & (counts_BC > 0)[:, None, None, :]
        scores_BNTC = (q_BNTH @ means_BNCH.transpose(2, 3)).masked_fill(~others_B1TC, -math.inf)
        best = scores_BNTC.topk(min(self.top, len(blocks_C)), dim=-1).indices
        chosen_BNTC = torch.zeros_like(scores_BNTC, dtype=torch.bool).scatter(-1, best, True) & others_B1TC
        seen_BNTS = (chosen_BNTC | (blocks_C == own_T1))[..., block_S]
        return seen_BNTS | (pairs.i_T[:, None] == 0) | (pairs.j_S == 0) if self.first else seen_BNTS


def top_blocks(block: Size = 8, top: Size = 2) -> Pattern:
    """The keys of a query's own block of `block` tokens, and of the `top` other blocks with the best mean key.

    Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", where they are earlier blocks, as here
    in a decoder.
    """
    return TopBlocks(block, top)


def with_first_token(pattern: Pattern) -> Pattern:
    """Return the pattern with position 0 made global, as Longformer treats a CLS token."""
    if pattern is all_pairs:
        return pattern
    if isinstance(pattern, TopBlocks):
        return replace(pattern, first=True)
    if all(stride == 1 for _, stride in parts(pattern)):
        return lambda i, j: pattern(i, j) | (i == 0) | (j == 0)

    def without_first_token(part: Pattern) -> Pattern:
        return lambda i, j: part(i, j) & (i > 0) & (j > 0)

    others = ((without_first_token(part), stride) for part, stride in parts(pattern))
    return Structured((((lambda i, j: (i == 0) | (j == 0)), 1), *others))


def hashed(index: Tensor, seed: int, link: int) -> Tensor:
    """Return a pseudo-random integer in [0, 2^31) for each index, same shape."""
    # `&`, so that torch.compile has numbers of 64 bits to multiply, and not those of an index
    x = (index.long() & 0xFFFFFFFF) * 2654435761 + seed * 40503 + link * 2246822519
    for _ in range(2):  # a single round leaves neighbours correlated
        x = x & 0xFFFFFFFF
        x = ((x >> 16) ^ x) * 0x45D9F3B
    return (x & 0xFFFFFFFF) >> 1


PATTERNS: dict[str, Callable[..., Pattern]] = {
    "full": full,
    "window": window,
    "block": block,
    "strided": strided,
    "dilated": dilated,
    "global": global_,
    "sinks": sinks,
    "bigbird": bigbird,
    "top_blocks": top_blocks,
}


def build_pattern(spec: dict) -> Pattern:
    """Build the pattern of a config group such as `{"name": "window", "window": 5}`."""
    return build(PATTERNS, spec, "pattern")


def build_patterns(spec: dict, layers: int, first_token: bool = False) -> list[Pattern]:
    """Build the pattern of each layer; layers with equal entries share it. See `layers.by_layer`."""
    specs, patterns = per_layer_configs(spec, "pattern", layers), list[Pattern]()
    for k, layer_spec in enumerate(specs):
        if (first := specs.index(layer_spec)) < k:
            patterns.append(patterns[first])
        else:
            pattern = build_pattern(layer_spec)
            patterns.append(with_first_token(pattern) if first_token else pattern)
    return patterns
