"""Time and memory of attention over its length: written out, by torch's kernel with a dense mask, by blocks.

Forward and backward of one layer's attention, one sequence, 8 heads of 64. Memory is what autograd keeps for the
backward pass; on a GPU the most that was allocated. By blocks (FlexAttention) has a backward on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def scores_of(model: str, pattern: str, T: int) -> AttentionBias:
    """What a causal layer of that position and pattern adds to its scores."""
    words = [f"model={model}", f"pattern={pattern}", *([f"pattern.window={WINDOW}"] if pattern == "window" else [])]
    config = as_plain(compose(words))
    positions = build_positions(config["model"], width=HEADS * WIDTH, heads=HEADS, length=T, causal=True).to(device())
    return AttentionBias(positions, build_pattern(config["pattern"]), T, T, True, None, device())


def kernels(scores: AttentionBias, dtype: torch.dtype) -> dict[str, Any]:
    """Attention as a function of q, k and v, by kernel."""

    def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=scores.dense.to(dtype))

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, scores.dense.to(dtype))[0]

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, scores.positions.score_mod(), scores.block_mask)

    found: dict[str, Any] = {"dense mask": with_mask, "written out": written_out}
    if choose_kernel(scores, device(), 0.0, with_weights=False) == "SDPA without mask":
        found = {"no mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), **found}
    if device().type == "cuda":
        found = {"by blocks": flex, **found}
    return found


def kept(run: Any, qkv: list[Tensor]) -> int:
    """Bytes that are kept for the backward pass, beside q, k and v; on a GPU the most that was allocated."""
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


def bench_attention(
    rounds: int, lengths: tuple[int, ...] | None = None, variants: Sequence[tuple[str, str]] = VARIANTS
) -> list[Comparison]:
    """The rows of this part; the first side is what a model of ours takes."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    found = []
    for T in lengths or LENGTHS[device().type]:
        for model, pattern in variants:
            scores = scores_of(model, pattern, T)
            qkv = [torch.randn(1, HEADS, T, WIDTH, device=device(), dtype=dtype).requires_grad_() for _ in range(3)]
            sides, memory = {}, {}
            for name, run in kernels(scores, dtype).items():
                try:
                    memory[name] = kept(run, qkv)
                except torch.OutOfMemoryError:
                    continue

                def side(run: Any = run, scores: AttentionBias = scores, qkv: list[Tensor] = qkv) -> float:
                    if [*scores.positions.parameters()]:
                        scores.__dict__.pop("dense", None)  # else a model keeps it, where only the length decides it
                    run(*qkv).sum().backward()
                    return 1

                sides[name] = side
            seconds = turns(sides, rounds)
            found.append(
                Comparison(
                    f"attention, {T} tokens", f"{model}, {pattern}", "pass", seconds, {"bytes": memory, "tokens": T}
                )
            )
    return found
