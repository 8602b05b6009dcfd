"""Randomised positions. Oracle: the formula of the encoding within, at the positions that were drawn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import compose, group
from test_models import decoder, sentences
from test_positions import FORMULAS

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.generation.sampling import sample
from speechformer.layers.positions import POSITIONS, build_positions, query_and_key_indices

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "length": 12, "causal": True}


def randomised(encoding: Any, max_positions: int = 50) -> Any:
    spec = {"name": "randomised", "encoding": encoding, "max_positions": max_positions}
    return build_positions(spec, **SIZES)


def model_of(encoding: Any, **own: Any) -> Any:
    return decoder(model={"name": "randomised", "encoding": encoding, "max_positions": 60}, **own)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted({*POSITIONS} - {"nope", "forgetting"}))
def test_every_encoding_takes_the_positions_that_are_drawn(name: str, training: bool) -> None:
    positions = randomised(name).train(training)
    inner = positions.encoding
    inner.causal = True  # for formulas that depend on it
    for parameter in inner.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    positions.begin(12, torch.device("cpu"))
    drawn = inner.drawn.tolist()
    assert drawn == sorted(set(drawn)) and len(drawn) == 12 and drawn[0] >= 0 and drawn[-1] < 50
    x, q = torch.randn(1, 12, 16), torch.randn(1, 2, 12, 8)
    embedded, rotated = positions.embed(x), positions.rotate(q, q)[0]
    bias = positions.bias(*query_and_key_indices(12, 12))
    formulas = FORMULAS[name]
    for method, output in (("embed", embedded), ("rotate", rotated), ("bias", bias)):
        assert positions.overrides(method) == (method in formulas)
        for i, n in itertools.product(range(12), range(2)) if method in formulas else ():
            if method == "bias":
                values = [formulas[method](inner, n, drawn[i], drawn[j]) for j in range(i + 1)]
                assert output[n, i, : i + 1].tolist() == pytest.approx(values, abs=1e-5, rel=1e-5)
            else:
                own, result = (x[0, i], output[0, i]) if method == "embed" else (q[0, n, i], output[0, n, i])
                values = [formulas[method](inner, own.tolist(), drawn[i], d) for d in range(len(own))]
                assert result.tolist() == pytest.approx(values, abs=1e-5, rel=1e-5)


def test_each_position_is_as_likely_as_the_others() -> None:
    """Oracle: the binomial distribution; five standard deviations."""
    positions, counts, n = randomised("rope", 20), torch.zeros(20), 2000
    for _ in range(n):
        positions.begin(12, torch.device("cpu"))
        counts[positions.encoding.drawn] += 1
    assert ((counts - n * 0.6).abs() < 5 * (n * 0.6 * 0.4) ** 0.5).all()


@pytest.mark.parametrize("encoding", ["alibi", "relative", "rope", "learned"])
def test_training_draws_with_torchs_generator_and_evaluation_repeats(encoding: str) -> None:
    """What resuming to the bit relies on: a checkpoint has the state of that generator, and of no other."""
    model, ids = model_of(encoding, dropout=0.2).train(), sentences()
    state = torch.get_rng_state()
    first, second = model(ids), model(ids)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(model(ids), first)
    model.eval()
    state = torch.get_rng_state()
    evaluated = model(ids)
    assert torch.equal(torch.get_rng_state(), state)
    model.train()(ids)
    assert torch.equal(model.eval()(ids), evaluated)


@pytest.mark.parametrize("encoding", ["alibi", "rope", {"name": "rope", "base": 500.0}, "learned"])
def test_a_cache_changes_nothing(encoding: Any) -> None:
    """Oracle: reading the whole text for each word, beyond the 20 tokens of training."""
    for model in (model_of(encoding), by_layer_of(encoding)):
        texts = [
            list(itertools.islice(sample(model, [3, 7], cache=cache, generator=torch.Generator().manual_seed(1)), 25))
            for cache in (True, False)
        ]
        assert texts[0] == texts[1] and len(texts[0]) == 25


def by_layer_of(encoding: Any) -> Any:
    entry = {"name": "randomised", "encoding": "rope" if encoding == "learned" else encoding, "max_positions": 60}
    return decoder(model={"name": "by_layer", "layers": [entry, "nope"]}, layers=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.encoding=nope", "model.encoding=nope has no positions of its own"),
        ("model.encoding=by_layer", "model.encoding must be a choice of model, such as rope, not 'by_layer'"),
        ("model.encoding=ropes", "model.name has no choice 'ropes'.*Did you mean rope"),
        ("model.encoding=[rope]", "model.encoding must be a choice of model, such as rope, not"),
        ("model.encoding={name:rope,base:big}", "model.encoding.base must be a number"),
        ("model.encoding={base:3}", "model.encoding must be a choice of model"),
        ("model.max_positions=12", "model.max_positions must be at least the 20 positions of training, not 12"),
    ],
)
def test_an_invalid_option_is_an_error(overrides: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder(model=as_plain(compose("model=randomised", *overrides.split()))["model"])


def test_a_text_longer_than_all_positions_is_an_error() -> None:
    with pytest.raises(UserError, match="model.max_positions=60 is less than the 61 tokens"):
        model_of("rope")(torch.ones(1, 61, dtype=torch.long))
    assert model_of("rope").max_length == 60 and group("model", "randomised")["max_positions"] == 2048
