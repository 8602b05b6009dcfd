"""Linear layers that add their bias after the product. The oracle is `torch.nn.functional.linear`, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from speechformer.kernels import linear as kernel
from speechformer.kernels.linear import EXACT_WIDTH, FastLinear

SHAPES = ((1,), (7,), (31,), (2, 32), (300,), (1, 1501), (0,), (0, 5), (2, 0))
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [2, 63, 64, 100, EXACT_WIDTH])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_torch(width: int, dtype: torch.dtype, threads: None) -> None:
    torch.manual_seed(0)
    for outputs in (2, 3, 64, 192, 256):
        layer = FastLinear(width, outputs, dtype=dtype)
        for shape in SHAPES:
            x = torch.randn(*shape, width, dtype=dtype)
            apart = torch.randn(width, *shape, dtype=dtype).movedim(0, -1)  # not contiguous
            for own in (x, apart):
                expected = F.linear(own, layer.weight, layer.bias)
                with torch.inference_mode():
                    assert torch.equal(layer(own), expected)


def test_the_product_is_apart_from_the_bias_without_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    linear, mm = F.linear, torch.mm
    monkeypatch.setattr(F, "linear", lambda *arguments: calls.append("linear") or linear(*arguments))
    monkeypatch.setattr(torch, "mm", lambda *arguments: calls.append("mm") or mm(*arguments))
    monkeypatch.setattr(kernel, "HAS_MKL", True)
    narrow, wide, x = FastLinear(8, 3), FastLinear(EXACT_WIDTH + 1, 3), torch.randn(4, 8)
    narrow(x)
    with torch.no_grad():
        narrow(x)
        wide(torch.randn(4, EXACT_WIDTH + 1))
        FastLinear(1, 3)(torch.randn(4, 1))
        FastLinear(8, 1)(x)
        FastLinear(8, 3, bias=False)(x)
        narrow(x[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert narrow(x).dtype == torch.bfloat16
        torch.func.vmap(narrow)(x[None])
        monkeypatch.setattr(kernel, "HAS_MKL", False)
        narrow(x)
    assert calls == ["linear", "mm", *["linear"] * 8]
