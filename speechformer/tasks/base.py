"""What a task is: a network with its loss, its metrics, and the way in which its results are presented.

A task is a LightningModule; `speechformer/tasks/README.md` explains how to add one. A checkpoint holds the
constructor's arguments as plain data, so `load_task(path)` rebuilds a task from the checkpoint alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from speechformer.console import format_metric
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, Example
from speechformer.errors import pick
from speechformer.layers.block import ACTIVATIONS, NORMS
from speechformer.models.classifier import POOLS
from speechformer.tasks.text import TextInputs, read_words
from speechformer.tasks.trainable import TrainableModule

# What every network takes: keys of the config, and keys of its group `architecture`
SIZES = ("width", "heads", "layers", "ff", "block_size", "dropout", "embedding_dropout", "model", "pattern")
COMMON_OPTIONS = ("norm", "final_norm", "qkv_bias", "bias", "activation", "scale_embedding")
COUNTED = ("mixture", "naive_bayes")  # attributes and arguments of tasks: counts of words beside the network
CHOICES: dict[str, Any] = {  # checked, even if unused
    **{"pool": POOLS, "norm": NORMS, "activation": ACTIVATIONS},
    "output_bias": dict.fromkeys(("init", "unigram")),
}


def log_of_mean(logs: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean of some probabilities from their logs, element by element."""
    return torch.stack([*logs]).logsumexp(dim=0) - math.log(len(logs))


