"""task=classify: who said it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from speechformer.console import format_metric
from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, Example, Rows
from speechformer.data.speeches import SentenceData
from speechformer.errors import UserError
from speechformer.escape import escape_markdown
from speechformer.metrics.accuracy import Accuracy
from speechformer.metrics.intervals import wilson
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.naive_bayes import NaiveBayes
from speechformer.models.stack import initialise
from speechformer.runs.folder import PREDICTIONS
from speechformer.runs.predictions import write_predictions
from speechformer.tasks.base import Task
from speechformer.tasks.text import TextInputs, read_words
from speechformer.tasks.unknown_words import UnknownWords
from speechformer.tasks.view import View

REFERENCES = {  # metrics of what needs no network, with their names in the summary
    "majority_accuracy": "majority class",
    "naive_bayes_accuracy": "naive Bayes",
    "best_without_order_accuracy": "best without word order",
    "best_possible_accuracy": "best possible",
}
MORE_METRICS: dict[str, Callable[[int], Metric]] = {}  # of torchmetrics for classes, beside the accuracy


class ClassifyView(View):
    """Accuracies with their intervals, those on leaked and other sentences, and each sentence's probabilities."""

    charts: ClassVar = {
        "accuracy": r"(train|validation|test)_accuracy",
        "accuracy on leaked and other test sentences": r"test_accuracy_(in_train|not_in_train)",
        "validation accuracy by speaker": r"validation_accuracy_of_.+",
        "test accuracy by speaker": r"test_accuracy_of_.+",
    }
    compared, x_axis = ("test_accuracy_not_in_train",), "epoch"
    baseline_keys = ("block_size",)  # sentences are cut there

    def progress_columns(self, metrics: dict[str, float]) -> dict[str, float]:
        hidden = set() if "test_accuracy_in_train" in metrics else {"test_accuracy_not_in_train"}
        return {name: value for name, value in metrics.items() if name not in hidden and "_accuracy_of_" not in name}

    def describe_examples(
        self, examples: Sequence[Example], tokenizer: Tokenizer | Subwords
    ) -> Iterator[tuple[str, str]]:
        """Return sentences with the probability of each class, as a table in Markdown."""
        classes = [escape_markdown(name) for name in self.task.classes]
        rows = ["| sentence | said by | " + " | ".join(classes) + " |", "|---" * (2 + len(classes)) + "|"]
        for example in examples:
            probabilities = self.task(example.ids[0].to(self.task.device)[None]).softmax(dim=-1)[0].tolist()
            label = "" if example.label is None else classes[example.label]
            sentence = escape_markdown(" ".join(example.tokens[0]))
            rows.append("| " + " | ".join([sentence, label, *(f"{100 * p:.0f} %" for p in probabilities)]) + " |")
        yield "who said it", "\n".join(rows)

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the accuracies with their intervals, and those of what needs no network."""
        if result.get("debug"):  # which may have measured a few sentences
            return super().summary(result)
        metrics, counts = result["metrics"], result["corpus"]["counts"]
        parts = [(split, f"{split}_accuracy", counts[split]) for split in ("train", "validation", "test")]
        if leaked := counts["test_in_train"]:
            parts.append(("  in train too", "test_accuracy_in_train", leaked))
            parts.append(("  not in train", "test_accuracy_not_in_train", counts["test"] - leaked))
        rows: list[tuple[str, ...]] = [("accuracy", "", "95 % interval", "sentences")]
        for label, name, n in parts:
            if (value := metrics.get(name)) is not None:
                low, high = wilson(value, n)
                interval = f"{100 * low:.1f} - {100 * high:.1f} %"
                rows.append((label, format_metric("accuracy", value), interval, str(n)))
        for name, label in REFERENCES.items():
            if (value := metrics.get(name)) is not None:
                rows.append((label, format_metric("accuracy", value), "", ""))
        return rows

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        leaked = ["test_accuracy_in_train", "test_accuracy_not_in_train"]
        if metrics.get("test_accuracy_in_train") is None:
            leaked = []  # no test sentence is in train, so the accuracy of the others is that of all
        return ["test_accuracy", *leaked, "train_accuracy", *(f"test_{name}" for name in MORE_METRICS)]


class Classify(Task):
    """An `EncoderClassifier` under cross-entropy.

    Args:
        architecture: the arguments of `EncoderClassifier`.
        recipe: the config group.
        classes: the name of each class.
        naive_bayes: the arguments of `NaiveBayes`, which evaluation and prediction add; None for none.
    """

    name, metric, mode = "classify", "accuracy", "max"
    purpose = "classifies the speaker of a sentence"
    abilities = frozenset({"predict"})
    datamodule = SentenceData
    inputs: ClassVar = {"ids": "[sentences, tokens], whole numbers, 0 is padding at the end"}
    output = "logits [sentences, classes]"
    options = ("pool", "classifier_width", "classifier_activation")
    no_ensemble = None
    view_class = ClassifyView
    model: EncoderClassifier

    def __init__(
        self,
        architecture: dict[str, Any],
        recipe: dict[str, Any],
        classes: list[str],
        naive_bayes: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.classes = classes
        self.unknown_words: UnknownWords | None = None
        self.log_prior_C: Tensor | None = None  # of the classes in train, with task.balanced
        self.counts = None if naive_bayes is None else NaiveBayes(**naive_bayes)
        self.model = EncoderClassifier(**architecture)
        self.tested: Rows = {}
        self.predicted = torch.empty(0, dtype=torch.int64)  # of the test, by the last evaluation; -1: none
        initialise(self.model, recipe["init"], recipe["init_std"])

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> Classify:
        classes = list(data.corpus.classes)
        architecture = cls.architecture_arguments(config, data, classes=len(classes))
        return cls(architecture, config["recipe"], classes, naive_bayes_arguments(data))

    def attach(self, data: TaskData) -> None:
        assert isinstance(data, SentenceData)
        self.tested = data.tested["test", ""]
        self.predicted = torch.full_like(self.tested["labels"], -1)
        self.unknown_words = unknown_words(data)
        if data.task["balanced"]:
            sentences_C = data.train["labels"].bincount(minlength=len(self.classes))
            self.log_prior_C = sentences_C.clamp(min=1).log()
        if self.counts is not None:
            self.counts.fit(data.train["ids"], data.train["labels"])

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"predicted": self.predicted.clone()}

    def restore(self, progress: dict[str, Any], batches: dict[str, int]) -> None:
        super().restore(progress, batches)
        predicted = progress["predicted"]
        if predicted.shape != self.predicted.shape or predicted.dtype != torch.int64:
            raise ValueError("its predictions are not of this test set")
        self.predicted = predicted.clamp(-1, len(self.classes) - 1)

    def training_loss(self, batch: Batch) -> Tensor:
        ids = batch["ids"]
        if self.unknown_words is not None:
            ids = self.unknown_words.replace(ids, self.generator)
        loss = cross_entropy(self.model(ids), batch["labels"], self.log_prior_C, self.recipe["label_smoothing"])
        self.tokens += (ids != PAD).sum()
        return loss

    def member_losses(self, model: Any, batch: Batch, members: int) -> tuple[Tensor, Tensor]:
        smoothing = self.recipe["label_smoothing"]
        losses = cross_entropy(model(batch["ids"]), batch["labels"], self.log_prior_C, smoothing, "none")
        return losses.view(members, -1).mean(dim=1), (batch["ids"].view(members, -1) != PAD).sum(dim=1)

    def new_metric(self) -> Metric:
        return Accuracy(sync_on_compute=False)  # of numbers that are on the host

    def forward_batch(self, model: EncoderClassifier, batch: Batch) -> Tensor:
        logits_BC = model(batch["ids"])
        return logits_BC if self.counts is None else self.counts.add(batch["ids"], logits_BC)

    def update_metrics(self, logits: Tensor, batch: Batch) -> None:
        self.update_members([self], None, logits, batch)

    def update_members(self, tasks: Sequence[Any], model: Any, output: Tensor, batch: Batch) -> None:
        (split, _), labels, rows = batch["part"], batch["labels"], batch.get("row")
        logits_KBC = output.view(len(tasks), -1, output.shape[-1])
        predicted_KB = logits_KBC.argmax(dim=-1)
        groups = {"": torch.ones_like(labels, dtype=torch.bool), **groups_of(batch, self.classes)}
        chosen_GB = torch.stack([*groups.values()])
        right_KGB = (predicted_KB == labels)[:, None] & chosen_GB
        counts_G, *right_KG = torch.cat([chosen_GB[None], right_KGB]).sum(dim=-1).tolist()
        on_cpu = None if rows is None else (rows.cpu(), predicted_KB.cpu())
        for k, task in enumerate(tasks):
            if task.diverged_at is not None and len(tasks) > 1:
                continue
            if on_cpu is not None and len(task.predicted):
                task.predicted[on_cpu[0]] = on_cpu[1][k]
            for name, right, count in zip(groups, right_KG[k], counts_G):
                if count:
                    task.measured["_".join(filter(None, (split, "accuracy", name)))].update(right, count)
            for name, metric_class in MORE_METRICS.items():
                if f"{split}_{name}" not in task.measured:
                    task.measured[f"{split}_{name}"] = metric_class(len(self.classes)).to(self.device)
                task.measured[f"{split}_{name}"].update(logits_KBC[k], labels)

    def read(self, text: str, tokenizer: Tokenizer | Subwords, max_tokens: int) -> TextInputs:
        block_size = self.hparams["architecture"]["block_size"]
        limit = min(max_tokens, self.model.max_length or max_tokens, block_size)
        return read_words(text, tokenizer, limit, ", as in training" if limit == block_size else "")

    def write_artifacts(self, directory: Path) -> dict[str, Any]:
        """Write `predictions.tsv`, if the weights behind the metrics were tested on every sentence.

        Returns:
            A caution if every prediction is the same class, and no sentence decides it.
        """
        if len(self.predicted) and self.predicted.min() >= 0 and not self.diverged():
            columns = self.tested["labels"], self.predicted, self.tested["in_train"]
            write_predictions(directory / PREDICTIONS, self.classes, *(column.tolist() for column in columns))
            (first, *others), labels = self.predicted.unique().tolist(), self.tested["labels"].unique()
            if not others and len(labels) > 1:
                said = f"The model predicts {self.classes[first]} for every test sentence, whatever it reads."
                return {"caution": f"{said} Train longer, or try a lower recipe.lr."}
        return {}


def groups_of(batch: Batch, classes: Sequence[str]) -> dict[str, Tensor]:
    """Return which sentences of an evaluation batch are in each group whose accuracy is measured, by name."""
    groups: dict[str, Tensor] = {}
    if "in_train" in batch:
        groups |= {"in_train": batch["in_train"], "not_in_train": ~batch["in_train"]}
    if batch["part"][0] != "train":
        groups |= {f"of_{name}": batch["labels"] == label for label, name in enumerate(classes)}
    return groups


def naive_bayes_arguments(data: TaskData) -> dict[str, Any] | None:
    """Return the arguments of `NaiveBayes` for a corpus; None if the model stands alone."""
    assert isinstance(data, SentenceData)
    if not data.task["naive_bayes"]:
        return None
    sizes = {"classes": len(data.corpus.classes), "vocab_size": data.vocab_size, "block_size": data.block_size}
    return {"sentences": len(data.train["labels"]), "weight": data.task["naive_bayes"], **sizes}


def unknown_words(data: SentenceData) -> UnknownWords | None:
    """Return what replaces words that occur once; None without `task.unknown_rate`."""
    if not (rate := data.task["unknown_rate"]):
        return None
    if data.task["tokens"] != "words":
        raise UserError("task.unknown_rate needs task.tokens=words: other tokens are never unknown.")
    words = UnknownWords(data.train["ids"].flatten().long(), data.vocab_size, rate)
    words.check()
    return words


def cross_entropy(
    logits_BC: Tensor, labels_B: Tensor, log_prior_C: Tensor | None, smoothing: float, reduction: str = "mean"
) -> Tensor:
    """Return the training loss of sentences, reduced as torch does.

    With a prior the logits are those of classes that are equally frequent: Menon et al. 2021, "Long-tail learning via
    logit adjustment", equation 10.
    """
    if log_prior_C is not None:
        logits_BC = logits_BC + log_prior_C.to(logits_BC.device)
    return F.cross_entropy(logits_BC, labels_B, label_smoothing=smoothing, reduction=reduction)
