"""The downloader, against a server on this machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from speechformer import download as module
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.download import SPEECHES, TED, download
from speechformer.errors import UserError

CONTENT = {"a.txt": b"some words\n", "b.txt": b"others\n"}
HASHES = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        Quiet.asked.append(self.path)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A URL, and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    Quiet.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    server.server_close()


def test_files_are_downloaded_once(source: tuple[str, Path], tmp_path: Path) -> None:
    for _ in range(2):
        download(source[0], HASHES, tmp_path / "to")
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == CONTENT
    assert len(Quiet.asked) == 2


def test_a_file_that_differs_is_an_error_and_is_deleted(source: tuple[str, Path], tmp_path: Path) -> None:
    (source[1] / "b.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match="b.txt is not the expected file .its sha256 differs. and was deleted"):
        download(source[0], HASHES, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a.txt"]


def test_a_file_that_changed_is_downloaded_again(source: tuple[str, Path], tmp_path: Path) -> None:
    download(source[0], HASHES, tmp_path / "to")
    (tmp_path / "to" / "a.txt").write_bytes(b"cut")
    download(source[0], HASHES, tmp_path / "to")
    assert (tmp_path / "to" / "a.txt").read_bytes() == CONTENT["a.txt"]


def test_a_missing_file_and_an_unreachable_server_are_one_sentence(source: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="c.txt could not be downloaded .*404.*by hand"):
        download(source[0], {"c.txt": "0" * 64}, tmp_path / "to")
    with pytest.raises(UserError, match="could not be downloaded"):
        download("http://127.0.0.1:9/", HASHES, tmp_path / "to")


def test_the_command_line_prints_no_traceback(source: tuple[str, Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "speechformer.download", "speeches", "--source", source[0], "--to", tmp_path / "to"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "licence"), [("speeches", "Apache-2.0"), ("ted", "CC BY-NC-ND 4.0")])
def test_the_command_line_prints_the_licence_and_the_folder(
    name: str,
    licence: str,
    source: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    corpus = replace(module.SOURCES[name], files=HASHES)
    monkeypatch.setitem(module.SOURCES, name, corpus)
    monkeypatch.setattr(sys, "argv", ["download", name, "--source", source[0], "--to", str(tmp_path / "to")])
    module.main()
    printed = capsys.readouterr()
    assert licence in printed.out
    assert f"2 files in {tmp_path / 'to'}" in printed.out
    assert "100%" in printed.err  # the progress bar


def test_the_pinned_hashes_are_those_of_the_real_files(speeches: Corpus, ted_pairs: Pairs) -> None:
    for corpus, files in ((speeches, SPEECHES), (ted_pairs, TED)):
        for name, expected in files.items():
            assert hashlib.sha256((Path(corpus.where) / name).read_bytes()).hexdigest() == expected
