"""Leases: no two runs on one device, and none lost when a process is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from speechformer.errors import UserError
from speechformer.training import devices
from speechformer.training.devices import check_processes, lease_devices

CONTEXT = multiprocessing.get_context("fork")


def work(folder: str, names: list[str], told: Any, seconds: float) -> None:
    os.environ["TMPDIR"] = folder
    devices.tempfile.tempdir = None  # it is asked for once
    with devices.lease(names) as index:
        begun = time.monotonic()
        time.sleep(seconds)
        told.put((index, begun, time.monotonic()))


def test_runs_side_by_side_have_devices_of_their_own(tmp_path: Path) -> None:
    """8 processes on 3 devices: no two hold a device at the same time, and all three are used."""
    told = CONTEXT.Queue()
    names = [f"gpu-{tmp_path.name}-{k}" for k in range(3)]
    processes = [CONTEXT.Process(target=work, args=(str(tmp_path), names, told, 0.3)) for _ in range(8)]
    for process in processes:
        process.start()
    held = [told.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert {index for index, _, _ in held} == {0, 1, 2}
    for k, (index, begun, ended) in enumerate(held):
        for other, start, stop in held[k + 1 :]:
            assert index != other or stop <= begun or ended <= start


def test_a_killed_process_gives_its_device_back(tmp_path: Path) -> None:
    told = CONTEXT.Queue()
    process = CONTEXT.Process(target=work, args=(str(tmp_path), ["gpu-a"], told, 60))
    process.start()
    lock = tmp_path / devices.lease_folder().name / "gpu-a.lock"
    while not lock.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    second = CONTEXT.Process(target=work, args=(str(tmp_path), ["gpu-a"], told, 0))
    second.start()
    assert told.get(timeout=10)[0] == 0


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(devices, "gpu_names", lambda: ["gpu-a", "gpu-b"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize("accelerator", ["gpu", "auto", "cuda"])
def test_a_run_that_asks_for_a_gpu_gets_one_that_is_free(accelerator: str, two_gpus: None) -> None:
    arguments = {"accelerator": accelerator, "devices": 1}
    with lease_devices(arguments, 1, None) as first, lease_devices(arguments, 1, "joblib") as second:
        assert (first, second) == ([0], [1])
        with lease_devices({"accelerator": "cpu", "devices": 1}, 1, None) as cpu:
            assert cpu == 1
    with lease_devices({**arguments, "devices": [1]}, 1, None) as named, lease_devices(arguments, 1, None) as other:
        assert (named, other) == ([1], [0])
    with lease_devices({**arguments, "devices": 2}, 1, None) as both:
        assert both == 2
        folder = devices.lease_folder()
        for name in ("gpu-a", "gpu-b"):
            with pytest.raises(Timeout):
                FileLock(folder / f"{name}.lock").acquire(timeout=0)
    with lease_devices(arguments, 1, None) as again:
        assert again == [0]


def test_slots_are_as_many_as_runs_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 8)
    assert [len(devices.cpu_slots(threads)) for threads in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("omp", "slurm", "threads"),
    [("", "3", 3), ("2", "", 2), ("2", "3", 2), ("4", "3", 3), ("", "", None), ("0", "x", None)],
)
def test_a_job_has_the_threads_that_its_launcher_gives(
    omp: str, slurm: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert devices.share_of_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "cores", "runs"),
    [
        ({"devices": 1}, 1, True),
        ({"devices": 2}, 1, True),  # so that two can be tried anywhere
        ({"devices": 3}, 2, False),
        ({"devices": [0, 1, 2]}, 2, False),
        ({"devices": 3, "accelerator": "auto"}, 2, False),
        ({"devices": 8}, 8, True),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_run_on_the_cpu_has_no_more_processes_than_cores(
    arguments: dict[str, Any], cores: int, runs: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: cores)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    runs |= has_gpu and arguments.get("accelerator") == "auto"
    with contextlib.nullcontext() if runs else pytest.raises(UserError, match="would start as many processes"):
        check_processes({"accelerator": "cpu", **arguments})
