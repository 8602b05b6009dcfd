"""What comes next? A `Decoder` under cross-entropy; perplexity."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from speechformer.corpora.special_tokens import IGNORE
from speechformer.data.batches import Batch
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.decoder import Decoder
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task


class LanguageModel(Task):
    """What comes next? A `Decoder` under cross-entropy.

    Args:
        model: the arguments of `Decoder`.
        recipe: the config group.
    """

    name, metric, mode = "lm", "perplexity", "min"
    model: Decoder

    def __init__(self, architecture: dict[str, Any], recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.model = Decoder(**architecture)
        initialise(self.model, recipe["init"], recipe["init_std"])

    def metric_name(self, split: str) -> str:
        """As in `Task`; over several test texts, the mean of their perplexities."""
        return f"{split}_perplexity" + ("_mean" if split == "test" else "")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets = batch["ids"][:, :-1], batch["ids"][:, 1:]
        hidden, smoothing = self.model.hidden(ids).flatten(0, 1), self.recipe["label_smoothing"]
        loss = next_token_loss(self.model.output.weight, self.model.output.bias, hidden, targets.flatten(), smoothing)
        self.tokens += ids.numel()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def forward_batch(self, model: Decoder, batch: Batch) -> Tensor:
        return model.hidden(batch["ids"])

    def add(self, hidden_BTD: Tensor, batch: Batch) -> None:
        split, name = batch["part"]
        scored = batch["targets"] != IGNORE
        hidden, targets = hidden_BTD[scored], batch["targets"][scored]
        loss = next_token_loss(self.model.output.weight, self.model.output.bias, hidden, targets)
        self.measured["_".join(filter(None, (split, "perplexity", name)))].update(loss, len(targets))

    def figures(self) -> dict[str, float]:
        figures = {name: metric.compute().item() for name, metric in self.measured.items()}
        tests = defaultdict(list)
        for name, value in figures.items():
            split, _, test = name.partition("_perplexity_")
            if test:
                tests[split].append(value)
        means = {f"{split}_perplexity_mean": sum(values) / len(values) for split, values in tests.items()}
        return figures | means
