"""Benchmark what needs a GPU, in less than eight minutes: `python -m speechformer.bench gpu`.

ensemble    32 seeds of the reports' language model as an ensemble, against the same runs in sequence
window      a window of 256 over 16,384 tokens: FlexAttention against a dense mask, forward and backward
compiled    a training step of the reports' language model with compiled blocks, and replayed as CUDA graphs
124M        a training step of a language model of GPT-2's size in bfloat16, and its share of the rate of matrix
            products in bfloat16 on the same machine
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from speechformer.bench.attention import bench_attention
from speechformer.bench.peers import parameters
from speechformer.bench.runs import bench_ensemble
from speechformer.bench.steps import batches_of, losses_of, models_of, train
from speechformer.bench.timing import Comparison, device, turns
from speechformer.config import as_plain, compose
from speechformer.errors import UserError
from speechformer.kernels.dispatch import compile_blocks
from speechformer.kernels.loss import next_token_loss
from speechformer.models.decoder import Decoder
from speechformer.models.stack import initialise

GPT2 = {"width": 768, "heads": 12, "layers": 12, "ff": 3072, "block_size": 1024, "vocab_size": 50_304}


def decoder_of(sizes: dict[str, int], *overrides: str) -> Decoder:
    """Build a language model with RoPE and tied embeddings, without biases and dropout.

    Its weights are drawn from normal(0, 0.02). With torch's embeddings, of variance 1, tied logits differ by so much
    that probabilities become denormal numbers within a few steps. CPUs multiply these many times slower.
    """
    config = as_plain(compose(["model=rope", "task=lm", *overrides]))
    unused = ("pool", "classifier_width", "shared_embeddings")
    architecture = {key: value for key, value in config["architecture"].items() if key not in unused}
    architecture |= {"tied_output": True, "bias": False, "qkv_bias": False}
    model, pattern = config["model"], config["pattern"]
    decoder = Decoder(**sizes, **architecture, dropout=0.0, model=model, pattern=pattern)  # type: ignore[arg-type]
    initialise(decoder, "normal", 0.02)
    return decoder


def bench_large(rate: float, sizes: dict[str, int] = GPT2, batch: int = 16, steps: int = 10) -> Comparison:
    """Measure a training step; `rate` is that of matrix products in bfloat16, in FLOP/s."""
    torch.manual_seed(0)
    model = decoder_of(sizes, "architecture.activation=gelu").to(device())
    if device().type == "cuda":
        compile_blocks(model, "default", device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(sizes["vocab_size"], (batch, sizes["block_size"] + 1), device=device())

    def training_steps() -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device().type, torch.bfloat16):
                hidden = model.hidden(ids[:, :-1]).flatten(0, 1)
                loss = next_token_loss(model.output.weight, model.output.bias, hidden, ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
        return steps

    seconds = turns({"speechformer": training_steps}, rounds=1)
    step, tokens, count = seconds["speechformer"], batch * sizes["block_size"], parameters(model)
    # 6 FLOPs per parameter and the products of attention: Chowdhery et al. 2022, "PaLM", appendix B, of whose
    # attention term causality needs only half
    flops = (6 * count + 6 * sizes["layers"] * sizes["width"] * sizes["block_size"]) * tokens
    share = flops / step / rate
    more = {"parameters": count, "flops": flops, "part_of_the_rate": share, "tokens_per_second": tokens / step}
    what = f"lm, {count / 1e6:.0f}M parameters, bfloat16, {100 * share:.0f} % of the rate"
    return Comparison("a large model", what, "step", seconds, more)


def bench_compiled(rounds: int, modes: Sequence[str] = ("reduce-overhead", "default")) -> Comparison:
    """Compare a training step in some modes of `compile` to one that is not compiled."""
    sides = {}
    for mode in (*modes, "not compiled"):
        models, data = models_of("lm", "report")
        model, batches = models["speechformer"], batches_of("lm", "report", data, 10, training=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if mode != "not compiled":
            compile_blocks(model, mode, device())
        sides[mode] = functools.partial(train, model, optimizer, batches, losses_of(model, training=True)["default"])
    return Comparison("compiled blocks", "lm, the reports' size", "step", turns(sides, rounds))


def bench_gpu(rounds: int, rate: float) -> list[Comparison]:
    """Measure this part; raise a UserError without a GPU."""
    if device().type != "cuda":
        raise UserError("there is no CUDA device here, and bench gpu needs one.")
    window = bench_attention(rounds, (16_384,), variants=["window 256"])
    return [*window, bench_compiled(rounds), bench_large(rate), *bench_ensemble(32)]
