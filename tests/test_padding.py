"""Oracles: a batch of two sentences by hand, and torch's own permutation of queries, keys and values."""

from __future__ import annotations

import torch

from speechformer.kernels.padding import unpadder_for
from speechformer.layers.attention import Places

TOKEN_MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_unpad_and_pad_are_inverse() -> None:
    tokens = unpadder_for(TOKEN_MASK, 2)
    assert tokens is not None and tokens.index_R.tolist() == [0, 1, 3]
    x = torch.arange(12.0).view(2, 3, 2)
    assert tokens.unpad(x).tolist() == [[0, 1], [2, 3], [6, 7]]
    assert tokens.pad(tokens.unpad(x)).tolist() == [[[0, 1], [2, 3], [0, 0]], [[6, 7], [0, 0], [0, 0]]]


def test_batches_without_padding_or_of_padding_alone_stay_as_they_are() -> None:
    ones = torch.ones(2, 3, dtype=torch.bool)
    assert unpadder_for(ones, 2) is unpadder_for(~ones, 2) is None


def test_heads_of_tokens_are_those_of_padded_sequences() -> None:
    """Oracle: torch's view and permutation of what is padded with zeros, and its gradients."""
    N, H = 2, 4
    tokens = unpadder_for(TOKEN_MASK, N)
    assert tokens is not None
    qkv_RE = torch.randn(3, 3 * N * H, requires_grad=True)
    heads, oracle = torch.stack(tokens.split(qkv_RE, N, N)), torch.stack(Places().split(tokens.pad(qkv_RE), N, N))
    expected = torch.where(TOKEN_MASK[:, None, :, None], oracle, qkv_RE[0, :H])  # padding takes the first row
    assert torch.equal(heads, expected)
    assert torch.equal(tokens.join(heads[0]), qkv_RE[:, : N * H])
    grad = torch.randn(3, N * H)
    ours = torch.autograd.grad(tokens.join(heads[0] * heads[1].detach()), qkv_RE, grad)[0]
    theirs = torch.autograd.grad(tokens.unpad(Places().join(oracle[0] * oracle[1].detach())), qkv_RE, grad)[0]
    assert torch.equal(ours, theirs)
