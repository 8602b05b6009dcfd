"""The reference attention. Oracles: torch's scaled_dot_product_attention, and sums that must be 1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PATTERNS, group
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_torchs_attention(model: str, pattern: str, causal: bool) -> None:
    _, bias = positions_and_bias(model, pattern, causal)
    q, k, v = torch.randn(3, 2, 2, T, 8)
    output, weights = attention_reference(q, k, v, bias)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, T))
    assert (weights[bias.expand_as(weights) == -math.inf] == 0).all()
    assert (weights[1, :, : T - 5, T - 5 :] == 0).all()  # no token attends to padding


def copy_to_torch(theirs: nn.MultiheadAttention, weight: nn.Parameter, bias: nn.Parameter, output: nn.Linear) -> None:
    theirs.load_state_dict(
        {
            "in_proj_weight": weight,
            "in_proj_bias": bias,
            **{f"out_proj.{k}": v for k, v in output.state_dict().items()},
        }
    )


def test_self_attention_is_torchs_multi_head_attention() -> None:
    positions, bias = positions_and_bias("nope", "window", causal=True)
    ours = SelfAttention(16, 2, Dropout(0.0), qkv_bias=True, bias=True)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    copy_to_torch(theirs, ours.qkv.weight, ours.qkv.bias, ours.output)
    x = torch.randn(2, T, 16)
    output, weights = ours(x, positions, bias)
    mask = bias.expand(2, 2, T, T).flatten(0, 1)
    expected, expected_weights = theirs(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_cross_attention_is_torchs_multi_head_attention() -> None:
    ours = CrossAttention(16, 2, Dropout(0.0), qkv_bias=True, bias=True)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    weight, bias = (torch.cat((getattr(ours.q, name), getattr(ours.kv, name))) for name in ("weight", "bias"))
    copy_to_torch(theirs, weight, bias, ours.output)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, T, 16)
    padding = torch.arange(T) >= torch.tensor([[T], [T - 5]])
    output, _ = ours(x, *ours.keys_and_values(memory), torch.where(padding, -math.inf, 0.0)[:, None, None])
    torch.testing.assert_close(output, theirs(x, memory, memory, key_padding_mask=padding)[0])


def test_dropout_of_the_weights_is_active_in_training_only() -> None:
    positions, bias = positions_and_bias("nope", "full", causal=True)
    attention = SelfAttention(16, 2, Dropout(0.5), qkv_bias=True, bias=True)
    x = torch.randn(2, T, 16)
    assert not torch.equal(attention(x, positions, bias)[0], attention(x, positions, bias)[0])
    attention.eval()
    assert torch.equal(attention(x, positions, bias)[0], attention(x, positions, bias)[0])
