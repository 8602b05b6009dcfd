"""The data of tasks on speeches: a corpus, tokenized once, as tensors in memory; batches are slices of them.

    SentenceData    ids [N, block_size] padded with 0, labels [N], and for test sentences whether train has them
    StreamData      a text is one stream of ids; training draws windows of block_size + 1 anywhere in it, evaluation
                    covers it so that each token is predicted exactly once (see `Windows`)

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speechformer.corpora.cache import remember_words
from speechformer.corpora.special_tokens import PAD, UNKNOWN
from speechformer.corpora.splits import Row, Splits, number_of_folds, split, with_extra_text
from speechformer.corpora.subwords import Subwords, fitted
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import (
    LONG_STREAM,
    Example,
    Part,
    Rows,
    SeededBatches,
    Stream,
    StreamRows,
    TrainingBatches,
    WindowBatches,
    Windows,
    lengths_of,
    sample_blocks,
)
from speechformer.errors import UserError

# Of tasks whose config lacks them
DEFAULTS = {
    **{"tokens": "words", "vocab_size": None, "min_count": 1, "evaluation_tokens": None, "documents": "joined"},
    **{"unknown_rate": 0.0, "ngram_targets": 0.0, "ngram_mixture": "none", "balanced": False, "naive_bayes": 0.0},
    "extra_text": False,
}


class SpeechData(TaskData):
    """What sentences and streams share; `TaskData` documents the arguments.

    Attributes:
        splits: the rows of text.
        drawn: the rows of training batches.
        train_tokens: the number of tokens of train.
        evaluated_tokens: the number of those that are evaluated during training.
        monitored: train and, if there is one, the held-out part.
    """

    has_folds = True
    labelled: ClassVar[bool]  # whether the task reads the labelled sentences or the running text
    splits: Splits
    drawn: Rows
    train_tokens: int
    evaluated_tokens: int

    def split(self) -> None:
        self.task = DEFAULTS | self.task
        if self.task["tokens"] == "words":
            remember_words(self.corpus)
        options = {key: self.protocol[key] for key in ("remove_test_sentences", "validation", "vocabulary")}
        fold = self.protocol.get("fold", 0)  # configs of version 0.2 have none
        if fold == "seed":
            if not options["validation"]:
                raise UserError("protocol.fold=seed chooses what is held out, which is nothing; set protocol=clean.")
            fold = self.seed % number_of_folds(options["validation"])
        self.splits = split(self.corpus, self.task["name"], self.labelled, **options, fold=fold)
        if self.task["extra_text"]:
            self.splits = with_extra_text(self.splits, self.corpus)

    def fit_tokenizer(self) -> Tokenizer | Subwords:
        tokens, size, least = (self.task[key] for key in ("tokens", "vocab_size", "min_count"))
        if tokens == "words":
            return Tokenizer.fit(self.splits.vocabulary_texts, size, least)
        return fitted(tuple(self.splits.vocabulary_texts), tokens, size, least)

    @property
    def chosen_on(self) -> str:
        """The part that selects the best checkpoint: the test set if nothing is held out, as in the reports."""
        return "validation" if self.splits.validation else "test"

    @property
    def description(self) -> dict[str, Any]:
        return super().description | {"classes": self.corpus.classes}

    def count(self) -> dict[str, Any]:
        encode, splits = self.tokenizer.encode, self.splits
        totals = {"test": "rows", "test_in_train": "in_train", "test_nearly_in_train": "nearly_in_train"}
        tests = {}
        for name, rows in splits.test.items():
            kinds, ids = splits.kinds_in_train[name], [encode(text) for _, text in rows]
            tests[name] = {
                "rows": len(rows),
                "in_train": kinds.count("exact"),
                "nearly_in_train": kinds.count("same") + kinds.count("near"),
                "tokens": sum(map(len, ids)),
                "unknown_tokens": sum(row.count(UNKNOWN) for row in ids),
            }
        is_sampled = self.evaluated_tokens < self.train_tokens
        return {
            "train": len(splits.train),
            "validation": len(splits.validation),
            "removed_from_train": splits.removed,
            **({"extra_lines": splits.extra} if splits.extra else {}),
            **{name: sum(test[key] for test in tests.values()) for name, key in totals.items()},
            "tests": tests,
            "train_tokens": self.train_tokens,
            **({"evaluated_tokens": {"train": self.evaluated_tokens}} if is_sampled else {}),
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": sum(
                label is not None and len(encode(text)) > self.block_size
                for rows in (splits.train, splits.validation, *splits.test.values())
                for label, text in rows
            ),
        }

    def corpus_line(self) -> str:
        corpus, counts = self.corpus, self.counts
        held_out = f", selects on {counts['validation']}" if counts["validation"] else ""
        extra = f", {counts['extra_lines']} of them labelled sentences" if "extra_lines" in counts else ""
        leaked, cut = counts["test_in_train"], counts["cut_at_block_size"]
        return (
            f"Corpus {corpus.name} ({corpus.where}): trains on {counts['train']} lines{extra}{held_out}, tests on "
            f"{counts['test']}, of which {leaked} ({100 * leaked / counts['test']:.1f} %) appear verbatim in the "
            f"training set and {counts['test_nearly_in_train']} nearly{f'; block_size cuts {cut}' if cut else ''}."
        )

    def train_dataloader(self) -> SeededBatches:
        return TrainingBatches(self.drawn, self.batch_size, self.seed, self.shard)


def check_length(tokens: int, part: str, least: int) -> None:
    """Raise a `UserError` if a text has fewer tokens than are needed."""
    if tokens < least:
        raise UserError(
            f"The {part} text has {tokens} tokens and needs at least {least}; use more text"
            f"{' or a smaller block_size' if least > 2 else ''}."
        )


def sample_rows(rows: Rows, tokens: int | None) -> Rows:
    """Return evenly spaced rows with about this many tokens; all of them if they have no more, or for None."""
    N, total = len(rows["ids"]), int(lengths_of(rows).sum())
    if tokens is None or total <= tokens:
        return rows
    number = max(1, N * tokens // total)
    return {name: tensor[torch.arange(number) * N // number] for name, tensor in rows.items()}


class SentenceData(SpeechData):
    """Labelled sentences. Longer ones are cut at `block_size`, as in the reports.

    Attributes:
        train: the rows to train on.
    """

    labelled = True

    def encode(self) -> None:
        self.train = self.drawn = self.encode_rows(self.splits.train)
        self.train_tokens = int(lengths_of(self.train).sum())
        evaluated = sample_rows(self.train, self.task["evaluation_tokens"])
        self.evaluated_tokens = int(lengths_of(evaluated).sum())
        self.monitored = {("train", ""): evaluated}
        if self.splits.validation:
            self.monitored["validation", ""] = self.encode_rows(self.splits.validation)
        in_train = torch.tensor(self.splits.in_train("test"))
        rows = self.encode_rows(self.splits.test["test"])
        self.tested = {("test", ""): {**rows, "in_train": in_train, "row": torch.arange(len(in_train))}}

    def encode_rows(self, rows: list[Row]) -> Rows:
        """Return ids [N, block_size] and labels [N]."""
        ids = torch.full((len(rows), self.block_size), PAD)
        for row, (_, text) in enumerate(rows):
            words = self.tokenizer.encode(text)[: self.block_size]
            ids[row, : len(words)] = torch.tensor(words)
        return {"ids": ids, "labels": torch.tensor([label for label, _ in rows])}

    def examples(self) -> list[Example]:
        """Return a sentence of each class, neither short nor long, of the part that selects the checkpoint."""
        rows = (self.monitored | self.tested)[self.chosen_on, ""]
        lengths, examples = lengths_of(rows), []
        suitable = (lengths >= min(8, int(lengths.max()))) & (lengths <= 16)
        for label in rows["labels"].unique().tolist():
            for k in ((rows["labels"] == label) & suitable).nonzero().flatten()[:1].tolist():
                examples.append(self.example(rows["ids"][k], label))
        return examples

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the test accuracy of the majority class of train, and None for groups that may have no sentence."""
        majority_class = self.train["labels"].bincount().argmax()
        accuracy = (self.tested["test", ""]["labels"] == majority_class).float().mean().item()
        return {"majority_accuracy": accuracy, "test_accuracy_in_train": None, "test_accuracy_not_in_train": None}


