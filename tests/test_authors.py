"""One text for each author becomes train and test files without leaks. Oracles: `audit`, sets of words."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import compose
from hypothesis import given, settings
from hypothesis import strategies as st

from speechformer.audit import audit
from speechformer.corpora.authors import main, read_rows, split, write
from speechformer.corpora.duplicates import NEAR
from speechformer.corpora.load import load
from speechformer.errors import UserError

ANN = "Dr. Vance mended the\nharbours of Orr. We will go on! Will we?\n\nThank you. The sea is ours, and the wind\n"
BÓB = "The wheat grows high. THANK YOU! Rain comes late this year. * * *\n\nOur schools wait. The wheat grows low."


def put(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def test_a_text_is_read_as_sentences_or_as_lines(tmp_path: Path) -> None:
    texts = put(tmp_path / "texts", ann=ANN, bób=BÓB)
    sentences = read_rows(texts, by_line=False)
    first, *others = [text for author, text in sentences if author == "ann"]
    assert first == "Dr. Vance mended the harbours of Orr."
    assert others == ["We will go on!", "Will we?", "Thank you.", "The sea is ours, and the wind"]
    assert [text for _, text in sentences[6:9]] == ["THANK YOU!", "Rain comes late this year.", "Our schools wait."]
    assert sentences[6][0] == "bób" and read_rows(texts, by_line=True)[0] == ("ann", "Dr. Vance mended the")


def test_the_files_have_no_leaks_and_depend_on_the_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    texts, out = put(tmp_path / "texts", ann=ANN, bób=BÓB), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["authors", str(texts), str(out), "--test", "0.4"])
    main()
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[2:4] + words[5:] == ["speechformer.train", "corpus=speeches", 'corpus.classes=["ann","bób"]']
    corpus = load(compose(*words[3:]))  # type: ignore[arg-type]
    leaks = audit(corpus)["between"]  # type: ignore[arg-type]
    assert {row.partition(" ")[0] for row in leaks} == {"test_CLS.tsv", "test_LM_ann.txt", "test_LM_bób.txt"}
    assert not any(found[kind] for found in leaks.values() for kind in ("exact", "same", "near"))
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    write(texts, out, 0.4, 0, by_line=False)
    assert {name: (out / name).read_bytes() for name in before} == before
    write(texts, out, 0.4, 1, by_line=False)
    assert (out / "test_CLS.tsv").read_bytes() != before["test_CLS.tsv"]


WORDS = st.sampled_from(["The", "the", "sea", "wheat", "roads", "ÉTÉ", "été", "and", "we", "mend", "it's"])
SENTENCES = st.lists(st.lists(WORDS, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from("abcd"), SENTENCES, min_size=2), st.floats(0.01, 0.99), st.integers())
def test_no_sentence_of_test_is_in_train(texts: dict[str, list[str]], share: float, seed: int) -> None:
    """Oracle: words by a definition of their own, and the Jaccard index over sets."""
    rows = [(name, text) for name, sentences in texts.items() for text in sentences]
    try:
        train, test = split(rows, share, seed)
    except UserError as error:
        assert re.match(r"[a-d]\.txt: no sentence is left to train or to test on", str(error))
        return
    bags = [[set(re.findall(r"[a-zé]+", text.lower())) for _, text in part] for part in (train, test)]
    assert all(len(a & b) / len(a | b) < NEAR for a in bags[0] for b in bags[1])
    assert {name for name, _ in train} == {name for name, _ in test} == set(texts)
    tested = {text for _, text in test}
    assert [row for row in rows if row[1] in tested] == test  # all copies, in order
    assert [row for row in rows if row in train] == train


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"ann": "One. Two."}, "has 1 .txt files; put one for each author there, of at least two"),
        ({"ann": "One.", "bob": "One. Two."}, "ann.txt: no sentence is left to train or to test on"),
        ({"ann": "Yes. No.", "bob": "yes! YES?"}, "to test on without leaks"),
    ],
)
def test_what_cannot_be_split_is_an_error(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "texts", **texts)
    with pytest.raises(UserError, match=re.escape(message)):
        write(folder, tmp_path / "out", 0.2, 0, by_line=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--test must be between 0 and 1, not 2"):
        write(folder, tmp_path / "out", 2, 0, by_line=False)
