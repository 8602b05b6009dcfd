"""Find duplicates and near-duplicates among texts.

    exact    identical characters
    same     identical words in the same order, ignoring case, punctuation and spaces
    near     Jaccard index of the sets of words, |A and B| / |A or B|, of at least 0.8 (Jaccard 1912)

The index is exact and covers all pairs: with one-hot rows, the sizes of all intersections are one product of sparse
matrices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

NEAR = 0.8
WORD = re.compile(r"[^\W_]+")


def plain(text: str) -> str:
    """Return the words of a text in lower case without punctuation; a text without words is returned as it is."""
    return " ".join(WORD.findall(text.lower())) or text


def nearest(texts: Sequence[str], others: Sequence[str], before: bool = False) -> np.ndarray:
    """Compute for each text the highest Jaccard index with any other, [texts]; 0 if there is nothing to compare with.

    With `before`, `others` are the texts themselves, and each text is compared only with those before it.
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
        block = slice(start, min(start + 512, len(texts)))
        common = (left[block] @ right).toarray()
        index = common / (sizes[block, None] + sizes[None, len(texts) :] - common)
        highest[block] = (np.tril(index, start - 1) if before else index).max(axis=1, initial=0)
    return highest


def kinds_in(texts: Sequence[str], others: Collection[str] | None = None) -> list[str]:
    """Find for each text the closest kind of duplicate among `others`: "exact", "same", "near" or "" for none.

    Without `others` it is that among the texts before it, so that only one of two copies counts.
    """
    if not texts or (others is not None and not others):
        return [""] * len(texts)
    near = nearest(texts, texts if others is None else sorted(set(others)), before=others is None) >= NEAR
    verbatim, words = set(others or ()), set(map(plain, others or ()))
    kinds = []
    for text, close in zip(texts, near.tolist()):
        own = plain(text)
        kinds.append("exact" if text in verbatim else "same" if own in words else "near" if close else "")
        if others is None:
            verbatim.add(text)
            words.add(own)
    return kinds
