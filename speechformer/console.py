"""Console output: log lines, tables and formatted metrics.

The package logs to the logger `speechformer`, which writes plain lines to stdout. To hide them in your own program,
call `logging.getLogger("speechformer").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from speechformer.escape import plain

LOGGER = logging.getLogger("speechformer")


@contextlib.contextmanager
def discarding(name: str) -> Iterator[None]:
    """Replace `sys.stdout` or `sys.stderr` with the null device if it cannot be written, and raise that error."""
    try:
        yield
    except OSError:
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        raise


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flush stdout after the block, also if it exits, as argparse does after `--help`."""
    with discarding("stdout"):
        try:
            yield
        finally:
            sys.stdout.flush()


def open_streams() -> None:
    """Open those of the standard streams that the caller has closed (`2>&-`) on the null device, also for workers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in order: each gets its number
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


class ConsoleHandler(logging.Handler):
    """A handler that writes to the stdout of the moment, so that redirecting `sys.stdout` works."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; discard all output from then on if the reader has gone (`| head`)."""
        with contextlib.suppress(BrokenPipeError), discarding("stdout"):
            print(self.format(record), flush=True)


LOGGER.addHandler(ConsoleHandler())
if LOGGER.level == logging.NOTSET:  # the program has set none
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
    """Print a line to stderr, without control characters; discard it if its reader has gone."""
    with contextlib.suppress(BrokenPipeError), discarding("stderr"):
        clear_line()
        print(plain(text), file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Return whether somebody sees stderr."""
    return sys.stderr.isatty()


def show_line(text: str) -> None:
    """Show a line that the next one replaces; through a pipe, log it."""
    if not is_terminal():
        say(text)
        return
    clear_line()
    sys.stderr.write(plain(text)[: shutil.get_terminal_size().columns - 1])
    sys.stderr.flush()


def clear_line() -> None:
    """Remove the line of `show_line`, also that of another process that shares the terminal."""
    if is_terminal():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the output of this process to a file instead of the console.

    It goes there through the file descriptors, with the warnings of libraries, messages of C++ code and the output of
    child processes. Replacing `sys.stderr` would not be enough: Lightning and torch keep the one they find when they
    are imported, and a later run of the same process would make them write to a closed file.

    Args:
        path: The log file. Its folder must exist.
    """
    with open(path, "ab") as file:
        outputs = [(stream, k, os.dup(k)) for k, stream in ((1, sys.stdout), (2, sys.stderr))]
        try:
            for stream, descriptor, _ in outputs:
                stream.flush()
                os.dup2(file.fileno(), descriptor)
            yield
        finally:
            for stream, descriptor, copy in outputs:
                stream.flush()
                os.dup2(copy, descriptor)
                os.close(copy)


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
    return tabulate(rows, tablefmt="plain", disable_numparse=True, stralign="right", colalign=("left",))


def parameters_line(parameters: dict[str, int]) -> str:
    """Return the line with the number of parameters, in total and of each part."""
    parts = " + ".join(f"{part} {count:,}" for part, count in parameters.items() if part != "total")
    return f"Parameters: {parameters['total']:,} = {parts}"


def summary(result: dict[str, Any]) -> str:
    """Return the console's text at the end of a run: its summary, the checkpoint behind it, and the time."""
    seconds, best = f"{result['seconds']:.1f} s", result["best"]
    if result["status"] == "diverged":
        early = " So early, the model itself may return NaN." if (step := result["steps"]) < 3 else ""
        return f"The run DIVERGED by step {step}: NaN or infinity. Try a lower recipe.lr.{early}\n{seconds}."
    if best["value"] is None:
        return f"{table(result['summary'])}\nNo evaluation measured {best['metric']}.\n{seconds}."
    best_line = f"the best {best['metric']}, {format_metric(best['metric'], best['value'])} at step {best['step']}"
    if best["chosen_on"] == "test":
        source = f"last.ckpt. best.ckpt has {best_line}; selected on test, it is optimistic."
    elif result["config"]["task"].get("average_checkpoints", 1) > 1:
        average = format_metric(best["metric"], result["metrics"][best["metric"]])
        source = f"average.ckpt, with {average} on validation; best.ckpt has {best_line}."
    else:
        source = f"best.ckpt: {best_line}."
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in result["seconds_by_phase"].items())
    speed = f"{result['tokens_per_second']:,.0f} tokens/s in training"
    peak = result["machine"].get("peak_bytes")
    memory = f"; at most {peak / 1e9:.1f} GB of memory" if peak else ""
    caution = f"\n{result['caution']}" if "caution" in result else ""
    shown = f"{table(result['summary'])}\nThese metrics are of {source}\n{seconds}: {phases}; {speed}{memory}."
    return shown + caution
