"""The command that draws attention: its files and output, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import call
from conftest import TINY, compose, run_in
from PIL import Image

from speechformer.analysis import attention_maps
from speechformer.analysis.attention_maps import Check
from speechformer.analysis.load import load
from speechformer.attention import MAX_TOKENS, format_checks, main
from speechformer.training.run import execute

SENTENCE = "We will mend the harbours, my friend."


def content_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    element = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    assert element
    return json.loads(element[1])


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without attention."""
    folder = tmp_path_factory.mktemp("rnn")
    execute(compose(*TINY, "model=rnn", "trainer.max_steps=1"), folder)
    return folder


def test_pictures_and_page_of_each_task(
    a_classifier: Path, a_language_model: Path, a_translator: Path, tmp_path: Path
) -> None:
    for run, names in (
        (a_classifier, ["encoder"]),
        (a_language_model, ["decoder"]),
        (a_translator, ["encoder", "decoder", "cross"]),
    ):
        folder = tmp_path / run.name
        said = call(main, run, SENTENCE, "--output", folder)[0]
        assert "FAIL" not in said and said.count("pass") >= 2
        for name in names:
            assert min(Image.open(folder / f"{name}.png").size) > 100
        content = content_of(folder / "attention.html")
        (shown,) = content["runs"]
        assert [*shown["model"]["parts"]] == names[:2] and content["text"] == SENTENCE
    assert "translated: " in said


def test_a_failed_check_ends_the_command_with_an_error(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(attention_maps, "check_maps", lambda *arguments: [Check("it holds", float("nan"), 0.0)])
    monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), SENTENCE, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="the weights are not valid attention weights"):
        main()
    assert re.search("FAIL +it holds +nan", capsys.readouterr().out)
    line = format_checks([Check("a", None, 0.0)]).splitlines()[1]
    assert line.split() == ["-", "a", "does", "not", "apply", "0e+00"]


def test_errors(a_classifier: Path, a_language_model: Path, recurrent: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    for arguments, sentence in (
        ([a_classifier, "x", "y"], "Give one sentence, not 2"),
        ([a_classifier, " "], "A sentence is empty"),
        ([a_classifier, "--beside", a_language_model, "We will"], "We will: no such folder"),
        ([recurrent, "x"], "is a run of model=rnn, cell gru, which has no attention"),
        ([a_classifier, "x", "--output", tmp_path / "page.html"], r"page.html is a file; name a folder\."),
    ):
        with pytest.raises(SystemExit, match=sentence):
            call(main, *arguments)


def test_a_long_text_is_cut_and_a_note_says_so(a_language_model: Path, a_translator: Path) -> None:
    run = load(a_language_model)
    inputs = run.read("the people " * 9000, MAX_TOKENS)
    assert run.attention(inputs)[0].weights.shape[-1] == 128
    assert "the first 128 of its 18000 words" in inputs.notes[0]
    assert "trained on 32 tokens at once" in inputs.notes[-1]
    run = load(a_translator)
    inputs = run.read("the people " * 100, MAX_TOKENS)
    part = run.attention(inputs)[0]
    assert part.weights.shape[-1] == 128 and part.keys[-1] == "<eos>" and "the first 127 of its" in inputs.notes[0]


def test_runs_are_shown_side_by_side(a_classifier: Path, tmp_path: Path) -> None:
    """Runs with equal labels are named by folder; unknown words are marked."""
    again, out = shutil.copytree(a_classifier, tmp_path / "again"), tmp_path / "out"
    call(main, a_classifier, SENTENCE, "--beside", again, "--output", out, "--format", "svg")
    assert sorted(path.name for path in out.glob("*.?[vn]g")) == ["1_encoder.svg", "2_encoder.svg"]
    said = call(main, a_classifier, f"{SENTENCE} 😀", "--beside", again, "--output", out)[0]
    assert said.count("read as <unk>: harbours") + said.count(", 😀") >= 2
    assert sorted(path.name for path in out.glob("*.png")) == ["1_encoder.png", "2_encoder.png"]
    shown = content_of(out / "attention.html")["runs"]
    assert [run["label"] for run in shown] == [f"alibi, scale 1 ({name})" for name in (a_classifier.name, "again")]


def test_a_run_that_the_live_page_cannot_compute_has_pictures(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "model=forgetting", "trainer.max_steps=1")
    said = call(main, run, SENTENCE, "--output", tmp_path / "out")[0]
    assert "No page was written. " in said and "model=forgetting is not supported by the live page" in said
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["encoder.png"]


def test_each_sentence_has_a_folder(a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (SENTENCE, "日本"):
        call(main, a_classifier, text)
    folders = (tmp_path / "outputs" / "attention" / a_classifier.name).iterdir()
    names = sorted(re.sub("-?[0-9a-f]{6}$", "", folder.name) for folder in folders)
    assert names == ["", "We-will-mend-the-harbours-my-friend."]
