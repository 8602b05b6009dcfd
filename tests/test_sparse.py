"""Attention in blocks. Oracle: `layers.attention_reference` with mask and bias of all pairs, in double precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from test_dispatch import CPU, bias_of, reference_bias
from test_models import classifier, every_model_and_pattern, groups, sentences
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speechformer.kernels import dispatch, sparse
from speechformer.kernels.attention import attention_in_query_blocks
from speechformer.kernels.dispatch import AttentionBias, choose_kernel
from speechformer.kernels.sparse import Part, layout_of, sparse_attention
from speechformer.layers.attention import attention_mask, attention_reference
from speechformer.layers.patterns import build_pattern, with_first_token
from speechformer.layers.positions import build_positions

B, N, T, H = 2, 2, 151, 16  # odd: not a multiple of a block


def in_double(bias: AttentionBias) -> tuple[AttentionBias, list[Part], list[Tensor]]:
    """Return a bias in double precision, with gates if the encoding has any, its blocks, and what gets a gradient."""
    torch.manual_seed(0)
    trained = [torch.randn(B, N, T, H, dtype=torch.double, requires_grad=True) for _ in range(3)]
    trained += bias.positions.double().parameters()
    if bias.positions.overrides("gate"):
        z_BSN = torch.randn(B, T, N, dtype=torch.double, requires_grad=True)
        bias, trained = dataclasses.replace(bias, z_BSN=z_BSN), [*trained, z_BSN]
    return bias, blocks_of(bias), trained


def blocks_of(bias: AttentionBias) -> list[Part]:
    """Return the blocks of a bias, and let it use them, whatever the length."""
    bias.layout = layout_of(bias.pattern, bias.T, bias.causal, bias.device)
    assert bias.layout is not None
    return bias.layout


def pairs_of(layout: list[Part], length: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """Yield for each group the indices of its allowed pairs, without padding, and their queries and keys."""
    for part in layout:
        for blocks in part.groups:
            g, query, key = blocks.mask.nonzero().unbind(dim=1)
            tokens = part.place.view(-1, part.block)[blocks.queries][g, query] < length
            yield (g[tokens], query[tokens], key[tokens]), blocks.i[g, query, 0][tokens], blocks.j[g, 0, key][tokens]


class Dropout:
    """Dropout that keeps its masks."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.masks.append((torch.rand_like(x) > 0.4).to(x) / 0.6)
        return x * self.masks[-1]


