"""Time alternatives in turns, so that other load on the machine affects all of them.

A ratio is of medians, or over several processes or turns the geometric mean of theirs, with a 95 % confidence
interval.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from speechformer import console

Side = Callable[[], float]  # does some work and returns its amount


@dataclass
class Comparison:
    """Seconds per unit of work of each side, the first of which is ours; `more` holds figures beside the times.

    After `over_processes`, `seconds` are medians, and `more["processes"]` has those of each process, or of each turn.
    Rows of a bench.json have `more["machine"]`, what `machine` said there.
    """

    part: str
    what: str
    unit: str
    seconds: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def log_ratios(self) -> list[float]:
        """The logarithm of the ratio in each process or turn; empty without another side."""
        pairs = [[*own.values()] for own in self.more.get("processes", [self.seconds])]
        return [math.log(min(others) / ours) for ours, *others in pairs if others]

    @property
    def ratio(self) -> float | None:
        """How many times as fast our side is as the fastest other; None without another."""
        return math.exp(statistics.mean(self.log_ratios)) if self.log_ratios else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % t-interval of the ratio over independent processes or turns; None with fewer than two."""
        n = len(self.log_ratios)
        if n < 2:
            return None
        from scipy.stats import t

        mean, error = statistics.mean(self.log_ratios), statistics.stdev(self.log_ratios) / math.sqrt(n)
        half = float(t.ppf(0.975, n - 1)) * error
        return math.exp(mean - half), math.exp(mean + half)

    @property
    def formatted_ratio(self) -> str:
        """The ratio with its interval."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return ratio if self.interval is None else "{} ({:.2f} to {:.2f})".format(ratio, *self.interval)

    @property
    def limit(self) -> float | None:
        """The seconds that no side can go below (roofline: Williams et al. 2009); None if unknown."""
        if "flops" not in self.more:
            return None
        machine = self.more["machine"]
        return max(self.more["flops"] / machine["flops_float32"], self.more["bytes"] / machine["bytes_per_second"])


def format_seconds(value: float) -> str:
    """Format a time in s or ms."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def table(rows: Sequence[Comparison]) -> str:
    """Format a line for each comparison, under the names of its sides."""
    lines, sides = [], None
    for row in rows:
        if (row.part, list(row.seconds)) != sides:
            sides = (row.part, list(row.seconds))
            lines.append((f"{row.part}: time per {row.unit}", *row.seconds, "ratio"))
        lines.append((f"  {row.what}", *map(format_seconds, row.seconds.values()), row.formatted_ratio))
    columns = max(map(len, lines))
    return console.table([(*line[:-1], *[""] * (columns - len(line)), line[-1]) for line in lines])


def synchronize() -> None:
    """Wait until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_per_unit(side: Side) -> float:
    """Measure a side once."""
    synchronize()
    started = time.perf_counter()
    work = side()
    synchronize()
    return (time.perf_counter() - started) / work


def turns(sides: Mapping[Any, Side], rounds: int) -> dict[Any, float]:
    """Measure each side once per round, and return its median seconds per unit of work."""
    return medians({name: functools.partial(seconds_per_unit, side) for name, side in sides.items()}, rounds)


def medians(sides: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """Call functions that return seconds in turns, after a round to warm up, and return the median of each."""
    seconds = [{name: side() for name, side in sides.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(values[name] for values in seconds) for name in sides}


def fastest_settings(
    sides: Mapping[str, Mapping[str, Side]], rounds: int, slower: float = 1.3
) -> tuple[dict[str, float], dict[str, str]]:
    """Measure each setting of each side in turns; return the seconds of its fastest one, and the name of that.

    After a first round, settings that took `slower` times as long as the side's fastest are not measured again.
    """
    flat = {(name, setting): side for name, own in sides.items() for setting, side in own.items()}
    first = turns(flat, 1) if len(flat) > len(sides) else dict.fromkeys(flat, 0.0)
    best = {name: min(first[name, setting] for setting in own) for name, own in sides.items()}
    seconds = turns({key: side for key, side in flat.items() if first[key] <= slower * best[key[0]]}, rounds)
    fastest = {name: min((key for key in seconds if key[0] == name), key=seconds.__getitem__) for name in sides}
    return {name: seconds[key] for name, key in fastest.items()}, {name: key[1] for name, key in fastest.items()}


def in_processes(work: Callable[[], Any], processes: int) -> list[Any]:
    """Call a function in new processes, one after another, and return what they return."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        return [pool.submit(work).result() for _ in range(processes)]


def over_processes(measure: Callable[[], list[Comparison]], processes: int) -> list[Comparison]:
    """Measure in some processes, and combine."""
    return [combine(rows) for rows in zip(*in_processes(measure, processes))]


def combine(rows: Sequence[Comparison]) -> Comparison:
    """Combine one comparison of several processes; a side's setting is the one that was the fastest most often."""
    first = rows[0]
    seconds = {name: statistics.median(row.seconds[name] for row in rows) for name in first.seconds}
    more = {**first.more, "processes": [row.seconds for row in rows]}
    if "settings" in more:
        chosen = {name: Counter(row.more["settings"][name] for row in rows) for name in more["settings"]}
        more["settings"] = {name: counts.most_common(1)[0][0] for name, counts in chosen.items()}
    return Comparison(first.part, first.what, first.unit, seconds, more)


def device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """Describe the machine, with its measured limits: matrix products in FLOP/s, copying in byte/s."""
    cuda = device().type == "cuda"
    about: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else processor()}
    about |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}
    size = 8192 if cuda else 1024
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        a, b = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
        about[f"flops_{name}"] = 2 * size**3 / seconds_of(functools.partial(torch.matmul, a, b))
    data = torch.empty(256 << 20 if cuda else 64 << 20, dtype=torch.uint8, device=device())
    copy = functools.partial(torch.empty_like(data).copy_, data)
    about["bytes_per_second"] = 2 * data.numel() / seconds_of(copy)
    return about


def seconds_of(work: Callable[[], object]) -> float:
    """Measure one function: the fastest of twenty rounds of five calls, so that other load hardly counts."""
    return min(seconds_per_unit(lambda: len([work() for _ in range(5)])) for _ in range(20))


def processor() -> str:
    """Return the name of the CPU and its number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
