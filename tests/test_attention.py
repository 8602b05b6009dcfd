"""The reference attention. Oracles: torch's scaled_dot_product_attention, and sums that must be 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import group
from test_models import decoder, every_model_and_pattern
from torch import nn

from speechformer.errors import UserError
from speechformer.layers.attention import (
    Attention,
    CrossAttention,
    Layer,
    Pairs,
    SelfAttention,
    attention_reference,
)
from speechformer.layers.dropout import Dropout
from speechformer.layers.mechanisms import MECHANISMS
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import POSITIONS, Positions, Sizes, build_positions

T = 12


def pairs_of(model: str, pattern: Any, causal: bool = True, padded: bool = False, length: int = T) -> Pairs:
    """The second of two sequences, if padded, ends with five places of padding."""
    positions = build_positions(group("model", model), width=32, heads=2, length=length, causal=causal)
    spec = group("pattern", pattern) if isinstance(pattern, str) else pattern
    token_mask = torch.arange(length) < torch.tensor([[length], [length - 5]]) if padded else None
    return Pairs.of_text(positions, build_pattern(spec), causal, length, token_mask, None)


@pytest.mark.parametrize("causal", [True, False])
@every_model_and_pattern
def test_the_reference_is_torchs_attention(model: str, pattern: str, causal: bool) -> None:
    pairs = pairs_of(model, pattern, causal, padded=True)
    bias = pairs.bias(*pairs.all)
    q, k, v = torch.randn(3, 2, 2, T, 8)
    output, weights = attention_reference(q, k, v, bias)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, T))
    assert (weights[bias.expand_as(weights) == -math.inf] == 0).all()
    assert (weights[1, :, : T - 5, T - 5 :] == 0).all()  # no token attends to padding


@pytest.mark.parametrize("cross", [False, True])
def test_an_attention_layer_is_torchs_multi_head_attention(cross: bool) -> None:
    layer = Layer(Sizes(16, 2, T, False, 8), 0, Dropout(0.0), qkv_bias=True, bias=True)
    ours: Any = CrossAttention(16, 2, Dropout(0.0), True, True) if cross else SelfAttention(layer)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    projections = [ours.q, ours.kv] if cross else [ours.qkv]
    weights = {f"in_proj_{name}": torch.cat([getattr(x, name) for x in projections]) for name in ("weight", "bias")}
    theirs.load_state_dict(weights | {f"out_proj.{name}": x for name, x in ours.output.state_dict().items()})
    x = torch.randn(2, T, 16)
    memory = torch.randn(2, T, 16) if cross else x
    padding = torch.arange(T) >= torch.tensor([[T], [T - 5]])
    bias = torch.where(padding, -math.inf, 0.0)[:, None, None]
    attention = Attention(bias, pairs_of("nope", "full"))
    arguments = (*ours.keys_and_values(memory), attention) if cross else (attention,)
    expected = theirs(x, memory, memory, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(ours(x, *arguments), expected)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("bias", r"Wrong.bias returned the shape \[2, 12\]; it must return \[2, 12, 12\]"),
        ("rotate", r"Wrong.rotate returned the shape \[2, 2, 12\]; it must return \[2, 2, 12, 8\]"),
        ("embed", r"Wrong.embed returned the shape \[2, 12\]; it must return \[2, 12, 16\]"),
        ("gate", r"Wrong.gate returned the shape \[2, 12\]; it must return \[2, 12, 2\]"),
    ],
)
def test_an_encoding_of_a_wrong_shape_is_an_error(place: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "bias": lambda self, i, j: torch.zeros(2, j.shape[-1]),
        "rotate": lambda self, q, k, i: (q[..., 0], k),
        "embed": lambda self, x, i: x[..., 0],
        "gate": lambda self, z: z[..., 0],
    }
    monkeypatch.setitem(POSITIONS, "wrong", type("Wrong", (Positions,), {place: wrong[place]}))
    with pytest.raises(UserError, match=sentence):
        decoder(model={"name": "wrong"})(torch.ones(2, T, dtype=torch.long))


@pytest.mark.parametrize("method", ["score", "normalise"])
def test_a_mechanism_of_a_wrong_shape_is_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that torch could broadcast."""
    wrong = type("Wrong", (SelfAttention,), {method: lambda self, *x: getattr(SelfAttention, method)(self, *x)[:1]})
    monkeypatch.setitem(MECHANISMS, "wrong", wrong)
    sentence = rf"Wrong.{method} returned the shape \[1, 2, 12, 12\]; it must return \[2, 2, 12, 12\]"
    with pytest.raises(UserError, match=sentence):
        decoder(attention={"name": "wrong"})(torch.ones(2, T, dtype=torch.long))
