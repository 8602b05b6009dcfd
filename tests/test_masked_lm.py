"""Masked language modelling. Oracles: the shares of BERT, torch's cross_entropy, sentences that repeat a word."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, compose
from torch import Tensor

from speechformer.config import as_plain, uses_several_devices
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, PAD, UNKNOWN
from speechformer.data.speeches import SentenceData
from speechformer.errors import UserError
from speechformer.models.classifier import EncoderClassifier
from speechformer.tasks.base import SIZES
from speechformer.tasks.classify import Classify, training_loss
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
    ids[:, ::3] = 2  # a frequent word
    return ids.where(torch.arange(8) < torch.randint(1, 9, (rows, 1), generator=generator), PAD)


def masker(ids: Tensor) -> MaskedLM:
    """Return a masker of this text."""
    own = MaskedLM(1.0, 0)
    own.attach(ids)
    return own


def test_the_shares_of_masked_words_are_those_of_bert() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = sentences(60_000, generator)
    ids[::3, 1] = UNKNOWN
    inputs, chosen = masker(ids).mask(ids, generator)
    assert not chosen[ids <= UNKNOWN].any() and inputs[~chosen].equal(ids[~chosen])
    n = int((ids > UNKNOWN).sum())
    assert abs(int(chosen.sum()) / n - RATE) < 4 * (RATE * (1 - RATE) / n) ** 0.5
    shares = ids[ids > UNKNOWN].bincount(minlength=WORDS) / n
    read, was, n = inputs[chosen], ids[chosen], int(chosen.sum())
    same = 0.1 + 0.1 * float(shares.square().sum())  # a word that is drawn may be the same
    for share, p in (((read == UNKNOWN), 0.8), ((read == was), same)):
        assert abs(float(share.double().mean()) - p) < 4 * (p * (1 - p) / n) ** 0.5
    others = (read[(read != UNKNOWN) & (read != was)] == 2).double()
    p = float(shares[2] * (1 - shares[2]) / (1 - shares.square().sum()))  # two different words, the second is word 2
    assert p > 0.2 and abs(float(others.mean()) - p) < 4 * (p * (1 - p) / len(others)) ** 0.5


def test_nothing_to_predict_is_no_loss() -> None:
    model, ids = classifier(), torch.tensor([[UNKNOWN, PAD]])
    inputs, chosen = masker(torch.tensor([3])).mask(ids, torch.default_generator)
    assert not chosen.any() and inputs.equal(ids)
    loss = masker(torch.tensor([3])).loss(model, model.states(ids), ids, chosen)
    assert loss.item() == 0 and loss.requires_grad
    with pytest.raises(UserError, match="all of train is <unk>"):
        masker(ids)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_the_loss_is_the_cross_entropy_over_words(pool: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model, ids = classifier(pool).eval(), sentences(6, generator)
    assert model.words is not None
    own = masker(ids)
    inputs, chosen = own.mask(ids, generator)
    x = model.states(inputs)
    assert x.shape[1] == 8 + (pool == "cls")
    logits = x[:, -8:] @ model.words.weight.T + model.words.bias
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
        losses.append(training_loss(task, ids, labels)[0])
    inputs, chosen = own.mask(ids, torch.Generator().manual_seed(3))
    words = own.loss(task.model, task.model.states(inputs), ids, chosen)
    classes = F.cross_entropy(task.model(inputs[:5]), labels[:5])
    torch.testing.assert_close(losses, [words, classes + 0.3 * words])
    head = [*task.model.head.parameters()]
    assert all(grad is None for grad in torch.autograd.grad(losses[0], head, allow_unused=True))
    own.weight = 0.0
    torch.testing.assert_close(training_loss(task, ids, labels)[0], F.cross_entropy(task.model(ids[:5]), labels[:5]))
    assert training_loss(task, ids, torch.full_like(labels, IGNORE))[0].item() == 0
    own.weight, task.recipe["label_smoothing"], task.log_prior_C = 0.3, 0.1, torch.tensor([0.0, 1.0, -1.0])
    task.generator = torch.Generator().manual_seed(3)
    classes = F.cross_entropy(task.model(inputs[:5]) + task.log_prior_C, labels[:5], label_smoothing=0.1)
    torch.testing.assert_close(training_loss(task, ids, labels)[0], classes + 0.3 * words)


def test_words_that_follow_from_the_others_are_learned() -> None:
    """Oracle: a sentence repeats one word, so a masked word is known unless all that is read was masked or drawn."""
    generator = torch.Generator().manual_seed(0)
    model, own = classifier(), masker(torch.arange(WORDS))
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


def test_a_run_pre_trains_and_then_classifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the head of classes is as initialised until pre-training ends; the rest, until the run begins."""
    own = ["task.pretraining_epochs=1", "trainer.max_epochs=2", "trainer.limit_train_batches=4"]
    own += ["trainer.log_every_n_steps=1"]
    folder = tmp_path / "run"
    result = execute(compose(*TINY, "task=classify", *own, "keep_every_n_steps=4"), folder)
    assert result["status"] == "finished" and result["config"]["task"]["pretraining_epochs"] == 1
    assert "The first 4 steps predict masked words alone" in capsys.readouterr().out
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file) if row["train_loss"]}
    assert [*rows] == [*range(1, 9)]
    for step, row in rows.items():
        assert row["masked_lm_loss"] == (row["train_loss"] if step <= 4 else "")
    states = [torch.load(folder / "checkpoints" / f"{k}.ckpt", weights_only=True)["state_dict"] for k in (0, 4, 8)]
    for name, initial in states[0].items():
        is_equal = [other[name].equal(initial) for other in states[1:]]
        if name.startswith("model.head"):
            assert is_equal == [True, False], name
        elif name.startswith("model.words"):
            assert not is_equal[0] and states[1][name].equal(states[2][name])
        elif "embedding" in name:
            assert is_equal == [False, False], name


