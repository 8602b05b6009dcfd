"""Time what needs a GPU. Each part can be named alone:

    patterns    forward and backward of one causal layer's attention, 8 heads of width 64 in bfloat16, by length and
                batch: FlexAttention, a dense mask, and our sparse blocks. Memory is
                the peak of the first pass, which builds the mask. "Chosen" is what a model takes without dropout
    ensemble    32 runs of 60 steps as one ensemble, against the first eight of them one after another
    compiled    a training step of the reports' language model, with compiled blocks and with CUDA graphs
    precision   a training step of a language model 512 wide, in bfloat16 and in single precision
    large       a training step of a language model of GPT-2's size in bfloat16, compiled, and its share of the rate
                of matrix products of 8,192 x 8,192

It takes about six minutes on an H100. benchmarks/gpu.sh runs it together with tests on a GPU.

    python benchmarks/gpu.py [PART ...] --output FOLDER
"""

import contextlib
import functools
import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attention import PATTERNS
from common import TASKS, Row, main, time_in_turns
from steps import REPORT

NAMES = ("window 256", "bigbird and window 64", "alibi, full")
LENGTHS, BATCHES, MOST_TOKENS = (16_384, 4096), (1, 2, 4, 8, 16), 65_536
HEADS, WIDTH = 8, 64
MIDDLE = {"width": 512, "heads": 8, "layers": 6, "ff": 2048, "block_size": 1024, "vocab_size": 8192}
GPT2 = {"width": 768, "heads": 12, "layers": 12, "ff": 3072, "block_size": 1024, "vocab_size": 50_304}
GELU = ["architecture.activation=gelu"]
MEMBERS, ALONE, MEMBER_STEPS = 32, 8, 60


def measure_patterns(rounds: int) -> Iterator[Row]:
    """Measure the kernels by length and batch; what does not fit into memory is left out."""
    import torch
    from workloads import AttentionPass

    for T, B, name in itertools.product(LENGTHS, BATCHES, NAMES):
        if B * T > MOST_TOKENS:
            continue
        layer = AttentionPass(PATTERNS[name], T, HEADS, WIDTH, B, torch.bfloat16)
        kernels = {"FlexAttention": "FlexAttention", "dense mask": "dense mask"}
        kernels["blocks"] = "sparse blocks"
        sides, held = {}, {}
        for side, kernel in kernels.items():
            with contextlib.suppress(torch.OutOfMemoryError, KeyError):  # some kernels lack some patterns
                held[side] = layer.held_bytes(layer.kernels[kernel])
                sides[side] = functools.partial(layer.run, layer.kernels[kernel])
        facts, seconds = {"bytes": held, "chosen": layer.chosen}, time_in_turns(sides, rounds)
        yield Row("forward and backward", f"{name}, {B} x {T:,} tokens", seconds, facts, compared=False)


def measure_ensemble(rounds: int) -> Iterator[Row]:
    """Measure an ensemble and runs in sequence, once: their training, and the whole runs."""
    from speechformer.config import compose
    from speechformer.training.run import execute, execute_ensemble
    from speechformer.training.runtime import silence_libraries

    silence_libraries()
    logging.getLogger("speechformer").setLevel(logging.WARNING)
    for task, name in TASKS.items():
        overrides = [f"task={task}", f"trainer.max_steps={MEMBER_STEPS}", "trainer.max_epochs=-1"]
        cfgs = [compose([*overrides, f"eval_interval={10**9}", f"seed={seed}"]) for seed in range(MEMBERS)]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            execute(cfgs[0], folder / "warm-up")
            began = time.perf_counter()
            execute_ensemble([(cfg, folder / f"member{k}", []) for k, cfg in enumerate(cfgs)])
            between = time.perf_counter()
            results = [execute(cfg, folder / f"alone{k}") for k, cfg in enumerate(cfgs[:ALONE])]
            ended = time.perf_counter()
            member = execute(cfgs[0], folder / "member0")  # finished: only its result
        training, *alone = (result["seconds_by_phase"]["training"] / MEMBER_STEPS for result in (member, *results))
        steps = {"ensemble": [training / MEMBERS], "sequential": [sum(alone) / ALONE]}
        runs = {"ensemble": [(between - began) / MEMBERS], "sequential": [(ended - between) / ALONE]}
        yield Row("time for each run", f"{name}, a training step", steps)
        yield Row("time for each run", f"{name}, the whole run", runs)


def measure_compiled(rounds: int) -> Iterator[Row]:
    """Measure modes of `compile`."""
    import workloads

    from speechformer.models.stack import compile_blocks

    sides = {}
    for mode in ("reduce-overhead", "default", "not compiled"):
        task, data = workloads.build_task("lm", REPORT)
        batches = workloads.draw_batches("lm", REPORT, data, training=True)
        if mode != "not compiled":
            compile_blocks(task.model, mode, workloads.DEVICE)
        (loss,) = workloads.find_losses(task.model, training=True).values()
        optimizer = workloads.build_optimizer(task.model)
        sides[mode] = functools.partial(workloads.run_batches, task.model, batches, loss, optimizer)
    name, seconds = "language model, reports' size", time_in_turns(sides, rounds, units=len(batches))
    yield Row("a training step with compiled blocks", name, seconds)


def measure_precision(rounds: int) -> Iterator[Row]:
    """Measure a step in bfloat16 and in single precision."""
    from workloads import build_decoder_step

    for B in (1, 8):
        half, single = (build_decoder_step(MIDDLE, GELU, B, bfloat16)[0] for bfloat16 in (True, False))
        seconds = time_in_turns({"bf16-mixed": half, "32-true": single}, rounds)
        yield Row("a training step by precision", f"512 wide, 6 layers, {B} x 1,024 tokens", seconds)


def measure_large(rounds: int) -> Iterator[Row]:
    """Measure a step of a large model, and count its FLOPs by Chowdhery et al. 2022, "PaLM", appendix B."""
    import torch
    from workloads import build_decoder_step

    B, T, size = 16, GPT2["block_size"], 8192
    step, count = build_decoder_step(GPT2, GELU, B, bfloat16=True, compiled=True)
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    product = time_in_turns({"product": functools.partial(torch.matmul, a, b)}, rounds)["product"]
    # causality needs half of the products of attention
    flops = (6 * count + 6 * GPT2["layers"] * GPT2["width"] * T) * B * T
    facts = {"tokens": B * T, "flops": flops, "matmul_rate": 2 * size**3 / min(product)}
    name = f"{count / 1e6:.0f}M parameters, {B} x {T:,} tokens, bfloat16"
    yield Row("a training step of a large model", name, time_in_turns({"speechformer": step}, rounds), facts)


def format_memory(row: Row) -> str:
    """Format the peaks of all sides."""
    held = row.facts.get("bytes", {})
    return " / ".join(f"{held[side] / 2**20:,.0f}" for side in row.seconds if side in held)


def format_rate(row: Row) -> str:
    """Format the rate of the large model's step, and its share of the rate of matrix products."""
    if "flops" not in row.facts:
        return ""
    tokens, flops = (row.facts[name] / statistics.median(row.seconds["speechformer"]) for name in ("tokens", "flops"))
    return f"{tokens:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s ({100 * flops / row.facts['matmul_rate']:.0f} %)"


if __name__ == "__main__":
    measures = (measure_patterns, measure_ensemble, measure_compiled, measure_precision, measure_large)
    columns = {"memory in MiB": format_memory, "rate (of matrix products)": format_rate}
    columns["chosen"] = lambda row: row.facts.get("chosen", "")
    main(__doc__, measures, columns, rounds=3, on_gpu=True)
