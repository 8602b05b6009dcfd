"""The state of the process that a computation depends on, whoever has changed it: `standard_state`.

Torch keeps the default dtype, the precision of products and much else for the whole process, and launchers leave
ranks in the environment. A run must not depend on them, because neither its fingerprint nor its result names them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# What launchers tell each of several processes: RANK, SLURM_PROCID, OMPI_COMM_WORLD_SIZE, MPI_LOCALRANKID, ...
RANKS = re.compile(r".*(RANK|RANKID|PROCID|LOCALID|NODEID|WORLD_SIZE)|TORCHELASTIC_.*")
LOCK = threading.RLock()  # the state is that of all threads
Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]  # how it is read and written; its standard value


@contextlib.contextmanager
def standard_state(devices: int = 1) -> Iterator[None]:
    """Give torch the settings of a new process, and restore the caller's afterwards; also a decorator.

    One thread at a time is inside. On one device, the variables that number processes are hidden: Lightning reads
    them even then, some of them when it is imported.

    Args:
        devices: of the run, on all machines.
    """
    import torch

    with LOCK, contextlib.ExitStack() as stack:
        if devices == 1:
            hidden = {name: os.environ.pop(name) for name in [*os.environ] if RANKS.fullmatch(name)}
            stack.callback(os.environ.update, hidden)
        table = settings()
        before = [read(setting) for setting in table]
        stack.callback(write, table, before)
        write(table, [value for *_, value in table])
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def read(setting: Setting) -> Any:
    """Return the value of a setting; None if torch refuses to say, because its newer names say something else."""
    with contextlib.suppress(RuntimeError):
        return setting[0]()
    return None


def write(table: list[Setting], values: list[Any]) -> None:
    """Give settings other values than they have; None leaves one as it is."""
    for setting, value in zip(table, values):
        if value is not None and read(setting) != value:
            setting[1](value)


def settings() -> list[Setting]:
    """Return the settings of torch, and of Lightning if it is imported; the last of those that overlap decides."""
    import torch

    def attribute(holder: Any, name: str, value: Any) -> Setting:
        return functools.partial(getattr, holder, name), functools.partial(setattr, holder, name), value

    def deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def flushes_denormal() -> bool:
        return (torch.full((), 1e-40, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0

    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    table: list[Setting] = [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (deterministic, lambda new: torch.use_deterministic_algorithms(new[0], warn_only=new[1]), (False, False)),
        (flushes_denormal, torch.set_flush_denormal, False),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        attribute(cudnn, "allow_tf32", False),  # which would round single precision to 10 bits
        attribute(cudnn, "benchmark", False),
        attribute(cudnn, "deterministic", False),
    ]
    for name in ("flash", "mem_efficient", "math", "cudnn"):  # kernels of `scaled_dot_product_attention`
        table.append((getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), True))
    if hasattr(backends, "fp32_precision"):  # since torch 2.9; what the names above decide is only restored
        for holder in (cuda.matmul, mkldnn.matmul, cudnn.conv, cudnn.rnn):
            table.append(attribute(holder, "fp32_precision", None))
        for holder in (backends, mkldnn.conv, mkldnn.rnn):
            table.append(attribute(holder, "fp32_precision", "none"))
    if (fabric := sys.modules.get("lightning.fabric.utilities.rank_zero")) is not None:
        table.append(attribute(fabric.rank_zero_only, "rank", 0))
    return table
