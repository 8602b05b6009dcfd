"""Atomic writing: a reader sees the old content or the new one, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speechformer.corpora import files
from speechformer.corpora.files import OutputFolder, atomic_write
from speechformer.errors import UserError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_the_file_is_replaced_when_the_block_ends(target: Path) -> None:
    with atomic_write(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new" and [path.name for path in target.parent.iterdir()] == ["file"]


def test_two_writers_do_not_share_a_temporary_file(target: Path) -> None:
    with atomic_write(target) as first, atomic_write(target) as second:
        first.write(b"first")
        second.write(b"second")
    assert target.read_bytes() == b"first"  # its block ended last


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_the_error_names_it(
    call: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError) as error, atomic_write(target) as file:
        file.write(b"new")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(target))
    assert target.read_bytes() == b"old" and [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_write_that_fails_names_the_target(target: Path) -> None:
    """Oracle: Linux's /dev/full, whose every write fails with ENOSPC."""
    with pytest.raises(OSError) as error, atomic_write(target), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"new")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(target))


def test_an_exception_in_the_block_is_raised_and_changes_nothing(target: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write(target) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError) as error, atomic_write(target):
        (target.parent / "another").read_bytes()  # an error of another file stays what it is
    assert error.value.filename == str(target.parent / "another")
    assert target.read_bytes() == b"old" and [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_missing_folder_is_an_error_that_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error, atomic_write(tmp_path / "nowhere" / "file"):
        pass
    assert error.value.filename == str(tmp_path / "nowhere" / "file")


def test_leftovers_of_killed_processes_are_deleted(target: Path) -> None:
    names = ("file.01234567.partial", "other.01234567.partial", "file.precious.partial")
    leftover, other, users = (target.with_name(name) for name in names)
    for path in (leftover, other, users):
        path.write_bytes(b"half")
    with atomic_write(target) as under_way:
        under_way.write(b"first")
        with atomic_write(target) as file:
            file.write(b"new")
        assert (
            not leftover.exists() and other.exists() and users.exists() and Path(under_way.name).exists()
        )  # the last is written to
    assert target.read_bytes() == b"first"


def test_a_temporary_file_that_is_deleted_before_it_is_locked_is_made_anew(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file, deleted = files.lock_file, []

    def late(file: Any) -> None:
        if not deleted:
            deleted.append(file.name)
            os.unlink(file.name)
        lock_file(file)

    monkeypatch.setattr(files, "lock_file", late)
    with atomic_write(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new" and file.name not in deleted


def test_a_pipe_with_the_name_of_a_temporary_file_is_left_alone(target: Path) -> None:
    os.mkfifo(target.with_name("file.01234567.partial"))
    with atomic_write(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new" and target.with_name("file.01234567.partial").is_fifo()


def test_a_crash_in_the_middle_keeps_the_old_file(target: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from speechformer.corpora.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new'); file.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, target]).returncode == 9
    assert target.read_bytes() == b"old"


def test_an_output_folder_takes_only_what_a_command_of_ours_has_written(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "new")
    output.file("tables/a.csv").write_text("1")
    output.file("tables/b.csv").write_text("1")
    (tmp_path / "new" / "tables" / "mine.csv").write_text("precious")
    again = OutputFolder(tmp_path / "new")
    again.file("tables/a.csv").write_text("2")
    again.remove_stale("tables/*.csv")
    left = {path.name: path.read_text() for path in (tmp_path / "new" / "tables").iterdir()}
    assert left == {"a.csv": "2", "mine.csv": "precious"}
    with pytest.raises(UserError, match=r"mine.csv is there already, and speechformer has not written it"):
        again.file("tables/mine.csv")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "broken link", "not listed"])
def test_what_took_the_place_of_an_output_is_left_alone(kind: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "out", tmp_path / "target"
    if kind != "not listed":  # we have written it once, and it has been replaced since
        OutputFolder(folder).file("a").touch()
        (folder / "a").unlink()
    else:
        folder.mkdir()
    if kind == "folder":
        (folder / "a").mkdir()
    elif kind == "link":
        target.write_text("precious")
        (folder / "a").symlink_to(target)
    elif kind == "broken link":
        (folder / "a").symlink_to(target)
    elif kind == "not listed":
        (folder / "a").write_text("precious")
    if kind == "file":  # a file of the name that we write is ours
        assert OutputFolder(folder).file("a") == folder / "a"
        return
    with pytest.raises(UserError, match="a is there already"):
        OutputFolder(folder).file("a")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"files": 3}', '{"files": {"a": 1}}'])
def test_a_damaged_list_of_outputs_lists_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / ".speechformer.json").write_text(content)
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="a.txt is there already"):
        OutputFolder(tmp_path).file("a.txt")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/data/all/speeches", "$SPEECHFORMER_DATA/speeches"),
        ("/data/all", "$SPEECHFORMER_DATA"),
        ("/data/allegro", "/data/allegro"),
        ("/home/me/.cache/speechformer/ted", "~/.cache/speechformer/ted"),
        ("made by the package, seed 0", "made by the package, seed 0"),
    ],
)
def test_results_name_no_folder_of_this_machine(place: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for folder in ("/data/all", "/data/all/"):
        monkeypatch.setenv("SPEECHFORMER_DATA", folder)
        assert files.on_any_machine(place) == said
    monkeypatch.delenv("SPEECHFORMER_DATA")
    assert files.on_any_machine("/data/all/speeches") == "/data/all/speeches"
