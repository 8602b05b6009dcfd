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
from speechformer.kernels.attention import compiled_function, flex_attention
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
from speechformer.layers.attention import (
    SelfAttention,
    attention_bias,
    attention_mask,
    attention_reference,
    query_and_key_indices,
)
from speechformer.layers.block import Block
from speechformer.layers.patterns import all_pairs, build_pattern, with_first_token
from speechformer.layers.positions import Positions, build_positions
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


def reference_bias(bias: AttentionBias) -> torch.Tensor:
    """Return the bias of all pairs as the layers compute it."""
    mask = attention_mask(bias.pattern, bias.T, bias.S, bias.causal, bias.token_mask_BS, bias.device)
    of_pairs = attention_bias(bias.positions, mask)
    if bias.z_BSN is None:
        return of_pairs
    return of_pairs + bias.positions.gate(bias.z_BSN, *query_and_key_indices(bias.T, bias.S, bias.device))


# device, tokens, model, pattern, what else -> kernel; "many": the limits are low enough for blocks on a GPU
ROWS = """
CPU 12 alibi window padding dropout -> fused dropout
CPU 12 nope full dropout -> fused dropout
CPU 12 relative full padding dropout -> fused dropout
CPU 12 rope full padding dropout -> reference
CPU 12 nope full dropout cache -> reference
CPU 12 alibi full dropout weights -> reference
CPU 12 rope window padding weights -> reference
CPU 12 rope full -> SDPA without mask
CPU 12 rope full padding -> SDPA
CPU 12 sinusoidal bigbird -> SDPA
CPU 12 alibi full -> SDPA
CPU 520 alibi window padding -> sparse blocks
CPU 520 forgetting window padding -> sparse blocks
CPU 520 nope window dropout -> sparse blocks
CPU 520 nope window weights -> reference
CPU 520 nope window:300 -> SDPA
CPU 2048 alibi full padding -> query blocks
CPU 2048 alibi full dropout -> query blocks
CPU 2048 nope full -> SDPA without mask
CUDA 12 alibi window padding -> SDPA
CUDA 2048 alibi window dropout -> SDPA
CUDA 2048 alibi window -> FlexAttention
CUDA 2048 alibi window padding -> FlexAttention
CUDA 2048 alibi full -> FlexAttention
CUDA 2048 nope bigbird padding -> SDPA
CUDA 2048 nope bigbird padding many -> sparse blocks
CUDA 1400 rope full padding -> SDPA
CUDA 2048 rope full dropout many -> SDPA without mask
CUDA 520 alibi window padding many no_triton -> sparse blocks
CUDA 520 alibi window padding dropout many -> sparse blocks
CUDA 2048 alibi full padding many no_triton -> query blocks
"""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_each_row_of_the_table(row: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is chosen as the table says. On the device at hand its output and gradients are the reference's,
    under the same dropout."""
    words, kernel = row.split(" -> ")
    place, tokens, model, pattern, *options = words.split()
    device, length, rate = torch.device(place.lower()), int(tokens), 0.3 if "dropout" in options else 0.0
    with_weights, cached = "weights" in options, "cache" in options
    monkeypatch.setattr(dispatch, "HAS_TRITON", "no_triton" not in options)
    monkeypatch.setattr(dispatch, "FLEX_MIN_PAIRS", 2048**2)  # where a tensor of all pairs fits into any GPU
    if "many" in options:
        monkeypatch.setattr(dispatch, "BLOCKS_MIN_ON_GPU", 512)
    on_hand = device if device == CPU or torch.cuda.is_available() else CPU
    torch.manual_seed(0)
    name, _, window = pattern.partition(":")
    spec = {"name": name, "window": int(window)} if window else name
    bias = bias_of(model, spec, causal, "padding" in options, length, on_hand)
    fusable = not cached and not bias.positions.overrides("rotate")
    assert choose_kernel(bias, device, rate, with_weights, fusable) == kernel
    if on_hand != device or (rate and (on_hand == CUDA or "blocks" in kernel)):  # which draw other masks
        return
    results = []
    gated = bias.positions.overrides("gate")
    reference = SelfAttention(32, 2, FastDropout(rate), qkv_bias=True, bias=True, gated=gated).to(device)
    fast = FastSelfAttention(32, 2, FastDropout(rate), qkv_bias=True, bias=True, gated=gated).to(device)
    fast.load_state_dict(reference.state_dict())
    for attention, own_bias in ((reference, reference_bias(bias)), (fast, bias)):
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
        torch.testing.assert_close(
            run(q, k, v), attention_reference(q, k, v, reference_bias(bias))[0], atol=1e-5, rtol=1e-5
        )


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
            torch.testing.assert_close(
                output, attention_reference(q, k, v, reference_bias(bias))[0], atol=1e-5, rtol=1e-5
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


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


def test_a_bias_of_the_last_pass_is_built_again_for_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the limit of FlexAttention, three sequences of nine tokens."""
    monkeypatch.setattr(dispatch, "FLEX_MIN_PAIRS", 3 * 9**2)
    lm, sequences = decoder(pattern=group("pattern", "window")), []
    for B in (1, 2, 3, 4, 2):
        lm(torch.randint(0, VOCABULARY, (B, 9)))
        sequences.append(lm.decoder.last_bias[1][0].B)
    assert sequences == [1, 1, 3, 3, 2]


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


def test_objects_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token leaves full attention full; with `bias` but no `score_mod` there is no FlexAttention."""

    class Distance(Positions):
        def bias(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(i - j)[None]

    assert with_first_token(build_pattern({"name": "full"})) is all_pairs
    distance = Distance(width=32, heads=2, length=4, causal=True)
    assert distance.overrides("bias") and not distance.overrides("rotate") and not distance.overrides("score_mod")
    long, plain = math.isqrt(FLEX_MIN_PAIRS), Positions(width=32, heads=2, length=4, causal=True)
    bias = AttentionBias(plain, build_pattern({"name": "window"}), long, long, True, None, CUDA)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)

    def kernel(**changes: Any) -> str:
        return choose_kernel(dataclasses.replace(bias, **changes), CUDA, 0.0, False)

    assert kernel() == "FlexAttention"
    assert kernel(positions=distance) == kernel(head_width=8) == "SDPA"
    assert choose_kernel(bias, CUDA, 0.0, False, has_triton=False) == "SDPA"
    shorter = {"T": long // 4, "S": long // 4}
    assert kernel(**shorter, B=8) == "SDPA" and kernel(**shorter, B=16) == "FlexAttention"  # as many pairs
    tokens = torch.ones(16, long // 4, dtype=torch.bool)
    assert kernel(**shorter, B=16, pattern=all_pairs, causal=False, token_mask_BS=tokens) == "SDPA"
    cached = AttentionBias(plain, all_pairs, 1, long, True, None, CPU)
    assert choose_kernel(cached, CPU, 0.0, False) == "SDPA"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("model", "pattern"), [*KINDS, ("learned", "full")])
def test_a_model_of_reference_layers_is_the_model_of_fast_layers(
    model: str, pattern: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the stack written out with `layers` alone, equal weights and equal dropout, in double precision.

    If there is padding, the fast layers run on rows of tokens without it.
    """
    norm, rate = ("post", 0.0) if (model, padded) == ("rope", False) else ("pre", 0.3)
    fast = classifier(
        model=group("model", model), pattern=group("pattern", pattern), dropout=rate, norm=norm, pool="cls"
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
    token_mask = torch.nn.functional.pad(ids != 0, (1, 0), value=True)  # with the first token
    rows: list[torch.Size] = []
    fast.blocks[0].feed_forward.register_forward_hook(lambda _, x, y: rows.append(x[0].shape))

    def reference() -> torch.Tensor:
        mask = attention_mask(fast.patterns[0], T + 1, T + 1, False, token_mask if padded else None)
        bias = attention_bias(fast.positions, mask)
        x = fast.embedding_dropout(fast.positions.embed(fast.embed(ids, None)[0]))
        for block in blocks:
            x = block(x, fast.positions, bias)[0]
        return fast.final_norm(x)

    results = []
    for run, layers in ((reference, blocks), (lambda: fast(ids, ids != 0 if padded else None)[0], fast.blocks)):
        torch.manual_seed(2)
        fast.zero_grad()
        states = run() * token_mask[:, :, None]
        states.square().sum().backward()
        trained = [*fast.embedding.parameters(), *fast.positions.parameters()]
        trained += [parameter for block in layers for parameter in block.parameters()]
        results.append([states, torch.get_rng_state(), *(parameter.grad.clone() for parameter in trained)])
    assert rows == [(int(token_mask.sum()), 16) if padded else (*token_mask.shape, 16)]
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("model", "pattern"), KINDS)
def test_flex_attention_is_the_reference(model: str, pattern: str) -> None:
    """At a length that is no multiple of a block; causal, with padding, and within documents."""
    torch.manual_seed(0)
    documents = torch.sort(torch.randint(1, 5, (2, 150)), dim=1).values
    for causal, token_mask in (
        (True, None),
        (False, torch.arange(150) < torch.tensor([[150], [78]])),
        (True, documents),
    ):
        bias = bias_of(model, pattern, causal, length=150)
        bias.token_mask_BS = token_mask
        if bias.positions.overrides("bias") and not bias.positions.overrides("score_mod"):
            pytest.skip("this bias has no score_mod, so the dispatcher takes another kernel")
        q, k, v = torch.randn(3, 2, 2, 150, 16)
        with torch.no_grad():
            output = flex_attention(q, k, v, bias.positions.score_mod(), bias.block_mask)
            torch.testing.assert_close(
                output, attention_reference(q, k, v, reference_bias(bias))[0], atol=1e-5, rtol=1e-5
            )
    across = documents[:, :, None] != documents[:, None, :]
    assert not (reference_bias(bias)[:, 0].isfinite() & across).any()


@pytest.mark.parametrize("model", ["learned", "alibi", "relative", "forgetting"])
def test_a_bias_of_the_last_pass_is_the_one_that_would_be_built(model: str) -> None:
    """Oracle: a stack that keeps nothing, through lengths, double precision, inference mode and training."""
    lm = decoder(model=group("model", model), pattern=group("pattern", "bigbird"))
    for length, dtype, inference in [
        (9, "float", True),
        (9, "float", False),
        (5, "float", False),
        (9, "double", False),
    ]:
        lm, results = getattr(lm, dtype)(), []
        for _ in range(2):
            with torch.inference_mode(inference):
                logits = lm(sentences()[:, :length])
            if not inference:
                logits.square().sum().backward()
            results.append(logits.detach())
            kept = lm.decoder.last_bias
            lm.decoder.last_bias = None
        assert torch.equal(*results)
    assert (kept is None) == (model == "relative")  # whose bias is trained


@pytest.mark.parametrize(
    ("build", "model", "pattern"),
    [
        (classifier, "rope", "full"),
        pytest.param(decoder, "forgetting", "window", marks=pytest.mark.slow),
        pytest.param(decoder, "relative", "window", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_have_the_gradients_of_uncompiled_ones(
    build: Any, model: str, pattern: str, traced: list[str]
) -> None:
    """All blocks are one graph, and a second one of any length; neither has a break."""
    network = build(model=group("model", model), pattern=group("pattern", pattern), layers=3, dropout=0.0).train()
    ids, results = sentences(), []
    if build is classifier:
        ids[1, 9:] = 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        if compiled:
            compile_blocks(network, "default", CUDA)
            assert traced == ["default"] * 3
        passes: list[torch.Tensor] = []
        for length in (T, T, T - 1, T - 2):
            network.zero_grad()
            logits = network(ids[:, :length])
            logits.square().sum().backward()
            passes += [logits, *(parameter.grad.clone() for parameter in network.parameters())]
        results.append(passes)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    network.attention(ids)  # which is not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_dropout_breaks_no_graph(traced: list[str]) -> None:
    network = decoder(layers=1, dropout=0.3).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(network, "default", CPU)
    assert not torch.equal(network(sentences()), network(sentences()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("R", [0, 1, 128, 300])
@pytest.mark.parametrize(
    ("D", "with_bias", "smoothing", "spread"),
    [(8, True, 0.0, 1.0), (160, True, 0.0, 1.0), (8, False, 0.0, 1.0), (8, True, 0.1, 1.0), (8, True, 0.0, 60.0)],
)
def test_the_loss_in_chunks_is_that_of_all_logits(
    R: int, D: int, with_bias: bool, smoothing: float, spread: float
) -> None:
    """Oracle: torch's loss of all logits in double precision, also of logits whose `exp` overflows."""
    torch.manual_seed(0)
    weight, bias, hidden = spread * torch.randn(400, D), torch.randn(400) if with_bias else None, torch.randn(R, D)
    targets, results = torch.randint(400, (R,)), []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias) if x is not None]
        h, w, b = [*inputs, None][:3]
        if dtype == torch.float32:
            loss = next_token_loss(w, b, h, targets, smoothing)
            with torch.no_grad():
                evaluated = next_token_loss(w, b, h, targets, smoothing)
        elif R:
            loss = evaluated = F.cross_entropy(F.linear(h, w, b), targets, label_smoothing=smoothing)
        else:
            loss = evaluated = sum(x.sum() for x in inputs) * 0.0  # of no targets, the loss is 0
        results.append([loss, evaluated, *torch.autograd.grad(0.3 * loss, inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        scale = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(ours.double(), exact, atol=1e-5 * scale * max(1.0, spread / 10), rtol=0)


def test_double_precision_stays_double_in_evaluation() -> None:
    weight, hidden, targets = torch.randn(40, 8).double(), torch.randn(300, 8).double(), torch.randint(40, (300,))
    expected = F.cross_entropy(F.linear(hidden, weight), targets)
    torch.testing.assert_close(next_token_loss(weight, None, hidden, targets), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_one_row_of_the_mask_stands_for_all_queries_if_padding_alone_hides_keys(model: str) -> None:
    """Oracle: the mask of all pairs."""
    plain = model in ("learned", "nope", "rope", "sinusoidal", "xpos")
    for pattern, causal in (("full", False), ("full", True), ("window", False)):
        bias = bias_of(model, pattern, causal, padded=True)
        assert (bias.compact is not bias.dense) == (plain and (pattern, causal) == ("full", False))
    bias = bias_of(model, "full", False, padded=True)
    q, k, v = torch.randn(3, 2, 2, 12, 16)
    rows, whole = (F.scaled_dot_product_attention(q, k, v, mask) for mask in (bias.compact, reference_bias(bias)))
    tokens = bias.token_mask_BS[:, None, :, None].expand_as(rows)
    torch.testing.assert_close(rows[tokens], whole[tokens])
    documents = dataclasses.replace(bias, token_mask_BS=bias.token_mask_BS.long())
    assert documents.compact is documents.dense
