"""Benchmark training and generation over long texts: `python -m speechformer.bench long`.

A decoder of six layers, 512 wide, with RoPE, reads one text of random tokens. The rows take turns in one process, so
that other load on the machine affects all of them. The peak of memory, weights and optimiser included, is that of
another process for each row. Then a small decoder with attention sinks and a window generates 100,000 tokens; the row
compares its first 10,000 with its last.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from speechformer.bench.gpu import decoder_of
from speechformer.bench.timing import Comparison, device, in_processes, seconds_per_unit
from speechformer.kernels.loss import next_token_loss
from speechformer.training.memory import peak_bytes
from speechformer.training.runtime import tune_memory

SIZES = {"width": 512, "heads": 8, "layers": 6, "ff": 2048, "vocab_size": 5634}
SMALL = {"width": 128, "heads": 4, "layers": 2, "ff": 256, "vocab_size": 5634, "block_size": 256}
WARM_UPS, FEW_FAULTS = 8, 10_000  # most rounds to warm up; new pages of 4 KiB in a round that has nearly none
TEXTS = (("window 256", 4096), ("window 256", 8192), ("window 256", 16_384), ("full", 4096), ("full", 8192))


def bench_long(rounds: int) -> list[Comparison]:
    """Measure this part."""
    rows = in_processes(functools.partial(measure, rounds), 1)[0]
    for row, text in zip(rows, TEXTS):
        (row.more["peak_bytes"],) = in_processes(functools.partial(peak_of_steps, *text), 1)
    return [*rows, in_processes(bench_stream, 1)[0]]


def training_step(pattern: str, T: int, sizes: dict[str, int] = SIZES) -> Callable[[], float]:
    """Return a function that takes a training step."""
    tune_memory()  # as every run does
    name, _, window = pattern.partition(" ")
    overrides = [f"pattern={name}", *([f"pattern.window={window}"] if window else [])]
    torch.manual_seed(0)
    model = decoder_of({**sizes, "block_size": T}, *overrides).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(sizes["vocab_size"], (1, T + 1), device=device())

    def step() -> float:
        optimizer.zero_grad()
        hidden = model.hidden(ids[:, :-1]).flatten(0, 1)
        next_token_loss(model.output.weight, model.output.bias, hidden, ids[:, 1:].flatten()).backward()
        optimizer.step()
        return 1

    return step


def measure(rounds: int, texts: Sequence[tuple[str, int]] = TEXTS, sizes: dict[str, int] = SIZES) -> list[Comparison]:
    """Measure a training step over each text in turns, after `warm_up`."""
    steps = [training_step(*text, sizes) for text in texts]
    warm_ups = warm_up(steps)
    seconds = [[seconds_per_unit(step) for step in steps] for _ in range(rounds)]
    rows = []
    for (pattern, T), own in zip(texts, zip(*seconds)):
        what = f"lm, {sizes['width']} wide, {sizes['layers']} layers, {pattern}, {T:,} tokens"
        more = {"tokens": T, "rounds": own, "warm_ups": warm_ups}
        rows.append(Comparison("a long text", what, "step", {"speechformer": statistics.median(own)}, more))
    return rows


def warm_up(steps: Sequence[Callable[[], float]]) -> int:
    """Take all steps in turns until the process has its memory; return the number of rounds, at most `WARM_UPS`.

    The first write to a page of memory interrupts the process, and a long text finds new pages for several rounds.
    """
    for number in range(1, WARM_UPS + 1):
        before = page_faults()
        for step in steps:
            step()
        if page_faults() - before < FEW_FAULTS:
            return number
    return WARM_UPS


def page_faults() -> int:
    """Return how many pages of memory this process has been given so far; 0 where nothing tells."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return 0


def peak_of_steps(pattern: str, T: int, sizes: dict[str, int] = SIZES) -> int:
    """Return the peak of memory of this process, in bytes, after three steps."""
    step = training_step(pattern, T, sizes)
    for _ in range(3):
        step()
    return peak_bytes(device()) or 0


def bench_stream(tokens: int = 100_000, part: int = 10_000, sizes: dict[str, int] = SMALL) -> Comparison:
    """Measure the last part of a stream of tokens against the first, the cache, and the memory that was added."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more do not help at this size
    model = decoder_of(sizes, "pattern=sinks", "pattern.window=256").to(device()).eval()
    past, following, seconds, memory = model.decoder.new_cache(), torch.ones(1, 1, dtype=torch.long), [], []
    following = following.to(device())
    for _ in range(tokens // part):
        started = time.perf_counter()
        with torch.inference_mode():
            for _ in range(part):
                logits = model.output(model.hidden(following, past)[:, -1])
                following = torch.multinomial(logits.softmax(dim=-1), 1)
        seconds.append((time.perf_counter() - started) / part)
        memory.append(peak_bytes(device()) or 0)
    cached = sum(x.numel() * x.element_size() for layer in past for x in layer.values())
    more = {"cache_bytes": cached, "added_bytes": memory[-1] - memory[0], "seconds": seconds}
    what = f"lm, sinks and window 256, {tokens:,} tokens, {cached / 1e6:.1f} MB of cache"
    sides = {"last 10,000": seconds[-1], "first 10,000": seconds[0]}
    return Comparison("a stream", what, "token", sides, more)
