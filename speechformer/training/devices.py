"""Devices for runs that run side by side: one GPU each, or a share of the CPU's threads.

A lease is a lock file in the machine's temporary folder, held while a run uses the device. The operating system
releases it when the process ends, however it ends. Launchers do not know of leases, so leases also hold between two
sweeps, and between a sweep and a single run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from speechformer import console
from speechformer.errors import UserError
from speechformer.runs.rank import count_devices, local_rank


def lease_folder() -> Path:
    """Return the folder of this user's locks on this machine."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"speechformer-{user}"


@contextlib.contextmanager
def lease(names: Sequence[str]) -> Iterator[int]:
    """Lock the first free device of these names; wait if none is free.

    Yields:
        Its index in `names`.
    """
    folder = lease_folder()
    folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{name}.lock") for name in names]
    for attempt in itertools.count():
        for index, lock in enumerate(locks):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield index
            finally:
                lock.release()
            return
        if attempt == 0:
            console.say(f"Waiting: all {len(names)} devices are in use ({', '.join(names)}).")
        time.sleep(0.2)


def gpu_names() -> list[str]:
    """Return a name for each visible GPU, the same in every process of this machine; none without CUDA."""
    import torch

    return [f"gpu-{torch.cuda.get_device_properties(k).uuid}" for k in range(torch.cuda.device_count())]


def cpu_slots(threads: int) -> list[str]:
    """Return a name for each run of `threads` threads that the cores have room for; at least one."""
    return [f"cpu-{threads}-threads-{k}" for k in range(max(1, cores() // threads))]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_threads() -> int | None:
    """Return the threads that a launcher gives each job (OMP_NUM_THREADS, SLURM_CPUS_PER_TASK), or None."""
    values = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")]
    return min((int(value) for value in values if value.isdecimal() and int(value) > 0), default=None)


@functools.cache
def all_threads() -> int:
    """Return the threads that torch takes by itself, on all cores; read before the first run changes them."""
    import torch

    return torch.get_num_threads()


@contextlib.contextmanager
def threads(config: dict[str, Any], owner: dict[str, Any]) -> Iterator[int]:
    """Give torch the run's threads, and restore their number afterwards.

    A resumed run has as many as before, because the number decides in which order sums are taken.
    """
    import torch

    processes, before = count_devices(config["trainer"]["devices"]), torch.get_num_threads()
    number = config["threads"] or owner.get("threads") or max(1, all_threads() // processes)
    torch.set_num_threads(number)
    if processes > 1:  # otherwise Lightning divides the cores by itself
        os.environ["OMP_NUM_THREADS"] = str(number)
    try:
        yield number
    finally:
        torch.set_num_threads(before)


def check_processes(arguments: dict[str, Any]) -> None:
    """Require that a run on the CPU starts no more processes than there are cores; two may try it on one core.

    Raises:
        UserError: `trainer.devices` is higher.
    """
    import torch

    accelerator = arguments["accelerator"]
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and count_devices(arguments["devices"]) > max(2, cores()):
        raise UserError(
            f"trainer.devices={arguments['devices']} would start as many processes, and this machine lends "
            f"{cores()} cores. One device is the fastest on a CPU: omit trainer.devices."
        )


@contextlib.contextmanager
def lease_devices(arguments: dict[str, Any], threads: int, launcher: str | None) -> Iterator[Any]:
    """Lock the devices that a run with `trainer.*` arguments uses, for as long as it uses them.

    Yields:
        Lightning's `devices`: one free GPU where any one is asked for, otherwise what the config names.
    """
    import torch

    wanted = arguments["devices"]
    with contextlib.ExitStack() as leases:
        if arguments["accelerator"] in ("gpu", "cuda", "auto") and torch.cuda.is_available():
            names = gpu_names()
            if wanted in (1, "1"):
                wanted = [leases.enter_context(lease(names))]
            elif local_rank() == 0:  # the first process of a machine locks them for all
                several = wanted if isinstance(wanted, list) else range(int(wanted))
                for index in sorted(several):  # in order, so that no two runs wait for each other
                    leases.enter_context(lease(names[index : index + 1] or names))
        elif launcher == "submitit_local":  # it starts all jobs at once
            leases.enter_context(lease(cpu_slots(threads)))
        yield wanted
