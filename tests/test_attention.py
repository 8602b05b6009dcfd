"""The reference attention. Oracles: torch's scaled_dot_product_attention, and sums that must be 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import group
from test_models import every_model_and_pattern
from torch import nn

from speechformer.layers.attention import (
    CrossAttention,
    SelfAttention,
    attention_bias,
    attention_mask,
    attention_reference,
)
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import Positions, build_positions

T = 12


def positions_and_bias(model: str, pattern: str, causal: bool) -> tuple[Positions, torch.Tensor]:
    """The second of two sequences ends with five places of padding."""
    positions = build_positions(group("model", model), width=16, heads=2, length=T, causal=causal)
    token_mask = torch.arange(T) < torch.tensor([[T], [T - 5]])
    mask = attention_mask(build_pattern(group("pattern", pattern)), T, T, causal, token_mask)
    return positions, attention_bias(positions, mask)


@pytest.mark.parametrize("causal", [True, False])
@every_model_and_pattern
def test_the_reference_is_torchs_attention(model: str, pattern: str, causal: bool) -> None:
    _, bias = positions_and_bias(model, pattern, causal)
    q, k, v = torch.randn(3, 2, 2, T, 8)
    output, weights = attention_reference(q, k, v, bias)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, T))
    assert (weights[bias.expand_as(weights) == -math.inf] == 0).all()
    assert (weights[1, :, : T - 5, T - 5 :] == 0).all()  # no token attends to padding


@pytest.mark.parametrize("cross", [False, True])
def test_an_attention_layer_is_torchs_multi_head_attention(cross: bool) -> None:
    ours: Any = (CrossAttention if cross else SelfAttention)(16, 2, Dropout(0.0), qkv_bias=True, bias=True)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    projections = [ours.q, ours.kv] if cross else [ours.qkv]
    weights = {f"in_proj_{name}": torch.cat([getattr(x, name) for x in projections]) for name in ("weight", "bias")}
    theirs.load_state_dict(weights | {f"out_proj.{name}": x for name, x in ours.output.state_dict().items()})
    x = torch.randn(2, T, 16)
    memory = torch.randn(2, T, 16) if cross else x
    padding = torch.arange(T) >= torch.tensor([[T], [T - 5]])
    bias = torch.where(padding, -math.inf, 0.0)[:, None, None]
    arguments = (
        (*ours.keys_and_values(memory), bias) if cross else (positions_and_bias("nope", "full", True)[0], bias)
    )
    expected = theirs(x, memory, memory, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(ours(x, *arguments, with_weights=True), expected)
