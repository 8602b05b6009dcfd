"""The choices of `logger=`. Oracle: metrics.csv, which every choice writes, and what the services have stored."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import TINY, compose
from omegaconf import OmegaConf

from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.keys import CONF, read_keys
from speechformer.runs import identity
from speechformer.runs.folder import read_json, read_result
from speechformer.tasks.classify import Classify
from speechformer.training import trackers
from speechformer.training.fit_ensemble import execute_ensemble
from speechformer.training.run import execute

CORPUS = ["corpus=speeches", "corpus.root=little", "corpus.classes=[ann,bob,cy]"]
RUN = [*TINY, *CORPUS, "model=alibi", "trainer.max_steps=40", "eval_interval=10", "checkpoint_every=10", "threads=1"]
MLFLOW = ["logger=mlflow"]
WANDB = ["logger=wandb", "logger.offline=true"]
Curve = set[tuple[str, int, float]]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, little: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("little").symlink_to(little)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def curve_of(folder: Path) -> Curve:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(k, int(row["step"]), float(v)) for row in rows for k, v in row.items() if v and k != "step"}


def interrupt(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, at: int = 25) -> None:
    """Let a run die at a step as a killed process does, without a word to the service."""
    step = Classify.training_step

    def dying(self: Classify, batch: Any, batch_idx: int) -> Any:
        if self.global_step == at:
            raise KeyError("killed")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Classify, "training_step", dying)
        patch.setattr(trackers.Tracker, "close", lambda *arguments: None)
        execute(compose(*RUN, *overrides), folder)


@pytest.fixture(scope="module")
def undisturbed(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with TensorBoard, the default."""
    with contextlib.chdir(little.parent):
        Path("little").exists() or Path("little").symlink_to(little)
        execute(compose(*RUN), folder := tmp_path_factory.mktemp("undisturbed"))
    return folder


def check_equal(folder: Path, undisturbed: Path) -> None:
    """The run's own files are those of the default, but for TensorBoard's."""
    ours, default = read_result(folder), read_result(undisturbed)
    for key in ("identity", "metrics", "curve", "config", "best"):
        assert ours[key] == default[key]
    for name in ("metrics.csv", "predictions.tsv", "config.yaml", "tokenizer.json"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
    assert (undisturbed / "tensorboard").is_dir() and not (folder / "tensorboard").exists()


def test_csv_writes_what_the_default_writes_but_for_tensorboard(undisturbed: Path, tmp_path: Path) -> None:
    execute(compose(*RUN, "logger=csv"), tmp_path / "run")
    check_equal(tmp_path / "run", undisturbed)
    assert "tracker" not in (read_json(undisturbed / "run.json") or {})


def test_no_choice_changes_the_identity_of_a_run() -> None:
    keys = {key for path in (CONF / "logger").glob("*.yaml") for key in read_keys("logger", path.stem)}
    assert keys < set(identity.NOT_IDENTITY)
    configs = [as_plain(compose(f"logger={path.stem}")) for path in (CONF / "logger").glob("*.yaml")]
    assert len({identity.fingerprint(config, "0", []) for config in configs}) == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda library: None)
    with pytest.raises(UserError, match=rf"^logger={name} needs the library {name}: pip install {name}"):
        execute(compose(*RUN, f"logger={name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("logger.offline=maybe", "logger.offline must be true or false"),
        ("logger.project=null", "logger.project must be a word"),
        ("logger.tracking_uri=x", "logger.tracking_uri needs logger=mlflow"),
        ("+trainer.logger=false", "trainer.logger cannot be set, because speechformer sets it; set logger"),
    ],
)
def test_invalid_settings(setting: str, message: str) -> None:
    from speechformer.config import compose

    with pytest.raises(UserError) as error:
        as_plain(compose(["logger=wandb", setting]))
    assert message in str(error.value)


def test_an_unknown_choice_in_a_plain_config_is_an_error(tmp_path: Path) -> None:
    """From Python no group has checked it."""
    with pytest.raises(UserError, match="logger.* no choice 'tensorbord'.*tensorboard"):
        execute(OmegaConf.merge(compose(*RUN), {"logger": {"name": "tensorbord"}}), tmp_path / "run")


