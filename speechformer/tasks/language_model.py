"""task=lm: what comes next?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.corpora.documents import Documents
from speechformer.corpora.special_tokens import END
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import LONG_STREAM, Batch, Example, Stream
from speechformer.data.documents import DocumentData
from speechformer.data.speeches import StreamData
from speechformer.errors import UserError, pick
from speechformer.escape import escape_markdown
from speechformer.generation.sampling import sample
from speechformer.kernels.loss import next_token_loss
from speechformer.models.decoder import Decoder
from speechformer.models.mixture import CountsMixture
from speechformer.models.stack import initialise
from speechformer.tasks.distillation import FOLDS, MAX_TOKENS, CrossFittedTargets
from speechformer.tasks.mixture import MixturePerplexities
from speechformer.tasks.perplexity import PerplexityTask
from speechformer.tasks.text import TextInputs
from speechformer.tasks.unknown_words import UnknownWords

PROMPT, CONTINUATION = 6, 20  # words of the sample in TensorBoard


class LanguageModel(PerplexityTask):
    """A `Decoder` under cross-entropy over the next token. Perplexity is exp(mean negative log-likelihood per token).

    Args:
        architecture: the arguments of `Decoder`.
        recipe: the config group.
        separate: whether attention stays within documents, from one <eos> to the next.
        mixture: the arguments of `CountsMixture`; None for no mixture with counts.
    """

    name = "lm"
    purpose = "continues a text"
    abilities = frozenset({"generate"})
    datamodule = StreamData
    inputs: ClassVar = {"ids": "[texts, tokens], whole numbers"}
    output = "logits of the token after each [texts, tokens, vocabulary]"
    pads_input = False
    options = ("tied_output", "output_bias")
    no_ensemble = None
    baseline_keys = ("task.extra_text",)
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
        self.separate = separate
        self.mixture = None if mixture is None else CountsMixture(**mixture)
        self.unknown_words: UnknownWords | None = None
        self.teacher: CrossFittedTargets | None = None
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
        pick(dict.fromkeys(("joined", "separate")), documents, "task.documents")
        if documents == "separate" and config["model"]["name"] == "rnn":
            raise UserError("model=rnn reads one document after another; set task.documents=joined.")
        arguments = cls.architecture_arguments(config, data), config["recipe"], documents == "separate"
        return cls(*arguments, mixture_arguments(data))

    def attach(self, data: TaskData) -> None:
        assert isinstance(data, StreamData)
        self.speakers, self.text_sizes = data.corpus.classes, data.text_sizes
        self.unit = "documents" if isinstance(data, DocumentData) else "lines"
        if self.hparams["architecture"].get("output_bias") == "unigram":
            self.model.output.bias.data = log_frequencies(data.stream, data.vocab_size)
        self.attach_counts(data)

    def attach_counts(self, data: StreamData) -> None:
        """Count the words of train, for unknown words, for the targets of training and for the mixture."""
        stream, unknown_rate, share = data.stream, data.task["unknown_rate"], data.task["ngram_targets"]
        if not unknown_rate and not share and self.mixture is None:
            return
        assert isinstance(stream, Tensor)  # see `mixture_arguments`
        if unknown_rate:
            self.unknown_words = UnknownWords(stream, data.vocab_size, unknown_rate)
            self.unknown_words.check()
            stream = self.unknown_words.replace(stream, torch.Generator().manual_seed(0))
        if share:
            words = len(data.tokenizer) - 1
            self.teacher = CrossFittedTargets(stream, data.task["ngram"], words, data.vocab_size, share)
        if self.mixture is not None:
            self.mixture.stream.copy_(stream)
            self.mixture_metric = MixturePerplexities(self.mixture, data.streams)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids = batch["ids"]
        if self.unknown_words is not None:
            ids = self.unknown_words.replace(ids, self.generator)
        inputs, targets, output = ids[:, :-1], ids[:, 1:].flatten(), self.model.output
        hidden = self.hidden(self.model, inputs).flatten(0, 1)
        if self.teacher is None:
            loss = next_token_loss(output.weight, output.bias, hidden, targets, self.recipe["label_smoothing"])
        else:
            loss = self.teacher.loss(output.weight, output.bias, hidden, batch["start"], targets)
        self.tokens += inputs.numel()
        return self.track_loss(loss, batch, batch_idx)

    def hidden(self, model: Any, ids: Tensor) -> Tensor:
        """Return the hidden states of training windows; <eos> begins a document, if attention keeps them apart."""
        return model.hidden(ids, documents_BT=1 + (ids == END).cumsum(dim=1) if self.separate else None)

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

    def read(self, text: str, tokenizer: Tokenizer | Subwords, max_tokens: int) -> TextInputs:
        inputs, block_size = super().read(text, tokenizer, max_tokens), self.hparams["architecture"]["block_size"]
        if len(inputs.ids[0]) > block_size:
            inputs.notes.append(f"it was trained on {block_size} tokens at once")
        return inputs

    def describe_examples(
        self, examples: Sequence[Example], tokenizer: Tokenizer | Subwords
    ) -> Iterator[tuple[str, str]]:
        for example in examples[:1]:
            prompt = example.ids[0][:PROMPT].tolist()
            max_length = self.model.max_length
            room = CONTINUATION if max_length is None else min(CONTINUATION, max_length - len(prompt) + 1)
            generator = torch.Generator().manual_seed(0)
            drawn = sample(self.model, prompt, generator=generator, words=len(tokenizer))
            try:
                words = "".join(tokenizer.stream(itertools.islice(drawn, room)))
            except UserError as error:
                words = str(error)
            parts = (escape_markdown(part) for part in ("".join(tokenizer.stream(prompt)), words))
            yield "what comes next", "{} **{}**".format(*parts)


def mixture_arguments(data: TaskData) -> dict[str, Any] | None:
    """Return the arguments of `CountsMixture` for a corpus; None if the model is not mixed with counts.

    Raises:
        UserError: the settings that count words do not fit the corpus, or the protocol.
    """
    task, kinds = data.task, {"none": False, "fixed": False, "context": True}
    by_context = pick(kinds, task["ngram_mixture"], "task.ngram_mixture")
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
    tokens, vocabulary = len(data.stream), len(data.tokenizer) - 1
    return {"tokens": tokens, "order": task["ngram"], "vocabulary": vocabulary, "by_context": by_context}


def log_frequencies(stream: Stream, vocab_size: int) -> Tensor:
    """Return the log of the frequency of each word in train, add-one smoothed, [vocabulary]."""
    counts_V = torch.ones(vocab_size, dtype=torch.float64)
    for places in torch.arange(len(stream)).split(1 << 20):
        counts_V += stream[places].long().bincount(minlength=vocab_size)
    return (counts_V / counts_V.sum()).log().float()
