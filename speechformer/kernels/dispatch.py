"""Choose the kernels of a forward pass: the one place that decides which fast version runs when.

Every row computes what `speechformer.layers` computes; `tests/test_dispatch.py` checks each against it.

Attention takes the first row that applies, see `choose_kernel`. "All pairs" means self-attention without weights,
cached keys and compilation; the second of two lengths is that of accelerators:

| kernel              | computed by                    | taken when                                                 |
|---------------------|--------------------------------|------------------------------------------------------------|
| "FlexAttention"     | `attention.flex_attention`     | CUDA, Triton, no weights, dropout or cached keys, and a    |
|                     |                                | bias that `AttentionBias.suits_flex`                       |
| "sparse blocks"     | `sparse.sparse_attention`      | all pairs, T >= 512 or 16384, and a pattern whose blocks   |
|                     |                                | are expected to cost less; see `SPARSE_COST`               |
| "query blocks"      | `attention_in_query_blocks`    | all pairs, T >= 2048 or 16384, and a bias, a mask or, not  |
|                     |                                | on CUDA, dropout; not with random positions                |
| "fused dropout"     | `attention.DroppedAttention`   | self-attention on a CPU with dropout; no rotation,         |
|                     |                                | weights, cache, autocast, compilation                      |
| "reference"         | `layers.attention_reference`   | weights asked for, or dropout on a device other than CUDA  |
| "SDPA without mask" | `scaled_dot_product_attention` | full pattern, no bias or gate, no padding, no cached keys  |
| "SDPA"              | `scaled_dot_product_attention` | anything else                                              |

The rest of a pass, where "plain" means without cross-attention and cache:

| fast path                                | taken when                                                             |
|------------------------------------------|------------------------------------------------------------------------|
| `dropout.dropout_mask`: 4 from one draw  | dropout on a CPU, not compiled                                         |
| `padding.Unpadder`: tokens alone         | training on a CPU with padding, plain pass, not compiled, no ensemble  |
| biases of the last pass reused           | same length, no padding, no cached keys, no trained bias               |
| one row of the mask for all queries      | "SDPA" and "fused dropout", if padding alone hides keys                |
| token mask of a batch without padding    | evaluation on a CPU, not compiled, no ensemble                         |
|   ignored, as if there were none         |                                                                        |
| `compile_blocks`                         | `compile` is set; passes with a cache or weights run uncompiled        |
| `loss.next_token_loss`: logits in chunks | always; `loss.ChunkedLoss` when training on a CPU without smoothing    |

Unpadding is limited because an accelerator would wait to learn the number of tokens, a compiled block would be
recompiled for every number, evaluation batches hold little padding, and members of an ensemble differ in theirs.

Shapes: see `speechformer.layers.attention`; R tokens of a batch without its padding.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.errors import UserError, pick
from speechformer.kernels.attention import (
    DroppedAttention,
    attention_in_query_blocks,
    block_mask,
    cached_block_mask,
    flex_attention,
)
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.padding import Unpadder, without_padding
from speechformer.kernels.sparse import Part, layout_of, sparse_attention
from speechformer.layers import attention as reference
from speechformer.layers.attention import KVCache
from speechformer.layers.block import Block
from speechformer.layers.patterns import Pattern, all_pairs
from speechformer.layers.positions import Positions, query_and_key_indices

Kernel = Literal[
    "sparse blocks", "fused dropout", "reference", "SDPA without mask", "FlexAttention", "query blocks", "SDPA"
]
HAS_TRITON = importlib.util.find_spec("triton") is not None  # which compiles FlexAttention
# benchmarks/attention.py and benchmarks/gpu.py measure both sides of these limits:
FLEX_MIN_PAIRS, FLEX_MIN_LENGTH, FLEX_MIN_WIDTH = 1 << 26, 1024, 16  # pairs of all sequences; the width is torch's
PARTIAL_TILES = 0.25  # most, of all: for each pair of such a tile FlexAttention evaluates the pattern
SPARSE_MIN_LENGTH, SPARSE_COST = 512, 0.5  # most for each of T^2 pairs
QUERY_BLOCKS_MIN_LENGTH = 2048  # from here on a bias of all pairs takes more memory than a model
BLOCKS_MIN_ON_GPU = 16_384  # of both: there small products take no less time than large ones
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes with them
COMPILE_MODES = ("default", *CUDA_GRAPHS, "max-autotune-no-cudagraphs")  # torch's


@dataclass
class AttentionBias:
    """The bias of `layers.attention`, in the form that the chosen kernel needs; arguments as for `attention_mask`."""

    positions: Positions
    pattern: Pattern
    T: int
    S: int
    causal: bool
    token_mask_BS: Tensor | None
    device: torch.device
    unpadder: Unpadder | None = None  # if the pass runs on rows of tokens
    compiled: bool = False  # whether compiled blocks read it
    z_BSN: Tensor | None = None  # gates of the layer, which only the kernels in blocks take from here
    j: Tensor | None = None  # positions of the keys, if the cache has forgotten some
    head_width: int = FLEX_MIN_WIDTH
    B: int = 1  # sequences that share it

    @functools.cached_property
    def dense(self) -> Tensor:
        """The tensor itself, [1 or B, 1 or N, T, S]."""
        i, j = query_and_key_indices(self.T, self.S, self.device)
        return self.of_rows(i, j if self.j is None else self.j[None, :])

    def of_pairs(self, mask: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the bias of queries i and keys j, of which the mask allows some, [1 or B, 1 or N, ...]."""
        mask = mask[None, None]
        if self.token_mask_BS is not None:
            mask = mask & reference.shares_text(self.token_mask_BS, i, j)[:, None]
        bias = self.positions.bias(i, j)
        bias = torch.zeros((), device=self.device) if bias is None else bias
        if self.z_BSN is not None:
            bias = bias + self.positions.gate(self.z_BSN, i, j)
        return torch.where(mask, bias, -math.inf)

    def of_rows(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the bias of queries i, [rows, 1], and keys j, [1, columns]."""
        return self.of_pairs(self.pattern(i, j) & (j <= i) if self.causal else self.pattern(i, j), i, j)

    @functools.cached_property
    def compact(self) -> Tensor:
        """The tensor `dense`, or one row for all queries if padding alone hides keys, [B, 1, 1, S].

        With one row queries of padding attend to the tokens in place of themselves; their states are undefined,
        and NaN if the sequence is padding alone.
        """
        if self.is_padding_alone:
            return torch.where(self.token_mask_BS[:, None, None], 0.0, -math.inf)  # type: ignore[index]
        return self.dense

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether causality and the token mask alone decide the bias."""
        biased = self.positions.overrides("bias") or self.positions.overrides("gate")
        return not biased and self.pattern is all_pairs

    @functools.cached_property
    def is_padding_alone(self) -> bool:
        """Whether padding alone hides keys, so that all queries see the same."""
        is_padding = self.token_mask_BS is not None and self.token_mask_BS.dtype == torch.bool  # not documents
        return is_padding and self.is_plain and not self.causal

    @property
    def has_no_mask(self) -> bool:
        """Whether causality alone decides the bias."""
        return self.is_plain and self.token_mask_BS is None

    @functools.cached_property
    def layout(self) -> list[Part] | None:
        """The blocks of the pattern; None for all pairs, or if they cost too much."""
        if self.T != self.S or self.pattern is all_pairs:
            return None
        return layout_of(self.pattern, self.T, self.causal, self.device, SPARSE_COST)

    @functools.cached_property
    def of_blocks(self) -> list[list[Tensor]]:
        """The biases of the groups of blocks, for `sparse_attention`."""
        layout = self.layout or []
        return [[self.of_pairs(group.mask, group.i, group.j) for group in part.groups] for part in layout]

    @functools.cached_property
    def suits_flex(self) -> bool:
        """Whether FlexAttention can compute it, and faster than a mask does.

        It can with heads of at least 16 numbers, and positions with a `score_mod` or without bias and gate. It is
        faster for many pairs, unless padding alone hides keys or the pattern scatters its pairs over many tiles.
        """
        has = self.positions.overrides
        can = (has("score_mod") or not has("bias")) and not has("gate") and self.head_width >= FLEX_MIN_WIDTH
        is_long = self.T >= FLEX_MIN_LENGTH and self.B * self.T**2 >= FLEX_MIN_PAIRS
        if self.has_no_mask or self.is_padding_alone or not can or not is_long:
            return False
        length = 1024 * math.ceil(self.T / 1024)  # the same for many batches
        return partial_tiles(self.pattern, length, self.causal) <= PARTIAL_TILES

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask for FlexAttention."""
        build = cached_block_mask if self.token_mask_BS is None else block_mask
        return build(self.pattern, self.causal, self.T, self.device, self.token_mask_BS)

    def prepare(self, dropout_rate: float, with_weights: bool) -> None:
        """Build the form that this pass needs, before compiled blocks do: a CUDA graph would overwrite it later."""
        kernel = choose_kernel(self, self.device, dropout_rate, with_weights)
        forms = {"FlexAttention": "block_mask", "SDPA": "compact", "reference": "dense"}
        if form := "dense" if self.positions.overrides("gate") else forms.get(kernel):  # gates are added to it
            getattr(self, form)


Bias = AttentionBias | Tensor


def dense(bias: Bias) -> Tensor:
    """Return a bias as a tensor."""
    return bias.dense if isinstance(bias, AttentionBias) else bias


def compact(bias: Bias) -> Tensor:
    """Return a bias as a tensor, of one row if that does for all queries."""
    return bias.compact if isinstance(bias, AttentionBias) else bias


def choose_kernel(
    bias: Bias,
    device: torch.device,
    dropout_rate: float,
    with_weights: bool,
    fusable: bool = False,
    has_triton: bool | None = None,
) -> Kernel:
    """Return the kernel for one attention, by the table above. `fusable`: see "fused dropout".

    `has_triton` is about another machine; None: this one.
    """
    of_all = bias if isinstance(bias, AttentionBias) and bias.T == bias.S else None  # without a cache
    if of_all is not None and not with_weights:
        has_triton = HAS_TRITON if has_triton is None else has_triton
        if device.type == "cuda" and has_triton and not dropout_rate and of_all.suits_flex:
            return "FlexAttention"
        if not of_all.compiled and (device.type == "cpu" or of_all.T >= BLOCKS_MIN_ON_GPU):
            if of_all.T >= SPARSE_MIN_LENGTH and of_all.layout is not None:
                return "sparse blocks"
            if of_all.T >= QUERY_BLOCKS_MIN_LENGTH and not of_all.positions.is_redrawn:
                fused = of_all.has_no_mask and (device.type == "cuda" or not dropout_rate)  # by torch, without a mask
                if not fused:
                    return "query blocks"
    fusable = fusable and device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if fusable and dropout_rate and not with_weights and not torch.compiler.is_compiling():
        return "fused dropout"
    if with_weights or (dropout_rate and device.type != "cuda"):
        return "reference"
    return "SDPA" if of_all is None or not of_all.has_no_mask else "SDPA without mask"


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


class FastAttention(reference.MultiHeadAttention):
    """Multi-head attention by any kernel but "fused dropout"."""

    dropout: FastDropout

    def attention(
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, bias: Bias, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        rate = self.dropout.active_rate
        kernel = choose_kernel(bias, q_BNTH.device, rate, with_weights)
        if kernel == "reference":
            return reference.attention_reference(q_BNTH, k_BNSH, v_BNSH, dense(bias), self.dropout)
        if kernel == "SDPA":
            mask = compact(bias).to(q_BNTH.dtype)
            return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, mask, rate), None
        assert isinstance(bias, AttentionBias)
        dropout = self.dropout.drop if rate else None
        if kernel == "sparse blocks" and bias.layout is not None:
            return sparse_attention(q_BNTH, k_BNSH, v_BNSH, bias.layout, bias.of_blocks, dropout), None
        if kernel == "query blocks":
            return attention_in_query_blocks(q_BNTH, k_BNSH, v_BNSH, bias.of_rows, bias.causal, dropout), None
        if kernel == "FlexAttention":
            return flex_attention(q_BNTH, k_BNSH, v_BNSH, bias.positions.score_mod(), bias.block_mask), None
        return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, None, rate, bias.causal), None


class FastCrossAttention(FastAttention, reference.CrossAttention):
    """Cross-attention by the chosen kernel."""


class FastSelfAttention(FastAttention, reference.SelfAttention):
    """Self-attention by the chosen kernel. x may be the tokens without padding, [R, D]."""

    def forward(
        self, x_BTD: Tensor, positions: Positions, bias: Bias, with_weights: bool = False, cache: KVCache = None
    ) -> tuple[Tensor, Tensor | None]:
        unpadder = bias.unpadder if isinstance(bias, AttentionBias) else None
        qkv = self.qkv(x_BTD)
        B, T = x_BTD.shape[:2] if unpadder is None else (unpadder.B, unpadder.T)
        fusable = cache is None and not positions.overrides("rotate")
        kernel = choose_kernel(bias, x_BTD.device, self.dropout.active_rate, with_weights, fusable)
        if self.gate is not None:
            z_BSN = self.gates(x_BTD if unpadder is None else unpadder.pad(x_BTD), cache)
            if kernel in ("sparse blocks", "query blocks"):
                bias = dataclasses.replace(bias, z_BSN=z_BSN)  # type: ignore[type-var]
            else:
                bias = dense(bias) + positions.gate(z_BSN, *query_and_key_indices(T, z_BSN.shape[1], z_BSN.device))
        if kernel == "fused dropout":
            mask_BNTT = self.dropout.mask((B, self.heads, T, T), x_BTD.dtype)
            tensor = dense(bias) if unpadder is None else compact(bias)  # whose rows of padding alone are dropped
            return self.output(
                DroppedAttention.apply(qkv, tensor, mask_BNTT, unpadder or without_padding(B, T))
            ), None
        qkv_BTE = qkv if unpadder is None else unpadder.pad(qkv)
        output_BTD, weights = self.attention_of_projections(qkv_BTE, positions, bias, with_weights, cache)  # type: ignore[arg-type]
        return self.output(output_BTD if unpadder is None else unpadder.unpad(output_BTD)), weights


class FastBlock(Block):
    """A `Block` of fast layers. x may be the tokens without padding, [R, D]."""

    attention_class, cross_attention_class = FastSelfAttention, FastCrossAttention
    dropout_class = FastDropout
    compiled = False  # by `compile_blocks`
    dropout: FastDropout


class StackKernels(nn.Module):
    """The fast paths of a whole pass through the blocks of a `models.stack.Stack`."""

    embedding: nn.Embedding
    positions: Positions
    patterns: list[Pattern]  # of each layer
    bias_groups: list[int]  # for each layer, the first one with the same encoding and pattern
    causal: bool
    embedding_dropout: FastDropout
    dropout_rate: float  # of the blocks
    blocks: Any  # nn.ModuleList of `FastBlock`s
    last_bias: tuple[tuple, list[Bias]] | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are or will be compiled."""
        return torch.compiler.is_compiling() or any(block.compiled for block in self.blocks)

    @property
    def can_unpad(self) -> bool:
        """Whether a plain pass may run on rows of tokens, without padding."""
        return self.training and self.embedding.weight.device.type == "cpu" and not self.is_compiled

    def attention_biases(
        self,
        x_BTD: Tensor,
        S: int,
        token_mask_BS: Tensor | None,
        unpadder: Unpadder | None,
        with_weights: bool,
        cache: Sequence[dict[str, Tensor]] | None = None,
    ) -> list[Bias]:
        """Return the bias of each layer in a pass; those of the last pass again if the length decides them."""
        (B, T, _), device = x_BTD.shape, x_BTD.device
        eager = device.type == "cpu" and not torch.compiler.is_compiling()  # where reading the mask costs nothing
        is_padding = token_mask_BS is not None and token_mask_BS.dtype == torch.bool  # not documents
        if is_padding and eager and not self.training and token_mask_BS.all():  # type: ignore[union-attr]
            token_mask_BS = None
        pairs = {k: (self.positions.at_layer(k), self.patterns[k]) for k in set(self.bias_groups)}
        compiled, H = self.is_compiled, x_BTD.shape[-1] // self.blocks[0].attention.heads
        built = {
            k: AttentionBias(*pair, T, S, self.causal, token_mask_BS, device, unpadder, compiled, head_width=H, B=B)
            for k, pair in pairs.items()
        }
        if cache is not None:
            for k, bias in built.items():
                cached = reference.cached_positions(cache[k], self.patterns[k], device)
                if cached is not None:
                    bias.j = torch.cat((cached, torch.arange(S - T, S, device=device)))
        biases: list[Bias] = [built[k] for k in self.bias_groups]
        if token_mask_BS is None and T == S and all(positions.has_fixed_bias for positions, _ in pairs.values()):
            # autograd cannot save tensors made in inference mode
            is_large = B * T**2 >= FLEX_MIN_PAIRS
            key = (is_large, T, device, x_BTD.dtype, torch.is_inference_mode_enabled(), compiled, unpadder)
            if self.last_bias is None or self.last_bias[0] != key:
                self.last_bias = (key, biases)
            biases = self.last_bias[1]
        for k in pairs if compiled else ():
            biases[k].prepare(self.dropout_rate if self.training else 0.0, with_weights)  # type: ignore[union-attr]
        return biases


def compile_blocks(model: nn.Module, mode: str, device: torch.device, accumulated: int = 1) -> None:
    """Apply torch.compile to the blocks of a model for `device`, in place. Equal blocks share one compilation.

    Args:
        accumulated: batches whose gradients are added up for one step.

    Raises:
        UserError: torch has no such mode, the device is a CPU and there is no C++ compiler, or CUDA graphs would
            overwrite the gradients that are added up.
    """
    pick(dict.fromkeys(COMPILE_MODES), mode, "compile")
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise UserError(
            f"compile={mode}: torch found no C++ compiler for the CPU. Install g++ or leave compile unset."
        )
    if device.type == "cuda" and mode in CUDA_GRAPHS and accumulated > 1:
        raise UserError(
            f"compile={mode} with trainer.accumulate_grad_batches={accumulated}: the CUDA graphs of a batch "
            "overwrite the gradients of the last one. Set compile=default, or accumulate nothing."
        )
    for module in model.modules():
        if isinstance(module, FastBlock):
            module.compile(mode=mode)
            module.compiled = True
        elif isinstance(module, StackKernels) and device.type == "cuda":
            module.register_forward_pre_hook(begin_pass)


def begin_pass(stack: Any, arguments: Any) -> None:
    """Mark the start of a step of CUDA graphs, once for each pass. Memory of earlier steps is free then.

    Without gradients, torch would start one at each block, and free the block's input. The decoder of an
    encoder-decoder belongs to the step of its encoder, whose activations the backward pass needs. So between two
    forward passes there must be a backward pass, unless the first one is not for training.
    """
    if not hasattr(stack.blocks[0], "cross_attention"):
        torch.compiler.cudagraph_mark_step_begin()
