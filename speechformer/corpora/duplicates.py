"""Find duplicates and near-duplicates among texts.

    exact    identical characters
    same     identical words in the same order, ignoring case, punctuation and spaces
    near     Jaccard index of the sets of words, |A and B| / |A or B|, of at least 0.8 (Jaccard 1912)

The index is exact, and covers all pairs that can be near. Sort the words of each text from the rarest to the most
frequent. Two near texts share one of their first words: all but 0.8 of them, and one more. What they share after the
earlier of the last of these words is in the rest of one text. And neither has less than 0.8 times the words of the
other. (Filters by prefix, position and size: Chaudhuri et al. 2006, Xiao et al. 2008.)
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

NEAR = 0.8
WORD = re.compile(r"[^\W_]+")


def plain(text: str) -> str:
    """Return the words of a text in lower case without punctuation; a text without words is returned as it is."""
    return " ".join(WORD.findall(text.lower())) or text


def are_near(texts: Sequence[str], others: Sequence[str], before: bool = False) -> np.ndarray:
    """Find for each text whether any other is near it, [texts].

    With `before`, `others` are the texts themselves, and each text is compared only with those before it.
    """
    from scipy.sparse import csr_array

    words_of = [set(plain(text).split()) for text in (*texts, *others)]
    counts = Counter(itertools.chain.from_iterable(words_of))
    columns = {word: k for k, word in enumerate(sorted(counts, key=lambda word: (counts[word], word)))}
    rows = [sorted(columns[word] for word in words) for words in words_of]
    starts = [row[: len(row) - math.ceil(NEAR * len(row) - 1e-9) + 1] for row in rows]

    def one_hot(rows: Sequence[Sequence[int]]) -> Any:
        indices = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32)
        ends = np.cumsum([0, *map(len, rows)])
        return csr_array((np.ones(len(indices), dtype=np.float32), indices, ends), (len(rows), len(columns)))

    all_words, rare_words = one_hot(rows), one_hot(starts)
    sizes = np.array([len(row) for row in rows], dtype=np.float64)
    left_over = sizes - [len(start) for start in starts]
    last = np.array([start[-1] if start else -1 for start in starts])
    near = np.zeros(len(texts), dtype=bool)
    others_rare_words = rare_words[len(texts) :].T.tocsr()
    for start in range(0, len(texts), 256):  # all pairs at once might not fit for a large corpus
        pairs = (rare_words[start : min(start + 256, len(texts))] @ others_rare_words).tocoo()
        left, right = pairs.row + start, pairs.col + len(texts)
        most = pairs.data + left_over[np.where(last[left] <= last[right], left, right)]
        enough = most > NEAR / (1 + NEAR) * (sizes[left] + sizes[right]) - 0.01
        enough &= np.minimum(sizes[left], sizes[right]) > NEAR * np.maximum(sizes[left], sizes[right]) - 0.01
        if before:
            enough &= pairs.col < left
        for some in np.array_split(enough.nonzero()[0], 1 + enough.sum() // 16_384):
            a, b = left[some], right[some]
            common = all_words[a].multiply(all_words[b]).sum(axis=1)
            near[a[common / (sizes[a] + sizes[b] - common) >= NEAR]] = True
    return near


def kinds_in(texts: Sequence[str], others: Collection[str] | None = None) -> list[str]:
    """Find for each text the closest kind of duplicate among `others`: "exact", "same", "near" or "" for none.

    Without `others` it is that among the texts before it, so that only one of two copies counts.
    """
    if not texts or (others is not None and not others):
        return [""] * len(texts)
    near = are_near(texts, texts if others is None else sorted(set(others)), before=others is None)
    verbatim, words = set(others or ()), set(map(plain, others or ()))
    kinds = []
    for text, close in zip(texts, near.tolist()):
        plain_text = plain(text)
        kinds.append("exact" if text in verbatim else "same" if plain_text in words else "near" if close else "")
        if others is None:
            verbatim.add(text)
            words.add(plain_text)
    return kinds
