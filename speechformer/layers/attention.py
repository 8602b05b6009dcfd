"""Multi-head attention, and the one place where pattern, causality, padding and positional bias meet.

    weights = softmax(q k^T / sqrt(H) + bias),  output = weights v

Vaswani et al. 2017, "Attention Is All You Need", equation 1. The bias is the positions' (ALiBi, relative)
where a key may be seen, and minus infinity where not; it is the same for all layers, so a model describes it
once for each forward pass (`AttentionBias`). Attention from one sequence to another (`CrossAttention`) has padding alone.

`attend` is attention written out, which works everywhere and is what the others are tested against. `mix` takes a
kernel of torch's where that is quicker: `scaled_dot_product_attention`, and on a GPU FlexAttention, which makes mask
and bias block by block, and leaves out the blocks that nobody sees.

Shapes: B sequences, T queries, S keys, N heads, H width of a head, D width of the model, R real tokens (in
`CrossAttention` rows of a beam search); where padding is left out, [B, T] is [R].
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.kernels.padding import Unpadder, all_real
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern
from speechformer.layers.positions import Positions, query_and_key_indices


def attention_mask(
    pattern: Pattern,
    T: int,
    S: int,
    causal: bool,
    token_mask_BS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Where a query may see a key, boolean [1 or B, 1, T, S]; the queries are the last T of S positions.

    `token_mask_BS` is False on padding. A padding query still sees itself: its row would otherwise be empty under a
    sparse pattern, and a softmax over nothing is NaN. No real query ever sees it.
    """
    i, j = query_and_key_indices(T, S, device)
    seen_TS = pattern(i, j)
    if causal:
        seen_TS = seen_TS & (j <= i)
    seen = seen_TS[None, None]
    if token_mask_BS is not None:
        seen = seen & (token_mask_BS[:, None, None, :] | (i == j))
    return seen


