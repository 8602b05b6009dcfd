"""The downloader, against a server on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import Command

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
def served(tmp_path: Path) -> Path:
    """The folder of a server."""
    (tmp_path / "served").mkdir()
    for name, content in CONTENT.items():
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


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    """Serve a file that has no end, a byte every 50 ms; yield the URL."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection = listening.accept()[0]
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


def test_files_are_downloaded_once(source: str, tmp_path: Path) -> None:
    for _ in range(2):
        download(source, HASHES, tmp_path / "to")
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == CONTENT
    assert len(Quiet.asked) == 2


def test_a_file_that_differs_is_an_error_and_is_not_written(source: str, served: Path, tmp_path: Path) -> None:
    (served / "b.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match="b.txt is not the expected file .its sha256 differs., so it is not written"):
        download(source, HASHES, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a.txt"]
    (tmp_path / "to" / "a.txt").write_bytes(b"precious")
    with pytest.raises(UserError, match="a.txt is there already, but it is another file"):
        download(source, HASHES, tmp_path / "to")
    assert (tmp_path / "to" / "a.txt").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["../a.txt", "/tmp/a.txt", ".", "", "..\\a.txt"])
def test_a_download_stays_in_its_folder(name: str, source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must stay in its folder"):
        download(source, {name: HASHES["a.txt"]}, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_what_cannot_be_downloaded_is_one_sentence(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"c.txt could not be downloaded .*404.*by hand"):
        download(source, {"c.txt": "0" * 64}, tmp_path / "to")
    with pytest.raises(UserError, match="could not be downloaded"):
        download("http://127.0.0.1:9/", HASHES, tmp_path / "to")
    with slow_server() as url, pytest.raises(UserError, match=r"a.txt could not be downloaded \(TimeoutError\)"):
        download(url, HASHES, tmp_path / "to", seconds=0.3)
    monkeypatch.setattr(module, "LARGEST", 5)
    with pytest.raises(UserError, match=r"a.txt could not be downloaded \(it is larger than 5 bytes\)"):
        download(source, HASHES, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_download_that_is_stopped_leaves_nothing(number: int, code: int, tmp_path: Path) -> None:
    with slow_server() as url:
        command = Command("speechformer.download", "speeches", "--source", url, "--to", tmp_path / "to")
        while "0.00" not in command.output()[1] and command.poll() is None:  # the progress bar
            time.sleep(0.02)
        command.send(number)
        done = command.wait()
    assert done.returncode == code and "Traceback" not in done.stderr and not list(tmp_path.iterdir())
    assert number == signal.SIGTERM or done.stderr.endswith("Interrupted.\n")


@pytest.mark.parametrize(("name", "licence"), [("speeches", "Apache-2.0"), ("ted", "CC BY-NC-ND 4.0")])
def test_the_command_line_prints_the_licence_and_the_folder(
    name: str,
    licence: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setitem(module.SOURCES, name, replace(module.SOURCES[name], files=HASHES))
    monkeypatch.setattr(sys, "argv", ["download", name, "--source", source, "--to", str(tmp_path / "to")])
    module.main()
    printed = capsys.readouterr()
    assert licence in printed.out and f"2 files in {tmp_path / 'to'}" in printed.out
    assert "100%" in printed.err  # the progress bar


def test_the_pinned_hashes_are_those_of_the_real_files(speeches: Corpus, ted_pairs: Pairs) -> None:
    for corpus, files in ((speeches, SPEECHES), (ted_pairs, TED)):
        for name, expected in files.items():
            assert hashlib.sha256((Path(corpus.where) / name).read_bytes()).hexdigest() == expected
