"""Strict reading: an error names the invalid line; every valid form of a file gives the same corpus."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import socket
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


def read(**changes: bytes) -> Corpus:
    files = {**FILES, **{name.replace("__", "."): content for name, content in changes.items()}}
    return parse(files, "speeches", "here", CLASSES)


def test_files_are_read_as_they_are() -> None:
    corpus = read()
    assert corpus.classify_train == [(0, "One two."), (1, "Three, four.")]
    assert corpus.classify_test == [(1, "Five.")]
    assert corpus.lm_train == ["One two.", "Three été."]
    assert corpus.lm_test == {"ann": ["Six."], "bob": ["Seven."]}


@pytest.mark.parametrize(
    "form",
    [
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: content.rstrip(b"\n"),
        lambda content: content.replace(b"\n", b"\r"),
        lambda content: b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n").rstrip(b"\r\n"),
    ],
)
def test_byte_order_mark_line_ends_and_final_newline_make_no_difference(form: object) -> None:
    files = {name: form(content) for name, content in FILES.items()}  # type: ignore[operator]
    other = parse(files, "speeches", "here", CLASSES)
    expected = read()
    assert (other.classify_train, other.lm_train, other.lm_test) == (
        expected.classify_train,
        expected.lm_train,
        expected.lm_test,
    )
    assert other.sha256 != expected.sha256  # because the bytes differ


def test_only_newlines_end_a_line() -> None:
    """Oracle: `io.StringIO`, which reads universal newlines as `open` does."""
    text = "before\u2028after\u0085and\v\fon\x1cto\u2029the end"
    assert list(io.StringIO(text, newline=None)) == [text]
    assert read(train_LM__txt=text.encode()).lm_train == [text]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train_CLS__tsv", b"0\tOne.\nTwo.\n", r"here/train_CLS\.tsv:2: expected `label<TAB>text`, found no tab"),
        (
            "train_CLS__tsv",
            b"0\tOne.\n2\tTwo.\n",
            r"train_CLS\.tsv:2: label '2' is not one of 0 \(ann\), 1 \(bob\)",
        ),
        ("test_CLS__tsv", b"Ann\tOne.\n", r"test_CLS\.tsv:1: label 'Ann'"),
        ("test_CLS__tsv", b"-1\tOne.\n", r"test_CLS\.tsv:1: label '-1'"),
        ("test_CLS__tsv", b"0\tOne.\n1\t \n", r"test_CLS\.tsv:2: there is no text after the label"),
        ("test_CLS__tsv", b"0\n", r"test_CLS\.tsv:1: expected `label<TAB>text`, found no tab"),
        ("test_CLS__tsv", b"\tOne.\n", r"test_CLS\.tsv:1: label ''"),
        ("train_LM__txt", b"", r"train_LM\.txt:1: the file is empty"),
        ("train_LM__txt", b"\xef\xbb\xbf\n", r"train_LM\.txt:1: the line has no text"),
        ("train_LM__txt", b"One.\n\nTwo.\n", r"train_LM\.txt:2: the line has no text"),
        ("test_LM_ann__txt", b"One.\nTwo \xff.\n", r"test_LM_ann\.txt:2: byte 0xff is not UTF-8"),
        ("train_LM__txt", "One.\n".encode("utf-16-le"), r"train_LM\.txt:1: there is a NUL character"),
        ("train_LM__txt", b"One.\r\nTwo.\rThree\0.", r"train_LM\.txt:3: there is a NUL character"),
        ("train_LM__txt", b"One.\nTwo.\rThree.\n", r"train_LM\.txt:2: there is a carriage return"),
        ("train_LM__txt", b"One.\r\r\nTwo.\r\r\n", r"train_LM\.txt:1: there is a carriage return"),
        ("train_LM__txt", b"One.\r\rTwo.\r", r"train_LM\.txt:2: the line has no text"),
    ],
)
def test_an_error_names_the_file_and_the_line(file: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read(**{file: content})
    assert "\n" not in str(error.value)


def test_labels_are_numbers_or_names() -> None:
    """In either of the forms that Unicode has for an accent; a label that could be both is an error."""
    text = "0\tOne.\nbo\u0301b\tTwo.\nbób\tThree.\n ann \tFour.\n"
    corpus = parse({"train_CLS.tsv": text.encode()}, "speeches", "here", ["ann", "bób"])
    assert [label for label, _ in corpus.classify_train] == [0, 1, 1, 0]
    years = parse({"train_CLS.tsv": b"2019\tOne.\n2020\tTwo.\n"}, "speeches", "here", ["2019", "2020"])
    assert [label for label, _ in years.classify_train] == [0, 1]
    parse({"train_CLS.tsv": b"0\tOne.\n"}, "speeches", "here", ["0", "1"])
    with pytest.raises(UserError, match=r"train_CLS\.tsv:1: label '2' is the number of one class and the name"):
        parse({"train_CLS.tsv": b"2\tOne.\n1\tTwo.\n"}, "speeches", "here", ["1", "2", "3"])


def test_any_number_of_classes_and_names() -> None:
    labels = b"".join(b"%d\tsentence %d\n" % (k, k) for k in range(12))
    files = {"train_CLS.tsv": labels, **{f"test_LM_n{k}.txt": b"x\n" for k in range(5)}}
    corpus = parse(files, "speeches", "here", [f"c{k}" for k in range(12)])
    assert len(corpus.classify_train) == 12 and len(corpus.lm_test) == 5


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "notes.md").write_text("not a part of the corpus")
    (folder / "folder.txt").mkdir()
    return folder


@pytest.fixture
def no_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("speechformer.corpora.files.cache_directory", lambda: tmp_path / "cache")
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return tmp_path


SPEECHES = {"name": "speeches", "root": None, "classes": CLASSES}
AUTO = {"name": "auto", "speeches": SPEECHES, "sample": {"seed": 0, "classes": list(sample.SPEAKERS)}}


def test_the_search_order_is_root_environment_cache(no_corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="SPEECHFORMER_DATA.*user cache.*speechformer.download speeches"):
        load_corpus(SPEECHES)
    cache = write(no_corpora / "cache" / "speeches")
    assert load_corpus(SPEECHES).where == str(cache.resolve())
    data = write(no_corpora / "data" / "speeches")
    monkeypatch.setenv(ENVIRONMENT, str(data.parent))
    assert load_corpus(SPEECHES).where == str(data.resolve())
    root = write(no_corpora / "mine")
    assert load_corpus({**SPEECHES, "root": str(root)}).where == str(root.resolve())
    with pytest.raises(UserError, match=r"corpus\.root \(.*nowhere\)"):
        load_corpus({**SPEECHES, "root": str(no_corpora / "nowhere")})


def deny(path: Path, name: str, read: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
    """As if the user may not read one file; root, who may run the tests, can read any."""
    if path.name == name:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return read(path)


KINDS = ["broken link", "folder", "pipe", "socket", "device", "unreadable", "loop", "newline"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train_LM.txt", "test_LM_cy.txt"])
def test_what_has_the_name_of_a_file_is_read_or_is_an_error(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe has no writer: reading it would never end."""
    path = write(tmp_path / "mine") / name
    path.unlink(missing_ok=True)
    if kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # its path is at most 108 characters long
        socket.socket(socket.AF_UNIX).bind(path.name)
    elif kind == "newline":
        path = path.with_name("test_LM_a\nb.txt")
        path.write_text("Eight.")
    else:
        path.write_text("Eight.")
        monkeypatch.setattr(Path, "read_bytes", functools.partialmethod(deny, name))
    with pytest.raises(UserError, match=re.escape(repr(str(path))[1:-1])) as error:
        load_corpus({**SPEECHES, "root": str(path.parent)})
    assert "remove it" in str(error.value) or "rename it" in str(error.value)


