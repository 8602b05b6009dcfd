"""RoPE by complex products. The oracle is `layers.positions.rotate_pairs`, to the bit."""

from __future__ import annotations

import pytest
import torch
from conftest import group
from test_models import classifier, sentences

from speechformer.kernels import dispatch
from speechformer.kernels.rotation import Rotation, rotate_pairs_as_complex
from speechformer.layers.positions import RoPE, build_positions, rotate_pairs, sinusoid

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def heads_of_projection(
    H: int, dtype: torch.dtype, B: int = 3, N: int = 2, T: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries as the layers cut them out of a projection, [B, N, T, H], and the projection."""
    torch.manual_seed(0)
    qkv_BTE = torch.randn(B, T, 3 * N * H, dtype=dtype, requires_grad=True)
    return qkv_BTE.unflatten(-1, (3, N, -1)).permute(2, 0, 3, 1, 4)[0], qkv_BTE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "R"), [(16, 16), (64, 64), (32, 16), (24, 24), (6, 6), (7, 4)])
def test_complex_products_are_equal_to_the_bit(H: int, R: int, dtype: torch.dtype) -> None:
    table_TR = sinusoid(7, R, start=5)
    results = []
    for rotate in (rotate_pairs, rotate_pairs_as_complex):
        q_BNTH, qkv_BTE = heads_of_projection(H, dtype)
        rotated = rotate(q_BNTH, table_TR)
        weights = torch.randn(rotated.shape, generator=torch.Generator().manual_seed(1), dtype=rotated.dtype)
        (rotated * weights).sum().backward()
        results.append((rotated, qkv_BTE.grad))
    for expected, actual in zip(*results):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("H", "dtype", "is_fast"),
    [(16, torch.float32, True), (24, torch.float32, False), (16, torch.float64, True), (16, torch.bfloat16, False)],
)
def test_where_the_fast_rotation_is_taken(H: int, dtype: torch.dtype, is_fast: bool) -> None:
    rotated = rotate_pairs_as_complex(heads_of_projection(H, dtype)[0], sinusoid(7, H))
    assert (type(rotated.grad_fn).__name__ == "RotationBackward") == is_fast


def test_the_gradient_of_the_rotation_has_a_gradient() -> None:
    x_BNTH = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    z_TP = torch.polar(torch.ones(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(Rotation.apply, (x_BNTH, z_TP))
    assert torch.autograd.gradgradcheck(Rotation.apply, (x_BNTH, z_TP))


def test_an_expanded_gradient() -> None:
    q_BNTH, qkv_BTE = heads_of_projection(16, torch.float32)
    rotate_pairs_as_complex(q_BNTH, sinusoid(7, 16)).sum().backward()
    expected, qkv = heads_of_projection(16, torch.float32)
    rotate_pairs(expected, sinusoid(7, 16)).sum().backward()
    assert torch.equal(qkv_BTE.grad, qkv.grad)


@pytest.mark.parametrize("padded", [False, True])
def test_fused_dropout_rotates_to_the_same_bits(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the reference, which rotates heads and then drops weights."""
    results = []
    for is_fused in (True, False):
        model = classifier(model=group("model", "rope"), width=32, heads=2, dropout=0.3).train()
        if not is_fused:
            monkeypatch.setattr(dispatch, "plain_rope", lambda *arguments: None)
            model.encoder.positions.rotate_heads = rotate_pairs
        ids = sentences()
        if padded:
            ids[1, 9:], ids[2, 1:] = 0, 0
        torch.manual_seed(1)
        loss = model(ids).square().sum()
        loss.backward()
        results.append([loss, *(own.grad for own in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["rope", "xpos", "randomised"])
def test_models_rotate_by_complex_products_to_the_same_bits(name: str) -> None:
    """Without dropout, so that RoPE does not take the fused kernel."""
    losses, calls = [], []

    def reference(x_BNTH: torch.Tensor, table_TR: torch.Tensor) -> torch.Tensor:
        calls.append(x_BNTH.shape)
        return rotate_pairs(x_BNTH, table_TR)

    for is_fast in (True, False):
        torch.manual_seed(0)
        model = classifier(model=group("model", name), width=32, heads=2, dropout=0.0).train()
        encodings = [own for own in model.modules() if isinstance(own, RoPE)]
        assert encodings
        for own in encodings:
            assert own.rotate_heads is rotate_pairs_as_complex
            own.rotate_heads = own.rotate_heads if is_fast else reference
        torch.manual_seed(1)
        loss = model(sentences()).square().sum()
        loss.backward()
        losses.append([loss, *(own.grad for own in model.parameters() if own.grad is not None)])
    assert calls and all(map(torch.equal, *losses))


@pytest.mark.parametrize("threads", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(16, 256, 4, 16), (1, 3, 4999, 16), (2, 2, 1001, 32), (17, 241, 2, 32)])
def test_shares_of_threads_do_not_change_a_bit(shape: tuple[int, int, int, int], threads: int) -> None:
    """Where a thread's share would end within a vector, the reference is taken."""
    B, T, N, H = shape
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for rotate in (rotate_pairs, rotate_pairs_as_complex):
            q_BNTH, qkv_BTE = heads_of_projection(H, torch.float32, B, N, T)
            rotated = rotate(q_BNTH, sinusoid(T, H))
            rotated.square().sum().backward()
            results.append((rotated, qkv_BTE.grad))
        assert all(map(torch.equal, *results))
    finally:
        torch.set_num_threads(before)


def test_any_strides() -> None:
    x = torch.randn(2, 3, 5, 17)[..., 1:]
    assert torch.equal(rotate_pairs_as_complex(x, sinusoid(5, 16)), rotate_pairs(x, sinusoid(5, 16)))


def test_gradients_of_functions() -> None:
    """`torch.func` can differentiate a model with RoPE. Oracle: autograd."""
    model = classifier(model=group("model", "rope"), width=32, heads=2)
    parameters = dict(model.named_parameters())

    def loss(own: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, own, sentences()).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, own in parameters.items():
        torch.testing.assert_close(gradients[name], own.grad)


def test_an_encoding_alone_is_the_reference() -> None:
    positions = build_positions(group("model", "rope"), width=32, heads=2, length=8, causal=True)
    assert positions.rotate_heads is rotate_pairs
