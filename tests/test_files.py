"""Atomic writing, folders that commands write to, and names of places."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from conftest import group
from kills import count_points, killed_at

from speechformer.corpora import files
from speechformer.corpora.files import OutputFolder, atomic_write
from speechformer.corpora.load import load
from speechformer.errors import UserError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def names(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir()]


def write(target: Path) -> None:
    with atomic_write(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(target: Path) -> None:
    """It is killed before each operation on a file, and halfway through its write."""
    points = count_points(lambda: write(target), target.parent)
    assert points >= 4 and target.read_bytes() == b"new" and names(target) == ["file"]
    for point in range(1, points + 1):
        target.write_bytes(b"old")
        killed_at(lambda: write(target), target.parent, point)
        assert target.read_bytes() == b"old"
    write(target)
    assert names(target) == ["file"]  # what the killed ones left is gone


def test_of_two_writers_at_once_one_fails_and_the_file_is_whole(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError) as error, atomic_write(target) as first:
        first.write(b"first")
        monkeypatch.setattr(files.os, "getpid", lambda: 7)
        write(target)
    assert error.value.filename == str(target)
    assert target.read_bytes() == b"new" and names(target) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_the_error_names_it(
    call: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError) as error:
        write(target)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(target))
    assert target.read_bytes() == b"old" and names(target) == ["file"]


def test_an_error_names_the_target_unless_it_is_of_another_file(target: Path) -> None:
    another, nowhere = target.with_name("another"), target / "nowhere"
    with pytest.raises(FileNotFoundError) as error, atomic_write(target):
        another.read_bytes()
    assert error.value.filename == str(another) and names(target) == ["file"]
    with pytest.raises(NotADirectoryError) as error, atomic_write(nowhere):
        pass
    assert error.value.filename == str(nowhere)


def test_a_writer_deletes_only_what_killed_writers_left(target: Path) -> None:
    left = ("file.01234567.partial", "other.01234567.partial", "file.precious.partial")
    leftover, other, users = (target.with_name(name) for name in left)
    for path in (leftover, other, users):
        path.write_bytes(b"half")
    write(target)
    assert not leftover.exists() and all(path.exists() for path in (other, users))


def test_an_output_folder_takes_only_what_a_command_of_ours_has_written(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "new")
    for name in "ab":
        output.file(f"tables/{name}.csv").write_text("1")
    (tmp_path / "new" / "tables" / "mine.csv").write_text("precious")
    again = OutputFolder(tmp_path / "new")
    again.file("tables/a.csv").write_text("2")
    again.remove_stale("tables/*.csv")
    left = {path.name: path.read_text() for path in (tmp_path / "new" / "tables").iterdir()}
    assert left == {"a.csv": "2", "mine.csv": "precious"}
    with pytest.raises(UserError, match=r"mine.csv is there already, and speechformer has not written it"):
        again.file("tables/mine.csv")
    with pytest.raises(UserError, match="a.csv is a file; name a folder"):
        OutputFolder(tmp_path / "new" / "tables" / "a.csv")


KINDS = {"speeches": "speeches", "text": "texts", "ted": "pairs"}  # `task.data` of each corpus


@pytest.mark.parametrize("name", KINDS)
def test_a_corpus_edited_in_place_is_another_one(name: str, little: Path, little_pairs: Path, tmp_path: Path) -> None:
    """Also if its size and the time of the change stay."""
    folder = Path(shutil.copytree(little_pairs if name == "ted" else little, tmp_path / "corpus"))
    corpus = group("corpus", name) | {"root": str(folder), "classes": ["a", "b", "c"]}
    config = {"task": {"name": "", "data": KINDS[name]}, "corpus": corpus}
    seen = {load(config).sha256}
    files = sorted(folder.glob("*_LM*.txt" if name == "text" else "*.*"))
    for path in files:
        before, content = path.stat(), path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        seen.add(load(config).sha256)
    assert len(seen) == len(files) + 1 > 4


def test_results_name_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "/data/all/speeches": "$SPEECHFORMER_DATA/speeches",
        "/data/allegro": "/data/allegro",
        "/home/me/.cache/speechformer/ted": "~/.cache/speechformer/ted",
    }
    monkeypatch.setenv("HOME", "/home/me")
    for folder in ("/data/all", "/data/all/"):
        monkeypatch.setenv("SPEECHFORMER_DATA", folder)
        assert {place: files.on_any_machine(place) for place in said} == said
    monkeypatch.delenv("SPEECHFORMER_DATA")
    assert files.on_any_machine("/data/all/speeches") == "/data/all/speeches"
