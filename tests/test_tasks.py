"""Oracles: torchmetrics' own Perplexity, a count by hand, and the schedules' formulas."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, compose, group
from test_models import stack_arguments
from torchmetrics.text import Perplexity

from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, UNKNOWN
from speechformer.data.batches import EvaluationBatches, TrainingBatches
from speechformer.data.speeches import SentenceData
from speechformer.errors import UserError
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.tasks import optim
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify, cross_entropy
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.optim import MuonAdamW
from speechformer.tasks.registry import DATA_KEYS, TASKS, load_task
from speechformer.tasks.translate import Translate
from speechformer.training.checkpoints import average

ADAM = group("recipe", "adam")


def language_model(**recipe: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(architecture={**stack_arguments(), "tied_output": False}, recipe={**ADAM, **recipe})


def classifier(**recipe: Any) -> Classify:
    torch.manual_seed(0)
    architecture = {**stack_arguments(), "classes": 3, "pool": "mean", "classifier_width": 10}
    return Classify(architecture=architecture, recipe={**ADAM, **recipe}, classes=["a", "b", "c"])


def evaluate(task: Any, parts: dict) -> dict[str, float]:
    task.eval()
    task.on_validation_epoch_start()
    with torch.no_grad():
        for batch in EvaluationBatches(parts):
            task.validation_step(batch)
    return task.compute_metrics()


def test_perplexity_is_torchmetrics_perplexity() -> None:
    task = language_model()
    parts = {}
    for split in ("test", "test_sliding"):
        for name in ("a", "b"):
            ids = torch.randint(2, 50, (300, 20))
            targets = torch.randint(2, 50, (300, 20))
            targets[torch.rand(300, 20) < 0.3] = IGNORE
            parts[split, name] = {"ids": ids, "targets": targets}
    got = evaluate(task, parts)
    for (split, name), rows in parts.items():
        oracle = Perplexity(ignore_index=IGNORE)
        oracle.update(task.model(rows["ids"]).detach(), rows["targets"])
        assert got[f"{split}_perplexity_{name}"] == pytest.approx(oracle.compute().item(), rel=1e-4)
        mean = (got[f"{split}_perplexity_a"] + got[f"{split}_perplexity_b"]) / 2
        assert got[f"{split}_perplexity_mean"] == pytest.approx(mean)


def test_the_perplexity_of_known_words_leaves_unknown_ones_out() -> None:
    """Oracle: a loop over the tokens, in double precision."""
    task = language_model()
    unknown, parts = {"a": 0.05, "no": 0.0, "only": 1.0, "x_known_perplexity_y": 0.5}, {}
    tests = [("test", name) for name in unknown]
    for split, name in [("train", ""), ("validation", ""), ("test_sliding", "a"), *tests]:
        ids, targets = torch.randint(2, 50, (60, 20)), torch.randint(2, 50, (60, 20))
        targets[torch.rand(60, 20) < unknown.get(name, 0.05)] = UNKNOWN
        targets[torch.rand(60, 20) < 0.3] = IGNORE
        parts[split, name] = {"ids": ids, "targets": targets}
    got = evaluate(task, parts)
    names = [f"test_known_perplexity_{name}" for name in ("a", "no", "x_known_perplexity_y", "mean")]
    prefixes = tuple(f"{split}_known" for split in ("train", "validation", "test", "test_sliding"))
    assert {name for name in got if name.startswith(prefixes)} == {"validation_known_perplexity", *names}
    for name in ("validation", "test_a", "test_x_known_perplexity_y"):
        split, _, text = name.partition("_")
        losses = []
        for ids, targets in zip(*parts[split, text].values()):
            log = task.model(ids[None])[0].double().log_softmax(dim=-1)
            losses += [-log[t, k].item() for t, k in enumerate(targets.tolist()) if k not in (IGNORE, UNKNOWN)]
        own = got[f"{split}_known_perplexity" + (f"_{text}" if text else "")]
        assert own == pytest.approx(math.exp(sum(losses) / len(losses)), rel=2e-5)
    assert got["test_known_perplexity_no"] == got["test_perplexity_no"]
    each = [got[f"test_known_perplexity_{name}"] for name in unknown if name != "only"]
    assert got["test_known_perplexity_mean"] == pytest.approx(sum(each) / 3)


def test_the_rate_of_unknown_words_is_that_of_the_scored_tokens(tmp_path: Path) -> None:
    """Oracle: counted by hand. The first token of a text is no target."""
    (tmp_path / "train_LM.txt").write_text("We mend the harbours and the roads.\n" * 9)
    (tmp_path / "test_LM_x.txt").write_text("Zebras mend zebras.\n")  # of mend, zebras and the full stop one of three
    (tmp_path / "test_LM_y.txt").write_text("We mend the roads.\n")
    config = as_plain(compose("task=lm", "corpus=speeches", f"corpus.root={tmp_path}", "block_size=4"))
    data = LanguageModel.datamodule(load(config), **{key: config[key] for key in DATA_KEYS})
    rates = {"x": pytest.approx(1 / 3), "y": 0.0, "mean": pytest.approx(1 / 6)}
    assert data.reference_metrics() == {f"test_unknown_rate_{name}": rate for name, rate in rates.items()}


def test_one_loss_that_is_not_a_number_is_not_left_out() -> None:
    metric = MeanPerplexity()
    metric.update(torch.tensor(1.0), 10)
    metric.update(torch.tensor(float("nan")), 1)
    assert metric.compute().isnan()


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    task = language_model()
    torch.nn.init.zeros_(task.model.output.weight)
    torch.nn.init.zeros_(task.model.output.bias)
    rows = {"ids": torch.randint(2, 50, (4, 20)), "targets": torch.randint(2, 50, (4, 20))}
    assert evaluate(task, {("train", ""): rows}) == {"train_perplexity": pytest.approx(50, rel=1e-5)}


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_loss_in_chunks_is_the_loss_at_once(rows: int) -> None:
    output = torch.nn.Linear(8, 40)
    hidden, targets = torch.randn(rows, 8, requires_grad=True), torch.randint(0, 40, (rows,))
    at_once = F.cross_entropy(output(hidden), targets)
    expected = torch.autograd.grad(at_once, [hidden, output.weight])
    loss = next_token_loss(output.weight, output.bias, hidden, targets)
    torch.testing.assert_close(loss, at_once)
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, output.weight]), expected)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 64, 127, 128, 300])
def test_loss_in_evaluation_is_the_loss_at_once(rows: int, with_bias: bool) -> None:
    """Oracle: torch's cross-entropy of all logits in float64. Without targets it is 0, as in training."""
    output = torch.nn.Linear(8, 40, bias=with_bias)
    hidden, targets = 5 * torch.randn(rows, 8), torch.randint(0, 40, (rows,))
    with torch.inference_mode():
        loss = next_token_loss(output.weight, output.bias, hidden, targets)
        nothing = next_token_loss(output.weight, output.bias, hidden[:0], targets[:0])
        expected = F.cross_entropy(output.double()(hidden.double()), targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert nothing == 0


def test_training_loss_is_the_loss_of_the_next_token() -> None:
    task = language_model().eval()
    task.track_loss = lambda loss, batch, batch_idx: loss  # type: ignore[method-assign]
    ids = torch.randint(2, 50, (4, 21))
    by_hand = [
        -task.model(ids[b : b + 1, : t + 1])[0, -1].log_softmax(-1)[ids[b, t + 1]]
        for b in range(4)
        for t in range(20)
    ]
    torch.testing.assert_close(task.training_step({"ids": ids}, 0), torch.stack(by_hand).mean())
    assert task.tokens == 80


def test_accuracy_is_counted_and_split_by_leaked_sentences_and_by_speaker() -> None:
    task = classifier()
    ids = torch.randint(2, 50, (200, 20))
    ids[torch.arange(200) % 3 == 0, 11:] = 0
    labels, in_train = torch.randint(0, 3, (200,)), torch.rand(200) < 0.7
    got = evaluate(task, {("test", ""): {"ids": ids, "labels": labels, "in_train": in_train}})
    with torch.no_grad():
        right = task.model(ids).argmax(dim=1) == labels
    assert got == {
        "test_accuracy": pytest.approx(right.float().mean().item()),
        "test_accuracy_in_train": pytest.approx(right[in_train].float().mean().item()),
        "test_accuracy_not_in_train": pytest.approx(right[~in_train].float().mean().item()),
        "test_accuracy_of_a": pytest.approx(right[labels == 0].float().mean().item()),
        "test_accuracy_of_b": pytest.approx(right[labels == 1].float().mean().item()),
        "test_accuracy_of_c": pytest.approx(right[labels == 2].float().mean().item()),
    }
    none_in_train = {"ids": ids, "labels": labels, "in_train": torch.zeros(200, dtype=torch.bool)}
    assert "test_accuracy_in_train" not in evaluate(task, {("test", ""): none_in_train})


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
    before = task.model.output.weight.clone()
    trainer = train(task, 2, tmp_path)
    chosen = trainer.optimizers[0]
    assert type(chosen).__name__.lower() == optimizer
    assert (chosen.defaults["lr"], chosen.defaults["weight_decay"]) == (0.01, 0.3)
    assert optimizer == "sgd" or chosen.defaults["betas"] == (0.8, 0.9)
    assert not torch.equal(task.model.output.weight, before)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon_is_torchs_muon_and_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's two optimizers on the same gradients, the first for the weight matrices of blocks."""
    monkeypatch.setattr(optim, "matrix_dtype", lambda device: torch.bfloat16)  # as torch everywhere
    task = language_model(optimizer="muon", lr=0.01, matrix_lr=0.02, weight_decay=0.3, betas=[0.8, 0.9])
    assert isinstance(train(task, 1, tmp_path).optimizers[0], MuonAdamW)
    other, named = copy.deepcopy(task.model), dict(task.model.named_parameters())
    matrices = [name for name, own in named.items() if ".blocks." in name and own.ndim == 2]
    assert len(matrices) == 4 * len(task.model.decoder.blocks)  # queries, keys and values in one; output; two of ff
    of_other = dict(other.named_parameters())
    muon = torch.optim.Muon([of_other[name] for name in matrices], lr=0.02, weight_decay=0.3)
    rest = [own for name, own in of_other.items() if name not in matrices]
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.3, betas=(0.8, 0.9))
    optimizer = MuonAdamW(list(named.items()), lr=0.01, matrix_lr=0.02, weight_decay=0.3, betas=(0.8, 0.9))
    for step in range(3):
        torch.manual_seed(step)
        for name, own in named.items():
            own.grad = torch.randn_like(own)
            of_other[name].grad = own.grad.clone()
        if step == 2:  # as after a resume, also of a checkpoint that has the keys of torch's Muon
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][1] = {**muon.state_dict()["param_groups"][0], **saved["param_groups"][1]}
            optimizer = MuonAdamW(list(named.items()), lr=1.0, matrix_lr=None, weight_decay=0, betas=(0.8, 0.9))
            optimizer.load_state_dict(saved)
        for each in (optimizer, muon, adamw):
            each.step()
    for name, own in named.items():
        assert torch.equal(own, of_other[name]) if name in matrices else torch.allclose(own, of_other[name])


