"""What a user reads about keys: `--help`, and the answer to a wrong key or value."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from conftest import compose as composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import speechformer
from speechformer import __main__ as overview
from speechformer import train
from speechformer.config import compose
from speechformer.errors import UserError
from speechformer.keys import CONF, GROUPS, corrected, describe, read_keys, setting, walk

CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12)


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda choice: choice)
def test_help_explains_every_key(group: str, choice: str) -> None:
    """A key without a comment is a group of keys."""
    cfg = composed(f"{group}={choice}")
    choices = {"task": "classify", "model": "sinusoidal", "pattern": "full", "recipe": "adam", "protocol": "paper"}
    choices |= {"corpus": "auto", "machine": "auto", "logger": "tensorboard", "probe": "copy", group: choice}
    text = describe(OmegaConf.to_yaml(cfg), choices)
    for line, key, match in walk(text):
        value = match and OmegaConf.select(cfg, key)
        assert not match or "#" in line or OmegaConf.is_dict(value), line
    assert OmegaConf.to_container(OmegaConf.create(text)) == OmegaConf.to_container(cfg)
    assert read_keys(group, choice)


def test_help_has_the_words_of_the_chosen_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "recipe=vaswani", "pattern=window", "--help"])
    with pytest.raises(SystemExit):
        train.main()
    shown = capsys.readouterr().out
    assert "  lr: 1.0  # a factor; 1 in the paper\n" in shown and "\n  window: 5  # keys including itself" in shown
    assert "\nstudy: null  # a name; the report has a table for each study\n" in shown
    assert "root: ${corpus.root}" in shown and "$$" not in shown


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lr=0.1", "Did you mean recipe.lr?"),
        ("learning_rate=0.1", "Did you mean recipe.lr?"),
        ("model.lr=0.1", "Did you mean recipe.lr?"),
        ("max_steps=3", "Did you mean trainer.max_steps?"),
        ("epochs=3", "Did you mean trainer.max_epochs?"),
        ("recipe.width=3", "Did you mean width?"),
        ("corpus.classes=[a,b]", "corpus.classes needs corpus=sample or corpus=speeches in the command."),
        ("task.beam=2", "task.beam needs task=translate in the command."),
        ("model.scale=2", "model.scale needs model=alibi in the command."),
        ("pattern.stride=2", "pattern.stride needs pattern=strided in the command."),
        ("corpus.clean.words=3", "corpus.clean needs corpus=digits or corpus=sample or corpus=ted in the"),
    ],
)
def test_a_key_in_the_wrong_place_is_answered_with_the_right_one(override: str, answer: str) -> None:
    with pytest.raises(UserError, match=re.escape(answer)):
        compose([override])


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("corpus.classes=[ann,bób,çy]", """'corpus.classes=[ann,"bób","çy"]'"""),
        ("corpus.root=/home/jérôme/my texts", """'corpus.root="/home/jérôme/my texts"'"""),
        ("study=a=b", """'study="a=b"'"""),
    ],
)
def test_a_value_that_needs_quotes_is_answered_with_the_corrected_word(override: str, answer: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be parsed; .* outside ASCII in quotes: {re.escape(answer)}$"):
        compose([override])
    assert corrected("study=é,b", sweep=True) == """'study="é",b'"""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_the_corrected_word_has_the_value_that_was_meant(names: list[str]) -> None:
    """Oracle: the shell's splitting, and Hydra's own parser."""
    parser = OverridesParser.create()
    for value in (names, names[0]):
        (word,) = shlex.split(setting("corpus.classes", value))
        assert parser.parse_override(word).value() == value


def test_the_package_lists_its_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["speechformer"])
    overview.main()
    shown = capsys.readouterr().out
    for name in ("train", "predict", "report", "corpora.sample", "corpora.authors"):
        assert re.search(rf"^python -m speechformer\.{re.escape(name)} +[A-Z]\w+ .*[^.]$", shown, re.MULTILINE), name
    monkeypatch.setattr(sys, "argv", ["speechformer", "train", "lr=1"])
    with pytest.raises(SystemExit, match=r"write python -m speechformer\.train \.\.\.\.$"):
        overview.main()


@pytest.mark.parametrize("module", [overview, train])
def test_the_version_is_ours(module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "argv", ["command", "--version"])
    module.main()
    assert capsys.readouterr().out == f"speechformer {speechformer.__version__}\n"
