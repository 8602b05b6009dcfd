"""Memory: whether there is enough for a model, and one sentence where an allocation fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speechformer.errors import UserError, one_sentence

SMALLER = "make width, ff, layers, vocab_size, block_size or batch_size smaller"
SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "integer multiplication overflow")  # torch's


def available(accelerator: str) -> int:
    """Return the bytes of memory for a model: of the GPU, or what the machine or the container has left."""
    import torch

    if accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    limits = [2**63]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits)


def reset_peak(device: Any) -> None:
    """Let `peak_bytes` count from now on, where the system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: VmHWM


def peak_bytes(device: Any) -> int | None:
    """Return the most memory that this process had, or on a GPU that its tensors had; None where nothing tells."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # Linux; `ru_maxrss` would begin with the peak of the parent process
    if status.exists():
        words = status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()
        return 1024 * int(words[0]) if words else None
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def check_memory(build: Callable[[], Any], config: dict[str, Any], vocab_size: int) -> None:
    """Require memory for the weights of a task's model, their gradients, and the optimizer's state.

    Args:
        build: builds the task. It is called on torch's meta device, which allocates nothing, if the model is large.

    Raises:
        UserError: there is less than they need.
    """
    import torch

    width, layers = config["width"], config["layers"] * (20 * config["width"] + 5 * config["ff"])
    ends = 3 * vocab_size + 2 * config["block_size"] + config["architecture"]["classifier_width"]
    if width * (layers + ends) < 2**24:  # a rough number of parameters: most models need no closer look
        return
    with torch.device("meta"):
        model = build().model
    precision = str(config["trainer"]["precision"])
    copies: float = 2 if config["recipe"]["optimizer"] == "sgd" else 4
    copies *= 2 if precision.startswith("64") else 0.5 if precision in ("16-true", "bf16-true") else 1
    needed = copies * sum(weight.numel() * weight.element_size() for weight in model.parameters())
    needed += sum(table.numel() * table.element_size() for table in model.buffers())
    free = available(config["trainer"]["accelerator"])
    if needed > free:
        raise UserError(
            f"The model needs {needed / 2**30:,.1f} GiB for its weights, gradients and the optimizer's state, and "
            f"{free / 2**30:,.1f} GiB are available; {SMALLER}."
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn a failed allocation, and what Lightning rejects when training begins, into a `UserError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS):
            raise
        raise UserError(f"There is not enough memory; {SMALLER}. {one_sentence(error)[:200]}".strip()) from error
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning's; it takes seconds to import
            raise
        raise UserError(f"trainer: {one_sentence(error)}") from error
