"""Attention in blocks. Oracle: `layers.attention_reference` with mask and bias of all pairs, in double precision."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from test_attention import pairs_of
from test_models import classifier, every_model_and_pattern, groups, sentences
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speechformer.kernels import dispatch
from speechformer.kernels.sparse import SparseBlocks, layout_of
from speechformer.layers.attention import Attention, Pairs, attention_mask
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import TopBlocks, build_pattern, with_first_token

B, N, T, H = 2, 2, 151, 16  # odd: not a multiple of a block
CPU = torch.device("cpu")


def blocks_of(pairs: Pairs) -> SparseBlocks:
    layout = layout_of(pairs.pattern, len(pairs.i_T), pairs.causal, CPU, math.inf)
    if layout is None:
        pytest.skip("all pairs have no blocks")
    return SparseBlocks(pairs, layout)


class RecordedDropout(Dropout):
    """Dropout that keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.4)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks.append((torch.rand_like(x) > 0.4).to(x) / 0.6)
        return x * self.masks[-1]


class FixedDropout(Dropout):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(0.4)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@every_model_and_pattern
def test_sparse_blocks_are_the_reference(model: str, pattern: str, causal: bool, padded: bool) -> None:
    """Without and with dropout: the masks of all blocks, put where their pairs are, make that of the reference."""
    torch.manual_seed(0)
    pairs = pairs_of(model, pattern, causal, padded, T)
    trained = [torch.randn(B, N, T, H, dtype=torch.double, requires_grad=True) for _ in range(3)]
    trained += pairs.positions.double().parameters()
    gates = None
    if pairs.positions.overrides("gate"):
        gates = torch.randn(B, N, T, dtype=torch.double, requires_grad=True)
        trained.append(gates)
    kernel, bias = blocks_of(pairs), pairs.bias(*pairs.all)
    recorded, mask = RecordedDropout(), torch.zeros(B, N, T, T, dtype=torch.double)
    outputs = [kernel(*trained[:3], dropout, gates)[0] for dropout in (Dropout(0.0), recorded)]  # type: ignore[arg-type]
    blocks = [block for part in kernel.layout for block in zip([part] * len(part.keys), part.queries, part.keys)]
    for (part, i, j), of_block in zip(blocks, recorded.masks, strict=True):
        shown = attention_mask(part.pattern, i[:, None], j[None], causal)
        mask[:, :, i[:, None], j[None]] += of_block * shown
    for output, dropout in zip(outputs, (Dropout(0.0), FixedDropout(mask)), strict=True):
        reference = Attention(bias, pairs)(*trained[:3], dropout, gates)[0]  # type: ignore[arg-type]
        grad = torch.randn_like(reference)
        options: Any = {"allow_unused": True, "retain_graph": True}
        ours, theirs = (torch.autograd.grad(x, trained, grad, **options) for x in (output, reference))
        for x, other in zip((output, *ours), (reference, *theirs), strict=True):
            assert (x is None) == (other is None)
            if x is not None:
                torch.testing.assert_close(x, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first_token", [False, True])
@pytest.mark.parametrize("length", [1, 31, 64, 257])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_hold_every_pair_of_a_pattern_once(name: str, length: int, first_token: bool, causal: bool) -> None:
    pattern = build_pattern(group("pattern", name))
    pattern = with_first_token(pattern) if first_token else pattern
    count, index = torch.zeros(length, length, dtype=torch.long), torch.arange(length)
    for part in layout_of(pattern, length, causal, CPU, math.inf) or []:
        for i, j in zip(part.queries, part.keys):
            count[i[:, None], j[None]] += attention_mask(part.pattern, i[:, None], j[None], causal).long()
    expected = attention_mask(pattern, index[:, None], index[None], causal).long()
    assert torch.equal(count, expected) or name == "full"


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_of_all_pairs_is_built_or_kept(name: str) -> None:
    """Neither for the layout nor for attention."""
    length, saved = 2048, dict[int, int]()
    pairs = pairs_of("alibi", name, length=length)
    if isinstance(pairs.pattern, TopBlocks):
        pytest.skip("all pairs may be seen")
    q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 1, 2, length, 4))
    layout_of.cache_clear()

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        blocks_of(pairs)(q, k, v, Dropout(0.0))[0].sum().backward()
    assert largest.elements <= length**2 / 2 and sum(saved.values()) <= length**2  # two heads have twice as many


def test_the_share_of_pairs_that_blocks_compute() -> None:
    """A window of 64 in 4,096 tokens: blocks of 64 queries have 127 keys, but the first, and 64 more for overhead."""
    pattern, pairs = build_pattern({"name": "window", "window": 64}), 64 * (63 * 127 + 64)
    layout = layout_of(pattern, 4096, True, CPU, 1.0) or []
    assert sum(len(i) * len(j) for part in layout for i, j in zip(part.queries, part.keys)) == pairs
    cost = (pairs + 4096 * 64) / 4096**2
    assert layout_of(pattern, 4096, True, CPU, 1.001 * cost) is not None
    assert layout_of(pattern, 4096, True, CPU, 0.999 * cost) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_single_precision(dtype: torch.dtype) -> None:
    """Oracle: the reference in double precision over the same inputs. Output and gradients have one rounding."""
    pairs = pairs_of("alibi", "strided", length=T)
    inputs = [x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, T, H)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        output = blocks_of(pairs)(*inputs, Dropout(0.0))[0]  # type: ignore[arg-type]
    reference = Attention(pairs.bias(*pairs.all), pairs)(*exact, Dropout(0.0))[0]  # type: ignore[arg-type]
    grad = torch.randn_like(output)
    ours = output, *torch.autograd.grad(output, inputs, grad)
    theirs = reference, *torch.autograd.grad(reference, exact, grad.double())
    for x, other in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), other, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_attention_in_blocks_has_the_gradients_of_one_without(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a CLS token, through padding and unpadding; oracle: the same model with a dense mask."""
    network, ids = classifier(**groups(model, "strided"), dropout=0.0, pool="cls").double().train(), sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    chosen, choose, results = [], network.encoder.choose, []
    monkeypatch.setattr(network.encoder, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    monkeypatch.setattr(dispatch, "SPARSE_COST", 1e9)
    for min_length in (99, 1):
        monkeypatch.setattr(dispatch, "SPARSE_MIN_LENGTH", min_length)
        network.zero_grad()
        output = network(ids)
        output.square().sum().backward()
        results.append([output, *(x.grad.clone() for x in network.parameters() if x.grad is not None)])
    assert [type(kernel) for kernel in chosen] == [dispatch.SDPA, SparseBlocks]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_other_tokens_of_a_wide_pattern_take_a_dense_mask() -> None:
    pairs = dataclasses.replace(pairs_of("nope", "window", length=1024), pattern=lambda i, j: (i - j) % 4 == 0)
    assert layout_of(pairs.pattern, 1024, True, CPU, dispatch.SPARSE_COST) is None
