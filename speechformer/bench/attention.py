"""Benchmark time and memory of attention by length: the reference, torch's kernel with a dense mask, FlexAttention.

Forward and backward of one layer's attention, for one sequence and 8 heads of width 64. Memory is what autograd saves
for the backward pass; on a GPU, the peak of allocations. FlexAttention has a backward pass only on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.bench.timing import Comparison, device, turns
from speechformer.config import as_plain, compose
from speechformer.kernels.attention import flex_attention
from speechformer.kernels.dispatch import AttentionBias, choose_kernel
from speechformer.layers.attention import attention_reference
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import build_positions

HEADS, WIDTH = 8, 64
VARIANTS = [
    *(("nope", pattern) for pattern in ("full", "window", "block", "strided", "dilated", "global", "bigbird")),
    *((model, "full") for model in ("alibi", "relative", "rope")),
]
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
WINDOW = 256  # of a long sequence


def bias_of(model: str, pattern: str, T: int) -> AttentionBias:
    """Build the attention bias of a causal layer with this position and pattern."""
    overrides = [f"model={model}", f"pattern={pattern}"]
    config = as_plain(compose([*overrides, *([f"pattern.window={WINDOW}"] if pattern == "window" else [])]))
    positions = build_positions(config["model"], width=HEADS * WIDTH, heads=HEADS, length=T, causal=True).to(device())
    return AttentionBias(positions, build_pattern(config["pattern"]), T, T, True, None, device())


def kernels(bias: AttentionBias, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Return the kernels as functions of q, k and v, [B, heads, T, width]; the first is the one that models use."""
    kernels: dict[str, Callable[..., Tensor]] = {
        "dense mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias.dense.to(dtype)),
        "reference": lambda q, k, v: attention_reference(q, k, v, bias.dense.to(dtype))[0],
    }
    if choose_kernel(bias, device(), 0.0, with_weights=False) == "SDPA without mask":
        kernels = {"no mask": functools.partial(F.scaled_dot_product_attention, is_causal=True), **kernels}
    if device().type == "cuda":
        score_mod = bias.positions.score_mod()
        kernels = {"FlexAttention": lambda q, k, v: flex_attention(q, k, v, score_mod, bias.block_mask), **kernels}
    return kernels


def saved_bytes(run: Callable[..., Tensor], qkv: list[Tensor]) -> int:
    """Count the bytes saved for the backward pass, besides q, k and v; on a GPU, the peak of allocations."""
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(*qkv).sum().backward()
        return torch.cuda.max_memory_allocated() - before
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(*qkv)
    for tensor in qkv:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def forward_and_backward(run: Callable[..., Tensor], bias: AttentionBias, qkv: list[Tensor]) -> float:
    if [*bias.positions.parameters()]:
        bias.__dict__.pop("dense", None)  # models cache it only where it has no parameters
    run(*qkv).sum().backward()
    return 1


def bench_attention(
    rounds: int, lengths: tuple[int, ...] | None = None, variants: Sequence[tuple[str, str]] = VARIANTS
) -> list[Comparison]:
    """Measure this part."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    rows = []
    for T, (model, pattern) in itertools.product(lengths or LENGTHS[device().type], variants):
        bias = bias_of(model, pattern, T)
        qkv = [torch.randn(1, HEADS, T, WIDTH, device=device(), dtype=dtype).requires_grad_() for _ in range(3)]
        sides, memory = {}, {}
        for name, run in kernels(bias, dtype).items():
            with contextlib.suppress(torch.OutOfMemoryError):
                memory[name] = saved_bytes(run, qkv)
                sides[name] = functools.partial(forward_and_backward, run, bias, qkv)
        more: dict[str, Any] = {"bytes": memory, "tokens": T}
        rows.append(Comparison(f"attention, {T} tokens", f"{model}, {pattern}", "pass", turns(sides, rounds), more))
    return rows
