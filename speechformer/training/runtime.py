"""The process around a run: its memory management, what libraries print, and failed allocations.

The commands change their own process (`process_set_up`). A notebook that calls `speechformer.fit` gets its settings
back (`isolated`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.errors import UserError, one_sentence
from speechformer.runs.rank import processes

if TYPE_CHECKING:
    import torch

LIGHTNING = ("lightning.pytorch", "lightning.fabric")
IGNORED_WARNINGS = (
    "Checkpoint directory .* exists and is not empty",  # the run's folder holds config.yaml already
    "Experiment logs directory .* exists and is not empty",
    "The number of training batches .* is smaller than the logging interval",  # of a small corpus
    ".*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning's own, with newer torch
    ".*sync_dist=True.*",  # every device evaluates everything, so there is nothing to reduce
    "FSDP2-wrapped module .* returned a view tensor",  # nothing changes it in place
    "The `srun` command is available on your system but is not used",  # launchers handle SLURM
)
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "integer multiplication overflow",
)  # torch's
SMALLER = "make width, ff, layers, vocab_size, block_size or batch_size smaller"


@functools.cache
def tune_memory() -> None:
    """Import all that a run needs, and tune garbage collection and malloc; once for each process.

    Garbage collection pauses during the imports and never scans them again, as joblib's `gc.collect` after each job
    would. glibc keeps freed memory: otherwise it returns each large tensor to the system and gets it back, zeroed.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    importlib.import_module("speechformer.training.fit")

    gc.freeze()
    if was_collecting:
        gc.enable()
    if sys.platform == "linux":
        trim_threshold, mmap_max = -1, -4  # malloc.h
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(mmap_max, 0)
            libc.mallopt(trim_threshold, -1)  # never


def silence_libraries() -> None:
    """Silence messages of Lightning and torch that a user of this project cannot act on."""
    for name in LIGHTNING:
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    threading.excepthook = report_thread


def report_thread(error: threading.ExceptHookArgs) -> None:
    """Report an exception in a thread. TensorBoard raises its writer's, perhaps of a full disk, where it matters."""
    if type(error.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(error)


@contextlib.contextmanager
def process_set_up() -> Iterator[None]:
    """Set up the process of a command, for good."""
    tune_memory()
    silence_libraries()
    yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries, and restore warning filters, logger levels and thread hook afterwards."""
    hook = threading.excepthook
    levels = {name: logging.getLogger(name).level for name in LIGHTNING}
    with warnings.catch_warnings():
        silence_libraries()
        try:
            yield
        finally:
            threading.excepthook = hook
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Be `quiet`, and restore also random states and environment variables afterwards."""
    from lightning.pytorch.utilities.seed import isolate_rng

    variables = dict(os.environ)
    try:
        with quiet(), isolate_rng():
            yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning exits the process at Ctrl-C
            raise KeyboardInterrupt from None
        raise
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def free_memory() -> None:
    """Free what a training has left, whose Trainer and module refer to each other: it may have lacked memory."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception says that an allocation failed."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn a failed allocation, and what Lightning rejects when training begins, into a `UserError`."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            reason = one_sentence(error)[:200]
            raise UserError(f"There is not enough memory; {SMALLER}. {reason}".strip()) from error
        if type(error).__name__ != "MisconfigurationException":  # Lightning's; it takes seconds to import
            raise
        raise UserError(f"trainer: {one_sentence(error)}") from error


def check_memory(config: dict[str, Any], vocab_size: int) -> None:
    """Require memory for the weights of a model, their gradients, and the optimizer's state, by a rough count.

    Raises:
        UserError: the machine, or the GPU, has less than they need.
    """
    import torch

    width, layers = config["width"], config["layers"] * (4 * config["width"] + 2 * config["ff"])
    needed = 16 * width * (layers + vocab_size + config["block_size"])  # four numbers of four bytes each
    if config["trainer"]["accelerator"] != "cpu" and torch.cuda.is_available():
        if config["trainer"].get("strategy") == "fsdp":  # a share of the four, and in evaluations all weights
            needed *= 1 / processes() + 1 / 4
        available = torch.cuda.get_device_properties(0).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    if needed > available:
        raise UserError(
            f"The model needs about {needed / 2**30:,.0f} GiB for its weights, gradients and the optimizer's state, "
            f"and there are {available / 2**30:,.0f} GiB; {SMALLER}."
        )


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on, where the system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: VmHWM


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that this process had, or on a GPU that its tensors had; None where nothing tells."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # Linux; `ru_maxrss` would begin with the peak of the parent process
    if not status.exists():
        return None
    words = status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()
    return 1024 * int(words[0]) if words else None
