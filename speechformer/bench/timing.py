"""Time alternatives in turns, so that other load on the machine affects all of them; a ratio is of medians."""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from speechformer import console

Side = Callable[[], float]  # does some work and returns its amount


@dataclass
class Comparison:
    """Seconds per unit of work of each side, the first of which is ours.

    Attributes:
        part: the part of the bench.
        what: what was measured.
        more: figures beside the times.
    """

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

    def plain(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "ratio": self.ratio}


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


def turns(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """Measure each side once per round, and return its median seconds per unit of work."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # warm-up
    for _ in range(rounds):
        for name, side in sides.items():
            synchronize()
            started = time.perf_counter()
            work = side()
            synchronize()
            seconds[name].append((time.perf_counter() - started) / work)
    return medians(seconds)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute the median of each side."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """Describe the machine, with its measured limits: matrix products in FLOP/s, copying in byte/s."""
    cuda = device().type == "cuda"
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
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

    def five_calls() -> float:
        for _ in range(5):
            work()
        return 5

    return turns({"": five_calls}, rounds=5)[""]


def processor() -> str:
    """Return the name of the CPU and its number of cores."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"
