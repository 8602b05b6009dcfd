"""What only a GPU can show, in under eight minutes: `python -m speechformer.bench gpu`.

packed      32 seeds of the reports' language model as one, against one after another
window      attention of a window of 256 over 16,384 tokens by blocks, against a dense mask; forward and backward
compiled    a training step of the reports' language model whose blocks are compiled, and replayed as CUDA graphs
124M        a training step of a language model of GPT-2's size in bfloat16, and the part that it reaches of the rate
            that products of matrices in bfloat16 have on the same machine
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from speechformer.bench.attention import bench_attention
from speechformer.bench.runs import bench_packed
from speechformer.bench.steps import batches_of, losses_of
from speechformer.bench.timing import Comparison, device, synchronize, turns
from speechformer.config import as_plain, compose
from speechformer.errors import UserError
from speechformer.kernels.dispatch import compile_blocks
from speechformer.kernels.loss import next_token_loss
from speechformer.models.decoder import Decoder

GPT2 = {"width": 768, "heads": 12, "layers": 12, "ff": 3072, "block_size": 1024, "vocab_size": 50_304}


def decoder_of(sizes: dict[str, int]) -> Decoder:
    """A language model with RoPE, GELU and one table for input and output, without dropout."""
    config = as_plain(compose(["model=rope", "task=lm"]))
    architecture = {
        k: v for k, v in config["architecture"].items() if k not in ("pool", "classifier_width", "shared_embeddings")
    }
    architecture |= {"tied_output": True, "activation": "gelu", "bias": False, "qkv_bias": False}
    model, pattern = config["model"], config["pattern"]
    return Decoder(**sizes, **architecture, dropout=0.0, model=model, pattern=pattern)  # type: ignore[arg-type]


def flops_of_a_token(model: Decoder, sizes: dict[str, int]) -> float:
    """Of forward and backward: 6 for each parameter, and the two products of attention, half of which is hidden.

    Chowdhery et al. 2022, "PaLM", appendix B, with the half that causality spares.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 6 * parameters + 6 * sizes["layers"] * sizes["width"] * sizes["block_size"]


def bench_large(rate: float, sizes: dict[str, int] = GPT2, batch: int = 16, steps: int = 10) -> Comparison:
    """Seconds of a training step; `rate` is that of products in bfloat16, in FLOP/s."""
    torch.manual_seed(0)
    place = device()
    model = decoder_of(sizes).to(place)
    if place.type == "cuda":
        compile_blocks(model, "default", place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(sizes["vocab_size"], (batch, sizes["block_size"] + 1), device=place)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(place.type, torch.bfloat16):
            hidden = model.hidden(ids[:, :-1]).flatten(0, 1)
            loss = next_token_loss(model.output.weight, model.output.bias, hidden, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    seconds = (time.perf_counter() - started) / steps
    flops = flops_of_a_token(model, sizes) * batch * sizes["block_size"]
    more: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "flops": flops}
    more |= {"part_of_the_rate": flops / seconds / rate, "tokens_per_second": batch * sizes["block_size"] / seconds}
    share = 100 * more["part_of_the_rate"]
    what = f"lm, {more['parameters'] / 1e6:.0f}M parameters, bfloat16, {share:.0f} % of the rate"
    return Comparison("a large model", what, "step", {"speechformer": seconds}, more)


def bench_compiled(rounds: int, modes: Sequence[str] = ("reduce-overhead", "default")) -> Comparison:
    """Seconds of a training step in those modes of `compile`, against one that is not compiled."""
    sides = {}
    for mode in (*modes, "not compiled"):
        models, losses, data = losses_of("lm", "report")
        model, batches = models["speechformer"], batches_of("lm", "report", data, 10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if mode != "not compiled":
            compile_blocks(model, mode, device())

        def train(loss: Any = losses["speechformer"], optimizer: Any = optimizer, batches: Any = batches) -> float:
            for ids, targets in batches:
                optimizer.zero_grad()
                loss(ids, targets).backward()
                optimizer.step()
            return len(batches)

        sides[mode] = train
    return Comparison("compiled blocks", "lm, the reports' size", "step", turns(sides, rounds))


def bench_gpu(rounds: int, rate: float) -> list[Comparison]:
    """The rows of this part.

    Raises:
        UserError: there is no GPU.
    """
    if device().type != "cuda":
        raise UserError("there is no CUDA device here, and bench gpu measures nothing else.")
    window = bench_attention(rounds, (16_384,), variants=[("nope", "window")])
    return [*window, bench_compiled(rounds), bench_large(rate), *bench_packed(32)]
