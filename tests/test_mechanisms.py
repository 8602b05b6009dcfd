"""attention= in the config. Oracles: each paper's formula, for one query or token in double precision; the library
entmax; torch's grouped-query attention and RMS norm; finite differences; models without cache, padding or kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import entmax as entmax_library
import pytest
import torch
import torch.nn.functional as F
from conftest import group
from test_dispatch import reference_kernel
from test_models import classifier, decoder, sentences, with_another_word
from torch import Tensor, nn

from speechformer.errors import UserError
from speechformer.layers.attention import Attention, Layer, Pairs, SelfAttention
from speechformer.layers.block import ACTIVATIONS, NORMS, Block
from speechformer.layers.dropout import Dropout
from speechformer.layers.mechanisms import MECHANISMS, Threshold, build_attention
from speechformer.layers.mixers import MIXERS
from speechformer.layers.patterns import all_pairs
from speechformer.layers.positions import Sizes, build_positions

T, LENGTH, D, N, H = 7, 20, 16, 4, 4  # a text is shorter than those of training


def softmax(z: Tensor) -> Tensor:
    return z.exp() / z.exp().sum(dim=1, keepdim=True)


def entmax(layer: Any, z: Tensor) -> Tensor:
    """With tau by bisection."""
    z = (layer.alpha - 1) * (z - z.amax(dim=1, keepdim=True))
    tau = torch.full((N, 1), -1.0)
    for k in range(1, 60):
        weights = (z - tau).clamp(min=0) ** (1 / (layer.alpha - 1))
        tau = tau + (weights.sum(dim=1, keepdim=True) - 1).sign() / 2**k
    return weights


def start(layer: Any) -> float:
    return 0.8 - 0.6 * math.exp(-0.3 * layer.depth)


def differential(layer: Any, z: Tensor) -> Tensor:
    a, b, c, d = layer.lambdas
    return softmax(z[0::2]) - ((a @ b).exp() - (c @ d).exp() + start(layer)) * softmax(z[1::2])


# Of one query and each head: its scores before positions are added, from scaled products with the keys that it sees,
# [N, keys], and its weights, from scores with positions.
SCORES: dict[str, Callable[[Any, Tensor], Tensor]] = {}
ORACLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax": lambda layer, z: softmax(z),
    "sink": lambda layer, z: z.exp() / (layer.sinks.exp()[:, None] + z.exp().sum(dim=1, keepdim=True)),
    "sigmoid": lambda layer, z: 1 / (1 + LENGTH * (-z).exp()),
    "entmax": entmax,
    "softpick": lambda layer, z: (z.exp() - 1).relu() / ((z.exp() - 1).abs().sum(dim=1, keepdim=True) + 1e-6),
    "differential": differential,
}


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def step(layer: Any, x: Tensor) -> Tensor:
    return (1 + (x @ layer.steps.map.weight.T + layer.steps.shift).exp()).log()


def by_step(layer: Any, x: Tensor) -> Tensor:
    return (-layer.steps.log_rate.exp() * step(layer, x)).exp()[:, None]


def by_channel(layer: Any, x: Tensor) -> Tensor:
    first, second = layer.decay_map
    return sigmoid(second.weight @ (first.weight @ x) + second.bias).view(N, H) ** (1 / 16)


def strength(layer: Any, x: Tensor) -> Tensor:
    return sigmoid(layer.strength_map.weight @ x)


def gated_norm(layer: Any, o: Tensor, g: Tensor) -> Tensor:
    return rms(o, layer.norm) * silu(g)


# What a token x does with the states of the heads: how much of them stays, [N, 1 or H], how strongly it writes, [N].
DECAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "retention": lambda layer, x: torch.tensor([[31 / 32], [63 / 64], [127 / 128], [255 / 256]]),
    "gated_linear": by_channel,
    "delta": lambda layer, x: torch.ones(N, 1),
    "gated_delta": by_step,
    "ssd": by_step,
}
STRENGTHS: dict[str, Callable[[Any, Tensor], Tensor]] = {"delta": strength, "gated_delta": strength, "ssd": step}
# What becomes of the output of the heads o, with gates g of its shape, before the last linear map.
READ: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "differential": lambda layer, o, g: (1 - start(layer)) * rms(o, layer.norm, 1e-5) * sigmoid(g),
    "linear": lambda layer, o, g: o,
    "delta": lambda layer, o, g: rms(o, layer.norm),
    "ssd": lambda layer, o, g: rms(o * silu(g), layer.norm),
    **dict.fromkeys(("retention", "gated_linear", "gated_delta"), gated_norm),
}


def rms(x: Tensor, norm: Any, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * norm.weight


def rotated(x: Tensor) -> Tensor:
    """RoFormer, equation 34: pairs as complex numbers, times e^(i angle)."""
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, H, 2).double() / H)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def projected(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a text, [heads, T, H] each."""
    y = x @ layer.qkv.weight.T + layer.qkv.bias
    if layer.convolution is not None:
        w = layer.convolution.convolution.weight[:, 0, 0].flip(1).T  # w[s] for the token s before
        y = torch.stack([y[t] + sum(w[s] * y[t - s] for s in range(min(t + 1, len(w)))) for t in range(len(y))])
    return y.unflatten(1, (-1, H)).transpose(0, 1).split((N, layer.kv_heads, layer.kv_heads))