def attention_bias(
    positions: Positions,
    pattern: Pattern,
    T: int,
    S: int,
    causal: bool,
    token_mask_BS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """What is added to the scores, [1 or B, 1 or N, T, S]: the positions' bias, or -inf where unseen."""
    seen = attention_mask(pattern, T, S, causal, token_mask_BS, device)
    bias_NTS = positions.bias(T, S)
    if bias_NTS is None:
        bias_NTS = torch.zeros((), device=device)
    return torch.where(seen, bias_NTS, -math.inf)


def attention_reference(
    q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Tensor, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Attention written out: the output [B, N, T, H] and the weights [B, N, T, S] before `dropout`."""
    scores = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1]) + bias
    weights = scores.softmax(dim=-1)
    return (weights if dropout is None else dropout(weights)) @ v_BNSH, weights


class DroppedAttention(torch.autograd.Function):
    """`attend` with dropout, from queries, keys and values of real tokens in one tensor, [R, 3 D]: the output,
    [R, D], alone.

    Training a small model on a CPU, a tenth of a step is autograd taking that tensor apart, and putting its gradient
    together again. Here the three parts of the gradient are written where they belong. With S the scores, P their
    softmax, M the mask and O = (P M) v:  dv = (P M)^T dO,  dS = P (dP - sum_j dP P)  with  dP = M (dO v^T).

    Padding holds a row of the first token's: `bias` hides its keys, and its output is not taken.
    """

    @staticmethod
    def forward(ctx: Any, qkv_RE: Tensor, bias: Tensor, mask_BNTT: Tensor, tokens: Unpadder) -> Tensor:
        B, heads, T, _ = mask_BNTT.shape
        to_tokens, to_heads, mixed = tokens.by_head(heads)
        R, E = qkv_RE.shape
        q, k, v = qkv_RE.view(R * 3 * heads, -1).index_select(0, to_heads).view(3, B * heads, T, -1)
        scores = torch.bmm(q, k.transpose(1, 2)).view(B, heads, T, T).div_(math.sqrt(q.shape[-1]))
        weights = scores.add_(bias).softmax(dim=-1)
        dropped = (weights * mask_BNTT).view(-1, T, T)
        ctx.save_for_backward(q, k, v, weights, mask_BNTT, dropped, to_tokens, mixed)
        ctx.bias_shape = bias.shape
        return torch.bmm(dropped, v).view(B * heads * T, -1).index_select(0, mixed).view(R, E // 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        q, k, v, weights, mask_BNTT, dropped, to_tokens, mixed = ctx.saved_tensors
        T, H = q.shape[1:]
        grad = grad_RD.new_zeros(q.numel() // H, H).index_copy_(0, mixed, grad_RD.view(-1, H)).view(q.shape)
        into = grad.new_empty(3, *q.shape)
        torch.bmm(dropped.transpose(1, 2), grad, out=into[2])
        of_weights = torch.bmm(grad, v.transpose(1, 2)).view_as(weights).mul_(mask_BNTT)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_bias = of_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[1] else None
        of_scores = of_scores.view(-1, T, T) / math.sqrt(q.shape[-1])
        torch.bmm(of_scores, k, out=into[0])
        torch.bmm(of_scores.transpose(1, 2), q, out=into[1])
        return into.view(-1, H).index_select(0, to_tokens).view(len(grad_RD), -1), of_bias, None, None


FLEX_FROM = 1024  # queries; below, a mask is small, and compiling takes longer than it saves


@dataclass
class AttentionBias:
    """What is added to the scores of self-attention, in the form that a kernel takes.

    Args:
        positions, pattern, causal: of the stack.
        T, S: queries and keys; the queries are the last T of S positions.
        token_mask_BS: False on padding; None for none.
        everything: whether the pattern is "full".
        tokens: where the tokens stand, if padding is left out.
    """

    positions: Positions
    pattern: Pattern
    causal: bool
    T: int
    S: int
    token_mask_BS: Tensor | None = None
    device: torch.device | None = None
    everything: bool = False
    tokens: Unpadder | None = None

    @functools.cached_property
    def dense(self) -> Tensor:
        """Added to the scores, [1 or B, 1 or N, T, S]: the positions' bias, or -inf where unseen."""
        return attention_bias(
            self.positions, self.pattern, self.T, self.S, self.causal, self.token_mask_BS, self.device
        )

    def form(self, rate: float, with_weights: bool) -> str:
        """Which one a pass takes with that rate of dropout: "dense", "causality" (no tensor at all) or "blocks"."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        if by_hand(rate, with_weights, on_gpu):
            return "dense"
        if self.causality_alone:
            return "causality"
        return "blocks" if on_gpu and not rate and self.by_blocks and self.T >= FLEX_FROM else "dense"

    def prepare(self, rate: float, with_weights: bool) -> None:
        """Make it now, where it is kept: a compiled block would make it anew, or in memory that does not last."""
        form = self.form(rate, with_weights)
        if form != "causality":
            _ = self.dense if form == "dense" else self.blocks

    @property
    def causality_alone(self) -> bool:
        """Whether nothing is added, and nothing hidden but what comes later."""
        plain = type(self.positions).bias is Positions.bias
        return plain and self.everything and self.token_mask_BS is None and self.T == self.S

    @property
    def by_blocks(self) -> bool:
        """Whether FlexAttention can make them: the positions say what they do to a score."""
        kind = type(self.positions)
        known = kind.bias is Positions.bias or kind.score_mod is not Positions.score_mod
        return known and self.T == self.S

    @functools.cached_property
    def blocks(self) -> Any:
        """FlexAttention's `BlockMask`; without padding it is made once for each length."""
        if self.token_mask_BS is None:
            return block_mask(self.pattern, self.causal, self.T, self.device)
        return make_block_mask(self.pattern, self.causal, self.T, self.device, self.token_mask_BS)


def make_block_mask(
    pattern: Pattern, causal: bool, T: int, device: torch.device | None, token_mask_BT: Tensor | None = None
) -> Any:
    """What `visible` says, block by block of 128 x 128; no tensor of T x T is made on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = pattern(i, j)
        if causal:
            found = found & (j <= i)
        return found if token_mask_BT is None else found & (token_mask_BT[b, j] | (i == j))

    on_gpu = device is not None and device.type == "cuda"
    B = None if token_mask_BT is None else len(token_mask_BT)
    return create_block_mask(seen, B, None, T, T, device=device or "cpu", _compile=on_gpu)


@functools.lru_cache(maxsize=16)
def block_mask(pattern: Pattern, causal: bool, T: int, device: torch.device | None) -> Any:
    """`make_block_mask`, kept."""
    return make_block_mask(pattern, causal, T, device)


@functools.cache
def compiled_flex_attention() -> Any:
    """FlexAttention is quick when compiled alone."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, scores: AttentionBias) -> Tensor:
    """Attention by FlexAttention (Dong et al. 2024); on a CPU by its slow reference, forward only."""
    from torch.nn.attention.flex_attention import flex_attention

    more = {"score_mod": scores.positions.score_mod(), "block_mask": scores.blocks}
    if torch.compiler.is_compiling():  # as a part of a block
        return flex_attention(q_BNTH, k_BNTH, v_BNTH, **more)
    if q_BNTH.is_cuda:
        return compiled_flex_attention()(q_BNTH, k_BNTH, v_BNTH, **more)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q_BNTH, k_BNTH, v_BNTH, **more)


def dense(scores: AttentionBias | Tensor) -> Tensor:
    """What is added to the scores, as a tensor."""
    return scores.dense if isinstance(scores, AttentionBias) else scores


def tokens_of(scores: AttentionBias | Tensor) -> Unpadder | None:
    """Where the tokens stand, if padding is left out."""
    return scores.tokens if isinstance(scores, AttentionBias) else None


def by_hand(rate: float, with_weights: bool, on_gpu: bool) -> bool:
    """Whether `attend` does it: on the CPU torch has no kernel with dropout, and its fallback is slower."""
    return with_weights or (rate > 0 and not on_gpu)


def attention(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    scores: AttentionBias | Tensor,
    dropout: Dropout,
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """`attend`, by a kernel of torch's where that is the quicker way; the weights if they are asked for.

    `scores` may be what is added, as a tensor.
    """
    rate = dropout.rate if dropout.active else 0.0
    if isinstance(scores, AttentionBias):
        form = scores.form(rate, with_weights)
        if form == "causality":
            return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, None, rate, scores.causal), None
        if form == "blocks":
            return flex(q_BNTH, k_BNSH, v_BNSH, scores), None
    bias = dense(scores)
    if by_hand(rate, with_weights, q_BNTH.is_cuda):
        return attention_reference(q_BNTH, k_BNSH, v_BNSH, bias, dropout)
    bias = bias.to(q_BNTH.dtype)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=rate), None


