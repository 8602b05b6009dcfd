"""Faster attention: dropout as a single autograd function, queries in blocks, and FlexAttention.

Shapes: B sequences, T tokens, R tokens without padding, N heads, H width of a head, D = N H, E = 3 D.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from speechformer.kernels.padding import Unpadder
from speechformer.layers.attention import attention_reference
from speechformer.layers.patterns import Pattern
from speechformer.layers.positions import ScoreMod

RECOMPILE_LIMIT = 256  # most combinations of pattern, position, precision and the like that a process compiles


class DroppedAttention(torch.autograd.Function):
    """Self-attention with dropout on the CPU, from projected queries, keys and values to the output.

    Autograd spends a tenth of the training step of a small model on splitting qkv and on joining its gradient again.
    Here the three parts of the gradient are written where they belong. With scores S, P = softmax(S), dropout mask M
    and output O = (P M) v:

        dv = (P M)^T dO,   dP = M (dO v^T),   dS = P (dP - sum_j dP P)

    Arguments of `apply`: the projections, [R, E] or [B, T, E], for an output [R, D] or [B, T, D]; bias
    [1 or B, 1 or N, T, T]; dropout mask [B, N, T, T]; and the `Unpadder`. Padding holds a copy of the first token;
    the bias hides its keys, and its output is dropped.
    """

    @staticmethod
    def forward(ctx: Any, projections: Tensor, bias: Tensor, mask_BNTT: Tensor, unpadder: Unpadder) -> Tensor:
        B, N, T, _ = mask_BNTT.shape
        rows = unpadder.head_rows(N)
        E = projections.shape[-1]
        q, k, v = projections.reshape(-1, E // (3 * N)).index_select(0, rows.to_heads).view(3, B * N, T, -1)
        scores = torch.bmm(q, k.transpose(1, 2)).view(B, N, T, T).div_(math.sqrt(q.shape[-1]))
        weights = scores.add_(bias).softmax(dim=-1)
        dropped = (weights * mask_BNTT).view(-1, T, T)
        ctx.save_for_backward(q, k, v, weights, mask_BNTT, dropped)
        ctx.bias_shape, ctx.rows = bias.shape, rows
        output = torch.bmm(dropped, v).view(B * N * T, -1).index_select(0, rows.output)
        return output.view(*projections.shape[:-1], E // 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, mask_BNTT, dropped = ctx.saved_tensors
        T, H = q.shape[1:]
        grad = ctx.rows.output_to_heads(grad_output.reshape(-1, H)).view(q.shape)
        grad_qkv = grad.new_empty(3, *q.shape)
        torch.bmm(dropped.transpose(1, 2), grad, out=grad_qkv[2])
        grad_weights = torch.bmm(grad, v.transpose(1, 2)).view_as(weights).mul_(mask_BNTT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_bias = grad_scores.sum_to_size(ctx.bias_shape).clone() if ctx.needs_input_grad[1] else None
        grad_scores = grad_scores.view(-1, T, T).div_(math.sqrt(q.shape[-1]))
        torch.bmm(grad_scores, k, out=grad_qkv[0])
        torch.bmm(grad_scores.transpose(1, 2), q, out=grad_qkv[1])
        grad_projections = grad_qkv.view(-1, H).index_select(0, ctx.rows.to_tokens)
        return grad_projections.view(*grad_output.shape[:-1], -1), grad_bias, None, None


def attention_in_query_blocks(
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    v_BNTH: Tensor,
    bias_of: Callable[[Tensor, Tensor], Tensor],
    causal: bool,
    dropout: Callable[[Tensor], Tensor] | None,
    rows: int = 256,
) -> Tensor:
    """Compute attention for some rows of queries at a time, [B, N, T, H], without a bias of all pairs.

    The backward pass computes each block again (Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory").

    Args:
        bias_of: returns the bias of queries i, [rows, 1], and keys j, [1, columns].
        dropout: applied to the weights.
    """
    T, device = q_BNTH.shape[2], q_BNTH.device

    def block(q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        bias = bias_of(i[:, None], torch.arange(k.shape[2], device=device)[None, :])
        if dropout is not None:
            return attention_reference(q, k, v, bias, dropout)[0]  # type: ignore[arg-type]
        return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))

    outputs = []
    for i in torch.arange(T, device=device).split(rows):
        start, end = int(i[0]), int(i[-1]) + 1
        S = end if causal else T
        arguments = q_BNTH[:, :, start:end], k_BNTH[:, :, :S], v_BNTH[:, :, :S], i
        if torch.is_grad_enabled():
            keep_draws = dropout is not None
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=keep_draws))
        else:
            outputs.append(block(*arguments))
    return torch.cat(outputs, dim=2)


def block_mask(
    pattern: Pattern, causal: bool, T: int, device: torch.device, token_mask_BT: Tensor | None = None
) -> Any:
    """Build `layers.attention.attention_mask` for FlexAttention, in blocks of 128 x 128.

    On a GPU it is compiled, so that most patterns need no T x T tensor.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = pattern(i, j)
        if causal:
            mask = mask & (j <= i)
        if token_mask_BT is None:
            return mask
        if token_mask_BT.dtype == torch.bool:
            return mask & (token_mask_BT[b, j] | (i == j))
        return mask & (token_mask_BT[b, i] == token_mask_BT[b, j])

    B = None if token_mask_BT is None else len(token_mask_BT)
    create = compiled_function(create_block_mask) if device.type == "cuda" else create_block_mask
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


def flex_attention(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, score_mod: ScoreMod | None, mask: Any) -> Tensor:
    """Compute attention block by block, skipping blocks where no pair is allowed, [B, N, T, H].

    Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels". On a CPU torch
    has a slow version without a backward pass.
    """
    from torch.nn.attention import flex_attention as flex

    options = {"score_mod": score_mod, "block_mask": mask}
    if torch.compiler.is_compiling():  # a compiled block contains it
        return flex.flex_attention(q_BNTH, k_BNTH, v_BNTH, **options)
    if q_BNTH.is_cuda:
        return compiled_function(flex.flex_attention)(q_BNTH, k_BNTH, v_BNTH, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex.flex_attention(q_BNTH, k_BNTH, v_BNTH, **options)
