"""task=translate: how is it said in another language?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from speechformer.console import format_metric
from speechformer.corpora.files import atomic_write
from speechformer.corpora.special_tokens import BEGIN, END, PAD, UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch
from speechformer.data.pairs import PairData
from speechformer.escape import on_one_line
from speechformer.generation.beam_search import translate_ids
from speechformer.kernels.loss import next_token_loss
from speechformer.metrics.bleu import bleu, score_test, signatures
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.encoder_decoder import Translator, build_translator
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task, log_of_mean, scored_rows
from speechformer.tasks.text import TextInputs, note_unknown
from speechformer.tasks.view import View

SHOWN = 5  # validation sentences in TensorBoard
TRANSLATIONS = "translations.tsv"


class TranslateView(View):
    """Scores of all sentences and by source length, those of the copied source, and some translations."""

    charts: ClassVar = {"BLEU": r"validation_bleu", "perplexity": r"validation_perplexity"}
    unit = "pairs"

    def describe_evaluation(self) -> Iterator[tuple[str, str]]:
        """Yield translations of the held-out part, evenly spaced."""
        written = self.task.translations.get("validation", [])
        number = min(SHOWN, len(written))
        for k in (place * len(written) // number for place in range(number)):
            source, reference = self.task.texts["validation"][k]
            yield f"translations/{k + 1}", f"source: {source}  \nreference: {reference}  \nmodel: {written[k]}"

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the scores of the test set, of all sentences and by source length, and of the copied source."""
        metrics, counts = result["metrics"], result["corpus"]["counts"]
        rows: list[tuple[str, ...]] = [
            ("test", "BLEU", "95 % interval", "chrF", "length ratio", "exact", "sentences")
        ]
        groups = {"all": ("", counts["test"])}
        groups |= {f"  {name} words": (f"_at_{name}", n) for name, n in counts["test_by_length"].items() if n}
        for label, (group, n) in groups.items():
            half = metrics.get(f"test_bleu_interval{group}")
            cells = [format_metric("bleu", metrics.get(f"test_bleu{group}")), "" if half is None else f"± {half:.1f}"]
            names = ("chrf", "length_ratio", "exact")
            cells += [format_metric(name, metrics.get(f"test_{name}{group}")) for name in names]
            rows.append((label, *cells, str(n)))
        copy = (format_metric("bleu", metrics["copy_bleu"]), "", format_metric("chrf", metrics["copy_chrf"]))
        return [*rows, ("the source, untranslated", *copy, "", "", "")]

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        test = ("bleu", "bleu_interval", "chrf", "length_ratio", "exact")
        return [f"test_{name}" for name in test]


