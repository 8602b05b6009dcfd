"""Console output: log lines, tables and formatted metrics.

The package logs to the logger `speechformer`, which writes plain lines to stdout. To hide them in your own program,
call `logging.getLogger("speechformer").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL_CHARACTERS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
LOGGER = logging.getLogger("speechformer")


class ConsoleHandler(logging.Handler):
    """A handler that writes to the stdout of the moment, so that redirecting `sys.stdout` works."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; discard all output from then on if the reader has gone (`| head`)."""
        try:
            print(self.format(record), flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


CONSOLE = ConsoleHandler()
LOGGER.addHandler(CONSOLE)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # a program that configures the root logger would print each line twice


def say(text: str) -> None:
    """Log a line at level INFO, without the control characters that could steer a terminal."""
    LOGGER.info(text.translate(CONTROL_CHARACTERS))


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


def format_metric(name: str, value: float | None) -> str:
    """Format a metric: accuracies in percent, ratios and perplexities below 10 with two decimals, others with one.

    Args:
        name: The metric's name, which decides the format.
        value: Its value; an accuracy is a fraction between 0 and 1.
    """
    if value is None:
        return "-"
    if "accuracy" in name or "exact" in name:
        return f"{100 * value:.1f} %"
    if "ratio" in name or ("perplexity" in name and value < 10):
        return f"{value:.2f}"
    return f"{value:.1f}"


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n independent trials. Wilson 1927."""
    from scipy.stats import binomtest

    interval = binomtest(round(share * n), n).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as aligned text: the first column flush left, the others flush right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if k else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


def corpus_line(corpus: dict[str, Any]) -> str:
    """Which corpus this is, and how much of the test the training has seen."""
    counts = corpus["counts"]
    if "languages" in corpus:
        return pairs_line(corpus)
    held_out = f", chooses on {counts['validation']}" if counts["validation"] else ""
    seen = counts["test_in_train"]
    return (
        f"Corpus {corpus['name']} ({corpus['where']}): trains on {counts['train']} lines{held_out}, tests on "
        f"{counts['test']}, of which {seen} ({100 * seen / counts['test']:.1f} %) stand word for word in train and "
        f"{counts['test_nearly_in_train']} nearly"
        f"{f'; cut at block_size: {cut}' if (cut := counts['cut_at_block_size']) else ''}."
    )


def pairs_line(corpus: dict[str, Any]) -> str:
    """Which parallel corpus this is, what was left out of it, and how much of a batch is padding."""
    counts = corpus["counts"]
    reasons = {
        **counts["cleaned"],
        "test": counts["removed_from_train"],
        "block_size": counts["longer_than_block_size"],
    }
    left_out = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count) or "none"
    padding = ", ".join(f"{100 * share:.1f} % of the {side}" for side, share in counts["padding"].items())
    return (
        f"Corpus {corpus['name']}, {' to '.join(corpus['languages'])} ({corpus['where']}): trains on "
        f"{counts['train']} of {counts['read']} pairs (left out: {left_out}), chooses on {counts['validation']}, "
        f"tests on {counts['test']}, of whose sources {counts['test_in_train']} stand in train"
        f"{f'; cut at block_size: {cut}' if (cut := counts['cut_at_block_size']) else ''}. "
        f"Vocabulary {counts['vocabulary']}; padding: {padding}."
    )


def parameters_line(parameters: dict[str, int]) -> str:
    """Return the line with the number of parameters, in total and of each part."""
    parts = " + ".join(f"{part} {count:,}" for part, count in parameters.items() if part != "total")
    return f"Parameters: {parameters['total']:,} = {parts}"


def busy_line(threads: int, free: int) -> str:
    """Return the warning of a run whose threads outnumber the free cores."""
    return (
        f"Others keep the cores busy: {threads} threads will mostly wait for each other. Set threads={free}, which "
        "can be several times faster."
    )


def baselines(results: list[dict[str, Any]]) -> str:
    """The figures of some baselines, side by side."""
    names = [name for name in results[0]["metrics"] if any(result["metrics"][name] is not None for result in results)]
    names = [name for name in names if "_interval" not in name]
    rows: list[tuple[str, ...]] = [("", *(result["baseline"]["name"] for result in results))]
    for name in names:
        values = (result["metrics"][name] for result in results)
        rows.append((name, *("-" if value is None else format_metric(name, value) for value in values)))
    return table(rows)


def summary(result: dict[str, Any]) -> str:
    """The table at the end of a run."""
    metrics, counts = result["metrics"], result["corpus"]["counts"]
    if not metrics:
        return (
            f"The run DIVERGED: the loss was NaN or infinite at step {result['steps']}, and training stopped there; "
            f"try a lower recipe.lr.\n{result['seconds']:.1f} s."
        )
    rows: list[tuple[str, ...]]
    if result["task"] == "translate":
        rows = [("test", "BLEU", "95 % interval", "chrF", "length ratio", "exact", "sentences")]
        parts = {"all": ("", counts["test"])}
        parts |= {f"  {name} words": (f"_at_{name}", n) for name, n in counts["test_by_length"].items() if n}
        for label, (part, n) in parts.items():
            value, half = metrics[f"test_bleu{part}"], metrics.get(f"test_bleu_interval{part}")
            interval = "" if half is None else f"± {half:.1f}"
            others = (
                format_metric(name, metrics[f"test_{name}{part}"]) for name in ("chrf", "length_ratio", "exact")
            )
            rows.append((label, format_metric("bleu", value), interval, *others, str(n)))
        copy = (format_metric("bleu", metrics["copy_bleu"]), "", format_metric("chrf", metrics["copy_chrf"]))
        rows.append(("the source, untranslated", *copy, "", "", ""))
    elif result["task"] == "classify":
        rows = [("accuracy", "", "95 % interval", "sentences")]
        names = {
            "train": ("train_accuracy", counts["train"]),
            "validation": ("validation_accuracy", counts["validation"]),
            "test": ("test_accuracy", counts["test"]),
        }
        if counts["test_in_train"]:
            names["  that stand in train"] = ("test_accuracy_in_train", counts["test_in_train"])
            names["  that do not"] = ("test_accuracy_not_in_train", counts["test"] - counts["test_in_train"])
        for label, (name, n) in names.items():
            if metrics.get(name) is not None:
                low, high = wilson(metrics[name], n)
                interval = f"{100 * low:.1f} - {100 * high:.1f} %"
                rows.append((label, format_metric(name, metrics[name]), interval, str(n)))
        rows.append(("always the commonest class", format_metric("accuracy", metrics["majority_accuracy"]), "", ""))
    else:
        rows = [("perplexity", "in blocks", "sliding window", "tokens")]
        for name in metrics:
            if name.endswith("_perplexity"):
                rows.append((name.removesuffix("_perplexity"), format_metric(name, metrics[name]), "", ""))
        for name, test in counts["tests"].items():
            blocks, sliding = (metrics[f"{how}_perplexity_{name}"] for how in ("test", "test_sliding"))
            rows.append((f"test {name}", format_metric("", blocks), format_metric("", sliding), str(test["tokens"])))
        blocks, sliding = (metrics[f"{how}_perplexity_mean"] for how in ("test", "test_sliding"))
        rows.append(("test mean", format_metric("", blocks), format_metric("", sliding), ""))
        for length in result["config"]["task"]["lengths"]:
            value = metrics.get(f"test_length_{length}_perplexity_mean")
            said = "out of reach" if value is None else format_metric("", value)
            rows.append((f"  in contexts of {length}", said, "", ""))
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in result["seconds_by_phase"].items())
    best = result["best"]
    best_line = f"best {best['metric']}, {format_metric(best['metric'], best['value'])} at step {best['step']}"
    if best["chosen_on"] == "test":
        which = f"These figures are last.ckpt's. best.ckpt has the {best_line}: chosen on test, so it flatters."
    else:
        which = f"These figures are best.ckpt's: the {best_line}."
        if result["config"]["task"].get("average_checkpoints", 1) > 1:
            own = format_metric(best["metric"], metrics[best["metric"]])
            which = f"These figures are average.ckpt's, with {own} on dev; best.ckpt has the {best_line}."
    if result["status"] == "diverged":
        which = "The run DIVERGED: weights or figures are NaN or infinite, and mean nothing; try a lower recipe.lr."
    return (
        f"{table(rows)}\n{which}\n"
        f"{result['seconds']:.1f} s: {phases}; {result['tokens_per_second']:,.0f} tokens/s in training."
    )
