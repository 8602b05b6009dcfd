"""Linear layers that add their bias after the product. The oracle is `torch.nn.functional.linear`, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speechformer.kernels.linear import EXACT_WIDTH, FastLinear

ROWS = (1, 7, 31, 64, 300, 1500)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 100, EXACT_WIDTH, EXACT_WIDTH + 1, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_torch(width: int, dtype: torch.dtype, threads: None) -> None:
    torch.manual_seed(0)
    for outputs in (3, 64, 192):
        layer = FastLinear(width, outputs, dtype=dtype)
        for rows in ROWS:
            x = torch.randn(rows, 2, width, dtype=dtype)
            expected = F.linear(x, layer.weight, layer.bias)
            with torch.no_grad():
                actual = layer(x)
            assert actual.shape == expected.shape
            if torch.backends.mkl.is_available():
                assert torch.equal(actual, expected)
            else:  # another BLAS may sum in other steps
                torch.testing.assert_close(actual, expected.detach())


def test_the_product_is_apart_from_the_bias_without_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    linear, mm = F.linear, torch.mm
    monkeypatch.setattr(F, "linear", lambda *arguments: calls.append("linear") or linear(*arguments))
    monkeypatch.setattr(torch, "mm", lambda *arguments: calls.append("mm") or mm(*arguments))
    narrow, wide, x = FastLinear(8, 3), FastLinear(EXACT_WIDTH + 1, 3), torch.randn(4, 8)
    narrow(x)
    with torch.no_grad():
        narrow(x)
        wide(torch.randn(4, EXACT_WIDTH + 1))
        FastLinear(8, 3, bias=False)(x)
        narrow(x[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert narrow(x).dtype == torch.bfloat16
        torch.func.vmap(narrow)(x[None])
    assert calls == ["linear", "mm", *["linear"] * 5]


def test_gradients_are_those_of_torch() -> None:
    layer = FastLinear(8, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(layer, torch.randn(4, 8, dtype=torch.float64, requires_grad=True))