class Task(TrainableModule):
    """A task. A subclass declares the class variables, and its constructor builds `model`.

    The constructor takes `architecture`, the arguments of the network, and `recipe`, the config group, and calls
    `save_hyperparameters`. A subclass must define `training_step`, `new_metric`, `forward_batch` and
    `update_metrics`; the other methods have defaults. It is evaluated split by split (train, validation, ...), on
    batches that name theirs.
    """

    metric: ClassVar[str]
    mode: ClassVar[str]  # "max" or "min": the direction in which the metric is better
    later_if_equal: ClassVar[bool] = False  # whether the last of equally good evaluations is the best
    purpose: ClassVar[str]  # completes "a run of task=<name>, which ..."
    datamodule: ClassVar[type[TaskData]]
    abilities: ClassVar[frozenset[str]] = frozenset()  # methods of a trained run: "predict", "generate", "translate"
    inputs: ClassVar[dict[str, str]]  # of the network, by name
    output: ClassVar[str]
    pads_input: ClassVar[bool] = True  # whether batches of the first input are padded
    options: ClassVar[tuple[str, ...]] = ()  # keys of `architecture` that the network takes besides COMMON_OPTIONS
    charts: ClassVar[dict[str, str]] = {}  # TensorBoard: title -> regular expression of the metrics' names
    no_ensemble: ClassVar[str | None] = "the task does not define member_losses"  # None: runs can be an ensemble
    # The report
    compared: ClassVar[tuple[str, ...]] = ()  # metrics by which runs are compared, besides the main one
    x_axis: ClassVar[str] = "step"  # or "epoch"
    unit: str = "lines"
    note: ClassVar[str] = ""
    baseline_keys: ClassVar[tuple[str, ...]] = ()  # config keys that a baseline shares with the runs of its table

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.measured: dict[str, Metric] = {}  # of the current evaluation, by name

    @classmethod
    def data_class(cls, corpus: Any) -> type[TaskData]:
        """Return the LightningDataModule for a corpus."""
        return cls.datamodule

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> Task:
        """Build a new task. Override this if the constructor has further arguments, which must be plain data."""
        return cls(architecture=cls.architecture_arguments(config, data), recipe=config["recipe"])  # type: ignore

    @classmethod
    def architecture_arguments(cls, config: dict[str, Any], data: TaskData, **more: Any) -> dict[str, Any]:
        """Return the arguments of the network as plain data, `more` included."""
        for key, valid in CHOICES.items():
            pick(valid, config["architecture"][key], f"architecture.{key}")
        keys = (*COMMON_OPTIONS, *cls.options)
        arguments = {key: value for key, value in config["architecture"].items() if key in keys}
        return arguments | {key: config[key] for key in SIZES} | more | {"vocab_size": data.vocab_size}

    def metric_name(self, split: str) -> str:
        """Return the name of the main metric on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def new_metric(self) -> Metric:
        """Return an empty metric on the device of the module."""
        raise NotImplementedError

    def forward_batch(self, model: Any, batch: Batch) -> Tensor:
        """Return the output of a network, the module's or an ensemble's, for an evaluation batch, [B, ...]."""
        raise NotImplementedError

    def update_metrics(self, output: Tensor, batch: Batch) -> None:
        """Add what `forward_batch` returned to `measured`."""
        raise NotImplementedError

    def evaluate_batch(self, batch: Batch) -> None:
        """Add an evaluation batch to `measured`."""
        self.update_metrics(self.forward_batch(self.model, batch), batch)

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the current evaluation."""
        return {name: metric.compute().item() for name, metric in self.measured.items()}

    def validation_step(self, batch: Batch) -> None:
        self.evaluate_batch(batch)

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        self.measured = defaultdict(self.new_metric)

    def on_validation_epoch_end(self) -> None:
        self.curve.append({"step": self.global_step, **self.compute_metrics()})
        self.on_test_epoch_end()

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(self.compute_metrics(), self.global_step)

    @property
    def has_counts(self) -> bool:
        """Whether counts of words take part in the predictions beside the network."""
        return self.counts is not None

    @property
    def counts(self) -> Any:
        """The counts of words beside the network, whose `add(ids, logits)` combines both; None without any."""
        return next((counts for name in COUNTED if (counts := getattr(self, name, None)) is not None), None)

    def forward(self, *ids: Tensor) -> Tensor:
        """Compute the logits of the network for its inputs; with counts of words, those of both."""
        logits = self.model(*ids)
        return logits if self.counts is None else self.counts.add(ids[0], logits)

    def attach(self, data: TaskData) -> None:
        """Take from the data what evaluation and reports need besides batches."""

    def member_losses(self, model: Any, batch: Batch, members: int) -> tuple[Tensor, Tensor | int]:
        """Return the mean loss of each of K `members` of an ensemble, [K], and the tokens that each trains on.

        `model` is their stacked network; `batch` has their batches concatenated along the first dimension.
        """
        raise NotImplementedError

    def evaluate_members(self, members: Sequence[Any], batch: Batch) -> None:
        """Add an evaluation batch to `measured`, where the mean of the probabilities of some tasks decides.

        Override this if `forward_batch` does not return logits.
        """
        logs = [task.forward_batch(task.model, batch).float().log_softmax(dim=-1) for task in members]
        self.update_metrics(log_of_mean(logs), batch)

    def read(self, text: str, tokenizer: Any, max_tokens: int) -> TextInputs:
        """Return a text as inputs of the network, of at most `max_tokens` tokens per side."""
        return read_words(text, tokenizer, min(max_tokens, self.model.max_length or max_tokens))

    def progress_columns(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics that the console shows after an evaluation."""
        return metrics

    def describe_examples(self, examples: Sequence[Example], tokenizer: Any) -> Iterator[tuple[str, str]]:
        """Yield what the network makes of the examples, as title and Markdown, for TensorBoard."""
        yield from ()

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the rows of the table that the console shows at the end of a run, the header first."""
        values = {split: result["metrics"].get(self.metric_name(split)) for split in ("train", "validation", "test")}
        rows = [(split, format_metric(self.metric, value)) for split, value in values.items() if value is not None]
        return [(self.metric, ""), *rows]

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        """Return the columns of the report after that of the held-out part; those without a value are left out."""
        return [self.metric_name(split) for split in ("test", "train")]

    def report(self, metrics: dict[str, float | None]) -> dict[str, Any]:
        """Return how the report shows a run with these metrics: `result["report"]`."""
        names = [self.metric_name("validation"), *self.columns(metrics)]
        columns = [name for name in names if metrics.get(name) is not None]
        return {
            "metric": self.metric_name("test"),
            "higher_is_better": self.mode == "max",
            "columns": columns,
            "compare": [self.metric_name("test"), *(name for name in self.compared if name in columns)],
            "x_axis": self.x_axis,
            "note": self.note,
            "unit": self.unit,
            "baseline_keys": list(self.baseline_keys),
        }

    def write_artifacts(self, directory: Path) -> dict[str, Any]:
        """Write further files of the run, and return further entries of its result."""
        return {}