def test_lines_of_running_text_join_the_batches(tmp_path: Path) -> None:
    """Oracle: words that occur once, so each line shows what it repeats. One line is new, and cut in two."""

    def text(word: str, words: int = 9) -> str:
        return " ".join(f"{word}{k}" for k in range(words))

    labelled = [f"{k % 2}\t{text(f'c{k}x')}" for k in range(20)]
    (tmp_path / "train_CLS.tsv").write_text("\n".join(labelled) + "\n")
    (tmp_path / "test_CLS.tsv").write_text(f"0\t{text('t')}\n1\t{text('n', 12)}\n")
    (tmp_path / "test_LM_a.txt").write_text(text("l") + "\n")
    repeats = [f"so {text('t')}", f"so {text('l')}", *(f"so {text(f'c{k}x')}" for k in range(20))]
    near = text("n", 12).replace("n6", "other")  # without eight words in a row
    (tmp_path / "train_LM.txt").write_text("\n".join([*repeats, near, text("s", 7), text("r"), text("r")]) + "\n")
    corpus = ["corpus=speeches", f"corpus.root={tmp_path}", "corpus.classes=[a,b]", "block_size=6", "protocol=clean"]
    corpus += ["task.masked_lm=1", "task.extra_text=true", "protocol.validation=0.3"]
    task, data = task_with(*corpus)
    held = data.counts["validation"]
    assert 0 < held < 20 and data.splits.train[20 - held :] == [(None, text("r"))]
    assert f"trains on {20 - held} lines and 1 lines of running text, selects on {held}" in data.corpus_line()
    assert data.counts["train"] == 20 - held and data.counts["train_rows"] == 22 - held
    assert (data.drawn["labels"] == IGNORE).tolist() == (20 - held) * [False] + [True, True]
    pieces = ["".join(data.tokenizer.tokens(ids[ids != PAD].tolist())) for ids in data.drawn["ids"][-2:]]
    assert pieces == ["r0r1r2r3r4r5", "r6r7r8"]
    assert len(data.train["labels"]) == 20 - held and data.train_tokens == 6 * (20 - held) + 9
    batches: list[Any] = [*data.train_dataloader()]
    assert sum(label == IGNORE for batch in batches for label in batch["labels"].tolist()) == 2
    assert task.masked_lm is not None and len(task.masked_lm.stream) == data.train_tokens


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.extra_text=true"], "set task.masked_lm or task.pretraining_epochs"),
        (
            ["task.pretraining_epochs=2", "trainer.max_epochs=2"],
            "=2 takes [0-9]+ steps, and the run has [0-9]+, which",
        ),
        (
            ["task.pretraining_epochs=1", "trainer.max_steps=3"],
            "run has 3, which leaves none for the classes; set fewer",
        ),
        (["task.masked_lm=1", "trainer.devices=2"], "needs one device; set trainer.devices=1"),
        (
            ["task.pretraining_epochs=1", "recipe=cosine", "recipe.warmup_steps=500"],
            "after pre-training ends",
        ),
        (["task.masked_lm=1", "task.min_count=100000", "task.vocab_size=1"], "all of train is <unk>"),
        (["task.masked_lm=-1"], "task.masked_lm"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        execute(compose(*TINY, "task=classify", *overrides), tmp_path / "run")


def test_no_checkpoint_of_pre_training_is_the_best(tmp_path: Path) -> None:
    """Oracle: the step of the last evaluation, the only one after pre-training."""
    own = ["task.pretraining_epochs=2", "trainer.max_epochs=3", "trainer.limit_train_batches=4", "recipe.lr=0"]
    result = execute(compose(*TINY, "task=classify", "protocol=clean", *own), tmp_path / "run")
    assert [point["step"] for point in result["curve"]] == [4, 8, 12] and result["best"]["step"] == 12


def test_optimizer_and_schedule_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the schedules of two runs of as many steps; Adam counts its steps from the restart."""
    rates, counts = [], []
    loss = Classify.track_loss

    def track(self: Classify, *arguments: Any, **parts: Tensor) -> Tensor:
        optimizer = self.trainer.optimizers[0]
        rates.append(optimizer.param_groups[0]["lr"])
        counts.append(max((int(own["step"]) for own in optimizer.state.values()), default=0))
        return loss(self, *arguments, **parts)

    monkeypatch.setattr(Classify, "track_loss", track)
    own = ["trainer.limit_train_batches=6", "recipe=cosine", "recipe.warmup_steps=2", "recipe.lr=1"]
    execute(
        compose(*TINY, "task=classify", *own, "task.pretraining_epochs=1", "trainer.max_epochs=2"), tmp_path / "a"
    )
    both, rates = rates, []
    assert counts == 2 * [*range(6)]
    execute(compose(*TINY, "task=classify", *own, "trainer.max_epochs=1"), tmp_path / "b")
    assert both == 2 * rates and rates[:3] == [0.5, 1.0, 1.0] and rates[-1] < 0.2


def test_several_machines_are_several_devices() -> None:
    one, two = ({"trainer": {"devices": 1, "num_nodes": nodes}} for nodes in (1, 2))
    assert [uses_several_devices(one), uses_several_devices(two)] == [False, True]


def test_other_runs_have_no_further_parameters() -> None:
    config = as_plain(compose(*TINY, "task=classify"))
    task = Classify.from_config(config, build_data(config, load(config)))
    assert not any("words" in name for name in task.state_dict()) and task.masked_lm is None
