"""task=probe: does a model find what the probe asks for?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from speechformer.console import format_metric
from speechformer.corpora.special_tokens import IGNORE, PAD
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, Example
from speechformer.data.probes import ProbeData
from speechformer.escape import escape_markdown
from speechformer.kernels.loss import next_token_loss
from speechformer.models.decoder import Decoder
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task, scored_rows
from speechformer.tasks.view import View


class ProbeView(View):
    """Accuracies and exact answers beside those of chance: as in training, by length, by group."""

    charts: ClassVar = {
        "accuracy": r"(validation|test)_accuracy",
        "exact answers": r"(validation|test)_exact",
        "loss": r"(validation|test)_loss",
    }
    unit = "rows"
    note = "Accuracy per symbol, and exact answers; chance is a guess among the symbols that could stand there."

    def progress_columns(self, metrics: dict[str, float]) -> dict[str, float]:
        shown = {f"{split}_{kind}" for split in ("validation", "test") for kind in ("accuracy", "exact")}
        return {name: value for name, value in metrics.items() if name in shown}

    def describe_examples(self, examples: Sequence[Example], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
        rows = ["| symbol | most probable next symbol |", "|---|---|"]
        for example in examples[:1]:
            predicted = self.task.model(example.ids[0].to(self.task.device)[None])[0].argmax(dim=-1).tolist()
            for pair in zip(example.tokens[0], tokenizer.tokens(predicted)):
                rows.append("| " + " | ".join(map(escape_markdown, pair)) + " |")
        yield "which symbol is next", "\n".join(rows)

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return accuracies and exact answers beside those of chance: as in training, by length, by group."""
        metrics, counts = result["metrics"], result["corpus"]["counts"]
        rows: list[tuple[str, ...]] = [("", "accuracy", "chance", "exact", "chance", "rows")]
        parts = {
            split: (split, "", counts[split]) for split in ("validation", "test") if f"{split}_accuracy" in metrics
        }
        for length in self.task.lengths:
            parts[f"  length {length}"] = ("test", f"_length_{length}", counts["tests"][f"length_{length}"]["rows"])
        for label, (split, end, number) in parts.items():
            names = (f"{split}_accuracy{end}", f"chance_accuracy{end}", f"{split}_exact{end}", f"chance_exact{end}")
            cells = [format_metric("accuracy", metrics.get(name)) for name in names]
            reached = metrics.get(names[0]) is not None
            rows.append((label, *cells, str(number)) if reached else (label, "out of reach", *[""] * 4))
        for group in self.task.groups:
            if (value := metrics.get(f"test_accuracy_{group}")) is not None:
                rows.append((f"  {group.replace('_', ' ')}", format_metric("accuracy", value), *[""] * 4))
        return rows

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        ends = ["", *(f"_length_{length}" for length in self.task.lengths)]
        return [f"test_{kind}{end}" for end in ends for kind in ("accuracy", "exact")] + ["chance_accuracy"]

    def report(self, metrics: dict[str, float | None]) -> dict[str, Any]:
        report = super().report(metrics)
        return report | {"compare": [name for name in report["columns"] if name.startswith("test_accuracy")]}


class ProbeTask(Task):
    """A `Decoder` under cross-entropy over the symbols that a probe asks for.

    Accuracy is per symbol, given the true symbols before it. An answer is exact if all symbols that the row asks
    for are right.

    Args:
        architecture: the arguments of `Decoder`.
        recipe: the config group.
        lengths, groups: those that are measured alone, in order.
    """

    name, metric, mode = "probe", "accuracy", "max"
    later_if_equal = True  # accuracy can be 100 % long before longer rows are solved
    purpose = "answers a probe"
    abilities = frozenset({"generate"})
    datamodule = ProbeData
    inputs: ClassVar = {"ids": "[rows, symbols], whole numbers, 0 is padding at the end"}
    output = "logits of the symbol after each [rows, symbols, vocabulary]"
    options = ("tied_output",)
    no_ensemble = "each seed has rows of its own"
    view_class = ProbeView
    model: Decoder

    def __init__(
        self, architecture: dict[str, Any], recipe: dict[str, Any], lengths: list[int], groups: list[str]
    ) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.lengths, self.groups = lengths, groups
        self.model = Decoder(**architecture)
        initialise(self.model, recipe["init"], recipe["init_std"])

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> ProbeTask:
        assert isinstance(data, ProbeData)
        lengths, groups = data.probe.test_lengths, list(data.probe.groups)
        return cls(cls.architecture_arguments(config, data), config["recipe"], lengths, groups)

    def training_loss(self, batch: Batch) -> Tensor:
        scored = scored_rows(batch["targets"] != IGNORE)
        hidden = self.model.hidden(batch["ids"], token_mask_BT=batch["ids"] != PAD).flatten(0, 1)[scored]
        targets = batch["targets"].flatten()[scored]
        output, smoothing = self.model.output, self.recipe["label_smoothing"]
        self.tokens += (batch["ids"] != PAD).sum()
        return next_token_loss(output.weight, output.bias, hidden, targets, smoothing)

    def new_metric(self) -> Metric:
        return MeanMetric(sync_on_compute=False).to(self.device)

    def forward_batch(self, model: Decoder, batch: Batch) -> Tensor:
        return model(batch["ids"])

    def update_metrics(self, logits_BTV: Tensor, batch: Batch) -> None:
        (split, name), targets, scored = batch["part"], batch["targets"], batch["targets"] != IGNORE
        right, end = logits_BTV.argmax(dim=-1) == targets, f"_{name}" if name else ""
        self.measured[f"{split}_accuracy{end}"].update(right[scored].float())
        self.measured[f"{split}_exact{end}"].update((right | ~scored).all(dim=1).float())
        if not name:
            loss = F.cross_entropy(logits_BTV[scored].float(), targets[scored])
            self.measured[f"{split}_loss"].update(loss, scored.sum())
        if split == "test" and self.groups:
            groups = batch["groups"][scored]
            for group in groups.unique().tolist():
                measured = self.measured[f"test_accuracy{end}_{self.groups[group]}"]
                measured.update(right[scored][groups == group].float())
