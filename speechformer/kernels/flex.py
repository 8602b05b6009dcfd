"""FlexAttention: attention in compiled tiles of 128 x 128 pairs, which skips those that the pattern hides.

Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels". On a CPU torch has
a slow version without a backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from speechformer.layers.attention import Attention, Pairs, SelfAttention, attention_mask
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern

RECOMPILE_LIMIT = 256  # most combinations of pattern, position, precision and the like that a process compiles


class FlexAttention(Attention):
    """FlexAttention. Its mask is built before compiled blocks run: a CUDA graph would overwrite it later."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(None, pairs)
        build = cached_block_mask if pairs.token_mask_BS is None else block_mask
        device = pairs.token_positions.device
        self.block_mask = build(pairs.pattern, pairs.causal, len(pairs.i_T), device, pairs.token_mask_BS)

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
        mechanism: SelfAttention | None = None,
    ) -> tuple[Tensor, None]:
        assert self.pairs is not None
        attend, score_mod = flex.flex_attention, self.pairs.positions.score_mod()
        if q_BNTH.is_cuda and not torch.compiler.is_compiling():  # a compiled block contains it
            attend = compiled_function(attend)
        return attend(q_BNTH, k_BNSH, v_BNSH, score_mod=score_mod, block_mask=self.block_mask), None


def block_mask(
    pattern: Pattern, causal: bool, T: int, device: torch.device, token_mask_BT: Tensor | None = None
) -> flex.BlockMask:
    """Build `layers.attention.attention_mask` in tiles; on a GPU compiled, so that it needs no T x T tensor."""

    def mask_mod(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return attention_mask(pattern, i, j, causal, token_mask_BT, b)

    B = None if token_mask_BT is None else len(token_mask_BT)
    create = compiled_function(flex.create_block_mask) if device.type == "cuda" else flex.create_block_mask
    return create(mask_mod, B, None, T, T, device=device)


# Without padding. Autograd cannot save tensors made in inference mode.
cached_block_mask = functools.lru_cache(maxsize=16)(torch.inference_mode(False)(block_mask))


@functools.cache
def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function of torch. Each kind of attention is compiled again for a second length, not a third.

    After torch's own limit of 8 compilations it would run uncompiled, with a tensor of all pairs.
    """
    run = torch.compile(function)

    def call(*arguments: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return run(*arguments, **options)

    return call


@functools.lru_cache(maxsize=64)
def partial_tiles(pattern: Pattern, T: int, causal: bool, tile: int = 128, rows: int = 16) -> float:
    """Return the share of the tiles of all pairs of which a pattern allows some pairs and not all, in some rows."""
    count = math.ceil(T / tile)
    starts = tile * torch.linspace(0, count - 1, min(rows, count)).long()
    i = (starts[:, None] + torch.arange(tile)).clamp(max=T - 1)
    j = torch.arange(count * tile)
    partial = 0.0
    for row in i[:, :, None]:  # one row of tiles at a time: no tensor of all pairs
        mask = pattern(row, j.clamp(max=T - 1)[None, :]) & (j < T)
        tiles = (mask & (j <= row) if causal else mask).view(tile, count, tile)
        partial += float((tiles.any(dim=2).any(dim=0) & ~tiles.all(dim=2).all(dim=0)).float().mean())
    return partial / len(i)
