"""Time alternatives in turns, so that other load on the machine affects all of them; a ratio is of medians."""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechformer import console

Side = Callable[[], float]  # does some work and returns its amount


@dataclass
class Comparison:
    """Seconds per unit of work of each side, the first of which is ours; `more` holds figures beside the times."""

    part: str
    what: str
    unit: str
    seconds: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times as fast our side is as the fastest other; None without another."""
        ours, *others = self.seconds.values()
        return min(others) / ours if others else None


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
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append((f"  {row.what}", *map(format_seconds, row.seconds.values()), ratio))
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


def turns(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """Measure each side once per round, and return its median seconds per unit of work."""
    return medians({name: functools.partial(seconds_per_unit, side) for name, side in sides.items()}, rounds)


def medians(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call functions that return seconds in turns, after a round to warm up, and return the median of each."""
    seconds = [{name: side() for name, side in sides.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(values[name] for values in seconds) for name in sides}


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
    """Measure one function: the median of five rounds of five calls."""
    return turns({"": lambda: len([work() for _ in range(5)])}, rounds=5)[""]


def processor() -> str:
    """Return the name of the CPU and its number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
