"""Console output: log lines, tables and formatted metrics.

The package logs to the logger `speechformer`, which writes plain lines to stdout. To hide them in your own program,
call `logging.getLogger("speechformer").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speechformer.escape import plain

LOGGER = logging.getLogger("speechformer")


class ConsoleHandler(logging.Handler):
    """A handler that writes to the stdout of the moment, so that redirecting `sys.stdout` works."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; discard all output from then on if the reader has gone (`| head`)."""
        try:
            print(self.format(record), flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Line:
    """The last line of the terminal, which the next output replaces; `shown` also where another process shows one."""

    shown = False


LINE = Line()
CONSOLE = ConsoleHandler()
LOGGER.addHandler(CONSOLE)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # a program that configures the root logger would print each line twice


def say(text: str) -> None:
    """Log a line at level INFO, without the control characters that could steer a terminal."""
    clear_line()
    LOGGER.info(plain(text))


def write(text: str, end: str = "\n") -> None:
    """Print the output of a command to stdout, without control characters."""
    print(plain(text), end=end, flush=True)


def warn(text: str) -> None:
    """Print a line to stderr, without control characters."""
    clear_line()
    print(plain(text), file=sys.stderr, flush=True)


def list_steps(steps: Sequence[int]) -> str:
    """Return steps as text; of many, the first two and the last two: "steps 0, 50, …, 350, 396"."""
    shown = [str(step) for step in steps]
    shown = shown if len(shown) <= 6 else [*shown[:2], "…", *shown[-2:]]
    return f"step{'s' if len(shown) > 1 else ''} {', '.join(shown)}"


def is_terminal() -> bool:
    """Return whether somebody sees stderr."""
    return sys.stderr.isatty()


def show_line(text: str) -> None:
    """Show a line that the next one replaces; through a pipe, log it."""
    if not is_terminal():
        say(text)
        return
    LINE.shown = True
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[K{plain(text)[:width]}")
    sys.stderr.flush()


def clear_line() -> None:
    """Remove the line of `show_line`, also that of another process that shares the terminal."""
    if LINE.shown and is_terminal():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the output of this process to a file instead of the console.

    Log lines go there through a handler. What libraries write to stdout and stderr goes there through the file
    descriptors: warnings, messages of C++ code, and child processes. Replacing `sys.stderr` would not be enough.
    Lightning and torch keep the `sys.stderr` they find when they are imported, and a later run of the same process
    would make them write to a closed file.

    Args:
        path: The log file. Its folder must exist.
    """
    with open(path, "a", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        LOGGER.removeHandler(CONSOLE)
        LOGGER.addHandler(handler)
        try:
            with redirect_descriptors(file.fileno()):
                yield
        finally:
            LOGGER.removeHandler(handler)
            LOGGER.addHandler(CONSOLE)


@contextlib.contextmanager
def redirect_descriptors(target: int) -> Iterator[None]:
    """Point this process's stdout and stderr at an open file descriptor."""
    flush()
    copies = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in copies:
            os.dup2(target, descriptor)
        yield
    finally:
        flush()
        for descriptor, copy in copies.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def flush() -> None:
    """Write out what Python has buffered for stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed file
            stream.flush()


def above(text: str) -> str:
    """Return the control sequence that moves the cursor up to the start of `text`, the last output.

    Where stdout is no terminal, return a line break.
    """
    if not sys.stdout.isatty():
        return "\n"
    width = shutil.get_terminal_size().columns
    rows = sum(max(1, -(-len(line) // width)) for line in text.splitlines())
    return f"\x1b[{rows}A\x1b[J"


def is_fraction(name: str) -> bool:
    """Return whether a metric is a fraction, which is shown in percent; the part before "_perplexity" decides.

    A ratio of two metrics, `a / b`, is not.
    """
    fraction = re.search(r"(^|_)(accuracy|exact|unknown_rate)(_|$)", name.partition("_perplexity")[0])
    return fraction is not None and " / " not in name


def format_metric(name: str, value: float | None) -> str:
    """Format a metric: fractions in percent, ratios and perplexities below 10 with two decimals, others with one.

    Args:
        name: The metric's name, which decides the format.
        value: Its value.
    """
    if value is None:
        return "-"
    if is_fraction(name):
        return f"{100 * value:.1f} %"
    if "ratio" in name or "bits_per" in name or ("perplexity" in name and value < 10):
        return f"{value:.2f}"
    return f"{value:.1f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return "\n".join(
        "  ".join(cell.rjust(width) if k else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


def parameters_line(parameters: dict[str, int]) -> str:
    """Return the line with the number of parameters, in total and of each part."""
    parts = " + ".join(f"{part} {count:,}" for part, count in parameters.items() if part != "total")
    return f"Parameters: {parameters['total']:,} = {parts}"


def summary(result: dict[str, Any]) -> str:
    """Return the console's text at the end of a run: its summary, the checkpoint behind it, and the time."""
    if not result["metrics"]:
        return (
            f"The run DIVERGED: the loss was NaN or infinite at step {result['steps']}, and training stopped there; "
            f"try a lower recipe.lr.\n{result['seconds']:.1f} s."
        )
    best = result["best"]
    best_line = f"best {best['metric']}, {format_metric(best['metric'], best['value'])} at step {best['step']}"
    if result["status"] == "diverged":
        which = "The run DIVERGED: weights or metrics are NaN or infinite; try a lower recipe.lr."
    elif best["chosen_on"] == "test":
        which = f"These metrics are of last.ckpt. best.ckpt has the {best_line}; selected on test, it is optimistic."
    elif result["config"]["task"].get("average_checkpoints", 1) > 1:
        own = format_metric(best["metric"], result["metrics"][best["metric"]])
        which = f"These metrics are of average.ckpt, with {own} on validation; best.ckpt has the {best_line}."
    else:
        which = f"These metrics are of best.ckpt: the {best_line}."
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in result["seconds_by_phase"].items())
    speed = f"{result['tokens_per_second']:,.0f} tokens/s in training"
    peak = (result.get("machine") or {}).get("peak_bytes")
    memory = f"; at most {peak / 1e9:.1f} GB of memory" if peak else ""
    return f"{table(result['summary'])}\n{which}\n{result['seconds']:.1f} s: {phases}; {speed}{memory}."