class TextSize(NamedTuple):
    """The size of a text that is evaluated: its targets, its bytes in UTF-8, and its words between white space."""

    tokens: int
    bytes: int
    words: int


class StreamData(SpeechData):
    """Running text.

    The task's config adds `stride` of the sliding window, `lengths`, longer contexts to test, and
    `evaluation_tokens`, the targets of train and of validation that are evaluated.

    Attributes:
        stream: the ids of train.
        extra_tests: on longer contexts.
        streams: the ids of the validation text and of each test.
        text_sizes: of each test.
    """

    labelled = False
    sampled: ClassVar[tuple[str, ...]] = ("train",)  # splits of which `evaluation_tokens` are evaluated
    stream: Stream
    streams: dict[Part, Any]
    text_sizes: dict[str, TextSize]

    def encode(self) -> None:
        if "mean" in self.splits.test:
            raise UserError("test_LM_mean.txt: 'mean' is the name of the mean over the tests; rename the file.")
        if self.task["documents"] != "joined":
            raise UserError("task.documents=separate needs documents: set corpus=text or corpus=stories.")
        stride, size = self.checked_stride(), self.block_size
        stream = self.encode_stream(self.splits.train, "training", least=size + 1)
        streams: dict[Part, Stream] = {("train", ""): stream}
        if self.splits.validation:
            streams["validation", ""] = self.encode_stream(self.splits.validation, "validation", least=2)
        self.text_sizes = {}
        for name, rows in self.splits.test.items():
            streams["test", name] = self.encode_stream(rows, f"test_LM_{name}.txt", least=2)
            texts = [text for _, text in rows]
            counts = (len(f"{text} ".encode()) for text in texts), (len(text.encode().split()) for text in texts)
            self.text_sizes[name] = TextSize(len(streams["test", name]) - 1, *map(sum, counts))
        self.cover_streams(streams, stride)
        self.drawn = {"ids": stream.unfold(0, size + 1, 1)}
        if self.task["ngram_targets"]:
            self.drawn["start"] = torch.arange(len(self.drawn["ids"]))

    def cover_streams(self, streams: dict[Part, Stream], stride: int) -> None:
        """Cover the texts of train, validation and the tests with the windows that are evaluated."""
        self.stream, self.train_tokens = streams["train", ""], len(streams["train", ""]) - 1
        self.streams = {part: stream for part, stream in streams.items() if part[0] != "train"}
        self.monitored, self.tested = {}, {}
        size, limit, mixture = self.block_size, self.task["evaluation_tokens"], self.task["ngram_mixture"]
        for part, stream in streams.items():
            segments = self.segments(stream)
            if part[0] in self.sampled and limit is not None:
                windows = sample_blocks(*segments, size, limit)
            else:
                windows = Windows.cover(*segments, size, size)
            rows = StreamRows(stream, windows, with_places=mixture != "none" and part[0] != "train")
            if part[0] != "test":
                self.monitored[part] = rows
                continue
            self.tested[part] = rows
            self.tested["test_sliding", part[1]] = StreamRows(stream, Windows.cover(*segments, size, stride))
            for length in self.task["lengths"]:
                windows = Windows.cover(*segments, length, length)
                self.extra_tests[f"test_length_{length}", part[1]] = StreamRows(stream, windows)
        self.evaluated_tokens = self.monitored["train", ""].windows.tokens

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return where what is evaluated by itself begins and ends: all of a text, or each document of it."""
        return torch.tensor([0]), torch.tensor([len(stream)])

    def encode_stream(self, rows: list[Row], part: str, least: int) -> Tensor:
        """Return the ids of all rows, one after another; a `UserError` if there are fewer than `least`."""
        stream = torch.tensor([index for _, text in rows for index in self.tokenizer.encode(text)])
        check_length(len(stream), part, least)
        return stream

    def checked_stride(self) -> int:
        """Return the stride of the sliding window; raise a `UserError` if the config has none that fits."""
        size, stride = self.block_size, self.task["stride"]
        stride = max(1, size // 2) if stride is None else stride
        if not 1 <= stride <= size:
            raise UserError(f"task.stride must be between 1 and block_size={size}, not {stride}.")
        return stride

    def train_dataloader(self) -> SeededBatches:
        if len(self.stream) < LONG_STREAM:
            return super().train_dataloader()
        return WindowBatches(self.stream, self.block_size + 1, self.batch_size, self.seed, self.shard)

    def limit_length(self, max_length: int | None) -> None:
        """Drop tests on contexts longer than `max_length`; None: no limit."""
        for part, name in list(self.extra_tests):
            if max_length is not None and int(part.removeprefix("test_length_")) > max_length:
                del self.extra_tests[part, name]

    def examples(self) -> list[Example]:
        """Return the beginning of each text of the part that selects the checkpoint."""
        texts = [stream for (split, _), stream in self.streams.items() if split == self.chosen_on]
        return [self.example(text[torch.arange(min(16, self.block_size, len(text) - 1))]) for text in texts]

    def unknown_rates(self) -> dict[Part, float]:
        """Return the fraction of unknown words among the targets of the validation text and of each test."""
        places = {part: torch.arange(1, len(stream)) for part, stream in self.streams.items()}
        return {part: (self.streams[part][k] == UNKNOWN).double().mean().item() for part, k in places.items()}

    def reference_metrics(self) -> dict[str, float | None]:
        """Return `unknown_rates` by name, and the mean of the tests."""
        rates = self.unknown_rates()
        tests = [rate for (split, _), rate in rates.items() if split == "test"]
        named = {"_".join(filter(None, (split, "unknown_rate", name))): rate for (split, name), rate in rates.items()}
        return {**named, "test_unknown_rate_mean": sum(tests) / len(tests)}
