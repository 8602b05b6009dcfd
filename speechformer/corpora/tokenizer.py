"""Tokenise texts into words, and map words to ids.

The words are those of `nltk.word_tokenize`, which splits a text into sentences with the pre-trained English Punkt
model, and each sentence into Penn Treebank words. Only the model's list of abbreviations matters here. That list is
below, so nothing needs to be downloaded. On the presidential speeches every line gives the same words. A text is
read in the normal form NFC, as `files` reads corpora.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from speechformer.corpora.files import nfc, read_file, write_file
from speechformer.corpora.special_tokens import PAD, UNKNOWN
from speechformer.errors import UserError

PAD_TOKEN, UNKNOWN_TOKEN = "<pad>", "<unk>"
NO_SPACE_BEFORE = {".", ",", ";", ":", "!", "?", ")", "]", "}", "%", "''", "...", "n't", "--"}
NO_SPACE_AFTER = {"(", "[", "{", "$", "#", "``"}
QUOTES = {"``": '"', "''": '"'}  # as the Penn Treebank writes them
ABBREVIATIONS = ["mr", "mrs", "dr", "jr", "u.s", "u.s.a", "u.n", "d.c", "j.p", "vs", "d", "w", "f", "c"]


@functools.cache
def sentence_splitter() -> Callable[[str], list[str]]:
    """Build the function from a text to its sentences. NLTK is imported on the first call."""
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    return PunktSentenceTokenizer(parameters).tokenize


@functools.cache
def splitter() -> Callable[[str], list[str]]:
    """Build the function from a text to its words."""
    from nltk.tokenize.destructive import NLTKWordTokenizer

    sentences, words = sentence_splitter(), NLTKWordTokenizer()
    return lambda text: [word for sentence in sentences(text) for word in words.tokenize(sentence)]


@functools.cache  # a corpus is tokenised twice, to fit a vocabulary and to encode, and again by each job of a sweep
def split_words(text: str) -> tuple[str, ...]:
    """Tokenise a text: "I don't, Mr. Bush." -> I do n't , Mr. Bush ."""
    return tuple(splitter()(nfc(text)))


def detokenize(words: Iterable[str]) -> Iterator[str]:
    """Yield each word as a piece of text, with the space before it."""
    previous: str | None = None
    for word in words:
        clitic = len(word) > 1 and word[0] == "'" and word[1:].isalpha()  # 's, 're, 've
        joined = previous is None or previous in NO_SPACE_AFTER or word in NO_SPACE_BEFORE or clitic
        yield ("" if joined else " ") + QUOTES.get(word, word)
        previous = word


class Tokenizer:
    """A closed vocabulary of words: `<pad>` is 0, `<unk>` is 1, then words by descending frequency."""

    unknown, end, ends, padding = UNKNOWN, None, (), PAD  # ids; no token ends a document

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if list(vocabulary[:2]) != [PAD_TOKEN, UNKNOWN_TOKEN]:
            raise UserError(f"A vocabulary must begin with {PAD_TOKEN} and {UNKNOWN_TOKEN}.")
        self.vocabulary = list(vocabulary)
        self.ids = {word: index for index, word in enumerate(vocabulary)}

    @classmethod
    def fit(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Tokenizer:
        """Fit the vocabulary on the words of `texts`; ties in frequency are sorted by code point.

        Args:
            size: the most words; None for all.
            min_count: how often a word must occur.
        """
        counts = Counter(word for text in texts for word in split_words(text))
        frequent = {word for word, count in counts.items() if count >= min_count} - {PAD_TOKEN, UNKNOWN_TOKEN}
        words = sorted(frequent, key=lambda word: (-counts[word], word))
        return cls([PAD_TOKEN, UNKNOWN_TOKEN, *words[:size]])

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Encode the first `limit` words of a text; unknown words are `UNKNOWN`."""
        return [self.ids.get(word, UNKNOWN) for word in self.split(text, limit)]

    def split(self, text: str, limit: int | None = None) -> list[str]:
        """Return the words of a text, as many as `encode` returns."""
        return list(split_words(text)[:limit])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Decode ids to words; ids that only pad the embedding table are `<unk>`."""
        return [self.vocabulary[index] if index < len(self.vocabulary) else UNKNOWN_TOKEN for index in ids]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode ids one after another to a text: I do n't , ( ever ) . -> I don't, (ever)."""
        return detokenize(self.tokens([index])[0] for index in ids)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        content = {"kind": "nltk words", "vocabulary": self.vocabulary}
        write_file(path, (json.dumps(content, ensure_ascii=False, indent=0) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a tokenizer that `save` wrote; a `UserError` if the file is no such tokenizer."""
        try:
            return cls(json.loads(read_file(path))["vocabulary"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a tokenizer of speechformer ({error}).") from None
