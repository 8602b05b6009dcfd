"""What a user reads about keys: `--help`, and the answer to a wrong key or value."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from speechformer import __main__ as overview
from speechformer import train
from speechformer.config import compose
from speechformer.errors import UserError
from speechformer.keys import CONF, GROUPS, dotted, load_plain, setting

FILES = [CONF / "config.yaml", *(file for group in GROUPS for file in sorted((CONF / group).glob("*.yaml")))]
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_key_has_a_comment(file: Path) -> None:
    options, text = load_plain(file), file.read_text(encoding="utf-8")
    for key in dotted(options.get(file.parent.name, options)):
        name = key.rpartition(".")[2]
        is_group = re.search(rf"^ *{name}:( *#.*)?$", text, re.MULTILINE)
        assert (
            key.startswith(("defaults", "hydra")) or is_group or re.search(rf"^ *{name}: .*# \w", text, re.MULTILINE)
        )


def test_help_has_the_words_of_the_chosen_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "recipe=vaswani", "pattern=window", "--help"])
    with pytest.raises(SystemExit):
        train.main()
    shown = capsys.readouterr().out
    assert "\n# recipe=vaswani\n" in shown and "\nlr: 1.0 # a factor; 1 in the paper\n" in shown
    assert "\nwindow: 5 # keys including itself" in shown
    assert "\nstudy: null # a name; the report has a table for each study\n" in shown
    assert "root: ${corpus.root}" in shown and "$$" not in shown and "app_name" not in shown


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
        ("corpus.classes=[ann,bób,çy]", """'corpus.classes=["ann","bób","çy"]'"""),
        ("corpus.root=/home/jérôme/my texts", """'corpus.root="/home/jérôme/my texts"'"""),
        ("study=a=b", """'study="a=b"'"""),
    ],
)
def test_a_value_that_needs_quotes_is_answered_with_the_corrected_word(override: str, answer: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be parsed; .* outside ASCII in quotes: {re.escape(answer)}$"):
        compose([override])


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
