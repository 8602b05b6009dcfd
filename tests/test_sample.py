"""The generated corpora: a seed always gives the same bytes, which the digests pin, and the French is correct."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_command
from conftest import group

from speechformer.corpora import digits, sample, sample_pairs
from speechformer.corpora.files import checksum, word_tables
from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus


@pytest.fixture(scope="module")
def sentences() -> Corpus:
    return load_corpus(group("corpus", "sample"))


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return load_pairs(group("corpus", "sample"))


@pytest.mark.parametrize(
    ("files", "digests"),
    [
        (sample.files, ("cfce7976dbd93124", "fdb24e1a15e75775")),
        (sample_pairs.files, ("27f0134b0c0ad9fe", "f909b5b5d0441fdb")),
        (lambda seed: digits.files(seed, 20), ("04e5ee6c0a76b603", "fecf21e0ee31a65e")),
    ],
)
def test_a_seed_always_gives_the_same_bytes(files: Callable[[int], dict[str, bytes]], digests: tuple[str]) -> None:
    """Oracle: digests recorded when the word tables were Python code. They are part of the identity of every run."""
    assert tuple(checksum(files(seed))[:16] for seed in range(2)) == digests


def test_it_can_be_written_and_read_back(tmp_path: Path, sentences: Corpus, pairs: Pairs) -> None:
    done = run_command("speechformer.corpora.sample", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    made = load_corpus({"name": "speeches", "root": str(tmp_path / "made"), "classes": sentences.classes})
    assert made.sha256 == sentences.sha256 and made.classify_train == sentences.classify_train
    assert load_pairs({**group("corpus", "ted"), "root": str(tmp_path / "made")}).sha256 == pairs.sha256


@pytest.mark.parametrize("word_order", [False, True])
def test_the_best_accuracy_is_that_of_counting_cues(word_order: bool) -> None:
    """Cues are found in the text of 12,000 sentences; the speaker who gave them most often is the answer."""
    tables, rng = word_tables("sample"), random.Random(1)

    def cues(text: str) -> tuple[object, ...]:
        lower = text.lower()
        topics = [k for k, name in enumerate(sample.SPEAKERS) for topic in tables["topics"][name] if topic in lower]
        phrase = [k for k, name in enumerate(sample.SPEAKERS) if text.startswith(tuple(tables["phrases"][name]))]
        adverbs = "|".join(tables["adverbs"])
        before, after = (
            re.search(pattern, lower)
            for pattern in (rf"(and|but|so|for) ({adverbs}) ", rf"({adverbs}) ({'|'.join(tables['verbs'])})")
        )
        place = 0 if before else 1 if after else 2 if re.search(adverbs, lower) else None
        values = [tables["values"].index(word) for word in re.findall(r"\w+", lower) if word in tables["values"]][:3]
        order = (place, values.index(min(values)) if len(values) == 3 else None)
        return tuple(topics), tuple(phrase), word_order and order

    seen: dict[tuple[object, ...], Counter[int]] = {}
    sentences = [(k % 3, cues(sample.sentence(k % 3, rng))) for k in range(12_000)]
    for speaker, found in sentences:
        seen.setdefault(found, Counter())[speaker] += 1
    right = sum(counter.most_common(1)[0][1] for counter in seen.values())
    assert right / len(sentences) == pytest.approx(sample.best_accuracy(word_order), abs=0.01)
