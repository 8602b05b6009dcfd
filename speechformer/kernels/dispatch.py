"""Choose the kernels of a forward pass: the one place that decides which fast version runs when.

Every row computes what `speechformer.layers` computes; `tests/test_dispatch.py` checks each against it.

Attention: the first row that applies, see `choose_kernel`.

| kernel              | computed by                         | taken when                                                  |
|---------------------|-------------------------------------|-------------------------------------------------------------|
| "fused dropout"     | `attention.DroppedAttention`        | self-attention on a CPU with dropout; no rotation (RoPE),   |
|                     |                                     | weights, cache, autocast or compilation                     |
| "reference"         | `layers.attention_reference`        | weights asked for, or dropout on a device other than CUDA   |
| "SDPA without mask" | `scaled_dot_product_attention`      | full pattern, no bias, no padding, no cached keys           |
| "FlexAttention"     | `flex.flex_attention`               | CUDA, no dropout, T >= 1024, no cached keys, and the        |
|                     |                                     | positions have a `score_mod` or no bias                     |
| "SDPA"              | `scaled_dot_product_attention`      | anything else                                               |

The rest of a pass. "Plain" means no cross-attention and no cache.

| fast path                                    | taken when                                                           |
|----------------------------------------------|----------------------------------------------------------------------|
| `dropout.dropout_masks`, four from one draw  | dropout on a CPU                                                     |
| `dropout.draw_ahead`, all masks at once      | dropout on a CPU, plain pass                                         |
| `padding.Unpadder`, no padding               | training on a CPU, plain pass with padding, not compiled; no         |
|                                              | ensemble, whose members have different numbers of tokens             |
| `BiasCache`, bias of the last length reused  | no padding, no cached keys, and no bias with trained parameters      |
| `compile.compile_blocks`                     | `compile=` is set; passes with a cache or with weights run uncompiled|
| `loss.next_token_loss`, chunks of logits     | always                                                               |

Unpadding is limited to training on a CPU for three reasons: an accelerator would wait to learn the number of tokens,
a compiled block would be recompiled for every number, and evaluation batches hold little padding.

Shapes: see `speechformer.layers.attention`; R tokens of a batch without its padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.kernels.attention import DroppedAttention
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.flex import block_mask, cached_block_mask, flex_attention
from speechformer.kernels.padding import Unpadder, without_padding
from speechformer.layers.attention import CrossAttention, MultiHeadAttention, SelfAttention, attention_bias, attention_reference
from speechformer.layers.block import Block
from speechformer.layers.patterns import Pattern, all_pairs
from speechformer.layers.positions import Positions

Kernel = Literal["fused dropout", "reference", "SDPA without mask", "FlexAttention", "SDPA"]
FLEX_MIN_LENGTH = 1024  # below, compiling takes longer than a small mask costs


@dataclass
class AttentionBias:
    """The bias of `layers.attention_bias`, built in the form that the chosen kernel needs.

    Args: see `attention_bias`.
        unpadder: if the pass leaves out padding.
    """

    positions: Positions
    pattern: Pattern
    T: int
    S: int
    causal: bool
    token_mask_BS: Tensor | None = None
    device: torch.device = torch.device("cpu")
    unpadder: Unpadder | None = None

    @functools.cached_property
    def dense(self) -> Tensor:
        """The tensor itself, [1 or B, 1 or N, T, S]."""
        return attention_bias(
            self.positions, self.pattern, self.T, self.S, self.causal, self.token_mask_BS, self.device
        )

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask for FlexAttention."""
        if self.token_mask_BS is None:
            return cached_block_mask(self.pattern, self.causal, self.T, self.device)
        return block_mask(self.pattern, self.causal, self.T, self.device, self.token_mask_BS)

    @property
    def only_causal(self) -> bool:
        """Whether the bias is 0 and the mask is that of causality, if any."""
        everything = self.pattern is all_pairs and self.token_mask_BS is None and self.T == self.S
        return everything and not self.positions.overrides("bias")

    @property
    def fits_flex(self) -> bool:
        """Whether FlexAttention can compute it."""
        known = self.positions.overrides("score_mod") or not self.positions.overrides("bias")
        return known and self.T == self.S

    def prepare(self, dropout_rate: float, with_weights: bool) -> None:
        """Build the form that this pass needs, outside compiled blocks: each would build it again, and a CUDA graph
        would put it into memory that the next replay overwrites."""
        kernel = choose_kernel(self, self.device, dropout_rate, with_weights)
        if kernel != "SDPA without mask":
            _ = self.block_mask if kernel == "FlexAttention" else self.dense


