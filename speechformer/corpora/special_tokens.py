"""Ids of the special tokens, the same in every vocabulary."""

from __future__ import annotations

PAD, UNKNOWN, BEGIN, END = range(4)  # a vocabulary of words has only the first two
IGNORE = -100  # a target that is not scored; the default `ignore_index` of torch's cross_entropy
