"""Reference dropout and fast dropout. Oracles: the binomial distribution, and one draw after another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_models import stack_arguments

from speechformer.kernels.dropout import FastDropout, draw_ahead, dropout_masks
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


def test_masks_drawn_together_are_those_drawn_one_by_one() -> None:
    """Bit for bit."""
    shapes = [(3, 5, 7), (3, 2, 5, 5), (1, 1), (4, 8)]
    torch.manual_seed(5)
    together = dropout_masks(shapes, 0.3, torch.float64)
    torch.manual_seed(5)
    for mask, shape in zip(together, shapes):
        assert torch.equal(mask, dropout_masks([shape], 0.3, torch.float64)[0])


def test_masks_drawn_ahead_without_padding_are_those_of_the_tokens() -> None:
    unpadder = unpadder_for(2, 3, torch.tensor([[True, True, False], [True, False, False]]))
    dropout, weights, x = FastDropout(0.4), torch.randn(2, 2, 3, 3), torch.randn(2, 3, 4)
    torch.manual_seed(1)
    expected = dropout(weights), dropout(x), dropout(x)
    torch.manual_seed(1)
    draw_ahead([(dropout, weights.shape), (dropout, x.shape), (dropout, x.shape)], x.dtype, unpadder)
    assert torch.equal(dropout(weights), expected[0])
    assert torch.equal(dropout(unpadder.unpad(x)), unpadder.unpad(expected[1]))
    assert torch.equal(
        dropout(unpadder.unpad(x).bfloat16()),
        unpadder.unpad(x).bfloat16() * (expected[2] / x)[torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])].bfloat16(),
    )


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
    assert not any(module.ahead for module in stack.modules() if isinstance(module, FastDropout))
