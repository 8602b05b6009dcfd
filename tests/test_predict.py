"""Oracle: the probability of the sentence without each word, one by one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from commands import call

from speechformer.analysis.leave_one_out import leave_out
from speechformer.analysis.load import load
from speechformer.predict import format_prediction, main

SENTENCE = "We will mend the harbours, my fellow citizens."


def test_the_importance_of_a_word_is_the_drop_of_ln_p_without_it(a_classifier: Path) -> None:
    run = load(a_classifier)
    run.task.cpu()
    ids = run.tokenizer.encode(SENTENCE)
    log, weights = leave_out(run.task.model, torch.tensor(ids))
    c = int(log.argmax())
    with torch.no_grad():
        whole = run.task.model(torch.tensor([ids])).softmax(-1)[0]
        torch.testing.assert_close(log.exp(), whole)
        for t in range(len(ids)):
            rest = run.task.model(torch.tensor([ids[:t] + ids[t + 1 :]])).softmax(-1)[0]
            assert weights[t].item() == pytest.approx(math.log(whole[c]) - math.log(rest[c]), abs=1e-5)


def test_a_prediction_names_what_was_read(a_classifier: Path) -> None:
    run = load(a_classifier)
    prediction = run.predict(SENTENCE + " Zyzzyva שלום.")
    assert set(prediction.probabilities) == {"ann", "bob", "cy"}
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert prediction.speaker == max(prediction.probabilities, key=lambda name: prediction.probabilities[name])
    known = dict(zip(prediction.words, prediction.known))
    assert not known["Zyzzyva"] and not known["שלום"] and known["the"]
    nothing = dataclasses.replace(prediction, weights=[0.001] * len(prediction.words))
    assert "no single word changes ln P by 0.005 or more" in format_prediction(nothing)
    assert run.predict("harbours").as_json()["words"] == [{"word": "harbours", "known": True, "weight": None}]


def test_the_command_line(a_classifier: Path) -> None:
    """A text of 100 kB is cut at 32 words, as the run was trained and tested."""
    run, long = load(a_classifier), "the people " * 9_000
    prediction = run.predict(SENTENCE)
    assert run.predict(long).probabilities == run.predict("the people " * 16).probabilities
    lines = [json.loads(line) for line in call(main, a_classifier, SENTENCE, "--json", "the people")[0].splitlines()]
    assert [line["text"] for line in lines] == [SENTENCE, "the people"]
    assert lines[0]["probabilities"] == pytest.approx(prediction.probabilities)
    printed, _ = call(main, a_classifier, SENTENCE, long)
    weight, word = max(zip(prediction.weights, prediction.words), key=lambda pair: abs(pair[0]))
    assert f"{prediction.speaker} " in printed.splitlines()[1] and f"{word} {weight:+.2f}" in printed
    assert "the first 32 of its 18000 words are read" in printed
    with pytest.raises(SystemExit, match="A sentence is empty"):
        call(main, a_classifier, "x", " ")
