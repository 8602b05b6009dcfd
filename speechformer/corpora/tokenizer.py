"""Words to ids and back.

The words are those of `nltk.word_tokenize`, which cuts a text into sentences with the pre-trained English
Punkt model and each sentence into Penn Treebank words. The model is a download; of what it knows, only its
list of abbreviations matters here, so we name those and download nothing (measured on the presidential
speeches: the same words on every line).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from speechformer.errors import UserError

PAD_TOKEN, UNKNOWN_TOKEN = "<pad>", "<unk>"
ABBREVIATIONS = ["mr", "mrs", "dr", "jr", "u.s", "u.s.a", "u.n", "d.c", "j.p", "vs", "d", "w", "f", "c"]


@functools.cache
def splitter() -> Callable[[str], list[str]]:
    """The function from a text to its words. NLTK is imported when the first text is cut."""
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    sentences, words = PunktSentenceTokenizer(parameters), NLTKWordTokenizer()
    return lambda text: [word for sentence in sentences.tokenize(text) for word in words.tokenize(sentence)]


WORDS: dict[str, tuple[str, ...]] = {}  # of each text that was cut; `corpora.cache` keeps them on disk


def split_words(text: str) -> tuple[str, ...]:
    """The words of a text: "I don't, Mr. Bush." -> I do n't , Mr. Bush .

    Remembered, because a corpus is cut twice (to fit a vocabulary, to encode) and again by each job of a sweep.
    """
    if text not in WORDS:
        WORDS[text] = tuple(splitter()(text))
    return WORDS[text]


@functools.cache
def settings() -> str:
    """A fingerprint of the way in which texts are cut."""
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([own, ABBREVIATIONS, metadata.version("nltk")]).encode()).hexdigest()


class Tokenizer:
    """A closed vocabulary of words: `<pad>` is 0, `<unk>` is 1, then the words, most frequent first."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if list(vocabulary[:2]) != [PAD_TOKEN, UNKNOWN_TOKEN] or len(set(vocabulary)) != len(vocabulary):
            raise UserError(f"A vocabulary begins with {PAD_TOKEN} and {UNKNOWN_TOKEN} and holds each word once.")
        self.vocabulary = list(vocabulary)
        self.ids = {word: index for index, word in enumerate(vocabulary)}

    @classmethod
    def fit(cls, texts: Iterable[str]) -> Tokenizer:
        """The vocabulary of all words of `texts`; ties in frequency stand in order of code points."""
        counts = Counter(word for text in texts for word in split_words(text))
        for special in (PAD_TOKEN, UNKNOWN_TOKEN):
            counts.pop(special, None)
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([PAD_TOKEN, UNKNOWN_TOKEN, *words])

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of the words of a text; 1 for a word that is not in the vocabulary."""
        return [self.ids.get(word, 1) for word in split_words(text)]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of the ids; rows that only pad the embedding table are `<unk>`."""
        return [self.vocabulary[index] if index < len(self.vocabulary) else UNKNOWN_TOKEN for index in ids]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        content = {"kind": "nltk words", "vocabulary": self.vocabulary}
        path.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read what `save` wrote.

        Raises:
            UserError: the file is not a tokenizer.
        """
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["vocabulary"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a tokenizer of speechformer ({error}).") from None
