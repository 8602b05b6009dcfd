"""Benchmark what needs a GPU: `python -m speechformer.bench gpu`, or one of these parts.

patterns    forward and backward of attention over 1,024 to 16,384 tokens and in batches of up to 64 sequences:
            FlexAttention, a dense mask, blocks
compiled    a training step of the reports' language model with compiled blocks, and replayed as CUDA graphs
precision   a training step of a language model 512 wide over 1,024 tokens, in bfloat16 and in single precision
large       a training step of a language model of GPT-2's size in bfloat16, with its FLOPs

`gpu` also measures the part `ensemble`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speechformer.bench.attention import LENGTHS, bench_attention
from speechformer.bench.peers import parameters
from speechformer.bench.steps import batches_of, losses_of, models_of, train
from speechformer.bench.timing import Comparison, Side, device, turns
from speechformer.config import as_plain, compose
from speechformer.kernels.dispatch import compile_blocks
from speechformer.kernels.loss import next_token_loss
from speechformer.models.decoder import Decoder
from speechformer.models.stack import initialise

PATTERNS = ("window 256", "bigbird and window 64", "alibi, full")
BATCHES, MOST_TOKENS = (1, 2, 4, 8, 16, 32, 64), 65_536
MIDDLE = {"width": 512, "heads": 8, "layers": 6, "ff": 2048, "block_size": 1024, "vocab_size": 8192}
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


def train_decoder(model: Decoder, optimizer: torch.optim.Optimizer, ids: Tensor, half: bool, steps: int) -> float:
    """Take training steps on ids, [B, T + 1], with autocast to bfloat16 if `half`."""
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device().type, torch.bfloat16, enabled=half):
            hidden = model.hidden(ids[:, :-1]).flatten(0, 1)
            loss = next_token_loss(model.output.weight, model.output.bias, hidden, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return steps


def steps_of(sizes: dict[str, int], batch: int, half: bool, steps: int, compiled: bool = False) -> tuple[Side, int]:
    """Return training steps on random words as a function, and the number of the model's parameters."""
    torch.manual_seed(0)
    model = decoder_of(sizes, "architecture.activation=gelu").to(device())
    if compiled:
        compile_blocks(model, "default", device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(sizes["vocab_size"], (batch, sizes["block_size"] + 1), device=device())
    return functools.partial(train_decoder, model, optimizer, ids, half, steps), parameters(model)


def bench_patterns(rounds: int, batches: Sequence[int] = BATCHES) -> list[Comparison]:
    """Compare the kernels of attention by length and batch size."""
    rows = []
    for batch in batches:
        lengths = [T for T in LENGTHS["cuda"] if batch * T <= MOST_TOKENS]
        rows += bench_attention(rounds, lengths, PATTERNS, batch)
    return rows


def bench_precision(rounds: int, sizes: dict[str, int] = MIDDLE, steps: int = 10) -> list[Comparison]:
    """Compare a training step with `trainer.precision=bf16-mixed` to single precision, by batch size."""
    rows = []
    for batch in (1, 8):
        precisions = {"bf16-mixed": True, "32-true": False}
        sides = {name: steps_of(sizes, batch, half, steps)[0] for name, half in precisions.items()}
        what = f"lm, {sizes['width']} wide, {sizes['layers']} layers, {batch} x {sizes['block_size']:,} tokens"
        rows.append(Comparison("precision", what, "step", turns(sides, rounds)))
    return rows


def bench_large(sizes: dict[str, int] = GPT2, batch: int = 16, steps: int = 10) -> Comparison:
    """Measure a training step in bfloat16, and count its FLOPs."""
    side, count = steps_of(sizes, batch, True, steps, compiled=device().type == "cuda")
    seconds = turns({"speechformer": side}, rounds=1)
    step, tokens = seconds["speechformer"], batch * sizes["block_size"]
    # 6 FLOPs per parameter and the products of attention: Chowdhery et al. 2022, "PaLM", appendix B, of whose
    # attention term causality needs only half
    flops = (6 * count + 6 * sizes["layers"] * sizes["width"] * sizes["block_size"]) * tokens
    more = {"parameters": count, "flops_of_step": flops, "tokens_per_second": tokens / step}
    what = f"lm, {count / 1e6:.0f}M parameters, bfloat16"
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


GPU_PARTS: dict[str, Callable[[int], list[Comparison]]] = {
    "patterns": bench_patterns,
    "compiled": lambda rounds: [bench_compiled(rounds)],
    "precision": bench_precision,
    "large": lambda rounds: [bench_large()],
}
