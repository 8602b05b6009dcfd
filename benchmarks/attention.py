"""Time sparse attention against a dense mask and full attention, and training steps over long texts.

    patterns   one causal layer with 4 heads of width 32, one text, forward and backward, one thread. Ours is the
               kernel that a model takes: sparse blocks, or for full attention torch's fused kernel without a mask.
               "Dense mask" is torch's kernel with the pattern as a mask. Memory is what stays for the backward pass
               besides q, k and v, masks and biases included
    training   a step of a decoder with six layers, 512 wide, RoPE and one text

It takes about 20 minutes on two cores.

    python benchmarks/attention.py [PART ...] --output FOLDER
"""

import functools
import itertools
from collections.abc import Iterator

from common import Row, main, time_in_turns

PATTERNS = {
    "full": "",
    "window 64": "pattern=window pattern.window=64",
    "window 256": "pattern=window pattern.window=256",
    "block 64": "pattern=block pattern.block=64",
    "strided 64": "pattern=strided pattern.stride=64",
    "dilated 64": "pattern=dilated pattern.window=64",
    "global and window 64": "pattern=global pattern.window=64",
    "bigbird and window 64": "pattern=bigbird pattern.window=64",
    "alibi, full": "model=alibi",
    "alibi, window 64": "model=alibi pattern=window pattern.window=64",
}
LENGTHS = (1024, 4096, 16_384)
LONGEST_DENSE = 8192  # of all pairs, in tokens
HEADS, WIDTH = 4, 32
TEXTS = (("window 256", 4096), ("window 256", 8192), ("window 256", 16_384), ("full", 4096), ("full", 8192))
DECODER = {"width": 512, "heads": 8, "layers": 6, "ff": 2048, "vocab_size": 5634}


def measure_patterns(rounds: int) -> Iterator[Row]:
    """Measure each pattern over each length."""
    from workloads import AttentionPass

    for T, (name, overrides) in itertools.product(LENGTHS, PATTERNS.items()):
        if T > LONGEST_DENSE and "pattern=" not in overrides:
            continue
        layer = AttentionPass(overrides, T, HEADS, WIDTH)
        kernels = {"speechformer": layer.kernels[layer.chosen]}
        if T <= LONGEST_DENSE:
            kernels["dense mask"] = layer.kernels["dense mask"]
        held = {side: layer.held_bytes(kernel) for side, kernel in kernels.items()}
        sides = {side: functools.partial(layer.run, kernel) for side, kernel in kernels.items()}
        seconds = time_in_turns(sides, rounds, threads=1)
        yield Row("forward and backward", f"{name}, {T:,} tokens", seconds, {"bytes": held, "kernel": layer.chosen})


def measure_training(rounds: int) -> Iterator[Row]:
    """Measure a training step over each text."""
    from workloads import build_decoder_step

    steps = {
        (name, T): build_decoder_step({**DECODER, "block_size": T}, PATTERNS[name].split())[0] for name, T in TEXTS
    }
    for (name, T), seconds in time_in_turns(steps, rounds).items():
        yield Row("a training step", f"{name}, {T:,} tokens", {"speechformer": seconds})


def format_memory(row: Row) -> str:
    """Format the memory that our kernel holds, and in brackets that of a dense mask."""
    held = {side: f"{count / 2**20:.0f} MiB" for side, count in row.facts.get("bytes", {}).items()}
    return held.get("speechformer", "") + (f" ({held['dense mask']})" if "dense mask" in held else "")


if __name__ == "__main__":
    main(__doc__, (measure_patterns, measure_training), {"memory held (by a dense mask)": format_memory}, rounds=9)
