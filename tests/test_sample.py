"""The sample corpus has the properties that its module documents."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import group

from speechformer.corpora import sample, sample_pairs
from speechformer.corpora.files import checksum
from speechformer.corpora.pairs import load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.corpora.tokenizer import split_words


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(group("corpus", "sample"))


def test_its_size_is_that_of_the_real_one_and_no_line_repeats(corpus: Corpus) -> None:
    assert len(corpus.classify_train) >= 2000 and len(corpus.classify_test) == 750
    assert len(corpus.lm_train) >= 1500
    assert {name: len(lines) for name, lines in corpus.lm_test.items()} == dict.fromkeys(sample.SPEAKERS, 250)
    texts = [text for _, text in corpus.classify_train + corpus.classify_test] + corpus.lm_train
    texts += [line for lines in corpus.lm_test.values() for line in lines]
    assert max(Counter(texts).values()) == 1  # so no test sentence appears in train
    assert set(Counter(label for label, _ in corpus.classify_test).values()) == {250}


@pytest.mark.parametrize(
    ("files", "digests"),
    [
        (sample.files, ("cfce7976dbd93124", "fdb24e1a15e75775", "3f9e28ede4b65a62")),
        (sample_pairs.files, ("27f0134b0c0ad9fe", "f909b5b5d0441fdb", "e5cb5a593480ba37")),
    ],
)
def test_a_seed_always_gives_the_same_bytes(files: Callable[[int], dict[str, bytes]], digests: tuple[str]) -> None:
    """Oracle: digests recorded when the word tables were Python code. They are part of the identity of every run."""
    assert tuple(checksum(files(seed))[:16] for seed in range(3)) == digests


def naive_bayes(corpus: Corpus, n: int) -> float:
    """Test accuracy of multinomial naive Bayes with add-one smoothing on bags of n-grams."""
    import math

    def grams(text: str) -> list[tuple[str, ...]]:
        words = ("^", *split_words(text), "$")
        return [words[k : k + m] for m in range(1, n + 1) for k in range(len(words) - m + 1)]

    counts: dict[int, Counter] = defaultdict(Counter)
    for label, text in corpus.classify_train:
        counts[label].update(grams(text))
    kinds = len(set().union(*counts.values()))
    totals = {label: sum(count.values()) + kinds for label, count in counts.items()}

    def guess(text: str) -> int:
        return max(
            counts,
            key=lambda label: sum(math.log((counts[label][g] + 1) / totals[label]) for g in grams(text)),
        )

    return sum(guess(text) == label for label, text in corpus.classify_test) / len(corpus.classify_test)


def test_a_bag_of_words_is_informative_but_not_sufficient(corpus: Corpus) -> None:
    """Word order is informative too: bigrams and trigrams capture a good part of it."""
    words, triples = naive_bayes(corpus, 1), naive_bayes(corpus, 3)
    assert 0.55 < words < 0.8
    assert words + 0.04 < triples < 0.95


def test_it_can_be_written_and_read_back(tmp_path: Path, corpus: Corpus) -> None:
    subprocess.run([sys.executable, "-m", "speechformer.corpora.sample", tmp_path / "own"], check=True)
    own = load_corpus({"name": "speeches", "root": str(tmp_path / "own"), "classes": corpus.classes})
    assert own.sha256 == corpus.sha256 and own.classify_train == corpus.classify_train
    pairs = load_pairs({**group("corpus", "ted"), "root": str(tmp_path / "own")})
    assert pairs.sha256 == load_pairs(group("corpus", "sample")).sha256
