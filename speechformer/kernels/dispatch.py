"""Choose the kernel of a pass: torch's attention, sparse blocks or FlexAttention.

Every kernel computes what `speechformer.layers` computes; `tests/test_dispatch.py` checks each against it. A model
holds `choose_kernel` as `Stack.choose`, calls it once in a pass for each encoding and pattern, and its layers call
the kernels that it returns.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.flex import FlexAttention, partial_tiles
from speechformer.kernels.padding import Unpadder, without_padding
from speechformer.kernels.sparse import SparseBlocks, layout_of
from speechformer.layers.attention import Attention, Pairs, Places, SelfAttention
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import all_pairs

HAS_TRITON = importlib.util.find_spec("triton") is not None  # which compiles FlexAttention
# benchmarks/attention.py and gpu.py measure both sides of these limits, limits.py fits them:
FLEX_MIN_PAIRS, FLEX_MIN_LENGTH, FLEX_MIN_WIDTH = 1 << 26, 1024, 16  # pairs of all sequences; the width is torch's
PARTIAL_TILES = 0.25  # most, of all: for each pair of such a tile FlexAttention evaluates the pattern
SPARSE_MIN_LENGTH, SPARSE_MIN_ON_GPU = 512, 16_384  # there small products take no less time than large ones
SPARSE_COST = 0.5  # most, for each of T^2 pairs


class DroppedAttention(torch.autograd.Function):
    """Self-attention with dropout on the CPU, from the projections to the output, as one function.

    Autograd spends a tenth of the training step of a small model on splitting qkv and on joining its gradient again.
    Here the three parts of the gradient are written where they belong. With scores S, P = softmax(S), dropout mask M
    and output O = (P M) v:

        dv = (P M)^T dO,   dP = M (dO v^T),   dS = P (dP - sum_j dP P)

    Arguments of `apply`: the projections, [R, E] or [B, T, E], for an output [R, D] or [B, T, D]; bias
    [1 or B, 1 or N, T, T]; dropout mask [B, N, T, T]; the rows of `Unpadder.head_rows`. Padding holds a copy of the
    first token; the bias hides its keys, and its output is dropped.
    """

    @staticmethod
    def forward(ctx: Any, projections: Tensor, bias: Tensor, mask_BNTT: Tensor, rows: Sequence[Tensor]) -> Tensor:
        (B, N, T, _), E = mask_BNTT.shape, projections.shape[-1]
        q, k, v = projections.reshape(-1, E // (3 * N)).index_select(0, rows[0]).view(3, B * N, T, -1)
        scores = torch.bmm(q, k.transpose(1, 2)).view(B, N, T, T).div_(math.sqrt(q.shape[-1]))
        weights = scores.add_(bias).softmax(dim=-1)
        dropped = (weights * mask_BNTT).view(-1, T, T)
        ctx.save_for_backward(q, k, v, weights, mask_BNTT, dropped)
        ctx.bias_shape, ctx.rows = bias.shape, rows
        output = torch.bmm(dropped, v).view(B * N * T, -1).index_select(0, rows[2])
        return output.view(*projections.shape[:-1], E // 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, mask_BNTT, dropped = ctx.saved_tensors
        _, to_tokens, of_output = ctx.rows
        grad = q.new_zeros(q.shape).view(-1, q.shape[-1])
        grad = grad.index_copy_(0, of_output, grad_output.reshape(-1, q.shape[-1])).view_as(q)
        grad_qkv = grad.new_empty(3, *q.shape)
        torch.bmm(dropped.transpose(1, 2), grad, out=grad_qkv[2])
        grad_weights = torch.bmm(grad, v.transpose(1, 2)).view_as(weights).mul_(mask_BNTT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_bias = grad_scores.sum_to_size(ctx.bias_shape).clone() if ctx.needs_input_grad[1] else None
        grad_scores = grad_scores.view_as(dropped).div_(math.sqrt(q.shape[-1]))
        torch.bmm(grad_scores, k, out=grad_qkv[0])
        torch.bmm(grad_scores.transpose(1, 2), q, out=grad_qkv[1])
        grad_projections = grad_qkv.view(-1, q.shape[-1]).index_select(0, to_tokens)
        return grad_projections.view(*grad_output.shape[:-1], -1), grad_bias, None, None


class SDPA(Attention):
    """`scaled_dot_product_attention`, without a bias if causality alone decides it; with dropout, own operations."""

    def fuses(self, x_BTD: Tensor, dropout: Dropout) -> bool:
        if not dropout.active_rate or x_BTD.device.type != "cpu" or self.pairs is None or self.bias is None:
            return False
        rotates = self.pairs.positions.overrides("rotate")
        return not (rotates or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))

    def of_projections(self, qkv_BTE: Tensor, heads: int, dropout: Dropout) -> Tensor:
        assert self.bias is not None and isinstance(dropout, FastDropout)
        places = self.places
        if not isinstance(places, Unpadder):
            places = without_padding(*qkv_BTE.shape[:2], heads)
        mask = dropout.mask((places.B, heads, places.T, places.T), qkv_BTE.dtype)
        return DroppedAttention.apply(qkv_BTE, self.bias, mask, places.head_rows)

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
        mechanism: SelfAttention | None = None,
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
    pairs: Pairs,
    B: int,
    head_width: int,
    dropout: float,
    with_weights: bool,
    compiled: bool,
    places: Places | None,
    needs_reference: bool = False,
) -> Attention:
    """Return the kernel of a pass.

    Args:
        B, head_width: sequences, and H.
        dropout: rate of the weights.
        with_weights: whether the pass returns the weights.
        compiled: whether compiled blocks call the kernel.
        places: of the tokens between layers.
        needs_reference: whether the layers score or normalise otherwise.
    """
    T, device = pairs.i_T.shape[0], pairs.token_positions.device  # torch.export would take len() for a constant
    if with_weights or needs_reference:
        return Attention(pairs.bias(*pairs.all), pairs, places, with_weights)
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
