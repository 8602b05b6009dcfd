"""How alike two texts are, and which of many is the nearest.

    exact    the same characters
    same     the same words in the same order: but for case, punctuation and spaces
    near     at least 0.8 of their different words are common: |A and B| / |A or B| (Jaccard 1912)

Jaccard's index is exact here, for all pairs: with rows of nought and one, the sizes of the intersections are one
product of sparse matrices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

NEAR = 0.8
WORD = re.compile(r"[^\W_]+")


def plain(text: str) -> str:
    """The words of a text in lower case, without punctuation; the text itself where it has none."""
    return " ".join(WORD.findall(text.lower())) or text


def nearest(texts: Sequence[str], others: Sequence[str], before: bool = False) -> np.ndarray:
    """For each text the highest of Jaccard's indices with every other, [texts], 0 with none.

    With `before`, `others` are the texts themselves, and text k is compared with those before it.
    """
    from scipy.sparse import csr_array

    words = [set(plain(text).split()) for text in (*texts, *others)]
    columns = {word: k for k, word in enumerate(set().union(*words))}
    rows = [row for row, own in enumerate(words) for _ in own]
    ones = np.ones(len(rows), dtype=np.float32)
    table = csr_array((ones, (rows, [columns[word] for own in words for word in own])), (len(words), len(columns)))
    sizes = np.array([len(own) for own in words], dtype=np.float32)
    left, right = table[: len(texts)], table[len(texts) :].T.tocsr()
    highest = np.zeros(len(texts), dtype=np.float32)
    for start in range(0, len(texts), 512):  # all pairs at once would not fit for a large corpus
        chosen = slice(start, start + 512)
        common = (left[chosen] @ right).toarray()
        index = common / (sizes[: len(texts)][chosen, None] + sizes[None, len(texts) :] - common)
        if before:
            index = np.tril(index, start - 1)
        highest[chosen] = index.max(axis=1, initial=0)
    return highest


def kinds_in(texts: Sequence[str], others: Collection[str]) -> list[str]:
    """For each text the nearest kind that some other is of it: "exact", "same", "near" or "" for none."""
    others = sorted(set(others))  # each once
    if not texts or not others:
        return [""] * len(texts)
    verbatim, words = set(others), set(map(plain, others))
    near = nearest(texts, others) >= NEAR
    return [
        "exact" if text in verbatim else "same" if plain(text) in words else "near" if close else ""
        for text, close in zip(texts, near.tolist())
    ]


def kinds_before(texts: Sequence[str]) -> list[str]:
    """For each text the nearest kind that one *before* it is of it, so that of two copies one counts."""
    alike = nearest(texts, texts, before=True) >= NEAR
    verbatim: set[str] = set()
    words: set[str] = set()
    found = []
    for text, close in zip(texts, alike.tolist()):
        found.append("exact" if text in verbatim else "same" if plain(text) in words else "near" if close else "")
        verbatim.add(text)
        words.add(plain(text))
    return found
