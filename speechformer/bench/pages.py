"""Fill the results into a page: `python -m speechformer.bench.pages BENCH_JSON PAGE ...`.

The page holds templates as for `speechformer.report.pages`; their functions are the methods of `Results`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from speechformer.bench.attention import VARIANTS, bias_of
from speechformer.bench.plots import Fit, fits
from speechformer.bench.timing import Comparison, format_seconds
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.kernels.dispatch import choose_kernel
from speechformer.report.pages import short_commit, update
from speechformer.runs.folder import read_json

NAMES = {
    "classify": "classifier",
    "lm": "language model",
    "report": "reports' size",
    "large": "512 wide, 1,024 tokens",
}
LIBRARY = "times as fast as local-attention"
LONG = (
    "attention_table",
    "unmasked",
    "attention_goals",
    "attention_slopes",
    "sparse_rule",
    "long_table",
    "doubled",
    "stream",
    "corpus_table",
    "corpus_goals",
    "slope_goals",
)
GPU = ("gpu_table", "batch_table", "gpu_rule", "side_table", "large_rate")


def rows_with_machine(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a bench.json. Older files name the machine once; then each row gets it."""
    rows: list[dict[str, Any]] = content["rows"]
    for row in rows if "machine" in content else ():
        row["more"].setdefault("machine", content["machine"])
    return rows


