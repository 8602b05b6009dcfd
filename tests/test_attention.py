"""Oracles: torch's scaled_dot_product_attention, and sums that must be 1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PATTERNS, group

from speechformer.kernels.attention import DroppedAttention
from speechformer.kernels.dispatch import AttentionBias
from speechformer.layers.attention import FLEX_FROM, SelfAttention, attention_bias, attention_reference, flex
from speechformer.layers.dropout import Dropout, masks
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import build_positions


def bias_of(model: str, pattern: str, causal: bool, T: int = 12) -> tuple:
    positions = build_positions(group("model", model), width=16, heads=2, length=T, causal=causal)
    real = torch.arange(T) < torch.tensor([[T], [T - 5]])
    return (
        positions,
        attention_bias(positions, build_pattern(group("pattern", pattern)), T, T, causal, real),
        real,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
def test_written_out_attention_is_torchs(model: str, pattern: str, causal: bool) -> None:
    _, bias, real = bias_of(model, pattern, causal)
    q, k, v = torch.randn(3, 2, 2, 12, 8)
    mixed, weights = attention_reference(q, k, v, bias)
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 12))
    assert (weights[bias.expand_as(weights) == -math.inf] == 0).all()
    assert (weights[1, :, : 12 - 5, 12 - 5 :] == 0).all()  # no real query looks at padding
    assert real[1].sum() == 7


@pytest.mark.parametrize("model", MODELS)
def test_both_paths_of_the_module_agree(model: str) -> None:
    positions, bias, _ = bias_of(model, "window", causal=True)
    attention = SelfAttention(16, 2, rate=0.5, qkv_bias=True, bias=True).eval()
    x = torch.randn(2, 12, 16)
    fast, none = attention(x, positions, bias)
    written_out, weights = attention(x, positions, bias, with_weights=True)
    assert none is None and weights.shape == (2, 2, 12, 12)
    torch.testing.assert_close(fast, written_out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_attention_trained_with_dropout_is_attention_written_out(
    model: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: autograd's gradients of `attend`, under the same mask; only rotated queries and keys go that way."""
    used = []
    fused = DroppedAttention.apply
    monkeypatch.setattr(DroppedAttention, "apply", lambda *given: used.append(1) or fused(*given))
    found = []
    for with_weights in (False, True):
        torch.manual_seed(0)
        positions, bias, real = bias_of(model, "window", causal)
        positions.double()
        bias = attention_bias(positions, build_pattern(group("pattern", "window")), 12, 12, causal, real).double()
        attention = SelfAttention(16, 2, rate=0.3, qkv_bias=True, bias=True).double()
        x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
        mixed, _ = attention(x, positions, bias, with_weights)
        (mixed * torch.randn_like(mixed)).sum().backward()
        trained = [*attention.parameters(), *(positions.parameters() if model == "relative" else ())]
        found.append([mixed, x.grad, *(parameter.grad for parameter in trained)])
    assert len(used) == (model != "rope")
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_masks_made_at_once_are_those_made_one_by_one() -> None:
    """Bit for bit."""
    shapes = [(3, 5, 7), (3, 2, 5, 5), (1, 1), (4, 8)]
    torch.manual_seed(5)
    at_once = masks(shapes, 0.3, torch.float64)
    torch.manual_seed(5)
    for ours, shape in zip(at_once, shapes):
        assert torch.equal(ours, masks([shape], 0.3, torch.float64)[0])


def test_dropout_of_the_weights_is_on_in_training_alone() -> None:
    positions, bias, _ = bias_of("nope", "full", causal=True)
    attention = SelfAttention(16, 2, rate=0.5, qkv_bias=True, bias=True)
    x = torch.randn(2, 12, 16)
    assert not torch.equal(attention(x, positions, bias)[0], attention(x, positions, bias)[0])
    attention.eval()
    assert torch.equal(attention(x, positions, bias)[0], attention(x, positions, bias)[0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_the_rate_and_keeps_the_mean(rate: float) -> None:
    """Oracle: the binomial's standard deviation, times five."""
    n = 400_001  # not a multiple of four
    x = torch.ones(n, requires_grad=True)
    y = Dropout(rate)(x)
    assert abs((y == 0).float().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - rate)))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the gradient passes where the value did, at the same scale


def test_dropout_elements_are_independent() -> None:
    """Oracle: the correlation of n independent pairs is within 5 / sqrt(n); four elements share one draw."""
    y = Dropout(0.5)(torch.ones(400_000)) - 1
    for lag in (1, 2, 3, 4):
        assert abs((y[:-lag] * y[lag:]).mean()) < 5 / math.sqrt(len(y))


