"""Find duplicates and near-duplicates among texts.

    exact    identical characters
    same     identical words in the same order, ignoring case, punctuation and spaces
    near     Jaccard index of the sets of words, |A and B| / |A or B|, of at least 0.8 (Jaccard 1912)

The index is exact, and covers all pairs that can be near. Sort the words of each text from the rarest to the most
frequent. Two near texts share one of their first words: all but 0.8 of them, and one more (Chaudhuri et al. 2006).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

NEAR = 0.8
WORD = re.compile(r"[^\W_]+")


def plain(text: str) -> str:
    """Return the words of a text in lower case without punctuation; a text without words is returned as it is."""
    return " ".join(WORD.findall(text.lower())) or text


def kinds_in(texts: Sequence[str], others: Collection[str] | None = None) -> list[str]:
    """Find for each text the closest kind of duplicate among `others`: "exact", "same", "near" or "" for none.

    Without `others` it is that among the texts before it, so that only one of two copies counts.
    """
    searched = texts if others is None else sorted(set(others))
    counts = Counter(word for text in {*texts, *searched} for word in set(plain(text).split()))
    exact, same = set[str](), set[str]()
    by_rare_word: dict[str, list[set[str]]] = defaultdict(list)

    def rare(words: set[str]) -> list[str]:
        rarest_first = sorted(words, key=lambda word: (counts[word], word))
        return rarest_first[: len(words) - math.ceil(NEAR * len(words) - 1e-9) + 1]

    def add(text: str) -> None:
        words = set(plain(text).split())
        for word in rare(words):
            by_rare_word[word].append(words)
        exact.add(text)
        same.add(plain(text))

    def kind(text: str) -> str:
        if text in exact or plain(text) in same:
            return "exact" if text in exact else "same"
        words = set(plain(text).split())
        close = (other for word in rare(words) for other in by_rare_word[word])
        return "near" if any(len(words & other) >= NEAR * len(words | other) - 1e-9 for other in close) else ""

    for text in () if others is None else searched:
        add(text)
    kinds = []
    for text in texts:
        kinds.append(kind(text))
        if others is None:
            add(text)
    return kinds
