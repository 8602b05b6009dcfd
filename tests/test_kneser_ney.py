"""Oracles: nltk.lm for Kneser-Ney, sums to one, the probabilities of single words."""

from __future__ import annotations

import random

import pytest
import torch
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

from speechformer.models.kneser_ney import KneserNey, Unigram


def stream(n: int, words: int, seed: int) -> list[int]:
    """Ids from 1 to `words` in which each depends on the one before."""
    draw = random.Random(seed)
    ids = [1]
    while len(ids) < n:
        ids.append(1 + (ids[-1] * 3 + draw.choice((0, 0, 0, 1, 2, 5))) % words)
    return ids


@pytest.mark.parametrize("order", [2, 3, 4])
def test_kneser_ney_is_that_of_nltk(order: int) -> None:
    """nltk does not mix 1 / vocabulary under the single words, so their discount is 0 here; and it counts followers
    of the text's first words, which nothing precedes, so those come again at its end."""
    ids, words, discount = stream(400, 12, 0), 12, 0.75
    ids += ids[:order]
    oracle = KneserNeyInterpolated(order, discount=discount)
    text = [str(index) for index in ids]
    oracle.fit([list(everygrams(text, max_len=order))], vocabulary_text=text)
    model = KneserNey(ids, order, words, [0.0] + [discount] * (order - 1))
    for k in range(order, 80):
        context = tuple(ids[k - order + 1 : k])
        for word in (ids[k], 1 + (ids[k] + 4) % words):
            expected = oracle.score(str(word), [str(index) for index in context])
            assert model.probability(word, context) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("context", [(), (3,), (3, 4), (99, 4), (4, 99), (99, 99, 99)])
@pytest.mark.parametrize("model", [KneserNey(stream(300, 20, 1), 3, 30), Unigram(stream(300, 20, 1), 30)])
def test_every_distribution_sums_to_one(model: KneserNey, context: tuple[int, ...]) -> None:
    probabilities = [model.probability(word, context) for word in range(1, 31)]
    assert sum(probabilities) == pytest.approx(1)
    assert min(probabilities) > 0  # a word outside the training set is possible


def test_discounts_are_estimated_from_singles_and_doubles() -> None:
    """a a b c c d: once b, d; twice a, c, so D = 2 / (2 + 2 * 2)."""
    assert KneserNey([1, 1, 2, 3, 3, 4], 1, 5).discounts == [pytest.approx(1 / 3)]


def test_the_perplexity_of_known_words_by_hand() -> None:
    """Oracle: add-one smoothed counts. Train is 2 2 3, of the words 1 (unknown), 2 and 3, so p = 1/6, 3/6, 2/6."""
    model = Unigram([2, 2, 3], 3)
    expected = 36 ** (1 / 3), 6**0.5  # of 1, 2, 3 after the first token; of 2 and 3
    assert model.perplexities([2, 1, 2, 3]) == pytest.approx(expected)
    assert model.perplexities([2, 1, 1]) == (pytest.approx(6), None)


def test_the_more_context_the_better_on_text_that_has_it() -> None:
    train, test = stream(5000, 20, 2), stream(1000, 20, 3)
    figures = [model.perplexities(test)[0] for model in (Unigram(train, 20), KneserNey(train, 2, 20))]
    assert figures[1] < figures[0] <= 20.5
    # the source: three choices at 3/6 1/6 1/6 1/6 have an entropy of 1.79 bits
    assert figures[1] == pytest.approx(2**1.7925, rel=0.03)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_distributions_are_the_probabilities_of_every_word(order: int) -> None:
    """Oracle: `probability`, word by word, after known and unknown histories."""
    ids = stream(400, 20, 1)
    model = KneserNey(ids, order, 22)
    contexts = [(), (3,), *model.contexts(ids)[50:60], (99, 4), (4, 99), (21, 22, 3, 4)]
    expected = [[0.0, *(model.probability(word, context) for word in range(1, 23))] for context in contexts]
    torch.testing.assert_close(model.distributions(contexts), torch.tensor(expected))
