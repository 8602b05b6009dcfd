"""Strict reading: an error names the invalid line; every valid form of a file gives the same corpus."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from speechformer.corpora import sample
from speechformer.corpora.files import ENVIRONMENT
from speechformer.corpora.speeches import Corpus, load_corpus, parse
from speechformer.errors import UserError

FILES = {
    "train_CLS.tsv": b"0\tOne two.\n1\tThree, four.\n",
    "test_CLS.tsv": b"1\tFive.\n",
    "train_LM.txt": b"One two.\nThree \xc3\xa9t\xc3\xa9.\n",
    "test_LM_ann.txt": b"Six.\n",
    "test_LM_bob.txt": b"Seven.\n",
}
CLASSES = ["ann", "bob"]


def read(files: dict[str, bytes], classes: list[str] = CLASSES) -> Corpus:
    return parse(FILES | files, "speeches", "here", classes)


@pytest.mark.parametrize(
    "form",
    [
        lambda content: content,
        lambda content: b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"),
        lambda content: content.rstrip(b"\n"),
    ],
)
def test_byte_order_mark_line_ends_and_final_newline_make_no_difference(form: Callable[[bytes], bytes]) -> None:
    corpus = read({name: form(content) for name, content in FILES.items()})
    assert corpus.classify_train == [(0, "One two."), (1, "Three, four.")]
    assert corpus.classify_test == [(1, "Five.")]
    assert corpus.lm_train == ["One two.", "Three été."]
    assert corpus.lm_test == {"ann": ["Six."], "bob": ["Seven."]}
    changed = corpus.sha256 != read({}).sha256  # of the bytes
    assert changed == (form(b"x\n") != b"x\n")


def test_only_newlines_end_a_line() -> None:
    text = "before\u2028after\u0085and\v\fon\x1cto\u2029the end"
    assert read({"train_LM.txt": text.encode()}).lm_train == [text]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train_CLS.tsv", b"0\tOne.\nTwo.\n", "2: expected `label<TAB>text`, found no tab"),
        ("train_CLS.tsv", b"0\tOne.\n2\tTwo.\n", "2: label '2' is not one of 0 (ann), 1 (bob)"),
        ("test_CLS.tsv", b"0\tOne.\n1\t \n", "2: expected `label<TAB>text`, found no text after the label"),
        ("train_LM.txt", b"", "1: the line has no text"),
        ("train_LM.txt", b"One.\n\nTwo.\n", "2: the line has no text"),
        ("test_LM_ann.txt", b"One.\nTwo \xff.\n", "2: byte 0xff is not UTF-8"),
        ("train_LM.txt", b"One.\r\nTwo.\0", "2: there is a NUL character"),
        ("train_LM.txt", b"One.\nTwo.\rThree.\n", "2: there is a carriage return"),
    ],
)
def test_an_error_names_the_file_and_the_line(file: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"here/{file}:{message}")) as error:
        read({file: content})
    assert "\n" not in str(error.value)


def test_labels_are_numbers_or_names() -> None:
    """In either of the forms that Unicode has for an accent; a label that could be both is a name."""
    text = "0\tOne.\nbo\u0301b\tTwo.\nbób\tThree.\n ann \tFour.\n"
    corpus = read({"train_CLS.tsv": text.encode()}, ["ann", "bób"])
    assert [label for label, _ in corpus.classify_train] == [0, 1, 1, 0]
    assert [k for k, _ in read({"train_CLS.tsv": b"2\tOne.\n"}, ["1", "2", "3"]).classify_train] == [1]


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "notes.md").write_text("not a part of the corpus")
    return folder


SPEECHES = {"name": "speeches", "root": None, "classes": CLASSES}
AUTO = {"name": "auto", "speeches": SPEECHES, "sample": {"seed": 0, "classes": list(sample.SPEAKERS)}}


def test_the_search_order_is_root_environment_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is the speeches if there are any, else the sample; a path that is set is not ignored silently."""
    monkeypatch.setattr("speechformer.corpora.files.cache_directory", lambda: tmp_path / "cache")
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert load_corpus(AUTO).name == "sample"
    with pytest.raises(UserError, match="SPEECHFORMER_DATA.*user cache.*speechformer.download speeches"):
        load_corpus(SPEECHES)
    cache = write(tmp_path / "cache" / "speeches")
    assert load_corpus(AUTO).where == str(cache.resolve())
    data = write(tmp_path / "data" / "speeches")
    monkeypatch.setenv(ENVIRONMENT, str(data.parent))
    assert load_corpus(SPEECHES).where == str(data.resolve())
    root = write(tmp_path / "mine")
    assert load_corpus({**SPEECHES, "root": str(root)}).where == str(root.resolve())
    with pytest.raises(UserError, match=r"corpus\.root \(.*nowhere\)"):
        load_corpus({**AUTO, "speeches": {**SPEECHES, "root": str(tmp_path / "nowhere")}})


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (write(tmp_path / "mine") / "test_LM_cy.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"test_LM_cy\.txt cannot be read \(No such file or directory\); correct"):
        load_corpus({**SPEECHES, "root": str(tmp_path / "mine")})


def test_counts_of_the_real_speeches(speeches: Corpus) -> None:
    """Oracle: `wc -l` and `cut -f1 | sort | uniq -c` on the public copy."""
    labels = [label for label, _ in speeches.classify_train]
    assert [labels.count(k) for k in range(3)] == [934, 539, 619]
    assert (len(speeches.classify_test), len(speeches.lm_train)) == (750, 1553)
    sizes = {name: len(lines) for name, lines in speeches.lm_test.items()}
    assert sizes == {"hbush": 250, "obama": 250, "wbush": 250}
