"""How a task is evaluated: part by part (train, validation, test, ...), on batches that name their part."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import Metric

from speechformer.data.batches import Batch
from speechformer.tasks.trainable import TrainableModule


class EvaluableModule(TrainableModule):
    """A LightningModule with metrics. A subclass defines `new_metric`, `forward_batch` and `update_metrics`.

    Attributes:
        measured: the metrics of the current evaluation, by name.
    """

    metric: ClassVar[str]
    mode: ClassVar[str]  # "max" or "min": the direction in which the metric is better

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.measured: dict[str, Metric] = {}

    def metric_name(self, split: str) -> str:
        """Return the name of the main metric on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def is_better(self, value: float, than: float) -> bool:
        """Return whether one value of the metric is better than another."""
        return value > than if self.mode == "max" else value < than

    def new_metric(self) -> Metric:
        """Return an empty metric on the device of the module."""
        raise NotImplementedError

    def forward_batch(self, model: Any, batch: Batch) -> Tensor:
        """Return the output of a network, that of the module or of an ensemble, for an evaluation batch.

        The first dimension of the output is that of the batch.
        """
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

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Log metrics at the last step."""
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(metrics, self.global_step)

    def on_validation_epoch_start(self) -> None:
        self.measured = defaultdict(self.new_metric)

    def on_validation_epoch_end(self) -> None:
        metrics = self.compute_metrics()
        self.curve.append({"step": self.global_step, **metrics})
        self.log_metrics(metrics)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        self.log_metrics(self.compute_metrics())

    def validation_step(self, batch: Batch) -> None:
        self.evaluate_batch(batch)

    test_step = validation_step