def states_read(layer: Any, name: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o_t = S_t^T q_t / c of each head, with S_t = A_t S_{t-1} + b_t k_t v_t^T, [T, N, V]."""
    outputs, c = [], 1 if name == "ssd" else math.sqrt(H)
    for n in range(N):
        S = torch.zeros(H, v.shape[2])
        for t in range(len(x)):
            b = STRENGTHS[name](layer, x[t])[n] if name in STRENGTHS else 1.0
            erased = b * torch.outer(k[n, t], k[n, t]) if "delta" in name else 0.0
            A = (torch.eye(H) - erased) @ torch.diag(DECAYS[name](layer, x[t])[n].expand(H))
            S = A @ S + b * torch.outer(k[n, t], v[n, t])
            outputs.append(S.T @ q[n, t] / c)
    return torch.stack(outputs).unflatten(0, (N, -1)).transpose(0, 1)


def mixed(layer: Any, name: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    if name == "linear":
        products = torch.einsum("nih, njh -> nij", *(torch.where(y > 0, y + 1, y.exp()) for y in (q, k)))
        products = products.tril() if causal else products
        return torch.einsum("nij, njv -> inv", products / products.sum(dim=2, keepdim=True), v)
    if "delta" in name:
        q, k = (y / y.square().sum(dim=-1, keepdim=True).sqrt() for y in (q, k))
    output = states_read(layer, name, x, q, k, v)
    return output + (layer.skip[:, None] * v.transpose(0, 1) if name == "ssd" else 0)


def expected(
    layer: Any,
    name: str,
    x: Tensor,
    model: str = "nope",
    causal: bool = True,
    window: int = 99,
    first_values: Tensor | None = None,
) -> Tensor:
    """What a layer returns for one text, [T, D]."""
    q, k, v = projected(layer, x)
    if name in STRENGTHS:
        q, k, v = silu(q), silu(k), silu(v)
    if layer.q_norm is not None:
        q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
    if layer.value_residual is not None:
        v = layer.value_residual[0] * v + layer.value_residual[1] * first_values
    if model == "rope":
        q, k = rotated(q), rotated(k)
    if name in MIXERS:
        output = mixed(layer, name, x, q, k, v, causal)
    else:
        k, v = (y[[n * layer.kv_heads // N for n in range(N)]] for y in (k, v))
        rows = []
        for i in range(len(x)):
            seen = torch.tensor([j for j in range(len(x)) if (j <= i or not causal) and abs(i - j) < window])
            z = torch.einsum("nh, njh -> nj", q[:, i], k[:, seen]) / math.sqrt(H)
            if layer.length_scale is not None:
                z = z * layer.length_scale[:, None] * math.log(i + 1 if causal else len(x))
            if layer.softcap is not None:
                z = layer.softcap * (z / layer.softcap).tanh()
            z = SCORES.get(name, lambda layer, z: z)(layer, z)
            if model == "alibi":
                z = z - torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None] * (i - seen).abs()
            weights = ORACLES.get(name, ORACLES["softmax"])(layer, z)
            values = v[:, seen].unflatten(0, (len(weights), -1)).transpose(1, 2).flatten(2)
            rows.append(torch.einsum("nj, njv -> nv", weights, values))
        output = torch.stack(rows)
    gates = torch.full(x.shape, math.inf) if layer.output_gate is None else x @ layer.output_gate.weight.T
    read = READ.get(name, lambda layer, o, g: o * sigmoid(g))
    return read(layer, output, gates.view_as(output)).flatten(1) @ layer.output.weight.T + layer.output.bias


OPTIONS: dict[str, Any] = {
    "qk_norm": True,
    "conv": 3,
    "softcap": 1.5,
    "length_scale": True,
    "output_gate": True,
    "value_residual": True,
}
SPECS: list[dict[str, Any]] = [
    *({"name": name} for name in MECHANISMS),
    *({"name": name, **({"conv": 3, "qk_norm": True} if name in MIXERS else OPTIONS)} for name in MECHANISMS),
    *({"name": "softmax", name: value} for name, value in [*OPTIONS.items(), ("kv_heads", 2), ("kv_heads", 1)]),
    {"name": "sigmoid", "kv_heads": 2},
    {"name": "sink", "learned": False},
    {"name": "entmax", "alpha": 2.0},
    {"name": "entmax", "alpha": 1.2},
]
IN_AN_ENCODER = [spec for spec in SPECS if not getattr(MECHANISMS[spec["name"]], "causal_only", False)]
every_choice = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: " ".join(map(str, spec.values())))


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randomised(layer: Any) -> Any:
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)  # the initial values can hide a part of the formula
    return layer


def layer_of(spec: dict[str, Any], model: str = "nope", causal: bool = True) -> tuple[Any, Attention]:
    """The second layer of a model, and its attention to all of a text."""
    torch.manual_seed(0)
    layer: Any = build_attention(spec, Layer(Sizes(D, N, LENGTH, causal, D // N), 1, Dropout(0.0), True, True))
    layer.depth = 1
    positions = build_positions(group("model", model), width=D, heads=N, length=LENGTH, causal=causal)
    pairs = Pairs.of_text(positions, all_pairs, causal, T, None, None)
    attention = Attention(pairs.bias(*pairs.all), pairs)
    attention.shared["values"] = torch.randn(2, layer.kv_heads, T, H)
    return randomised(layer), attention


@pytest.mark.parametrize(
    ("spec", "model", "causal"),
    [
        (spec, model, causal)
        for spec in SPECS
        for model in ("rope", "alibi")
        for causal in (True, False)
        if (spec in IN_AN_ENCODER or causal) and (spec["name"] not in MIXERS or model == "rope")
    ],
    ids=str,
)
def test_a_layer_is_its_formula(spec: dict[str, Any], model: str, causal: bool) -> None:
    name = spec["name"]
    missing = f"attention={name} has no formula: add SCORES[{name!r}] or ORACLES[{name!r}] to this file"
    assert name in {*SCORES, *ORACLES, *READ}, missing
    layer, attention = layer_of(spec, model, causal)
    x = torch.randn(2, T, D)
    texts = [expected(layer, name, x[b], model, causal, 99, attention.shared["values"][b]) for b in range(2)]
    torch.testing.assert_close(layer(x, attention)[0], torch.stack(texts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{"kv_heads": 1}, {"kv_heads": 2}, {"qk_norm": True}], ids=str)
def test_grouped_heads_and_norms_are_those_of_torch(options: dict[str, Any], causal: bool) -> None:
    layer, attention = layer_of({"name": "softmax", **options}, causal=causal)
    x = torch.randn(2, T, D)
    q, k, v = layer.qkv(x).unflatten(2, (-1, H)).transpose(1, 2).split((N, layer.kv_heads, layer.kv_heads), dim=1)
    if layer.q_norm is not None:
        q, k = (F.rms_norm(y, (H,), norm.weight, 1e-6) for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(layer(x, attention)[0], layer.output(output.transpose(1, 2).flatten(2)))


@every_choice
def test_a_mechanism_says_whether_its_weights_sum_to_one(spec: dict[str, Any]) -> None:
    layer, attention = layer_of(spec)
    attention.with_weights = True
    sums = layer(torch.randn(2, T, D), attention)[1].sum(dim=-1)
    ones = not ((sums - 1).abs() > 1e-4).any()
    assert layer.sums_to_one is ones, f"set {type(layer).__name__}.sums_to_one = {ones}"


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_entmax_is_that_of_its_authors_and_so_are_its_gradients(alpha: float) -> None:
    """Oracle: https://github.com/deep-spin/entmax, with hidden keys and scores of any size."""
    exact = {1.5: entmax_library.entmax15, 2.0: entmax_library.sparsemax}.get(
        alpha, lambda z, dim: entmax_library.entmax_bisect(z, alpha, dim, 80)
    )
    layer, _ = layer_of({"name": "entmax", "alpha": alpha})
    z = torch.randn(6, 4, 5, 30) * torch.tensor([0.01, 0.1, 1, 3, 10, 1000])[:, None, None, None]
    z[..., torch.arange(30) > 25] = -math.inf
    z.requires_grad_()
    results = [function(z) for function in (layer.normalise, lambda z: exact(z, dim=-1))]
    grad = torch.randn_like(z)
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(y, z, grad)[0] for y in results), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_the_gradients_of_entmax_are_differences_of_its_values(alpha: float) -> None:
    """Some weights are 0. No score is so near the threshold that a difference would step over it."""
    z = torch.tensor([[0.0, -0.2, 0.4, -9.0], [2.0, -7.0, 1.9, 1.5], [0.1, 0.1, -math.inf, 0.2]], requires_grad=True)
    weights = Threshold.apply(z, alpha)
    assert 0 < (weights == 0).sum() == (weights < 1e-2).sum()
    assert torch.autograd.gradcheck(lambda z: Threshold.apply(z, alpha), z)


