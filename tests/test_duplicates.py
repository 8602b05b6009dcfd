"""Oracle: the definition of the Jaccard index on Python sets, pair by pair; and planted copies."""

from __future__ import annotations

import numpy as np
import pytest

from speechformer.corpora import sample
from speechformer.corpora.duplicates import kinds_in, nearest, plain


def test_plain_keeps_only_words() -> None:
    assert plain("  We, the People -- of 50 states!") == "we the people of 50 states"
    assert plain("...") == "..."  # nothing but punctuation is itself


@pytest.mark.parametrize("before", [False, True])
def test_nearest_is_the_jaccard_index(before: bool) -> None:
    lines = sample.files(0)["train_LM.txt"].decode().splitlines()
    texts = lines[:600]  # more than are compared at once
    others = texts if before else lines[500:620]

    def jaccard(a: str, b: str) -> float:
        left, right = set(plain(a).split()), set(plain(b).split())
        return len(left & right) / len(left | right)

    compared = [others[:k] if before else others for k in range(len(texts))]
    expected = [max((jaccard(a, b) for b in candidates), default=0) for a, candidates in zip(texts, compared)]
    np.testing.assert_allclose(nearest(texts, others, before), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("One two three four five.", "exact"),
        ("one two, three four five", "same"),
        ("One two three four six five.", "near"),  # 5 of 6
        ("Five four three two one.", "near"),  # the same set in another order
        ("One two three four six.", ""),  # 4 of 6
        ("Seven.", ""),
    ],
)
def test_the_closest_kind_is_returned(text: str, kind: str) -> None:
    assert kinds_in([text], ["Nothing alike.", "One two three four five."]) == [kind]


def test_of_copies_the_first_does_not_count() -> None:
    texts = ["A b c d e.", "Other.", "a b c d e", "A b c d e.", "A b c d e f."]
    assert kinds_in(texts) == ["", "", "same", "exact", "near"]


def test_nothing_to_compare_with() -> None:
    assert kinds_in(["a"], []) == [""]
    assert kinds_in([], ["a"]) == []