def test_names_stay_different_in_mlflow() -> None:
    names = [
        "test_accuracy_of_bób",
        "test_accuracy_of_bb",
        "test_accuracy_of_b b",
        "of_日本",
        "of_本日",
        "a/b",
        "of_é",
    ]
    assert len({trackers.metric_name(name) for name in names}) == len(names)
    assert trackers.metric_name("attention_entropy/layer1_head1") == "attention_entropy/layer1_head1"


# MLflow, on a file of SQLite


def mlflow_runs() -> list[tuple[Any, Curve, dict[str, float]]]:
    """Each run of the service, its curve and its final metrics; no value is there twice."""
    from mlflow import MlflowClient

    client, runs = MlflowClient(database()), []
    for run in client.search_runs([client.get_experiment_by_name("speechformer").experiment_id]):
        points = [
            (k, p.step, p.value) for k in run.data.metrics for p in client.get_metric_history(run.info.run_id, k)
        ]
        assert len({point[:2] for point in points}) == len(points)
        final = {name: value for name, _, value in points if name.startswith("metrics_final/")}
        runs.append((run, {point for point in points if point[0] not in final}, final))
    return runs


def database() -> str:
    return f"sqlite:///{Path('mlflow.db').resolve()}"


def needs_mlflow() -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")  # mlflow-skinny has no databases


