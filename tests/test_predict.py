"""Oracle: the probability of the sentence without each word, one by one."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from speechformer.analysis.load import load_trained
from speechformer.errors import UserError
from speechformer.predict import erasure, in_words, main, predict

SENTENCE = "We will mend the harbours, my fellow citizens."


def test_a_words_figure_is_by_how_much_ln_p_falls_without_it(a_classifier: Path) -> None:
    run = load_trained(a_classifier)
    run.task.cpu()
    _, ids = run.words(SENTENCE)
    log, weights = erasure(run.task.model, torch.tensor(ids))
    c = int(log.argmax())
    with torch.no_grad():
        whole = run.task.model(torch.tensor([ids])).softmax(-1)[0]
        torch.testing.assert_close(log.exp(), whole)
        for t in range(len(ids)):
            rest = run.task.model(torch.tensor([ids[:t] + ids[t + 1 :]])).softmax(-1)[0]
            assert weights[t].item() == pytest.approx(math.log(whole[c]) - math.log(rest[c]), abs=1e-5)


def test_a_prediction_names_what_was_read(a_classifier: Path) -> None:
    run = load_trained(a_classifier)
    found = predict(run, SENTENCE + " Zyzzyva 😀 שלום.")
    assert set(found.probabilities) == {"ann", "bob", "cy"}
    assert sum(found.probabilities.values()) == pytest.approx(1)
    assert found.probabilities[found.speaker] == max(found.probabilities.values())
    known = dict(zip(found.words, found.known))
    assert not known["Zyzzyva"] and not known["😀"] and not known["שלום"] and known["the"]
    assert predict(run, "harbours").weights is None
    nothing = dataclasses.replace(found, weights=[0.001] * len(found.words))
    assert "no word alone changes it by 0.005 or more" in in_words(nothing)
    assert predict(run, "harbours").as_json()["words"] == [{"word": "harbours", "known": True, "weight": None}]


def test_a_long_text_is_read_as_in_training_and_that_is_said(
    a_classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """100 kB on a line: its first 32 words, as the run was trained and tested."""
    text = "the people " * 9_000
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), text])
    main()
    assert "read were the first 32 words, as in training; 17968 were left out" in capsys.readouterr().out
    run = load_trained(a_classifier)
    assert predict(run, text).probabilities == predict(run, "the people " * 16).probabilities


def test_the_command_line(a_classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    found = predict(load_trained(a_classifier), SENTENCE)
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), SENTENCE, "--json", "the people"])
    main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [SENTENCE, "the people"]
    assert lines[0]["probabilities"] == pytest.approx(found.probabilities)
    assert [entry["word"] for entry in lines[0]["words"]] == found.words
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), SENTENCE])
    main()
    shown = capsys.readouterr().out
    strongest = max(zip(found.weights or [], found.words), key=lambda entry: abs(entry[0]))
    assert f"{found.speaker} " in shown.splitlines()[1] and f"{strongest[1]} {strongest[0]:+.2f}" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["x", " "], "Sentence 2 is empty"), (["caf\udce9"], "is not UTF-8"), (["x", "--checkpoint", "y"], "one of")],
)
def test_refusals(arguments: list[str], sentence: str, a_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), *arguments])
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_it_needs_a_classifier(a_language_model: Path) -> None:
    with pytest.raises(UserError, match="this needs one of task=classify"):
        load_trained(a_language_model, "classify")
