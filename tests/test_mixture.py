"""Oracles: the formula of the mixture, a search over all weights, sums to one, and a run measured again by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose
from test_kneser_ney import probability, stream

from speechformer.analysis.continuation import continue_text
from speechformer.analysis.exports import FILES, export_all, load_safetensors
from speechformer.analysis.load import load
from speechformer.corpora.load import load as load_corpus
from speechformer.errors import UserError
from speechformer.models.kneser_ney import KneserNey, contexts_of
from speechformer.models.mixture import Counted, CountsMixture
from speechformer.tasks.registry import build_data
from speechformer.training.run import execute

TRAIN, TEST = stream(600, 12, 0), stream(300, 12, 5)


def mixture(by_context: bool) -> CountsMixture:
    made_of = CountsMixture(len(TRAIN), 3, 14, by_context)
    made_of.stream.copy_(torch.tensor(TRAIN))
    return made_of


def test_the_mixture_is_its_formula() -> None:
    """Oracle: weight_k p + (1 - weight_k) p_KN, where k words of the context occur in train, by hand."""
    model, own = mixture(by_context=True), KneserNey(torch.tensor(TRAIN), 3, 14)
    model.weights.copy_(torch.tensor([0.2, 0.5, 0.9]))
    counted, logs = model.count(torch.tensor(TEST)), torch.rand(len(TEST) - 1).log()
    pairs = set(itertools.pairwise(TRAIN[:-1]))
    for k, mixed in enumerate(model.mix(logs, counted).tolist(), start=1):
        context = tuple(TEST[max(0, k - 2) : k])
        matched = (context in pairs) + 1 if len(context) == 2 else 1
        assert int(counted.matched_R[k - 1]) == matched
        weight = (0.2, 0.5, 0.9)[matched]
        expected = weight * logs[k - 1].exp() + (1 - weight) * probability(own, TEST[k], context)
        assert math.exp(mixed) == pytest.approx(float(expected))


@pytest.mark.parametrize("by_context", [False, True])
def test_the_weights_are_the_best(by_context: bool) -> None:
    """Oracle: the likelihood at every weight from 0.001 to 0.999."""
    torch.manual_seed(0)
    model, logs = mixture(by_context), torch.rand(500).double().log()
    counted = Counted(torch.rand(500).double().log(), torch.randint(0, 3, (500,)))
    model.fit(logs, counted)
    weights = torch.arange(0.001, 1, 0.001, dtype=torch.float64)[:, None]
    mixed = (weights * logs.exp() + (1 - weights) * counted.logs_R.exp()).log()
    for k in range(3):
        rows = counted.matched_R == k if by_context else slice(None)
        best = weights[mixed[:, rows].sum(dim=1).argmax()]
        assert float(model.weights[k]) == pytest.approx(float(best), abs=0.002)


@pytest.mark.parametrize("context", [[], [3], [3, 14], TEST[:7]])
def test_after_a_context_it_is_a_distribution(context: list[int]) -> None:
    """Oracle: one word at a time; ids beyond the vocabulary and the padding have what the model alone gives them."""
    model, logits = mixture(by_context=True), torch.randn(18)
    model.weights.copy_(torch.tensor([0.2, 0.5, 0.9]))
    p_V, own = model(logits, context).softmax(dim=0), model.kneser_ney
    weight = float(model.weights[own.matched(contexts_of(torch.tensor([0, *context]), 3)[-1])])
    counts = torch.tensor([0.0, *(probability(own, word, context) for word in range(1, 15)), 0, 0, 0])
    torch.testing.assert_close(p_V, weight * logits.softmax(dim=0) + (1 - weight) * counts)
    assert float(p_V.sum()) == pytest.approx(1)


SETTINGS = [*TINY, "task=lm", "protocol=clean", "trainer.max_steps=20", "eval_interval=10", "recipe.lr=1e-2"]
FEW = ["corpus.documents=20", "corpus.words=40"]


@pytest.mark.slow
def test_a_run_measures_its_mixture_and_generates_with_it(tmp_path: Path) -> None:
    """Oracles: the perplexity computed again from the logits of the checkpoint."""
    result = execute(compose(*SETTINGS, "task.ngram_mixture=context"), tmp_path)
    metrics, run = result["metrics"], load(tmp_path)
    name = next(iter(result["corpus"]["counts"]["tests"]))
    data = build_data(result["config"], load_corpus(result["config"]))
    ids, mixed = data.streams["test", name], run.task.counts
    logs = []
    for start in range(0, len(ids) - 1, 32):
        inputs = ids[start : min(start + 32, len(ids) - 1)]
        logs.append(run.model(inputs[None])[0].log_softmax(dim=1).gather(1, ids[start + 1 : start + 33, None])[:, 0])
    counted = mixed.count(ids)
    perplexity = (-mixed.mix(torch.cat(logs), counted).mean()).exp().item()
    assert metrics[f"test_mixture_perplexity_{name}"] == pytest.approx(perplexity, rel=1e-5)
    assert perplexity < metrics[f"test_perplexity_{name}"]
    tests = [metrics[f"test_mixture_perplexity_{test}"] for test in result["corpus"]["counts"]["tests"]]
    assert metrics["test_mixture_perplexity_mean"] == pytest.approx(sum(tests) / len(tests))
    ids = ids[None, :25]
    after = torch.stack([mixed(run.model(ids)[0, k], ids[0, : k + 1].tolist()) for k in range(25)])
    torch.testing.assert_close(run.logits(ids[0]), after, atol=1e-4, rtol=1e-4)
    export_all(run, None, tmp_path / "exported")
    for format, name in FILES.items():
        path = tmp_path / "exported" / name
        exported = torch.export.load(path).module() if format == "torch.export" else load_safetensors(path)
        torch.testing.assert_close(exported(ids)[0], after, atol=1e-4, rtol=1e-4)
    assert "hold the training text itself" in (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    words = list(continue_text(run, "we will", tokens=30))
    mixed.weights.fill_(1 - 1e-6)  # the model alone
    assert words != list(continue_text(run, "we will", tokens=30))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["protocol=paper", "task.ngram_mixture=fixed"], "fits its weights on a held-out part; set protocol=clean"),
        (["task.ngram_mixture=sometimes"], "task.ngram_mixture must be 'none', 'fixed' or 'context'"),
        (
            ["corpus=stories", *FEW, "task.documents=separate", "task.ngram_targets=0.1"],
            "targets counts words in memory",
        ),
        (["task.tokens=bytes", "task.unknown_rate=0.1"], "task.unknown_rate needs task.tokens=words"),
        (["task.unknown_rate=0.1"], "words that occur once in train, and there are none"),
        (["task.ngram_targets=0.5", "recipe.label_smoothing=0.1"], "both spread targets; set one to 0"),
        (["corpus=stories", *FEW, "protocol.fold=1"], "protocol.fold is for the sentences and texts of speeches"),
        (["protocol=paper", "protocol.fold=seed"], "protocol.fold=seed chooses what is held out, which is nothing"),
        (["recipe.optimizer=adamw", "recipe.matrix_lr=0.1"], "is the learning rate of Muon; choose recipe=muon"),
        (["recipe.optimizer=muon", "model=rnn"], "needs the weight matrices of transformer blocks"),
    ],
)
def test_errors(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        execute(compose(*SETTINGS, *overrides), tmp_path)
