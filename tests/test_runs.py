"""A run's folder: its JSON files, who may write there, and what a forced run does to the one before it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, compose
from kills import count_points, killed_at

from speechformer import console
from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.tasks.classify import Classify
from speechformer.training.run import execute

CONFIG = {"task": {"name": "lm"}, "seed": 0}
BEST = {"metric": "loss", "value": 1.5, "step": 2, "chosen_on": "test"}
ENDED = {"status": "finished", "identity": "1234", "metrics": {"loss": 1.5}, "best": BEST, "steps": 2, "seconds": 3.0}
ENDED |= {"seconds_by_phase": {"training": 3.0}, "tokens_per_second": 9.5, "machine": {"ensemble_size": 1}}
ENDED |= {"config": CONFIG, "summary": [["loss", "1.5"]]}
WITHOUT = {name: ENDED[name] for name in ENDED if name != "status"}
FILES: list[Any] = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5, b"\0", Path.mkdir]
DAMAGED = [*FILES, WITHOUT, {**ENDED, "status": "x"}, {**ENDED, "summary": [[1]]}]
DAMAGED += [{**ENDED, "best": {**BEST, "value": "1"}}]


def own(folder: Path, **options: Any) -> dict[str, Any] | None:
    """Return the result of a run that has ended; a run that has not takes its first step."""
    with runs.own(folder, CONFIG, "1234", **options) as run_folder:
        if not run_folder.has_ended:
            run_folder.begin(CONFIG, 1)
            run_folder.discard_replaced()
        return run_folder.result


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, without the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != runs.LOCK]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_another_run_that_has_ended_is_no_result(tmp_path: Path) -> None:
    put(tmp_path / runs.RESULT, {**ENDED, "identity": "another"})
    with pytest.raises(runs.ForeignError, match="holds another run"):
        own(tmp_path)


@pytest.mark.parametrize("status", ["finished", "diverged", "failed"])
def test_a_run_that_has_ended_is_read_where_nothing_can_be_written(
    status: str, tmp_path: Path, no_locks: None
) -> None:
    put(tmp_path / runs.RESULT, ended := {**ENDED, "status": status})
    before = contents(tmp_path)
    if status == "failed":  # such a run begins anew
        with pytest.raises(UserError, match=r"run\.lock: Permission denied"):
            own(tmp_path)
    else:
        assert own(tmp_path) == ended
        with pytest.raises(UserError, match=r"run\.lock: Permission denied"):
            own(tmp_path, force=True)
    assert contents(tmp_path) == before


def test_a_result_is_json_that_can_be_read_again(tmp_path: Path) -> None:
    """Numbers and texts that JSON does not have, and those of a config that made a run fail."""
    config = {"seed": 3, "study": "a\udcff", "model": -math.inf, "é": [math.nan, 0.5]}
    runs.write_result(tmp_path, runs.failure_result(config, None, None, ValueError("\ud800")))
    result = json.loads((tmp_path / runs.RESULT).read_text(encoding="utf-8"), parse_constant=int)
    assert result == runs.read_result(tmp_path) and result["error"] == "?"
    assert result["config"] == {"seed": 3, "study": "a?", "model": None, "é": [None, 0.5]}


def test_the_commit_is_that_of_our_checkout_and_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        words = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
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
    installed = metadata.version

    def version(name: str) -> str:
        if name == "speechformer":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    versions = identity.versions.__wrapped__()
    assert versions["speechformer"] == "(not installed)" and versions["torch"] == installed("torch")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_of_a_run_writes(rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("speechformer.runs.rank.devices", 2)
    folder = runs.RunFolder(tmp_path, "1234")
    folder.begin({}, threads=8)
    assert folder.owner["threads"] == 8 and (tmp_path / runs.OWNER).exists() == (rank == "0")
    again = runs.RunFolder(tmp_path, "1234", previous={"threads": 2})
    again.begin({}, threads=8)
    assert again.owner["threads"] == 2


def test_a_run_that_has_ended_is_shown(tmp_path: Path) -> None:
    put(tmp_path / runs.RESULT, b"\xef\xbb\xbf" + json.dumps(ENDED).encode())  # with a byte order mark
    result = own(tmp_path)
    assert result == ENDED and "1.5" in console.summary(result)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_result_is_an_error_and_force_runs_anew(content: Any, tmp_path: Path) -> None:
    put(tmp_path / "a" / runs.RESULT, content)
    put(tmp_path / "a" / runs.OWNER, {"identity": "1234", "attempts": 3})
    with pytest.raises(
        runs.DamagedError, match=r"a/result\.json is damaged: .*\. Restore it, remove it, or add force=true\."
    ):
        own(tmp_path / "a")
    assert os.path.lexists(tmp_path / "a" / runs.RESULT)
    assert own(tmp_path / "a", force=True) is None
    assert not os.path.lexists(tmp_path / "a" / runs.RESULT)


@pytest.mark.parametrize("content", [b"{", {"identity": 1}, {"identity": "1234", "attempts": "x"}])
def test_a_damaged_run_json_is_an_error(content: Any, tmp_path: Path) -> None:
    put(tmp_path / "a" / runs.OWNER, content)
    with pytest.raises(runs.ForeignError, match="holds run.json and no valid run.json"):
        own(tmp_path / "a", force=True)  # nothing says that the folder is ours
    runs.write_result(tmp_path / "a", {**ENDED, "status": "failed"})
    with pytest.raises(runs.DamagedError, match="a/run.json is damaged"):
        own(tmp_path / "a")
    assert own(tmp_path / "a", force=True) is None
    assert runs.read_json(tmp_path / "a" / runs.OWNER, "owner")["attempts"] == 1  # type: ignore[index]


def ended_run(folder: Path) -> Path:
    """Make the folder of a run that has ended, with files of all kinds."""
    put(folder / runs.RESULT, ENDED)
    put(folder / runs.OWNER, {"identity": "1234", "attempts": 3})
    for name in ("last.ckpt", "config.yaml", "tensorboard/hparams.yaml", "checkpoints/2.ckpt", "notes.txt"):
        put(folder / name, b"old")
    return folder


def forced_run(folder: Path, begins: bool) -> None:
    """Replace a run; the new one has other files, and ends with an error before or after its first step."""
    with pytest.raises(UserError), runs.own(folder, CONFIG, "5678", force=True) as run_folder:
        run_folder.begin(CONFIG, 1)
        for name in ("tokenizer.json", "tensorboard/events.out.tfevents.1", "last.ckpt"):
            put(folder / name, b"new")
        if begins:
            run_folder.discard_replaced()
        raise UserError("no GPU")


@pytest.mark.parametrize("begins", [False, True])
def test_a_forced_run_replaces_the_old_one_whole_or_not_at_all(begins: bool, tmp_path: Path) -> None:
    """It is killed before each operation on a file. Oracle: the old files, which are all there or all gone."""
    old = contents(ended_run(tmp_path / "old"))
    folder = tmp_path / "run"

    def work() -> None:
        forced_run(folder, begins)

    ended_run(folder)
    points = count_points(work, folder)
    assert points > 15
    replaced = set()
    for point in range(1, points + 1):
        shutil.rmtree(folder)
        ended_run(folder)
        killed_at(work, folder, point)
        try:
            with runs.own(folder, CONFIG, "1234") as run_folder:
                assert run_folder.result == ENDED and contents(folder) == old
        except runs.ForeignError:  # the new run is there
            left = contents(folder)
            assert not {name for name in old if left.get(name) == old[name]} - {"notes.txt"}
            replaced.add(point)
        assert not [path for path in folder.iterdir() if path.name.startswith(".replaced")]
    assert bool(replaced) == begins


@pytest.mark.parametrize(
    "setting",
    [
        "heads=3",
        "machine=gpu",
        "trainer.precision=16-true",
        "block_size=100000000",
        "corpus.root=nowhere",
        "+trainer.max_stepz=2",
    ],
)
def test_a_forced_run_that_cannot_begin_leaves_the_old_one(
    setting: str, a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting fails, on a machine without a GPU. The last line of defence is the first step itself."""
    folder = shutil.copytree(a_classifier, tmp_path / "run")
    before = contents(folder)

    def step(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Classify, "training_step", step)
    with pytest.raises(BaseException):  # noqa: B017
        execute(compose(*TINY, "force=true", setting), folder)
    assert contents(folder) == before


def test_settings_that_came_later_leave_the_identity_of_other_runs() -> None:
    """Oracle: the config without them. A choice or an option that is not at its default counts."""
    rnn = ["task=translate", "model=rnn_attention"]
    config = as_plain(compose(*rnn))
    earlier = {**config, "architecture": {**config["architecture"]}, "model": {**config["model"]}}
    del earlier["attention"], earlier["architecture"]["norm_type"], earlier["model"]["attention"]
    assert identity.fingerprint(config, "", None) == identity.fingerprint(earlier, "", None)
    words = [
        [],
        ["attention=linear"],
        ["attention.qk_norm=true"],
        ["attention=sink"],
        ["attention=sink", "attention.conv=2"],
    ]
    words += [["architecture.norm_type=rms"], ["attention.kv_heads=1"], rnn, [*rnn, "model.attention=bahdanau"]]
    assert len({identity.fingerprint(as_plain(compose(*each)), "", None) for each in words}) == len(words)
