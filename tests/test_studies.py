"""The scripts in studies/, which print their commands with DRY=1: each is valid, and each experiment has one."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from conftest import EXPERIMENTS, compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pages import IS_CHECKOUT, ROOT

from speechformer.config import CONF, check_config
from studies import check

pytestmark = pytest.mark.skipif(not IS_CHECKOUT or not shutil.which("bash"), reason="needs a checkout and bash")
STUDIES = sorted(path.stem for path in (ROOT / "studies").glob("*.sh") if path.stem != "common")


@functools.cache
def commands(study: str) -> list[list[str]]:
    """Return the commands of a study, each from the name of its module on."""
    done = subprocess.run(
        ["bash", f"studies/{study}.sh"], cwd=ROOT, env={**os.environ, "DRY": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [shlex.split(line)[2:] for line in done.stdout.splitlines()]


def overrides(study: str) -> list[list[str]]:
    """Return the overrides of the training commands of a study, without Hydra's own."""
    trains = [command[1:] for command in commands(study) if command[0] == "speechformer.train"]
    return [[word for word in words if not word.startswith(("--multirun", "hydra"))] for words in trains]


def swept(words: list[str]) -> list[list[str]]:
    """Return the values that each override of a command takes."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(words)
        return [
            [f"{word.key_or_group}={value}" for value in word.sweep_string_iterator()]
            if word.is_sweep_override()
            else [word.input_line or ""]
            for word in parsed
        ]


def jobs(study: str) -> Iterator[tuple[str, ...]]:
    """Yield jobs of a study: not all combinations, but each value of each override, with one seed."""
    for words in {tuple(word for word in words if not word.startswith("seed=")) for words in overrides(study)}:
        values = swept(list(words))
        for k in range(max(map(len, values))):
            yield tuple(choices[k % len(choices)] for choices in values)


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_every_override_of_a_study_composes(study: str) -> None:
    composed = {job: compose(*job) for job in jobs(study)}
    assert composed
    for config in composed.values():
        check_config(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("study", STUDIES)
def test_hydra_parses_every_word_of_a_study(study: str) -> None:
    words = {word for command in commands(study) if command[0] == "speechformer.train" for word in command[1:]}
    parsed = OverridesParser.create().parse_overrides(sorted(words - {"--multirun"}))
    assert all(word.get_key_element() for word in parsed)


def test_the_studies_run_every_experiment_and_nothing_else() -> None:
    choices = [word for study in STUDIES for words in overrides(study) for word in words if "experiment=" in word]
    run = {value.removeprefix("experiment=") for word in set(choices) for value in swept([word])[0]}
    assert run == set(EXPERIMENTS)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_writes_the_archive_that_it_names(study: str) -> None:
    script = (ROOT / "studies" / f"{study}.sh").read_text(encoding="utf-8")
    archive = script.split("# Writes ")[1].split(".\n")[0]
    assert f"\narchive {Path(archive).parent} " in script
    page = (ROOT / archive).with_name("README.md")  # of a study that has not been run to its end there is none
    assert (ROOT / archive).exists() or not page.exists()


@pytest.mark.parametrize(
    ("study", "last", "more"), [("ladder_lm", 11, []), ("ladder_classify", 6, ["protocol.fold=0"])]
)
def test_the_strong_model_is_the_last_rung_of_its_ladder(study: str, last: int, more: list[str]) -> None:
    """Oracle: the rungs of the study, of which each is the one before it with more settings."""
    rungs = [words for words in overrides(study) if f"experiment={study}" in words][: last + 1]
    assert all(lower[:-1] == upper[: len(lower) - 1] for lower, upper in itertools.pairwise(rungs))
    words = [word for word in rungs[-1] if not word.startswith(("experiment=", "corpus=", "study=", "seed="))]
    strong = study.replace("ladder", "strong")
    assert words and compose(f"experiment={study}", *words, *more) == compose(f"experiment={strong}")


def test_an_archive_with_more_results_stays(tmp_path: Path) -> None:
    """A study whose runs all fail neither writes an archive nor touches the older one; a whole one replaces it."""
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    archive = tmp_path / "outputs" / "reference" / "ladder_translate" / "runs.tar.xz"

    def run(script: str) -> int:
        python.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
        return subprocess.run(
            ["bash", str(tmp_path / "studies" / "ladder_translate.sh")], cwd="/", capture_output=True
        ).returncode

    folder = "outputs/reproduce-ladder-translate/$$"
    assert run("exit 1") != 0 and not archive.exists()
    assert run(f"mkdir -p {folder}; echo 1 > {folder}/result.json; exit 1") == 0  # a failure does not stop the rest
    first = archive.read_bytes()
    listed = subprocess.run(["tar", "-tJf", archive], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 24
    shutil.rmtree(tmp_path / "outputs" / "reproduce-ladder-translate")
    assert run("exit 1") != 0 and archive.read_bytes() == first


@pytest.mark.parametrize(
    ("page", "own", "is_right"),
    [
        ("is 12.3 ± 0.4 |", "is 12.34567 ± 0.351 |", True),
        ("is 12.3 ± 0.4 |", "is 12.35567 ± 0.351 |", False),
        ("is 12.3 ± 0.4 |", "is 12.34567 ± 0.349 |", False),
        ("is −12.3 [+1.0, 2] |", "is −12.30001 [+1, 2] |", True),
        ("is 12.3 [+1.0, 2] |", "is −12.30001 [+1, 2] |", False),
        ("is 1.20e−05, 5,755 |", "is 1.2049e−05, 5755 |", True),
        ("is 1.20e−05, 5,755 |", "is 1.2051e−05, 5755 |", False),
        ("is < 0.001 |", "is 0.0012 |", False),
        ("is 12.3 ± 0 |", "is 12.3 ± 0.49 |", False),
        ("is 12.3 |", "is +12.3 |", False),
        ("is 1,500,001 |", "is 1500000 |", False),
        ("window, window 5 | 3", "window¤ | 3", True),
        ("keeps 1,024 numbers", "keeps ¿ numbers", True),
        ("keeps no numbers", "keeps ¿ numbers", False),
        ("**supported** 1 |", "inconclusive 1 |", False),
        ("two lines\n1", "two lines", False),
    ],
)
def test_a_page_is_right_if_its_words_are_the_same_and_its_numbers_are_rounded(
    page: str, own: str, is_right: bool
) -> None:
    assert all(not words for _, words, _ in check.differences(page, own)) == is_right


def test_the_check_of_the_pages_has_code_of_its_own() -> None:
    words = (ROOT / "studies" / "check.py").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (speechformer|studies)", words, re.M)


@pytest.mark.slow
def test_the_check_finds_a_changed_number_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = check.PAGES["contexts"]
    text = (ROOT / page).read_text(encoding="utf-8")
    place = re.search(r"(?<= ± \d\.)\d", text)
    assert place
    copy = tmp_path / page
    copy.parent.mkdir(parents=True)
    for digit, is_found in ((place[0], False), (str((int(place[0]) + 5) % 10), True)):
        copy.write_text(text[: place.start()] + digit + text[place.end() :], encoding="utf-8")
        with pytest.raises(SystemExit) as done:
            check.main(["--root", str(tmp_path), "--page", "contexts"])
        line = text.count("\n", 0, place.start()) + 1
        assert (f"{page}:{line}: " in capsys.readouterr().out) == bool(done.value.code) == is_found
