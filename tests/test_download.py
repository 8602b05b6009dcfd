"""The downloader, against a server on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
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


def test_a_file_that_differs_is_an_error_and_is_not_written(source: tuple[str, Path], tmp_path: Path) -> None:
    (source[1] / "b.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match="b.txt is not the expected file .its sha256 differs., so it is not written"):
        download(source[0], HASHES, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a.txt"]


def test_another_file_of_the_name_is_not_overwritten(source: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"precious")
    with pytest.raises(UserError, match="a.txt is there already, but it is another file"):
        download(source[0], HASHES, tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == b"precious"
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match="a.txt is a pipe"):
        download(source[0], HASHES, tmp_path)


def test_the_mode_of_a_file_is_that_of_any_new_file(source: tuple[str, Path], tmp_path: Path) -> None:
    download(source[0], HASHES, tmp_path / "to")
    (tmp_path / "other").touch()
    assert (tmp_path / "to" / "a.txt").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("name", ["../a.txt", "/tmp/a.txt", "..", ".", "", "x/a.txt", "..\\a.txt", "C:\\a.txt"])
def test_a_download_stays_in_its_folder(name: str, source: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must stay in its folder"):
        download(source[0], {name: HASHES["a.txt"]}, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def slow_server() -> tuple[str, socket.socket]:
    """A server that sends a byte every 50 ms, for ever; its URL, and its socket."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection = listening.accept()[0]
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/", listening


def test_a_download_has_a_time_limit_and_a_largest_size(
    source: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, listening = slow_server()
    started = time.monotonic()
    with listening, pytest.raises(UserError, match=r"a.txt could not be downloaded \(TimeoutError\)"):
        download(url, HASHES, tmp_path / "to", seconds=0.3)
    assert time.monotonic() - started < 5
    monkeypatch.setattr(module, "LARGEST", 5)
    with pytest.raises(UserError, match=r"a.txt could not be downloaded \(it is larger than 5 bytes\)"):
        download(source[0], HASHES, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_download_that_is_stopped_leaves_nothing(number: int, code: int, tmp_path: Path) -> None:
    url, listening = slow_server()
    command = [sys.executable, "-m", "speechformer.download", "speeches", "--source", url, "--to", tmp_path / "to"]
    with listening, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()  # the licence
        process.send_signal(number)
        errors = process.communicate(timeout=20)[1]
    assert process.returncode == code and "Traceback" not in errors and not list(tmp_path.iterdir())
    assert number == signal.SIGTERM or errors.endswith("Interrupted.\n")


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
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
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
