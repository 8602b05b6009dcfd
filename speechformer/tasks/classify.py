"""Who said it? An `EncoderClassifier` under cross-entropy; accuracy."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from speechformer.corpora.special_tokens import PAD
from speechformer.data.batches import Batch
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task


class Classify(Task):
    """Who said it? An `EncoderClassifier` under cross-entropy.

    Args:
        model: the arguments of `EncoderClassifier`.
        recipe: the config group.
        classes: the name of each class.
    """

    name, metric, mode = "classify", "accuracy", "max"
    model: EncoderClassifier

    def __init__(self, architecture: dict[str, Any], recipe: dict[str, Any], classes: list[str]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.classes = classes
        self.model = EncoderClassifier(**architecture)
        initialise(self.model, recipe["init"], recipe["init_std"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        smoothing = self.recipe["label_smoothing"]
        loss = F.cross_entropy(self.model(batch["ids"]), batch["labels"], label_smoothing=smoothing)
        self.tokens += (batch["ids"] != PAD).sum()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MulticlassAccuracy(len(self.classes), average="micro", validate_args=False, sync_on_compute=False).to(
            self.device
        )

    def forward_batch(self, model: EncoderClassifier, batch: Batch) -> Tensor:
        return model(batch["ids"])

    def add(self, logits: Tensor, batch: Batch) -> None:
        (split, _), labels = batch["part"], batch["labels"]
        self.measured[f"{split}_accuracy"].update(logits, labels)
        if "in_train" in batch:
            for name, chosen in (("in_train", batch["in_train"]), ("not_in_train", ~batch["in_train"])):
                if chosen.any():
                    self.measured[f"{split}_accuracy_{name}"].update(logits[chosen], labels[chosen])
        if split != "train":
            for label, name in enumerate(self.classes):
                chosen = labels == label
                if chosen.any():
                    self.measured[f"{split}_accuracy_of_{name}"].update(logits[chosen], labels[chosen])

    def figures(self) -> dict[str, float]:
        return {name: metric.compute().item() for name, metric in self.measured.items()}
