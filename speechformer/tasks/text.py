"""Texts on their way into a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechformer.corpora.load import AnyTokenizer
from speechformer.corpora.tokenizer import UNKNOWN_TOKEN


@dataclass
class TextInputs:
    """A text as a model reads it."""

    ids: list[Tensor] = field(repr=False)  # the inputs of the model, [T] each
    tokens: list[list[str]]  # the same as text; of a translation also the tokens that the decoder writes
    notes: list[str]  # what to tell the user about the text
    is_cut: bool = False  # which the first note says


def read_words(text: str, tokenizer: AnyTokenizer, limit: int, why: str = "") -> TextInputs:
    """Read the first `limit` tokens of a text; `why` explains the limit to the user."""
    number, words, ids = len(tokenizer.encode(text)), tokenizer.split(text, limit), tokenizer.encode(text, limit)
    cut = f"the first {limit} of its {number} words are read{why}" if number > limit else None
    notes = [note for note in (cut, note_unknown(words, ids, tokenizer.unknown)) if note]
    tokens = [word if index != tokenizer.unknown else f"{word} {UNKNOWN_TOKEN}" for word, index in zip(words, ids)]
    return TextInputs([torch.tensor(ids)], [tokens], notes, cut is not None)


def note_unknown(words: Sequence[str], ids: Sequence[int], unknown_id: int) -> str | None:
    """Return a note that lists the words outside the vocabulary; None if there are none."""
    unknown = list(dict.fromkeys(word.strip() for word, index in zip(words, ids) if index == unknown_id))
    if not unknown:
        return None
    shown = [word if len(word) <= 30 else f"{word[:29]}…" for word in unknown[:20]]
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    if set(ids) == {unknown_id}:
        more += ". Every word is unknown to this model, so what it says has nothing to do with the text"
    return f"not in the vocabulary, read as {UNKNOWN_TOKEN}: {', '.join(shown)}{more}"
