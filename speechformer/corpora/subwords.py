"""Sentences of two languages to ids of one vocabulary and back, to the very characters: Hugging Face `tokenizers`.

    bpe     byte pairs (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"), over
            bytes (Radford et al. 2019), so that no character is unknown
    words   the most frequent words and signs; all others are <unk>

Fitted on both sides of train together. The cut is before each space, so that decoding is joining: accents, no-break
spaces and the place of every sign are kept, and the text can be scored as it stands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from speechformer.corpora.special_tokens import END, UNKNOWN
from speechformer.errors import UserError, pick

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
CUT = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s"  # a word, a number or signs, with the space before it


class Subwords:
    """A vocabulary of subwords or words: <pad> is 0, <unk> 1, <bos> 2, <eos> 3."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # as text

    @classmethod
    def fit(cls, texts: Iterable[str], kind: str, size: int) -> Subwords:
        """Learn a vocabulary.

        Args:
            kind: "bpe" or "words".
            size: of bpe the merges, of words the words.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        pick(dict.fromkeys(("bpe", "words")), kind, "task.tokens")
        cut = pre_tokenizers.Split(Regex(CUT), "isolated")
        trainer: Any
        common: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
        if kind == "bpe":
            tokenizer = Tokenizer(models.BPE())
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            trainer = trainers.BpeTrainer(
                vocab_size=len(SPECIAL) + len(alphabet) + size, initial_alphabet=alphabet, **common
            )
        else:
            tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNKNOWN]))
            tokenizer.pre_tokenizer = cut
            tokenizer.decoder = decoders.Fuse()
            trainer = trainers.WordLevelTrainer(vocab_size=len(SPECIAL) + size, **common)
        # a word that begins a sentence is the word that stands after a space
        tokenizer.train_from_iterator((f" {text}" for text in texts), trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without <bos> and <eos>. What looks like a special token in it is text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, which is quicker than one by one."""
        found = self.tokenizer.encode_batch_fast([f" {text}" for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the first <eos>; other special tokens are left out, but <unk> is shown."""
        ids = list(ids)
        if END in ids:
            ids = ids[: ids.index(END)]
        pieces: list[list[int]] = [[]]
        for index in ids:
            if index == UNKNOWN:
                pieces.append([])
            elif len(SPECIAL) <= index < len(self):  # beyond are rows that only pad the embedding table
                pieces[-1].append(index)
        return f" {SPECIAL[UNKNOWN]}".join(map(self.tokenizer.decode, pieces)).removeprefix(" ")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as a piece of text, for pictures; a space shows as it is."""
        return [SPECIAL[index] if index < len(SPECIAL) else self.tokenizer.decode([index]) for index in ids]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, in the format of `tokenizers`."""
        path.write_text(self.tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Subwords:
        """Read what `save` wrote.

        Raises:
            UserError: the file is not there, or not such a tokenizer.
        """
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # tokenizers raises bare ones
            raise UserError(f"{path} is not a tokenizer of a translation ({type(error).__name__}).") from None


def on_one_line(text: str) -> str:
    """A text without what would begin another line or column of a file."""
    return re.sub(r"[\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text)


@functools.lru_cache(maxsize=8)  # the jobs of a sweep share it
def fitted(texts: tuple[str, ...], kind: str, size: int) -> Subwords:
    """`Subwords.fit`, remembered."""
    return Subwords.fit(texts, kind, size)