@pytest.mark.parametrize("name", ["test_LM_c.TXT", "TEST_LM_b.txt", "Train_cls.tsv", "test_LM_.txt"])
def test_a_file_with_nearly_the_name_of_a_speech_file_is_an_error(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    (folder / name).write_text("Eight.")
    with pytest.raises(UserError, match=re.escape(f"{folder / name}: rename it to train_CLS.tsv")):
        load_corpus({**SPEECHES, "root": str(folder)})


@pytest.mark.parametrize("kind", ["broken link", "file", "pipe"])
def test_what_has_the_name_of_the_folder_is_read_or_is_an_error(
    kind: str, no_corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(no_corpora))
    path = no_corpora / "speeches"
    {"broken link": lambda: path.symlink_to("x"), "file": path.touch, "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(UserError, match=f"speeches is a {kind.replace('link', 'symbolic link')}, "):
        load_corpus(AUTO)


def test_auto_loads_the_speeches_or_else_the_sample(no_corpora: Path) -> None:
    assert load_corpus(AUTO).name == "sample"
    nowhere = {**SPEECHES, "root": str(no_corpora / "nowhere")}
    with pytest.raises(UserError, match=r"corpus\.root"):  # a path that is set is not ignored silently
        load_corpus({**AUTO, "speeches": nowhere})
    write(no_corpora / "cache" / "speeches")
    assert load_corpus(AUTO).name == "speeches"


def test_counts_of_the_real_speeches(speeches: Corpus) -> None:
    """Oracle: `wc -l` and `cut -f1 | sort | uniq -c` on the public copy."""
    labels = [label for label, _ in speeches.classify_train]
    assert [labels.count(k) for k in range(3)] == [934, 539, 619]
    assert (len(speeches.classify_test), len(speeches.lm_train)) == (750, 1553)
    assert {name: len(lines) for name, lines in speeches.lm_test.items()} == {
        "hbush": 250,
        "obama": 250,
        "wbush": 250,
    }
