"""Masked language modelling. Oracles: the shares of BERT, torch's cross_entropy, sentences that repeat a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, compose
from torch import Tensor

from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, PAD, UNKNOWN
from speechformer.data.speeches import SentenceData
from speechformer.errors import UserError
from speechformer.models.classifier import EncoderClassifier
from speechformer.tasks.base import SIZES
from speechformer.tasks.classify import Classify
from speechformer.tasks.masked_lm import RATE, MaskedLM
from speechformer.tasks.registry import DATA_KEYS, build_data
from speechformer.training.run import execute

WORDS = 20


def classifier(pool: str = "mean", dropout: float = 0.0) -> EncoderClassifier:
    config = as_plain(compose(*TINY, f"dropout={dropout}", "block_size=8"))
    sizes = {key: config[key] for key in SIZES}
    own: dict[str, Any] = {"norm": "pre", "final_norm": True, "qkv_bias": True, "bias": True, "activation": "relu"}
    torch.manual_seed(0)
    own |= {"pool": pool, "classifier_width": 4, "vocab_size": WORDS, "masked_lm": True}
    return EncoderClassifier(classes=3, **own, **sizes)


def sentences(rows: int, generator: torch.Generator) -> Tensor:
    """Return random sentences of one word to eight."""
    ids = torch.randint(UNKNOWN + 1, WORDS, (rows, 8), generator=generator)
    return ids.where(torch.arange(8) < torch.randint(1, 9, (rows, 1), generator=generator), PAD)


def test_the_shares_of_masked_words_are_those_of_bert() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = sentences(60_000, generator)
    inputs, chosen = MaskedLM(1.0, 0, WORDS).mask(ids, generator)
    assert not chosen[ids == PAD].any() and inputs[~chosen].equal(ids[~chosen])
    n = int((ids != PAD).sum())
    assert abs(int(chosen.sum()) / n - RATE) < 4 * (RATE * (1 - RATE) / n) ** 0.5
    read, was, n = inputs[chosen], ids[chosen], int(chosen.sum())
    same = 0.1 + 0.1 / (WORDS - UNKNOWN - 1)  # a word that is drawn may be the same
    for share, p in (((read == UNKNOWN), 0.8), ((read == was), same)):
        assert abs(float(share.double().mean()) - p) < 4 * (p * (1 - p) / n) ** 0.5
    drawn = read[(read != UNKNOWN) & (read != was)]
    assert drawn.unique().tolist() == [*range(UNKNOWN + 1, WORDS)]


def test_something_is_always_predicted() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [MaskedLM(1.0, 0, WORDS).mask(torch.tensor([[5, PAD]]), generator)[1].tolist() for _ in range(50)]
    assert masks == 50 * [[[True, False]]]


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_the_loss_is_the_cross_entropy_over_embeddings(pool: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model, ids = classifier(pool).eval(), sentences(6, generator)
    assert model.word_bias is not None
    torch.nn.init.normal_(model.word_bias)
    own = MaskedLM(1.0, 0, WORDS)
    inputs, chosen = own.mask(ids, generator)
    x = model.states(inputs)
    assert x.shape[1] == 8 + (pool == "cls")
    logits = x[:, -8:] @ model.encoder.embedding.weight.T + model.word_bias
    expected = F.cross_entropy(logits[chosen], ids[chosen])
    torch.testing.assert_close(own.loss(model, x, ids, chosen), expected)
    torch.testing.assert_close(model.classify(model.states(ids), ids), model(ids))


def task_with(*overrides: str) -> tuple[Classify, SentenceData]:
    """Return a classifier of the sample, attached to its data, and the data."""
    config = as_plain(compose(*TINY, "task=classify", "dropout=0", *overrides))
    data = SentenceData(load(config), **{key: config[key] for key in DATA_KEYS})
    torch.manual_seed(0)
    task = Classify.from_config(config, data)
    task.attach(data)
    return task, data


def test_a_sum_of_both_losses_after_pre_training_alone() -> None:
    """Oracle: both losses by themselves, of the same masks; rows without a class count for the words alone."""
    task, data = task_with("task.masked_lm=0.3", "task.pretraining_epochs=1", "trainer.max_epochs=3")
    ids, labels = data.train["ids"][:8].long(), data.train["labels"][:8].clone()
    labels[5:] = IGNORE
    losses, own = [], task.masked_lm
    assert own is not None
    for epochs in (1, 0):
        own.epochs, task.generator = epochs, torch.Generator().manual_seed(3)
        losses.append(task.joint_loss(own, ids, labels))
    inputs, chosen = own.mask(ids, torch.Generator().manual_seed(3))
    words = own.loss(task.model, task.model.states(inputs), ids, chosen)
    classes = F.cross_entropy(task.model(inputs[:5]), labels[:5])
    torch.testing.assert_close(losses, [words, classes + 0.3 * words])
    head = [*task.model.head.parameters()]
    assert all(grad is None for grad in torch.autograd.grad(losses[0], head, allow_unused=True))
    own.weight = 0.0
    torch.testing.assert_close(task.joint_loss(own, ids, labels), F.cross_entropy(task.model(ids[:5]), labels[:5]))
    assert task.joint_loss(own, ids, torch.full_like(labels, IGNORE)).item() == 0


def test_words_that_follow_from_the_others_are_learned() -> None:
    """Oracle: a sentence repeats one word, so a masked word is known unless all that is read was masked or drawn."""
    generator = torch.Generator().manual_seed(0)
    model, own = classifier(), MaskedLM(1.0, 0, WORDS)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(rows: int) -> Tensor:
        ids = torch.randint(UNKNOWN + 1, WORDS, (rows, 1), generator=generator).repeat(1, 8)
        inputs, chosen = own.mask(ids, generator)
        return own.loss(model, model.states(inputs), ids, chosen)

    before = loss(500).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss(32).backward()
        optimizer.step()
    assert loss(500).item() < 0.1 < 2 < before


def test_a_run_pre_trains_and_then_classifies(tmp_path: Path) -> None:
    """Oracle: the head of classes is as initialised until pre-training ends; the rest, until the run begins."""
    own = ["task.pretraining_epochs=1", "trainer.max_epochs=2", "trainer.limit_train_batches=4"]
    folder = tmp_path / "run"
    result = execute(compose(*TINY, "task=classify", *own, "keep_every_n_steps=4"), folder)
    assert result["status"] == "finished" and result["config"]["task"]["pretraining_epochs"] == 1
    states = [torch.load(folder / "checkpoints" / f"{k}.ckpt", weights_only=True)["state_dict"] for k in (0, 4, 8)]
    for name, initial in states[0].items():
        is_equal = [other[name].equal(initial) for other in states[1:]]
        if name.startswith("model.head"):
            assert is_equal == [True, False], name
        elif name == "model.word_bias":
            assert not is_equal[0] and states[1][name].equal(states[2][name])
        elif "embedding" in name:
            assert is_equal == [False, False], name


def test_lines_of_running_text_join_the_batches(tmp_path: Path) -> None:
    """Oracle: one line of running text is new; the other repeats a sentence of train."""
    (tmp_path / "train_CLS.tsv").write_text("0\tone two three four five six seven eight\n1\talpha beta gamma\n")
    (tmp_path / "test_CLS.tsv").write_text("0\talpha beta\n1\tone two\n")
    new = "here we say nine words that are quite new"
    (tmp_path / "train_LM.txt").write_text(f"one two three four five six seven eight nine\n{new}\n{new} again\n")
    (tmp_path / "test_LM_a.txt").write_text("red green blue\n")
    corpus = ["corpus=speeches", f"corpus.root={tmp_path}", "corpus.classes=[a,b]", "block_size=6"]
    task, data = task_with(*corpus, "task.masked_lm=1", "task.extra_text=true")
    assert [text for _, text in data.splits.train[2:]] == [new] and data.counts["extra_lines"] == 1
    assert "trains on 3 lines, 1 of them running text, tests on 2" in data.corpus_line()
    assert data.train["labels"].tolist() == [0, 1] and data.drawn["labels"].tolist() == [0, 1, IGNORE]
    assert data.train_tokens == 6 + 3 + 6 and len(data.monitored["train", ""]["ids"]) == 2
    batches: list[Any] = [*data.train_dataloader()]
    assert sorted(label for batch in batches for label in batch["labels"].tolist()) == [IGNORE, 0, 1]
    assert task.model.encoder.embedding.num_embeddings == data.vocab_size
    lone = data.tokenizer.encode("quite")
    assert lone != [UNKNOWN]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.extra_text=true"], "set task.masked_lm or task.pretraining_epochs"),
        (["task.pretraining_epochs=2", "trainer.max_epochs=2"], "=2 must be below trainer.max_epochs=2"),
        (["task.pretraining_epochs=1", "trainer.devices=2"], "needs one device; set trainer.devices=1"),
        (["task.masked_lm=-1"], "task.masked_lm"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        execute(compose(*TINY, "task=classify", *overrides), tmp_path / "run")


def test_other_runs_have_no_further_parameters() -> None:
    config = as_plain(compose(*TINY, "task=classify"))
    task = Classify.from_config(config, build_data(config, load(config)))
    assert "model.word_bias" not in task.state_dict() and task.masked_lm is None
