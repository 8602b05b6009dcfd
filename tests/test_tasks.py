"""Oracles: torchmetrics' own Perplexity, a count by hand, and the schedules' formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from conftest import group
from test_cores import stack_arguments
from torchmetrics.text import Perplexity

from speechformer.data import IGNORE, EvaluationBatches, TrainingBatches
from speechformer.refusals import UserError
from speechformer.tasks import Classify, LanguageModel, MeanPerplexity, load_task, next_token_loss

ADAM = group("recipe", "adam")


def language_model(**recipe: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(core={**stack_arguments(), "tied_output": False}, recipe={**ADAM, **recipe})


def classifier(**recipe: Any) -> Classify:
    torch.manual_seed(0)
    core = {**stack_arguments(), "classes": 3, "pool": "mean", "classifier_width": 10}
    return Classify(core=core, recipe={**ADAM, **recipe})


def figures(task: Any, parts: dict) -> dict[str, float]:
    task.eval()
    task.on_validation_epoch_start()
    with torch.no_grad():
        for batch in EvaluationBatches(parts):
            task.validation_step(batch)
    return task.figures()


def test_perplexity_is_torchmetrics_perplexity() -> None:
    task = language_model()
    parts = {}
    for split in ("test", "test_sliding"):
        for name in ("a", "b"):
            ids = torch.randint(2, 50, (300, 20))
            targets = torch.randint(2, 50, (300, 20))
            targets[torch.rand(300, 20) < 0.3] = IGNORE
            parts[split, name] = {"ids": ids, "targets": targets}
    got = figures(task, parts)
    for (split, name), rows in parts.items():
        oracle = Perplexity(ignore_index=IGNORE)
        oracle.update(task.core(rows["ids"]).detach(), rows["targets"])
        assert got[f"{split}_perplexity_{name}"] == pytest.approx(oracle.compute().item(), rel=1e-4)
        mean = (got[f"{split}_perplexity_a"] + got[f"{split}_perplexity_b"]) / 2
        assert got[f"{split}_perplexity_mean"] == pytest.approx(mean)


def test_one_loss_that_is_not_a_number_is_not_left_out() -> None:
    metric = MeanPerplexity()
    metric.update(torch.tensor(1.0), 10)
    metric.update(torch.tensor(float("nan")), 1)
    assert metric.compute().isnan()


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    task = language_model()
    torch.nn.init.zeros_(task.core.output.weight)
    torch.nn.init.zeros_(task.core.output.bias)
    rows = {"ids": torch.randint(2, 50, (4, 20)), "targets": torch.randint(2, 50, (4, 20))}
    assert figures(task, {("train", ""): rows}) == {"train_perplexity": pytest.approx(50, rel=1e-5)}


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_loss_in_chunks_is_the_loss_at_once(rows: int) -> None:
    output = torch.nn.Linear(8, 40)
    hidden, targets = torch.randn(rows, 8, requires_grad=True), torch.randint(0, 40, (rows,))
    at_once = F.cross_entropy(output(hidden), targets)
    expected = torch.autograd.grad(at_once, [hidden, output.weight])
    loss = next_token_loss(output, hidden, targets)
    torch.testing.assert_close(loss, at_once)
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, output.weight]), expected)


def test_training_loss_is_the_loss_of_the_next_token() -> None:
    task = language_model().eval()
    task.watched = lambda loss, batch, batch_idx: loss  # type: ignore[method-assign]
    ids = torch.randint(2, 50, (4, 21))
    by_hand = [
        -task.core(ids[b : b + 1, : t + 1])[0, -1].log_softmax(-1)[ids[b, t + 1]] for b in range(4) for t in range(20)
    ]
    torch.testing.assert_close(task.training_step({"ids": ids}, 0), torch.stack(by_hand).mean())
    assert task.tokens == 80


def test_accuracy_is_counted_and_split_into_seen_and_unseen() -> None:
    task = classifier()
    ids = torch.randint(2, 50, (200, 20))
    ids[torch.arange(200) % 3 == 0, 11:] = 0
    labels, seen = torch.randint(0, 3, (200,)), torch.rand(200) < 0.7
    got = figures(task, {("test", ""): {"ids": ids, "labels": labels, "seen": seen}})
    with torch.no_grad():
        right = task.core(ids).argmax(dim=1) == labels
    assert got == {
        "test_accuracy": pytest.approx(right.float().mean().item()),
        "test_accuracy_seen": pytest.approx(right[seen].float().mean().item()),
        "test_accuracy_unseen": pytest.approx(right[~seen].float().mean().item()),
    }
    nothing_seen = {"ids": ids, "labels": labels, "seen": torch.zeros(200, dtype=torch.bool)}
    assert "test_accuracy_seen" not in figures(task, {("test", ""): nothing_seen})


def train(task: pl.LightningModule, steps: int, folder: Path) -> pl.Trainer:
    ids = torch.randint(2, 50, (64, 21), generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(task, TrainingBatches({"ids": ids, "labels": ids[:, 0] % 3}, 16, seed=0))
    return trainer


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("constant", lambda x: 1.0),
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
    ],
)
def test_learning_rate_warms_up_and_follows_its_schedule(schedule: str, shape: Any, tmp_path: Path) -> None:
    task, rates = language_model(schedule=schedule, warmup_steps=4, lr=0.1), []
    task.on_train_batch_start = lambda *_: rates.append(task.optimizers().param_groups[0]["lr"])  # type: ignore
    train(task, 12, tmp_path)
    expected = [0.1 * k / 4 for k in (1, 2, 3, 4)] + [0.1 * shape(k / 8) for k in range(8)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_the_optimizer_is_the_one_asked_for(optimizer: str, tmp_path: Path) -> None:
    task = language_model(optimizer=optimizer, lr=0.01, weight_decay=0.3, betas=[0.8, 0.9])
    before = task.core.output.weight.clone()
    trainer = train(task, 2, tmp_path)
    chosen = trainer.optimizers[0]
    assert type(chosen).__name__.lower() == optimizer
    assert (chosen.defaults["lr"], chosen.defaults["weight_decay"]) == (0.01, 0.3)
    assert optimizer == "sgd" or chosen.defaults["betas"] == (0.8, 0.9)
    assert not torch.equal(task.core.output.weight, before)


@pytest.mark.parametrize("make", [classifier, language_model])
def test_a_checkpoint_alone_rebuilds_the_model(make: Any, tmp_path: Path) -> None:
    task = make(init="normal", init_std=0.3)
    train(task, 3, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    torch.load(tmp_path / "x.ckpt", weights_only=True)
    loaded = load_task(tmp_path / "x.ckpt")
    ids = torch.randint(2, 50, (3, 20))
    assert type(loaded) is type(task) and not loaded.training
    assert torch.equal(loaded.core(ids), task.eval().core(ids))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.optimizer has no choice 'adamm'.*Did you mean"):
        language_model(optimizer="adamm")
    with pytest.raises(UserError, match=r"recipe\.schedule"):
        language_model(schedule="step")
    with pytest.raises(UserError, match="warmup_steps=12 is not less than the 12 steps"):
        train(language_model(warmup_steps=12), 12, tmp_path)
    (tmp_path / "x.ckpt").write_text("nothing")
    (tmp_path / "y.ckpt").touch()
    torch.save({"task": "lm", "hyper_parameters": {}}, tmp_path / "z.ckpt")
    with pytest.raises(UserError, match="there is no such file"):
        load_task(tmp_path / "none.ckpt")
    for path in (tmp_path / f"{name}.ckpt" for name in ("x", "y", "z")):
        with pytest.raises(UserError, match="is not a checkpoint of speechformer"):
            load_task(path)
