"""Encode texts with a vocabulary of subwords, words or bytes, and decode them character for character.

    bpe     byte-pair encoding (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units")
            over bytes (Radford et al. 2019), so that no character is unknown
    words   the most frequent words and punctuation marks; all others are <unk>
    bytes   the 256 bytes

The library is Hugging Face `tokenizers`. A token includes the space before it, so decoding is concatenation: accents,
no-break spaces and punctuation survive, and scoring needs no detokenizer. White space begins a token. A text is read
in the normal form NFC, as `files` reads corpora.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speechformer.corpora.files import nfc, read_file, write_file
from speechformer.corpora.special_tokens import END, PAD, UNKNOWN
from speechformer.errors import UserError

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
MERGES, ALL_WORDS = 4000, 1 << 22
SPLIT = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s"  # a word, a number or punctuation, with the space before it


class Subwords:
    """A vocabulary of subwords or words: <pad> is 0, <unk> 1, <bos> 2, <eos> 3."""

    unknown, start, end, ends, padding = UNKNOWN, END, END, (END,), PAD  # `end` also begins a document

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # "<eos>" in a text is text

    @classmethod
    def fit(cls, texts: Iterable[str], kind: str, size: int | None, min_count: int = 1) -> Subwords:
        """Fit a vocabulary of `size` merges (`kind` "bpe") or words ("words"), or of bytes ("bytes").

        Args:
            size: None for all words, or for `MERGES` merges.
            min_count: how often a word or a merged pair must occur.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        if kind == "bytes":
            texts, size = (), 0
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        trainer_class: Any
        options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
        if kind == "words":
            tokenizer, options["min_frequency"] = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNKNOWN])), min_count
            tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
            trainer_class, rows = trainers.WordLevelTrainer, ALL_WORDS if size is None else size
        else:
            tokenizer, options["min_frequency"] = Tokenizer(models.BPE()), min_count if min_count > 1 else 0
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
            tokenizer.decoder = decoders.ByteLevel()
            options["initial_alphabet"] = sorted(byte_level.alphabet())
            trainer_class, rows = trainers.BpeTrainer, 256 + (MERGES if size is None else size)
        trainer = trainer_class(vocab_size=len(SPECIAL) + rows, **options)
        # the leading space makes a sentence-initial word the same token as elsewhere
        tokenizer.train_from_iterator((f" {nfc(text)}" for text in texts), trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Encode a text, without <bos> and <eos>, up to `limit` tokens. Special tokens in it are treated as text."""
        return self.encode_all([text])[0][:limit]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, faster than one by one."""
        return self.encode_pieces([f" {text}" for text in texts])

    def pieces(self, document: str) -> list[str]:
        """Return a document in pieces that `encode_pieces` encodes: its lines, as a token never crosses lines."""
        *lines, last = f" {document}".split("\n")
        return [*(f"{line}\n" for line in lines), last]

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Encode pieces of documents."""
        encodings = self.tokenizer.encode_batch_fast(list(map(nfc, pieces)), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def split(self, text: str, limit: int | None = None) -> list[str]:
        """Return the tokens of a text, as many as `encode` returns, and the unknown ones as written."""
        written = f" {nfc(text)}"
        encoding = self.tokenizer.encode(written, add_special_tokens=False)
        rows = zip(encoding.ids, encoding.offsets, self.tokens(encoding.ids))
        return [token if index != UNKNOWN else written[slice(*place)] for index, place, token in rows][:limit]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode ids one after another; several may make up one character."""
        from tokenizers.decoders import DecodeStream

        decoder, first = DecodeStream(skip_special_tokens=False), True
        for index in ids:
            if index == END:
                yield "\n"
            elif index < len(SPECIAL) or index >= len(self):
                yield f" {SPECIAL[UNKNOWN]}"
            elif text := decoder.step(self.tokenizer, index):
                yield text.removeprefix(" ") if first else text
            else:
                continue
            first = False

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

    def as_json(self) -> str:
        """Return all that decides the ids of a document, in the format of `tokenizers`."""
        return self.tokenizer.to_str()

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        write_file(path, f"{self.as_json()}\n".encode())

    @classmethod
    def load(cls, path: Path) -> Subwords:
        """Load a tokenizer that `save` wrote; a `UserError` if the file is missing, or no such tokenizer."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(read_file(path).decode()))
        except Exception as error:  # tokenizers raises bare exceptions
            raise UserError(f"{path} is not a tokenizer of speechformer ({type(error).__name__}).") from None


class BPEDropout:
    """Segments texts with the merges of a vocabulary, some of which are left out at random.

    Another segmentation of each word each time regularizes translation from few pairs. Source: Provilkov et al. 2020,
    "BPE-Dropout: Simple and Effective Subword Regularization". Wherever byte-pair encoding could merge two symbols,
    it is kept from it with a probability, at each of its steps anew. `tokenizers` can do this, but draws from the
    system's random numbers, so a run could not be repeated.

    Args:
        subwords: a vocabulary of kind "bpe".
        rate: the probability with which a possible merge is left out; with 0 segmentations are those of `subwords`.
    """

    def __init__(self, subwords: Subwords, rate: float) -> None:
        model: dict[str, Any] = json.loads(subwords.tokenizer.to_str())["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.split, self.rate = subwords.tokenizer.pre_tokenizer.pre_tokenize_str, rate

    def encode(self, text: str, generator: random.Random) -> list[int]:
        """Return the ids of a text, without <bos> and <eos>."""
        words = (word for word, _ in self.split(f" {text}"))
        return [self.ids[symbol] for word in words for symbol in self.symbols(word, generator)]

    def symbols(self, word: str, generator: random.Random) -> list[str]:
        """Return the symbols of a word: of the merges that are not left out, the one learned first, until none is."""
        symbols = list(word)
        while merges := [
            (rank, place)
            for place, pair in enumerate(itertools.pairwise(symbols))
            if (rank := self.ranks.get(pair)) is not None and (not self.rate or generator.random() >= self.rate)
        ]:
            _, place = min(merges)
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return symbols
