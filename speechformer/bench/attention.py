"""Benchmark time and memory of attention by length: attention in blocks, a dense mask, FlexAttention, the reference.

Forward and backward of one causal layer's attention, if not said otherwise for one sequence. Memory is what stays
between the two, masks and biases included. On a GPU it is the peak of allocations in the first pass, which builds the
mask. FlexAttention has a backward pass only on a GPU. `local_attention` is the library of that name, for the patterns
that it has.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.bench.timing import Comparison, device, turns
from speechformer.config import as_plain, compose
from speechformer.kernels.attention import attention_in_query_blocks, flex_attention
from speechformer.kernels.dispatch import AttentionBias, choose_kernel
from speechformer.kernels.sparse import keeps_weights, layout_of, sparse_attention
from speechformer.layers.attention import attention_reference
from speechformer.layers.patterns import all_pairs, build_pattern
from speechformer.layers.positions import build_positions

SIZES = {"cpu": (4, 32), "cuda": (8, 64)}  # heads and their width
VARIANTS = {
    "full": "pattern=full",
    "window 64": "pattern=window pattern.window=64",
    "window 256": "pattern=window pattern.window=256",
    "block 64": "pattern=block pattern.block=64",
    "strided 64": "pattern=strided pattern.stride=64",
    "dilated 64": "pattern=dilated pattern.window=64",
    "global and window 64": "pattern=global pattern.window=64",
    "bigbird and window 64": "pattern=bigbird pattern.window=64",
    "alibi, full": "model=alibi",
    "relative, full": "model=relative",
    "alibi, window 64": "model=alibi pattern=window pattern.window=64",
}
LENGTHS = {
    "cpu": (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
    "cuda": (1024, 2048, 4096, 8192, 16_384),
}
LONGEST = {"dense mask": 8192, "SDPA without mask": 8192, "query blocks": 8192, "reference": 2048}  # on a CPU
SCATTERED = 16_384  # the longest text for patterns other than windows and blocks


def bias_of(overrides: str, T: int, B: int = 1) -> AttentionBias:
    """Build the attention bias of a causal layer with these overrides, for B sequences."""
    config = as_plain(compose(["model=nope", *overrides.split()]))
    heads, width = SIZES[device().type]
    positions = build_positions(config["model"], width=heads * width, heads=heads, length=T, causal=True).to(device())
    return AttentionBias(positions, build_pattern(config["pattern"]), T, T, True, None, device(), B=B)


def local_attention(bias: AttentionBias, overrides: str) -> Callable[..., Tensor] | None:
    """Return the library's attention where it has the pattern and is installed."""
    try:
        from local_attention import LocalAttention
    except ImportError:
        return None
    if "pattern=window" in overrides and not bias.positions.overrides("bias"):
        size = int(overrides.rpartition("=")[2]) - 1  # which leaves out the query itself
        return LocalAttention(size, causal=True, exact_windowsize=True, autopad=True)
    if "pattern=block" in overrides:
        return LocalAttention(int(overrides.rpartition("=")[2]), causal=True, autopad=True)
    return None


