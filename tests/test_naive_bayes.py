"""Oracle: scikit-learn's multinomial naive Bayes over words and pairs, of random sentences and of a run's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, compose
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from torch import Tensor

from speechformer.analysis.card import card
from speechformer.analysis.exports import FILES, export, load_safetensors
from speechformer.analysis.load import load
from speechformer.corpora.load import load as load_corpus
from speechformer.corpora.special_tokens import PAD
from speechformer.models.naive_bayes import SMOOTHING, NaiveBayes
from speechformer.runs.folder import PREDICTIONS
from speechformer.tasks.registry import build_data
from speechformer.training.run import execute

CLASSES = 3


def words_and_pairs(ids: list[int]) -> list[str]:
    words = [str(index) for index in ids if index != PAD]
    return [*words, *map(" ".join, pairwise(words))]


def by_scikit_learn(ids: Tensor, labels: Tensor, asked: Tensor) -> Any:
    """Return log p(class | sentence) of sentences that are asked for."""
    vectorizer = CountVectorizer(analyzer=words_and_pairs, binary=True)
    bayes = MultinomialNB(alpha=SMOOTHING, fit_prior=False).fit(
        vectorizer.fit_transform(ids.tolist()), labels.numpy()
    )
    return bayes.predict_log_proba(vectorizer.transform(asked.tolist()))


def sentences(number: int, length: int, words: int, generator: torch.Generator) -> Tensor:
    """Return random sentences of one word to `length`, some words twice."""
    ids = torch.randint(1, words, (number, length), generator=generator)
    sizes = torch.randint(1, length + 1, (number, 1), generator=generator)
    return ids.where(torch.arange(length) < sizes, PAD)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_it_is_that_of_scikit_learn(length: int) -> None:
    """Of new words and with padding, too; what it has counted is counted again when it is fitted again or loaded."""
    generator, labels = torch.Generator().manual_seed(0), torch.arange(60) % CLASSES
    first, second = (sentences(60, length, 12, generator) for _ in range(2))
    asked = torch.nn.functional.pad(sentences(40, length, 15, generator), (0, 3), value=PAD)
    model, loaded = (NaiveBayes(60, length, CLASSES, 15, weight=1.0) for _ in range(2))
    for ids in (first, second):
        model.fit(ids, labels)
        expected = by_scikit_learn(ids, labels, asked)
        assert model(asked).numpy() == pytest.approx(expected, abs=1e-12)
    loaded.fit(first, labels)
    loaded(asked)
    loaded.load_state_dict(model.state_dict())
    assert loaded(asked).numpy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_a_run_adds_it_to_its_model(tmp_path: Path) -> None:
    """The network trains alone; the sum is tested, predicts, and is loaded again. Its card says what it is."""
    overrides = [*TINY, "task=classify", "protocol=clean", "trainer.max_epochs=2", "eval_interval=1000"]
    alone = execute(compose(*overrides), tmp_path / "alone")
    result = execute(compose(*overrides, "task.naive_bayes=2"), tmp_path / "both")
    data = build_data(result["config"], load_corpus(result["config"]))
    test = data.tested["test", ""]
    runs = {name: load(tmp_path / name) for name in ("alone", "both")}
    assert all(runs["both"].model.state_dict()[name].equal(x) for name, x in runs["alone"].model.state_dict().items())
    with torch.no_grad():
        logits = runs["alone"].task(test["ids"])
        both = runs["both"].task(test["ids"]).softmax(dim=1).numpy()
    added = logits.double().log_softmax(dim=1).numpy()
    added = added + 2 * by_scikit_learn(data.train["ids"], data.train["labels"], test["ids"])
    expected = np.exp(added) / np.exp(added).sum(axis=1, keepdims=True)
    assert both == pytest.approx(expected, abs=1e-5)
    accuracy = float((torch.from_numpy(expected).argmax(dim=1) == test["labels"]).double().mean())
    assert result["metrics"]["test_accuracy"] == pytest.approx(accuracy)
    assert result["identity"] != alone["identity"]
    predictions = [(tmp_path / name / PREDICTIONS).read_bytes() for name in runs]
    assert predictions[0] != predictions[1]
    for format, file in FILES.items():
        export(runs["both"], format, path := tmp_path / file)
        exported = torch.export.load(path).module() if format == "torch.export" else load_safetensors(path)
        assert exported(test["ids"]).softmax(dim=1).detach().numpy() == pytest.approx(expected, abs=1e-5)
    notes = [
        "The figures are of the network with counts of words" in card(runs[name], ["safetensors"]) for name in runs
    ]
    assert notes == [False, True]
