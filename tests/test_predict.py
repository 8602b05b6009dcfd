"""Oracle: the probability of the sentence without each word, one by one."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from speechformer.analysis.erasure import erase
from speechformer.analysis.load import load
from speechformer.errors import UserError
from speechformer.predict import format_prediction, main

SENTENCE = "We will mend the harbours, my fellow citizens."


def test_the_importance_of_a_word_is_the_drop_of_ln_p_without_it(a_classifier: Path) -> None:
    run = load(a_classifier)
    run.task.cpu()
    ids = run.tokenizer.encode(SENTENCE)
    log, weights = erase(run.task.model, torch.tensor(ids))
    c = int(log.argmax())
    with torch.no_grad():
        whole = run.task.model(torch.tensor([ids])).softmax(-1)[0]
        torch.testing.assert_close(log.exp(), whole)
        for t in range(len(ids)):
            rest = run.task.model(torch.tensor([ids[:t] + ids[t + 1 :]])).softmax(-1)[0]
            assert weights[t].item() == pytest.approx(math.log(whole[c]) - math.log(rest[c]), abs=1e-5)


def test_a_prediction_names_what_was_read(a_classifier: Path) -> None:
    run = load(a_classifier)
    prediction = run.predict(SENTENCE + " Zyzzyva 😀 שלום.")
    assert set(prediction.probabilities) == {"ann", "bob", "cy"}
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert prediction.probabilities[prediction.speaker] == max(prediction.probabilities.values())
    known = dict(zip(prediction.words, prediction.known))
    assert not known["Zyzzyva"] and not known["😀"] and not known["שלום"] and known["the"]
    assert run.predict("harbours").weights is None
    nothing = dataclasses.replace(prediction, weights=[0.001] * len(prediction.words))
    assert "no single word changes ln P by 0.005 or more" in format_prediction(nothing)
    assert run.predict("harbours").as_json()["words"] == [{"word": "harbours", "known": True, "weight": None}]


def test_a_long_text_is_cut_as_in_training_and_a_note_says_so(
    a_classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """100 kB on a line: its first 32 words, as the run was trained and tested."""
    text = "the people " * 9_000
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), text])
    main()
    assert "cut at 32 words, as in training; 17968 words were left out" in capsys.readouterr().out
    run = load(a_classifier)
    assert run.predict(text).probabilities == run.predict("the people " * 16).probabilities


def test_the_command_line(a_classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    prediction = load(a_classifier).predict(SENTENCE)
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), SENTENCE, "--json", "the people"])
    main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [SENTENCE, "the people"]
    assert lines[0]["probabilities"] == pytest.approx(prediction.probabilities)
    assert [entry["word"] for entry in lines[0]["words"]] == prediction.words
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), SENTENCE])
    main()
    shown = capsys.readouterr().out
    strongest = max(zip(prediction.weights or [], prediction.words), key=lambda entry: abs(entry[0]))
    assert f"{prediction.speaker} " in shown.splitlines()[1] and f"{strongest[1]} {strongest[0]:+.2f}" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", " "], "Sentence 2 is empty"),
        (["caf\udce9"], "is not UTF-8"),
        (["x", "--checkpoint", "y"], "choose one of"),
    ],
)
def test_errors(arguments: list[str], sentence: str, a_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["predict", str(a_classifier), *arguments])
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_it_needs_a_classifier(a_language_model: Path) -> None:
    with pytest.raises(UserError, match="predict needs a run of task=classify"):
        load(a_language_model).predict("x")
