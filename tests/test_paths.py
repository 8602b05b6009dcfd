"""`~` is the user's home folder wherever a path is read, also where no shell has seen it. Oracle: `$HOME` itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import speechformer
from speechformer import train
from speechformer.corpora.files import OutputFolder, find_folder
from speechformer.errors import ArgumentParser, UserError
from speechformer.models.pretrained import settings_of
from speechformer.paths import expand_override, expand_uri
from speechformer.report.page import load_studies


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a home" / "x").mkdir(parents=True)
    return tmp_path / "a home"


@pytest.mark.parametrize("words", [["~/x"], ["--place=~/x"], ["--place", "~/x"]])
def test_an_argument_of_a_command(words: list[str], home: Path) -> None:
    parser = ArgumentParser()
    parser.add_argument("place" if len(words) == 1 and words[0][0] == "~" else "--place", type=Path)
    assert parser.parse_args(words).place == home / "x"


@pytest.mark.parametrize(
    "key", ["hydra.run.dir", "hydra.sweep.dir", "+hydra.launcher.submitit_folder", "corpus.root", "init_from"]
)
@pytest.mark.parametrize("value", ["~/x", '"~/x"', "'~/x'"])
def test_a_path_of_a_key(key: str, value: str, home: Path) -> None:
    parsed = OverridesParser.create().parse_override(expand_override(f"{key}={value}"))
    assert (parsed.get_key_element(), parsed.value()) == (key, str(home / "x"))


@pytest.mark.parametrize("word", ["hydra.run.dir=a/~/x", "study=~x", "hydra.run.dir=~x/..", "~hydra.run.dir", "-m"])
def test_another_word_stays(word: str) -> None:
    """There is no user x."""
    assert expand_override(word).replace('"', "") == word


@pytest.mark.parametrize("scheme", ["", "sqlite:///", "file://"])
def test_a_uri(scheme: str, home: Path) -> None:
    assert expand_uri(f"{scheme}~/x") == f"{scheme}{home}/x"
    assert expand_uri("https://host/~user") == "https://host/~user"


def test_the_command_makes_its_folder_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train", 'hydra.run.dir="~/x/run"', "width=-1"])
    with pytest.raises(SystemExit, match="width must be"):
        train.main()
    assert not Path("~").exists()


READERS: dict[str, Callable[[], Any]] = {
    "load": lambda: speechformer.load("~/x"),
    "load_pretrained": lambda: speechformer.load_pretrained("~/x"),
    "read_results": lambda: speechformer.read_results("~/x"),
    "load_studies": lambda: load_studies(["~/x"]),
    "init_from": lambda: settings_of({"init_from": "~/x"}),
    "corpus.root": lambda: find_folder({"name": "a", "root": "~/x"}, "a", "a", lambda path: False, "{}"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_a_folder_looks_there(reader: str, home: Path) -> None:
    """The folder is empty: the error names it, or does not say that it is missing."""
    with pytest.raises(UserError) as error:
        READERS[reader]()
    assert str(home / "x") in str(error.value) or "does not exist" not in str(error.value)


def test_what_writes_a_folder_writes_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OutputFolder(Path("~/x")).file("a.txt").touch()
    assert (home / "x" / "a.txt").exists()
    written = []
    monkeypatch.setattr("speechformer.training.run.execute", lambda cfg, folder, *_, **__: written.append(folder))
    monkeypatch.setattr("speechformer.analysis.load.load", written.append)
    speechformer.fit("corpus=sample", directory="~/x/run")
    assert written[0] == home / "x" / "run"


def test_the_folder_of_corpora(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHFORMER_DATA", "~")
    found, _ = find_folder({"name": "a", "root": None}, "a", "x", lambda path: True, "{}")
    assert found == home / "x"