def test_dropout_of_nothing_is_nothing_and_repeats_with_the_seed() -> None:
    x = torch.randn(100)
    assert torch.equal(Dropout(0.0)(x), x)
    torch.manual_seed(3)
    first = Dropout(0.3)(x)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.3)(x), first)


def scores_of(model: str, pattern: str, causal: bool, padded: bool, T: int, device: str = "cpu") -> AttentionBias:
    positions = build_positions(group("model", model), width=32, heads=2, length=T, causal=causal).to(device)
    real = torch.arange(T, device=device) < torch.tensor([[T], [T // 2 + 3]], device=device) if padded else None
    made = build_pattern(group("pattern", pattern))
    return AttentionBias(positions, made, causal, T, T, real, torch.device(device), everything=pattern == "full")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
def test_flex_attention_is_attention_written_out(model: str, pattern: str, causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    scores = scores_of(model, pattern, causal, padded, T=150)  # not a multiple of a block
    assert scores.by_blocks
    q, k, v = torch.randn(3, 2, 2, 150, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            flex(q, k, v, scores), attention_reference(q, k, v, scores.dense)[0], atol=1e-5, rtol=1e-5
        )


def test_flex_attention_is_a_part_of_a_compiled_block() -> None:
    """One graph (or torch says why not), and the same values."""
    torch.manual_seed(0)
    scores = scores_of("alibi", "window", causal=True, padded=False, T=150)
    scores.prepare(rate=0.0, with_weights=False)
    _ = scores.blocks  # as on a GPU
    q, k, v = torch.randn(3, 2, 2, 150, 16)
    with torch.no_grad():
        run = torch.compile(lambda q, k, v: flex(q, k, v, scores), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(q, k, v), attention_reference(q, k, v, scores.dense)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_without_a_mask_where_there_is_nothing_to_mask(model: str, causal: bool) -> None:
    """Oracle: attention written out; and a bias, padding or pattern is never left out."""
    torch.manual_seed(0)
    scores = scores_of(model, "full", causal, padded=False, T=12)
    assert scores.causality_alone == (model not in ("alibi", "relative"))
    attention = SelfAttention(32, 2, rate=0.0, qkv_bias=True, bias=True).eval()
    x = torch.randn(2, 12, 32)
    fast, written_out = (attention(x, scores.positions, scores, with_weights=w)[0] for w in (False, True))
    torch.testing.assert_close(fast, written_out)
    assert not scores_of(model, "full", causal, padded=True, T=12).causality_alone
    assert not scores_of(model, "window", causal, padded=False, T=12).causality_alone


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("model", "pattern"),
    [*((model, "window") for model in MODELS), *(("alibi", pattern) for pattern in PATTERNS if pattern != "window")],
)
def test_flex_attention_on_cuda_has_the_gradients_of_attention_written_out(model: str, pattern: str) -> None:
    torch.manual_seed(0)
    scores = scores_of(model, pattern, causal=True, padded=False, T=FLEX_FROM, device="cuda")
    found = []
    for run in (lambda *qkv: flex(*qkv, scores), lambda *qkv: attention_reference(*qkv, scores.dense)[0]):
        torch.manual_seed(1)
        qkv = [torch.randn(1, 2, FLEX_FROM, 16, device="cuda", requires_grad=True) for _ in range(3)]
        scores.positions.zero_grad()
        mixed = run(*qkv)
        mixed.square().sum().backward()
        found.append([mixed.detach(), *(x.grad for x in qkv), *(p.grad for p in scores.positions.parameters())])
    for fast, written_out in zip(*found):
        if written_out is not None:
            torch.testing.assert_close(fast, written_out, atol=5e-3, rtol=5e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_the_fused_kernel_on_cuda_agrees_with_attention_written_out(model: str) -> None:
    positions, bias, _ = bias_of(model, "bigbird", causal=True)
    attention = SelfAttention(16, 2, rate=0.0, qkv_bias=True, bias=True)
    x = torch.randn(2, 12, 16)
    on_cpu = attention(x, positions, bias, with_weights=True)[0]
    attention.cuda(), positions.cuda()
    torch.testing.assert_close(attention(x.cuda(), positions, bias.cuda())[0].cpu(), on_cpu, atol=1e-4, rtol=1e-4)
