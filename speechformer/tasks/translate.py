"""How is it said in another language? An encoder-decoder under cross-entropy; BLEU and chrF."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.subwords import Subwords
from speechformer.data.batches import Batch
from speechformer.generation.beam_search import translate_ids
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.bleu import bleu, figures_of_test
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.encoder_decoder import Translator, build_translator
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task


class Translate(Task):
    """How is it said in another language? An encoder-decoder under cross-entropy over the next token.

    Dev is translated greedily at every evaluation; what is tested at the end, by beam search. Perplexity is per
    subword, so it compares runs of one vocabulary alone.

    Args:
        model: the arguments of `build_translator`.
        recipe: the config group.
        decoding: `beam` and `length_penalty` of the test.

    Attributes: `tokenizer` and `texts` (the pairs of each part as text), which `fit` sets: what is measured is text;
    `translations`, of each part that was measured last.
    """

    name, metric, mode = "translate", "bleu", "max"
    model: Translator
    SHOWN = 5  # sentences of dev in TensorBoard

    def __init__(self, architecture: dict[str, Any], recipe: dict[str, Any], decoding: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.model = build_translator(**architecture)
        self.decoding = decoding
        self.tokenizer: Subwords | None = None
        self.texts: dict[str, list[tuple[str, str]]] = {}
        self.translations: dict[str, list[str]] = {}
        self.figured: dict[str, float] | None = None  # once for each evaluation
        initialise(self.model, recipe["init"], recipe["init_std"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        source, inputs, targets = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
        scored = (targets != PAD).flatten().nonzero().flatten()
        hidden = self.model.hidden(source, inputs).flatten(0, 1)[scored]
        loss = next_token_loss(
            self.model.output.weight,
            self.model.output.bias,
            hidden,
            targets.flatten()[scored],
            self.recipe["label_smoothing"],
        )
        self.tokens += (source != PAD).sum() + len(scored)
        return self.watched(loss, batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.translations, self.figured = {}, None

    on_test_epoch_start = on_validation_epoch_start

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def measure(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as `translate` will compute, whatever the precision
            self.measure_exactly(batch)

    def measure_exactly(self, batch: Batch) -> None:
        """Add the loss of a batch, and translate it."""
        part, targets = batch["part"], batch["target"][:, 1:]
        scored = targets != PAD
        hidden = self.model.hidden(batch["source"], batch["target"][:, :-1])[scored]
        loss = next_token_loss(self.model.output.weight, self.model.output.bias, hidden, targets[scored])
        self.measured[f"{part}_perplexity"].update(loss, len(hidden))
        if self.tokenizer is None:
            return
        beamed = part == "test"
        sources = [ids[ids != PAD].tolist() for ids in batch["source"]]
        found = translate_ids(
            self.model,
            sources,
            beam=self.decoding["beam"] if beamed else 1,
            alpha=self.decoding["length_penalty"],
            max_length=self.model.max_length,
        )
        texts = self.translations.setdefault(part, [""] * len(self.texts[part]))
        for row, ids in zip(batch["rows"], found):
            texts[row] = self.tokenizer.decode(ids)

    def figures(self) -> dict[str, float]:
        if self.figured is None:
            self.figured = self.score()
        return self.figured

    def score(self) -> dict[str, float]:
        """The figures of what was translated in this evaluation."""
        figures = {name: metric.compute().item() for name, metric in self.measured.items()}
        for part, translations in self.translations.items():
            sources, references = zip(*self.texts[part])
            if part == "test":
                figures |= figures_of_test(sources, translations, references)
            else:
                figures[f"{part}_bleu"] = bleu(translations, references)
        return figures

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        logger, found = self.trainer.logger, self.translations.get("validation", [])
        if found and logger is not None:
            shown = min(self.SHOWN, len(found))
            for k in (place * len(found) // shown for place in range(shown)):
                source, reference = self.texts["validation"][k]
                text = f"source: {source}  \nreference: {reference}  \nmodel: {found[k]}"
                logger.log_text(f"translations/{k + 1}", text, self.global_step)  # type: ignore[attr-defined]
