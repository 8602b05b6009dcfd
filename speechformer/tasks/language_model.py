"""task=lm: what comes next?"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from speechformer.console import format_metric
from speechformer.corpora.documents import Documents
from speechformer.corpora.special_tokens import END, IGNORE, UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import LONG_STREAM, Batch, Example, Stream
from speechformer.data.documents import DocumentData
from speechformer.data.speeches import StreamData, TextSize
from speechformer.errors import UserError
from speechformer.escape import escape_markdown
from speechformer.generation.sampling import sample
from speechformer.kernels.loss import ACCELERATOR_ROWS, next_token_loss
from speechformer.metrics.perplexity import MeanPerplexity
from speechformer.models.decoder import Decoder
from speechformer.models.mixture import CountsMixture
from speechformer.models.stack import initialise
from speechformer.tasks.base import Task, log_of_mean
from speechformer.tasks.distillation import FOLDS, MAX_TOKENS, CrossFittedTargets
from speechformer.tasks.mixture import MixturePerplexities
from speechformer.tasks.text import TextInputs
from speechformer.tasks.unknown_words import UnknownWords
from speechformer.tasks.view import View

PROMPT, CONTINUATION = 6, 20  # words of the sample in TensorBoard
HIDDEN = (
    "test_sliding_",
    "test_known_",
    "validation_known_",
    "test_mixture_known_",
    "validation_mixture_known_",
    "test_word_",
    "test_bits_",
)  # metrics that the console does not show in training


class LanguageModelView(View):
    """Perplexities of each text, and the mean in contexts of other lengths."""

    charts: ClassVar = {"perplexity": r"(train|validation)_perplexity", "test perplexity": r"test_perplexity_.+"}
    note = "Perplexity per token; lower is better."
    baseline_keys = ("task.extra_text",)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.unit = self.task.unit

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
        main, prefix = self.task.metric_name("test"), "test_perplexity_"
        tests = [name for name in metrics if name.startswith(prefix) and name != main]
        order = {f"{prefix}{name}": k for k, name in enumerate(self.task.speakers)}  # as in the classification task
        tests.sort(key=lambda name: order.get(name, len(order)))
        mixed = ["test_mixture_perplexity_mean", "test_mixture_known_perplexity_mean"]
        more = ["test_word_perplexity_mean", "test_bits_per_byte_mean"]
        if metrics.get("test_unknown_rate_mean"):
            more = ["test_known_perplexity_mean", "test_unknown_rate_mean"]
        return [main, *tests, *mixed, *more, "test_sliding_perplexity_mean", "train_perplexity"]

    def describe_examples(
        self, examples: Sequence[Example], tokenizer: Tokenizer | Subwords
    ) -> Iterator[tuple[str, str]]:
        for example in examples[:1]:
            prompt = example.ids[0][:PROMPT].tolist()
            max_length = self.task.model.max_length
            room = CONTINUATION if max_length is None else min(CONTINUATION, max_length - len(prompt) + 1)
            generator = torch.Generator().manual_seed(0)
            drawn = sample(self.task.model, prompt, generator=generator, words=len(tokenizer))
            try:
                words = "".join(tokenizer.stream(itertools.islice(drawn, room)))
            except UserError as error:
                words = str(error)
            parts = (escape_markdown(part) for part in ("".join(tokenizer.stream(prompt)), words))
            yield "what comes next", "{} **{}**".format(*parts)


class LanguageModel(Task):
    """A `Decoder` under cross-entropy over the next token. Perplexity is exp(mean negative log-likelihood per token).

    Args:
        architecture: the arguments of `Decoder`.
        recipe: the config group.
        separate: whether attention stays within documents, each from the token that begins it, such as <eos>.
        mixture: the arguments of `CountsMixture`; None for no mixture with counts.

    Attributes:
        speakers: the names of the tests, in the order of the report.
        text_sizes: of each test.
        unknown_rates: the share of unknown words in each test, by the name of the metric.
        mixture_metric: of a model that is mixed with counts; None for others.
    """

    name, metric, mode = "lm", "perplexity", "min"
    purpose = "continues a text"
    abilities = frozenset({"generate"})
    datamodule = StreamData
    inputs: ClassVar = {"ids": "[texts, tokens], whole numbers"}
    output = "logits of the token after each [texts, tokens, vocabulary]"
    pads_input = False
    options = ("tied_output", "output_bias", "output_softcap")
    no_ensemble = None
    view_class = LanguageModelView
    model: Decoder

    def __init__(
        self,
        architecture: dict[str, Any],
        recipe: dict[str, Any],
        separate: bool = False,
        mixture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.separate, self.unit = separate, "lines"
        self.counts = None if mixture is None else CountsMixture(**mixture)
        self.mixture_metric: MixturePerplexities | None = None
        self.speakers: list[str] = []
        self.text_sizes: dict[str, TextSize] = {}
        self.unknown_words: UnknownWords | None = None
        self.teacher: CrossFittedTargets | None = None
        self.unknown = UNKNOWN
        self.start = END  # id of the token that begins a document
        self.model = Decoder(**architecture)
        initialise(self.model, recipe["init"], recipe["init_std"])

    @classmethod
    def data_class(cls, corpus: Any) -> type[TaskData]:
        return DocumentData if isinstance(corpus, Documents) else StreamData

    @classmethod
    def from_config(cls, config: dict[str, Any], data: TaskData) -> LanguageModel:
        documents = config["task"]["documents"]
        if config["task"]["ngram_targets"] and config["recipe"]["label_smoothing"]:
            raise UserError("recipe.label_smoothing and task.ngram_targets both spread targets; set one to 0.")
        if config["task"]["ngram_targets"] and config["architecture"]["output_softcap"] is not None:
            raise UserError(
                "task.ngram_targets knows no architecture.output_softcap; set one of them to its default."
            )
        if documents == "separate" and config["model"]["name"] == "rnn":
            raise UserError("model=rnn reads one document after another; set task.documents=joined.")
        arguments = cls.architecture_arguments(config, data), config["recipe"], documents == "separate"
        return cls(*arguments, mixture_arguments(data))

    def attach(self, data: TaskData) -> None:
        assert isinstance(data, StreamData)
        self.speakers, self.text_sizes = data.corpus.classes, data.text_sizes
        self.unknown_rates = data.reference_metrics()
        self.unknown = data.tokenizer.unknown
        if isinstance(data, DocumentData):
            self.unit, self.start = "documents", data.tokenizer.start
        if self.hparams["architecture"].get("output_bias") == "unigram":
            self.model.output.bias.data = log_frequencies(data.stream, data.vocab_size)
        self.attach_counts(data)

    def attach_counts(self, data: StreamData) -> None:
        """Count the words of train, for unknown words, for the targets of training and for the mixture."""
        stream, unknown_rate, share = data.stream, data.task["unknown_rate"], data.task["ngram_targets"]
        if not unknown_rate and not share and self.counts is None:
            return
        assert isinstance(stream, Tensor)  # see `mixture_arguments`
        if unknown_rate:
            self.unknown_words = UnknownWords(stream, data.vocab_size, unknown_rate)
            self.unknown_words.check()
            stream = self.unknown_words.replace(stream, torch.Generator().manual_seed(0))
        if share:
            words = len(data.tokenizer) - 1
            self.teacher = CrossFittedTargets(stream, data.task["ngram"], words, data.vocab_size, share)
        if self.counts is not None:
            self.counts.stream.copy_(stream)
            self.mixture_metric = MixturePerplexities(self.counts, data.streams)

    def training_loss(self, batch: Batch) -> Tensor:
        ids = batch["ids"]
        if self.unknown_words is not None:
            ids = self.unknown_words.replace(ids, self.generator)
        inputs, targets, output = ids[:, :-1], ids[:, 1:].flatten(), self.model.output
        hidden = self.hidden(self.model, inputs).flatten(0, 1)
        if self.teacher is None:
            loss = self.loss(hidden, targets, self.recipe["label_smoothing"])
        else:
            loss = self.teacher.loss(output.weight, output.bias, hidden, batch["start"], targets)
        self.tokens += inputs.numel()
        return loss

    def loss(self, hidden_RD: Tensor, targets_R: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of targets, in nats."""
        output, softcap, compiled = self.model.output, self.model.softcap, self.model.decoder.is_compiled
        return next_token_loss(
            output.weight, output.bias, hidden_RD, targets_R, smoothing, softcap, compiled=compiled
        )

    def hidden(self, model: Any, ids: Tensor) -> Tensor:
        """Return the hidden states of training windows, of which attention may keep documents apart."""
        return model.hidden(ids, documents_BT=1 + (ids == self.start).cumsum(dim=1) if self.separate else None)

    def member_losses(self, model: Any, batch: Batch, members: int) -> tuple[Tensor, int]:
        smoothing, tokens = self.recipe["label_smoothing"], batch["ids"][:, 1:].numel() // members
        targets, hidden = batch["ids"][:, 1:], self.hidden(model, batch["ids"][:, :-1])
        if hidden.device.type == "cpu":  # one member's logits at a time fit into the cache
            each = zip(model.output.members(), hidden.chunk(members), targets.chunk(members))
            losses = [next_token_loss(w, b, h.flatten(0, 1), t.flatten(), smoothing) for (w, b), h, t in each]
            return torch.stack(losses), tokens
        logits = model.output(hidden).float().flatten(0, 1)
        losses_R = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, reduction="none")
        return losses_R.view(members, -1).mean(dim=1), tokens

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
        tokens, loss, metric = len(targets), self.loss(hidden, targets), "_".join(filter(None, ("perplexity", name)))
        self.measured[f"{split}_{metric}"].update(loss, tokens)
        if self.mixture_metric is not None and split in ("validation", "test"):
            self.mixture_metric.update(batch["part"], self.logs(hidden, targets), batch["places"][scored])
        if split not in ("validation", "test"):
            return
        is_unknown = targets == self.unknown
        if unknown := int(is_unknown.sum()):  # a few: cheaper than the loss of the known ones
            rest = loss * tokens - self.loss(hidden[is_unknown], targets[is_unknown]) * unknown
            loss, tokens = rest / max(1, tokens - unknown), tokens - unknown
        if tokens:
            self.measured[f"{split}_known_{metric}"].update(loss, tokens)

    def update_members(self, tasks: Sequence[Any], model: Any, output: Tensor, batch: Batch) -> None:
        if self.mixture_metric is not None:
            super().update_members(tasks, model, output, batch)
            return
        (split, name), K = batch["part"], len(tasks)
        metric, targets = "_".join(filter(None, ("perplexity", name))), batch["targets"].flatten()
        scored = (targets != IGNORE).nonzero().flatten()
        targets, hidden_KRD = targets[scored], output.view(K, -1, output.shape[-1])[:, scored]
        rows = -(-ACCELERATOR_ROWS // K)
        losses_KR = torch.cat(
            [
                F.cross_entropy(model.output(h).float().flatten(0, 1), t.repeat(K), reduction="none").view(K, -1)
                for h, t in zip(hidden_KRD.split(rows, dim=1), targets.split(rows))
            ],
            dim=1,
        )
        chosen = {"": losses_KR}
        if split in ("validation", "test"):
            chosen["known_"] = losses_KR[:, targets != self.unknown]
        for prefix, losses in chosen.items():
            if number := losses.shape[1]:
                for task, loss in zip(tasks, losses.mean(dim=1)):
                    if task.diverged_at is None:
                        task.measured[f"{split}_{prefix}{metric}"].update(loss, number)

    def logs(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return log p of targets, in nats, [R]."""
        logits_RV = self.model.output(hidden_RD).float()
        return logits_RV.log_softmax(dim=1).gather(1, targets_R[:, None])[:, 0]

    def evaluate_average(self, batch: Batch) -> None:
        (split, name), scored = batch["part"], batch["targets"] != IGNORE
        targets, metric = batch["targets"][scored], "_".join(filter(None, ("perplexity", name)))
        logs = log_of_mean(
            [task.logs(task.forward_batch(task.model, batch)[scored], targets) for task in self.averaged_tasks]
        )
        if self.mixture_metric is not None and split in ("validation", "test"):
            self.mixture_metric.update(batch["part"], logs, batch["places"][scored])
        chosen = {"": torch.ones_like(targets, dtype=torch.bool)}
        if split in ("validation", "test"):
            chosen["known_"] = targets != self.unknown
        for prefix, mask in chosen.items():
            if number := int(mask.sum()):
                self.measured[f"{split}_{prefix}{metric}"].update(-logs[mask].mean(), number)

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        if self.mixture_metric is not None:
            self.mixture_metric.reset()

    def compute_metrics(self) -> dict[str, float]:
        metrics = super().compute_metrics()
        if self.mixture_metric is not None:
            metrics |= self.mixture_metric.compute()
        metrics |= per_unit(metrics, self.text_sizes)
        return metrics | means_over_tests(metrics)

    def read(self, text: str, tokenizer: Tokenizer | Subwords, max_tokens: int) -> TextInputs:
        inputs, block_size = super().read(text, tokenizer, max_tokens), self.hparams["architecture"]["block_size"]
        if len(inputs.ids[0]) > block_size:
            inputs.notes.append(f"it was trained on {block_size} tokens at once")
        return inputs

    def write_artifacts(self, directory: Path) -> dict[str, Any]:
        """Return a caution if most words of a test are unknown."""
        tests = [name for name in self.text_sizes if (self.unknown_rates[f"test_unknown_rate_{name}"] or 0) > 0.5]
        said = (
            f"Most words of test {', '.join(tests)} are unknown to the model, which reads and predicts them as <unk>"
        )
        return {"caution": f"{said}: the perplexity says little about the text."} if tests else {}


def mixture_arguments(data: TaskData) -> dict[str, Any] | None:
    """Return the arguments of `CountsMixture` for a corpus; None if the model is not mixed with counts.

    Raises:
        UserError: the settings that count words do not fit the corpus, or the protocol.
    """
    task = data.task
    used = [f"task.{key}" for key in ("unknown_rate", "ngram_targets") if task[key]]
    used += ["task.ngram_mixture"] * (task["ngram_mixture"] != "none")
    assert isinstance(data, StreamData)
    if used and (isinstance(data, DocumentData) or len(data.stream) >= LONG_STREAM):
        raise UserError(f"{used[0]} counts words in memory, for texts below {LONG_STREAM:,} tokens; remove it.")
    if task["unknown_rate"] and task["tokens"] != "words":
        raise UserError("task.unknown_rate needs task.tokens=words: other vocabularies have no unknown words.")
    if task["ngram_targets"] and len(data.stream) > MAX_TOKENS:
        raise UserError(f"task.ngram_targets fits {FOLDS} models of counts, to texts of up to {MAX_TOKENS:,} tokens.")
    if task["ngram_mixture"] == "none":
        return None
    if not data.splits.validation:
        raise UserError("task.ngram_mixture fits its weights on a held-out part; set protocol=clean.")
    sizes = {"tokens": len(data.stream), "order": task["ngram"], "vocabulary": len(data.tokenizer) - 1}
    return {**sizes, "by_context": task["ngram_mixture"] == "context"}


def log_frequencies(stream: Stream, vocab_size: int) -> Tensor:
    """Return the log of the frequency of each word in train, add-one smoothed, [vocabulary]."""
    counts_V = torch.ones(vocab_size, dtype=torch.float64)
    for places in torch.arange(len(stream)).split(1 << 20):
        counts_V += stream[places].long().bincount(minlength=vocab_size)
    return (counts_V / counts_V.sum()).log().float()


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
