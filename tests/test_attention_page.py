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
from conftest import TINY, compose, opened
from PIL import Image

from speechformer import attention
from speechformer.analysis import fonts
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


def test_pictures_and_page_of_each_task(
    a_classifier: Path,
    a_language_model: Path,
    a_translator: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for run, names in (
        (a_classifier, ["encoder"]),
        (a_language_model, ["decoder"]),
        (a_translator, ["encoder", "decoder", "cross"]),
    ):
        folder = tmp_path / run.name
        monkeypatch.setattr(sys, "argv", ["attention", str(run), SENTENCE, "--output", str(folder)])
        main()
        said = capsys.readouterr().out
        assert "FAIL" not in said and said.count("pass") >= 2
        for name in names:
            assert min(Image.open(folder / f"{name}.png").size) > 100
        page = content_of(folder / "attention.html")
        (shown,) = page["runs"]
        assert [*shown["model"]["parts"]] == names[:2] and page["text"] == SENTENCE and len(shown["checkpoints"]) == 1
    assert "translated: " in said


def test_the_page_holds_the_weights_and_figures(a_classifier: Path) -> None:
    """Oracle: the maps, to a 65535th."""
    (part,) = load(a_classifier).attention(SENTENCE)
    raw = base64.b64decode(encode_weights(part.weights))
    values = torch.tensor(struct.unpack(f"<{len(raw) // 2}H", raw)).view(part.weights.shape) / 65535
    torch.testing.assert_close(values, part.weights, atol=1e-5, rtol=0)
    assert encode_weights(part.weights) in render_page("text", [("a", [part], [])])


def test_every_word_is_escaped(a_classifier: Path, tmp_path: Path) -> None:
    weights = torch.ones(1, 1, 1, 1)
    text = render_page(
        HARMFUL,
        [
            (
                HARMFUL,
                [AttentionMap("encoder", [HARMFUL], [HARMFUL], weights, torch.ones(1, 1, dtype=torch.bool))],
                [HARMFUL],
            )
        ],
    )
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    assert content_of(tmp_path / "page.html")["text"] == HARMFUL
    assert text.count("</script>") == 2 and "onerror=document" not in text.replace("\\u003cimg src=x onerror", "")
    assert not re.search(r"https?://|src=[\"']?/|@import", TEMPLATE.read_text(encoding="utf-8"))  # needs no network


def test_a_failed_check_ends_the_command_with_an_error(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(attention, "check_maps", lambda *arguments: [Check("it holds", float("nan"), 0.0)])
    monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), SENTENCE, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="the weights are not valid attention weights"):
        main()
    assert re.search("FAIL +it holds +nan", capsys.readouterr().out)
    assert format_checks([Check("a", None, 0.0)]).splitlines()[1].split() == ["-", "a", "does", "not", "apply"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["CLASSIFIER", "x", "y"], "Give one sentence, not 2"),
        (["CLASSIFIER", " "], "Sentence 1 is empty"),
        (["CLASSIFIER", "x", "--beside", "LM"], "Compare runs of one task; these are of task=classify, task=lm"),
        (["CLASSIFIER", "--beside", "LM", "We will"], "Write the sentence before --beside"),
        (["RNN", "x"], "is a run of model=rnn, cell gru, which has no attention"),
    ],
)
def test_errors(
    arguments: list[str],
    sentence: str,
    a_classifier: Path,
    a_language_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if arguments[0] == "RNN":
        execute(compose(*TINY, "model=rnn", "trainer.max_steps=1"), tmp_path)
    runs = {"CLASSIFIER": str(a_classifier), "LM": str(a_language_model), "RNN": str(tmp_path)}
    monkeypatch.setattr(sys, "argv", ["attention", *(runs.get(argument, argument) for argument in arguments)])
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_a_long_text_is_cut_and_a_note_says_so(
    a_classifier: Path, a_language_model: Path, a_translator: Path
) -> None:
    text = "the people " * 9000
    for folder, most in ((a_classifier, 32), (a_language_model, 128)):
        run = load(folder)
        inputs = run.read(text, MAX_TOKENS)
        assert run.attention(inputs)[0].weights.shape[-1] == most
        assert f"the first {most} of its 18000 words" in inputs.notes[0]
    assert "trained on 32 tokens at once" in load(a_language_model).read(text).notes[-1]
    run = load(a_translator)
    inputs = run.read("the people " * 100, MAX_TOKENS)
    part = run.attention(inputs)[0]
    assert part.weights.shape[-1] == 128 and part.keys[-1] == "<eos>"
    assert "the first 127 of its" in inputs.notes[0]


def test_the_page_knows_which_pairs_are_masked(a_language_model: Path, tmp_path: Path) -> None:
    (part,) = load(a_language_model).attention(SENTENCE)
    (tmp_path / "page.html").write_text(render_page("text", [("a", [part], [])]), encoding="utf-8")
    (shown,) = content_of(tmp_path / "page.html")["runs"][0]["maps"]
    assert shown["mask"] == torch.ones(part.mask.shape).tril().int().flatten().tolist()
    assert "map.mask" in TEMPLATE.read_text(encoding="utf-8")


def test_runs_are_shown_side_by_side(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Runs with equal labels are named by folder; one without attention says so; unknown words are marked."""
    execute(compose(*TINY, "model=rnn", "trainer.max_steps=1"), tmp_path / "rnn")
    again = shutil.copytree(a_classifier, tmp_path / "again")
    arguments = [str(a_classifier), f"{SENTENCE} 😀", "--beside", str(again), str(tmp_path / "rnn")]
    monkeypatch.setattr(sys, "argv", ["attention", *arguments, "--output", str(tmp_path / "out")])
    main()
    names = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert names == ["1_encoder.png", "2_encoder.png"]
    shown = content_of(tmp_path / "out" / "attention.html")["runs"]
    assert [run["label"] for run in shown] == [
        f"alibi, scale 1 ({a_classifier.name})",
        "alibi, scale 1 (again)",
        "rnn, cell gru",
    ]
    assert "which has no attention" in shown[2]["notes"][0] and shown[2]["maps"] == []
    assert shown[0]["maps"][0]["keys"][-1] == "😀 <unk>" and shown[0]["notes"][0].endswith(", 😀")


def test_the_page_works_in_a_browser(
    browser: Any, a_classifier: Path, a_language_model: Path, tmp_path: Path
) -> None:
    """It renders, choosing and pointing change what is shown, figures are those of the maps; no error, no request."""
    run = load(a_classifier)
    maps = run.attention(SENTENCE)
    other = dataclasses.replace(maps[0], weights=maps[0].weights.flip(-1))
    (tmp_path / "page.html").write_text(
        render_page(SENTENCE, [("one", maps, []), ("two", [other], ["a note"])]), encoding="utf-8"
    )
    shown, said = opened(browser, tmp_path / "page.html")
    assert shown.text_content("#text") == SENTENCE and shown.locator("canvas.map").count() == 2
    at_first = shown.screenshot()
    shown.click("button[data-choice='layer:1']")
    shown.click("button[data-choice='head:1']")
    chosen = shown.screenshot()
    assert chosen != at_first
    first = shown.locator(".run").first
    row = first.locator("tbody tr.on td").all_text_contents()
    entropy, distance = (figure[1, 1].item() for figure in (maps[0].entropy(), maps[0].distance()))
    assert row == ["2", "2", "", f"{entropy:.2f}", f"{distance:.1f}"]
    assert first.locator(".cell").text_content().strip() == ""
    first.locator(".words").nth(1).locator("span").nth(2).hover()  # "mend", as the one that looks
    first.locator(".words").nth(0).locator("span").nth(4).hover()  # "harbours", as what is looked at
    assert first.locator(".cell").text_content() == f"mend → harbours: {maps[0].weights[1, 1, 2, 4]:.3f}"
    beside = shown.locator(".run").nth(1)
    assert beside.locator(".cell").text_content() == f"mend → harbours: {other.weights[1, 1, 2, 4]:.3f}"
    assert f"{other.distance()[1, 1]:.1f}" == beside.locator("tbody tr.on td").nth(4).text_content()
    assert beside.locator("p", has_text="a note").count() == 1
    words = first.locator(".words").nth(0).locator("span")
    assert [float(words.nth(k).get_attribute("title")) for k in range(words.count())] == pytest.approx(
        maps[0].weights[1, 1, 2].tolist(), abs=6e-4
    )
    assert shown.screenshot() != chosen and said == []
    box, we = shown.locator("canvas.map").first.bounding_box(), maps[0].queries[0].replace(" ", "·")
    shown.mouse.move(box["x"] + box["width"] - 4, box["y"] + 4)
    assert first.locator(".cell").text_content() == f"{we} → .: {maps[0].weights[1, 1, 0, -1]:.3f}"
    shown.click("button[data-choice='head:-1']")
    shown.mouse.move(box["x"] + box["width"] - 6, box["y"] + 6)
    assert first.locator(".cell").text_content() == f"{we} → .: {maps[0].weights[1, :, 0, -1].mean():.3f}"
    assert said == []


def test_a_browser_executes_no_word(browser: Any, tmp_path: Path) -> None:
    part = AttentionMap(
        "encoder", [HARMFUL] * 2, [HARMFUL] * 2, torch.full((1, 1, 2, 2), 0.5), torch.ones(2, 2, dtype=torch.bool)
    )
    (tmp_path / "page.html").write_text(render_page(HARMFUL, [(HARMFUL, [part], [HARMFUL])]), encoding="utf-8")
    shown, said = opened(browser, tmp_path / "page.html")
    shown.locator(".words span").first.hover()
    assert shown.title() == "Attention" and shown.text_content("#text") == HARMFUL and said == []


def test_each_sentence_has_a_folder_and_a_named_one_says_what_it_replaces(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (SENTENCE, "The harbours!", "日本"):
        monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), text])
        main()
    folders = (tmp_path / "outputs" / "attention" / a_classifier.name).iterdir()
    names = sorted(re.sub("-?[0-9a-f]{6}$", "", folder.name) for folder in folders)
    assert names == ["", "the-harbours", "we-will-mend-the-harbours-my-friend"]
    assert "replaced" not in capsys.readouterr().out
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), SENTENCE, "--output", "own"])
        main()
    assert "The maps that were in own are replaced." in capsys.readouterr().out


def test_an_output_that_is_a_file_is_an_error_before_anything_is_computed(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    page = tmp_path / "page.html"
    page.touch()
    monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), SENTENCE, "--output", str(page)])
    with pytest.raises(SystemExit, match=r"page.html is a file; name a folder\."):
        main()
    assert not capsys.readouterr().out


def test_a_masked_cell_of_the_static_page_says_so(browser: Any, a_language_model: Path, tmp_path: Path) -> None:
    maps = load(a_language_model).attention(SENTENCE)
    (tmp_path / "page.html").write_text(render_page(SENTENCE, [("one", maps, [])]), encoding="utf-8")
    shown, said = opened(browser, tmp_path / "page.html")
    shown.locator(".words").nth(1).locator("span").nth(1).hover()
    shown.locator(".words").nth(0).locator("span").nth(3).hover()
    assert shown.text_content(".cell") == "will → the: masked" and said == []


def test_pictures_take_a_font_that_has_the_characters(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the character map of each font. Without any, the command names the characters."""
    stix = fonts.default_path().replace("DejaVuSans.ttf", "STIXNonUni.ttf")
    own = fonts.characters(stix) - fonts.characters(fonts.default_path())
    letter = chr(max(own))
    monkeypatch.setattr(fonts, "installed", lambda: [stix])
    fonts.path_for.cache_clear()
    assert fonts.path_for(f"a{letter}") == stix and fonts.path_for("é—") == fonts.default_path()
    assert fonts.not_drawn(["a", letter]) == ""
    monkeypatch.setattr(fonts, "installed", list)
    fonts.path_for.cache_clear()
    monkeypatch.setattr(sys, "argv", ["attention", str(a_classifier), "We 日本", "--output", str(tmp_path / "own")])
    main()
    assert "The pictures have boxes for 日本: install a font with them" in capsys.readouterr().out
    fonts.path_for.cache_clear()
