"""Perplexity of a decoder: what `task=lm` measures, logs and reports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from speechformer.console import format_metric
from speechformer.corpora.special_tokens import IGNORE, UNKNOWN
from speechformer.data.batches import Batch
from speechformer.data.speeches import TextSize
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.decoder import Decoder
from speechformer.tasks.base import Task, log_of_mean
from speechformer.tasks.mixture import MixturePerplexities

HIDDEN = (
    "test_sliding_",
    "test_known_",
    "validation_known_",
    "test_mixture_known_",
    "validation_mixture_known_",
    "test_word_",
    "test_bits_",
)  # metrics that the console does not show in training


class PerplexityTask(Task):
    """The evaluation of a `Decoder`.

    Attributes:
        speakers: the names of the tests, in the order of the report.
        text_sizes: of each test.
        mixture_metric: of a model that is mixed with counts; None for others.
    """

    metric, mode = "perplexity", "min"
    charts: ClassVar = {"perplexity": r"(train|validation)_perplexity|test_perplexity_.+"}
    note = "Perplexity per token; lower is better."
    model: Decoder

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.speakers: list[str] = []
        self.text_sizes: dict[str, TextSize] = {}
        self.mixture_metric: MixturePerplexities | None = None

    def metric_name(self, split: str) -> str:
        """Return the name of the main metric; of several test texts it is the mean of their perplexities."""
        return f"{split}_perplexity" + ("_mean" if split == "test" else "")

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def forward_batch(self, model: Decoder, batch: Batch) -> Tensor:
        return model.hidden(batch["ids"])

    def update_metrics(self, hidden_BTD: Tensor, batch: Batch) -> None:
        (split, name), scored = batch["part"], batch["targets"] != IGNORE
        hidden, targets = hidden_BTD[scored], batch["targets"][scored]
        weight, bias, tokens = self.model.output.weight, self.model.output.bias, len(targets)
        loss, metric = next_token_loss(weight, bias, hidden, targets), "_".join(filter(None, ("perplexity", name)))
        self.measured[f"{split}_{metric}"].update(loss, tokens)
        if self.mixture_metric is not None and "places" in batch:
            self.mixture_metric.update(batch["part"], self.logs(hidden, targets), batch["places"][scored])
        if split not in ("validation", "test"):
            return
        is_unknown = targets == UNKNOWN
        if unknown := int(is_unknown.sum()):  # a few: cheaper than the loss of the known ones
            rest = loss * tokens - next_token_loss(weight, bias, hidden[is_unknown], targets[is_unknown]) * unknown
            loss, tokens = rest / max(1, tokens - unknown), tokens - unknown
        if tokens:
            self.measured[f"{split}_known_{metric}"].update(loss, tokens)

    def logs(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return log p of targets, in nats, [R]."""
        output = self.model.output
        logits_RV = F.linear(hidden_RD, output.weight, output.bias).float()
        return logits_RV.log_softmax(dim=1).gather(1, targets_R[:, None])[:, 0]

    def evaluate_members(self, members: Sequence[Any], batch: Batch) -> None:
        (split, name), scored = batch["part"], batch["targets"] != IGNORE
        targets, metric = batch["targets"][scored], "_".join(filter(None, ("perplexity", name)))
        logs = log_of_mean([task.logs(task.forward_batch(task.model, batch)[scored], targets) for task in members])
        if self.mixture_metric is not None and "places" in batch:
            self.mixture_metric.update(batch["part"], logs, batch["places"][scored])
        chosen = {"": torch.ones_like(targets, dtype=torch.bool)}
        if split in ("validation", "test"):
            chosen["known_"] = targets != UNKNOWN
        for prefix, mask in chosen.items():
            if number := int(mask.sum()):
                self.measured[f"{split}_{prefix}{metric}"].update(-logs[mask].mean(), number)

    def compute_metrics(self) -> dict[str, float]:
        metrics = super().compute_metrics()
        if self.mixture_metric is not None:
            metrics |= self.mixture_metric.compute()
        metrics |= per_unit(metrics, self.text_sizes)
        return metrics | means_over_tests(metrics)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.mixture_metric is not None:
            self.mixture_metric.reset()

    def progress_columns(self, metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if not name.startswith(HIDDEN)}

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the perplexities of each text, and the mean in contexts of other lengths."""
        metrics, counts = result["metrics"], result["corpus"]["counts"]
        columns = {"in blocks": "perplexity", "sliding window": "sliding_perplexity"}
        if metrics.get("test_mixture_perplexity_mean"):
            columns["with counts"] = "mixture_perplexity"
        if metrics.get("test_unknown_rate_mean"):
            columns |= {"known words": "known_perplexity", "unknown": "unknown_rate"}
        else:
            columns |= {"per word": "word_perplexity", "bits per byte": "bits_per_byte"}
        rows: list[tuple[str, ...]] = [("perplexity", *columns, "tokens")]
        for name in metrics:
            if name in ("train_perplexity", "validation_perplexity"):
                split = name.removesuffix("_perplexity")
                rows.append((split, format_metric(name, metrics[name]), *[""] * len(columns)))
        tests = [(name, str(test["tokens"])) for name, test in counts["tests"].items()]
        for name, tokens in [*tests, ("mean", "")]:
            values = {metric: metrics.get(f"test_{metric}_{name}") for metric in columns.values()}
            cells = (format_metric(metric.replace("perplexity", ""), value) for metric, value in values.items())
            rows.append((f"test {name}", *cells, tokens))
        for length in result["config"]["task"]["lengths"]:
            value = metrics.get(f"test_length_{length}_perplexity_mean")
            said = "out of reach" if value is None else format_metric("", value)
            rows.append((f"  in contexts of {length}", said, *[""] * len(columns)))
        return rows

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        """Return the columns of the report: the main metric, that of each test, and what there is besides."""
        main, prefix = self.metric_name("test"), "test_perplexity_"
        tests = [name for name in metrics if name.startswith(prefix) and name != main]
        order = {f"{prefix}{name}": k for k, name in enumerate(self.speakers)}  # as in the classification task
        tests.sort(key=lambda name: order.get(name, len(order)))
        mixed = ["test_mixture_perplexity_mean", "test_mixture_known_perplexity_mean"]
        more = ["test_word_perplexity_mean", "test_bits_per_byte_mean"]
        if metrics.get("test_unknown_rate_mean"):
            more = ["test_known_perplexity_mean", "test_unknown_rate_mean"]
        return [main, *tests, *mixed, *more, "test_sliding_perplexity_mean", "train_perplexity"]


def means_over_tests(metrics: dict[str, float]) -> dict[str, float]:
    """Return the means of what was measured on each test, such as `test_perplexity_mean`."""
    tests = defaultdict(list)
    for name, value in metrics.items():
        for kind in ("_perplexity_", "_bits_per_byte_"):
            split, _, test = name.partition(kind)
            if test:
                tests[split + kind].append(value)
    return {f"{kind}mean": sum(values) / len(values) for kind, values in tests.items()}


def per_unit(metrics: dict[str, float], sizes: dict[str, TextSize]) -> dict[str, float]:
    """Return the perplexity of each test per word and its bits per byte, which vocabularies have in common.

    With unknown words they are too low: <unk> stands for many words, and which one it is costs nothing.
    """
    units: dict[str, float] = {}
    for test, size in sizes.items():
        if (perplexity := metrics.get(f"test_perplexity_{test}")) is not None:
            loss = size.tokens * math.log(perplexity)
            per_word = loss / max(1, size.words)
            units[f"test_word_perplexity_{test}"] = math.exp(per_word) if per_word < 700 else math.inf
            units[f"test_bits_per_byte_{test}"] = loss / math.log(2) / size.bytes
    return units