class Rows:
    """What templates can show of a `bench.json`.

    Raises:
        UserError: by a method, if what it shows has not been measured.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        fields = ("part", "what", "unit", "seconds", "more")
        rows = rows_with_machine(content)
        self.rows = [Comparison(*(row[name] for name in fields)) for row in rows]
        self.commits = {row.part: own.get("commit") for row, own in zip(self.rows, rows)}

    def of(self, part: str, start: str = "") -> list[Comparison]:
        """Return the rows of the parts that begin with `part`, of what begins with `start`."""
        rows = [row for row in self.rows if row.part.startswith(part) and row.what.startswith(start)]
        if not rows:
            raise UserError(f"bench.json has no result of {part}{', ' * bool(start)}{start}.")
        return rows

    def machine(self, part: str) -> str:
        """Return the processor of the parts that begin with `part`, and the version of torch."""
        about = [row.more["machine"] for row in self.of(part)]
        names = dict.fromkeys(f"{own['device']}, torch {own['torch']}" for own in about)
        return " and ".join(names)

    def commit(self, part: str) -> str:
        """Return the commit of a part, or those of its rows."""
        return " and ".join(dict.fromkeys(short_commit(self.commits[row.part]) for row in self.of(part)))


GOALS = {("report", "classify, training step"): 1.5, ("report", "lm, training step"): 1.3}  # else 1


BLOCK_GOALS = {  # of blocks at 4,096 tokens, in times as fast as a dense mask
    "window 64": 15,
    "window 256": 6,
    "block 64": 12,
    "global and window 64": 8,
    "bigbird and window 64": 6,
    "strided 64": 6,
    "dilated 64": 6,
}


class AttentionRows(Rows):
    """What templates can show of `bench attention`."""

    def attention_table(self, tokens: int) -> str:
        """Return the table of patterns at a length: blocks against a dense mask and a library."""
        lines = [["pattern", "blocks", "dense mask", "times as fast", "memory held", "of a dense mask", LIBRARY]]
        for row in self.of(f"attention, {tokens} tokens"):
            ours, dense, library = (
                row.seconds.get(name) for name in ("sparse blocks", "dense mask", "local_attention")
            )
            if ours and dense:
                held = row.more["bytes"]
                memory = [f"{held[name] / 2**20:.0f} MiB" for name in ("sparse blocks", "dense mask")]
                faster = f"{library / ours:.1f}" if library else ""
                times = [*map(format_seconds, (ours, dense)), f"{dense / ours:.1f}"]
                lines.append([row.what, *times, *memory, faster])
        return markdown(lines)

    def unmasked(self, tokens: int) -> str:
        """Return the time and the memory of full attention without a mask at a length."""
        (row,) = self.of(f"attention, {tokens} tokens", "full")
        name = "SDPA without mask"
        return f"{format_seconds(row.seconds[name])} and {row.more['bytes'][name] / 2**20:.0f} MiB"

    def attention_goals(self, tokens: int) -> str:
        """Return the goals of blocks, in times as fast as a dense mask, and which ones are missed."""
        missed = []
        for what, goal in BLOCK_GOALS.items():
            (row,) = self.of(f"attention, {tokens} tokens", what)
            ratio = row.seconds["dense mask"] / row.seconds["sparse blocks"]
            missed += [f"{what} ({ratio:.1f})"] if ratio < goal else []
        goals = ", ".join(f"{goal} ({what})" for what, goal in BLOCK_GOALS.items())
        return f"The goals were {goals} times as fast as a dense mask; missed: {', '.join(missed) or 'none'}"

    def attention_slopes(self, *patterns: str) -> str:
        """Return the table of the exponents of time and memory over the length, of blocks and of a dense mask."""
        lines = [["pattern", "kernel", "time, tokens", "memory, tokens"]]
        for what in patterns:
            for name in ("sparse blocks", "dense mask"):
                power_laws = self.fits(what, name)
                cells = [f"{fit}, {fit.tokens[0]:,} to {fit.tokens[1]:,}" for fit in power_laws["memory"]]
                (time,) = power_laws["time"]
                lines.append([what, name, f"{time}, {time.tokens[0]:,} to {time.tokens[1]:,}", "; ".join(cells)])
        return markdown(lines)

    def fits(self, what: str, name: str) -> dict[str, list[Fit]]:
        """Return the power laws of time and of memory of a kernel over the length."""
        return fits([row for row in self.of("attention", what) if name in row.seconds], name)

    def slope_goals(self, *patterns: str) -> str:
        """Return which exponents of blocks miss the goal of 1 ± 0.15."""
        missed = [
            f"{measure} of {what} ({fit})"
            for what in patterns
            for measure, power_laws in self.fits(what, "sparse blocks").items()
            for fit in power_laws
            if abs(fit.power - 1) > 0.15
        ]
        return f"The goal of blocks was 1.00 ± 0.15; outside: {', '.join(missed) or 'none'}"

    def sparse_rule(self) -> str:
        """Return what the rule of the dispatcher costs and gains, in all rows that have both kernels."""
        ratios: dict[bool, list[float]] = {True: [], False: []}
        for row in self.of("attention"):
            if {"sparse blocks", "dense mask"} <= {*row.seconds}:
                taken = row.more["chosen"] == "sparse blocks"
                ratios[taken].append(row.seconds["dense mask"] / row.seconds["sparse blocks"])
        taken, left = ratios[True], ratios[False]
        return (
            f"where the rule takes blocks ({len(taken)} rows), they are {min(taken):.1f} to {max(taken):.0f} times "
            f"as fast as a dense mask; where it does not ({len(left)}), {min(left):.1f} to {max(left):.1f} times"
        )


class LongTexts(AttentionRows):
    """What templates can show of long texts."""

    def long_table(self) -> str:
        """Return the table of training steps over long texts."""
        lines = [["a training step of", "time", "peak of memory"]]
        for row in self.of("a long text"):
            lines.append([row.what, format_seconds(row.seconds["speechformer"])])
            lines[-1].append(f"{row.more['peak_bytes'] / 1e9:.1f} GB")
        return markdown(lines)

    def doubled(self, pattern: str, tokens: int, goal: float) -> str:
        """Return how many times the time of half as many tokens a training step takes: the median of rounds."""
        from scipy.stats import quantile_test

        longer, shorter = (
            row.more["rounds"]
            for size in (tokens, tokens // 2)
            for row in self.of("a long text", f"lm, 512 wide, 6 layers, {pattern}, {size:,}")
        )
        ratios = [one / other for one, other in zip(longer, shorter, strict=True)]
        low, high = quantile_test(ratios).confidence_interval(0.95)  # NaN with fewer than six rounds
        result = "met" if high <= goal else "missed" if low > goal else "too close to tell"
        interval = f"95 % interval {low:.2f} to {high:.2f}" if low <= high else "too few for an interval"
        median = f"{statistics.median(ratios):.2f} times (median of {len(ratios)} rounds, {interval}"
        return f"{median}; the goal of {goal:g}: {result})"

    def corpus_table(self) -> str:
        """Return the table of runs on a large text: tokenizing it, starting on it, and 100 steps."""
        units = ("start", "100 steps, training", "100 steps, evaluation")
        lines = [["tokens", "first start", "MB a second and core", "peak of memory"]]
        lines[0] += [f"{unit} (on the sample)" for unit in units]
        for first in self.of("a large text"):
            if first.unit != "first start":
                continue
            (seconds,), more = first.seconds.values(), first.more
            speed = more["text_bytes"] / 1e6 / seconds / more["cores"]
            line = [first.what, format_seconds(seconds), f"{speed:.1f}", f"{more['peak_bytes'] / 1e9:.1f} GB"]
            for unit in units:
                (row,) = (row for row in self.of("a large text", first.what) if row.unit == unit)
                line.append("{} ({})".format(*map(format_seconds, row.seconds.values())))
            lines.append(line)
        return markdown(lines)

    def corpus_goals(self) -> str:
        """Return whether the goals of `bench corpus` are met: 4 MB a second and core, 100 steps within 10 %."""
        speeds, slower, missed = [], [], []
        for row in self.of("a large text"):
            name = row.what.partition(",")[0]
            if row.unit == "first start":
                (seconds,), more = row.seconds.values(), row.more
                speeds.append(more["text_bytes"] / 1e6 / seconds / more["cores"])
            elif row.unit == "100 steps, training":
                ratios = [1 / row.ratio] if row.ratio else []  # time on the text by time on the sample
                ratios += [1 / bound for bound in reversed(row.interval or ())]
                percent, *interval = (f"{100 * (ratio - 1):+.0f}".replace("-", "−") for ratio in ratios)
                slower.append(f"{percent} % ({', '.join([name, ' to '.join(interval)]).removesuffix(', ')})")
                missed += [name] if ratios[0] > 1.1 else []
        return (
            f"The goal of 4 MB a second and core is {'met' if min(speeds) >= 4 else 'missed'}. Against the sample, "
            f"100 steps of training take {', '.join(slower)}; the goal of at most +10 % is missed by: "
            f"{', '.join(missed) or 'none'}"
        )

    def stream(self) -> str:
        """Return what generating a long text takes at its end, compared with its beginning."""
        (row,) = self.of("a stream")
        last, first = row.seconds.values()
        return (
            f"{1000 * first:.2f} ms for each of the first 10,000 tokens and {1000 * last:.2f} ms for each of the "
            f"last 10,000; {row.more['cache_bytes'] / 1e6:.1f} MB of cache, and {row.more['added_bytes'] / 1e6:.1f} "
            f"MB more memory at the end than after the first 10,000"
        )


class GpuRows(LongTexts):
    """What templates can show of `bench gpu`."""

    def gpu_table(self, tokens: int) -> str:
        """Return the table of patterns at a length on a GPU; what did not fit into its memory is empty."""
        names = ("FlexAttention", "dense mask", "blocks")
        lines = [["pattern", *names, *(f"memory, {name}" for name in names), "chosen"]]
        for row in self.of(f"attention, {tokens} tokens"):
            own = (*names[:2], "sparse blocks" if "sparse blocks" in row.seconds else "query blocks")
            times = [format_seconds(row.seconds[name]) if name in row.seconds else "" for name in own]
            held = [row.more["bytes"].get(name) for name in own]
            memory = ["" if count is None else f"{count / 2**20:,.0f} MiB" for count in held]
            lines.append([row.what, *times, *memory, chosen_on_gpu(row)])
        return markdown(lines)

    def batch_table(self, tokens: int) -> str:
        """Return the table of kernels in batches of sequences of a length."""
        names = ("FlexAttention", "dense mask")
        rows = [row for row in self.of("batches") if row.more["tokens"] == tokens and {*names} <= {*row.seconds}]
        lines = [["pattern", "sequences", *names, "chosen"]]
        for row in sorted(rows, key=lambda row: (row.what, row.more["batch"])):
            times = (format_seconds(row.seconds[name]) for name in names)
            lines.append([row.what, str(row.more["batch"]), *times, chosen_on_gpu(row)])
        return markdown(lines)

    def gpu_rule(self) -> str:
        """Return what the rule of the dispatcher gains and costs on a GPU, in rows that have its kernel."""
        gains: dict[str, list[float]] = {}
        behind = []
        for row in (own for own in self.rows if own.part.startswith(("attention", "batches"))):
            ours, dense = chosen_on_gpu(row), row.seconds.get("dense mask")
            if ours in row.seconds and dense:
                gains.setdefault(ours, []).append(dense / row.seconds[ours])
                fastest = min(row.seconds, key=row.seconds.__getitem__)
                ratio = row.seconds[ours] / row.seconds[fastest]
                size = f"{row.more.get('batch', 1)} x {row.more['tokens']:,} tokens"
                behind += [f"{row.what} over {size} ({fastest}, {ratio:.2f} times)"] * (ratio > 1)
        faster = [
            f"{name} {span(own)} times (rows: {len(own)})" for name, own in gains.items() if name != "dense mask"
        ]
        return (
            f"Where the rule takes another kernel, this is faster than a dense mask: {', '.join(faster)}. It takes a "
            f"dense mask in {len(gains.get('dense mask', []))} rows. Another kernel is faster in: "
            f"{', '.join(behind) or 'none'}"
        )

    def side_table(self, part: str) -> str:
        """Return the table of the sides of a part."""
        rows = self.of(part)
        lines = [["", *rows[0].seconds, "times as fast"]]
        for row in rows:
            task, _, what = row.what.partition(", ")
            lines.append([f"{NAMES[task]}, {what}", *map(format_seconds, row.seconds.values()), row.formatted_ratio])
        return markdown(lines)

    def large_rate(self) -> str:
        """Return the time of the large model's step, its tokens, and its share of the rate of matrix products."""
        (row,) = self.of("a large model")
        seconds, rate = row.seconds["speechformer"], row.more["machine"]["flops_bfloat16"]
        flops = row.more["flops_of_step"] / seconds
        return (
            f"{format_seconds(seconds)} for {row.more['tokens_per_second'] * seconds:,.0f} tokens, "
            f"{row.more['tokens_per_second']:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s. "
            f"A matrix product of 8,192 x 8,192 runs at {rate / 1e12:.0f} TFLOP/s; "
            f"the step has {100 * flops / rate:.0f} % of this rate"
        )


