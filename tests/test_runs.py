"""Results on disk, and how the console shows them."""

from __future__ import annotations

import json
import math
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

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


def test_a_checkout_that_is_not_installed_says_so_in_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: importlib.metadata, which knows no such distribution; a run must not fail at its end for it."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "speechformer":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    versions = identity.versions.__wrapped__()
    assert versions["speechformer"] == "(not installed)" and versions["torch"] == installed("torch")


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


CONFIG = {"task": {"name": "lm"}, "seed": 0}
BEST = {"metric": "loss", "value": 1.5, "step": 2, "chosen_on": "test"}
ENDED = {"status": "finished", "identity": "1234", "metrics": {"loss": 1.5}, "best": BEST, "steps": 2, "seconds": 3.0}
ENDED |= {"seconds_by_phase": {"training": 3.0}, "tokens_per_second": 9.5, "machine": {"ensemble_size": 1}}
ENDED |= {"config": CONFIG, "summary": [["loss", "1.5"]]}
WITHOUT = [{name: ENDED[name] for name in ENDED if name != key} for key in ENDED if key != "identity"]
FILES: list[Any] = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5, b"\0", os.mkfifo, lambda path: path.symlink_to("x")]
DAMAGED = [*FILES, *WITHOUT, *({**ENDED, key: "x"} for key in ENDED if key != "identity")]
DAMAGED += [{**ENDED, "summary": [[1]]}, {**ENDED, "best": {**BEST, "value": "1"}}, {**ENDED, "seconds": 10**30}]


def own(folder: Path, **options: Any) -> dict[str, Any] | None:
    """The result of a run that has ended; a run that has not begins."""
    with runs.own(folder, CONFIG, "1234", **options) as run_folder:
        if not run_folder.has_ended:
            run_folder.begin(CONFIG, 1)
        return run_folder.result


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def test_a_run_that_has_ended_is_shown(tmp_path: Path) -> None:
    runs.write_result(tmp_path, ENDED)
    result = own(tmp_path)
    assert result == ENDED and "1.5" in console.summary(result)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_result_is_an_error_and_force_runs_anew(content: Any, tmp_path: Path) -> None:
    put(tmp_path / "a" / runs.RESULT, content)
    put(tmp_path / "a" / runs.OWNER, {"identity": "1234", "attempts": 3})
    with pytest.raises(runs.DamagedError, match=r"a/result\.json is damaged: .*\. Restore or remove it\."):
        own(tmp_path / "a")
    assert os.path.lexists(tmp_path / "a" / runs.RESULT)
    assert own(tmp_path / "a", force=True) is None
    assert not os.path.lexists(tmp_path / "a" / runs.RESULT)


@pytest.mark.parametrize("content", [*FILES, {"identity": 1}, {"identity": "1234", "attempts": "x"}])
def test_a_damaged_run_json_is_an_error(content: Any, tmp_path: Path) -> None:
    put(tmp_path / "a" / runs.OWNER, content)
    with pytest.raises(runs.ForeignError, match="holds run.json and no valid run.json"):
        own(tmp_path / "a", force=True)  # nothing says that the folder is ours
    runs.write_result(tmp_path / "a", {**ENDED, "status": "failed"})
    with pytest.raises(runs.DamagedError, match="a/run.json is damaged"):
        own(tmp_path / "a")
    assert own(tmp_path / "a", force=True) is None
    assert runs.read_json(tmp_path / "a" / runs.OWNER, "owner")["attempts"] == 1  # type: ignore[index]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "name", ["config.yaml", "tokenizer.json", "last.ckpt", "best.ckpt", "weights", "tensorboard"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("../precious"), Path.mkdir, Path.touch])
def test_what_no_run_makes_is_an_error_before_anything_is_removed(
    make: Any, name: str, force: bool, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("mine")
    put(tmp_path / "a" / runs.OWNER, {"identity": "1234"})
    (tmp_path / "a" / "metrics.csv").touch()
    make(tmp_path / "a" / name)
    if make == (Path.mkdir if name in ("weights", "tensorboard") else Path.touch):
        assert own(tmp_path / "a", force=force) is None
        return
    with pytest.raises(runs.ForeignError, match=rf"{name} is of a kind that speechformer does not make"):
        own(tmp_path / "a", force=force)
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "a" / "metrics.csv").exists()


@pytest.mark.parametrize("name", ["tensorboard/hparams.yaml", "weights/4.ckpt"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("../../pipe")])
def test_no_run_opens_a_pipe_in_its_folders(make: Any, name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    put(tmp_path / "a" / runs.OWNER, {"identity": "1234"})
    (tmp_path / "a" / name).parent.mkdir()
    make(tmp_path / "a" / name)
    with pytest.raises(runs.ForeignError, match=rf"{name} is of a kind that speechformer does not make"):
        own(tmp_path / "a", force=True)


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    """Numbers and texts that JSON does not have, and those of a config that made a run fail."""
    config = {"seed": 10**30, "study": "a\udcff", "model": math.inf}
    runs.write_result(tmp_path, runs.failure_result(config, None, None, ValueError("\ud800")))
    result = runs.read_result(tmp_path)
    assert result["config"] == {"seed": None, "study": "a?", "model": None} and result["error"] == "?"
    put(tmp_path / runs.RESULT, b"\xef\xbb\xbf" + json.dumps(ENDED).encode())
    assert runs.read_result(tmp_path) == ENDED  # with a byte order mark
