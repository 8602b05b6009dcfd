"""Memory: a model that does not fit is one sentence before it is built, and so is an allocation that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("recipe", "copies"), [("adam", 4), ("adamw", 4), ("sgd", 2)])
@pytest.mark.parametrize(("precision", "size"), [("32-true", 4), ("64-true", 8), ("bf16-true", 2)])
def test_the_memory_is_that_of_weights_gradients_and_both_moments(
    recipe: str, copies: int, precision: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: bytes of a number, times the number of parameters, times the tensors of each that training keeps."""
    config = as_plain(
        compose("model=nope", f"recipe.optimizer={recipe}", f"trainer.precision={precision}", "width=1024")
    )
    needed = size * copies * count_parameters(Built(config).model)["total"]
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


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FLAGS = """
import sys, types, torch
from speechformer.training import runtime
if "strict" in sys.argv:
    runtime.Path = lambda _: types.SimpleNamespace(read_text=lambda encoding: "2")
elif "free" not in sys.argv:
    import resource
    resource.setrlimit(getattr(resource, sys.argv[1]), (2**40, 2**40))
runtime.tune_memory()
tensor = torch.ones(2**26)
last, own = tensor.data_ptr() + 4 * 2**26 - 1, False
for line in open("/proc/self/smaps"):
    first, *rest = line.split()
    if first == "VmFlags:" and own:
        print("hg" in rest)
    elif not first.endswith(":"):
        start, end = (int(word, 16) for word in first.split("-"))
        own = start <= last < end
"""


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="no Linux with huge pages")
@pytest.mark.parametrize("memory_is", ["free", "strict", "RLIMIT_AS", "RLIMIT_DATA"])
def test_large_tensors_lie_in_huge_pages(memory_is: str) -> None:
    """Oracle: the kernel's flag of the memory with a tensor's last byte. Not where unused memory counts."""
    import resource  # not on Windows

    strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    if strict or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("here unused memory counts")
    command = [sys.executable, "-c", FLAGS, memory_is]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(memory_is == "free")]


IMPORTS = """
import sys
from speechformer.training import runtime
with runtime.without_scipy_signal():
    stand_in = sys.modules["scipy.signal"]
    import speechformer.training.fit
print("scipy.signal" in sys.modules, "torchmetrics" in sys.modules)
others = [module for module in sys.modules.values() if module is not sys.modules["__main__"]]
print(any(value is stand_in for module in others for value in vars(module).values()))
import scipy
print(scipy.signal.windows.hamming(3)[1])
with runtime.without_scipy_signal():
    print(sys.modules["scipy.signal"] is scipy.signal)
"""


def test_torchmetrics_is_imported_without_scipy_signal() -> None:
    """Nothing holds the stand-in afterwards, and scipy's own module can be imported. Oracle: a Hamming window."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False", "1.0", "True"]
