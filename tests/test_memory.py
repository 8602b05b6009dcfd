"""Memory: a model that does not fit is one sentence before it is built, and so is an allocation that fails."""

from __future__ import annotations

import os

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


def test_an_allocation_that_fails_is_one_sentence() -> None:
    """Oracle: torch's own allocator, asked for an exbibyte."""
    with pytest.raises(UserError, match="^There is not enough memory; make width, .* smaller. "), explained():
        torch.empty(2**58)
    with pytest.raises(UserError, match="^There is not enough memory"), explained():
        raise MemoryError
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")
