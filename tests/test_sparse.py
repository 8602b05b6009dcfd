"""Attention in blocks. Oracle: `layers.attention_reference` with mask and bias of all pairs, in double precision."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from test_dispatch import CPU, KINDS, bias_of
from test_models import classifier, decoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speechformer.bench import attention
from speechformer.kernels import dispatch, sparse
from speechformer.kernels.attention import attention_in_query_blocks
from speechformer.kernels.dispatch import AttentionBias, choose_kernel
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.sparse import Part, layout_of, pairs_computed, sparse_attention
from speechformer.layers.attention import attention_mask, attention_reference, query_and_key_indices
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


def dense(bias: AttentionBias) -> Tensor:
    pairs = query_and_key_indices(T, T)
    return bias.dense if bias.z_BSN is None else bias.dense + bias.positions.gate(bias.z_BSN, *pairs)


def pairs_of(layout: list[Part], length: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """Yield for each group the indices of its allowed pairs, without padding, and their queries and keys."""
    for part in layout:
        for own in part.groups:
            g, query, key = own.mask.nonzero().unbind(dim=1)
            tokens = part.place.view(-1, part.block)[own.queries][g, query] < length
            yield (g[tokens], query[tokens], key[tokens]), own.i[g, query, 0][tokens], own.j[g, 0, key][tokens]


def check(output: Tensor, reference: Tensor, trained: list[Tensor]) -> None:
    """Compare outputs and gradients."""
    grad = torch.randn_like(reference)
    ours, theirs = (
        torch.autograd.grad(own, trained, grad, allow_unused=True, retain_graph=True) for own in (output, reference)
    )
    for own, other in zip((output, *ours), (reference, *theirs), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("padded", "cached"), [(False, 1 << 13), (True, 1 << 13), (True, sparse.CACHED)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name != "full"])
@pytest.mark.parametrize("model", MODELS)
def test_sparse_blocks_are_the_reference(
    model: str, pattern: str, causal: bool, padded: bool, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without and with dropout: the masks of all blocks, put where their pairs are, make that of the reference.

    All heads of a sequence at once, or some blocks of one head.
    """
    monkeypatch.setattr(sparse, "CACHED", cached)
    bias, layout, trained = in_double(bias_of(model, pattern, causal, padded, T))
    q, k, v = trained[:3]
    masks: list[Tensor] = []

    def dropout(x: Tensor) -> Tensor:
        masks.append((torch.rand_like(x) > 0.4).to(x) / 0.6)
        return x * masks[-1]

    check(sparse_attention(q, k, v, layout, bias.of_blocks), attention_reference(q, k, v, dense(bias))[0], trained)
    output = sparse_attention(q, k, v, layout, bias.of_blocks, dropout)
    mask_BNTT = torch.zeros(B, N, T, T, dtype=torch.double)
    for (index, i, j), mask in zip(pairs_of(layout, T), masks, strict=True):
        mask_BNTT[:, :, i, j] = mask[:, :, *index]
    check(output, attention_reference(q, k, v, dense(bias), lambda x: x * mask_BNTT)[0], trained)  # type: ignore[arg-type]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("model", "pattern"), [*KINDS, ("kerple", "full"), ("forgetting", "full")])
def test_query_blocks_are_the_reference(model: str, pattern: str, causal: bool, padded: bool) -> None:
    bias, _, trained = in_double(bias_of(model, pattern, causal, padded, T))
    output = attention_in_query_blocks(*trained[:3], bias.of_rows, causal, None, rows=64)
    check(output, attention_reference(*trained[:3], dense(bias))[0], trained)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "full"])
def test_patterns_with_a_first_token_are_the_reference(name: str, causal: bool) -> None:
    bias = bias_of("kerple", name, causal, False, T)
    bias, layout, trained = in_double(dataclasses.replace(bias, pattern=with_first_token(bias.pattern)))
    reference = attention_reference(*trained[:3], dense(bias))[0]
    check(sparse_attention(*trained[:3], layout, bias.of_blocks), reference, trained)


