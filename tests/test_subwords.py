"""Subwords: encoding and decoding keep every character."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from speechformer.corpora.special_tokens import END, PAD, UNKNOWN
from speechformer.corpora.subwords import SPECIAL, Subwords
from speechformer.errors import UserError

TEXTS = [
    "Où est l'île\u00a0?",
    "  two  spaces\tand a tab ",
    "日本 🙂 not in train",
    "<eos> and <pad> are words here",
    "e\u0301 é",
    "",
]


@pytest.fixture(scope="module")
def bpe() -> Subwords:
    return Subwords.fit(["the cat sat on the mat", "le chat"] * 5, "bpe", 20)


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_keeps_every_character(bpe: Subwords, text: str) -> None:
    """In the normal form NFC."""
    ids = bpe.encode(text)
    assert bpe.decode(ids) == unicodedata.normalize("NFC", text)
    assert UNKNOWN not in ids and END not in ids and PAD not in ids


def test_the_merges_are_those_of_sennrich_et_al() -> None:
    """Oracle: algorithm 1 of Sennrich et al. 2016 by hand: the most frequent pair of "aaab aaab aab" is a a."""
    fitted = Subwords.fit(["aaab aaab aab"], "bpe", 2)
    merges = json.loads(fitted.tokenizer.to_str())["model"]["merges"]
    assert merges[0] == ["a", "a"]
    assert len(fitted) == len(SPECIAL) + 256 + 2


def test_words_are_the_most_frequent_and_others_are_unknown() -> None:
    words = Subwords.fit(["the cat sat.", "the cat ran.", "the dog"], "words", 3)
    assert len(words) == len(SPECIAL) + 3
    assert words.decode(words.encode("the cat slept.")) == "the cat <unk>."
    assert words.encode("the bird").count(UNKNOWN) == 1


def test_decoding_stops_at_the_end_and_omits_padding(bpe: Subwords) -> None:
    ids = bpe.encode("the cat")
    assert bpe.decode([2, *ids, END, *ids]) == "the cat"
    assert bpe.decode([*ids, PAD, len(bpe) + 5]) == "the cat"


def test_tokens_decodes_each_id(bpe: Subwords) -> None:
    assert "".join(bpe.tokens(bpe.encode("the cat sat"))) == " the cat sat"
    assert bpe.tokens([END]) == ["<eos>"]


def test_save_and_load(bpe: Subwords, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    loaded = Subwords.load(tmp_path / "tokenizer.json")
    assert [loaded.encode(text) for text in TEXTS] == [bpe.encode(text) for text in TEXTS]
    (tmp_path / "other.json").write_text('{"kind": "nltk words"}')
    for name in ("other.json", "nothing.json"):
        with pytest.raises(UserError, match=f"{name} is not a tokenizer of speechformer"):
            Subwords.load(tmp_path / name)
