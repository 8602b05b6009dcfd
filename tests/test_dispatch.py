"""Fast paths against the reference layers: each row of the dispatcher's table, its blocks, its passes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PATTERNS, group
from test_encoder_decoder import translator
from test_models import VOCABULARY, T, classifier, decoder, sentences
from torch.nn.attention.flex_attention import flex_attention as uncompiled

from speechformer.errors import UserError
from speechformer.kernels import dispatch
from speechformer.kernels.attention import DroppedAttention, cached_block_mask, compiled_function, flex_attention
from speechformer.kernels.dispatch import (
    FLEX_MIN_PAIRS,
    AttentionBias,
    FastBlock,
    FastSelfAttention,
    choose_kernel,
    compile_blocks,
    partial_tiles,
)
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.loss import next_token_loss
from speechformer.kernels.padding import unpadder_for
from speechformer.layers.attention import SelfAttention, attention_bias, attention_mask, attention_reference
from speechformer.layers.block import Block
from speechformer.layers.patterns import all_pairs, build_pattern, with_first_token
from speechformer.layers.positions import Positions, build_positions, query_and_key_indices
from speechformer.models.ensemble import DropoutGenerators, stack_models

# each position with a window, each pattern with ALiBi: the kernels treat the two apart
KINDS = [*((model, "window") for model in MODELS), *(("alibi", name) for name in PATTERNS if name != "window")]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
cuda = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def bias_of(
    model: str, pattern: Any, causal: bool = True, padded: bool = False, length: int = 12, device: torch.device = CPU
) -> AttentionBias:
    positions = build_positions(group("model", model), width=32, heads=2, length=length, causal=causal).to(device)
    own = group("pattern", pattern) if isinstance(pattern, str) else pattern
    token_mask = None
    if padded:
        token_mask = torch.arange(length, device=device) < torch.tensor([[length], [length // 2 + 3]], device=device)
    return AttentionBias(positions, build_pattern(own), length, length, causal, token_mask, device)


# model, pattern, padded, length, device, dropout rate, weights asked for, cache -> kernel
ROWS = {
    "CPU training": ("alibi", "window", True, 12, CPU, 0.3, False, False, "fused dropout"),
    "CPU training, no bias": ("nope", "full", False, 12, CPU, 0.3, False, False, "fused dropout"),
    "CPU training, trained bias": ("relative", "full", True, 12, CPU, 0.3, False, False, "fused dropout"),
    "CPU training, rotation": ("rope", "full", True, 12, CPU, 0.3, False, False, "reference"),
    "CPU training, cache": ("nope", "full", False, 12, CPU, 0.3, False, True, "reference"),
    "CPU training, weights": ("alibi", "full", False, 12, CPU, 0.3, True, False, "reference"),
    "weights": ("rope", "window", True, 12, CPU, 0.0, True, False, "reference"),
    "nothing to mask": ("rope", "full", False, 12, CPU, 0.0, False, False, "SDPA without mask"),
    "padding": ("rope", "full", True, 12, CPU, 0.0, False, False, "SDPA"),
    "pattern": ("sinusoidal", "bigbird", False, 12, CPU, 0.0, False, False, "SDPA"),
    "bias": ("alibi", "full", False, 12, CPU, 0.0, False, False, "SDPA"),
    "long": ("alibi", "window", True, 520, CPU, 0.0, False, False, "sparse blocks"),
    "long, gates": ("forgetting", "window", True, 520, CPU, 0.0, False, False, "sparse blocks"),
    "long, dropout": ("nope", "window", False, 520, CPU, 0.3, False, False, "sparse blocks"),
    "long, weights": ("nope", "window", False, 520, CPU, 0.0, True, False, "reference"),
    "long, many pairs": ("nope", {"name": "window", "window": 300}, False, 520, CPU, 0.0, False, False, "SDPA"),
    "longer, all pairs": ("alibi", "full", True, 2048, CPU, 0.0, False, False, "query blocks"),
    "longer, all pairs, dropout": ("alibi", "full", False, 2048, CPU, 0.3, False, False, "query blocks"),
    "longer, nothing to mask": ("nope", "full", False, 2048, CPU, 0.0, False, False, "SDPA without mask"),
    "CUDA": ("alibi", "window", True, 12, CUDA, 0.0, False, False, "SDPA"),
    "CUDA training": ("alibi", "window", False, 2048, CUDA, 0.3, False, False, "SDPA"),
    "CUDA, long": ("alibi", "window", False, 2048, CUDA, 0.0, False, False, "FlexAttention"),
    "CUDA, long, padding": ("alibi", "window", True, 2048, CUDA, 0.0, False, False, "FlexAttention"),
    "CUDA, long, all pairs": ("alibi", "full", False, 2048, CUDA, 0.0, False, False, "FlexAttention"),
    "CUDA, long, scattered pairs": ("nope", "bigbird", True, 2048, CUDA, 0.0, False, False, "SDPA"),
    "CUDA, longer, scattered pairs": ("nope", "bigbird", True, 2048, CUDA, 0.0, False, False, "sparse blocks"),
    "CUDA, padding alone": ("rope", "full", True, 1400, CUDA, 0.0, False, False, "SDPA"),
    "CUDA, longer, nothing to mask": ("rope", "full", False, 2048, CUDA, 0.3, False, False, "SDPA without mask"),
    "CUDA, longer, without Triton": ("alibi", "window", True, 520, CUDA, 0.0, False, False, "sparse blocks"),
    "CUDA, longer, dropout": ("alibi", "window", True, 520, CUDA, 0.3, False, False, "sparse blocks"),
    "CUDA, all pairs, without Triton": ("alibi", "full", True, 2048, CUDA, 0.0, False, False, "query blocks"),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table(row: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is chosen as the table says. On the device at hand its output and gradients are the reference's,
    under the same dropout."""
    model, pattern, padded, length, device, rate, with_weights, cached, kernel = ROWS[row]
    monkeypatch.setattr(dispatch, "HAS_TRITON", "Triton" not in row)
    monkeypatch.setattr(dispatch, "FLEX_MIN_PAIRS", 2048**2)  # where a tensor of all pairs fits into any GPU
    if "blocks" in kernel or "longer" in row:
        monkeypatch.setattr(dispatch, "BLOCKS_MIN_ON_GPU", 512)
    on_hand = device if device == CPU or torch.cuda.is_available() else CPU
    torch.manual_seed(0)
    bias = bias_of(model, pattern, causal, padded, length, on_hand)
    fusable = not cached and not bias.positions.overrides("rotate")
    assert choose_kernel(bias, device, rate, with_weights, fusable) == kernel
    if on_hand != device or (rate and (on_hand == CUDA or "blocks" in kernel)):  # which draw other masks
        return
    results = []
    gated = bias.positions.overrides("gate")
    reference = SelfAttention(32, 2, FastDropout(rate), qkv_bias=True, bias=True, gated=gated).to(device)
    fast = FastSelfAttention(32, 2, FastDropout(rate), qkv_bias=True, bias=True, gated=gated).to(device)
    fast.load_state_dict(reference.state_dict())
    for attention, own_bias in ((reference, bias.dense), (fast, bias)):
        torch.manual_seed(1)
        x = torch.randn(2, length, 32, device=device, requires_grad=True)
        bias.positions.zero_grad()
        attention.zero_grad()
        output, weights = attention(x, bias.positions, own_bias, with_weights, {} if cached else None)
        if bias.token_mask_BS is not None:
            output = output * bias.token_mask_BS[:, :, None]  # what padding attends to is undefined
        output.square().sum().backward(retain_graph=True)
        trained = [*attention.parameters(), *bias.positions.parameters()]
        results.append([output, x.grad, *(parameter.grad for parameter in trained if parameter.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        tolerance = {"atol": 1e-5, "rtol": 1e-4} if device == CPU else {"atol": 5e-3, "rtol": 5e-3}
        torch.testing.assert_close(ours, theirs, **tolerance)
    assert (weights is not None) == (kernel == "reference")


@pytest.mark.parametrize("kernel", ["fused dropout", "reference"])
def test_autocast_and_compilation_turn_the_fused_kernel_off(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = bias_of("nope", "full")
    with torch.autocast("cpu", torch.bfloat16, enabled=kernel == "reference"):
        assert choose_kernel(bias, CPU, 0.1, False, fusable=True) == kernel
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: kernel == "reference")
    assert choose_kernel(bias, CPU, 0.1, False, fusable=True) == kernel


def test_objects_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token leaves full attention full; with `bias` but no `score_mod` there is no FlexAttention."""

    class Distance(Positions):
        def bias(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(i - j)[None]

    assert with_first_token(build_pattern({"name": "full"})) is all_pairs
    own = Distance(width=32, heads=2, length=4, causal=True)
    assert own.overrides("bias") and not own.overrides("rotate") and not own.overrides("score_mod")
    long, plain = math.isqrt(FLEX_MIN_PAIRS), Positions(width=32, heads=2, length=4, causal=True)
    bias = AttentionBias(own, build_pattern({"name": "window"}), long, long, True, None, CUDA)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    assert choose_kernel(bias, CUDA, 0.0, False) == "SDPA"
    bias = dataclasses.replace(bias, positions=plain)
    assert choose_kernel(bias, CUDA, 0.0, False) == "FlexAttention"
    assert choose_kernel(bias, CUDA, 0.0, False, has_triton=False) == "SDPA"
    assert choose_kernel(dataclasses.replace(bias, head_width=8), CUDA, 0.0, False) == "SDPA"
    for B, kernel in ((8, "SDPA"), (16, "FlexAttention")):  # half as many pairs, and as many
        shorter = AttentionBias(plain, bias.pattern, long // 4, long // 4, True, None, CUDA, B=B)
        assert choose_kernel(shorter, CUDA, 0.0, False) == kernel
    tokens = torch.ones(16, long // 4, dtype=torch.bool)
    alone = dataclasses.replace(shorter, pattern=all_pairs, causal=False, token_mask_BS=tokens)
    assert choose_kernel(alone, CUDA, 0.0, False) == "SDPA"
    cached = AttentionBias(plain, all_pairs, 1, long, True, None, CPU)
    assert choose_kernel(cached, CPU, 0.0, False) == "SDPA"


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("pattern", ["full", "window"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_reference_layers_is_the_model_of_fast_layers(
    model: str, pattern: str, rate: float, padded: bool, norm: str
) -> None:
    """Oracle: the stack written out with `layers` alone, equal weights and equal dropout, in double precision."""
    fast = classifier(
        model=group("model", model), pattern=group("pattern", pattern), dropout=rate, norm=norm, layers=2
    ).encoder
    fast.double().train()
    sizes = {"width": 16, "heads": 2, "ff": 24, "dropout": rate, "norm": norm}
    switches = {"qkv_bias": True, "bias": True, "activation": "relu"}

    class ReferenceBlock(Block):
        dropout_class = FastDropout  # the same random draws

    blocks = [ReferenceBlock(**sizes, **switches, gated=model == "forgetting").double() for _ in range(2)]
    for block, other in zip(blocks, fast.blocks):
        assert type(other) is FastBlock and type(block.attention) is SelfAttention
        block.load_state_dict(other.state_dict())
    ids = sentences()
    if padded:
        ids[1, 9:], ids[2, 1:] = 0, 0
    token_mask = ids != 0

    def reference() -> torch.Tensor:
        mask = attention_mask(fast.patterns[0], T, T, False, token_mask if padded else None)
        bias = attention_bias(fast.positions, mask)
        x = fast.embedding_dropout(fast.positions.embed(fast.embedding(ids)))
        for block in blocks:
            x = block(x, fast.positions, bias)[0]
        return fast.final_norm(x)

    results = []
    for run, own in ((reference, blocks), (lambda: fast(ids, token_mask if padded else None)[0], fast.blocks)):
        torch.manual_seed(2)
        fast.zero_grad()
        states = run() * token_mask[:, :, None]
        states.square().sum().backward()
        trained = [*fast.embedding.parameters(), *fast.positions.parameters()]
        trained += [parameter for block in own for parameter in block.parameters()]
        results.append([states, torch.get_rng_state(), *(parameter.grad.clone() for parameter in trained)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def skip_without_score_mod(positions: Positions) -> None:
    if positions.overrides("bias") and not positions.overrides("score_mod"):
        pytest.skip("this bias has no score_mod, so the dispatcher takes another kernel")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("model", "pattern"), KINDS)
def test_flex_attention_is_the_reference(model: str, pattern: str, causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    bias = bias_of(model, pattern, causal, padded, length=150)  # not a multiple of a block
    skip_without_score_mod(bias.positions)
    q, k, v = torch.randn(3, 2, 2, 150, 16)
    with torch.no_grad():
        output = flex_attention(q, k, v, bias.positions.score_mod(), bias.block_mask)
        torch.testing.assert_close(output, attention_reference(q, k, v, bias.dense)[0], atol=1e-5, rtol=1e-5)


def test_flex_attention_within_documents_is_the_reference() -> None:
    torch.manual_seed(0)
    bias = bias_of("rope", "window", True, False, length=150)
    bias.token_mask_BS = torch.sort(torch.randint(1, 5, (2, 150)), dim=1).values
    q, k, v = torch.randn(3, 2, 2, 150, 16)
    with torch.no_grad():
        output = flex_attention(q, k, v, bias.positions.score_mod(), bias.block_mask)
        torch.testing.assert_close(output, attention_reference(q, k, v, bias.dense)[0], atol=1e-5, rtol=1e-5)
        mask = bias.token_mask_BS[:, :, None] == bias.token_mask_BS[:, None, :]
        assert torch.equal(bias.dense[:, 0].isfinite() & ~mask, torch.zeros_like(mask))


def test_flex_attention_is_a_part_of_a_compiled_block() -> None:
    """One graph (or torch says why not), and the same values."""
    torch.manual_seed(0)
    bias = bias_of("alibi", "window", length=150)
    _ = bias.block_mask, bias.dense  # as `prepare` does for compiled blocks
    q, k, v = torch.randn(3, 2, 2, 150, 16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, bias.positions.score_mod(), bias.block_mask)

    with torch.no_grad():
        run = torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(q, k, v), attention_reference(q, k, v, bias.dense)[0], atol=1e-5, rtol=1e-5)


@cuda
@needs_cuda
@pytest.mark.parametrize(
    ("model", "pattern", "length", "padded"),
    [
        *((*kind, 1024, False) for kind in KINDS),
        *(("alibi", "window", length, padded) for length in (1100, 1229) for padded in (False, True)),
    ],
)
def test_flex_attention_on_cuda_has_the_gradients_of_the_reference(
    model: str, pattern: str, length: int, padded: bool
) -> None:
    """At lengths that are no multiple of a tile, too."""
    torch.manual_seed(0)
    bias = bias_of(model, pattern, True, padded, length, CUDA)
    B = 1 + padded
    skip_without_score_mod(bias.positions)

    def flex(*qkv: torch.Tensor) -> torch.Tensor:
        return flex_attention(*qkv, bias.positions.score_mod(), bias.block_mask)

    results = []
    for run in (flex, lambda *qkv: attention_reference(*qkv, bias.dense)[0]):
        torch.manual_seed(1)
        qkv = [torch.randn(B, 2, length, 16, device="cuda", requires_grad=True) for _ in range(3)]
        bias.positions.zero_grad()
        output = run(*qkv)
        output.square().sum().backward()
        results.append([output.detach(), *(x.grad for x in qkv), *(p.grad for p in bias.positions.parameters())])
    for fast, reference in zip(*results):
        if reference is not None:
            torch.testing.assert_close(fast, reference, atol=5e-3, rtol=5e-3)


def test_flex_attention_stays_compiled_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's count of graphs: one for a first length, one for others, one for other numbers of blocks."""
    build = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: build(function, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = compiled_function.__wrapped__(uncompiled)
    for length in range(160, 280, 10):
        bias = bias_of("alibi", "window", length=length)
        q, k, v = torch.randn(3, 2, 2, length, 16)
        with torch.no_grad():
            output = run(q, k, v, score_mod=bias.positions.score_mod(), block_mask=bias.block_mask)
            torch.testing.assert_close(output, attention_reference(q, k, v, bias.dense)[0], atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_more_kinds_are_compiled_than_torch_would_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's count of graphs, which stops at 8 by default."""
    build = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: build(function, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = compiled_function.__wrapped__(lambda function, x: function(x))
    kinds = [
        torch.sin,
        torch.cos,
        torch.tan,
        torch.exp,
        torch.log,
        torch.abs,
        torch.neg,
        torch.sqrt,
        torch.tanh,
        torch.ceil,
    ]
    for kind in kinds:
        run(kind, torch.ones(3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(kinds)


@cuda
@needs_cuda
def test_flex_attention_on_cuda_has_no_tensor_of_all_pairs_at_any_length() -> None:
    """Oracle: the memory of one, at twelve lengths, which are more than torch compiles by itself."""
    for length in range(2048, 2048 + 12 * 128, 128):
        bias = bias_of("alibi", "window", length=length, device=CUDA)
        qkv = [torch.randn(1, 2, length, 16, device="cuda", requires_grad=True) for _ in range(3)]
        for _ in range(2):  # compilation itself measures, with memory of its own
            bias.__dict__.pop("block_mask", None)
            cached_block_mask.cache_clear()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            flex_attention(*qkv, bias.positions.score_mod(), bias.block_mask).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 2 * length**2 * 4


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
def test_partial_tiles_are_those_of_the_mask(pattern: str, causal: bool) -> None:
    """Oracle: the tiles of the whole mask, of which the last ones reach beyond the text."""
    length, tile = 150, 16
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    own = build_pattern(group("pattern", pattern))
    mask = own(i, j) & ((j <= i) | (not causal))
    padded = F.pad(mask, (0, 10, 0, 0))
    rows = torch.cat((padded, padded[-1:].expand(10, -1))).view(10, tile, 10, tile)  # the last query again
    some, all_of_them = rows.any(dim=3).any(dim=1), rows.all(dim=3).all(dim=1)
    expected = float((some & ~all_of_them).float().mean())
    assert partial_tiles(own, length, causal, tile) == pytest.approx(expected)


@cuda
@needs_cuda
@pytest.mark.parametrize("model", MODELS)
def test_sdpa_on_cuda_agrees_with_the_reference(model: str) -> None:
    bias = bias_of(model, "bigbird", padded=True)
    attention = FastSelfAttention(32, 2, FastDropout(0.0), qkv_bias=True, bias=True)
    x = torch.randn(2, 12, 32)
    on_cpu = attention(x, bias.positions, bias, with_weights=True)[0]
    attention.cuda(), bias.positions.cuda()
    on_cuda = attention(x.cuda(), bias.positions, bias.dense.cuda())[0]
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("model", "pattern"), KINDS)
@pytest.mark.parametrize("changes", [{}, {"pool": "cls", "norm": "post"}, {"dropout": 0.0}], ids=str)
def test_unpadding_changes_nothing(model: str, pattern: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the gradients of the same model over padded sentences, under the same dropout."""
    kinds = {"model": group("model", model), "pattern": group("pattern", pattern)}
    classify = classifier(**{"dropout": 0.3, **kinds, **changes}).double().train()
    rows, results = [], []
    classify.encoder.blocks[0].feed_forward.register_forward_hook(lambda _, x, y: rows.append(x[0].shape[:-1]))
    ids = sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    for padded in (False, True):
        monkeypatch.setattr(type(classify.encoder), "can_unpad", not padded)
        torch.manual_seed(2)
        classify.zero_grad()
        logits = classify(ids)
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad.clone() for parameter in classify.parameters())])
    first = classify.first_token  # of each sentence
    assert rows == [(T + 9 + 1 + 3 * first,), (3, T + first)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dropout", [0.3, 0.0])
@pytest.mark.parametrize(("model", "pattern"), KINDS)
def test_tokens_in_rows_change_nothing(
    model: str, pattern: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same decoder over sequences as they are, to the bit. Batches of one length differ in size."""
    kinds = {"model": group("model", model), "pattern": group("pattern", pattern)}
    network, results = decoder(dropout=dropout, **kinds).train(), []
    dims: list[int] = []
    network.decoder.blocks[0].register_forward_hook(lambda _, x, y: dims.append(x[0].dim()))
    for in_rows in (True, False):
        monkeypatch.setattr(type(network.decoder), "can_unpad", in_rows)
        torch.manual_seed(2)
        network.zero_grad()
        outputs = [network(sentences(size)) for size in (3, 2)]
        sum(output.square().sum() for output in outputs).backward()
        results.append([*outputs, *(parameter.grad.clone() for parameter in network.parameters())])
    assert dims == [2, 2, 3, 3]
    assert all(map(torch.equal, *results))


def test_unpadding_under_autocast_draws_the_masks_of_the_padded_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact in the masks, so the outputs differ by the rounding of bfloat16 only."""
    model, ids, results = classifier(dropout=0.5, model=group("model", "rope")).train(), sentences(), []
    ids[1, 9:] = 0
    for can_unpad in (True, False):
        monkeypatch.setattr(type(model.encoder), "can_unpad", can_unpad)
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(ids).float())
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


def test_only_training_on_a_cpu_unpads() -> None:
    model = classifier().train()
    assert model.encoder.can_unpad
    assert not model.eval().encoder.can_unpad
    model.train().encoder.blocks[0].compiled = True
    assert not model.encoder.can_unpad
    assert not classifier().train().to("meta").encoder.can_unpad  # not the CPU


@pytest.mark.parametrize("model", MODELS)
def test_a_bias_of_the_last_pass_is_the_one_that_would_be_built(model: str) -> None:
    """Oracle: a stack that keeps nothing, through lengths, double precision, inference mode and training."""
    torch.manual_seed(0)
    lm = decoder(model=group("model", model), pattern=group("pattern", "bigbird"))
    ids = torch.randint(0, VOCABULARY, (2, 9))
    passes = [(9, "float", True), (9, "float", False), (5, "float", False), (9, "double", False)]
    for length, dtype, inference in passes:
        lm = getattr(lm, dtype)()
        results = []
        for keep in (True, False):
            if not keep:
                lm.decoder.last_bias = None
            with torch.inference_mode(inference):
                logits = lm(ids[:, :length])
            lm.zero_grad()
            if not inference:
                logits.square().sum().backward()
            results.append([logits.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*results))
    positions_bias = lm.decoder.positions.bias(*query_and_key_indices(2, 2))
    trained = positions_bias is not None and positions_bias.requires_grad
    assert (lm.decoder.last_bias is None) == trained


def test_a_bias_of_the_last_pass_is_built_again_for_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the limit of FlexAttention, three sequences of nine tokens."""
    monkeypatch.setattr(dispatch, "FLEX_MIN_PAIRS", 3 * 9**2)
    lm, sequences = decoder(pattern=group("pattern", "window")), []
    for B in (1, 2, 3, 4, 2):
        lm(torch.randint(0, VOCABULARY, (B, 9)))
        sequences.append(lm.decoder.last_bias[1][0].B)
    assert sequences == [1, 1, 3, 3, 2]


@pytest.mark.parametrize(
    ("build", "model", "pattern"),
    [
        *((decoder, model, "window") for model in ("learned", "alibi", "relative", "rope", "forgetting")),
        (classifier, "rope", "full"),
    ],
)
def test_compiled_blocks_have_the_gradients_of_uncompiled_ones(
    build: Any, model: str, pattern: str, traced: list[str]
) -> None:
    """All blocks are one graph, and a second one of any length; neither has a break."""
    network = build(model=group("model", model), pattern=group("pattern", pattern), layers=3, dropout=0.3).train()
    ids, results = sentences(), []
    if build is classifier:
        ids[1, 9:] = 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        if compiled:
            compile_blocks(network, "default", CUDA)
            assert traced == ["default"] * 3
        torch.manual_seed(4)
        passes: list[list[torch.Tensor]] = []
        for length in (T, T, T - 1, T - 2):
            network.zero_grad()
            logits = network(ids[:, :length])
            logits.square().sum().backward()
            passes.append([logits, *(parameter.grad.clone() for parameter in network.parameters())])
        results.append([tensor for each in passes for tensor in each])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)
    network.attention(ids)  # which is not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@cuda
@needs_cuda
@pytest.mark.parametrize("build", [decoder, classifier])
def test_cuda_graphs_of_training_and_evaluation_compute_what_uncompiled_blocks_do(build: Any) -> None:
    network, ids, results = build(layers=3, dropout=0.0).cuda(), sentences().cuda(), []
    for compiled in (False, True):
        if compiled:
            compile_blocks(network, "reduce-overhead", CUDA)
        passes: list[torch.Tensor] = []
        for _ in range(4):
            network.train().zero_grad()
            network(ids).square().sum().backward()
            passes += [parameter.grad.clone() for parameter in network.parameters()]
            with torch.inference_mode():
                passes += [network.eval()(own).clone() for own in (ids, ids.flip(0))]
        results.append(passes)
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-3)


def test_cuda_graphs_begin_with_the_first_stack_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the count of passes. Encoder and decoder are one: the backward pass needs the memory of both."""
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: None)
    ids = torch.randint(1, 30, (2, 8))
    ensemble = stack_models([decoder(), decoder()], DropoutGenerators([torch.Generator(), torch.Generator()]))
    for network, inputs in (
        (decoder(), (ids,)),
        (classifier(), (ids,)),
        (translator("rope"), (ids, ids)),
        (ensemble, (ids,)),
    ):
        network(*inputs)
        assert not marks
        compile_blocks(network, "reduce-overhead", CUDA)
        network(*inputs)
        assert marks == [1]
        marks.clear()


def test_errors_of_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="compile has no choice 'fast'.* default, reduce-overhead"):
        compile_blocks(decoder(), "fast", CUDA)
    with pytest.raises(UserError, match="compile=max-autotune with trainer.accumulate_grad_batches=2"):
        compile_blocks(decoder(), "max-autotune", CUDA, accumulated=2)
    monkeypatch.setattr(dispatch.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"compile=default: .* C\+\+ compiler"):
        compile_blocks(decoder(), "default", CPU)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_chunks_is_that_of_all_logits(smoothing: float) -> None:
    weight, bias, hidden = (torch.randn(*shape, requires_grad=True) for shape in ((40, 8), (40,), (300, 8)))
    targets, results = torch.randint(40, (300,)), []
    logits = F.linear(hidden, weight, bias)
    for loss in (
        next_token_loss(weight, bias, hidden, targets, smoothing),
        F.cross_entropy(logits, targets, label_smoothing=smoothing),
    ):
        results.append([loss, *torch.autograd.grad(loss, (weight, bias, hidden))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch is older than 2.13")
@pytest.mark.parametrize(
    ("R", "D", "with_bias", "scale"),
    [(300, 8, True, 1.0), (300, 160, True, 1.0), (128, 8, False, 1.0), (1, 8, True, 0.3)],
)
def test_the_loss_in_chunks_has_the_bits_of_torchs(R: int, D: int, with_bias: bool, scale: float) -> None:
    weight, bias, hidden = (torch.randn(*shape, requires_grad=True) for shape in ((400, D), (400,), (R, D)))
    targets, inputs = torch.randint(400, (R,)), (weight, hidden, *([bias] if with_bias else []))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=max(128, D), chunking_method=None)
    used = bias if with_bias else None
    results = []
    for loss in (
        next_token_loss(weight, used, hidden, targets),
        F.linear_cross_entropy(hidden, weight, targets, linear_bias=used, options=options),
    ):
        results.append([loss, *torch.autograd.grad(loss * scale, inputs)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("V", [400, 40_000])
def test_the_loss_has_the_same_bits_in_parts_of_any_size(
    V: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: parts as with one thread. torch shares the sum of a row by itself, if it is long, among threads."""
    weight, bias, results = torch.randn(V, 8, requires_grad=True), torch.randn(V, requires_grad=True), []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            own = []
            for R in (65, 129, 193):
                hidden = torch.randn(R, 8, generator=torch.Generator().manual_seed(R)).requires_grad_()
                loss = next_token_loss(weight, bias, hidden, torch.arange(R))
                own += [loss, *torch.autograd.grad(loss, (weight, bias, hidden))]
                with torch.no_grad():
                    own.append(next_token_loss(weight, bias, hidden, torch.arange(R)))
            results.append(own)
            monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_the_loss_of_no_targets_is_zero() -> None:
    weight, bias, hidden = (torch.randn(*shape, requires_grad=True) for shape in ((400, 8), (400,), (0, 8)))
    loss = next_token_loss(weight, bias, hidden, torch.arange(0))
    assert loss == 0 and not any(grad.any() for grad in torch.autograd.grad(loss, (weight, bias, hidden)))


@pytest.mark.parametrize("padded", [False, True])
def test_attention_with_dropout_takes_tensors_that_are_not_contiguous(padded: bool) -> None:
    """Oracle: the same numbers, contiguous."""
    B, T, N, H = 2, 3, 2, 4
    unpadder = unpadder_for(B, T, torch.tensor([[True, True, False], [True] * 3]) if padded else None)
    R = len(unpadder.index_R)
    qkv, grad, mask = torch.randn(R, 3 * N * H), torch.randn(R, N * H), torch.rand(B, N, T, T)
    results = []
    for change in (torch.Tensor.contiguous, lambda x: x.t().contiguous().t()):
        projections = change(qkv).requires_grad_()
        output = DroppedAttention.apply(projections, torch.zeros(1, 1, T, T), mask, unpadder)
        results.append([output, *torch.autograd.grad(output, projections, change(grad))])
    assert all(map(torch.equal, *results))


def test_the_bias_of_gates_is_ready_before_compiled_blocks_need_it() -> None:
    """A CUDA graph would overwrite it: `AttentionBias.prepare`."""
    stack = decoder(model=group("model", "forgetting")).eval().decoder
    for block in stack.blocks:
        block.compiled = True  # `compile_blocks` also has them compiled
    x = stack.embedding(sentences())
    for bias in stack.attention_biases(x, x.shape[1], None, None, False):
        assert "dense" in vars(bias)


def test_a_batch_of_padding_alone_has_finite_states_and_gradients_in_training() -> None:
    """There padding attends to itself, as in the reference: a loss that ignores it must not spoil the weights."""
    stack = classifier().train().encoder
    ids = torch.zeros(2, 5, dtype=torch.long)
    x = stack(ids, torch.zeros(2, 5, dtype=torch.bool))[0]
    (x.sum() * 0).backward()
    gradients = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    assert x.isfinite().all() and gradients and all(own.isfinite().all() for own in gradients)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", ["full", "window"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_keys_changes_no_bit_of_any_token(model: str, pattern: str, causal: bool) -> None:
    """Oracle: the mask of all pairs. One row stands for all queries only if padding alone hides keys."""
    bias = bias_of(model, pattern, causal, padded=True)
    assert bias.token_mask_BS is not None
    alone = (pattern, causal) == ("full", False) and model in ("learned", "nope", "rope", "sinusoidal", "xpos")
    assert (bias.compact is bias.dense) == (not alone)
    if not alone:
        return
    assert bias.compact.shape == (2, 1, 1, 12)
    q, k, v = torch.randn(3, 2, 2, 12, 16, generator=torch.Generator().manual_seed(0))
    rows, whole = (F.scaled_dot_product_attention(q, k, v, mask) for mask in (bias.compact, bias.dense))
    tokens = bias.token_mask_BS[:, None, :, None].expand_as(rows)
    assert rows.isfinite().all() and rows[tokens].equal(whole[tokens])
    unpadder, dropped = unpadder_for(2, 12, bias.token_mask_BS), torch.rand(2, 2, 12, 12)
    qkv = torch.randn(len(unpadder.index_R), 96, requires_grad=True)
    results = []
    for mask in (bias.compact, bias.dense):
        output = DroppedAttention.apply(qkv, mask, dropped, unpadder)
        results.append([output, *torch.autograd.grad(output.square().sum(), qkv)])
    assert all(map(torch.equal, *results))
    documents = AttentionBias(bias.positions, all_pairs, 12, 12, False, bias.token_mask_BS.long(), CPU)
    assert documents.compact is documents.dense