def network_of(spec: dict[str, Any], build: Any = decoder, **changes: Any) -> Any:
    own = {"attention": spec, "model": group("model", "rope"), "heads": N, "dropout": 0.0}
    network = build(**{**own, **changes})
    for module in network.modules():
        if isinstance(module, SelfAttention):
            randomised(module)
    return network


@every_choice
def test_no_output_depends_on_a_later_token_nor_on_whether_a_cache_holds_the_earlier(spec: dict[str, Any]) -> None:
    """The cache reads a prefix, then tokens one by one, then several at once."""
    pattern = {"name": "full"} if spec["name"] in MIXERS else {"name": "window", "window": 5}
    model, ids, passes = network_of(spec, pattern=pattern), sentences(), []
    hidden, changed = model.hidden(ids), model.hidden(with_another_word(ids, 9))
    torch.testing.assert_close(changed[:, :9], hidden[:, :9], atol=1e-12, rtol=0)
    assert ((changed - hidden)[0, 9:14].abs().amax(dim=1) > 1e-6).all()
    cache = model.decoder.new_cache()
    for first, last in [(0, 5), *((t, t + 1) for t in range(5, 13)), (13, 20)]:
        passes.append(model.hidden(ids[:, first:last], cache))
    torch.testing.assert_close(torch.cat(passes, dim=1), hidden, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("spec", IN_AN_ENCODER, ids=str)
def test_padding_changes_nothing_in_an_encoder(spec: dict[str, Any], pool: str) -> None:
    model, ids = network_of(spec, classifier, pool=pool), sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    for training in (True, False):
        logits = model.train(training)(ids)
        for row, length in ((1, 9), (2, 1)):
            torch.testing.assert_close(model(ids[row : row + 1, :length])[0], logits[row])


@every_choice
def test_single_precision_is_double_precision_to_a_few_digits(spec: dict[str, Any]) -> None:
    model, ids = network_of(spec), sentences()
    exact = model.hidden(ids)
    torch.testing.assert_close(model.float().hidden(ids).double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
@every_choice
def test_kernels_compute_the_reference_and_every_parameter_has_a_gradient(
    spec: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, or with padding at the end that only the reference reads."""
    positions = group("model", "forgetting" if padded and spec["name"] not in MIXERS else "rope")
    model, ids, results = network_of(spec, dropout=0.0 if padded else 0.3, model=positions).train(), sentences(), []
    is_token = torch.arange(20) < (torch.tensor([[20], [9], [1]]) if padded else 20)
    for is_fast in (True, False):
        if not is_fast:
            monkeypatch.setattr(model.decoder, "choose", reference_kernel)
        torch.manual_seed(2)
        model.zero_grad()
        states = model.decoder(ids, is_token.expand(3, 20) if is_fast else None)[0][is_token.expand(3, 20)]
        states.pow(3).sum().backward()
        trained = [parameter for parameter in model.decoder.parameters() if parameter.requires_grad]
        results.append([states, *(parameter.grad.clone() for parameter in trained)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
        assert ours.isfinite().all() and ours.abs().max() > 1e-9


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_of_a_mixer_does_not_grow(name: str) -> None:
    model, shapes = network_of({"name": name}), []
    for length in (5, 50):
        cache = model.decoder.new_cache()
        model.hidden(torch.ones(2, length, dtype=torch.long), cache)
        shapes.append([{key: x.shape for key, x in layer.items()} for layer in cache])
    assert shapes[0] == shapes[1]


LAYERS: list[dict[str, list[Any]]] = [
    {"attention": ["gated_delta", "softmax"], "model": ["rope", "alibi"], "pattern": ["full", {"name": "window"}]},
    {
        "attention": [
            "delta",
            *({"name": name, "value_residual": True} for name in ("sink", "differential", "softmax")),
        ],
        "model": ["rope", "nope", "alibi", "rope"],
        "pattern": ["full", "full", {"name": "window"}, "full"],
    },
]


@pytest.mark.parametrize("own", LAYERS, ids=str)
def test_each_layer_has_its_own_attention(own: dict[str, list[Any]]) -> None:
    """Oracle: its formula for what it reads, with the values of the first layer that shares them."""
    changes = {kind: {"name": "by_layer", "layers": listed} for kind, listed in own.items()}
    model, seen = network_of(changes["attention"], layers=4, **changes), []
    for block in model.decoder.blocks:
        block.attention.register_forward_hook(
            lambda layer, inputs, result: seen.append((layer, inputs[0], result[0]))
        )
    ids, values = sentences(1), None
    hidden = model.hidden(ids)
    for k, (layer, x, output) in enumerate(seen):
        attention, positions, pattern = (own[kind][k % len(own[kind])] for kind in ("attention", "model", "pattern"))
        name = attention if isinstance(attention, str) else attention["name"]
        if layer.shares_values and values is None:
            values = projected(layer, x[0])[2]
        layer.depth = k
        window = 99 if pattern == "full" else 5
        ours = expected(layer, name, x[0], positions, True, window, values)
        torch.testing.assert_close(output[0], ours, atol=1e-5, rtol=1e-5)
    cache = model.decoder.new_cache()
    passes = [model.hidden(part, cache) for part in ids.split(6, dim=1)]
    torch.testing.assert_close(torch.cat(passes, dim=1), hidden)


DOCUMENTS = torch.ones(3, 20, dtype=torch.long)


@pytest.mark.parametrize(
    ("spec", "changes", "sentence"),
    [
        ({"name": "delta"}, {"model": {"name": "alibi"}}, "delta has no scores that a bias .* such as rope"),
        (
            {"name": "gated_linear"},
            {"model": {"name": "pope"}},
            "gated_linear has a decay for each channel .* as rope",
        ),
        ({"name": "softmax", "qk_norm": True}, {"model": {"name": "rnn"}}, "attention softmax without options"),
        ({"name": "ssd"}, {"model": {"name": "forgetting"}}, "ssd has no scores that a gate .* such as rope"),
        ({"name": "linear"}, {"pattern": {"name": "window"}}, "linear has no scores that a pattern .* must be full"),
        ({"name": "delta"}, {"build": classifier}, "delta reads from left to right.* in an encoder attention=linear"),
        ({"name": "gated_delta"}, {"documents_BT": DOCUMENTS}, "attention without scores .* task.documents=joined"),
        ({"name": "softmax", "conv": 2}, {"documents_BT": DOCUMENTS}, "attention.conv.* task.documents=joined"),
        ({"name": "differential"}, {"heads": 1}, "heads must be even with attention=differential.* not 1"),
        ({"name": "differential", "kv_heads": 2}, {}, "attention.kv_heads must be null with attention=diff.* not 2"),
        ({"name": "softmax", "kv_heads": 3}, {}, "attention.kv_heads must be a divisor of heads=4, not 3"),
        ({"name": "entmax", "alpha": 1.0}, {}, "attention.alpha must be greater than 1, not 1.0"),
        ({"name": "ssd", "kv_heads": 2}, {}, "attention has no key 'kv_heads'; .* conv, qk_norm"),
        ({"name": "sink"}, {"model": {"name": "rnn"}}, "has no self-attention, so .* attention softmax"),
        (
            {
                "name": "by_layer",
                "layers": [{"name": "softmax", "value_residual": True, "kv_heads": n} for n in (2, 4)],
            },
            {},
            "attention.kv_heads must be 2 as where value_residual begins, not 4",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(spec: Any, changes: dict[str, Any], sentence: str) -> None:
    documents = changes.pop("documents_BT", None)
    with pytest.raises(UserError, match=sentence):
        network_of(spec, **changes).hidden(sentences(), documents_BT=documents)


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


NORM_FORMULAS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "layer": layer_norm,
    "rms": rms,
    "dyt": lambda x, norm: norm.weight * (norm.alpha * x).tanh() + norm.bias,
}
ACTIVATION_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    "relu2": lambda x: x**2 * (x > 0),
    "swiglu": lambda x: silu(x[..., :24]) * x[..., 24:],
    "geglu": lambda x: ACTIVATION_FORMULAS["gelu"](x[..., :24]) * x[..., 24:],
    "geglu_tanh": lambda x: ACTIVATION_FORMULAS["gelu_tanh"](x[..., :24]) * x[..., 24:],
    "swiglu_clamped": lambda x: (
        (a := x[..., :24].clamp(max=7)) / (1 + (-1.702 * a).exp()) * (x[..., 24:].clamp(-7, 7) + 1)
    ),
}


@pytest.mark.parametrize(
    ("order", "norm_type", "activation"),
    [
        *((order, "layer", "relu") for order in ("pre", "post", "sandwich", "parallel")),
        *(("sandwich", norm_type, "gelu") for norm_type in NORMS),
        *(("pre", "rms", activation) for activation in ACTIVATIONS),
    ],
)
def test_a_block_is_its_formula(order: str, norm_type: str, activation: str) -> None:
    """Its attention is taken as it is."""
    layer, attention = layer_of({"name": "softmax"})
    settings: Any = {"width": D, "heads": N, "ff": 24, "dropout": 0.0, "qkv_bias": True, "bias": True, "cross": True}
    block = randomised(Block(layer, norm=order, norm_type=norm_type, activation=activation, **settings))
    x, memory = torch.randn(2, T, D), (*torch.randn(2, 2, N, 5, H), Attention(torch.zeros(1, 1, 1, 5)))
    (first, _, second), norm = block.feed_forward, NORM_FORMULAS[norm_type]
    last = block.output_norms if order == "sandwich" else [None] * 3

    def feed_forward(x: Tensor) -> Tensor:
        return ACTIVATION_FORMULAS[activation](x @ first.weight.T + first.bias) @ second.weight.T + second.bias

    y = x
    for function, before, after in (
        (lambda x: layer(x, attention)[0], block.attention_norm, last[0]),
        (lambda x: block.cross_attention(x, *memory)[0], block.cross_attention_norm, last[2]),
        (feed_forward, block.feed_forward_norm, last[1]),
    ):
        if order == "post":
            y = norm(y + function(y), before)
        else:
            branch = function(norm(x if (order, function) == ("parallel", feed_forward) else y, before))
            y = y + (norm(branch, after) if order == "sandwich" else branch)
    torch.testing.assert_close(block(x, attention, memory)[0], y)
