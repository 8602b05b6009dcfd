"""What a run must not depend on: leftover ranks, torch's settings, users of Hydra. Oracle: a process without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from conftest import TINY, compose
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import utilities

import speechformer
from speechformer import config
from speechformer.process import read, settings, standard_state
from speechformer.runs import rank
from speechformer.training.run import execute

rank_zero_only: Any = utilities.rank_zero_only  # a function with an attribute
SHORT = [*TINY, "threads=1", "trainer.max_steps=2", "logger=csv"]
BACKENDS: Any = torch.backends
CHANGES: dict[str, Callable[[], object]] = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "products": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "denormal": lambda: torch.set_flush_denormal(True),
    "kernels": lambda: BACKENDS.cuda.enable_math_sdp(False),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
    "device": lambda: torch.set_default_device("meta"),
    "rank": lambda: setattr(rank_zero_only, "rank", 3),
}
if hasattr(BACKENDS, "fp32_precision"):  # the names since torch 2.9
    CHANGES["cpu products"] = lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16")
    CHANGES["gpu products"] = lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32")
    CHANGES["one of cudnn's"] = lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee")
    CHANGES["all"] = lambda: setattr(BACKENDS, "fp32_precision", "tf32")
CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
}
RANKS = ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "JSM_NAMESPACE_RANK"]
RANKS += ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"]


def state() -> list[Any]:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return [*(read(setting) for setting in settings()), torch.get_default_device(), *modes]


@pytest.fixture
def restored() -> Iterator[None]:
    before = [read(setting) for setting in settings()]
    yield
    torch.set_default_device(None)
    for setting, value in zip(settings(), before):
        if value is not None:
            setting[1](value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_is_standard_inside_and_as_before_afterwards(change: str, restored: None) -> None:
    with standard_state():
        standard = state()
    CHANGES[change]()
    before = state()
    with standard_state():
        values = zip(state(), standard)
        assert all(value == usual or {value, usual} == {"none", "ieee"} for value, usual in values)
    assert state() == before


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_mode_is_standard_inside_and_as_before_afterwards(context: str) -> None:
    with standard_state():
        standard = state()
    with CONTEXTS[context]():
        before = state()
        with standard_state():
            assert state() == standard
        assert state() == before


def changed(stack: ExitStack) -> None:
    """Change what does not stop a run that ignores it, and what does."""
    for name in ("dtype", "products", "algorithms", "rank"):
        CHANGES[name]()
    for name in ("inference", "autocast", "device"):
        stack.enter_context(CONTEXTS[name]())


def test_a_run_and_a_loaded_run_compute_the_same_whatever_the_program_has_set(
    little: Path, tmp_path: Path, restored: None
) -> None:
    words = [*SHORT, "task=lm", "corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]"]
    expected = speechformer.fit(*words, directory=tmp_path / "expected")

    def computed(run: speechformer.TrainedRun) -> list[Any]:
        (attention,) = run.attention("the sea")
        return [run.logits("the sea").tolist(), attention.weights.tolist(), run.generate("the", tokens=5)]

    outputs = computed(expected)
    with ExitStack() as stack:
        changed(stack)
        run = speechformer.fit(*words, directory=tmp_path / "run")
        assert run.result["metrics"] == expected.result["metrics"]  # type: ignore[index]
        assert computed(run) == computed(speechformer.load(tmp_path / "expected")) == outputs
        assert torch.get_default_dtype() == torch.float64 and torch.is_inference_mode_enabled()


def test_a_classifier_predicts_the_same_whatever_the_program_has_set(a_classifier: Path, restored: None) -> None:
    expected = speechformer.load(a_classifier).predict("the sea and the wind")
    with ExitStack() as stack:
        changed(stack)
        assert speechformer.load(a_classifier).predict("the sea and the wind") == expected


@pytest.mark.parametrize("value", ["3", "abc", ""])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_in_the_environment_is_hidden_from_a_run_on_one_device(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    rank.expect_processes({"trainer": {"devices": 1}})
    assert (rank.local_rank(), rank.node_rank(), rank.is_first(), rank.processes()) == (0, 0, True, 1)
    with standard_state():
        assert name not in os.environ
    with standard_state(devices=2):
        assert os.environ[name] == value
    assert os.environ[name] == value


def test_ranks_count_in_a_run_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "devices", 1)  # both are put back
    monkeypatch.setattr(rank, "machines", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    several = {"trainer": {"devices": [0, 1]}}
    rank.check_machines(several, force=False)
    assert (rank.local_rank(), rank.is_first(), rank.processes()) == (1, False, 2)
    monkeypatch.setenv("LOCAL_RANK", "abc")
    with pytest.raises(speechformer.errors.UserError, match="LOCAL_RANK=abc .* below trainer.devices=2"):
        rank.check_machines(several, force=False)


def test_a_run_with_leftover_ranks_writes_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    """Lightning has taken another rank from the environment when it was imported."""
    execute(compose(*SHORT), tmp_path / "expected")
    rank_zero_only.rank = 1
    for name in RANKS:
        monkeypatch.setenv(name, "1")
    execute(compose(*SHORT), tmp_path / "run")
    expected, run = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("expected", "run"))
    assert run == expected and {"result.json", "metrics.csv", "config.yaml", "tokenizer.json"} <= {*run}
    assert rank_zero_only.rank == 1


@pytest.mark.slow
def test_a_command_with_leftover_ranks_trains(tmp_path: Path) -> None:
    """In a process that has not imported Lightning."""
    command = [sys.executable, "-m", "speechformer.train", *SHORT, "+trainer.benchmark=false", "hydra.run.dir=run"]
    package = str(Path(speechformer.__file__).parents[1])
    environment = {**os.environ, **dict.fromkeys(RANKS, "abc"), "PYTHONPATH": package}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"result.json", "metrics.csv"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_a_config_is_composed_while_the_program_uses_hydra() -> None:
    """Also in threads. The program's own Hydra composes as before."""
    expected = config.compose(["task=lm"])
    with hydra.initialize_config_dir(str(config.CONF), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        assert config.compose(["task=lm"]) == expected
        assert GlobalHydra.instance().hydra is before
        assert hydra.compose("config", overrides=["task=lm"]) == expected
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda seed: config.compose([f"seed={seed}"]).seed, range(4))] == [*range(4)]


def test_runs_in_threads_take_turns_and_compute_what_they_would_alone(little: Path, tmp_path: Path) -> None:
    words = [*SHORT, "corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]"]

    def losses(name: str, seed: int) -> Any:
        return speechformer.fit(*words, f"seed={seed}", directory=tmp_path / f"{name}{seed}").result["metrics"]  # type: ignore[index]

    with ThreadPoolExecutor(2) as pool:
        together = [*pool.map(lambda seed: losses("together", seed), range(2))]
    assert together == [losses("alone", seed) for seed in range(2)]
