"""How fast we are, side by side with what a user would pick instead: `python -m speechformer.bench [PART ...]`.

    steps        a training step and an evaluation, against torch.nn.TransformerEncoder and x-transformers
    loop         the Trainer's loop against a bare one
    attention    time and memory over the length, for each position and pattern and kernel
    startup      from the command to the first step, against importing torch and lightning
    sweep        what a run costs beside its training
    packed       runs as one, against one after another
    whole        from the command to the last line
    gpu          what only a GPU shows: 32 runs as one, a window over 16k tokens, a model of 124M parameters
    translation  the encoder-decoder; takes the settings of a run and --run

All but the last two without PART. The sides take turns in one process where they can, so that what else the machine
does falls on all; seconds are medians; a ratio says how many times as fast the first side is as the fastest other.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speechformer import console
from speechformer.bench import attention, gpu, runs, steps, translation
from speechformer.bench.plots import draw
from speechformer.bench.timing import Comparison, machine
from speechformer.errors import UserError, run_command
from speechformer.runs.folder import write_json
from speechformer.training.runtime import silence_libraries, tune_memory

PARTS = ("steps", "loop", "attention", "startup", "sweep", "packed", "whole")


def measured(part: str, rounds: int, about: dict[str, Any]) -> list[Comparison]:
    """The rows of a part."""
    fewer = max(1, rounds // 3)
    parts: dict[str, Callable[[], list[Comparison]]] = {
        "steps": lambda: steps.bench_steps(rounds),
        "loop": lambda: runs.bench_loop(rounds),
        "attention": lambda: attention.bench_attention(fewer),
        "startup": lambda: runs.bench_startup(fewer),
        "sweep": runs.bench_sweep,
        "packed": lambda: runs.bench_packed(32 if torch.cuda.is_available() else 8),
        "whole": runs.bench_whole,
        "gpu": lambda: gpu.bench_gpu(fewer, about["flops_bfloat16"]),
    }
    return parts[part]()


def seconds(value: float) -> str:
    """A time as one reads it."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def table(rows: list[Comparison]) -> str:
    """A line for each comparison, under the names of its sides."""
    lines, sides = [], None
    for row in rows:
        if (row.part, list(row.seconds)) != sides:
            sides = (row.part, list(row.seconds))
            lines.append((f"{row.part}: seconds a {row.unit}", *row.seconds, "ratio"))
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append((f"  {row.what}", *map(seconds, row.seconds.values()), ratio))
    widest = max(map(len, lines))
    return console.table([(*line[:-1], *[""] * (widest - len(line)), line[-1]) for line in lines])


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["translation"]:
        del sys.argv[1]
        translation.main()
        return
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, gpu; or translation alone")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (9)")
    parser.add_argument("--output", type=Path, help="a folder for bench.json and the pictures")
    given = parser.parse_args()

    def command() -> None:
        wrong = [part for part in given.parts if part not in (*PARTS, "gpu")]
        if wrong:
            raise UserError(f"there is no part {wrong[0]}; valid are {', '.join(PARTS)}, gpu, and translation alone.")
        if given.rounds < 1:
            raise UserError("--rounds must be at least 1.")
        tune_memory()
        silence_libraries()
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        about, rows = machine(), []
        console.say(
            f"{about['device']}, {about['threads']} threads, torch {about['torch']}: products of matrices "
            f"{about['flops_float32'] / 1e9:.0f} GFLOP/s (bfloat16 {about['flops_bfloat16'] / 1e9:.0f}), "
            f"memory {about['bytes_per_second'] / 1e9:.1f} GB/s."
        )
        for part in given.parts or PARTS:
            print(f"Measuring: {part}", file=sys.stderr, flush=True)
            own = measured(part, given.rounds, about)
            rows += own
            console.say(table(own))
            if given.output:  # after each part, so that what was measured is kept
                given.output.mkdir(parents=True, exist_ok=True)
                write_json(given.output / "bench.json", {"machine": about, "rows": [row.plain() for row in rows]})
        if given.output:
            for path in draw(rows, about, given.output):
                console.say(str(path))

    run_command(command)


if __name__ == "__main__":
    main()