def test_query_blocks_draw_the_same_dropout_forwards_and_backwards() -> None:
    """Oracle: the masks drawn in the forward pass, in the reference."""
    bias, _, trained = in_double(bias_of("kerple", "full", True, False, T))
    masks: list[Tensor] = []

    def dropout(x: Tensor) -> Tensor:
        masks.append((torch.rand_like(x) > 0.4).to(x) / 0.6)
        return x * masks[-1]

    output = attention_in_query_blocks(*trained[:3], bias.of_rows, True, dropout, rows=64)
    rows = [torch.nn.functional.pad(mask, (0, T - mask.shape[-1])) for mask in masks[:3]]
    mask_BNTT = torch.cat(rows, dim=2)
    check(output, attention_reference(*trained[:3], dense(bias), lambda x: x * mask_BNTT)[0], trained)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kept", "cached"), [(sparse.KEPT, 1 << 13), (sparse.KEPT, 0), (0, 0)])
@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name != "full"])
def test_gradients_of_the_kernel(pattern: str, kept: int, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: finite differences. Weights above KEPT are computed again in the backward pass."""
    monkeypatch.setattr(sparse, "KEPT", kept)
    monkeypatch.setattr(sparse, "CACHED", cached)
    layout = layout_of(build_pattern(group("pattern", pattern)), 40, True, CPU) or []
    inputs = [torch.randn(2, 3, 40, 2, dtype=torch.double, requires_grad=True) for _ in range(3)]
    inputs += [
        torch.randn(1, 3, *own.mask.shape, dtype=torch.double, requires_grad=True)
        for part in layout
        for own in part.groups
    ]

    def kernel(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        own = iter(values)
        biases = [[torch.where(group.mask, next(own), -torch.inf) for group in part.groups] for part in layout]
        return sparse_attention(q, k, v, layout, biases)

    assert torch.autograd.gradcheck(kernel, inputs, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 31, 64, 150, 257])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_hold_every_pair_of_a_pattern_once(name: str, length: int, causal: bool) -> None:
    pattern = build_pattern(group("pattern", name))
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


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "full"])
def test_nothing_of_all_pairs_is_ever_built(name: str) -> None:
    """Neither for the layout nor for attention, forwards and backwards."""
    bias, length = bias_of("alibi", name, length=2048), 2048
    q, k, v = torch.randn(3, 1, 2, length, 4).unbind()
    layout_of.cache_clear()
    with LargestTensor() as largest:
        assert bias.layout is not None
        output = sparse_attention(q.requires_grad_(), k, v, bias.layout, bias.of_blocks)
        output.sum().backward()
    assert largest.elements <= length**2 / 2  # two heads


def test_a_pattern_of_many_pairs_is_rejected_before_its_blocks_are_built() -> None:
    layout_of.cache_clear()
    bias = dataclasses.replace(bias_of("nope", "window", length=4096), pattern=lambda i, j: (i - j) % 4 == 0)
    with LargestTensor() as largest:
        assert bias.layout is None
    assert largest.elements <= 32 * 4096 and choose_kernel(bias, CPU, 0.0, False) == "query blocks"


def memory_of(run: Callable[[int], Any], length: int) -> int:
    """Return the elements that autograd saves."""
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x.detach()  # an output itself would keep its graph alive

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        _ = run(length)
    return sum(saved.values())


@pytest.mark.parametrize("pattern", ["window", "full"])
def test_memory_for_the_backward_pass_grows_with_the_length(pattern: str) -> None:
    def run(length: int) -> Tensor:
        bias = bias_of("kerple", pattern, length=length)
        qkv = torch.randn(3, 1, 2, length, 8).unbind()
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        if pattern == "full":
            return attention_in_query_blocks(q, k, v, bias.of_rows, True, None)
        return sparse_attention(q, k, v, blocks_of(bias), bias.of_blocks)

    assert memory_of(run, 2048) / memory_of(run, 1024) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pattern", ["window", "strided", "bigbird"])
def test_half_precision_is_computed_in_single_precision(pattern: str, dtype: torch.dtype) -> None:
    """Oracle: the reference in double precision over the same inputs. Output and gradients have one rounding."""
    bias = bias_of("alibi", pattern, length=T)
    inputs = [x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, T, H).unbind()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    reference = attention_reference(*exact, bias.dense)[0]  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        output = sparse_attention(*inputs, blocks_of(bias), bias.of_blocks)  # type: ignore[arg-type]
        grad = torch.randn_like(output)
        ours = output, *torch.autograd.grad(output, inputs, grad)
    theirs = reference, *torch.autograd.grad(reference, exact, grad.double())
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), other, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", ["sparse blocks", "query blocks"])
@pytest.mark.parametrize("model", [*MODELS, "alibi, CLS", "alibi, decoder"])
def test_a_model_with_attention_in_blocks_has_the_gradients_of_one_without(
    model: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through padding and unpadding; oracle: the same model with other kernels."""
    name, _, kind = model.partition(", ")
    build = decoder if kind == "decoder" or name == "xpos" else classifier
    changes: dict[str, Any] = {"pool": "cls"} if kind == "CLS" else {}
    torch.manual_seed(0)
    network = build(model=group("model", name), pattern=group("pattern", "strided"), layers=2, **changes).double()
    ids = torch.randint(1, 9, (3, 9))
    if build is classifier:
        ids[1, 5:], ids[2, 1:] = 0, 0
    chosen, results = set(), []
    choose = dispatch.choose_kernel

    def noted(*arguments: Any, **options: Any) -> Any:
        chosen.add(choose(*arguments, **options))
        return choose(*arguments, **options)

    monkeypatch.setattr(dispatch, "choose_kernel", noted)
    for patched in (False, True):
        if patched:
            lengths = {"SPARSE_MIN_LENGTH": 1 if kernel == "sparse blocks" else 99, "SPARSE_COST": 1e9}
            for constant, value in {**lengths, "QUERY_BLOCKS_MIN_LENGTH": 1}.items():
                monkeypatch.setattr(dispatch, constant, value)
            chosen.clear()
        network.zero_grad()
        getattr(network, "encoder" if build is classifier else "decoder").last_bias = None
        torch.manual_seed(1)
        output = network(ids)
        output.square().sum().backward()
        gradients = [own.grad.clone() for own in network.parameters() if own.grad is not None]
        results.append([output, *gradients])
    assert chosen == {kernel}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_dropout_in_blocks_draws_its_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of all pairs is drawn ahead, none of an interrupted pass is left, and seeds repeat."""
    network = decoder(model=group("model", "alibi"), pattern=group("pattern", "window"), dropout=0.3).train()
    ids = torch.randint(1, 9, (2, 9))
    monkeypatch.setattr(network.decoder.blocks[1], "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        network(ids)
    monkeypatch.undo()
    for constant, value in {"SPARSE_MIN_LENGTH": 1, "SPARSE_COST": 1e9}.items():
        monkeypatch.setattr(dispatch, constant, value)
    network.decoder.last_bias = None
    torch.manual_seed(1)
    first = network(ids[:, :8])
    torch.manual_seed(1)
    assert torch.equal(network(ids[:, :8]), first) and not torch.equal(network(ids[:, :8]), first)
    assert not any(getattr(module, "ahead", None) for module in network.modules())


@pytest.mark.parametrize(("stride", "blocks"), [(150, 3), (192, 0)])
def test_blocks_without_keys(stride: int, blocks: int) -> None:
    """Of 192 tokens the last 42 have a key 150 tokens earlier; with these they fill 84 places, in 3 blocks."""
    bias = bias_of("kerple", {"name": "strided", "stride": stride}, length=192)
    trained = [torch.randn(B, N, 192, H, dtype=torch.double, requires_grad=True) for _ in range(3)]
    trained += bias.positions.double().parameters()
    layout = blocks_of(bias)
    assert [sum(len(group.queries) for group in part.groups) for part in layout if not part.is_whole] == [blocks]
    output = sparse_attention(*trained[:3], layout, bias.of_blocks)
    check(output, attention_reference(*trained[:3], bias.dense)[0], trained)


@pytest.mark.parametrize(("kept", "saved"), [(sparse.KEPT, False), (0, True)])
def test_a_bias_is_saved_only_to_compute_weights_again(
    kept: int, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "KEPT", kept)
    bias, layout, trained = in_double(bias_of("alibi", "window", length=T))
    storages: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: storages.add(x.data_ptr()) or x, lambda x: x):
        sparse_attention(*trained[:3], layout, bias.of_blocks)
    assert {own.data_ptr() in storages for part in bias.of_blocks for own in part} == {saved}


def test_a_batch_of_no_sequences() -> None:
    for pattern in ("window", "strided"):
        bias = bias_of("alibi", pattern, length=T)
        empty = torch.empty(0, 2, T, H, requires_grad=True)
        output = sparse_attention(empty, empty, empty, blocks_of(bias), bias.of_blocks)
        assert output.shape == torch.autograd.grad(output.sum(), empty)[0].shape == empty.shape


@pytest.mark.parametrize("pattern", ["window", "strided"])
def test_weights_that_are_computed_again_are_the_same(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the gradients with weights that were kept, with the same dropout."""
    bias, layout, trained = in_double(bias_of("kerple", pattern, length=T))
    gradients, counts = [], []
    for limit in (sparse.KEPT, 0):
        monkeypatch.setattr(sparse, "KEPT", limit)
        torch.manual_seed(0)
        output = sparse_attention(*trained[:3], layout, bias.of_blocks, FastDropout(0.3).drop)
        with monkeypatch.context() as patch:
            again = unittest.mock.Mock(wraps=sparse.weights_of)
            patch.setattr(sparse, "weights_of", again)
            gradients.append(torch.autograd.grad(output.square().sum(), trained, retain_graph=True))
        counts.append(again.call_count)
    assert all(map(torch.equal, *gradients)) and counts[0] == 0 < counts[1]


def test_dropout_in_blocks_keeps_the_expected_output() -> None:
    """Oracle: the mean of outputs under many masks is the output without dropout, within five standard errors."""
    torch.manual_seed(0)
    bias, dropout = bias_of("nope", "strided", length=40), FastDropout(0.3)
    q, k, v = torch.randn(3, 1, 2, 40, 4).unbind()
    layout = blocks_of(bias)
    exact = sparse_attention(q, k, v, layout, bias.of_blocks)
    drawn = torch.stack([sparse_attention(q, k, v, layout, bias.of_blocks, dropout.drop) for _ in range(2000)])
    assert ((drawn.mean(dim=0) - exact).abs() <= 5 * drawn.std(dim=0) / 2000**0.5 + 1e-6).all()


def test_a_block_is_computed_again_as_it_was_when_the_training_mode_has_ended() -> None:
    dropout = FastDropout(0.3).train()
    bias, q = bias_of("alibi", "full", length=80), torch.randn(1, 2, 80, 4, requires_grad=True)
    output = attention_in_query_blocks(q, q, q, bias.of_rows, True, dropout.drop, rows=40)
    dropout.eval()
    output.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_random_positions_are_not_computed_again() -> None:
    """A later pass draws others, so the gradients of the first would be wrong."""
    bias = bias_of("alibi", "full", length=2048)
    spec = {**group("model", "randomised"), "encoding": "kerple"}
    redrawn = build_positions(spec, width=32, heads=2, length=2048, causal=True)
    assert choose_kernel(bias, CPU, 0.0, False) == "query blocks"
    assert choose_kernel(dataclasses.replace(bias, positions=redrawn), CPU, 0.0, False) == "SDPA"


def test_the_share_of_pairs_that_blocks_compute() -> None:
    """A window of 64 in 4,096 tokens: 1.6 % of the pairs are allowed, and blocks of 32 queries have 96 keys.

    Random links are gathered one by one, not in runs, which would hold more than twice as many pairs.
    """
    pattern = build_pattern({"name": "window", "window": 64})
    layout = layout_of(pattern, 4096, True, CPU) or []
    assert pairs_computed(layout) == 4096 * 96 and [part.block for part in layout] == [32]
    cost = 96 / 4096 * 32.5 / 32 * 56 / 32  # a run of 32 keys costs half a key more, a block of 32 queries 24 more
    assert layout_of(pattern, 4096, True, CPU, 1.001 * cost) is not None
    assert layout_of(pattern, 4096, True, CPU, 0.999 * cost) is None
    bigbird = build_pattern({"name": "bigbird", "window": 64, "tokens": 2, "links": 2})
    assert pairs_computed(layout_of(bigbird, 512, True, CPU) or []) < 0.3 * 512**2


@pytest.mark.parametrize(
    ("what", "T", "faster"),
    [
        ("dilated 64", 512, True),
        ("window 256", 512, False),
        ("bigbird and window 64", 512, False),
        ("strided 64", 512, False),
        ("window 256", 1024, True),
        ("bigbird and window 64", 1024, True),
    ],
)
def test_blocks_are_taken_where_they_are_faster(what: str, T: int, faster: bool) -> None:
    """Oracle: the committed timings of `bench attention`, 1.5 to 1.6 times as fast or 0.7 to 0.9 times."""
    assert (attention.bias_of(attention.VARIANTS[what], T).layout is not None) == faster
