"""Training on changed words: masked language modelling and word noise. `test_fit.py` resumes such runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, compose

from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, UNKNOWN
from speechformer.tasks.classify import Classify, training_loss
from speechformer.tasks.masked_lm import RATE, MaskedLM
from speechformer.tasks.registry import build_data
from speechformer.tasks.word_noise import WordNoise
from speechformer.training.run import execute


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_shares_of_masked_words_are_those_of_bert() -> None:
    """Oracle: the shares of 80 %, 10 % and 10 %; 1/4 of the drawn words are the same again."""
    masker = MaskedLM(1.0, 0)
    ids = torch.arange(6).repeat(40_000)[None]
    masker.attach(ids)
    inputs, chosen = masker.mask(ids, seeded())
    assert not chosen[ids <= UNKNOWN].any() and inputs[~chosen].equal(ids[~chosen])
    n = int(chosen.sum())
    assert n == pytest.approx(160_000 * RATE, rel=0.03)
    read, was = inputs[chosen], ids[chosen]
    assert int((read == UNKNOWN).sum()) / n == pytest.approx(0.8, abs=0.01)
    assert int((read == was).sum()) / n == pytest.approx(0.1 + 0.1 / 4, abs=0.01)


def test_a_sum_of_both_losses_after_pre_training_alone() -> None:
    """Oracle: both losses by themselves, of the same masks; rows without a class count for the words alone."""
    config = as_plain(compose(*TINY, "dropout=0", "task.masked_lm=0.3", "architecture.pool=cls"))
    data = build_data(config, load(config))
    task = Classify.from_config(config, data)
    task.attach(data)
    ids, labels = data.train["ids"][:8].long(), data.train["labels"][:8].clone()  # type: ignore[index]
    labels[5:] = IGNORE
    losses, masker, model = [], task.masked_lm, task.model
    assert masker is not None and model.words is not None
    for masker.epochs in (1, 0):
        task.generator = seeded(3)
        losses.append(training_loss(task, ids, labels)[0])
    inputs, chosen = masker.mask(ids, seeded(3))
    logits = model.states(inputs)[:, -ids.shape[1] :] @ model.words.weight.T + model.words.bias
    words, classes = F.cross_entropy(logits[chosen], ids[chosen]), F.cross_entropy(task.model(inputs[:5]), labels[:5])
    torch.testing.assert_close(losses, [words, classes + 0.3 * words])


def test_a_run_pre_trains_and_then_classifies(tmp_path: Path) -> None:
    """Oracle: the head of classes is as initialised until pre-training ends, whose checkpoints are never the best."""
    words = ["task.pretraining_epochs=1", "trainer.max_epochs=2", "trainer.limit_train_batches=4", "protocol=clean"]
    result = execute(compose(*TINY, *words, "keep_every_n_steps=4"), tmp_path / "run")
    assert [point["step"] for point in result["curve"]] == [4, 8] and result["best"]["step"] == 8
    paths = (tmp_path / "run" / "checkpoints" / f"{step}.ckpt" for step in (0, 4, 8))
    states = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    for name in states[0]:
        same = [first[name].equal(second[name]) for first, second in itertools.pairwise(states)]
        if name.startswith(("model.head", "model.words")):
            assert same == ([True, False] if "head" in name else [False, True]), name


def test_noise_changes_words_at_its_rate_and_by_their_frequency() -> None:
    """Oracle: 5 and 6 occur once and become <unk>; an input is another one, drawn as often as in train."""
    stream = torch.tensor([2] * 500 + [3] * 496 + [4] * 2 + [5, 6])
    ids = torch.arange(2, 7).repeat(4000, 1)
    replaced = WordNoise(stream, 7, 0.3, 0.0).with_unknown(ids, seeded())
    rates = (replaced == UNKNOWN).double().mean(dim=0)
    assert rates.tolist() == pytest.approx([0, 0, 0, 0.3, 0.3], abs=0.03)
    assert torch.equal(replaced[replaced != UNKNOWN], ids[replaced != UNKNOWN])
    drawn = WordNoise(stream, 7, 0.0, 0.4).inputs(torch.full((20_000,), 6), seeded()).bincount(minlength=7) / 20_000
    assert drawn.tolist() == pytest.approx([0, 0, 0.2, 0.1984, 0.0008, 0.0004, 0.6004], abs=0.015)
