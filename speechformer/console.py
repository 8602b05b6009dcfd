"""What a run says on the terminal, as text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

STEERING = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def say(text: str) -> None:
    """Print a line; if nobody reads any more (`| head`), the run goes on in silence. What would steer a terminal is
    left out."""
    try:
        print(text.translate(STEERING), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def above(text: str) -> str:
    """What puts a terminal's cursor back to where `text` began, to write over it; a blank line in a file."""
    if not sys.stdout.isatty():
        return "\n"
    width = shutil.get_terminal_size().columns
    rows = sum(max(1, -(-len(line) // width)) for line in text.splitlines())
    return f"\x1b[{rows}A\x1b[J"


def format_metric(name: str, value: float | None) -> str:
    """Format a metric: fractions in per cent; ratios, and perplexities below 10, with two decimals; else one."""
    if value is None:
        return "-"
    if "accuracy" in name or "exact" in name:
        return f"{100 * value:.1f} %"
    if "ratio" in name or ("perplexity" in name and value < 10):
        return f"{value:.2f}"
    return f"{value:.1f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if k else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


def parameters_line(parameters: dict[str, int]) -> str:
    parts = " + ".join(f"{part} {count:,}" for part, count in parameters.items() if part != "total")
    return f"Parameters: {parameters['total']:,} = {parts}"


def busy_line(threads: int, free: int) -> str:
    return (
        f"Others keep the cores busy: {threads} threads will mostly wait for each other, and can take several "
        f"times as long as threads={free}."
    )


def summary(result: dict[str, Any]) -> str:
    """Return the console's text at the end of a run: its summary, the checkpoint behind it, and the time."""
    if not result["metrics"]:
        return (
            f"The run DIVERGED: the loss was NaN or infinite at step {result['steps']}, and training stopped there; "
            f"try a lower recipe.lr.\n{result['seconds']:.1f} s."
        )
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in result["seconds_by_phase"].items())
    best = result["best"]
    best_line = f"best {best['metric']}, {format_metric(best['metric'], best['value'])} at step {best['step']}"
    if best["chosen_on"] == "test":
        which = f"These metrics are of last.ckpt. best.ckpt has the {best_line}; selected on test, it is optimistic."
    else:
        which = f"These metrics are of best.ckpt: the {best_line}."
        if result["config"]["task"].get("average_checkpoints", 1) > 1:
            own = format_metric(best["metric"], result["metrics"][best["metric"]])
            which = f"These metrics are of average.ckpt, with {own} on validation; best.ckpt has the {best_line}."
    if result["status"] == "diverged":
        which = "The run DIVERGED: weights or metrics are NaN or infinite; try a lower recipe.lr."
    return (
        f"{table(result['summary'])}\n{which}\n"
        f"{result['seconds']:.1f} s: {phases}; {result['tokens_per_second']:,.0f} tokens/s in training."
    )
