"""Oracles: the Penn Treebank convention, and the vocabulary that the real Punkt model gives on the speeches."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechformer.corpora.speeches import Corpus
from speechformer.corpora.tokenizer import Tokenizer, split_words
from speechformer.errors import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don't, can't.", "I do n't , ca n't ."),
        ("Mr. Bush's day is done. It ended.", "Mr. Bush 's day is done . It ended ."),
        ("The U.S. and the U.N. agree.", "The U.S. and the U.N. agree ."),
        ('He said "yes" -- twice.', "He said `` yes '' -- twice ."),
        ("$79 billion (a lot)", "$ 79 billion ( a lot )"),
    ],
)
def test_words_are_those_of_the_treebank(text: str, words: str) -> None:
    assert list(split_words(text)) == words.split()


def test_ids_are_sorted_by_frequency_then_code_point_and_unknown_words_are_one() -> None:
    tokenizer = Tokenizer.fit(["b a c", "b é", "a b <unk>"])
    assert tokenizer.vocabulary[:4] == ["<pad>", "<unk>", "b", "a"]
    assert tokenizer.vocabulary == Tokenizer.fit(["a b <unk>", "b é", "b a c"]).vocabulary
    assert tokenizer.encode("b never a") == [2, 1, 3]
    assert tokenizer.tokens([2, 1, 3, 0, len(tokenizer)]) == ["b", "<unk>", "a", "<pad>", "<unk>"]


def test_no_word_is_encoded_as_padding() -> None:
    tokenizer = Tokenizer.fit(["<pad> a"])
    assert 0 not in tokenizer.encode("<pad> a <pad>")
    assert 0 not in Tokenizer.fit(["a"]).encode("<pad>")


def test_save_and_load(tmp_path: Path) -> None:
    tokenizer = Tokenizer.fit(["déjà vu 's \u2028 ``"])
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").vocabulary == tokenizer.vocabulary


@pytest.mark.parametrize("content", ["[]", "not json", '{"vocabulary": ["a"]}', '{"vocabulary": 3}'])
def test_another_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_the_speeches_have_the_vocabulary_of_the_real_punkt_model(speeches: Corpus) -> None:
    """Oracle: 5,634 was measured with `nltk.word_tokenize` and its downloaded model on both training files."""
    texts = [text for _, text in speeches.classify_train] + speeches.lm_train
    assert len(Tokenizer.fit(texts)) == 5634