def kernels(bias: AttentionBias, overrides: str, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Return the kernels as functions of q, k and v, [B, heads, T, width]; the first is the one that models use."""
    kernels: dict[str, Callable[..., Tensor]] = {
        "dense mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias.dense.to(dtype)),
        "reference": lambda q, k, v: attention_reference(q, k, v, bias.dense.to(dtype))[0],
    }
    if bias.B > 1:  # whose memory grows with each sequence
        del kernels["reference"]
    kernel = choose_kernel(bias, device(), 0.0, with_weights=False)
    chosen = {"SDPA": "dense mask"}.get(kernel, kernel)
    if bias.pattern is not all_pairs:
        layout = layout_of(bias.pattern, bias.T, bias.causal, bias.device) or []  # also of many pairs
        bias.layout = layout
        kernels["sparse blocks"] = lambda q, k, v: sparse_attention(q, k, v, layout, bias.of_blocks)
    if chosen == "query blocks" or (bias.pattern is all_pairs and not bias.has_no_mask):
        kernels["query blocks"] = lambda q, k, v: attention_in_query_blocks(q, k, v, bias.of_rows, True, None)
    if bias.has_no_mask:
        kernels["SDPA without mask"] = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    if device().type == "cuda":
        score_mod = bias.positions.score_mod()
        kernels["FlexAttention"] = lambda q, k, v: flex_attention(q, k, v, score_mod, bias.block_mask)
    elif library := local_attention(bias, overrides):
        kernels["local_attention"] = library
    return {chosen: kernels.pop(chosen), **kernels}


def held_bytes(run: Callable[..., Tensor], bias: AttentionBias, qkv: list[Tensor]) -> int:
    """Count the bytes held for the backward pass, besides q, k and v; on a GPU, the peak of allocations."""
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(*qkv).sum().backward()
        return torch.cuda.max_memory_allocated() - before
    bias.__dict__.pop("of_blocks", None)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output itself would keep its graph alive, and that the output

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(*qkv)
    if "of_blocks" in vars(bias):  # by this kernel
        groups = [group for part in bias.layout or [] for group in part.groups]
        for tensor in (*itertools.chain(*bias.of_blocks), *(group.mask for group in groups)):
            note(tensor)
    for tensor in qkv:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def recomputes(bias: AttentionBias, heads: int) -> bool:
    """Return whether the backward pass of sparse blocks computes the weights of any group again."""
    groups = [group for part in bias.layout or [] for group in part.groups]
    return not all(keeps_weights(heads, own, group) for own, group in zip(itertools.chain(*bias.of_blocks), groups))


def forward_and_backward(run: Callable[..., Tensor], bias: AttentionBias, qkv: list[Tensor]) -> float:
    """Run passes for a fifth of a second, as most then find the caches that they left; return their number.

    A GPU has no such caches, and computes while the next passes begin.
    """
    started, passes, least = time.perf_counter(), 0, 0.2 if device().type == "cpu" else 0.02
    while passes == 0 or time.perf_counter() - started < least:
        if [*bias.positions.parameters()]:
            for name in ("dense", "of_blocks"):
                bias.__dict__.pop(name, None)  # models cache it only where it has no parameters
        run(*qkv).sum().backward()
        passes += 1
    return passes


def bench_attention(
    rounds: int, lengths: Sequence[int] | None = None, variants: Sequence[str] | None = None, batch: int = 1
) -> list[Comparison]:
    """Measure this part, on a CPU with one thread, as runs of a sweep have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(rounds, lengths or LENGTHS[device().type], variants or [*VARIANTS], batch)
    finally:
        torch.set_num_threads(threads)


def measure(rounds: int, lengths: Sequence[int], variants: Sequence[str], B: int = 1) -> list[Comparison]:
    """Measure each variant over each length, in batches of B sequences."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    (heads, width), rows = SIZES[device().type], []
    for T, what in itertools.product(lengths, variants):
        overrides = VARIANTS[what]
        shaped = "pattern=window" in overrides or "pattern=block" in overrides
        bias = bias_of(overrides, T, B)
        if device().type == "cpu" and T > SCATTERED and not shaped:
            continue
        qkv = [torch.randn(B, heads, T, width, device=device(), dtype=dtype).requires_grad_() for _ in range(3)]
        sides, memory, recomputed = {}, {}, False
        for name, run in kernels(bias, overrides, dtype).items():
            if device().type == "cpu" and LONGEST.get(name, T) < T:
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                memory[name] = held_bytes(run, bias, qkv)
                recomputed |= name == "sparse blocks" and recomputes(bias, heads)
                sides[name] = functools.partial(forward_and_backward, run, bias, qkv)
        more: dict[str, Any] = {"bytes": memory, "tokens": T, "batch": B, "chosen": next(iter(sides), None)}
        more["recomputed"] = recomputed
        if sides:
            own_rounds = rounds if T > 4096 else 3 * rounds
            part = f"attention, {T} tokens" if B == 1 else f"batches, {B} x {T} tokens"
            rows.append(Comparison(part, what, "pass", turns(sides, own_rounds), more))
    return rows
