"""Texts as a model reads them, and as Markdown."""

from __future__ import annotations

import html

import pytest

from speechformer.corpora.tokenizer import Tokenizer
from speechformer.escape import escape_markdown
from speechformer.tasks.text import note_unknown, read_words


def test_words_are_cut_at_the_limit_and_unknown_ones_are_marked() -> None:
    tokenizer = Tokenizer.fit(["we mend the roads"])
    inputs = read_words("We mend the old roads.", tokenizer, 4, ", as in training")
    assert inputs.tokens == [["We <unk>", "mend", "the", "old <unk>"]]
    assert [ids.tolist() for ids in inputs.ids] == [[tokenizer.encode(w)[0] for w in ("We", "mend", "the", "old")]]
    assert inputs.notes[0] == "the first 4 of its 6 words are read, as in training"
    assert inputs.notes[1:] == ["not in the vocabulary, read as <unk>: We, old"]
    assert read_words("we mend", tokenizer, 4).notes == []


def test_the_note_on_unknown_words_is_short() -> None:
    words = [*(f"w{k}" for k in range(25)), "x" * 40]
    note = note_unknown(words, [1] * 26)
    assert note is not None and "w19 and 6 more" in note and "w20" not in note
    assert note_unknown(words, [7] * 26) is None


@pytest.mark.parametrize("text", ["a|b*c_d`e<f>[g]#", "😀 שלום"])
def test_words_are_not_markdown(text: str) -> None:
    import markdown

    assert html.unescape(markdown.markdown(escape_markdown(text))) == f"<p>{text}</p>"
