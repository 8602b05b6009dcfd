"""Kernels against the reference: the rules that choose one, each kernel, models with and without, compilation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PATTERNS, group
from test_attention import pairs_of
from test_encoder_decoder import translator
from test_models import T, classifier, decoder, groups, sentences
from torch.nn.attention.flex_attention import flex_attention as uncompiled

from speechformer.corpora.special_tokens import IGNORE
from speechformer.errors import UserError
from speechformer.kernels import dispatch
from speechformer.kernels import loss as loss_module
from speechformer.kernels.dispatch import FLEX_MIN_PAIRS, SDPA, choose_kernel
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.flex import FlexAttention, compiled_function, partial_tiles
from speechformer.kernels.loss import next_token_loss, total_loss
from speechformer.kernels.sparse import SparseBlocks
from speechformer.layers.attention import Attention, Layer, Pairs, attention_reference
from speechformer.layers.mechanisms import MECHANISMS, build_attention
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import Sizes
from speechformer.models import stack as stack_module
from speechformer.models.ensemble import DropoutGenerators, stack_models
from speechformer.models.stack import compile_blocks

# each position with a window, each pattern with ALiBi: the kernels treat the two apart
KINDS = [*((model, "window") for model in MODELS), *(("alibi", name) for name in PATTERNS if name != "window")]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
cuda = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def reference_bias(pairs: Pairs) -> torch.Tensor:
    return pairs.bias(*pairs.all)


def reference_kernel(pairs: Pairs, *_: Any) -> Attention:
    return Attention(reference_bias(pairs), pairs)


def kernel_of(pairs: Pairs, device: torch.device, B: int = 1, H: int = 16, rate: float = 0.0, **own: bool) -> str:
    class Elsewhere:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.device = x, device

    there = dataclasses.replace(pairs, token_positions=Elsewhere(pairs.token_positions))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "FlexAttention", lambda *_: "FlexAttention")
        patch.setattr(dispatch, "SparseBlocks", lambda *_: "sparse blocks")
        patch.setattr(dispatch, "SDPA", lambda bias, *_: "SDPA without mask" if bias is None else "SDPA")
        patch.setattr(dispatch, "Attention", lambda *_: "the reference")
        patch.setattr(Pairs, "bias", lambda *_: True)
        layout = dispatch.layout_of
        patch.setattr(
            dispatch, "layout_of", lambda pattern, T, causal, _, most: layout(pattern, T, causal, CPU, most)
        )
        rest = (own.get("weights", False), own.get("compiled", False), None, own.get("needs_reference", False))
        return str(choose_kernel(there, B, H, rate, *rest))


ATTENTION = {
    "softcap": {"name": "softmax", "softcap": 5.0},
    "kv_heads=1": {"name": "softmax", "kv_heads": 1},
    "sink": {"name": "sink"},
    "delta": {"name": "delta"},
}
# device, tokens, model, pattern, what else -> kernel; "many": the limits are low enough for blocks on a GPU
ROWS = """
CPU 12 alibi window padding dropout -> SDPA
CPU 12 nope full dropout -> SDPA
CPU 12 rope full padding dropout -> SDPA
CPU 12 alibi full dropout weights -> the reference
CPU 12 rope full weights -> the reference
CPU 12 rope full -> SDPA without mask
CPU 12 rope full padding -> SDPA
CPU 12 sinusoidal bigbird -> SDPA
CPU 12 forgetting full -> SDPA
CPU 520 alibi window padding -> sparse blocks
CPU 520 forgetting window padding -> sparse blocks
CPU 520 nope window dropout -> sparse blocks
CPU 520 nope window weights -> the reference
CPU 520 nope window compiled -> SDPA
CPU 520 nope window:300 -> SDPA
CPU 2048 alibi full padding -> SDPA
CPU 2048 nope full -> SDPA without mask
CUDA 12 alibi window padding -> SDPA
CUDA 2048 alibi window dropout -> SDPA
CUDA 2048 alibi window -> FlexAttention
CUDA 2048 alibi window compiled -> FlexAttention
CUDA 2048 alibi window padding -> FlexAttention
CUDA 2048 alibi full -> FlexAttention
CUDA 2048 fire full -> SDPA
CUDA 2048 nope bigbird padding -> SDPA
CUDA 2048 nope bigbird padding many -> sparse blocks
CUDA 1400 rope full padding -> SDPA
CUDA 2048 rope full dropout many -> SDPA without mask
CUDA 520 alibi window padding many no_triton -> sparse blocks
CUDA 520 alibi window padding dropout many -> sparse blocks
CPU 12 rope full softcap -> the reference
CPU 520 nope window sink -> the reference
CPU 12 rope full kv_heads=1 -> SDPA without mask
CPU 520 nope window kv_heads=1 -> sparse blocks
CPU 12 rope full delta -> none
CPU 520 nope top_blocks -> the reference
CUDA 2048 alibi full softcap -> the reference
CUDA 2048 alibi full sink -> the reference
CUDA 2048 alibi full kv_heads=1 -> FlexAttention
CUDA 2048 nope top_blocks kv_heads=1 -> the reference
"""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_the_kernel_of_each_row(row: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    words, kernel = row.split(" -> ")
    place, tokens, model, pattern, *options = words.split()
    monkeypatch.setattr(dispatch, "HAS_TRITON", "no_triton" not in options)
    monkeypatch.setattr(dispatch, "FLEX_MIN_PAIRS", 2048**2)
    if "many" in options:
        monkeypatch.setattr(dispatch, "SPARSE_MIN_ON_GPU", 512)
    name, _, window = pattern.partition(":")
    spec = {"name": name, "window": int(window)} if window else name
    pairs = pairs_of(model, spec, causal, "padding" in options, int(tokens))
    rate, own = 0.3 if "dropout" in options else 0.0, dict.fromkeys(options, True)
    attention = next((ATTENTION[option] for option in options if option in ATTENTION), {"name": "softmax"})
    layer = build_attention(attention, Layer(Sizes(32, 2, 12, True, 16), 0, FastDropout(rate), True, True))
    taken = layer.kernel_for(pairs.pattern)
    if taken != "none":  # a mixer computes itself
        own["needs_reference"] = taken == "reference"
        taken = kernel_of(pairs, torch.device(place.lower()), rate=rate, **own)
    assert taken == kernel


def test_what_flex_attention_cannot_or_need_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    long = math.isqrt(FLEX_MIN_PAIRS)
    pairs, shorter = pairs_of("nope", "window", length=long), pairs_of("nope", "window", length=long // 4)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "SPARSE_MIN_ON_GPU", 10**9)
    assert kernel_of(pairs, CUDA) == "FlexAttention" and kernel_of(pairs, CUDA, H=8) == "SDPA"
    assert kernel_of(shorter, CUDA, B=8) == "SDPA" and kernel_of(shorter, CUDA, B=16) == "FlexAttention"
    last = dataclasses.replace(shorter, i_T=shorter.i_T[-1:])  # with a cache
    assert kernel_of(last, CPU) == "SDPA"


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("model", "pattern"), [*KINDS, ("nope", "full")])
def test_torchs_attention_is_the_reference(model: str, pattern: str, rate: float) -> None:
    """Outputs and gradients, under the same dropout, with gates if the encoding has any."""
    pairs, dropout = pairs_of(model, pattern, padded=True), FastDropout(rate)
    bias, results = reference_bias(pairs), []
    gates = torch.randn(2, 2, 12).cumsum(dim=-1) if pairs.positions.overrides("gate") else None
    for kernel in (Attention(bias, pairs), SDPA(bias, pairs)):
        torch.manual_seed(1)
        qkv = torch.randn(3, 2, 2, 12, 16, requires_grad=True)
        output, weights = kernel(*qkv, dropout, gates)
        results.append([output, torch.autograd.grad(output.square().sum(), qkv)[0]])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert (weights is not None) == (rate > 0)


@pytest.mark.parametrize(
    ("model", "pattern"),
    [pytest.param(*kind, marks=[pytest.mark.slow] if k % 3 else []) for k, kind in enumerate(KINDS)],
)
def test_flex_attention_is_the_reference(model: str, pattern: str) -> None:
    """At a length that is no multiple of a tile; causal, with padding, and within documents."""
    torch.manual_seed(0)
    documents = torch.sort(torch.randint(1, 5, (2, 150)), dim=1).values
    for causal, mask in ((True, None), (False, torch.arange(150) < torch.tensor([[150], [78]])), (True, documents)):
        pairs = dataclasses.replace(pairs_of(model, pattern, causal, length=150), token_mask_BS=mask)
        has = pairs.positions.overrides
        if has("gate") or (has("bias") and not has("score_mod")):
            pytest.skip("this bias has no score_mod, so the dispatcher takes another kernel")
        q, k, v = torch.randn(3, 2, 2, 150, 16)
        with torch.no_grad():
            output, _ = FlexAttention(pairs)(q, k, v, FastDropout(0.0))
            expected = attention_reference(q, k, v, reference_bias(pairs))[0]
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    across = documents[:, :, None] != documents[:, None, :]
    assert not (reference_bias(pairs)[:, 0].isfinite() & across).any()


def test_flex_attention_is_a_part_of_a_compiled_block() -> None:
    """One graph (or torch says why not), and the same values."""
    torch.manual_seed(0)
    pairs, (q, k, v) = pairs_of("alibi", "window", length=150), torch.randn(3, 2, 2, 150, 16)
    kernel, dropout = FlexAttention(pairs), FastDropout(0.0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel(q, k, v, dropout)[0]

    with torch.no_grad():
        output = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        expected = attention_reference(q, k, v, reference_bias(pairs))[0]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_flex_attention_stays_compiled_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's count of graphs: one for a first length, one for others, one for other numbers of blocks."""
    build = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: build(function, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = compiled_function.__wrapped__(uncompiled)
    for length in range(160, 280, 10):
        pairs = pairs_of("alibi", "window", length=length)
        q, k, v = torch.randn(3, 2, 2, length, 16)
        with torch.no_grad():
            output = run(q, k, v, score_mod=pairs.positions.score_mod(), block_mask=FlexAttention(pairs).block_mask)
            expected = attention_reference(q, k, v, reference_bias(pairs))[0]
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
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


@cuda
@needs_cuda
@pytest.mark.parametrize("kernel", [SDPA, SparseBlocks, FlexAttention])
def test_each_kernel_is_the_reference_on_a_gpu(kernel: type[Attention]) -> None:
    pairs = pairs_of("alibi", "window", length=520)
    there = {name: getattr(pairs, name).cuda() for name in ("token_positions", "i_T", "j_S")}
    pairs = dataclasses.replace(pairs, positions=pairs.positions.cuda(), **there)
    q, k, v = torch.randn(3, 2, 2, 520, 16, device="cuda")
    layout = dispatch.layout_of(pairs.pattern, 520, True, torch.device("cuda"), math.inf)
    made: Any = {SDPA: lambda: SDPA(reference_bias(pairs), pairs), FlexAttention: lambda: FlexAttention(pairs)}
    output = made.get(kernel, lambda: SparseBlocks(pairs, layout or []))()(q, k, v, FastDropout(0.0))[0]
    expected = attention_reference(q, k, v, reference_bias(pairs))[0]
    torch.testing.assert_close(output, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("model", "pattern"), [*KINDS, ("learned", "full")])
def test_a_model_of_fast_layers_is_that_of_the_reference(
    model: str, pattern: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal weights and equal dropout, in double precision. With padding, the fast layers run on rows of tokens."""
    norm, rate = ("post", 0.0) if (model, padded) == ("rope", False) else ("pre", 0.3)
    stack = classifier(**groups(model, pattern), dropout=rate, norm=norm, pool="cls").encoder.double().train()
    ids = sentences()
    if padded:
        ids[1, 9:], ids[2, 1:] = 0, 0
    token_mask = F.pad(ids != 0, (1, 0), value=True)  # with the first token
    rows: list[torch.Size] = []
    stack.blocks[0].feed_forward.register_forward_hook(lambda _, x, y: rows.append(x[0].shape))
    results = []
    for is_fast in (True, False):
        if not is_fast:
            monkeypatch.setattr(stack, "choose", reference_kernel)
            monkeypatch.setattr(type(stack), "can_unpad", False)
        torch.manual_seed(2)
        stack.zero_grad()
        states = stack(ids, ids != 0)[0] * token_mask[:, :, None]
        states.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in stack.parameters()]
        results.append([states, torch.get_rng_state(), *gradients])
    assert rows[0] == ((int(token_mask.sum()), 16) if padded else (*token_mask.shape, 16))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


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
    model.train().encoder.is_compiled = True
    assert not model.encoder.can_unpad
    assert not classifier().train().to("meta").encoder.can_unpad  # not the CPU


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
    monkeypatch.setattr(stack_module.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"compile=default: .* C\+\+ compiler"):
        compile_blocks(decoder(), "default", CPU)


def test_a_batch_of_padding_alone_has_finite_states_and_gradients_in_training() -> None:
    """There padding attends to itself, as in the reference: a loss that ignores it must not spoil the weights."""
    stack = classifier().train().encoder
    ids = torch.zeros(2, 5, dtype=torch.long)
    x = stack(ids, torch.zeros(2, 5, dtype=torch.bool))[0]
    (x.sum() * 0).backward()
    gradients = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    assert x.isfinite().all() and gradients and all(own.isfinite().all() for own in gradients)


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


@pytest.mark.parametrize(
    "name",
    ["softmax", *(pytest.param(name, marks=pytest.mark.slow) for name in MECHANISMS if name != "softmax")],
)
def test_no_attention_breaks_the_graph_of_a_compiled_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's `fullgraph`, which refuses to compile a block in parts."""
    network = decoder(model=group("model", "nope"), attention=group("attention", name), layers=1, dropout=0.3).train()
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, mode: compile(module, fullgraph=True, backend="eager")
    )
    torch._dynamo.reset()
    compile_blocks(network, "default", CUDA)
    assert network(sentences()).isfinite().all()


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


@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, None), (0.1, 5.0)])
def test_the_compiled_loss_is_the_loss(
    smoothing: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output layer and loss are one graph without a break, and one more for any number of rows; meta is no CPU."""
    torch._dynamo.reset()
    run = torch.compile(total_loss, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    for R in (30, 20, 25):
        weight, hidden, targets = torch.randn(40, 8), torch.randn(R, 8), torch.randint(40, (R,))
        inputs = [x.requires_grad_() for x in (weight, hidden)]
        arguments = (weight, None, hidden, targets, smoothing, softcap, IGNORE)
        results = [torch.autograd.grad(function(*arguments), inputs) for function in (total_loss, run)]
        torch.testing.assert_close(*results)
    calls: list[Any] = []
    monkeypatch.setattr(loss_module, "compiled_function", lambda function: calls.append(function) or function)
    there = [x.detach().to("meta") for x in (weight, hidden, targets)]
    for compiled, grad in ((True, True), (True, False), (False, True)):
        with torch.set_grad_enabled(grad):
            next_token_loss(there[0], None, *there[1:], compiled=compiled)
    assert calls == [total_loss]
