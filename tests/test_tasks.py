"""Oracles: torchmetrics' own Perplexity, a count by hand, and the schedules' formulas."""

from __future__ import annotations

import contextlib
import copy
import html
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import markdown
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, compose, group
from test_models import stack_arguments
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.text import Perplexity

from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE, PAD, UNKNOWN
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.batches import EvaluationBatches
from speechformer.errors import UserError
from speechformer.escape import escape_markdown
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.decoder import Decoder
from speechformer.models.ensemble import DropoutGenerators, stack_models
from speechformer.tasks import optim
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify, cross_entropy
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.optim import MuonAdamW
from speechformer.tasks.registry import TASKS, build_data
from speechformer.tasks.text import note_unknown, read_words
from speechformer.tasks.translate import Translate
from speechformer.training.checkpoints import average

ADAM = group("recipe", "adam")


def language_model(**recipe: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(architecture={**stack_arguments(), "tied_output": False}, recipe={**ADAM, **recipe})


def classifier() -> Classify:
    torch.manual_seed(0)
    architecture = {**stack_arguments(), "classes": 3, "pool": "mean", "classifier_width": 10}
    return Classify(architecture=architecture, recipe=ADAM, classes=["a", "b", "c"])


def translation(seed: int = 0) -> Translate:
    torch.manual_seed(seed)
    options = {"tied_output": True, "shared_embeddings": True, "scale_embedding": True}
    recipe = {**group("recipe", "inverse_sqrt"), "label_smoothing": 0.0}
    return Translate(stack_arguments(**options), recipe, decoding={"beam": 2, "length_penalty": 1.0})


def evaluate(task: Any, parts: dict) -> dict[str, float]:
    task.eval()
    task.begin_evaluation()
    with torch.no_grad():
        for batch in EvaluationBatches(parts):
            task.validation_step(batch)
    task.end_evaluation()
    return task.metrics


def test_perplexity_is_torchmetrics_perplexity() -> None:
    """That of known words ignores <unk>, which one text has not, and another alone."""
    task, parts = language_model(), {}
    unknown = {"a": 0.05, "no": 0.0, "only": 1.0, "x_known_perplexity_y": 0.5}
    texts = [("train", ""), ("validation", ""), ("test_sliding", "a"), *(("test", name) for name in unknown)]
    for split, name in texts:
        ids, targets = torch.randint(2, 50, (60, 20)), torch.randint(2, 50, (60, 20))
        targets[torch.rand(60, 20) < unknown.get(name, 0.05)] = UNKNOWN
        targets[torch.rand(60, 20) < 0.3] = IGNORE
        parts[split, name] = {"ids": ids, "targets": targets}
    metrics = evaluate(task, parts)
    expected = {}
    for (split, name), rows in parts.items():
        targets, end = rows["targets"], f"_{name}" if name else ""
        kinds = {"perplexity": targets, "known_perplexity": targets.where(targets != UNKNOWN, IGNORE)}
        if name == "only" or split not in ("validation", "test"):
            del kinds["known_perplexity"]
        for kind, scored in kinds.items():
            oracle = Perplexity(ignore_index=IGNORE)
            oracle.update(task.model(rows["ids"]).detach(), scored)
            expected[f"{split}_{kind}{end}"] = oracle.compute().item()
    for kind, names in (("perplexity", [*unknown]), ("known_perplexity", [n for n in unknown if n != "only"])):
        values = [expected[f"test_{kind}_{name}"] for name in names]
        expected[f"test_{kind}_mean"] = sum(values) / len(values)
    expected["test_sliding_perplexity_mean"] = expected["test_sliding_perplexity_a"]
    assert metrics == pytest.approx(expected, rel=1e-4)


def test_the_rate_of_unknown_words_is_that_of_the_scored_tokens(tmp_path: Path) -> None:
    """Oracle: counted by hand. The first token of a text is no target."""
    (tmp_path / "train_LM.txt").write_text("We mend the harbours and the roads.\n" * 9)
    (tmp_path / "test_LM_x.txt").write_text("Zebras mend zebras.\n")  # of mend, zebras and the full stop one of three
    (tmp_path / "test_LM_y.txt").write_text("We mend the roads.\n")
    own = ["task=lm", "corpus=speeches", f"corpus.root={tmp_path}", "block_size=4", "protocol=paper"]
    config = as_plain(compose(*own))
    rates = {"x": pytest.approx(1 / 3), "y": 0.0, "mean": pytest.approx(1 / 6)}
    data = build_data(config, load(config))
    assert data.reference_metrics() == {f"test_unknown_rate_{name}": rate for name, rate in rates.items()}


def test_one_loss_that_is_not_a_number_is_not_left_out() -> None:
    metric = MeanPerplexity()
    metric.update(torch.tensor(1.0), 10)
    metric.update(torch.tensor(float("nan")), 1)
    assert metric.compute().isnan()


def test_training_loss_is_the_loss_of_the_next_token() -> None:
    task = language_model().eval()
    ids = torch.randint(2, 50, (4, 21))
    by_hand = [
        -task.model(ids[b : b + 1, : t + 1])[0, -1].log_softmax(-1)[ids[b, t + 1]]
        for b in range(4)
        for t in range(20)
    ]
    torch.testing.assert_close(task.training_loss({"ids": ids}), torch.stack(by_hand).mean())
    assert task.tokens == 80


def test_accuracy_is_counted_and_split_by_leaked_sentences_and_by_speaker() -> None:
    task = classifier()
    ids = torch.randint(2, 50, (200, 20))
    ids[torch.arange(200) % 3 == 0, 11:] = 0
    labels, in_train = torch.randint(0, 3, (200,)), torch.rand(200) < 0.7
    metrics = evaluate(task, {("test", ""): {"ids": ids, "labels": labels, "in_train": in_train}})
    with torch.no_grad():
        right = task.model(ids).argmax(dim=1) == labels
    groups = {"": labels >= 0, "_in_train": in_train, "_not_in_train": ~in_train}
    groups |= {f"_of_{name}": labels == label for label, name in enumerate("abc")}
    expected = {f"test_accuracy{end}": right[rows].float().mean().item() for end, rows in groups.items()}
    assert metrics == pytest.approx(expected)
    none_in_train = {"ids": ids, "labels": labels, "in_train": torch.zeros(200, dtype=torch.bool)}
    assert "test_accuracy_in_train" not in evaluate(task, {("test", ""): none_in_train})


def configured(steps: float = 20, **recipe: Any) -> Any:
    """Return what Lightning gets from a task of width 16, for a run of so many steps."""
    trainer = {"gradient_clip_val": None, "precision": "32-true", "estimated_stepping_batches": steps}
    task = language_model(**recipe)
    task._trainer = SimpleNamespace(**trainer)  # type: ignore[assignment]
    return task.configure_optimizers()


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ("constant", lambda step: 1.0),
        ("linear", lambda step: 1 - (step - 5) / 16),
        ("cosine", lambda step: (1 + math.cos(math.pi * (step - 5) / 16)) / 2),
        ("inverse_sqrt", lambda step: (4 / step) ** 0.5),
        ("vaswani", lambda step: 16**-0.5 * step**-0.5),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule: str, factor: Callable[[int], float]) -> None:
    """Steps are counted from 1; the first four warm up. Oracle of vaswani: equation 3 of Vaswani et al. 2017."""
    result = configured(schedule=schedule, warmup_steps=4, lr=0.1)
    assert result["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(20):
        rates.append(result["optimizer"].param_groups[0]["lr"])
        result["optimizer"].step()
        result["lr_scheduler"]["scheduler"].step()
    peak = 16**-0.5 * 4**-0.5 if schedule == "vaswani" else 1.0
    expected = [0.1 * (peak * step / 4 if step <= 4 else factor(step)) for step in range(1, 21)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_the_optimizer_is_the_one_asked_for(optimizer: str) -> None:
    recipe = {"lr": 0.01, "weight_decay": 0.3, "betas": [0.8, 0.9]}
    chosen = configured(optimizer=optimizer, schedule="constant", warmup_steps=0, **recipe)
    assert type(chosen).__name__.lower() == optimizer and len(chosen.param_groups) == 1
    assert (chosen.defaults["lr"], chosen.defaults["weight_decay"]) == (0.01, 0.3)
    assert optimizer == "sgd" or chosen.defaults["betas"] == (0.8, 0.9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon_is_torchs_muon_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's two optimizers on the same gradients, the first for the weight matrices of blocks."""
    monkeypatch.setattr(optim, "matrix_dtype", lambda device: torch.bfloat16)  # as torch everywhere
    model = language_model().model
    expected, weights = (dict(each.named_parameters()) for each in (copy.deepcopy(model), model))
    matrices = [name for name, weight in weights.items() if ".blocks." in name and weight.ndim == 2]
    assert len(matrices) == 4 * len(model.decoder.blocks)  # queries, keys and values in one; output; two of ff
    options: dict[str, Any] = {"weight_decay": 0.3, "betas": (0.8, 0.9)}
    muon = torch.optim.Muon([expected[name] for name in matrices], lr=0.02, weight_decay=0.3)
    adamw = torch.optim.AdamW([weight for name, weight in expected.items() if name not in matrices], 0.01, **options)
    optimizer = MuonAdamW(list(weights.items()), lr=0.01, matrix_lr=0.02, **options)
    for step in range(3):
        torch.manual_seed(step)
        for name, weight in weights.items():
            weight.grad = torch.randn_like(weight)
            expected[name].grad = weight.grad.clone()
        if step == 2:  # as after a resume
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = MuonAdamW(list(weights.items()), lr=1.0, matrix_lr=None, **options)
            optimizer.load_state_dict(saved)
        for each in (optimizer, muon, adamw):
            each.step()
    for name, weight in weights.items():  # bfloat16 has 8 bits, and a step moves an entry by about 0.005
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=5e-4 if name in matrices else 1e-6)


def test_muon_leaves_vectors_that_lie_in_one_parameter_to_adamw() -> None:
    """The lambdas of differential attention are four vectors and no matrix."""
    torch.manual_seed(0)
    weights = dict(
        Decoder(**stack_arguments(attention={"name": "differential"}), tied_output=False).named_parameters()
    )
    _, muon = MuonAdamW([*weights.items()], lr=0.1, matrix_lr=None, weight_decay=0.0, betas=(0.8, 0.9)).param_groups
    vectors = [weight for name, weight in weights.items() if name.endswith("lambdas")]
    assert vectors and not any(matrix is vector for matrix in muon["params"] for vector in vectors)


def test_errors() -> None:
    with pytest.raises(UserError, match="warmup_steps=12 is not less than the 12 steps"):
        configured(12, schedule="linear", warmup_steps=12)
    with pytest.raises(UserError, match="set trainer.max_steps or trainer.max_epochs"):
        configured(math.inf, schedule="linear")
    with pytest.raises(UserError, match="recipe.schedule=vaswani needs recipe.warmup_steps"):
        configured(schedule="vaswani", warmup_steps=0)
    output = [("output.weight", torch.nn.Parameter(torch.ones(2, 2)))]
    with pytest.raises(UserError, match="needs the weight matrices of transformer blocks; use adamw"):
        MuonAdamW(output, lr=1, matrix_lr=None, weight_decay=0, betas=(0.9, 0.9))


def test_a_translations_loss_counts_every_target_token_once_and_no_padding() -> None:
    """Oracle: the log-probabilities of each pair alone, without padding; <eos> counts, <bos> does not."""
    task = translation().eval()
    pairs = ([5, 6, 7, 3], [2, 8, 9, 10, 3]), ([9, 3], [2, 11, 3])
    losses = []
    for source, target in pairs:
        logits = task.model(torch.tensor([source]), torch.tensor([target[:-1]]))[0]
        losses.append(F.cross_entropy(logits, torch.tensor(target[1:]), reduction="none"))
    expected = torch.cat(losses).mean()
    sides = (pad_sequence([torch.tensor(ids) for ids in side], batch_first=True) for side in zip(*pairs))
    batch: dict[str, Any] = dict(zip(("source", "target"), sides))
    torch.testing.assert_close(task.training_loss(batch), expected)
    assert int(task.tokens) == 6 + 6
    task.begin_evaluation()
    task.evaluate_batch({"part": "validation", **batch})
    assert task.compute_metrics()["validation_perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)


def test_the_average_of_checkpoints_is_the_mean_of_their_weights(tmp_path: Path) -> None:
    states, paths = [translation(seed).state_dict() for seed in range(3)], []
    for seed, state in enumerate(states):
        paths.append(tmp_path / f"{seed}.ckpt")
        torch.save({"task": "translate", "hyper_parameters": {}, "state_dict": state}, paths[-1])
    mean = average(paths)
    assert mean.keys() == states[0].keys()
    for name, value in mean.items():
        torch.testing.assert_close(value, sum(state[name] for state in states) / 3)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_complete(name: str) -> None:
    """The checks of a new task: its config, its declarations, a network from the config, a report."""
    config, kind = as_plain(compose(f"task={name}", *TINY)), TASKS[name]
    assert kind.name == config["task"]["name"] == name
    data = build_data(config, load(config))
    task: Task = kind.from_config(config, data)
    task.attach(data)
    assert kind(**task.hparams).model.state_dict().keys() == task.model.state_dict().keys()  # plain data rebuild it
    examples = data.examples()
    assert all(len(example.ids) == len(kind.inputs) for example in examples) and kind.output and kind.purpose
    task.eval()
    task.begin_evaluation()
    with torch.no_grad():
        for batch in data.test_dataloader() if name != "translate" else ():
            task.evaluate_batch(batch)
        described = list(task.view.describe_examples(examples, data.tokenizer))
    assert all(title and text for title, text in described)
    metrics = data.reference_metrics() | task.compute_metrics()
    report = task.view.report(metrics)
    assert report["metric"] == task.metric_name("test") and set(report["columns"]) <= set(metrics)
    assert name == "translate" or report["columns"][0] == report["metric"]
    result = {"metrics": metrics, "corpus": data.description, "config": config}
    assert len({len(row) for row in task.view.summary(result)}) == 1
    assert set(task.view.progress_columns(metrics)) <= set(metrics)
    assert "Corpus" in data.corpus_line() and data.limit_length(None) is None


def test_the_report_shows_what_there_is_in_the_order_of_the_speakers() -> None:
    metrics = {"test_accuracy": 0.9, "test_accuracy_in_train": 1.0, "test_accuracy_not_in_train": 0.5}
    report = classifier().view.report({"train_accuracy": 1.0, **metrics})
    assert report["columns"] == [*metrics, "train_accuracy"]
    assert report["compare"] == ["test_accuracy", "test_accuracy_not_in_train"] and report["higher_is_better"]
    report = classifier().view.report({**metrics, "test_accuracy_in_train": None})  # no test sentence is in train
    assert report["columns"] == report["compare"] == ["test_accuracy"]
    task = language_model()
    task.speakers = ["b", "a"]
    perplexities = [f"test_perplexity_{name}" for name in ("mean", "b", "a", "c")]
    metrics = dict.fromkeys(sorted(perplexities), 1.0)
    assert task.view.report(metrics)["columns"] == perplexities and not task.view.report(metrics)["higher_is_better"]
    metrics |= {"test_known_perplexity_mean": 1.0, "test_unknown_rate_mean": 0.0}
    assert len(task.view.report(metrics)["columns"]) == 4  # no word is unknown
    assert len(task.view.report({**metrics, "test_unknown_rate_mean": 0.02})["columns"]) == 6


def test_balanced_classes_have_the_loss_of_adjusted_logits() -> None:
    """Oracle: Menon et al. 2021, equation 10, by hand; a model that knows the frequencies alone says uniform."""
    prior = torch.tensor([30.0, 10.0]).log()
    logits, labels = torch.tensor([[0.2, -0.4], [0.0, 0.0]]), torch.tensor([1, 0])
    first = 10 * math.exp(-0.4) / (30 * math.exp(0.2) + 10 * math.exp(-0.4))
    expected = [-math.log(first), -math.log(30 / 40)]
    assert cross_entropy(logits, labels, prior, 0.0, "none").tolist() == pytest.approx(expected)
    config = as_plain(compose(*TINY, "protocol=clean", "task.balanced=true"))
    data = build_data(config, load(config))
    task = Classify.from_config(config, data)
    task.attach(data)
    counts = data.train["labels"].bincount()  # type: ignore[index]
    assert task.log_prior_C is not None and task.log_prior_C.exp().tolist() == pytest.approx(counts.tolist())


def test_words_are_cut_at_the_limit_and_unknown_ones_are_marked() -> None:
    tokenizer = Tokenizer.fit(["we mend the roads"])
    inputs = read_words("We mend the old roads.", tokenizer, 4, ", as in training")
    assert inputs.tokens == [["We <unk>", "mend", "the", "old <unk>"]]
    assert [ids.tolist() for ids in inputs.ids] == [tokenizer.encode("We mend the old")]
    assert inputs.notes[0] == "the first 4 of its 6 words are read, as in training"
    assert inputs.notes[1:] == ["not in the vocabulary, read as <unk>: We, old"]
    assert read_words("we mend", tokenizer, 4).notes == []
    note = note_unknown([f"w{k}" for k in range(25)], [UNKNOWN] * 25, UNKNOWN)
    assert note is not None and "w19 and 5 more" in note and "w20" not in note
    assert "Every word is unknown to this model" in note and "Every word" not in inputs.notes[1]


@pytest.mark.parametrize(
    ("predicted", "labels", "is_said"),
    [([1, 1, 1], [0, 1, 1], True), ([1, 0, 1], [0, 1, 1], False), ([1, 1], [1, 1], False), ([1, -1], [0, 1], False)],
)
def test_a_classifier_that_predicts_one_class_alone_says_so(
    predicted: list[int], labels: list[int], is_said: bool, tmp_path: Path
) -> None:
    """Oracle: the predictions."""
    tested = {"labels": torch.tensor(labels), "in_train": torch.zeros(len(labels), dtype=torch.bool)}
    task: Any = SimpleNamespace(classes=["ann", "bob"], predicted=torch.tensor(predicted), tested=tested)
    task.diverged = lambda: False
    said = Classify.write_artifacts(task, tmp_path)
    assert ("predicts bob for every test sentence" in said.get("caution", "")) == is_said


@pytest.mark.parametrize(("size", "is_said"), [(3, True), (300, False)])
def test_a_language_model_whose_tests_are_unknown_words_says_so(size: int, is_said: bool, tmp_path: Path) -> None:
    config = as_plain(compose(*TINY, "task=lm", f"task.vocab_size={size}"))
    data = build_data(config, load(config))
    task = LanguageModel.from_config(config, data)
    task.attach(data)
    said = task.write_artifacts(tmp_path).get("caution", "")
    assert said.startswith("Most words of test marlowe, ") == is_said == bool(said)


def test_words_are_not_markdown() -> None:
    text = "a|b*c_d`e<f>[g]# 😀 שלום"
    assert html.unescape(markdown.markdown(escape_markdown(text))) == f"<p>{text}</p>"


WAITING = """
task=classify
task=lm
task=lm model=rope pattern=window recipe.label_smoothing=0.1
task=lm model=nope attention=gated_delta
task=lm attention=sink attention.kv_heads=1 attention.conv=4 architecture.output_softcap=30
task=translate
task=probe probe=recall
"""


@pytest.mark.parametrize("words", WAITING.strip().splitlines())
def test_a_training_step_waits_for_no_value_of_an_accelerator(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's meta device. Its tensors have no values, so `.item()`, `nonzero` and `.cpu()` fail."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **options: contextlib.nullcontext())  # meta has none
    corpus = [] if "probe=" in words else ["corpus=sample"]
    config = as_plain(compose(*TINY[1:], *words.split(), *corpus))
    data = build_data(config, load(config))
    task: Any = TASKS[config["task"]["name"]].from_config(config, data)
    task.attach(data)
    steps = {"accumulate_grad_batches": 1, "num_training_batches": 9, "global_step": 0, "log_every_n_steps": 5}
    task._trainer = SimpleNamespace(**steps)
    batch = {name: tensor.to("meta") for name, tensor in next(iter(data.train_dataloader())).items()}
    task.to("meta").training_step(batch, 0).backward()
    if task.no_ensemble is None and "attention" not in words:
        ensemble = stack_models([task.model] * 2, DropoutGenerators([task.generator] * 2))
        both = {name: torch.cat([tensor] * 2) for name, tensor in batch.items()}
        task.member_losses(ensemble, both, 2)[0].sum().backward()
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        task.tokens.item()


@pytest.mark.parametrize("ignored", [PAD, IGNORE])
def test_ignored_targets_do_not_count(ignored: int) -> None:
    """Oracle: cross-entropy of the others alone. In bfloat16 the CPU takes the path of accelerators."""
    torch.manual_seed(0)
    weight, hidden, targets = torch.randn(40, 8), torch.randn(30, 8), torch.randint(4, 40, (30,))
    targets[20:] = ignored
    weight, hidden = weight.bfloat16(), hidden.bfloat16().requires_grad_()
    ours = next_token_loss(weight, None, hidden, targets, ignored=ignored)
    expected = F.cross_entropy(F.linear(hidden[:20], weight).float(), targets[:20])
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("build", [language_model, classifier])
def test_an_ensemble_is_measured_as_each_of_its_members(build: Callable[[], Any]) -> None:
    """Oracle: each member by itself. One that has diverged is left out."""
    tasks = [build().eval() for _ in range(3)]
    for k, task in enumerate(tasks):
        for parameter in task.parameters():
            torch.nn.init.normal_(parameter, std=0.1 * (k + 1))
    ids = torch.randint(2, 30, (4, 9), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[0, :3], targets[1, 2:5] = IGNORE, UNKNOWN
    batch = {"part": ("validation", ""), "ids": ids[:, :-1], "targets": targets, "labels": torch.tensor([0, 1, 2, 1])}
    ensemble = stack_models([task.model for task in tasks], DropoutGenerators([torch.Generator()] * 3)).eval()
    measured = []
    with torch.inference_mode():
        for at_once in (False, True):
            for task in tasks:
                task.begin_evaluation()
            tasks[2].diverged_at = 1  # is not measured
            if at_once:
                output = tasks[0].forward_batch(ensemble, {**batch, "ids": batch["ids"].repeat(3, 1)})
                tasks[0].update_members(tasks, ensemble, output, batch)
            else:
                for task in tasks[:2]:
                    task.evaluate_batch(batch)
            measured.append([{name: float(m.compute()) for name, m in task.measured.items()} for task in tasks])
    assert measured[0][0] != measured[0][1] and not measured[0][2] and len(measured[0][0]) > 1
    for ours, alone in zip(*measured[::-1]):
        assert ours == pytest.approx(alone, rel=1e-5)
