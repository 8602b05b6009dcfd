"""Oracles: a batch of two sentences by hand, and torch's own permutation of queries, keys and values."""

from __future__ import annotations

import torch

from speechformer.kernels.padding import unpadder_for, without_padding

TOKEN_MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_unpad_and_pad_are_inverse() -> None:
    tokens = unpadder_for(TOKEN_MASK)
    assert tokens is not None and tokens.index_R.tolist() == [0, 1, 3]
    x = torch.arange(12.0).view(2, 3, 2)
    assert tokens.unpad(x).tolist() == [[0, 1], [2, 3], [6, 7]]
    assert tokens.pad(tokens.unpad(x)).tolist() == [[[0, 1], [2, 3], [0, 0]], [[6, 7], [0, 0], [0, 0]]]


def test_batches_without_padding_or_of_padding_alone_stay_as_they_are() -> None:
    ones = torch.ones(2, 3, dtype=torch.bool)
    assert unpadder_for(ones) is unpadder_for(~ones) is None
    assert without_padding(0, 3).head_rows(2).to_heads.shape == (0,)


def test_head_rows_are_a_permutation() -> None:
    """Oracle: torch's view, permutation and padding with zeros."""
    B, T, N, H = 2, 3, 2, 4
    for tokens in (unpadder_for(TOKEN_MASK), without_padding(B, T)):
        assert tokens is not None
        qkv_RE = torch.randn(len(tokens.index_R), 3 * N * H)
        rows = tokens.head_rows(N)
        heads = qkv_RE.view(-1, H).index_select(0, rows.to_heads)
        oracle = tokens.pad(qkv_RE).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
        is_token = tokens.pad(torch.ones(len(qkv_RE), 1)).view(B, 1, T, 1) == 1
        expected = torch.where(is_token, oracle, qkv_RE[0, :H])  # padding takes the first row
        assert torch.equal(heads.view_as(oracle), expected)
        assert torch.equal(heads.index_select(0, rows.to_tokens).view_as(qkv_RE), qkv_RE)
        q_RD = qkv_RE[:, : N * H]
        assert torch.equal(oracle[0].reshape(-1, H).index_select(0, rows.output).view_as(q_RD), q_RD)
        assert torch.equal(rows.output_to_heads(q_RD.reshape(-1, H)).view(B, N, T, H), oracle[0])