class BiasCache:
    """The biases of a stack; that of the last pass is reused where the length alone decides it."""

    can_unpad = True

    def __init__(self, causal: bool) -> None:
        self.causal = causal
        self.last: tuple[tuple, AttentionBias] | None = None

    def __call__(
        self,
        positions: Positions,
        pattern: Pattern,
        x_BTD: Tensor,
        S: int,
        token_mask_BS: Tensor | None,
        unpadder: Unpadder | None,
    ) -> AttentionBias | Tensor:
        """Return the bias for the T last of S positions."""
        T, device = x_BTD.shape[1], x_BTD.device
        bias = AttentionBias(positions, pattern, T, S, self.causal, token_mask_BS, device, unpadder)
        trained = positions.overrides("bias") and any(True for _ in positions.parameters())
        if token_mask_BS is not None or T != S or trained:
            return bias
        # autograd cannot save tensors made in inference mode
        key = (pattern, T, device, x_BTD.dtype, torch.is_inference_mode_enabled())
        if self.last is None or self.last[0] != key:
            self.last = (key, bias)
        return self.last[1]


def dense(bias: AttentionBias | Tensor) -> Tensor:
    """Return a bias as a tensor."""
    return bias.dense if isinstance(bias, AttentionBias) else bias


def choose_kernel(
    bias: AttentionBias | Tensor,
    device: torch.device,
    dropout_rate: float,
    with_weights: bool,
    fusable: bool = False,
) -> Kernel:
    """Return the kernel for one attention; the table at the top of this module.

    Args:
        dropout_rate: 0 in evaluation.
        fusable: whether it is self-attention without rotation and cache.
    """
    fusable = fusable and device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if fusable and dropout_rate and not with_weights and not torch.compiler.is_compiling():
        return "fused dropout"
    if with_weights or (dropout_rate and device.type != "cuda"):
        return "reference"
    if isinstance(bias, AttentionBias):
        if bias.only_causal:
            return "SDPA without mask"
        if device.type == "cuda" and not dropout_rate and bias.fits_flex and bias.T >= FLEX_MIN_LENGTH:
            return "FlexAttention"
    return "SDPA"


def attention(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    bias: AttentionBias | Tensor,
    dropout: FastDropout,
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `attention_reference` by the kernel of `choose_kernel`; the weights are None unless asked for."""
    rate = dropout.rate if dropout.active else 0.0
    kernel = choose_kernel(bias, q_BNTH.device, rate, with_weights)
    if kernel == "reference":
        return attention_reference(q_BNTH, k_BNSH, v_BNSH, dense(bias), dropout)
    if kernel == "SDPA":
        mask = dense(bias).to(q_BNTH.dtype)
        return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, mask, rate), None
    assert isinstance(bias, AttentionBias)
    if kernel == "FlexAttention":
        return flex_attention(q_BNTH, k_BNSH, v_BNSH, bias.positions.score_mod(), bias.block_mask), None
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, None, rate, bias.causal), None


class FastAttention(MultiHeadAttention):
    """Multi-head attention by `attention`."""

    dropout: FastDropout

    def attention(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        bias: AttentionBias | Tensor,
        with_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return attention(q_BNTH, k_BNSH, v_BNSH, bias, self.dropout, with_weights)


class FastCrossAttention(FastAttention, CrossAttention):
    """Cross-attention by `attention`."""


class FastSelfAttention(FastAttention, SelfAttention):
    """Self-attention by `attention` or `DroppedAttention`. x may be the tokens without padding, [R, D]."""

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,
        positions: Positions,
        bias: AttentionBias | Tensor,
        with_weights: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        unpadder = bias.unpadder if isinstance(bias, AttentionBias) else None
        rate = self.dropout.rate if self.dropout.active else 0.0
        fusable = cache is None and not positions.overrides("rotate")
        qkv = self.qkv(x_BTD)
        if choose_kernel(bias, x_BTD.device, rate, with_weights, fusable) == "fused dropout":
            B, T = x_BTD.shape[:2] if unpadder is None else (unpadder.B, unpadder.T)
            mask_BNTT = self.dropout.mask((B, self.heads, T, T), x_BTD.dtype)
            qkv_RE = qkv.flatten(0, 1) if unpadder is None else qkv
            unpadder = unpadder or without_padding(B, T)
            output_RD = DroppedAttention.apply(qkv_RE, dense(bias), mask_BNTT, unpadder)
            return self.output(output_RD.view(x_BTD.shape)), None
        qkv_BTE = qkv if unpadder is None else unpadder.pad(qkv)
        output_BTD, weights = self.attend(qkv_BTE, positions, bias, with_weights, cache)  # type: ignore[arg-type]
        return self.output(output_BTD if unpadder is None else unpadder.unpad(output_BTD)), weights


class FastBlock(Block):
    """A `Block` of fast layers. x may be the tokens without padding, [R, D]."""

    attention_class, cross_attention_class, dropout_class = FastSelfAttention, FastCrossAttention, FastDropout
    compiled = False  # by `compile.compile_blocks`

    def dropout_uses(self, B: int, T: int, D: int) -> list[tuple[FastDropout, Sequence[int]]]:
        """Return each use of dropout in a pass without cross-attention, in order, and the shape that it meets."""
        weights = self.attention.dropout, (B, self.attention.heads, T, T)
        return [weights, (self.dropout, (B, T, D)), (self.dropout, (B, T, D))]  # type: ignore[list-item]
