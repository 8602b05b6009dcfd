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


def cpu_clock() -> tuple[float, float, float] | None:
    """In seconds: what time it is, for how long somebody has used the cores that this process may use, added up, and
    for how long itself. None where the system does not tell: Linux does."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = 0
    for name, *numbers in map(str.split, lines):
        if name in names:
            user, nice, system, _idle, _waiting, *taken = map(int, numbers[:8])  # for interrupts, by other machines
            ticks += user + nice + system + sum(taken)
    own = os.times()
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system


def cores_of_others(since: tuple[float, float, float] | None) -> float:
    """How many cores others have kept busy since a reading of `cpu_clock`; 0 where it is less than a second old."""
    now = cpu_clock()
    if since is None or now is None or now[0] - since[0] < 1:
        return 0.0
    seconds, used, own = (b - a for a, b in zip(since, now))
    return max(0.0, used - own) / seconds


def share_of_threads() -> int | None:
    """The threads that a launcher gives each of its jobs: joblib's in OMP_NUM_THREADS, SLURM as the CPUs of a task;
    None where nobody says."""
    given = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")]
    return min((int(number) for number in given if number.isdecimal() and int(number) > 0), default=None)


@functools.cache
def all_threads() -> int:
    """The threads that torch takes by itself, on all cores. Asked before the first run of a process changes it."""
    import torch

    return torch.get_num_threads()
