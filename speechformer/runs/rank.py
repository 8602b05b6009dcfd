"""Which process of a run on several devices this is.

Lightning starts one process for each device of a machine, and numbers them by LOCAL_RANK. With `trainer.num_nodes`
the same command runs on each machine, numbered by NODE_RANK; MASTER_ADDR and MASTER_PORT say where they meet.
"""

from __future__ import annotations

import os
from typing import Any

from speechformer.errors import UserError

machines = 1  # of the run of this process; `check_machines` sets it


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0))


def node_rank() -> int:
    """Return the number of this machine, from 0: NODE_RANK, which `check_machines` validates for several machines."""
    return int(os.environ.get("NODE_RANK", 0)) if machines > 1 else 0


def is_first() -> bool:
    """Return whether this process owns the run's folder: it writes its files, and speaks."""
    return local_rank() == 0 and node_rank() == 0


def check_machines(config: dict[str, Any], force: bool) -> None:
    """Require that the environment says what a run on `trainer.num_nodes` machines must know.

    Raises:
        UserError: it does not, or `force` would remove files that another machine reads.
    """
    global machines
    machines, rank = config["trainer"].get("num_nodes", 1), os.environ.get("NODE_RANK", "0")
    if machines == 1:
        return
    needed = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if needed:
        raise UserError(
            f"trainer.num_nodes={machines} needs {' and '.join(needed)} in the environment: the number of this "
            "machine, from 0, and the address and a free port of machine 0."
        )
    if not rank.isdecimal() or int(rank) >= machines:
        raise UserError(f"NODE_RANK={rank} must be a whole number from 0, below trainer.num_nodes={machines}.")
    if force:
        raise UserError(f"force=true with trainer.num_nodes={machines}: remove the run's folder instead.")
