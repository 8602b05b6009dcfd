"""Memory: a model that does not fit is one sentence before it is built, and so is an allocation that fails."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from conftest import compose

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.training.runtime import check_memory, explained


@pytest.mark.parametrize("width", [64, 1024])
def test_the_memory_is_that_of_weights_gradients_and_both_moments(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: 16 bytes for each parameter of torch's own layers and embeddings, biases and norms left out."""
    config = as_plain(compose(f"width={width}", "layers=3", f"ff={4 * width}", "trainer.accelerator=cpu"))
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width)
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim == 2)
    needed = 16 * (3 * matrices + (100 + config["block_size"]) * width)
    monkeypatch.setattr(os, "sysconf", lambda name: needed if name == "SC_PAGE_SIZE" else 1)
    check_memory(config, 100)
    with pytest.raises(UserError, match="^The model needs about .* GiB for its weights, gradients and"):
        check_memory(config, 101)


def test_devices_that_split_the_state_hold_a_share_of_it_and_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: 16 bytes for each parameter on one device; on 8, two bytes, and four of the weights in evaluations."""
    gpu = SimpleNamespace(total_memory=16 * (1 << 20))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("speechformer.training.runtime.processes", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    words = "width=64", "layers=1", "ff=64", "block_size=64"
    layers = 64 * (4 * 64 + 2 * 64 + 64)
    for machine, parameters in (("ddp", 1 << 20), ("fsdp", (16 << 20) // 6)):
        config = as_plain(compose(*words, f"machine={machine}"))
        check_memory(config, (parameters - layers) // 64)
        with pytest.raises(UserError, match="^The model needs about"):
            check_memory(config, (parameters - layers) // 64 + 1)


def test_an_allocation_that_fails_is_one_sentence() -> None:
    """Oracle: torch's own allocator, asked for an exbibyte."""
    with pytest.raises(UserError, match="^There is not enough memory; make width, .* smaller. "), explained():
        torch.empty(2**58)
    with pytest.raises(UserError, match="^There is not enough memory"), explained():
        raise MemoryError
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")
