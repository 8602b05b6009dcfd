"""The command that draws attention: its files and output, and the page in a browser."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from conftest import TINY, compose, opened
from PIL import Image

from speechformer.analysis import attention_maps, fonts
from speechformer.analysis.attention_maps import AttentionMap, Check
from speechformer.analysis.attention_page import TEMPLATE, encode_weights, render_page
from speechformer.analysis.load import load
from speechformer.attention import MAX_TOKENS, format_checks, main
from speechformer.training.run import execute

SENTENCE = "We will mend the harbours, my friend."
HARMFUL = "</script><script>document.title='executed'</script><img src=x onerror=document.title='executed'>"


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


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """Write a page of maps; return its path."""

    def write(text: str, *runs: tuple[str, list[AttentionMap], list[str]]) -> Path:
        (tmp_path / "page.html").write_text(render_page(text, [*runs]), encoding="utf-8")
        return tmp_path / "page.html"

    return write


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


def test_the_page_holds_the_weights_and_the_mask(a_language_model: Path, page: Any) -> None:
    """Oracle: the maps, to a 65535th."""
    (part,) = load(a_language_model).attention(SENTENCE)
    raw = base64.b64decode(encode_weights(part.weights))
    values = torch.tensor(struct.unpack(f"<{len(raw) // 2}H", raw)).view(part.weights.shape) / 65535
    torch.testing.assert_close(values, part.weights, atol=1e-5, rtol=0)
    path = page("text", ("a", [part], []))
    (shown,) = content_of(path)["runs"][0]["maps"]
    assert shown["mask"] == torch.ones(part.mask.shape).tril().int().flatten().tolist()
    assert encode_weights(part.weights) in path.read_text(encoding="utf-8")


def harmful_map() -> AttentionMap:
    weights, mask = torch.full((1, 1, 2, 2), 0.5), torch.ones(2, 2, dtype=torch.bool)
    return AttentionMap("encoder", [HARMFUL] * 2, [HARMFUL] * 2, weights, mask)


def test_every_word_is_escaped(page: Any) -> None:
    path = page(HARMFUL, (HARMFUL, [harmful_map()], [HARMFUL]))
    text = path.read_text(encoding="utf-8")
    assert content_of(path)["text"] == HARMFUL
    assert text.count("</script>") == 2 and "onerror=document" not in text.replace("\\u003cimg src=x onerror", "")
    assert not re.search(r"https?://|src=[\"']?/|@import", TEMPLATE.read_text(encoding="utf-8"))  # needs no network


def test_a_failed_check_ends_the_command_with_an_error(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(attention_maps, "check_maps", lambda *arguments: [Check("it holds", float("nan"), 0.0)])
    monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), SENTENCE, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="the weights are not valid attention weights"):
        main()
    assert re.search("FAIL +it holds +nan", capsys.readouterr().out)
    assert format_checks([Check("a", None, 0.0)]).splitlines()[1].split() == ["-", "a", "does", "not", "apply"]


def test_errors(a_classifier: Path, a_language_model: Path, recurrent: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    for arguments, sentence in (
        ([a_classifier, "x", "y"], "Give one sentence, not 2"),
        ([a_classifier, " "], "Sentence 1 is empty"),
        ([a_classifier, "x", "--beside", a_language_model], "of one task; these are of task=classify, task=lm"),
        ([a_classifier, "--beside", a_language_model, "We will"], "Write the sentence before --beside"),
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


def test_runs_are_shown_side_by_side(a_classifier: Path, recurrent: Path, tmp_path: Path) -> None:
    """Runs with equal labels are named by folder; one without attention says so; unknown words are marked."""
    again, out = shutil.copytree(a_classifier, tmp_path / "again"), tmp_path / "out"
    said = call(main, a_classifier, f"{SENTENCE} 😀", "--beside", again, recurrent, "--output", out)[0]
    assert "replaced" not in said
    assert sorted(path.name for path in out.glob("*.png")) == ["1_encoder.png", "2_encoder.png"]
    shown = content_of(out / "attention.html")["runs"]
    labels = [f"alibi, scale 1 ({a_classifier.name})", "alibi, scale 1 (again)", "rnn, cell gru"]
    assert [run["label"] for run in shown] == labels
    assert "which has no attention" in shown[2]["notes"][0] and shown[2]["maps"] == []
    assert shown[0]["maps"][0]["keys"][-1] == "😀 <unk>" and shown[0]["notes"][0].endswith(", 😀")
    assert f"The maps that were in {out} are replaced." in call(main, a_classifier, SENTENCE, "--output", out)[0]


def test_each_sentence_has_a_folder(a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (SENTENCE, "日本"):
        call(main, a_classifier, text)
    folders = (tmp_path / "outputs" / "attention" / a_classifier.name).iterdir()
    names = sorted(re.sub("-?[0-9a-f]{6}$", "", folder.name) for folder in folders)
    assert names == ["", "we-will-mend-the-harbours-my-friend"]


def test_pictures_name_the_characters_that_no_font_has(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a font of matplotlib with letters that the default one has not."""
    stix = fonts.default_path().replace("DejaVuSans.ttf", "STIXNonUni.ttf")
    letter = chr(max(fonts.characters(stix) - fonts.characters(fonts.default_path())))
    for installed, said in (([stix], None), ([], f"The pictures have boxes for {letter}: install a font with them")):
        monkeypatch.setattr(fonts, "installed", lambda: installed)  # noqa: B023
        fonts.path_for.cache_clear()
        printed = call(main, a_classifier, f"We {letter}", "--output", tmp_path / str(len(installed)))[0]
        assert said in printed if said else "boxes" not in printed
    fonts.path_for.cache_clear()


@pytest.mark.slow
def test_the_page_works_in_a_browser(browser: Any, a_classifier: Path, a_language_model: Path, page: Any) -> None:
    """Choosing and pointing change what is shown, figures are those of the maps; no word is executed, no request."""
    maps = load(a_classifier).attention(SENTENCE)
    other = dataclasses.replace(maps[0], weights=maps[0].weights.flip(-1))
    shown, said = opened(browser, page(SENTENCE, ("one", maps, []), ("two", [other], [])))
    assert shown.text_content("#text") == SENTENCE and shown.locator("canvas.map").count() == 2
    shown.click("button[data-choice='layer:1']")
    shown.click("button[data-choice='head:1']")
    first, beside = shown.locator(".run").nth(0), shown.locator(".run").nth(1)
    row = first.locator("tbody tr.on td").all_text_contents()
    assert row[:2] == ["2", "2"] and row[3] == f"{maps[0].entropy()[1, 1]:.2f}"
    first.locator(".words").nth(1).locator("span").nth(2).hover()  # "mend", as the one that looks
    first.locator(".words").nth(0).locator("span").nth(4).hover()  # "harbours", as what is looked at
    for run, own in ((first, maps[0]), (beside, other)):
        assert run.locator(".cell").text_content() == f"mend → harbours: {own.weights[1, 1, 2, 4]:.3f}"
    causal, errors = opened(browser, page(SENTENCE, ("one", load(a_language_model).attention(SENTENCE), [])))
    causal.locator(".words").nth(1).locator("span").nth(1).hover()
    causal.locator(".words").nth(0).locator("span").nth(3).hover()
    assert causal.text_content(".cell") == "will → the: masked" and said == errors == []
    shown, said = opened(browser, page(HARMFUL, (HARMFUL, [harmful_map()], [HARMFUL])))
    shown.locator(".words span").first.hover()
    assert shown.title() == "Attention" and shown.text_content("#text") == HARMFUL and said == []
