"""Oracles: the definitions of top-k and top-p, counts of what is drawn, and sampling without a cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from test_models import decoder

from speechformer.errors import UserError
from speechformer.generation.sampling import sample, sampling_probabilities
from speechformer.layers.patterns import Structured, build_pattern
from speechformer.models.stack import select

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5, -3.0], dtype=torch.float64)


def test_the_temperature_divides_the_logits() -> None:
    """Towards 0 the most probable alone, towards infinity all alike."""
    most_probable = torch.nn.functional.one_hot(torch.tensor(1), 6).double()
    for temperature, expected in (
        (0.7, (LOGITS / 0.7).softmax(-1)),
        (0, most_probable),
        (1e-310, most_probable),
        (1e300, torch.full((6,), 1 / 6).double()),
    ):
        torch.testing.assert_close(sampling_probabilities(LOGITS, temperature, None, 1.0), expected)


@pytest.mark.parametrize("k", [None, 1, 3, 100])
@pytest.mark.parametrize("p", [0.01, 0.3, 0.55, 0.9, 1.0])
def test_top_p_keeps_the_fewest_of_the_k_most_probable_that_suffice(k: int | None, p: float) -> None:
    """Oracle: of all sets of these words the smallest whose probability is at least p, and of these the greatest."""
    candidates = LOGITS.argsort(descending=True)[:k].tolist()
    probability = dict(zip(candidates, LOGITS[candidates].softmax(-1).tolist()))
    sets = [kept for size in range(1, 7) for kept in itertools.combinations(candidates, size)]
    totals = {kept: sum(probability[word] for word in kept) for kept in sets}
    best = list(
        min((kept for kept in sets if totals[kept] >= p - 1e-12), key=lambda kept: (len(kept), -totals[kept]))
    )
    expected = torch.zeros(6).double()
    expected[best] = LOGITS[best].softmax(-1)
    torch.testing.assert_close(sampling_probabilities(LOGITS, 1.0, k, p), expected)


def test_words_are_drawn_as_often_as_they_are_probable() -> None:
    """Oracle: the model's own probabilities of the next word; a count of n draws is within 5 standard deviations.
    Padding and rows of the table that are no words are never drawn."""
    model, generator, n = decoder(), torch.Generator().manual_seed(0), 2000
    draws = [next(sample(model, [3, 4], generator=generator, words=40)) for _ in range(n)]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4]]))[0, -1]
    logits[0] = logits[40:] = float("-inf")
    p = logits.softmax(-1)
    counts = torch.bincount(torch.tensor(draws), minlength=len(logits))
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


@torch.no_grad()
def draws_without_cache(model: Any, prompt: list[int], n: int) -> list[int]:
    """What `sample` draws with seed 1, by a model that reads the whole text for each word."""
    ids, generator = torch.tensor([prompt]), torch.Generator().manual_seed(1)
    for _ in range(n):
        logits = model(ids)[0, -1]
        logits[0] = float("-inf")
        ids = torch.cat((ids, torch.multinomial(logits.softmax(dim=0), 1, generator=generator)[None]), dim=1)
    return ids[0, len(prompt) :].tolist()


def draws(model: Any, prompt: list[int], n: int) -> list[int]:
    return list(itertools.islice(sample(model, prompt, generator=torch.Generator().manual_seed(1)), n))


@pytest.mark.parametrize("name", ["learned", "rope", "rnn"])
def test_with_a_cache_the_same_is_drawn_as_without(name: str) -> None:
    """Beyond the trained length of 20 too, where the positions reach; dropout is off."""
    model, n = decoder(model=group("model", name), dropout=0.3), 8 if name == "learned" else 20
    assert draws(model, [3, 7, 5], n) == draws_without_cache(model, [3, 7, 5], n)


def test_a_model_that_has_diverged_knows_no_next_word() -> None:
    model = decoder()
    model.output.bias.data[7] = float("nan")
    with pytest.raises(UserError, match="The model has diverged: logits are NaN"):
        next(sample(model, [5]))


SINKS = {"name": "sinks", "window": 1, "tokens": 2}


@pytest.mark.parametrize(
    ("position", "pattern"),
    [
        *((group("model", name), SINKS) for name in MODELS if name != "learned"),
        *(({"name": "rope"}, group("pattern", name)) for name in PATTERNS),
        *(({**group("model", "rope"), "scaling": name}, {"name": "full"}) for name in ("linear", "ntk", "yarn")),
    ],
    ids=lambda spec: "_".join(map(str, spec.values())),
)
def test_the_cache_holds_what_later_tokens_can_see(position: dict[str, Any], pattern: dict[str, Any]) -> None:
    """Oracles: one pass over each prefix (a scaled RoPE turns by its length); the pattern's mask of later queries."""
    model = decoder(model=position, pattern=pattern).double()
    ids, past, mask = torch.randint(1, 40, (2, 45)), model.decoder.new_cache(), build_pattern(pattern)
    for begin, end in itertools.pairwise((0, 2, 3, 4, 20, 21, 22, 40, 41, 42, 43, 44)):
        torch.testing.assert_close(model.hidden(ids[:, begin:end], past), model.hidden(ids[:, :end])[:, begin:end])
        keys, dropped = torch.arange(end), torch.zeros(end, dtype=torch.bool)
        if position["name"] != "forgetting" and isinstance(mask, Structured) and mask.window is not None:
            dropped = (keys >= mask.tokens) & (keys <= end - max(mask.window, 2))
        if "ids" not in past[0]:  # which a scaled RoPE caches
            assert past[0]["k"].shape[2] == (~dropped).sum()
        assert not mask(torch.arange(end, end + 200)[:, None], keys[None, :]).any(dim=0)[dropped].any()
    second_row = select(past, torch.tensor([1]))  # as a beam search does
    torch.testing.assert_close(model.hidden(ids[1:, 44:], second_row), model.hidden(ids[1:])[:, 44:])
