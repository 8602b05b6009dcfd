"""Which device a run gets, so that runs side by side do not fight: a GPU each, or their share of the CPU's threads.

A lease is a lock file in the machine's folder for temporary files, one for each device, held while a run uses it.
The operating system lets go of it when the process ends, however it ends. Launchers need not know of it: it holds
between the jobs of a sweep, between two sweeps, and between a sweep and a run that was started by hand.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout


def lease_folder() -> Path:
    """Where this user's locks lie on this machine."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"speechformer-{user}"


@contextlib.contextmanager
def lease(names: Sequence[str]) -> Iterator[int]:
    """Hold one of the devices of these names, the first that is free; wait if none is.

    Yields:
        Its index in `names`.
    """
    folder = lease_folder()
    folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{name}.lock") for name in names]
    said = False
    while True:
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
        if not said:
            print(f"Waiting: all {len(names)} devices are in use ({', '.join(names)}).", flush=True)
            said = True
        time.sleep(0.2)


def gpu_names() -> list[str]:
    """A name for each GPU that this process sees, the same in every process of this machine; none without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [f"gpu-{torch.cuda.get_device_properties(k).uuid}" for k in range(torch.cuda.device_count())]


def cpu_slots(threads: int) -> list[str]:
    """A name for each run of so many threads that this machine's cores have room for; at least one."""
    return [f"cpu-{threads}-threads-{k}" for k in range(max(1, cores() // threads))]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def default_threads() -> int:
    """The threads that torch takes by itself: those of OMP_NUM_THREADS, which joblib's launcher sets to each job's
    share, or all cores; under SLURM, the job's. Asked before the first run of a process changes it."""
    import torch

    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(torch.get_num_threads(), int(given)) if given.isdecimal() else torch.get_num_threads()
