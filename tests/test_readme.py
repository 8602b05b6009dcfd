"""The README and the pages: every example works as shown. `tests/lint.py` follows their links."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import hydra
import pytest
from conftest import TINY, compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import IS_CHECKOUT, PAGES, ROOT, blocks, commands, name_of

import speechformer
from speechformer.analysis.exports import export_all
from speechformer.config import CONF, check_config
from speechformer.errors import ArgumentParser
from speechformer.sweeps import search
from speechformer.sweeps.sweeper import combinations
from speechformer.training.run import execute

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")
OURS = [page for page in PAGES if page.name == "README.md"]
# test_adding.py adds the attention `squared` and runs its command
COMMANDS = sorted({(name_of(page), line) for page, line in commands(*OURS) if "squared" not in line})
# Commands that set up a machine, or that take too long here; their options are checked nevertheless
NOT_EXECUTED = ("download", "baselines")
SHELL = {"python3", "source", "pip", "tensorboard"}


def bare(command: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"\s+# .*", "", command)


@pytest.mark.slow
def test_every_command_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training commands compose and pass the checks; others parse; targets, extras and scripts exist."""
    wrong = []
    for page, command in COMMANDS:
        try:
            check_command(command, monkeypatch)
        except (Exception, SystemExit) as error:
            wrong.append(f"{page}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


def check_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(re.sub(r" [<>] \S+", "", bare(command)))
    if words[0] == "srun":  # its options, then a command
        words = words[words.index("python") :]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        compose(*(word for word in words[2:] if not word.startswith("ARGS=")))
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file(), command
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", command)) <= extras.keys()
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), command
    elif words[:2] == ["python", "-m"] and words[2].startswith("studies."):
        assert (ROOT / "studies" / f"{words[2].removeprefix('studies.')}.py").is_file(), command
    elif words[0] not in SHELL and words[:3] != ["python", "-m", "pytest"]:
        assert words[:2] == ["python", "-m"] and words[2].startswith("speechformer."), command
        module, arguments = words[2], words[3:]
        if module == "speechformer.train":
            for job in jobs(arguments):
                check_config(plain(job))
        else:
            parse(module, arguments, monkeypatch)


def jobs(arguments: list[str]) -> list[list[str]]:
    """Return the overrides of each run of a training command."""
    if {"--help", "--cfg"} & set(arguments):
        return []
    if "-m" not in arguments:
        return [arguments]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides([word for word in arguments if word != "-m"])
        if "hydra/sweeper=optuna" in arguments:
            fixed, space, _ = search.split_overrides({word.get_key_element(): word for word in overrides})
            ends = {key: [own.low, own.high] if hasattr(own, "low") else own.choices for key, own in space.items()}
            return [[*fixed, *(f"{key}={values[k]}" for key, values in ends.items())] for k in (0, -1)]
        every = [list(job) for job in combinations(overrides)]
        return list({tuple(word for word in job if not word.startswith("seed=")): job for job in every}.values())


def plain(overrides: list[str]) -> dict:
    """Return the composed config as plain data; the launcher is checked by composing Hydra's part too."""
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    config: dict = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return config | {"init_from": None}  # whose folder is not there


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command's arguments as it does, and stop there."""
    package = importlib.import_module(main_of(module))
    monkeypatch.setattr(ArgumentParser, "run", lambda parser, command: parser.parse_intermixed_args())
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    package.main()


def is_executed(command: str) -> bool:
    """Whether a command runs here: not a sweep, a form with a placeholder, or what has a test of its own: experiments
    (test_conf.py), trackers (test_trackers.py), the export in both formats (test_export.py).
    """
    words = shlex.split(command)
    module = words[2] if words[:2] == ["python", "-m"] else ""
    placeholder = re.search(
        r'"\.\.\."|\b(NAME|PART|PAGE)\b|experiment=|logger=(mlflow|wandb)|export RUN( --format huggingface)?$',
        command,
    )
    elsewhere = module.removeprefix("speechformer.").split(" ")[0] in NOT_EXECUTED
    other = {"-m", "--help", "--cfg", "<", "--watch"} & set(words[3:])
    return module.startswith("speechformer.") and not (placeholder or elsewhere or other)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({short for _, command in COMMANDS if is_executed(short := bare(command))}))
