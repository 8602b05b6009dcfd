"""RoPE by complex products. The oracle is `layers.positions.turn_pairs`, to the bit."""

from __future__ import annotations

import pytest
import torch
from conftest import group
from test_models import classifier, sentences

from speechformer.kernels import dispatch
from speechformer.kernels.rotation import Rotation, turn_pairs_at_once
from speechformer.layers.positions import RoPE, build_positions, sinusoid, turn_pairs

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def heads_of_projection(H: int, dtype: torch.dtype, T: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries as the layers cut them out of a projection, [B, N, T, H], and the projection."""
    torch.manual_seed(0)
    qkv_BTE = torch.randn(3, T, 3 * 2 * H, dtype=dtype, requires_grad=True)
    return qkv_BTE.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[0], qkv_BTE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "R"), [(16, 16), (64, 64), (32, 16), (24, 24), (6, 6), (7, 4)])
def test_turning_at_once_is_equal_to_the_bit(H: int, R: int, dtype: torch.dtype) -> None:
    table_TR = sinusoid(7, R, start=5)
    results = []
    for turn in (turn_pairs, turn_pairs_at_once):
        q_BNTH, qkv_BTE = heads_of_projection(H, dtype)
        turned = turn(q_BNTH, table_TR)
        weights = torch.randn(turned.shape, generator=torch.Generator().manual_seed(1), dtype=turned.dtype)
        (turned * weights).sum().backward()
        results.append((turned, qkv_BTE.grad))
    for expected, actual in zip(*results):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("H", "dtype", "is_fast"),
    [(16, torch.float32, True), (24, torch.float32, False), (16, torch.float64, True), (16, torch.bfloat16, False)],
)
def test_where_the_fast_rotation_is_taken(H: int, dtype: torch.dtype, is_fast: bool) -> None:
    turned = turn_pairs_at_once(heads_of_projection(H, dtype)[0], sinusoid(7, H))
    assert (type(turned.grad_fn).__name__ == "RotationBackward") == is_fast


def test_the_gradient_of_the_rotation_has_a_gradient() -> None:
    x_BNTH = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    z_TP = torch.polar(torch.ones(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(Rotation.apply, (x_BNTH, z_TP))
    assert torch.autograd.gradgradcheck(Rotation.apply, (x_BNTH, z_TP))


def test_an_expanded_gradient() -> None:
    q_BNTH, qkv_BTE = heads_of_projection(16, torch.float32)
    turn_pairs_at_once(q_BNTH, sinusoid(7, 16)).sum().backward()
    expected, qkv = heads_of_projection(16, torch.float32)
    turn_pairs(expected, sinusoid(7, 16)).sum().backward()
    assert torch.equal(qkv_BTE.grad, qkv.grad)


@pytest.mark.parametrize("padded", [False, True])
def test_fused_dropout_rotates_to_the_same_bits(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the reference, which rotates heads and then drops weights."""
    results = []
    for is_fused in (True, False):
        model = classifier(model=group("model", "rope"), width=32, heads=2, dropout=0.3).train()
        if not is_fused:
            monkeypatch.setattr(dispatch, "plain_rope", lambda *arguments: None)
            model.encoder.positions.turn = turn_pairs
        ids = sentences()
        if padded:
            ids[1, 9:], ids[2, 1:] = 0, 0
        torch.manual_seed(1)
        loss = model(ids).square().sum()
        loss.backward()
        results.append([loss, *(own.grad for own in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["rope", "xpos", "randomised"])
def test_models_take_it_and_train_to_the_same_bits(name: str) -> None:
    losses = []
    for turn in (None, turn_pairs):
        torch.manual_seed(0)
        model = classifier(model=group("model", name), width=32, heads=2).train()
        encodings = [own for own in model.modules() if isinstance(own, RoPE)]
        for own in encodings:
            assert own.turn is turn_pairs_at_once
            own.turn = own.turn if turn is None else turn
        assert encodings
        torch.manual_seed(1)
        loss = model(sentences()).square().sum()
        loss.backward()
        losses.append([loss, *(own.grad for own in model.parameters() if own.grad is not None)])
    assert all(map(torch.equal, *losses))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_threads_share(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q_BNTH, _ = heads_of_projection(32, torch.float32, T=1001)
        assert torch.equal(turn_pairs_at_once(q_BNTH, sinusoid(1001, 32)), turn_pairs(q_BNTH, sinusoid(1001, 32)))
    finally:
        torch.set_num_threads(before)


def test_an_encoding_alone_is_the_reference() -> None:
    positions = build_positions(group("model", "rope"), width=32, heads=2, length=8, causal=True)
    assert positions.turn is turn_pairs