class Translate(Task):
    """An encoder-decoder under cross-entropy over the next token of the translation; BLEU and chrF.

    Validation sentences are translated greedily at every evaluation, test sentences at the end by beam search.
    Perplexity is per subword, so it compares only runs with the same vocabulary.

    Args:
        architecture: the arguments of `build_translator`.
        recipe: the config group.
        decoding: `beam` and `length_penalty` of the test.
    """

    name, metric, mode = "translate", "bleu", "max"
    purpose = "translates"
    abilities = frozenset({"translate"})
    datamodule = PairData
    inputs: ClassVar = {
        "source": "[pairs, tokens], whole numbers, with <eos>, 0 is padding at the end",
        "target": "[pairs, tokens], whole numbers, what is written so far, from <bos> on",
    }
    output = "logits of the target's token after each [pairs, tokens, vocabulary]"
    options = ("tied_output", "shared_embeddings")
    no_ensemble = "batches of translation differ in size from seed to seed"
    view_class = TranslateView
    model: Translator

    def __init__(self, architecture: dict[str, Any], recipe: dict[str, Any], decoding: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.model = build_translator(**architecture)
        self.decoding = decoding
        self.tokenizer: Subwords | None = None  # without it and `texts` only perplexity is measured
        self.texts: dict[str, list[tuple[str, str]]] = {}
        self.translations: dict[str, list[str]] = {}  # of each part, from the last evaluation
        initialise(self.model, recipe["init"], recipe["init_std"])

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> Translate:
        decoding = {key: config["task"][key] for key in ("beam", "length_penalty")}
        return cls(cls.architecture_arguments(config, data), config["recipe"], decoding)

    def attach(self, data: TaskData) -> None:
        assert isinstance(data, PairData)
        self.tokenizer, self.texts = data.tokenizer, data.texts

    def training_loss(self, batch: Batch) -> Tensor:
        source, targets = batch["source"], batch["target"][:, 1:]
        is_scored = targets != PAD
        loss = self.loss(batch, scored_rows(is_scored), self.recipe["label_smoothing"])
        self.tokens += (source != PAD).sum() + is_scored.sum()
        return loss

    def loss(self, batch: Batch, scored: Tensor | slice, smoothing: float = 0.0) -> Tensor:
        """Return the mean loss of the targets with these indices in the flattened batch, without padding."""
        hidden = self.model.hidden(batch["source"], batch["target"][:, :-1]).flatten(0, 1)[scored]
        targets, output = batch["target"][:, 1:].flatten()[scored], self.model.output
        return next_token_loss(output.weight, output.bias, hidden, targets, smoothing, ignored=PAD)

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.translations = {}

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def evaluate_batch(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as in `speechformer.translate`, in any precision
            scored = (batch["target"][:, 1:] != PAD).flatten().nonzero().flatten()
            models = [task.model for task in self.averaged_tasks]
            logs = [target_logs(model, batch) for model in models]
            loss = -log_of_mean(logs).mean() if logs else self.loss(batch, scored)
            self.measured[f"{batch['part']}_perplexity"].update(loss, len(scored))
            if self.tokenizer is not None:
                self.translate_batch(batch, self.tokenizer, models)

    def translate_batch(self, batch: Batch, tokenizer: Subwords, models: Sequence[Translator] = ()) -> None:
        """Add the translations of an evaluation batch to `translations`, by the model or by an ensemble."""
        part = batch["part"]
        sources = [ids[ids != PAD].tolist() for ids in batch["source"]]
        written = self.translate_ids(sources, None if part == "test" else 1, models)
        texts = self.translations.setdefault(part, [""] * len(self.texts[part]))
        for row, ids in zip(batch["rows"], written):
            texts[row] = tokenizer.decode(ids)

    def translate_ids(
        self, sources: list[list[int]], beam: int | None = None, models: Sequence[Translator] = ()
    ) -> list[list[int]]:
        """Translate ids that end with <eos>, with this beam or that of the test, by the model or by an ensemble."""
        models, alpha = models or [self.model], self.decoding["length_penalty"]
        longest = min((model.max_length for model in models if model.max_length is not None), default=None)
        return translate_ids(models, sources, beam=beam or self.decoding["beam"], alpha=alpha, max_length=longest)

    def compute_metrics(self) -> dict[str, float]:
        metrics = super().compute_metrics()
        for part, translations in self.translations.items():
            sources, references = zip(*self.texts[part])
            if part == "test":
                metrics |= score_test(sources, translations, references)
            else:
                metrics[f"{part}_bleu"] = bleu(translations, references)
        return metrics

    def read(self, text: str, tokenizer: Subwords, max_tokens: int) -> TextInputs:
        """Return at most `max_tokens` of a source, and of the translation that the task makes of it."""
        limit = min(max_tokens, self.model.max_length or max_tokens)
        notes = []
        (ids,) = tokenizer.encode_all([text.strip()])
        if len(ids) + 1 > limit:
            notes.append(f"the first {limit - 1} of its {len(ids)} tokens are read")
        source = [*ids[: limit - 1], END]
        (translation,) = self.translate_ids([source])
        if len(translation) + 1 > limit:
            notes.append(f"the first {limit - 1} of the translation's {len(translation)} tokens are shown")
        translation = translation[: limit - 1]
        notes.append(f"translated: {tokenizer.decode(translation)}")
        read, written = [BEGIN, *translation], [*translation, END]
        tokens = [tokenizer.tokens(part) for part in (source, read, written)]
        unknown = note_unknown(tokenizer.split(text.strip()), ids, UNKNOWN)
        inputs = [torch.tensor(source), torch.tensor(read)]
        return TextInputs(inputs, tokens, [*notes, *filter(None, [unknown])], len(notes) > 1)

    def write_artifacts(self, directory: Path) -> dict[str, Any]:
        """Write `translations.tsv`, if the test set was translated, and return sacreBLEU's signatures."""
        if (written := self.translations.get("test")) and self.global_rank == 0:
            rows = [(*pair, translation) for pair, translation in zip(self.texts["test"], written)]
            lines = ["\t".join(map(on_one_line, row)) for row in [("source", "reference", "translation"), *rows]]
            with atomic_write(directory / TRANSLATIONS) as file:
                file.write(("\n".join(lines) + "\n").encode())
        return {"scoring": signatures()}


def target_logs(model: Translator, batch: Batch) -> Tensor:
    """Return log p of the R targets of a batch, in nats, [R]."""
    targets = batch["target"][:, 1:]
    logs_BTV = model(batch["source"], batch["target"][:, :-1]).float().log_softmax(dim=-1)
    return logs_BTV.gather(2, targets[..., None])[..., 0][targets != PAD]
