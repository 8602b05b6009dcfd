"""FlexAttention: mask and bias computed block by block, skipping blocks where no pair is allowed.

Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels". On a GPU no tensor
of T x T is built.

Shapes: B sequences, T tokens, N heads, H width of a head.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from speechformer.layers.patterns import Pattern
from speechformer.layers.positions import ScoreMod


def block_mask(
    pattern: Pattern, causal: bool, T: int, device: torch.device | None, token_mask_BT: Tensor | None = None
) -> Any:
    """Build `layers.attention.attention_mask` as FlexAttention's `BlockMask`, of blocks of 128 x 128."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = pattern(i, j)
        if causal:
            mask = mask & (j <= i)
        return mask if token_mask_BT is None else mask & (token_mask_BT[b, j] | (i == j))

    on_gpu = device is not None and device.type == "cuda"
    B = None if token_mask_BT is None else len(token_mask_BT)
    return create_block_mask(mask_mod, B, None, T, T, device=device or "cpu", _compile=on_gpu)


cached_block_mask = functools.lru_cache(maxsize=16)(block_mask)  # without padding


@functools.cache
def compiled_flex_attention() -> Any:
    """Return torch's kernel, compiled; it is slow otherwise."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, score_mod: ScoreMod | None, mask: Any) -> Tensor:
    """Compute attention by FlexAttention, [B, N, T, H]. On a CPU torch has a slow version without a backward pass."""
    from torch.nn.attention import flex_attention as torch_flex

    options = {"score_mod": score_mod, "block_mask": mask}
    if torch.compiler.is_compiling():  # a compiled block contains it
        return torch_flex.flex_attention(q_BNTH, k_BNTH, v_BNTH, **options)
    if q_BNTH.is_cuda:
        return compiled_flex_attention()(q_BNTH, k_BNTH, v_BNTH, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return torch_flex.flex_attention(q_BNTH, k_BNTH, v_BNTH, **options)
