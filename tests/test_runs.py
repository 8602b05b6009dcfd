"""Results on disk, and how the console shows them."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from speechformer import console
from speechformer.corpora import files
from speechformer.runs import folder as runs
from speechformer.runs import identity


def test_a_result_is_json_and_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"status": "finished", "steps": 1}
    runs.write_result(tmp_path, one)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            runs.write_result(tmp_path, {**one, "steps": 2})
    assert runs.read_result(tmp_path) == one
    runs.write_result(tmp_path, {"a": math.nan, "b": [math.inf, 0.5], "é": {"c": -math.inf}})
    text = (tmp_path / "result.json").read_text(encoding="utf-8")
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"a": None, "b": [None, 0.5], "é": {"c": None}}


def test_the_commit_is_that_of_our_checkout_and_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        user = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(
            ["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    (tmp_path / "speechformer").mkdir()
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "speechformer" / "runs" / "identity.py"))
    assert identity.commit.__wrapped__() is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "-A")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    assert identity.commit.__wrapped__() == head
    (tmp_path / "file").write_text("two")
    assert identity.commit.__wrapped__() == f"{head}-dirty"
    installed = tmp_path / "site" / "speechformer" / "runs" / "identity.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(identity, "__file__", str(installed))
    assert identity.commit.__wrapped__() is None


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_of_a_run_has_its_share_of_threads(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first writes `run.json`."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    folder = runs.RunFolder(tmp_path, "1234")
    folder.begin({}, threads=8)
    assert folder.owner["threads"] == 8 and (tmp_path / runs.OWNER).exists() == (rank == "0")
    again = runs.RunFolder(tmp_path, "1234", previous={"threads": 2})
    again.begin({}, threads=8)
    assert again.owner["threads"] == 2


def test_table_lines_up() -> None:
    lines = console.table([("name", "n"), ("a", "1,000"), ("longer", "2")]).splitlines()
    assert lines == ["name        n", "a       1,000", "longer      2"]