def span(values: list[float]) -> str:
    """Return the smallest and the largest of some values."""
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


cached_bias = functools.cache(bias_of)  # so that each pattern is looked at once


def chosen_on_gpu(row: Comparison) -> str:
    """Return the kernel that the dispatcher chooses today for a row of patterns on a GPU with Triton."""
    bias = dataclasses.replace(cached_bias(VARIANTS[row.what], row.more["tokens"]), B=row.more.get("batch", 1))
    kernel = choose_kernel(bias, torch.device("cuda"), 0.0, with_weights=False, has_triton=True)
    return {"SDPA": "dense mask"}.get(kernel, kernel)


class Results(GpuRows):
    """What templates can show of everything."""

    def functions(self) -> dict[str, Any]:
        """Return the functions by name."""
        shown = ("machine", "goals", "steps_table", "settings_table", "changed_table", "ratio", "overheads_table")
        return {
            name: getattr(self, name) for name in (*shown, "threads_table", "threads_ratio", "commit", *LONG, *GPU)
        }

    def ratio(self, size: str, what: str) -> str:
        """Return a ratio of steps with its interval, such as of ("report", "lm, training step")."""
        return self.of(f"steps, {size}", what)[0].formatted_ratio

    def goals(self) -> str:
        """Return the goals of the ratios of steps, which were missed, and which lie within the interval."""
        aims = [(row, GOALS.get((row.part.removeprefix("steps, "), row.what), 1.0)) for row in self.of("steps")]
        special = " and ".join(f"{goal} ({name_of(row)})" for row, goal in aims if goal != 1)
        missed: list[str] = []
        unsure: list[str] = []
        for row, goal in aims:
            low, high = row.interval or (row.ratio, row.ratio)
            if low is not None and high is not None and low < goal:
                (missed if high < goal else unsure).append(f"{name_of(row)} ({row.ratio:.2f})")
        listed = f"missed: {'; '.join(missed) or 'none'}. Too close to tell: {'; '.join(unsure) or 'none'}"
        return f"The goals were {special}, and 1.0 elsewhere; {listed}."

    def steps_table(self) -> str:
        """Return the table of times, ratios with intervals, and limits."""
        rows = self.of("steps")
        lines = [["", *rows[0].seconds, "times as fast", "limit"]]
        for row in rows:
            times = [*map(format_seconds, row.seconds.values())]
            lines.append([name_of(row), *times, row.formatted_ratio, format_seconds(row.limit or 0)])
        return markdown(lines)

    def settings_table(self) -> str:
        """Return the table of the peers' fastest settings."""
        rows = self.of("steps")
        peers = [*rows[0].more["changed"]]
        lines = [[name_of(row), *(row.more["settings"][peer] for peer in peers)] for row in rows]
        return markdown([["fastest setting", *peers], *lines])

    def changed_table(self) -> str:
        """Return the table of what the peers' own options do not offer."""
        changed = self.of("steps")[0].more["changed"]
        lines = ([name, what] for name, what in changed.items())
        return markdown([["alternative", "changed to compute the same"], *lines])

    def overheads_table(self) -> str:
        """Return the table of what a run costs besides its training steps."""
        what = [
            "a step in the Trainer, with logging and checkpoints",
            "a step in a bare loop",
            "the Trainer's share",
            "from the command to the first step",
            "importing torch and lightning alone",
            "a run in a sweep, besides its training",
            "a whole command:",
            "from the command to the last line",
        ]
        columns = [["", *what]]
        for task in ("classify", "lm"):
            steps, starts = (self.of(part, task)[0].seconds.values() for part in ("the Trainer's loop", "start-up"))
            (whole,), sweep = self.of("start to end", task), self.of("a run of a sweep")[0]
            trainer, bare = steps
            share = f"{100 * (trainer / bare - 1):.0f} %"
            own = format_seconds(sweep.seconds["overhead"]) if sweep.what.startswith(task) else ""
            times = [*map(format_seconds, steps), share, *map(format_seconds, starts), own]
            command = f"`{whole.what.removeprefix(task + ', ')}`"
            columns.append([NAMES[task], *times, command, format_seconds(whole.seconds["speechformer"])])
        return markdown([list(line) for line in zip(*columns)])

    def threads_table(self) -> str:
        """Return the table of the time of a step beside busy processes, by number of threads."""
        rows = self.of("threads")
        sides = [*rows[0].seconds]
        lines = [["", *sides]]
        for row in rows:
            task, _, busy = row.what.partition(", ")
            lines.append([f"{NAMES[task]}, {busy}", *map(format_seconds, row.seconds.values())])
        return markdown(lines)

    def threads_ratio(self) -> str:
        """Return the largest ratio of a run's own choice to the best fixed number, with load from the start on."""
        rows = [row for row in self.of("threads") if "middle" not in row.what]
        return f"{max(1 / (row.ratio or 1) for row in rows):.2f}"


def name_of(row: Comparison) -> str:
    """Return the name of a row of steps for readers."""
    task, what = row.what.split(", ")
    return f"{NAMES[task]}, {NAMES[row.part.removeprefix('steps, ')]}, {what}"


def markdown(lines: list[list[str]]) -> str:
    """Format a table, whose first line is its head."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser("python -m speechformer.bench.pages", description=__doc__)
    parser.add_argument("results", type=Path, metavar="BENCH_JSON")
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    run_command(lambda: fill(arguments.results, arguments.pages))


def fill(results: Path, pages: list[Path]) -> None:
    """Render pages in place."""
    content = read_json(results)
    if content is None:
        raise UserError(
            f"{results}: there is no such file. Make it with python -m speechformer.bench --output FOLDER."
        )
    functions = Results(content).functions()
    for page in pages:
        update(page, functions)


if __name__ == "__main__":
    main()
