"""Parameters that several devices split (`machine=fsdp`), by torch's `fully_shard`: Zhao et al. 2023, "PyTorch FSDP".

Gradients and the optimizer's state are split with them. A training step gathers the parameters of one block at a
time. An evaluation gathers them all: it generates text and draws attention, which pass by what gathers a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from speechformer.layers.block import Block


def split(module: nn.Module, mesh: DeviceMesh, methods: Sequence[str]) -> None:
    """Split the parameters of a module over the devices of a mesh, once; its `methods` gather them."""
    if isinstance(module, FSDPModule):
        return
    for block in module.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for method in methods:
        register_fsdp_forward_method(module, method)


def keep_whole(module: Any, whole: bool) -> None:
    """Gather all parameters on each device, until `state_dict` or `load_whole` is called; or split them again."""
    module.set_reshard_after_forward(not whole)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard() if whole else part.reshard()


def load_whole(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a `state_dict` of whole tensors, and leave the parameters split."""
    keep_whole(module, False)
    parts = {name: part for name, part in module.state_dict().items() if isinstance(part, DTensor)}
    split_state = {
        name: distribute_tensor(tensor, parts[name].device_mesh, parts[name].placements) if name in parts else tensor
        for name, tensor in state.items()
    }
    module.load_state_dict(split_state)
