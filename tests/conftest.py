"""What the tests share: the config as the command line composes it, tiny corpora, the real speeches."""

from __future__ import annotations

import copy
import errno
import functools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; more threads gain nothing here
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the package again

import hydra
import pytest
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from speechformer.config import CONF
from speechformer.corpora import sample, sample_pairs
from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.errors import UserError
from speechformer.keys import load_plain

sys.dont_write_bytecode = False  # in this process, too
RECURRENT = ["rnn", "rnn_attention"]
BAHDANAU = "rnn_attention model.attention=bahdanau"
COMPOSED = ["by_layer", "randomised"]  # of other choices: test_by_layer.py, test_randomised.py
MODELS = sorted({path.stem for path in (CONF / "model").glob("*.yaml")} - {*RECURRENT, *COMPOSED})  # that attend
PATTERNS = sorted({path.stem for path in (CONF / "pattern").glob("*.yaml")} - {*COMPOSED})
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
# A run of a second: everything is there, small.
TINY = ["corpus=sample", "width=8", "heads=2", "layers=1", "ff=8", "trainer.accelerator=cpu", "protocol=paper"]


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lock be written, as in a folder that we may only read."""

    def acquire(lock: FileLock, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", acquire)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=1, help="so many times the usual inputs in test_properties.py")


LONG = ("test_kills.py", "test_notebooks.py", "test_adding.py", "test_sweeps.py", "test_fit.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each of two workers of pytest-xdist half of the long tests first, so that none of them is the last."""
    long = [item for item in items if item.path.name in LONG]
    short = [item for item in items if item.path.name not in LONG]
    half = len(short) // 2  # neighbours share fixtures
    items[:] = [*long[::2], *short[:half], *long[1::2], *short[half:]]


def compose(*overrides: str) -> DictConfig:
    """The config of a command line. A seed costs no composition of its own, which takes a tenth of a second."""
    seeds = [word for word in overrides if re.fullmatch(r"seed=\d+", word)]
    config = copy.deepcopy(composed(tuple(word for word in overrides if word not in seeds)))
    config.seed = int(seeds[-1].removeprefix("seed=")) if seeds else config.seed
    return config


@functools.lru_cache(maxsize=512)  # a test of kills runs one config again and again
def composed(overrides: tuple[str, ...]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


def group(kind: str, name: str) -> dict:
    """One choice of a config group as plain data, such as group("model", "alibi"); after blanks, more overrides."""
    return copy.deepcopy(group_of(kind, name))


@functools.cache
def group_of(kind: str, name: str) -> dict:
    choice = load_plain(CONF / kind / f"{name.split()[0]}.yaml")
    if (
        " " in name or {kind, "defaults"} & choice.keys() or "${" in str(choice)
    ):  # it sets other keys, or is made of them
        choice = OmegaConf.to_container(compose(*f"{kind}={name}".split()), resolve=True)[kind]  # type: ignore[index]
    return choice


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of speech files that are read and evaluated in no time: the first lines of the sample's."""
    folder = tmp_path_factory.mktemp("little")
    for name, content in sample.files(0).items():
        (folder / name).write_bytes(b"".join(content.splitlines(keepends=True)[:60]))
    return folder


@pytest.fixture(scope="session")
def little_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pairs that are read, trained on and translated in no time: the first of the sample's."""
    folder = tmp_path_factory.mktemp("little_pairs")
    for name, content in sample_pairs.files(0).items():
        lines = 200 if name.startswith("train") else 12
        (folder / name).write_bytes(b"".join(content.splitlines(keepends=True)[:lines]))
    return folder


@pytest.fixture(scope="session")
def a_classifier(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=classify: an ALiBi encoder of two layers that has learned a little."""
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[ann,bob,cy]", "model=alibi", "layers=2"]
    return run_in(tmp_path_factory.mktemp("classifier"), *own, "width=16", "recipe.lr=1e-2")


@pytest.fixture(scope="session")
def a_language_model(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=lm, with RoPE."""
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[ann,bob,cy]", "model=rope", "task=lm"]
    return run_in(tmp_path_factory.mktemp("lm"), *own, "trainer.max_steps=60", "width=16", "recipe.lr=1e-2")


@pytest.fixture(scope="session")
def a_translator(little_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=translate."""
    own = [f"corpus.root={little_pairs}", "corpus=ted", "task=translate", "task.vocab_size=40", "task.beam=2"]
    return run_in(tmp_path_factory.mktemp("translator"), *own, "trainer.max_steps=20")


def run_in(folder: Path, *overrides: str) -> Path:
    """Make a tiny run in a folder."""
    from speechformer.training.run import execute

    execute(compose(*TINY, "trainer.max_epochs=2", *overrides), folder)
    return folder


@pytest.fixture(scope="session")
def ted_pairs() -> Pairs:
    """The TED pairs; a test that asks for them skips where they are not."""
    try:
        return load_pairs(group("corpus", "ted"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def speeches() -> Corpus:
    """The presidential speeches; a test that asks for them skips where they are not."""
    try:
        return load_corpus(group("corpus", "speeches"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`compile` does all but call a compiler, by torch's tracing; the modes that it was asked for."""
    import torch

    from speechformer.models import stack

    modes: list[str] = []
    compile = torch.nn.Module.compile

    def trace(module: torch.nn.Module, mode: str) -> None:
        modes.append(mode)
        compile(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    monkeypatch.setattr(stack.shutil, "which", lambda name: name)
    return modes


def without_biases_of_keys(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of a model but for those: they add the same to all scores of a query, which a softmax does not see.
    So their gradient is 0, and Adam takes the rounding of it for a direction."""
    import torch

    return {
        name: torch.cat(value.chunk(3)[::2]) if name.endswith("qkv.bias") else value
        for name, value in weights.items()
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, which a machine may not have."""
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, path: Path) -> tuple[Any, list[str]]:
    """A page in the browser, and what its console says."""
    shown, said = browser.new_page(viewport={"width": 1300, "height": 1000}), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
    shown.goto(path.as_uri())
    return shown, said
