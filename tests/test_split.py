"""One text for each author becomes train and test files without leaks. Oracles: `audit`, sets of words."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import TINY, compose
from hypothesis import given, settings
from hypothesis import strategies as st

from speechformer.audit import audit
from speechformer.corpora.duplicates import NEAR
from speechformer.corpora.load import load
from speechformer.corpora.split import main, read_texts, split, write
from speechformer.errors import UserError
from speechformer.training.run import execute

ANN = "Dr. Vance mended the\nharbours of Orr. We will go on! Will we?\n\nThank you. The sea is ours, and the wind\n"
BÓB = "The wheat grows high. THANK YOU! Rain comes late this year. * * *\n\nOur schools wait. The wheat grows low."


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name, text in {"ann": ANN, "bób": BÓB}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def test_a_text_is_read_as_sentences_or_as_lines(texts: Path) -> None:
    own, wordless = read_texts(texts, by_line=False)
    assert own["ann"] == [
        "Dr. Vance mended the harbours of Orr.",
        "We will go on!",
        "Will we?",
        "Thank you.",
        "The sea is ours, and the wind",
    ]
    assert wordless == 1 and own["bób"][1:3] == ["THANK YOU!", "Rain comes late this year."]
    assert read_texts(texts, by_line=True)[0]["ann"][0] == "Dr. Vance mended the"


def test_the_files_train_without_leaks(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["split", str(texts), str(tmp_path / "out"), "--test", "0.4"])
    main()
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:4] == ["python", "-m", "speechformer.train", "corpus=speeches"]
    assert words[5] == 'corpus.classes=[ann,"bób"]'
    config = compose(*words[3:])
    leaks = audit(load(config))["between"]  # type: ignore[arg-type]
    assert set(leaks) == {"test_CLS.tsv", "test_LM_ann.txt", "test_LM_bób.txt"}
    assert all(set(kinds.values()) == {0} for others in leaks.values() for kinds in others.values())
    for task in ("task=classify", "task=lm"):
        result = execute(compose(*TINY, *words[3:], task, "trainer.max_steps=2", "block_size=8"), tmp_path / task)
        assert result["status"] == "finished"
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    write(texts, tmp_path / "out", 0.4, 0, by_line=False)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before
    write(texts, tmp_path / "out", 0.4, 1, by_line=False)
    assert (tmp_path / "out" / "test_CLS.tsv").read_bytes() != before["test_CLS.tsv"]


WORDS = st.sampled_from(["The", "the", "sea", "wheat", "roads", "ÉTÉ", "été", "and", "we", "mend", "it's"])
SENTENCES = st.lists(st.lists(WORDS, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from("abcd"), SENTENCES, min_size=2), st.floats(0.01, 0.99), st.integers())
def test_no_sentence_of_test_is_in_train(texts: dict[str, list[str]], share: float, seed: int) -> None:
    """Oracle: words by a definition of their own, and the Jaccard index over sets."""
    try:
        train, test, near = split(texts, share, seed)
    except UserError as error:
        assert re.match(r"[a-d]\.txt has \d+ sentences, of which", str(error))
        return
    bags = [
        [set(re.findall(r"[a-zé]+", text.lower())) for own in part.values() for text in own] for part in (train, test)
    ]
    assert all(len(a & b) / len(a | b) < NEAR for a in bags[0] for b in bags[1])
    assert sum(map(len, bags)) + near == sum(map(len, texts.values()))
    for name, sentences in texts.items():
        assert train[name] and test[name]
        assert [text for text in sentences if text in set(test[name])] == test[name]  # all copies, in order


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has 0 .txt files; put one for each author there, of at least two"),
        ({"ann.txt": b"One. Two."}, "has 1 .txt files"),
        ({"ann.txt": b"One.", "bob.txt": b"One. Two."}, "ann.txt has 1 sentences, of which 1 are left to train"),
        ({"ann.txt": b"One. Two.", "bob.txt": b""}, "bob.txt:1: the file is empty"),
        ({"ann.txt": b"One. Two.", "bob.txt": b"\n\n"}, "bob.txt has 0 sentences"),
        ({"ann.txt": b"One. Two.", "bob.txt": b"a\xff"}, "bob.txt:1: byte 0xff is not UTF-8"),
        ({"ann.txt": b"One. Two.", "1.txt": b"Three. Four."}, "1.txt: rename it to the name of its author"),
        ({"ann.txt": b"One. Two.", "train_LM.txt": b"Three. Four."}, "train_LM.txt: rename it to the name"),
        ({"ann.txt": b"Yes. No.", "bob.txt": b"yes! YES?"}, "to test on without leaks"),
    ],
)
def test_what_cannot_be_split_is_an_error(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        write(tmp_path / "texts", tmp_path / "out", 0.2, 0, by_line=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="holds the texts; name another folder"):
        write(tmp_path / "texts", tmp_path / "texts", 0.2, 0, by_line=False)