class SelfAttention(nn.Module):
    """Multi-head self-attention.

    Args:
        width: D; must be a multiple of `heads`.
        heads: N.
        rate: of dropout on the attention weights.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        bias: whether the output projection has one.
    """

    def __init__(self, width: int, heads: int, rate: float, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, Dropout(rate)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        positions: Positions,
        scores: AttentionBias | Tensor,
        with_weights: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended x, [B, T, D], and the weights, [B, N, T, S], if they are asked for; `scores` as in `mix`.

        x may hold the tokens of `scores` alone, [R, D], and is then returned so.

        `cache` holds the keys and values of what stands before x, [B, N, S - T, H], already with their positions; it
        may be empty, and is added to.
        """
        qkv_BTE = self.qkv(x_BTD)
        tokens = tokens_of(scores)
        B, T = x_BTD.shape[:2] if tokens is None else (tokens.B, tokens.T)
        on_cpu = x_BTD.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        plain = type(positions).rotate is Positions.rotate and cache is None and not with_weights
        if on_cpu and self.dropout.active and plain and not torch.compiler.is_compiling():
            mask = self.dropout.mask((B, self.heads, T, T), x_BTD.dtype)
            qkv_RE = qkv_BTE if tokens else qkv_BTE.flatten(0, 1)
            mixed_RD = DroppedAttention.apply(qkv_RE, dense(scores), mask, tokens or all_real(B, T))
            return self.output(mixed_RD.view(x_BTD.shape)), None
        if tokens is not None:
            qkv_BTE = tokens.pad(qkv_BTE)
        q, k, v = qkv_BTE.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = positions.rotate(q, k, cache["k"].shape[2] if cache else 0)
        if cache is not None:
            if cache:
                k, v = torch.cat((cache["k"], k), dim=2), torch.cat((cache["v"], v), dim=2)
            cache["k"], cache["v"] = k, v
        mixed, weights = attention(q, k, v, scores, self.dropout, with_weights)
        mixed_BTD = mixed.transpose(1, 2).flatten(2)
        return self.output(mixed_BTD if tokens is None else tokens.unpad(mixed_BTD)), weights


class CrossAttention(nn.Module):
    """Multi-head attention from a decoder to the states of an encoder. Vaswani et al. 2017, section 3.2.3.

    It takes neither position nor pattern. Both are functions of the distance i - j, and the distance between the
    i-th word of one language and the j-th word of another means nothing; where a word stands the encoder's states
    say themselves. All of the source may be seen, but its padding.

    Args: as for `SelfAttention`.
    """

    def __init__(self, width: int, heads: int, rate: float, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, Dropout(rate)
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.kv = nn.Linear(width, 2 * width, bias=qkv_bias)
        self.output = nn.Linear(width, width, bias=bias)

    def keys_and_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """What the states of an encoder are attended by, [B, N, S, H] each; the same for all steps of a decoder."""
        k, v = self.kv(memory_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(
        self, x_RTD: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias_B11S: Tensor, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """What x draws from the source, [R, T, D], and the weights, [R, N, T, S], if they are asked for.

        R is a multiple of B: a beam search holds R / B unfinished translations of each source, one after another,
        and its keys and values are not copied for them.
        """
        R, T, _ = x_RTD.shape
        B = k_BNSH.shape[0]  # not len(), which torch.export takes for a constant
        q = self.q(x_RTD).view(B, R // B * T, self.heads, -1).transpose(1, 2)
        mixed, weights = attention(q, k_BNSH, v_BNSH, bias_B11S, self.dropout, with_weights)
        if weights is not None:
            weights = weights.unflatten(2, (R // B, T)).transpose(1, 2).flatten(0, 1)
        return self.output(mixed.transpose(1, 2).reshape(R, T, -1)), weights
