"""The choices of `logger=`. Oracle: metrics.csv, which every choice writes, and what the services have stored."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import TINY, compose
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from speechformer import config as composed_config
from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.keys import CONF, load_plain
from speechformer.runs import identity
from speechformer.runs.folder import read_json, read_result
from speechformer.tasks.classify import Classify
from speechformer.training import loggers
from speechformer.training.run import execute, execute_ensemble

RUN = [*TINY, "corpus=speeches", "corpus.classes=[ann,bob,cy]", "model=alibi", "trainer.max_steps=40"]
RUN += ["eval_interval=10", "checkpoint_every=10", "threads=1"]
Curve = set[tuple[str, int, float]]


@pytest.fixture(scope="module")
def words(little: Path) -> list[str]:
    """The command of the run, but for its logger."""
    return [*RUN, f"corpus.root={little}"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def curve_of(folder: Path) -> Curve:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(k, int(row["step"]), float(v)) for row in rows for k, v in row.items() if v and k != "step"}


def interrupt(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> None:
    """Let a run die at step 25 as a killed process does, without a word to the service."""
    loss = Classify.training_loss

    def dying(self: Classify, batch: Any) -> Any:
        if self.global_step == 25:
            raise KeyError("killed")
        return loss(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Classify, "training_loss", dying)
        patch.setattr(loggers.Tracker, "close", lambda *arguments: None)
        execute(compose(*overrides), folder)


@pytest.fixture(scope="module")
def undisturbed(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with TensorBoard, the default."""
    folder = tmp_path_factory.mktemp("undisturbed")
    execute(compose(*words), folder)
    return folder