def test_a_command_does_what_it_says(
    command: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, on a small corpus, with small runs in place of RUN."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[2:]
    if words[0] == "speechformer.train":
        train_briefly(words[1:], request)
        return
    runs = {"generate": "a_language_model", "translate": "a_translator"}
    for k, word in enumerate(words):
        if re.fullmatch(r"RUN\d?", word) and words[k - 1] != "--run":
            fixture = runs.get(words[0].removeprefix("speechformer."), "a_classifier")
            shutil.copytree(request.getfixturevalue(fixture), word)
        elif word == "RUN":
            execute(compose(*TINY, "task=lm", "model=relative", "trainer.max_steps=1"), Path(word))
    words = [word for word in words if word not in ("corpus.source=de", "corpus.target=nl")]
    # copies, for a command may write there
    shutil.copytree(request.getfixturevalue("little_pairs" if "task=translate" in command else "little"), "FOLDER")
    shutil.copytree(request.getfixturevalue("texts"), "TEXTS")
    if "MODEL" in words:
        shutil.copytree(request.getfixturevalue("a_pretrained_model"), "MODEL")
    shutil.copytree(request.getfixturevalue("a_classifier"), "outputs/sweeps/run")  # for status and report
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("webbrowser.open", lambda url: True)  # `play`
    if words[0] == "speechformer.corpora.sample":
        words[1] = "new"
    importlib.import_module(main_of(words[0])).main()


@pytest.fixture(scope="session")
def a_pretrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Hugging Face's library saves it: our own export."""
    folder, own = tmp_path_factory.mktemp("model"), ["task.tokens=bpe", "task.vocab_size=60"]
    own += ["model=learned", "architecture.tied_output=true"]
    run = speechformer.fit(*TINY, "task=lm", *own, "trainer.max_steps=1", directory=folder / "run")
    export_all(run, "huggingface", folder / "MODEL")
    return folder / "MODEL"


@pytest.fixture(scope="session")
def texts(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text for each author, from the sample."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [line.split("\t") for line in (little / "train_CLS.tsv").read_text(encoding="utf-8").splitlines()]
    for label, author in enumerate(("ann", "bob", "cy")):
        (folder / f"{author}.txt").write_text("\n\n".join(text for own, text in rows if own == str(label)), "utf-8")
    return folder


def train_briefly(overrides: list[str], request: pytest.FixtureRequest) -> None:
    """Train a run of two steps on a small corpus, of a small model where the overrides say no size."""
    own = [word for word in overrides if not word.startswith("corpus")]
    if "task=translate" in overrides:
        corpus = ["corpus=ted", f"corpus.root={request.getfixturevalue('little_pairs')}", "task.vocab_size=40"]
    elif "task=probe" in overrides:
        corpus = []
    elif "corpus=text" in overrides:
        corpus = ["corpus=text", f"corpus.root={request.getfixturevalue('little')}", "corpus.separator='\n'"]
    else:
        corpus = ["corpus=speeches", f"corpus.root={request.getfixturevalue('little')}", "corpus.classes=[a,b,c]"]
    sizes = ["width=8", "heads=2", "layers=1", "ff=8"]
    if "init_from=MODEL" in own:
        sizes = ["block_size=8"]
        own = [word for word in own if word.partition("=")[0] not in ("init_from", "block_size")]
        own.append(f"init_from={request.getfixturevalue('a_pretrained_model')}")
    last = ["trainer.max_steps=2", "recipe.warmup_steps=1", "trainer.accelerator=cpu"]
    result = execute(compose(*sizes, *own, *corpus, *last), Path("run"))
    assert result["status"] == "finished"


def main_of(module: str) -> str:
    """Return the module that `python -m` runs."""
    return f"{module}.__main__" if (ROOT / module.replace(".", "/") / "__main__.py").exists() else module


PYTHON = [block for block in blocks(*OURS) if block.language == "python" and block.target is None]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: name_of(block.page))
def test_python_works_as_shown(block, a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import speechformer

    def fit(*overrides: str, **options: object) -> object:
        own = [word for word in overrides if not word.startswith("corpus")]
        return train(*own, *TINY, "trainer.max_steps=2", **options)  # type: ignore[arg-type]

    train = speechformer.fit
    monkeypatch.setattr(speechformer, "fit", fit)
    monkeypatch.chdir(tmp_path)
    for name in ("runs/...", "sweeps/run"):
        shutil.copytree(a_classifier, tmp_path / "outputs" / name)
    exec(compile(block.content, name_of(block.page), "exec"), {})
