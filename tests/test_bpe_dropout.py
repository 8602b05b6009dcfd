"""BPE-dropout: the segmentations of `tokenizers`, as often, but the same again with the same seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_data_pairs import make

from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.subwords import BPEDropout, Subwords
from speechformer.data.pairs import PairData
from speechformer.errors import UserError

TEXTS = ["the lower towers lower the flowers", "newer flowers, slower newest towers", "l'été où ça ira — 100 %"] * 5


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.fit(TEXTS, "bpe", 40)


def test_without_dropout_it_segments_as_the_library(subwords: Subwords) -> None:
    """And with dropout, any segmentation decodes to the text."""
    plain, generator = BPEDropout(subwords, 0.0), random.Random(0)
    for text in (*TEXTS, "", "  two  spaces ", "new ☃ bytes"):
        assert plain.encode(text, generator) == subwords.encode(text)
        assert subwords.decode(BPEDropout(subwords, 0.5).encode(text, generator)) == text


def probabilities(dropout: BPEDropout, symbols: tuple[str, ...], rate: float) -> dict[tuple[str, ...], float]:
    """Return the probability of each segmentation: the k-th best merge is applied with rate^k (1 - rate)."""
    possible = [(dropout.ranks.get(pair), place) for place, pair in enumerate(itertools.pairwise(symbols))]
    ordered = sorted((rank, place) for rank, place in possible if rank is not None)
    chances = Counter({symbols: rate ** len(ordered)})
    for k, (_, place) in enumerate(ordered):
        merged = (*symbols[:place], symbols[place] + symbols[place + 1], *symbols[place + 2 :])
        for segmentation, probability in probabilities(dropout, merged, rate).items():
            chances[segmentation] += rate**k * (1 - rate) * probability
    return chances


def test_segmentations_are_as_frequent_as_the_paper_says(subwords: Subwords) -> None:
    """Oracle: the exact probabilities of its algorithm. (`tokenizers` leaves out fewer merges than that.)"""
    rate = 0.3
    dropout, generator = BPEDropout(subwords, rate), random.Random(0)
    (word,) = (word for word, _ in dropout.split(" flowers"))
    exact = probabilities(dropout, tuple(word), rate)
    assert sum(exact.values()) == pytest.approx(1)
    draws = Counter(tuple(dropout.symbols(word, generator)) for _ in range(4000))
    assert set(draws) <= set(exact)
    common = {kind: 4000 * probability for kind, probability in exact.items() if 4000 * probability >= 5}
    assert len(common) > 3
    for kind, expected in common.items():
        assert draws[kind] == pytest.approx(expected, abs=4 * expected**0.5), kind


def test_a_pair_changes_with_the_epoch_and_comes_again_with_the_seed(little_pairs: Path) -> None:
    data, again, other = (make(little_pairs, task={"bpe_dropout": 0.3}, seed=seed) for seed in (3, 3, 4))
    plain = make(little_pairs, seed=3)

    def epochs(data: PairData, *numbers: int) -> list[list[list[int]]]:
        batches, rows = data.train_dataloader(), []
        for number in numbers:
            batches.set_epoch(number)
            rows.append([row for batch in batches for row in batch["target"].tolist()])
        return rows

    first, second = epochs(data, 0, 1)
    assert epochs(again, 1, 0) == [second, first] != epochs(other, 1, 0)
    usual = epochs(plain, 0)[0]
    texts = [sorted(data.tokenizer.decode(row[1:]) for row in rows) for rows in (first, second, usual)]
    assert texts[0] == texts[1] == texts[2]
    assert sorted(first) != sorted(second) and sorted(first) != sorted(usual)
    for split in ("validation", "test"):  # are segmented as usual
        both = zip(data.held_out[split], plain.held_out[split])
        assert all(torch.equal(a, b) for pair, other in both for a, b in zip(pair, other))


def test_devices_weigh_by_the_tokens_that_they_read(little_pairs: Path) -> None:
    """Oracle: the counts of predicted tokens of the two parts of a batch."""
    task = {"bpe_dropout": 0.3}
    loaders = [make(little_pairs, task=task).train_dataloader() for _ in range(2)]
    loaders[0].shard, loaders[1].shard = (0, 2), (1, 2)
    parts = [list(loader) for loader in loaders]
    for pair in zip(*parts):
        tokens = [int((batch["target"][:, 1:] != PAD).sum()) for batch in pair]
        assert [batch["weight"] for batch in pair] == pytest.approx([2 * n / sum(tokens) for n in tokens])


def test_a_pair_that_becomes_too_long_is_segmented_as_usual(little_pairs: Path) -> None:
    plain = make(little_pairs)
    longest = max(max(len(a), len(b) - 1) for a, b in plain.train)
    data = make(little_pairs, task={"bpe_dropout": 0.9}, block_size=longest)
    usual = 0
    for index, (source, target) in enumerate(data.train):
        own = data.resegment(0, index)
        assert max(len(own[0]), len(own[1]) - 1) <= longest
        usual += torch.equal(own[0], source) and torch.equal(own[1], target)
    assert 0 < usual < len(data.train)


def test_words_are_not_merged(little_pairs: Path) -> None:
    with pytest.raises(UserError, match=r"task.bpe_dropout needs task.tokens=bpe: words are not merged\."):
        make(little_pairs, task={"bpe_dropout": 0.1, "tokens": "words"})
