"""Encode sentences of two languages with one vocabulary, and decode them character for character.

    bpe     byte-pair encoding (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units")
            over bytes (Radford et al. 2019), so that no character is unknown
    words   the most frequent words and punctuation marks; all others are <unk>

The vocabulary is fitted on both sides of train together, with Hugging Face `tokenizers`. A token includes the space
before it, so decoding is concatenation: accents, no-break spaces and punctuation survive, and scoring needs no
detokenizer.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from speechformer.corpora.files import atomic_write, read_file
from speechformer.corpora.special_tokens import END, UNKNOWN
from speechformer.errors import UserError, pick

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
SPLIT = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s"  # a word, a number or punctuation, with the space before it


class Subwords:
    """A vocabulary of subwords or words: <pad> is 0, <unk> 1, <bos> 2, <eos> 3."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # "<eos>" in a text is text

    @classmethod
    def fit(cls, texts: Iterable[str], kind: str, size: int) -> Subwords:
        """Fit a vocabulary of `size` merges (`kind` "bpe") or words ("words")."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        pick(dict.fromkeys(("bpe", "words")), kind, "task.tokens")
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        trainer: Any
        common: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
        if kind == "bpe":
            tokenizer = Tokenizer(models.BPE())
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            size += len(alphabet)
            trainer = trainers.BpeTrainer(vocab_size=len(SPECIAL) + size, initial_alphabet=alphabet, **common)
        else:
            tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNKNOWN]))
            tokenizer.pre_tokenizer = split
            tokenizer.decoder = decoders.Fuse()
            trainer = trainers.WordLevelTrainer(vocab_size=len(SPECIAL) + size, **common)
        # the leading space makes a sentence-initial word the same token as elsewhere
        tokenizer.train_from_iterator((f" {text}" for text in texts), trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Encode a text, without <bos> and <eos>. Special tokens in it are treated as text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, faster than one by one."""
        encodings = self.tokenizer.encode_batch_fast([f" {text}" for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids up to the first <eos>; <unk> is shown, other special tokens are omitted."""
        pieces: list[list[int]] = [[]]
        for index in itertools.takewhile(lambda index: index != END, ids):
            if index == UNKNOWN:
                pieces.append([])
            elif len(SPECIAL) <= index < len(self):  # ids beyond it only pad the embedding table
                pieces[-1].append(index)
        return f" {SPECIAL[UNKNOWN]}".join(map(self.tokenizer.decode, pieces)).removeprefix(" ")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Decode each id by itself, for plots."""
        return [SPECIAL[index] if index < len(SPECIAL) else self.tokenizer.decode([index]) for index in ids]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the format of `tokenizers`."""
        with atomic_write(path) as file:
            file.write((self.tokenizer.to_str(pretty=False) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Subwords:
        """Load a tokenizer that `save` wrote; a `UserError` if the file is missing, or no such tokenizer."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(read_file(path).decode()))
        except Exception as error:  # tokenizers raises bare exceptions
            raise UserError(f"{path} is not a tokenizer of a translation run ({type(error).__name__}).") from None


def on_one_line(text: str) -> str:
    """Replace characters that would begin a new line or column of a file."""
    return re.sub(r"[\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text)


fitted = functools.lru_cache(maxsize=8)(Subwords.fit)  # of a tuple of texts; the jobs of a sweep share it
