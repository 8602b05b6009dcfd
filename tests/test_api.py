"""The Python API: what `import speechformer` offers, and that `fit` is the command without its side effects."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_command
from conftest import TINY

import speechformer
from speechformer.errors import UserError
from speechformer.tasks.classify import Classify

SHORT = [*TINY, "trainer.max_steps=2"]


def test_importing_the_package_is_light() -> None:
    code = "import speechformer, sys; assert {'fit', 'load', 'read_results'} <= set(dir(speechformer)); "
    code += "assert speechformer.__version__; print(*{'torch', 'lightning', 'pandas', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "\n", done.stderr


def test_names_that_are_not_public_are_errors() -> None:
    assert all(getattr(speechformer, name) is not None for name in speechformer.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = speechformer.trian


def settings() -> tuple:
    """The process-wide settings that a training changes."""
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    modes = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)]
    return *levels, list(warnings.filters), *states, *modes


def test_fit_trains_once_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    import lightning.pytorch  # noqa: F401 (it sets the levels of its loggers)

    torch.manual_seed(3)
    before = settings()
    run = speechformer.fit(*SHORT, "threads=1", "trainer.deterministic=true", directory=tmp_path / "run")
    assert settings() == before
    assert run.finished and run.result is not None and run.result["steps"] == 2
    written = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    again = speechformer.fit(*SHORT, "threads=1", "trainer.deterministic=true", directory=str(tmp_path / "run"))
    assert again.result == run.result and (tmp_path / "run" / "result.json").stat().st_mtime_ns == written


def test_ctrl_c_interrupts_fit_and_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Classify, "training_step", interrupt)
        speechformer.fit(*SHORT, directory=tmp_path)
    assert speechformer.fit(*SHORT, directory=tmp_path).result["attempts"] == 2


def test_fit_and_the_command_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds what `fit` has trained, in the folder that it would choose."""
    monkeypatch.chdir(tmp_path)
    run = speechformer.fit(*SHORT, "model=rope")
    assert run.directory.parent == Path("outputs/runs")
    done = run_command("speechformer.train", *SHORT, "model=rope", cwd=tmp_path)
    assert f"Already finished: {run.directory.resolve()}" in done.stdout, done.stdout + done.stderr
    assert json.loads((run.directory / "result.json").read_text())["overrides"] == [*SHORT, "model=rope"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra.run.dir=x"], "set the run's folder with directory="),
        (["width=0"], "width must be"),
    ],
)
def test_errors_of_fit(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        speechformer.fit(*overrides, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
