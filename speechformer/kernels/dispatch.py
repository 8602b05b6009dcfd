"""Choose the kernel of a pass: torch's attention, sparse blocks or FlexAttention.

Every kernel computes what `speechformer.layers` computes; `tests/test_dispatch.py` checks each against it. A model
holds `choose_kernel` as `Stack.choose`, calls it once in a pass for each encoding and pattern, and its layers call
the kernels that it returns.
"""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.kernels.flex import FlexAttention, partial_tiles
from speechformer.kernels.sparse import SparseBlocks, layout_of
from speechformer.layers.attention import Attention, Pairs, Places
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import all_pairs

HAS_TRITON = importlib.util.find_spec("triton") is not None  # which compiles FlexAttention
# benchmarks/attention.py and benchmarks/gpu.py measure both sides of these limits:
FLEX_MIN_PAIRS, FLEX_MIN_LENGTH, FLEX_MIN_WIDTH = 1 << 26, 1024, 16  # pairs of all sequences; the width is torch's
PARTIAL_TILES = 0.25  # most, of all: for each pair of such a tile FlexAttention evaluates the pattern
SPARSE_MIN_LENGTH, SPARSE_MIN_ON_GPU = 512, 16_384  # there small products take no less time than large ones
SPARSE_COST = 0.5  # most, for each of T^2 pairs


class SDPA(Attention):
    """`scaled_dot_product_attention`; without a bias if causality alone decides it."""

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rate = dropout.active_rate
        if rate and not q_BNTH.is_cuda:
            return super().__call__(q_BNTH, k_BNSH, v_BNSH, dropout, gates_BNS)
        if self.bias is None:
            is_causal = self.pairs is not None and self.pairs.causal
            return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, None, rate, is_causal), None
        bias = self.bias_with(gates_BNS).to(q_BNTH.dtype)
        return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, bias, rate), None


def choose_kernel(
    pairs: Pairs, B: int, head_width: int, dropout: float, with_weights: bool, compiled: bool, places: Places | None
) -> Attention:
    """Return the kernel of a pass.

    Args:
        B, head_width: sequences, and H.
        dropout: rate of the weights.
        with_weights: whether the pass returns the weights.
        compiled: whether compiled blocks call the kernel.
        places: of the tokens between layers.
    """
    T, device = pairs.i_T.shape[0], pairs.token_positions.device  # torch.export would take len() for a constant
    if with_weights:
        return Attention(pairs.bias(*pairs.all), pairs, places)
    if pairs.j_S.shape[0] == T:
        if device.type == "cuda" and HAS_TRITON and not dropout and suits_flex(pairs, B, head_width):
            return FlexAttention(pairs)
        is_long = not compiled and (SPARSE_MIN_LENGTH if device.type == "cpu" else SPARSE_MIN_ON_GPU) <= T
        if is_long and (layout := layout_of(pairs.pattern, T, pairs.causal, device, SPARSE_COST)):
            return SparseBlocks(pairs, layout, places)
        if pairs.is_plain and not (dropout and device.type != "cuda"):
            return SDPA(None, pairs, places)
    return SDPA(pairs.bias(*pairs.all), pairs, places)


def suits_flex(pairs: Pairs, B: int, head_width: int) -> bool:
    """Return whether FlexAttention can compute some pairs, and faster than a mask does.

    It can with heads of at least 16 numbers, and positions with a `score_mod` or without bias and gate. It is faster
    for many pairs, unless padding alone hides keys or the pattern scatters its pairs over many tiles.
    """
    T, has, pattern = len(pairs.i_T), pairs.positions.overrides, pairs.pattern
    can = (has("score_mod") or not has("bias")) and not has("gate") and head_width >= FLEX_MIN_WIDTH
    if not can or T < FLEX_MIN_LENGTH or B * T**2 < FLEX_MIN_PAIRS:
        return False
    is_padded = pairs.token_mask_BS is not None and pairs.token_mask_BS.dtype == torch.bool
    if pattern is all_pairs and not has("bias") and (pairs.is_plain or (is_padded and not pairs.causal)):
        return False
    return partial_tiles(pattern, 1024 * math.ceil(T / 1024), pairs.causal) <= PARTIAL_TILES  # same for many batches
