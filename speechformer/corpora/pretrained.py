"""The tokenizer of a model from elsewhere: tokenizer.json of the library `tokenizers`.

Its own `normalizer` decides the Unicode form of a text, as it did when the model was trained. A corpus is read in the
normal form NFC before any tokenizer reads it, so that what leaks is found, and all models are tested on one text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speechformer.corpora.files import read_file, read_json, write_file
from speechformer.errors import UserError

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"  # files of a model
START = b'{"kind": "pretrained"'  # of the file that `save` writes


class PretrainedTokenizer:
    """Encodes texts as the library does: with the tokens that the model expects around a text.

    Attributes:
        unknown: id of the token for what is unknown; -1 if there is none.
        end: id of the token that ends a document; None if there is none.
        start: id of the token that begins a document: the first that the tokenizer puts in front of a text; if it
            puts none, that of `end`; -1 if there is none.
        ends: ids of the tokens at which generation ends; by default that of `end`.
    """

    padding = None  # it is in no text

    def __init__(self, tokenizer: Any, end: int | None, ends: Sequence[int] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.end = tokenizer, end
        self.ends = [index for index in ([end] if ends is None else ends) if index is not None]
        unknown = getattr(tokenizer.model, "unk_token", None)
        self.unknown = -1 if unknown is None else tokenizer.token_to_id(unknown)
        letter = tokenizer.encode("a")
        self.has_start = letter.special_tokens_mask[:1] == [1]
        self.start = letter.ids[0] if self.has_start else -1 if end is None else end

    @classmethod
    def of_folder(cls, folder: Path) -> PretrainedTokenizer:
        """Load tokenizer.json from the folder of a model, which has a row for each of its tokens.

        Raises:
            UserError: a file is missing or damaged, or the files do not fit together.
        """
        path, config = folder / TOKENIZER, folder / CONFIG
        end, ends = read_ends(folder)
        if not path.exists():
            raise UserError(f"{folder} has no {TOKENIZER}; save the model's fast tokenizer there.")
        tokenizer, rows = parse(read_file(path), path), read_json(config)["vocab_size"]
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest >= rows:
            raise UserError(f"{path} has a token of id {largest}, but {config} has vocab_size={rows}.")
        return cls(tokenizer, end, ends)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Encode a text, with the tokens around it; the text is cut so that they are at most `limit` in all."""
        if limit is None:
            return self.tokenizer.encode(text).ids
        self.tokenizer.enable_truncation(limit)
        ids = self.tokenizer.encode(text).ids
        self.tokenizer.no_truncation()
        return ids[:limit]  # the library cuts nothing if there is no room for the tokens around a text

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, faster than one by one."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    def pieces(self, document: str) -> list[str]:
        """Return a document in pieces that `encode_pieces` encodes: a whole, as its tokens may cross any boundary."""
        return [document]

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Encode whole documents as `encode` does, but without an `end` in front, which ends the document before."""
        return [ids[self.has_start and self.start == self.end :] for ids in self.encode_all(pieces)]

    def split(self, text: str, limit: int | None = None) -> list[str]:
        """Return the tokens of a text, as many as `encode` returns."""
        return self.tokens(self.encode(text, limit))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Decode each id by itself; special tokens are shown by name."""
        decoded = (self.tokenizer.decode([index], skip_special_tokens=False) for index in ids)
        return [text or self.tokenizer.id_to_token(index) or "" for index, text in zip(ids, decoded)]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode ids one after another; several may make up one character."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        yield from filter(None, (decoder.step(self.tokenizer, index) for index in ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are omitted."""
        return self.tokenizer.decode(list(ids))

    def as_json(self, **more: Any) -> str:
        """Return all that decides the ids of a document, and more."""
        content = {"kind": "pretrained", "end": self.end, "tokenizer": json.loads(self.tokenizer.to_str())}
        return json.dumps(content | more, ensure_ascii=False)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        write_file(path, f"{self.as_json(ends=self.ends)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> PretrainedTokenizer:
        """Load a tokenizer that `save` wrote; a `UserError` if the file is no such tokenizer."""
        try:
            content = json.loads(read_file(path))
            tokenizer = parse(json.dumps(content["tokenizer"]).encode(), path)
            return cls(tokenizer, content["end"], content.get("ends"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a tokenizer of speechformer ({error}).") from None


def read_ends(folder: Path) -> tuple[int | None, list[int]]:
    """Return the token that ends a document in a text for a folder's model, and those that end generation, as ids.

    As in the library, generation_config.json decides on the latter if it is there.

    Raises:
        UserError: a file is damaged, or has other values there.
    """
    files = [path for name in (CONFIG, "generation_config.json") if (path := folder / name).exists()]
    rows, lists = read_json(files[0])["vocab_size"], []
    for path in files:
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int and 0 <= index < rows for index in ids):
            raise UserError(f"{path}: eos_token_id must be an id below vocab_size={rows}, or a list, not {value!r}.")
        lists.append(ids)
    return next((index for ids in lists for index in ids), None), lists[-1]


def parse(content: bytes, path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a file's content."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare exceptions
        raise UserError(f"{path} is no tokenizer of the library tokenizers ({error}).") from None
