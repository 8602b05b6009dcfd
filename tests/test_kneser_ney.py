"""Kneser-Ney models, and distillation from them.

Oracles: nltk.lm, sums to one, the probabilities of single words, models fitted by hand on all folds but one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

from speechformer.corpora.special_tokens import PAD
from speechformer.models import kneser_ney
from speechformer.models.kneser_ney import KneserNey, Unigram, contexts_of, estimate_discount
from speechformer.tasks.distillation import FOLDS, CrossFittedTargets


def stream(n: int, words: int, seed: int) -> list[int]:
    """Ids from 1 to `words` in which each depends on the one before."""
    draw = random.Random(seed)
    ids = [1]
    while len(ids) < n:
        ids.append(1 + (ids[-1] * 3 + draw.choice((0, 0, 0, 1, 2, 5))) % words)
    return ids


def probability(model: KneserNey, word: int, context: Sequence[int]) -> float:
    """p(word | context) of any length."""
    ids = contexts_of(torch.tensor([PAD, *context]), model.order)[-1]
    return float(model.probabilities(ids, torch.tensor([word])))


@pytest.mark.parametrize("order", [2, 4])
def test_kneser_ney_is_that_of_nltk(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """nltk does not mix 1 / vocabulary under the single words, so their discount is 0 here; and it counts followers
    of the text's first words, which nothing precedes, so those come again at its end."""
    ids, words, discount = stream(400, 12, 0), 12, 0.75
    ids += ids[:order]
    oracle = KneserNeyInterpolated(order, discount=discount)
    text = [str(index) for index in ids]
    oracle.fit([list(everygrams(text, max_len=order))], vocabulary_text=text)
    discounts = [0.0] + [discount] * (order - 1)  # the longest n-grams come first
    monkeypatch.setattr(kneser_ney, "estimate_discount", lambda counts_G: discounts.pop())
    model = KneserNey(torch.tensor(ids), order, words)
    for k in range(order, 80):
        context = tuple(ids[k - order + 1 : k])
        for word in (ids[k], 1 + (ids[k] + 4) % words):
            expected = oracle.score(str(word), [str(index) for index in context])
            assert probability(model, word, context) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("context", [(), (3,), (3, 4), (29, 4), (4, 29), (29, 29, 29)])
def test_every_distribution_sums_to_one(context: tuple[int, ...]) -> None:
    model = KneserNey(torch.tensor(stream(300, 20, 1)), 3, 30)
    probabilities = [probability(model, word, context) for word in range(1, 31)]
    assert sum(probabilities) == pytest.approx(1)
    assert min(probabilities) > 0  # a word outside the training set is possible


def test_discounts_are_estimated_from_singles_and_doubles() -> None:
    """a a b c c d: once b, d; twice a, c, so D = 2 / (2 + 2 * 2)."""
    assert estimate_discount(torch.tensor([2, 1, 2, 1])) == pytest.approx(1 / 3)
    assert estimate_discount(torch.tensor([2, 2])) == 0.5


def test_the_perplexity_of_known_words_by_hand() -> None:
    """Oracle: add-one smoothed counts. Train is 2 2 3, of the words 1 (unknown), 2 and 3, so p = 1/6, 3/6, 2/6."""
    model = Unigram(torch.tensor([2, 2, 3]), 3)
    assert model.p_V[1:].sum() == pytest.approx(1)
    expected = 36 ** (1 / 3), 6**0.5  # of 1, 2, 3 after the first token; of 2 and 3
    assert model.perplexities(torch.tensor([2, 1, 2, 3])) == pytest.approx(expected)
    assert model.perplexities(torch.tensor([2, 1, 1])) == (pytest.approx(6), None)


@pytest.mark.parametrize("order", [2, 5])
def test_distributions_are_the_probabilities_of_every_word(order: int) -> None:
    """Oracle: `probabilities`, word by word, after known and unknown histories."""
    ids = torch.tensor(stream(400, 20, 1))
    model = KneserNey(ids, order, 22)
    more = torch.tensor([0, 3, 22, 4, 4, 22, 21, 22, 3, 4])
    contexts = torch.cat((contexts_of(ids, order)[:60], contexts_of(more, order)))
    expected = [[probability(model, word, context) for word in range(23)] for context in contexts.tolist()]
    torch.testing.assert_close(model.distributions(contexts), torch.tensor(expected))


IDS = torch.tensor(stream(400, 12, 0))
V = 15


def test_a_target_is_shared_with_counts_of_the_other_folds() -> None:
    """The last two rows of the embedding table belong to no word."""
    targets, size = CrossFittedTargets(IDS, 3, V - 3, V, 0.7), len(IDS) // FOLDS
    places = torch.tensor([1, 2, size - 1, size, 5 * size + 3, len(IDS) - 1])
    q_RV = targets.distributions(places, IDS[places])
    for place, q_V in zip(places.tolist(), q_RV):
        start = place // size * size
        rest = torch.cat((IDS[:start], IDS[start + size :]))
        teacher, context = KneserNey(rest, 3, V - 3), tuple(IDS[max(0, place - 2) : place].tolist())
        expected = torch.tensor([0.0, *(0.7 * probability(teacher, word, context) for word in range(1, V - 2)), 0, 0])
        expected[IDS[place]] += 0.3
        torch.testing.assert_close(q_V, expected)


def test_the_loss_is_its_formula() -> None:
    """Oracle: - sum of q log p over the words, averaged over two windows of four targets."""
    torch.manual_seed(0)
    targets, start_B = CrossFittedTargets(IDS, 3, V - 1, V, 0.7), torch.tensor([10, 200])
    weight, bias, hidden = torch.randn(V, 6), torch.randn(V), torch.randn(8, 6)
    places = torch.tensor([11, 12, 13, 14, 201, 202, 203, 204])
    q_RV, log_p = targets.distributions(places, IDS[places]), (hidden @ weight.T + bias).log_softmax(dim=1)
    loss = targets.loss(weight, bias, hidden, start_B, IDS[places])
    torch.testing.assert_close(loss, -(q_RV * log_p).sum(dim=1).mean())
