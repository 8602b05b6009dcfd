"""Downloads are checked: a test server on this machine stands in for the public one."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from speechformer import download as module
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.download import SPEECHES, TED, download
from speechformer.errors import UserError

CONTENT = {"a.txt": b"some words\n", "b.txt": b"more words\n"}
HASHES = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


class Quiet(SimpleHTTPRequestHandler):
    """A server of a folder that notes what it is asked for."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The folder of the test server."""
    for name, content in CONTENT.items():
        (tmp_path / "served").mkdir(exist_ok=True)
        (tmp_path / "served" / name).write_bytes(content)
    return tmp_path / "served"


@pytest.fixture
def source(served: Path) -> Iterator[str]:
    """The URL of that server."""
    Quiet.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_files_are_downloaded_once(source: str, tmp_path: Path) -> None:
    for _ in range(2):
        download(source, HASHES, tmp_path / "to")
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == CONTENT
    assert len(Quiet.asked) == 2


def test_a_file_that_differs_is_an_error_and_is_not_written(source: str, served: Path, tmp_path: Path) -> None:
    (served / "b.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match=r"hash of downloaded file \(b\.txt\) does not match"):
        download(source, HASHES, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a.txt"]
    (tmp_path / "to" / "a.txt").write_bytes(b"precious")
    with pytest.raises(UserError, match="a.txt is there already, but it is another file"):
        download(source, HASHES, tmp_path / "to")
    assert (tmp_path / "to" / "a.txt").read_bytes() == b"precious"


def test_what_cannot_be_downloaded_is_one_sentence(source: str, tmp_path: Path) -> None:
    for url, files, message in (
        (source, {"c.txt": "0" * 64}, r"404.*c\.txt; check the network and the URL, .*by hand"),
        ("http://127.0.0.1:9", HASHES, "check the network"),
        ("nowhere", HASHES, "nowhere: .*check the network and the URL"),
    ):
        with pytest.raises(UserError, match=message):
            download(url, files, tmp_path / "to")
    assert not list(tmp_path.glob("to/*"))


@pytest.mark.parametrize(("name", "licence"), [("speeches", "Apache-2.0"), ("ted", "CC BY-NC-ND 4.0")])
def test_the_command_line_prints_the_licence_and_the_folder(
    name: str,
    licence: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setitem(module.SOURCES, name, module.SOURCES[name]._replace(files=HASHES))
    monkeypatch.setattr(sys, "argv", ["download", name, "--source", source, "--to", str(tmp_path / "to")])
    module.main()
    printed = capsys.readouterr()
    assert licence in printed.out and f"2 files in {tmp_path / 'to'}" in printed.out
    assert "100%" in printed.err  # the progress bar


def test_the_pinned_hashes_are_those_of_the_real_files(speeches: Corpus, ted_pairs: Pairs) -> None:
    for corpus, files in ((speeches, SPEECHES), (ted_pairs, TED)):
        for name, expected in files.items():
            assert hashlib.sha256((Path(corpus.where) / name).read_bytes()).hexdigest() == expected
