"""The linear recurrence. Oracles, in double precision: products of transition matrices, pair by pair of tokens; for
gradients, finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.layers.recurrence import chunked, step_by_step

B, N, H, V = 2, 2, 4, 3
LAYERS = {  # whose decay is [B, N, T, 1], constant, [B, N, T, H] or none; whether it writes by the delta rule
    "linear attention": ("none", False),
    "retention": ("constant", False),
    "gated linear attention": ("channel", False),
    "mamba-2": ("head", False),
    "deltanet": ("none", True),
    "gated deltanet": ("head", True),
    "delta rule with a decay of each channel": ("channel", True),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)
every_form = pytest.mark.parametrize("form", [step_by_step, chunked])


def inputs(layer: str, T: int, state: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Random arguments of a recurrence. Only linear attention leaves out b."""
    torch.manual_seed(0)
    decay, delta = LAYERS[layer]
    q, k = torch.randn(2, B, N, T, H, dtype=dtype)
    shape = {"constant": (1, N, T, 1), "head": (B, N, T, 1), "channel": (B, N, T, H)}
    tensors = {
        "q": q,
        "k": F.normalize(k, dim=-1),
        "v": torch.randn(B, N, T, V, dtype=dtype),
        "g": None if decay == "none" else -torch.rand(shape[decay], dtype=dtype),
        "b": None if layer == "linear attention" else 0.1 + torch.rand(B, N, T, 1, dtype=dtype),
        "state": torch.randn(B, N, H, V, dtype=dtype) if state else None,
    }
    if decay == "constant":
        tensors["g"] = tensors["g"][:, :, :1].repeat(1, 1, T, 1)
    return {"delta": delta, **{name: x for name, x in tensors.items() if x is not None}}


def tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor)}


def with_gradients(form: Any, arguments: dict[str, Any], **options: Any) -> list[Tensor]:
    """Output, state, and the gradients of all tensors for a random gradient of both."""
    tensors = {name: x.clone().requires_grad_() for name, x in tensors_of(arguments).items()}
    results = form(**arguments | tensors, **options)
    torch.manual_seed(1)
    return [*results, *torch.autograd.grad(results, list(tensors.values()), [torch.randn_like(x) for x in results])]


def by_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor, delta: bool) -> list[Tensor]:
    """o_i = q_i^T S_i for one head; S_i = sum over j of A_i A_{i-1} ... A_{j+1} b_j k_j v_j^T + A_i ... A_0 state."""
    eye = torch.eye(H, dtype=q.dtype)
    kept = [eye - b_t * torch.outer(k_t, k_t) if delta else eye for k_t, b_t in zip(k, b)]
    A = [kept_t @ torch.diag(g_t.exp().expand(H)) for kept_t, g_t in zip(kept, g)]
    outputs = []
    for i in range(len(q)):
        S, transition = torch.zeros_like(state), eye
        for j in range(i, -1, -1):
            S = S + transition @ torch.outer(k[j], v[j]) * b[j]
            transition = transition @ A[j]
        S = S + transition @ state
        outputs.append(q[i] @ S)
    return [torch.stack(outputs), S]


@every_form
@every_layer
def test_both_forms_are_the_closed_form(layer: str, form: Any) -> None:
    arguments = inputs(layer, T=11)
    output, state = form(**arguments)
    g = arguments.get("g", torch.zeros(1, dtype=torch.float64)).expand(B, N, 11, -1)
    b = arguments.get("b", torch.ones(1, dtype=torch.float64)).expand(B, N, 11, 1)
    for n in itertools.product(range(B), range(N)):
        q, k, v, S = (arguments[name][n] for name in ("q", "k", "v", "state"))
        expected = by_pairs(q, k, v, g[n], b[n], S, arguments["delta"])
        torch.testing.assert_close([output[n], state[n]], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [1, 31, 32, 33, 100])
@every_layer
def test_chunks_are_the_steps_and_so_are_their_gradients(layer: str, T: int, state: bool) -> None:
    arguments = inputs(layer, T, state)
    steps, chunks = with_gradients(step_by_step, arguments), with_gradients(chunked, arguments)
    torch.testing.assert_close(chunks, steps, rtol=1e-10, atol=1e-10)


@every_layer
def test_the_gradients_of_chunks_are_differences_of_their_values(layer: str) -> None:
    """Two chunks of four tokens, the last of which is padding."""
    arguments = inputs(layer, T=7)
    tensors = {name: x[:1, :1].clone().requires_grad_() for name, x in tensors_of(arguments).items()}

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(**arguments | dict(zip(tensors, values)), chunk=4)

    assert torch.autograd.gradcheck(run, list(tensors.values()))


def every_layer_with_decay(test: Any) -> Any:
    return pytest.mark.parametrize("layer", [name for name in LAYERS if LAYERS[name][0] != "none"])(test)


@pytest.mark.parametrize("g", [-50.0, -1e4, -math.inf])
@every_layer_with_decay
def test_strong_decay_gives_no_nan(layer: str, g: float) -> None:
    """Single precision; exp(-G) of a chunk of such decays overflows in any."""
    arguments = inputs(layer, T=40, dtype=torch.float32)
    for where in (slice(7, None, 10), slice(None)):  # a few tokens, whose decay must not blur the others'; all tokens
        arguments["g"][:, :, where] = g
        chunks, steps = with_gradients(chunked, arguments), with_gradients(step_by_step, arguments)
        assert all(x.isfinite().all() for x in chunks)
        torch.testing.assert_close(chunks, steps, rtol=2e-4, atol=2e-4)  # sums to -300 have steps of 3e-5


@every_form
@every_layer
def test_single_precision(layer: str, form: Any) -> None:
    """Sums of 100 terms of order 1 are right to about 100 times the precision, 1e-5."""
    arguments = inputs(layer, T=100)
    single = {name: x.float() for name, x in tensors_of(arguments).items()}
    expected = form(**arguments | {name: x.double() for name, x in single.items()})
    results = form(**arguments | single)
    assert [x.dtype for x in results] == [torch.float32, torch.float32]
    torch.testing.assert_close([x.double() for x in results], list(expected), rtol=1e-4, atol=1e-4)


@every_form
@every_layer
def test_half_precision_computes_in_single(layer: str, form: Any) -> None:
    arguments = inputs(layer, T=40, dtype=torch.float32)
    expected = form(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        results = form(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
    half = {name: x.bfloat16() for name, x in tensors_of(arguments).items()}
    output, state = form(**arguments | half)
    expected = form(**arguments | {name: x.float() for name, x in half.items()})
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected[0].bfloat16())
    assert state.dtype == torch.float32 and torch.equal(state, expected[1])


@pytest.mark.parametrize("layer", ["gated linear attention", "gated deltanet"])
def test_export(layer: str) -> None:
    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return chunked(q, k, v, g, b, LAYERS[layer][1])

    tensors = tensors_of(inputs(layer, T=40, state=False))
    exported = torch.export.export(Layer(), (), tensors).module()
    torch.testing.assert_close(exported(**tensors), Layer()(**tensors))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_layer
def test_cuda(layer: str) -> None:
    arguments = inputs(layer, T=100)
    expected = with_gradients(chunked, arguments)
    results = with_gradients(chunked, arguments | {name: x.cuda() for name, x in tensors_of(arguments).items()})
    torch.testing.assert_close([x.cpu() for x in results], expected, rtol=1e-10, atol=1e-10)
