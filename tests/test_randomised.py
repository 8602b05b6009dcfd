"""Randomised positions. Oracle: the encoding within, at the positions that were drawn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import compose
from test_models import decoder, sentences
from test_sampling import draws, draws_without_cache

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.layers.positions import POSITIONS, build_positions

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "length": 12, "causal": True}


def randomised(encoding: Any, max_positions: int = 50) -> Any:
    spec = {"name": "randomised", "encoding": encoding, "max_positions": max_positions}
    return build_positions(spec, **SIZES)


def model_of(encoding: Any, **own: Any) -> Any:
    return decoder(model={"name": "randomised", "encoding": encoding, "max_positions": 60}, **own)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted({*POSITIONS} - {"nope", "forgetting"}))
def test_every_encoding_takes_the_positions_that_are_drawn(name: str, training: bool) -> None:
    """Oracle: the encoding of all 50 positions, of which the sample is taken."""
    positions = randomised(name).train(training)
    plain = copy.deepcopy(positions.encoding)
    drawn, whole = positions.prepare(12), plain.prepare(50)
    assert drawn.tolist() == sorted({*drawn.tolist()}) and len(drawn) == 12 and drawn[0] >= 0 and drawn[-1] < 50
    assert all(positions.overrides(place) == plain.overrides(place) for place in ("embed", "rotate", "bias"))
    x, q = torch.randn(1, 50, 16), torch.randn(1, 2, 50, 8)
    torch.testing.assert_close(positions.embed(x[:, drawn], drawn), plain.embed(x, whole)[:, drawn])
    for ours, of_all in zip(positions.rotate(q[:, :, drawn], q[:, :, drawn], drawn), plain.rotate(q, q, whole)):
        torch.testing.assert_close(ours, of_all[:, :, drawn])
    if plain.overrides("bias"):
        of_all = plain.bias(whole[:, None], whole[None, :])[:, drawn][:, :, drawn]
        torch.testing.assert_close(positions.bias(drawn[:, None], drawn[None, :]), of_all)


def test_each_position_is_as_likely_as_the_others() -> None:
    """Oracle: the binomial distribution; five standard deviations."""
    positions, counts, n = randomised("rope", 20), torch.zeros(20), 2000
    for _ in range(n):
        counts[positions.prepare(12)] += 1
    assert ((counts - n * 0.6).abs() < 5 * (n * 0.6 * 0.4) ** 0.5).all()


@pytest.mark.parametrize("encoding", ["alibi", "rope", "learned"])
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


@pytest.mark.parametrize("encoding", ["alibi", "learned", {"name": "rope", "base": 500.0}])
def test_a_cache_changes_nothing(encoding: Any) -> None:
    """Oracle: reading the whole text for each word, beyond the 20 tokens of training."""
    models = [model_of(encoding)]
    if encoding != "learned":  # which is no encoding of a layer
        entry = {"name": "randomised", "encoding": encoding, "max_positions": 60}
        models.append(decoder(model={"name": "by_layer", "layers": [entry, "nope"]}))
    for model in models:
        assert draws(model, [3, 7], 25) == draws_without_cache(model, [3, 7], 25)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.encoding=nope", "model.encoding=nope has no positions of its own"),
        ("model.encoding=by_layer", "model.encoding must be a choice of model, such as rope, not 'by_layer'"),
        ("model.encoding=ropes", "model.name has no choice 'ropes'.*Did you mean rope"),
        ("model.encoding={name:rope,base:big}", "model.base must be a number"),
        ("model.max_positions=12", "model.max_positions must be at least the 20 positions of training, not 12"),
    ],
)
def test_an_invalid_option_is_an_error(overrides: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder(model=as_plain(compose("model=randomised", *overrides.split()))["model"])


def test_a_text_longer_than_all_positions_is_an_error() -> None:
    with pytest.raises(UserError, match="model.max_positions=60 is less than the 61 tokens"):
        model_of("rope")(torch.ones(1, 61, dtype=torch.long))
    assert model_of("rope").max_length == 60
