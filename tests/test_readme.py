"""The README and the pages: every link leads somewhere, every example works as shown."""

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
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import IS_CHECKOUT, PAGES, ROOT, anchors, blocks, commands, links, name_of

from speechformer.config import CONF, check_config
from speechformer.sweeps import launcher
from speechformer.training.run import execute

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")
OURS = [page for page in PAGES if page.name == "README.md"]
COMMANDS = sorted({(name_of(page), command) for page, command in commands(*OURS)})
# Commands that set up a machine, or that take too long here; their options are checked nevertheless
NOT_EXECUTED = ("bench", "download", "baselines")
SHELL = {"python3", "source", "pip", "tensorboard"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):  # the web
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", OURS, ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    limit = 200 if page == ROOT / "README.md" else 250
    assert len(page.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("page", OURS, ids=name_of)
def test_a_page_lists_its_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page == ROOT / "README.md":
        return
    (contents,) = re.findall(r"^Contents: (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert re.findall(r"\(#([^)]+)\)", contents) == [
        anchor for heading in re.findall(r"^## (.+)$", text, re.MULTILINE) if (anchor := slug(heading))
    ]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_configuration_page_names_every_choice(path: Path) -> None:
    text = (CONF / "README.md").read_text(encoding="utf-8")
    group = path.parent.name
    section = re.search(rf"^(##+) ({group}|{group.capitalize()}s)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"conf/README.md has no heading for the group {group}"
    rows = [line.split("|")[1] for line in section.group(3).splitlines() if line.startswith("|")]
    assert any(f"`{path.stem}`" in row for row in rows), (
        f"{group}={path.stem} has no row in the table under {section.group(2)!r} of conf/README.md"
    )


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_valid(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training commands compose and pass the checks; others parse; `make` has the target, pip the extra."""
    words = shlex.split(re.sub(r" [<>] \S+", "", command), comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        compose(*(word for word in words[2:] if not word.startswith("ARGS=")))
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", command)) <= extras.keys()
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
    launcher.register()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides([word for word in arguments if word != "-m"])
        return [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]


def plain(overrides: list[str]) -> dict:
    """Return the composed config as plain data; the launcher is checked by composing Hydra's part too."""
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command's arguments as it does, and stop there."""
    package = importlib.import_module(main_of(module))
    if not hasattr(package, "run_command"):  # download, corpora.sample: they begin at once
        assert hasattr(package, "main") or module == "speechformer.corpora.sample"
        return
    monkeypatch.setattr(package, "run_command", lambda command: None)
    if arguments[:1] == ["translation"]:
        monkeypatch.setattr("speechformer.bench.translation.run_command", lambda command: None)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    package.main()


EXECUTED = [
    (page, command)
    for page, command in COMMANDS
    if (name := command.split()[2:3] or [""])[0].startswith("speechformer.")
    and name[0].split(".")[1] not in NOT_EXECUTED
    and not {"-m", "--help", "--cfg", "<", "--watch"} & set(shlex.split(command, comments=True)[3:])
    and "experiment=" not in command  # test_conf.py runs them all
    and '"..."' not in command
    and not re.search(r"[A-Z]{4}$|\bNAME\b", command)
]


@pytest.mark.parametrize(("page", "command"), EXECUTED)
def test_a_command_does_what_it_says(
    page: str, command: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, on a small corpus, with small runs in place of RUN."""
    words = shlex.split(command, comments=True)[2:]
    module = words[0].removeprefix("speechformer.")
    little = request.getfixturevalue("little_pairs" if "task=translate" in command else "little")
    monkeypatch.chdir(tmp_path)
    if module == "train":
        corpus = "ted" if "task=translate" in command else "speeches"
        classes = [] if corpus == "ted" else ["corpus.classes=[ann,bob,cy]"]
        own = [word for word in words[1:] if not word.startswith("corpus")]
        small = [f"corpus={corpus}", f"corpus.root={little}", *classes, "trainer.max_steps=2", "machine=cpu"]
        result = execute(compose(*own, *small), tmp_path / "run")
        assert result["status"] == "finished"
        return
    runs = {"generate": "a_language_model", "translate": "a_translator", "positions": "a_language_model"}
    for k, word in enumerate(words):
        if re.fullmatch(r"RUN\d?", word):
            words[k] = str(copy_of(request.getfixturevalue(runs.get(module, "a_classifier")), tmp_path / word))
        words[k] = words[k].replace("FOLDER", str(little)).replace("outputs", str(tmp_path))
    if module == "positions" and "--run" in words:
        shutil.rmtree(words[-1])
        execute(compose(*TINY, "task=lm", "model=relative", "trainer.max_steps=1"), Path(words[-1]))
    if module in ("status", "report"):
        copy_of(request.getfixturevalue("a_classifier"), tmp_path / "sweeps" / "run")
    monkeypatch.setattr(sys, "argv", words)
    if module == "corpora.sample":
        return
    importlib.import_module(main_of(words[0])).main()


def main_of(module: str) -> str:
    """Return the module that `python -m` runs."""
    return f"{module}.__main__" if importlib.util.find_spec(f"{module}.__main__") else module


def copy_of(run: Path, folder: Path) -> Path:
    """Copy a run to a folder of the test's own."""
    return Path(shutil.copytree(run, folder, dirs_exist_ok=True))


PYTHON = [block for block in blocks(*OURS) if block.language == "python" and block.target is None]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: name_of(block.page))
def test_python_works_as_shown(
    block, a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    import speechformer

    def fit(*overrides: str, **options: object) -> object:
        own = [word for word in overrides if not word.startswith("corpus")]
        return train(*own, *TINY, "trainer.max_steps=2", **options)  # type: ignore[arg-type]

    train = speechformer.fit
    monkeypatch.setattr(speechformer, "fit", fit)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(a_classifier, tmp_path / "RUN")
    exec(compile(block.content, name_of(block.page), "exec"), {})
