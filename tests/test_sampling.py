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

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5, -3.0])


def test_the_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(sampling_probabilities(LOGITS, 0.7, None, 1.0), (LOGITS / 0.7).softmax(-1))
    assert sampling_probabilities(LOGITS, 0, 3, 0.5).tolist() == [0, 1, 0, 0, 0, 0]
    torch.testing.assert_close(sampling_probabilities(LOGITS, 1e-30, None, 1.0), torch.tensor([0, 1.0, 0, 0, 0, 0]))


@pytest.mark.parametrize("temperature", [1e-310, 1e300])
def test_any_temperature_that_is_a_number_will_do(temperature: float) -> None:
    """Towards 0 the most probable alone, towards infinity all alike."""
    expected = sampling_probabilities(LOGITS, 0, None, 1.0) if temperature < 1 else torch.full((6,), 1 / 6)
    torch.testing.assert_close(sampling_probabilities(LOGITS, temperature, None, 1.0), expected)


def test_top_p_applies_to_the_words_that_top_k_keeps() -> None:
    """Of two words with 55 and 45 % of what is left, the first has half of it alone; of all words it has a third."""
    logits = torch.tensor([2.0, 1.8, 1.6, 0.1])
    assert sampling_probabilities(logits, 1.0, 2, 0.5).nonzero().flatten().tolist() == [0]
    assert sampling_probabilities(logits, 1.0, None, 0.5).nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("k", [1, 3, 6, 100])
def test_top_k_keeps_the_k_most_probable(k: int) -> None:
    best = LOGITS.argsort(descending=True)[:k]
    expected = torch.zeros(6).scatter(0, best, LOGITS[best].softmax(-1))
    torch.testing.assert_close(sampling_probabilities(LOGITS, 1.0, k, 1.0), expected)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.55, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_suffice(p: float) -> None:
    """Oracle: of all sets of words the smallest whose probability is at least p, and of these the most probable."""
    probabilities = LOGITS.double().softmax(-1)
    sets = [set(chosen) for size in range(1, 7) for chosen in itertools.combinations(range(6), size)]
    enough = [s for s in sets if sum(probabilities[list(s)]) >= p]
    fewest = min(len(s) for s in enough)
    best = max((s for s in enough if len(s) == fewest), key=lambda s: float(sum(probabilities[list(s)])))
    sampled = sampling_probabilities(LOGITS.double(), 1.0, None, p)
    assert set(sampled.nonzero().flatten().tolist()) == best
    torch.testing.assert_close(sampled[list(best)], probabilities[list(best)] / probabilities[list(best)].sum())


def test_words_are_drawn_as_often_as_they_are_probable() -> None:
    """Oracle: the model's own probabilities of the next word; a count of n draws is within 5 standard deviations."""
    model = decoder()
    generator = torch.Generator().manual_seed(0)
    n = 3000
    draws = [next(sample(model, [3, 4], generator=generator)) for _ in range(n)]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4]]))[0, -1]
    logits[0] = float("-inf")
    probabilities = logits.softmax(-1)
    counts = torch.bincount(torch.tensor(draws), minlength=len(logits))
    assert counts[0] == 0
    assert ((counts - n * probabilities).abs() <= 5 * (n * probabilities * (1 - probabilities)).sqrt() + 1e-9).all()


@pytest.mark.parametrize(("model", "pattern"), [*itertools.product(MODELS, PATTERNS), ("rnn", "full")])
def test_with_a_cache_the_same_is_drawn_as_without(model: str, pattern: str) -> None:
    """Beyond the trained length too, where the positions reach."""
    model = decoder(model=group("model", model), pattern=group("pattern", pattern), dropout=0.3)  # which is off
    length = 8 if model.max_length else 20
    texts = [
        list(
            itertools.islice(
                sample(model, [3, 7, 5], cache=cache, generator=torch.Generator().manual_seed(1)), length
            )
        )
        for cache in (True, False)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == length


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_with_a_cache_a_scaled_text_is_read_as_without(scaling: str) -> None:
    """Oracle: one pass over each prefix, through the length at which all keys turn."""
    model = decoder(model={**group("model", "rope"), "scaling": scaling})
    ids, past = torch.randint(0, 40, (2, 26)), model.decoder.new_cache()
    assert model.decoder.positions.length == 20
    for begin, end in ((0, 3), (3, 4), (4, 20), (20, 21), (21, 26)):
        cached = model.hidden(ids[:, begin:end], past)
        torch.testing.assert_close(cached, model.hidden(ids[:, :end])[:, begin:end])


def test_padding_and_rows_that_are_no_words_are_never_drawn() -> None:
    model = decoder()
    model.output.bias.data[:3] += 100
    model.output.bias.data[40:] += 100
    model.output.bias.data[1:3] -= 200
    drawn = list(itertools.islice(sample(model, [5], words=40, generator=torch.Generator().manual_seed(0)), 9))
    assert all(3 <= index < 40 for index in drawn)


def test_a_model_that_has_diverged_knows_no_next_word() -> None:
    model = decoder()
    model.output.bias.data[7] = float("nan")
    with pytest.raises(UserError, match="The model has diverged: logits are NaN"):
        next(sample(model, [5]))


@pytest.mark.parametrize("model", ["alibi", "rope", "sinusoidal", "xpos", "fire", "forgetting"])
@pytest.mark.parametrize(
    "pattern",
    ["window", "block", "dilated", "global", "sinks", "strided", {"name": "sinks", "window": 1, "tokens": 2}],
    ids=str,
)
def test_the_cache_holds_what_later_tokens_can_see(model: str, pattern: Any) -> None:
    """Oracles: one pass over all tokens, and the pattern's own mask of a later query."""
    own = group("pattern", pattern) if isinstance(pattern, str) else pattern
    lm = decoder(model=group("model", model), pattern=own).double()
    ids, past, mask = torch.randint(1, 40, (2, 60)), lm.decoder.new_cache(), build_pattern(own)
    expected = lm.hidden(ids)
    for begin, end in itertools.pairwise((0, 2, 3, 20, 21, 22, 40, *range(41, 61))):
        torch.testing.assert_close(lm.hidden(ids[:, begin:end], past), expected[:, begin:end])
        later = torch.arange(end, end + 200)[:, None]
        visible = mask(later, torch.arange(end)[None, :]).any(dim=0)
        if model != "forgetting" and isinstance(mask, Structured) and mask.window is not None:
            expected_keys = (torch.arange(end) < mask.tokens) | (torch.arange(end) > end - mask.window)
            assert past[0]["k"].shape[2] == expected_keys.sum() and not (visible & ~expected_keys).any()
            has_gaps = own["name"] in ("dilated", "block")  # and hides some keys of its window
            assert has_gaps or torch.equal(visible, expected_keys)
        else:
            assert past[0]["k"].shape[2] == end
    one = select(past, torch.tensor([1]))  # as a beam search does
    following = torch.cat((ids[1:], ids[1:, :1]), dim=1)
    torch.testing.assert_close(lm.hidden(ids[1:, :1], one)[:, -1], lm.hidden(following)[:, -1])


def test_a_long_stream_takes_constant_memory() -> None:
    """Neither the cache nor the table of angles grows."""
    lm, sizes = decoder(model=group("model", "rope"), pattern=group("pattern", "sinks")), []
    past = lm.decoder.new_cache()
    with torch.no_grad():
        for _ in range(600):
            lm.hidden(torch.tensor([[3]]), past)
            sizes.append(sum(x.numel() for layer in past for x in layer.values()))
    assert len({*sizes[100:]}) == 1 and lm.decoder.positions.table_TR.shape[0] == 20