def check_equal(folder: Path, undisturbed: Path) -> None:
    """The run's own files are those of the default, but for TensorBoard's."""
    ours, default = read_result(folder), read_result(undisturbed)
    for key in ("identity", "metrics", "curve", "config", "best"):
        assert ours[key] == default[key]
    for name in ("metrics.csv", "predictions.tsv", "config.yaml", "tokenizer.json"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
    assert (undisturbed / "tensorboard").is_dir() and not (folder / "tensorboard").exists()


def test_csv_writes_what_the_default_writes_but_for_tensorboard(words: list[str], undisturbed: Path) -> None:
    execute(compose(*words, "logger=csv"), Path("run"))
    check_equal(Path("run"), undisturbed)
    assert "tracker" not in (read_json(undisturbed / "run.json") or {})


def test_no_choice_changes_the_identity_of_a_run() -> None:
    names = [path.stem for path in (CONF / "logger").glob("*.yaml")]
    keys = {f"logger.{key}" for name in names for key in load_plain(CONF / "logger" / f"{name}.yaml")}
    assert keys < set(identity.NOT_IDENTITY)
    assert len({identity.fingerprint(as_plain(compose(f"logger={name}")), "0", []) for name in names}) == 1


def test_errors(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = OmegaConf.merge(compose(*words), {"logger": {"name": "tensorbord"}})  # no group has checked it
    with pytest.raises(UserError, match="logger.* no choice 'tensorbord'.*tensorboard"):
        execute(unknown, Path("run"))
    for setting, message in (
        ("logger.offline=maybe", "logger.offline must be true or false"),
        ("logger.tracking_uri=x", "logger.tracking_uri needs logger=mlflow"),
    ):
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            as_plain(composed_config.compose(["logger=wandb", setting]))
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda library: None)
    with pytest.raises(UserError, match="^logger=wandb needs the library wandb: pip install wandb"):
        execute(compose(*words, "logger=wandb"), Path("run"))
    assert not Path("run").exists()


def test_names_stay_different_in_mlflow() -> None:
    names = ["test_accuracy_of_bób", "test_accuracy_of_bb", "test_accuracy_of_b b", "of_日本", "of_本日", "a/b"]
    assert len({loggers.mlflow_name(name) for name in names}) == len(names)
    assert loggers.mlflow_name("attention_entropy/layer1_head1") == "attention_entropy/layer1_head1"


def test_only_one_process_at_a_time_makes_mlflows_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the lock beside the file is held whenever MLflow opens it or makes the experiment."""
    place, seen = tmp_path / "own.db", []

    class Client:
        def __init__(self, uri: str) -> None:
            self.create_experiment("")

        def create_experiment(self, name: str) -> None:
            with pytest.raises(Timeout):
                FileLock(f"{place}.lock", timeout=0, is_singleton=False).acquire()
            seen.append(name)

    exceptions = SimpleNamespace(MlflowException=ValueError)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)
    monkeypatch.setattr(loggers, "Mlflow", lambda *arguments, run_id: SimpleNamespace(run_id="7"))
    settings = {"tracking_uri": f"sqlite:///{place}", "experiment": "own"}
    assert loggers.open_mlflow(settings, "run", None)[1:] == (False, f"MLflow: run 7 in sqlite:///{place}")
    assert seen == ["", "own"]


def test_mlflow_has_the_curves_and_a_resumed_run_goes_on_in_its_run(
    words: list[str], undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file of SQLite."""
    client_of = pytest.importorskip("mlflow").MlflowClient
    pytest.importorskip("alembic")  # mlflow-skinny has no databases
    client, words = client_of(f"sqlite:///{Path('mlflow.db').resolve()}"), [*words, "logger=mlflow"]

    def only_run() -> tuple[Any, Curve]:
        (run,) = client.search_runs([client.get_experiment_by_name("speechformer").experiment_id])
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        points = [(name, point.step, point.value) for name, history in histories.items() for point in history]
        return run, {point for point in points if not point[0].startswith("metrics_final/")}

    interrupt(monkeypatch, Path("run"), *words)
    before, part = only_run()
    assert before.info.status == "RUNNING" and part < curve_of(undisturbed)
    execute(compose(*words), Path("run"))
    run, curve = only_run()
    check_equal(Path("run"), undisturbed)
    assert curve == curve_of(undisturbed) and run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.info.run_id == before.info.run_id and run.data.params["recipe/lr"] == "0.001"


# Weights & Biases


class FakeWandb(ModuleType):
    """The calls of `wandb` that a run makes. Like the service, it has the steps of a run that is resumed."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.exits: list[int] = []
        self.configs: list[dict[str, Any]] = []
        self.fails_at = math.inf
        self.refusal: Exception | None = None
        self.server = "file:"  # that needs no connection
        self.run = None  # Lightning would take it for its own

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        if self.refusal is not None:
            raise self.refusal
        rows = self.rows.setdefault(options["name"], []) if options["resume"] else []
        self.rows[options["name"]] = rows

        def log(metrics: dict[str, float]) -> None:
            if metrics.get("trainer/global_step", 0) >= self.fails_at:
                raise ConnectionError("the service has gone")
            rows.append(metrics)

        config = SimpleNamespace(update=lambda params, allow_val_change: self.configs.append(params))
        run = SimpleNamespace(id="abc", url="https://example.org/abc", config=config, log=log)
        run.finish = lambda exit_code: self.exits.append(exit_code)
        return run

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(base_url=self.server))

    def curve(self, name: str) -> Curve:
        step = "trainer/global_step"
        rows = [row for row in self.rows[name] if step in row]  # without the final metrics
        return {(key, int(row[step]), value) for row in rows for key, value in row.items() if key != step}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("sdk", "sdk.lib", "wandb_run"):  # from which Lightning imports classes
        monkeypatch.setitem(sys.modules, f"wandb.{name}", SimpleNamespace(Run=int, RunDisabled=int))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    return module


@pytest.mark.parametrize("offline", [False, True])
def test_a_resumed_run_continues_its_wandb_run_or_is_whole_offline(
    offline: bool,
    fake: FakeWandb,
    words: list[str],
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    words = [*words, "logger=wandb", f"logger.offline={offline}"]
    interrupt(monkeypatch, Path("run"), *words)
    execute(compose(*words), Path("run"))
    check_equal(Path("run"), undisturbed)
    first, second = ((init["id"], init["resume"], init["mode"]) for init in fake.inits)
    assert first == (None, None, "offline" if offline else None)
    assert second == (first if offline else ("abc", "allow", None)) and fake.exits == [0]
    assert fake.curve("run") == curve_of(undisturbed)
    assert ("a new run instead of abc, because W&B cannot" in capsys.readouterr().out) == offline
    assert len(fake.configs) == 1 + offline and fake.configs[0]["recipe"]["lr"] == 1e-3
    json.dumps(fake.configs)


def test_a_service_that_fails_does_not_stop_the_run_unless_at_the_start(
    fake: FakeWandb, words: list[str], undisturbed: Path, capsys: pytest.CaptureFixture
) -> None:
    fake.fails_at = 20
    execute(compose(*words, "logger=wandb"), Path("run"))
    check_equal(Path("run"), undisturbed)
    said = capsys.readouterr().err
    assert said.count("Warning: logger=wandb failed, and the run goes on without it: the service has gone.") == 1
    fake.refusal = ValueError("the key is not valid")
    with pytest.raises(UserError, match=r"^logger=wandb cannot start a run: the key is not valid\."):
        execute(compose(*words, "logger=wandb"), Path("other"))
    assert not Path("other").exists()


@contextlib.contextmanager
def server(answers: bool) -> Iterator[str]:
    """Yield the address of a server that answers 404, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    connection.close()

        if answers:
            threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("proxy", [False, True])
@pytest.mark.parametrize("kind", ["closed", "silent", "answers"])
def test_a_service_that_does_not_answer_is_left_out_within_seconds(
    kind: str, proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the server or the proxy before it."""
    monkeypatch.setattr(loggers, "PATIENCE", 0.2)
    loggers.unreachable.cache_clear()
    with server(answers=kind == "answers") as address:
        if kind == "closed":
            address = "http://127.0.0.1:9"
        monkeypatch.setenv("http_proxy", address if proxy else "")
        said = loggers.unreachable("http://tracker.example:80/x" if proxy else address)
    assert (said is None) == (kind == "answers"), said
    assert loggers.unreachable("sqlite:///mlflow.db") is None


@pytest.mark.parametrize("failure", ["refused", "unreachable"])
def test_a_run_goes_on_without_a_service_that_cannot_be_reached(
    failure: str, fake: FakeWandb, words: list[str], undisturbed: Path, capsys: pytest.CaptureFixture
) -> None:
    if failure == "refused":
        fake.refusal = ConnectionError("no route")
    else:
        fake.server = "http://127.0.0.1:9"
    execute(compose(*words, "logger=wandb"), Path("run"))
    check_equal(Path("run"), undisturbed)
    said = capsys.readouterr().err
    assert "Warning: logger=wandb: " in said and "; the run goes on without it." in said and not fake.exits


def test_a_run_that_fails_ends_the_services_run(
    fake: FakeWandb, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Classify, "training_loss", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        execute(compose(*words, "logger=wandb"), Path("run"))
    assert fake.exits == [1]


def test_each_run_of_an_ensemble_has_its_own(fake: FakeWandb, words: list[str]) -> None:
    jobs = [(compose(*words, "logger=wandb", f"seed={seed}"), Path(f"seed{seed}"), []) for seed in (0, 1)]
    assert len(execute_ensemble(jobs)) == 2
    assert [fake.curve(f"seed{seed}") for seed in (0, 1)] == [curve_of(Path(f"seed{seed}")) for seed in (0, 1)]
    assert fake.exits == [0, 0]