@pytest.mark.parametrize("shape", [(5, 5), (20, 6), (6, 20)])
def test_orthogonalize_acts_on_singular_values(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the polynomial of the singular values of a decomposition in double precision."""
    monkeypatch.setattr(optim, "matrix_dtype", lambda device: torch.float32)
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    a, b, c = optim.NEWTON_SCHULZ
    for _ in range(3):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(optim.orthogonalize(matrix, steps=3).double(), (u * s) @ v, rtol=0, atol=1e-5)
    assert torch.equal(matrix, before)


def test_muon_multiplies_in_what_the_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the capabilities that torch reports; without AMX, bfloat16 is emulated or slower than float32."""
    avx, amx = {"avx512_bf16": True}, {"avx512_bf16": True, "amx_bf16": True}
    for capabilities, dtype in (({"avx2": True}, torch.float32), (avx, torch.float32), (amx, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)  # noqa: B023
        assert optim.matrix_dtype(torch.device("cpu")) == dtype
    assert optim.matrix_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("make", [classifier, language_model])
def test_a_checkpoint_alone_rebuilds_the_model(make: Any, tmp_path: Path) -> None:
    task = make(init="normal", init_std=0.3)
    train(task, 3, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    torch.load(tmp_path / "x.ckpt", weights_only=True)
    loaded = load_task(tmp_path / "x.ckpt")
    ids = torch.randint(2, 50, (3, 20))
    assert type(loaded) is type(task) and not loaded.training
    assert torch.equal(loaded.model(ids), task.eval().model(ids))


def test_errors(tmp_path: Path) -> None:
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


def translation(**recipe: Any) -> Translate:
    own = {"tied_output": True, "shared_embeddings": True, "scale_embedding": True}
    return Translate(
        architecture={**stack_arguments(**own)},
        recipe={**group("recipe", "inverse_sqrt"), **recipe},
        decoding={"beam": 2, "length_penalty": 1.0},
    )


def rates(task: Task, steps: int) -> list[float]:
    """The learning rate at each step of a run."""
    about = {"gradient_clip_val": None, "precision": "32-true", "estimated_stepping_batches": math.inf}
    task._trainer = SimpleNamespace(**about)  # type: ignore
    configured = task.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    lrs = []
    for _ in range(steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return lrs


def test_the_papers_schedule_is_its_equation() -> None:
    """Oracle: Vaswani et al. 2017, equation 3, steps counted from 1; lr is a factor."""
    lrs = rates(translation(schedule="vaswani", warmup_steps=40, lr=2.0), 200)
    width = 16
    expected = [2 * width**-0.5 * min(step**-0.5, step * 40**-1.5) for step in range(1, 201)]
    assert lrs == pytest.approx(expected, rel=1e-9)


def test_inverse_square_root_after_a_warm_up() -> None:
    """Oracle: in a straight line up to lr at the last step of the warm-up, then lr sqrt(warmup / step)."""
    lrs = rates(translation(schedule="inverse_sqrt", warmup_steps=10, lr=1e-2), 100)
    assert lrs[:10] == pytest.approx([1e-3 * step for step in range(1, 11)])
    assert lrs[9:] == pytest.approx([1e-2 * (10 / step) ** 0.5 for step in range(10, 101)])
    without = rates(translation(schedule="inverse_sqrt", warmup_steps=0, lr=1e-2), 9)
    assert without == pytest.approx([1e-2 / step**0.5 for step in range(1, 10)])
    with pytest.raises(UserError, match="recipe.schedule=vaswani needs recipe.warmup_steps"):
        rates(translation(schedule="vaswani", warmup_steps=0), 1)


def test_muon_without_a_block_is_an_error() -> None:
    with pytest.raises(UserError, match="needs the weight matrices of transformer blocks; use adamw"):
        MuonAdamW(
            [("output.weight", torch.nn.Parameter(torch.ones(2, 2)))],
            lr=1,
            matrix_lr=None,
            weight_decay=0,
            betas=(0.9, 0.9),
        )


def test_label_smoothing_is_its_formula() -> None:
    """Oracle: (1 - e) times the loss of the target plus e times the mean loss of all tokens, written out."""
    torch.manual_seed(0)
    output, hidden, targets = torch.nn.Linear(8, 30), torch.randn(700, 8), torch.randint(30, (700,))
    log = output(hidden).log_softmax(dim=-1)
    own = log[torch.arange(700), targets]
    expected = -(0.9 * own + 0.1 * log.mean(dim=-1)).mean()
    torch.testing.assert_close(next_token_loss(output.weight, output.bias, hidden, targets, 0.1), expected)
    torch.testing.assert_close(next_token_loss(output.weight, output.bias, hidden, targets), -own.mean())


def test_a_translations_loss_counts_every_target_token_once_and_no_padding() -> None:
    """Oracle: the log-probabilities of each pair alone, without padding; <eos> counts, <bos> does not."""
    torch.manual_seed(0)
    task = translation(label_smoothing=0.0).eval()
    source = torch.tensor([[5, 6, 7, 3], [9, 3, 0, 0]])
    target = torch.tensor([[2, 8, 9, 10, 3], [2, 11, 3, 0, 0]])
    total, tokens = 0.0, 0
    for row, (s, t) in enumerate(((4, 5), (2, 3))):
        log = task.model(source[row : row + 1, :s], target[row : row + 1, : t - 1])[0].log_softmax(dim=-1)
        total -= log[torch.arange(t - 1), target[row, 1:t]].sum().item()
        tokens += t - 1
    task.track_loss = lambda loss, batch, batch_idx: loss  # type: ignore
    loss = task.training_step({"source": source, "target": target}, 0)
    assert float(loss) == pytest.approx(total / tokens, rel=1e-5)
    assert int(task.tokens) == 6 + tokens
    task.on_validation_epoch_start()
    task.evaluate_batch({"part": "validation", "source": source, "target": target})
    assert task.compute_metrics()["validation_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_the_average_of_checkpoints_is_the_mean_of_their_weights(tmp_path: Path) -> None:
    tasks = []
    for k in range(3):
        torch.manual_seed(k)
        tasks.append(translation())
        content = {"task": "translate", "hyper_parameters": {}, "state_dict": tasks[-1].state_dict()}
        torch.save(content, tmp_path / f"{k}.ckpt")
    mean = average([tmp_path / f"{k}.ckpt" for k in range(3)])
    for name, value in mean.items():
        expected = sum(task.state_dict()[name] for task in tasks) / 3
        torch.testing.assert_close(value, expected)
        assert value.dtype == tasks[0].state_dict()[name].dtype


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_complete(name: str) -> None:
    """The checks of a new task: its config, its declarations, a network from the config, a report."""
    config, task = as_plain(compose(f"task={name}", *TINY)), TASKS[name]
    assert task.name == config["task"]["name"] == name
    data = task.datamodule(load(config), **{key: config[key] for key in DATA_KEYS})
    new = task.from_config(config, data)
    new.attach(data)
    assert task(**new.hparams).model.state_dict().keys() == new.model.state_dict().keys()  # plain data rebuild it
    examples = data.examples()
    assert all(len(example.ids) == len(task.inputs) for example in examples) and task.output and task.purpose
    new.eval()
    new.on_validation_epoch_start()
    with torch.no_grad():
        batches = data.test_dataloader()
        if name != "translate":
            for batch in batches:
                new.evaluate_batch(batch)
        described = list(new.describe_examples(examples, data.tokenizer))
    assert all(title and text for title, text in described)
    metrics = data.reference_metrics() | new.compute_metrics()
    report = new.report(metrics)
    assert report["metric"] == new.metric_name("test") and set(report["columns"]) <= set(metrics)
    assert name == "translate" or report["columns"][0] == report["metric"]
    result = {"metrics": metrics, "corpus": data.description, "config": config}
    assert len({len(row) for row in new.summary(result)}) == 1
    assert set(new.progress_columns(metrics)) <= set(metrics)
    assert "Corpus" in data.corpus_line() and data.limit_length(None) is None


def test_the_report_shows_leaked_sentences_only_if_there_are_any() -> None:
    metrics = {"test_accuracy": 0.9, "test_accuracy_in_train": 1.0, "test_accuracy_not_in_train": 0.5}
    report = classifier().report({"train_accuracy": 1.0, **metrics})
    assert report["columns"] == [*metrics, "train_accuracy"]
    assert report["compare"] == ["test_accuracy", "test_accuracy_not_in_train"] and report["higher_is_better"]
    report = classifier().report({**metrics, "test_accuracy_in_train": None})
    assert report["columns"] == report["compare"] == ["test_accuracy"]


def test_the_report_shows_perplexities_in_the_order_of_the_speakers() -> None:
    task = language_model()
    task.speakers = ["b", "a"]
    metrics = {f"test_perplexity_{name}": 1.0 for name in ("a", "b", "c", "mean")}
    shown = [name.removeprefix("test_perplexity_") for name in task.report(metrics)["columns"]]
    assert shown == ["mean", "b", "a", "c"] and not task.report(metrics)["higher_is_better"]
    metrics |= {"test_known_perplexity_mean": 1.0, "test_unknown_rate_mean": 0.0}
    assert len(task.report(metrics)["columns"]) == 4  # no word is unknown
    assert len(task.report({**metrics, "test_unknown_rate_mean": 0.02})["columns"]) == 6


def test_balanced_classes_have_the_loss_of_adjusted_logits() -> None:
    """Oracle: Menon et al. 2021, equation 10, by hand; a model that knows the frequencies alone says uniform."""
    prior = torch.tensor([30.0, 10.0]).log()
    logits, labels = torch.tensor([[0.2, -0.4], [0.0, 0.0]]), torch.tensor([1, 0])
    first = 10 * math.exp(-0.4) / (30 * math.exp(0.2) + 10 * math.exp(-0.4))
    expected = [-math.log(first), -math.log(30 / 40)]
    assert cross_entropy(logits, labels, prior, 0.0, "none").tolist() == pytest.approx(expected)
    assert cross_entropy(logits, labels, prior, 0.0).item() == pytest.approx(sum(expected) / 2)


def test_a_classifier_trains_with_unknown_words_and_balanced_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: words that occur once, counted by hand, are <unk> at a rate of 1; the prior is that of the labels."""
    config = as_plain(compose(*TINY, "protocol=clean", "protocol.validation=0.9", "task.unknown_rate=1"))
    config["task"]["balanced"] = True
    data = SentenceData(load(config), **{key: config[key] for key in DATA_KEYS})
    task = Classify.from_config(config, data)
    task.attach(data)
    labels = data.train["labels"].tolist()
    assert task.log_prior_C is not None
    assert task.log_prior_C.exp().tolist() == pytest.approx([labels.count(k) for k in range(3)])
    ids, read = data.train["ids"].long(), list[torch.Tensor]()
    monkeypatch.setattr(task.model, "forward", lambda ids: read.append(ids) or torch.zeros(len(ids), 3))
    monkeypatch.setattr(task, "track_loss", lambda loss, batch, index: loss)
    loss = task.training_step({"ids": ids, "labels": data.train["labels"]}, 0)
    once = torch.isin(ids, torch.tensor([k for k, n in Counter(ids.flatten().tolist()).items() if n == 1]))
    assert once.any() and (read[0][once] == UNKNOWN).all() and (read[0][~once] == ids[~once]).all()
    shares = torch.tensor([labels.count(k) / len(labels) for k in labels])
    assert loss.item() == pytest.approx(-shares.log().mean().item())
