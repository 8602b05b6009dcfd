"""Memory: a model that does not fit is one sentence before it is built, and so is an allocation that fails."""

from __future__ import annotations

import pytest
import torch
from conftest import compose

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.stack import count_parameters
from speechformer.tasks.base import COMMON_OPTIONS, SIZES
from speechformer.training import memory
from speechformer.training.memory import check_memory, explained

GIB = 2**30


class Built:
    """A task with the model of a config."""

    def __init__(self, config: dict) -> None:
        options = {key: config["architecture"][key] for key in (*COMMON_OPTIONS, "pool", "classifier_width")}
        self.model = EncoderClassifier(classes=3, vocab_size=100, **options, **{key: config[key] for key in SIZES})


@pytest.mark.parametrize(
    ("recipe", "precision", "bytes_of_each"),
    [("adam", "32-true", 16), ("adamw", "64-true", 32), ("sgd", "bf16-true", 4)],
)
def test_the_memory_is_that_of_weights_gradients_and_both_moments(
    recipe: str, precision: str, bytes_of_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: bytes of a number, times the tensors of it that training keeps, times the number of parameters."""
    config = as_plain(
        compose("model=nope", f"recipe.optimizer={recipe}", f"trainer.precision={precision}", "width=1024")
    )
    needed = bytes_of_each * count_parameters(Built(config).model)["total"]
    monkeypatch.setattr(memory, "available", lambda _: needed)
    check_memory(lambda: Built(config), config, 100)
    monkeypatch.setattr(memory, "available", lambda _: needed - 1)
    with pytest.raises(UserError, match=rf"^The model needs {needed / GIB:,.1f} GiB for its weights, gradients and "):
        check_memory(lambda: Built(config), config, 100)


def test_the_model_is_built_on_no_device_and_a_small_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build() -> Built:
        built.append(Built(config))
        return built[-1]

    monkeypatch.setattr(memory, "available", lambda _: 0)
    config = as_plain(compose())
    check_memory(build, config, 100)
    assert not built
    config |= {"width": 32768}
    with pytest.raises(UserError, match="and 0.0 GiB are available"):
        check_memory(build, config, 100)
    assert {parameter.device.type for parameter in built[0].model.parameters()} == {"meta"}


def test_an_allocation_that_fails_is_one_sentence() -> None:
    """Oracle: torch's own allocator, asked for an exbibyte."""
    with pytest.raises(UserError, match="^There is not enough memory; make width, .* smaller. "), explained():
        torch.empty(2**58)
    with pytest.raises(UserError, match="^There is not enough memory"), explained():
        raise MemoryError
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")


def test_the_memory_that_is_available_is_that_of_this_machine() -> None:
    assert 2**26 < memory.available("cpu") < 2**50
