"""Measure speed, side by side with the alternatives: `python -m speechformer.bench [PART ...]`.

    steps        a training step and an evaluation, against torch.nn.TransformerEncoder and x-transformers
    loop         the Trainer's loop against a bare loop
    attention    time and memory by length, for each position, pattern and kernel
    long         a training step of a larger decoder over long texts, and its memory
    corpus       a text of a gigabyte: tokenizing it, starting on it, and steps on it
    startup      from the command to the first step, against importing torch and lightning
    sweep        the overhead of a run in a sweep
    ensemble     an ensemble of 8 runs, or 32 on a GPU, against the first 8 in sequence
    whole        from the command to its last line
    threads      the number of threads that a run chooses against fixed ones, on idle and on busy cores
    gpu          what needs a GPU: its parts patterns, compiled, precision and large, and the ensemble
    translation  the encoder-decoder; takes the overrides of a run, and --run

Without PART, all but corpus and the last three lines. Where possible, the sides take turns in one process, so that
other load on the machine affects all of them. Times are medians. A ratio says how many times as fast the first side
is as the fastest other; it has a 95 % interval over processes for steps and translation, and over turns for a large
text. A peer's time is that of its fastest setting. In the folder --output, results of other parts stay; each names
its machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from speechformer import console
from speechformer.bench import attention, corpus, long, runs, steps, translation
from speechformer.bench.gpu import GPU_PARTS
from speechformer.bench.pages import Results, rows_with_machine
from speechformer.bench.plots import draw
from speechformer.bench.timing import Comparison, machine, table
from speechformer.corpora.files import OutputFolder
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.runs import identity
from speechformer.runs.folder import read_json, write_json

PARTS: dict[str, Callable[[int], list[Comparison]]] = {  # functions of the rounds
    "steps": steps.bench_steps,  # and of the processes
    "loop": runs.bench_loop,
    "attention": lambda rounds: attention.bench_attention(fewer(rounds)),
    "long": lambda rounds: long.bench_long(fewer(rounds)),
    "corpus": lambda rounds: corpus.bench_corpus(fewer(rounds)),
    "startup": lambda rounds: runs.bench_startup(fewer(rounds)),
    "sweep": lambda rounds: runs.bench_sweep(),
    "ensemble": lambda rounds: runs.bench_ensemble(*((32, 8) if torch.cuda.is_available() else (8, 8))),
    "whole": lambda rounds: runs.bench_whole(),
    "threads": lambda rounds: runs.bench_threads(),
    **GPU_PARTS,
}
LONG = ("corpus", "threads", *GPU_PARTS)  # parts that must be named
RENAMED = {"packed": "ensemble"}  # parts of an earlier version


def fewer(rounds: int) -> int:
    """Return the rounds of a part whose measurements take long."""
    return max(1, rounds // 3)


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["translation"]:
        del sys.argv[1]
        translation.main()
        return
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser("python -m speechformer.bench", description=__doc__, formatter_class=formatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, gpu; or translation alone")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side (%(default)s)")
    parser.add_argument("--processes", type=int, default=5, help="that measure the steps (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder for bench.json and the plots")
    arguments = parser.parse_args()
    run_command(lambda: bench(arguments.parts, arguments.rounds, arguments.processes, arguments.output))


def bench(parts: list[str], rounds: int, processes: int, output: Path | None) -> None:
    """Measure and print some parts; write bench.json and the plots into the folder `output`."""
    for part in parts:
        if part in RENAMED:
            raise UserError(f"part {part} is now {RENAMED[part]}.")
        if part not in (*PARTS, "gpu"):
            raise UserError(f"there is no part {part}; valid are {', '.join(PARTS)}, gpu, and translation alone.")
    if min(rounds, processes) < 1:
        raise UserError("--rounds and --processes must be at least 1.")
    named = [own for part in parts for own in ([*GPU_PARTS, "ensemble"] if part == "gpu" else [part])]
    chosen = [*dict.fromkeys(named)] or [part for part in PARTS if part not in LONG]
    if not torch.cuda.is_available() and (on_gpu := [part for part in chosen if part in GPU_PARTS]):
        raise UserError(f"there is no CUDA device here, which the bench needs for: {', '.join(on_gpu)}.")
    written = OutputFolder(output) if output else None
    if written:  # before anything is measured
        written.file("bench.json")
    runs.prepare()
    about, rows = machine(), []
    console.say(
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}: matrix products "
        f"{about['flops_float32'] / 1e9:.0f} GFLOP/s (bfloat16 {about['flops_bfloat16'] / 1e9:.0f}), "
        f"memory {about['bytes_per_second'] / 1e9:.1f} GB/s."
    )
    before = earlier(written.file("bench.json"), chosen) if written else []
    for part in chosen:
        console.warn(f"Measuring: {part}")
        if part == "steps":
            comparisons = steps.bench_steps(rounds, processes)
        else:
            comparisons = PARTS[part](fewer(rounds) if part in GPU_PARTS else rounds)
        for row in comparisons:
            row.more["machine"] = about
        console.say(table(comparisons))
        rows += [{**asdict(row), **described(row), "measured_by": part} for row in comparisons]
        if written:  # after each part, so that an interruption loses no measurement
            write_json(written.file("bench.json"), {"rows": before + rows})
    for path in draw(Results({"rows": before + rows}).rows, written) if written else []:
        console.say(str(path))


def described(row: Comparison) -> dict[str, Any]:
    """Return what bench.json says of a row besides its fields."""
    return {"ratio": row.ratio, "interval": row.interval, "commit": identity.commit()}


def earlier(path: Path, parts: list[str]) -> list[dict[str, Any]]:
    """Return the rows in a bench.json, without those of parts that are measured again."""
    rows = rows_with_machine(read_json(path) or {"rows": []})
    return [row for row in rows if row.get("measured_by") not in (None, *parts)]  # None: of an older version


if __name__ == "__main__":
    main()