def check(output: Tensor, bias: AttentionBias, trained: list[Tensor], mask: Tensor | float = 1.0) -> None:
    """Compare output and gradients with those of the reference."""

    def dropout(weights: Tensor) -> Tensor:
        return weights * mask

    reference = attention_reference(*trained[:3], reference_bias(bias), dropout)[0]  # type: ignore[arg-type]
    grad = torch.randn_like(reference)
    options: Any = {"allow_unused": True, "retain_graph": True}
    ours, theirs = (torch.autograd.grad(x, trained, grad, **options) for x in (output, reference))
    for x, other in zip((output, *ours), (reference, *theirs), strict=True):
        assert (x is None) == (other is None)
        if x is not None:
            torch.testing.assert_close(x, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("padded", "cached", "kept"),
    [(False, 1 << 13, sparse.KEPT), (True, 1 << 13, 0), (True, sparse.CACHED, sparse.KEPT)],
)
@pytest.mark.parametrize("causal", [True, False])
@every_model_and_pattern
def test_sparse_blocks_are_the_reference(
    model: str, pattern: str, causal: bool, padded: bool, cached: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without and with dropout: the masks of all blocks, put where their pairs are, make that of the reference.

    All heads of a sequence at once, or some blocks of one head. Weights above KEPT are computed again.
    """
    monkeypatch.setattr(sparse, "CACHED", cached)
    monkeypatch.setattr(sparse, "KEPT", kept)
    bias, layout, trained = in_double(bias_of(model, pattern, causal, padded, T))
    check(sparse_attention(*trained[:3], layout, bias.of_blocks), bias, trained)
    dropout, mask_BNTT = Dropout(), torch.zeros(B, N, T, T, dtype=torch.double)
    output = sparse_attention(*trained[:3], layout, bias.of_blocks, dropout)
    for (index, i, j), mask in zip(pairs_of(layout, T), dropout.masks, strict=True):
        mask_BNTT[:, :, i, j] = mask[:, :, *index]
    check(output, bias, trained, mask_BNTT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_query_blocks_are_the_reference(model: str, causal: bool) -> None:
    """Without and with dropout: the masks that the forward pass has drawn, in the reference."""
    bias, _, trained = in_double(bias_of(model, "full", causal, True, T))
    check(attention_in_query_blocks(*trained[:3], bias.of_rows, causal, None, rows=64), bias, trained)
    dropout = Dropout()
    output = attention_in_query_blocks(*trained[:3], bias.of_rows, causal, dropout, rows=64)
    rows = [torch.nn.functional.pad(mask, (0, T - mask.shape[-1])) for mask in dropout.masks]
    check(output, bias, trained, torch.cat(rows, dim=2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first_token", [False, True])
@pytest.mark.parametrize("length", [1, 31, 64, 257])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_hold_every_pair_of_a_pattern_once(name: str, length: int, first_token: bool, causal: bool) -> None:
    pattern = build_pattern(group("pattern", name))
    pattern = with_first_token(pattern) if first_token else pattern
    count = torch.zeros(length, length, dtype=torch.long)
    for _, i, j in pairs_of(layout_of(pattern, length, causal, CPU) or [], length):
        count.index_put_((i, j), torch.ones_like(i), accumulate=True)
    assert torch.equal(count, attention_mask(pattern, length, length, causal)[0, 0].long())


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_of_all_pairs_is_built_or_kept(name: str) -> None:
    """Neither for the layout nor for attention; query blocks build a part of the rows, and keep none."""
    length = 2048
    bias, saved = bias_of("alibi", name, length=length), dict[int, int]()
    q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 1, 2, length, 4))
    layout_of.cache_clear()

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        if name == "full":
            output = attention_in_query_blocks(q, k, v, bias.of_rows, True, None)
        else:
            assert bias.layout is not None
            output = sparse_attention(q, k, v, bias.layout, bias.of_blocks)
        output.sum().backward()
    assert (
        largest.elements <= length**2 / 2 and sum(saved.values()) <= length**2
    )  # the weights of two heads are twice


def test_a_pattern_of_many_pairs_is_rejected_before_its_blocks_are_built() -> None:
    layout_of.cache_clear()
    bias = dataclasses.replace(bias_of("nope", "window", length=4096), pattern=lambda i, j: (i - j) % 4 == 0)
    with LargestTensor() as largest:
        assert bias.layout is None
    assert largest.elements <= 32 * 4096 and choose_kernel(bias, CPU, 0.0, False) == "query blocks"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_single_precision(dtype: torch.dtype) -> None:
    """Oracle: the reference in double precision over the same inputs. Output and gradients have one rounding."""
    bias = bias_of("alibi", "strided", length=T)
    inputs = [x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, T, H)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        output = sparse_attention(*inputs, blocks_of(bias), bias.of_blocks)  # type: ignore[arg-type]
    reference = attention_reference(*exact, reference_bias(bias))[0]  # type: ignore[arg-type]
    grad = torch.randn_like(output)
    ours = output, *torch.autograd.grad(output, inputs, grad)
    theirs = reference, *torch.autograd.grad(reference, exact, grad.double())
    for x, other in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), other, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", ["sparse blocks", "query blocks"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_attention_in_blocks_has_the_gradients_of_one_without(
    model: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a CLS token, through padding and unpadding; oracle: the same model with other kernels."""
    network, ids = classifier(**groups(model, "strided"), dropout=0.0, pool="cls").double(), sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    chosen, choose, results = [], choose_kernel, []
    monkeypatch.setattr(dispatch, "choose_kernel", lambda *a, **b: chosen.append(choose(*a, **b)) or chosen[-1])
    monkeypatch.setattr(dispatch, "SPARSE_COST", 1e9)
    for min_length in (99, 1):
        monkeypatch.setattr(dispatch, "SPARSE_MIN_LENGTH", 99 if kernel == "query blocks" else min_length)
        monkeypatch.setattr(dispatch, "QUERY_BLOCKS_MIN_LENGTH", min_length)
        network.zero_grad()
        network.encoder.last_bias = None
        output = network(ids)
        output.square().sum().backward()
        results.append([output, *(x.grad.clone() for x in network.parameters() if x.grad is not None)])
    assert chosen[-1] == kernel != chosen[0]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_random_positions_are_not_computed_again() -> None:
    """A later pass draws others, so the gradients of the first would be wrong."""
    bias = bias_of("alibi", "full", length=2048)
    spec = {**group("model", "randomised"), "encoding": "kerple"}
    redrawn = build_positions(spec, width=32, heads=2, length=2048, causal=True)
    assert choose_kernel(bias, CPU, 0.0, False) == "query blocks"
    assert choose_kernel(dataclasses.replace(bias, positions=redrawn), CPU, 0.0, False) == "SDPA"


def test_the_share_of_pairs_that_blocks_compute() -> None:
    """A window of 64 in 4,096 tokens: 1.6 % of the pairs are allowed, and blocks of 32 queries have 96 keys."""
    pattern = build_pattern({"name": "window", "window": 64})
    groups = [blocks for part in layout_of(pattern, 4096, True, CPU) or [] for blocks in part.groups]
    assert sum(blocks.mask.numel() for blocks in groups) == 4096 * 96
    cost = 96 / 4096 * 32.5 / 32 * 56 / 32  # a run of 32 keys costs half a key more, a block of 32 queries 24 more
    assert layout_of(pattern, 4096, True, CPU, 1.001 * cost) is not None
    assert layout_of(pattern, 4096, True, CPU, 0.999 * cost) is None
