"""Times of things done in turns, so that what else the machine does falls on all; a ratio is of medians."""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

Side = Callable[[], float]  # does some work, and returns how much


@dataclass
class Comparison:
    """Seconds for a unit of work on each side, the first of which is ours.

    Attributes: `part` and `what` was measured; `seconds` for each `unit`, by side; `more`, figures beside them.
    """

    part: str
    what: str
    unit: str
    seconds: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Seconds of the fastest other side over ours: how many times as fast we are; None without another."""
        ours, *others = self.seconds.values()
        return min(others) / ours if others else None

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "ratio": self.ratio}


def synchronize() -> None:
    """Wait for what was given to a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def turns(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """The median seconds for each unit of work of each side, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # the first is slower
    for _ in range(rounds):
        for name, side in sides.items():
            synchronize()
            started = time.perf_counter()
            work = side()
            synchronize()
            seconds[name].append((time.perf_counter() - started) / work)
    return {name: statistics.median(values) for name, values in seconds.items()}


def device() -> torch.device:
    """Where it is measured: the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """What the figures are of, and its limits as measured: products of matrices in FLOP/s, copying in byte/s."""
    size, place = (8192 if device().type == "cuda" else 1024), device()
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if place.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        a, b = (torch.randn(size, size, device=place).to(dtype) for _ in range(2))
        product = functools.partial(torch.matmul, a, b)
        seconds = turns({name: functools.partial(repeated, product, 5)}, rounds=5)[name]
        about[f"flops_{name}"] = 2 * size**3 / seconds
    data = torch.empty(256 << 20 if place.type == "cuda" else 64 << 20, dtype=torch.uint8, device=place)
    into = torch.empty_like(data)
    seconds = turns({"copy": lambda: repeated(lambda: into.copy_(data), 5)}, rounds=5)["copy"]
    about["bytes_per_second"] = 2 * data.numel() / seconds
    return about


def processor() -> str:
    """The CPU's name."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def repeated(work: Callable[[], object], times: int) -> float:
    """Do it so many times; that many are the units."""
    for _ in range(times):
        work()
    return times
