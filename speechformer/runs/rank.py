"""Which process of a run on several devices this is.

Lightning starts one process for each device of a machine, and numbers them by LOCAL_RANK. With `trainer.num_nodes`
the same command runs on each machine, numbered by NODE_RANK; MASTER_ADDR and MASTER_PORT say where they meet.
Under `srun` with one task for each machine, SLURM says all three.

A run on one device is one process, whatever a launcher, or an earlier program, has left in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from speechformer.errors import UserError

machines, devices = 1, 1  # of the run of this process, and those of each machine; `expect_processes` sets them


def count_devices(devices: int | list[int]) -> int:
    """Return how many devices `trainer.devices` requests."""
    return len(devices) if isinstance(devices, list) else devices


def expect_processes(config: Mapping[str, Any]) -> None:
    """Let the ranks of this process be those in a run of this config, which need not be valid.

    If `srun` started one process for each machine, what the environment does not say of them is set there.
    """
    global machines, devices
    numbers = config["trainer"].get("num_nodes", 1), count_devices(config["trainer"]["devices"])
    machines, devices = (number if isinstance(number, int) else 1 for number in numbers)
    if machines > 1 and os.environ.get("SLURM_STEP_NUM_TASKS") == str(machines):
        from lightning.fabric.plugins.environments import SLURMEnvironment  # takes seconds

        first = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
        port = 15000 + int(os.environ["SLURM_JOB_ID"][-4:])  # Lightning's choice
        said = {"NODE_RANK": os.environ["SLURM_PROCID"], "MASTER_ADDR": first, "MASTER_PORT": str(port)}
        os.environ.update({name: value for name, value in said.items() if not os.environ.get(name)})


def processes() -> int:
    """Return how many processes the run has, on all machines."""
    return machines * devices


def number(name: str) -> int:
    """Return a whole number in the environment, which `check_machines` validates; 0 without one."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return number("LOCAL_RANK") if devices > 1 else 0


def node_rank() -> int:
    """Return the number of this machine, from 0."""
    return number("NODE_RANK") if machines > 1 else 0


def is_first() -> bool:
    """Return whether this process owns the run's folder: it writes its files, and speaks."""
    return local_rank() == 0 and node_rank() == 0


def check_machines(config: dict[str, Any], force: bool) -> None:
    """Require that the environment says what a run on `trainer.num_nodes` machines must know.

    Raises:
        UserError: it does not, or `force` would remove files that another machine reads.
    """
    expect_processes(config)
    local, rank = os.environ.get("LOCAL_RANK", "0"), os.environ.get("NODE_RANK", "0")
    if devices > 1 and not (local.isdecimal() and int(local) < devices):
        raise UserError(
            f"LOCAL_RANK={local} in the environment must be a whole number from 0, below trainer.devices={devices}; "
            "unset it, and Lightning starts a process for each device."
        )
    if machines == 1:
        return
    needed = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if needed:
        raise UserError(
            f"trainer.num_nodes={machines} needs {' and '.join(needed)} in the environment: the number of this "
            "machine, from 0, and the address and a free port of machine 0. srun with one task for each machine sets "
            "them."
        )
    if not rank.isdecimal() or int(rank) >= machines:
        raise UserError(f"NODE_RANK={rank} must be a whole number from 0, below trainer.num_nodes={machines}.")
    if force:
        raise UserError(f"force=true with trainer.num_nodes={machines}: remove the run's folder instead.")
