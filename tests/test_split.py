"""Parameters that devices split: `machine=fsdp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import VOCABULARY, T, stack_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from speechformer.models.decoder import Decoder
from speechformer.models.split import keep_whole, load_whole, split


class Step(nn.Module):
    """A module whose method trains, as a task's does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(**stack_arguments(dropout=0.0, model={"name": "learned"}), tied_output=True)

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def work(rank: int, file: Path) -> None:
    """Compare the process of this rank, one of two, with a module that is not split."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    whole, halves, ids = Step(), Step(), torch.arange(2 * T).view(2, T) % VOCABULARY
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    for _ in range(2):
        split(halves, init_device_mesh("cpu", (2,)), ["loss"])

    def sizes(module: nn.Module) -> int:
        parameters: Any = module.parameters()
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)

    total = sizes(whole)
    assert abs(sizes(halves) - total / 2) < total / 20
    whole.loss(ids).backward()
    halves.loss(ids[rank : rank + 1]).backward()
    assert abs(sizes(halves) - total / 2) < total / 20
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in halves.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])  # type: ignore[union-attr]

    for part in halves.parameters():
        nn.init.zeros_(part)
    for loads in (False, True):
        if loads:
            load_whole(halves, state)
        keep_whole(halves, True)
        assert sizes(halves) == total
        for one, other in zip(whole.parameters(), halves.parameters()):
            assert torch.equal(one if loads else torch.zeros_like(one), other)
        if rank == 0:  # alone, also past the hooks of the blocks
            maps, expected_maps = (module.model.eval().attention(ids) for module in (halves, whole))
            assert not loads or torch.allclose(maps["decoder"][1], expected_maps["decoder"][1], atol=1e-5)
    keep_whole(halves, False)
    assert sizes(halves) < total
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_split_the_parameters_and_train_as_one(tmp_path: Path) -> None:
    """Oracle: the same module in one process."""
    # gloo's threads outlive its group and may abort a Python that shuts down; a process of a fork server just ends.
    start_processes(work, (tmp_path / "store",), nprocs=2, start_method="forkserver")
