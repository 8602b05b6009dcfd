"""Oracle: the definition of the Jaccard index on Python sets, pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechformer.corpora import sample
from speechformer.corpora.duplicates import NEAR, kinds_in, plain


def are_close(texts: list[str], others: list[str] | None) -> list[bool]:
    return [kind != "" for kind in kinds_in(texts, others)]


def jaccard(a: str, b: str) -> float:
    left, right = set(plain(a).split()), set(plain(b).split())
    return len(left & right) / len(left | right)


@pytest.mark.parametrize("before", [False, True])
def test_texts_are_near_by_their_jaccard_index(before: bool) -> None:
    lines = sample.files(0)["train_LM.txt"].decode().splitlines()
    texts = lines[:600]
    others = texts if before else lines[500:620]
    compared = [others[:k] if before else others for k in range(len(texts))]
    expected = [any(jaccard(a, b) >= NEAR for b in candidates) for a, candidates in zip(texts, compared)]
    assert are_close(texts, None if before else others) == expected
    assert 0 < sum(expected) < len(expected)


LETTERS = st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=16).map(" ".join)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(LETTERS, min_size=2, max_size=12))
def test_no_near_text_is_overlooked(texts: list[str]) -> None:
    """Few different words: many pairs are just below or at the bound, as 3 of 4 and 4 of 5 words are."""
    expected = [[jaccard(a, b) >= NEAR for b in texts] for a in texts]
    assert are_close(texts, texts[1:]) == [any(row[1:]) for row in expected]
    assert are_close(texts, None) == [any(row[:k]) for k, row in enumerate(expected)]


def test_the_closest_kind_is_returned() -> None:
    kinds = {
        "One two three four five.": "exact",
        "one two, three four five": "same",
        "One two three four six five.": "near",  # 5 of 6
        "Five four three two one.": "near",  # the same set in another order
        "One two three four six.": "",  # 4 of 6
        "...": "",  # a text without words
    }
    assert kinds_in([*kinds], ["Nothing alike.", "One two three four five.", "!"]) == [*kinds.values()]
    assert kinds_in(["..."], []) == [""] and kinds_in([], ["..."]) == []


def test_of_copies_the_first_does_not_count() -> None:
    texts = ["A b c d e.", "Other.", "a b c d e", "A b c d e.", "A b c d e f."]
    assert kinds_in(texts) == ["", "", "same", "exact", "near"]