def test_mlflow_has_the_curves_and_a_resumed_run_goes_on_in_its_run(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    needs_mlflow()
    interrupt(monkeypatch, tmp_path / "run", *MLFLOW)
    ((before, part, _),) = mlflow_runs()
    assert before.info.status == "RUNNING" and part < curve_of(undisturbed)
    assert max(step for _, step, _ in part) == 20
    execute(compose(*RUN, *MLFLOW), tmp_path / "run")
    ((run, curve, final),) = mlflow_runs()
    check_equal(tmp_path / "run", undisturbed)
    assert curve == curve_of(undisturbed) and run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.info.run_id == before.info.run_id and capsys.readouterr().out.count(run.info.run_id) == 2
    assert run.data.params["recipe/lr"] == "0.001" and run.data.params["model/name"] == "alibi"
    assert final["metrics_final/test_accuracy"] == read_result(undisturbed)["metrics"]["test_accuracy"]
    execute(compose(*RUN, *MLFLOW, "force=true"), tmp_path / "run")
    assert len(mlflow_runs()) == 2


def test_an_mlflow_run_that_is_gone_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_mlflow()
    from mlflow import MlflowClient

    interrupt(monkeypatch, tmp_path / "run", *MLFLOW)
    ((before, _, _),) = mlflow_runs()
    MlflowClient(database()).delete_run(before.info.run_id)
    execute(compose(*RUN, *MLFLOW), tmp_path / "run")
    ((_, curve, _),) = mlflow_runs()
    assert curve == curve_of(tmp_path / "run")


def test_an_mlflow_server_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    needs_mlflow()
    with pytest.raises(UserError, match="^logger=mlflow cannot start a run: .*nowhere"):
        execute(compose(*RUN, "logger=mlflow", "logger.tracking_uri=nowhere://x"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_each_run_of_an_ensemble_has_its_own_mlflow_run(tmp_path: Path) -> None:
    needs_mlflow()
    jobs = [(compose(*RUN, *MLFLOW, f"seed={seed}"), tmp_path / f"seed{seed}", []) for seed in (0, 1)]
    assert len(execute_ensemble(jobs)) == 2
    runs = mlflow_runs()
    assert sorted(run.data.params["seed"] for run, _, _ in runs) == ["0", "1"]
    for run, curve, _ in runs:
        assert curve == curve_of(tmp_path / run.info.run_name) and run.info.status == "FINISHED"


# Weights & Biases, offline


def wandb_runs() -> list[tuple[str, Curve]]:
    """The name and curve of each offline run, in order. Its file is a log in the format of LevelDB."""
    from wandb.proto import wandb_internal_pb2 as messages

    runs = []
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        name, curve = "", Curve()
        for content in level_db_records(path.read_bytes()):
            record = messages.Record.FromString(content)
            name = record.run.display_name or name
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            curve |= {(k, int(row["_step"]), float(v)) for k, v in row.items() if k[0] != "_"}
        runs.append((name, curve))
    return runs


def level_db_records(data: bytes) -> Iterator[bytes]:
    """Blocks of 32 KiB of chunks, each after its checksum (4 bytes), length (2) and type: whole, or a part."""
    at, record = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4) if room >= 7 else (0, 0)
        if room < 7 or kind == 0:
            at += room
            continue
        record = data[at + 7 : at + 7 + length] if kind in (1, 2) else record + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record


def test_wandb_has_the_curves_and_a_resumed_run_is_whole(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("wandb")
    interrupt(monkeypatch, tmp_path / "run", *WANDB)
    first = (read_json(tmp_path / "run" / "run.json") or {})["tracker"]["id"]
    execute(compose(*RUN, *WANDB), tmp_path / "run")
    check_equal(tmp_path / "run", undisturbed)
    assert f"a new run instead of {first}, because W&B cannot continue a run offline" in capsys.readouterr().out
    runs = wandb_runs()
    assert [name for name, _ in runs][-1] == "run"
    assert rounded(runs[-1][1]) == rounded(curve_of(undisturbed))


def rounded(curve: Curve) -> set[tuple[str, int, str]]:
    return {(name, step, f"{value:.6g}") for name, step, value in curve}


def test_each_run_of_an_ensemble_has_its_own_wandb_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    jobs = [(compose(*RUN, *WANDB, f"seed={seed}"), tmp_path / f"seed{seed}", []) for seed in (0, 1)]
    assert len(execute_ensemble(jobs)) == 2
    runs = dict(wandb_runs())
    assert set(runs) == {"seed0", "seed1"}
    for name, curve in runs.items():
        assert rounded(curve) == rounded(curve_of(tmp_path / name))


class FakeWandb(ModuleType):
    """The calls of `wandb` that a run makes. Like the service, it has the steps of a run that is resumed."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.exits: list[int] = []
        self.fails_at = math.inf
        self.Settings = lambda **options: options

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        steps = [step for step, _ in self.rows]
        run = SimpleNamespace(id="abc", url="https://example.org/abc", summary={}, log=self.log)
        run.starting_step = max(steps) + 1 if options["resume"] and steps else 0
        run.finish = lambda exit_code: self.exits.append(exit_code)
        return run

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step >= self.fails_at:
            raise ConnectionError("the service has gone")
        self.rows.append((step, metrics))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_online_a_resumed_run_continues_its_wandb_run(
    fake: FakeWandb, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, tmp_path / "run", "logger=wandb")
    execute(compose(*RUN, "logger=wandb"), tmp_path / "run")
    assert [(init["id"], init["resume"], init["mode"]) for init in fake.inits] == [
        (None, None, None),
        ("abc", "allow", None),
    ]
    assert [step for step, _ in fake.rows] == sorted(step for step, _ in fake.rows) and fake.exits == [0]
    curve = [(name, step, value) for step, metrics in fake.rows for name, value in metrics.items()]
    assert len(curve) == len(set(curve)) and rounded(set(curve)) == rounded(curve_of(undisturbed))
    json.dumps(fake.inits[0]["config"])


def test_a_service_that_fails_does_not_stop_the_run(
    fake: FakeWandb, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fake.fails_at = 20
    execute(compose(*RUN, "logger=wandb"), tmp_path / "run")
    check_equal(tmp_path / "run", undisturbed)
    said = capsys.readouterr().err
    assert said.count("Warning: logger=wandb failed, and the run goes on without it: the service has gone.") == 1


def test_a_run_that_fails_ends_the_services_run(
    fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Classify, "training_step", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        execute(compose(*RUN, "logger=wandb"), tmp_path / "run")
    assert fake.exits == [1]
