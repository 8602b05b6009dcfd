"""Reference dropout and fast dropout. Oracles: the binomial distribution, and the masks of padded sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_models import stack_arguments

from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.padding import unpadder_for
from speechformer.layers.dropout import Dropout
from speechformer.models.decoder import Decoder

both = pytest.mark.parametrize("kind", [Dropout, FastDropout])


@both
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_the_rate_and_keeps_the_mean(kind: type[Dropout], rate: float) -> None:
    """Oracle: the binomial's standard deviation, times five."""
    n = 400_001  # not a multiple of four
    x = torch.ones(n, requires_grad=True)
    y = kind(rate)(x)
    assert abs((y == 0).float().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - rate)))
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())  # the gradient passes where the value did, at the same scale


@both
def test_dropout_elements_are_independent(kind: type[Dropout]) -> None:
    """Oracle: the correlation of n independent pairs is within 5 / sqrt(n); four fast elements share one draw."""
    y = kind(0.5)(torch.ones(400_000)) - 1
    for lag in (1, 2, 3, 4):
        assert abs((y[:-lag] * y[lag:]).mean()) < 5 / math.sqrt(len(y))


@both
def test_dropout_is_the_identity_at_rate_zero_and_in_evaluation_and_repeats_with_the_seed(
    kind: type[Dropout],
) -> None:
    x = torch.randn(100)
    assert torch.equal(kind(0.0)(x), x) and torch.equal(kind(0.3).eval()(x), x)
    torch.manual_seed(3)
    first = kind(0.3)(x)
    torch.manual_seed(3)
    assert torch.equal(kind(0.3)(x), first)


def test_tokens_without_padding_have_the_masks_of_padded_sequences() -> None:
    """So a run draws what it does as a member of an ensemble."""
    dropout, x = FastDropout(0.4), torch.randn(2, 3, 4)
    torch.manual_seed(1)
    padded, after = dropout(x), torch.rand(1)
    dropout.unpadder = unpadder_for(torch.tensor([[True, True, False], [True, False, False]]), 2)
    torch.manual_seed(1)
    assert torch.equal(dropout(dropout.unpadder.unpad(x)), dropout.unpadder.unpad(padded))
    assert torch.equal(torch.rand(1), after)


def test_embeddings_have_a_rate_of_their_own() -> None:
    """Oracle: the shares of zeros after the embeddings and after the branches of the first block."""
    model = Decoder(**{**stack_arguments(), "dropout": 0.2}, embedding_dropout=0.7, tied_output=False)
    stack, zeros = model.decoder, {}

    def count(module: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        zeros[module] = float((output == 0).double().mean())

    for module in (stack.embedding_dropout, stack.blocks[0].dropout):  # type: ignore[union-attr,index]
        module.register_forward_hook(count)
    model(torch.randint(1, 20, (64, 8)))
    assert list(zeros.values()) == pytest.approx([0.7, 0.2], abs=0.05)
