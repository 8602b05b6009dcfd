"""The data of tasks on speeches: a corpus, tokenized once, as tensors in memory; batches are slices of them.

    SentenceData    ids [N, block_size] padded with 0, labels [N], and for test sentences whether train has them
    StreamData      a text is one stream of ids; training draws windows of block_size + 1 anywhere in it, evaluation
                    covers it so that each token is predicted exactly once (see `Windows`)

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.splits import Row, Splits, number_of_folds, split, with_extra_text
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import (
    LONG_STREAM,
    Example,
    Part,
    Rows,
    SeededBatches,
    Stream,
    TrainingBatches,
    WindowBatches,
    Windows,
    evenly_spaced,
    lengths_of,
)
from speechformer.errors import UserError, require
from speechformer.models.naive_bayes import NaiveBayes


class SpeechData(TaskData):
    """What sentences and streams share; `TaskData` documents the arguments.

    Attributes:
        splits: the rows of text.
        cut: the number of sentences that `block_size` cuts.
        train_tokens: the number of tokens of train.
        evaluated_tokens: the number of those that are evaluated during training.
        monitored: train and, if there is one, the held-out part.
    """

    has_folds = True
    corpus: Corpus
    labelled: ClassVar[bool]  # whether the task reads the labelled sentences or the running text
    splits: Splits
    train_tokens: int
    evaluated_tokens: int
    cut = 0

    def split(self) -> None:
        options = {key: value for key, value in self.protocol.items() if key != "name"}
        if options["fold"] == "seed":
            if not options["validation"]:
                raise UserError("protocol.fold=seed chooses what is held out, which is nothing; set protocol=clean.")
            options["fold"] = self.seed % number_of_folds(options["validation"])
        self.splits = split(self.corpus, self.task["name"], self.labelled, **options)
        if self.task.get("extra_text"):
            self.splits = with_extra_text(self.splits, self.corpus)

    def fit_tokenizer(self) -> Tokenizer | Subwords:
        tokens, size, least = (self.task[key] for key in ("tokens", "vocab_size", "min_count"))
        if tokens == "words":
            return Tokenizer.fit(self.splits.vocabulary_texts, size, least)
        return Subwords.fit(self.splits.vocabulary_texts, tokens, size, least)

    def count(self) -> dict[str, Any]:
        tests = self.count_tests()
        totals = {"test": "rows", "test_in_train": "in_train", "test_nearly_in_train": "nearly_in_train"}
        return {
            **self.count_rows(),
            **{name: sum(test.get(key, 0) for test in tests.values()) for name, key in totals.items()},
            "tests": tests,
            "train_tokens": self.train_tokens,
            "evaluated_tokens": self.evaluated_tokens,
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": self.cut,
        }

    def count_rows(self) -> dict[str, int]:
        """Count the lines or documents of train and of what is held out."""
        splits = self.splits
        counts = {"train": len(splits.train), "validation": len(splits.validation)}
        return {**counts, "removed_from_train": splits.removed, "extra_lines": splits.extra}

    def count_tests(self) -> dict[str, dict[str, int]]:
        """Count the rows and tokens of each test."""
        tests = {}
        for name, rows in self.splits.test.items():
            kinds, ids = Counter(self.splits.kinds_in_train[name]), self.ids_of_test(name)
            tests[name] = {
                "rows": len(rows),
                "in_train": kinds["exact"],
                "nearly_in_train": kinds["same"] + kinds["near"],
                "tokens": len(ids),
                "unknown_tokens": ids.count(self.tokenizer.unknown),
            }
        return tests

    def ids_of_test(self, name: str) -> list[int]:
        """Return the ids of a test, none of them cut."""
        return [index for _, text in self.splits.test[name] for index in self.tokenizer.encode(text)]


class SentenceData(SpeechData):
    """Labelled sentences. Longer ones are cut at `block_size`, as in the reports.

    Attributes:
        train: the rows to train on.
    """

    labelled = True
    monitored: dict[Part, Rows]
    tested: dict[Part, Rows]

    def encode(self) -> None:
        self.train = self.encode_rows(self.splits.train)
        lengths = lengths_of(self.train)
        self.train_tokens = int(lengths.sum())
        sampled = evenly_spaced(len(lengths), self.train_tokens, self.task["evaluation_tokens"])
        self.evaluated_tokens = int(lengths[sampled].sum())
        self.monitored = {("train", ""): {name: tensor[sampled] for name, tensor in self.train.items()}}
        if self.splits.validation:
            self.monitored["validation", ""] = self.encode_rows(self.splits.validation)
        in_train = torch.tensor([kind == "exact" for kind in self.splits.kinds_in_train["test"]])
        rows = self.encode_rows(self.splits.test["test"])
        self.tested = {("test", ""): {**rows, "in_train": in_train, "row": torch.arange(len(in_train))}}

    def encode_rows(self, rows: list[Row]) -> Rows:
        """Return ids [N, block_size] and labels [N]."""
        ids = torch.full((len(rows), self.block_size), PAD)
        for row, (_, text) in enumerate(rows):
            words = self.tokenizer.encode(text)
            if len(words) > self.block_size:
                self.cut += 1
                words = self.tokenizer.encode(text, self.block_size)
            ids[row, : len(words)] = torch.tensor(words)
        return {"ids": ids, "labels": torch.tensor([label for label, _ in rows])}

    def train_dataloader(self) -> TrainingBatches:
        return TrainingBatches(self.train, self.batch_size, self.seed, self.shard)

    def examples(self) -> list[Example]:
        """Return the first sentences of the part that selects the checkpoint."""
        rows = (self.monitored | self.tested)[self.chosen_on, ""]
        return [self.example(ids, label) for ids, label in zip(rows["ids"][:3], rows["labels"][:3].tolist())]

    @functools.cached_property
    def naive_bayes_accuracy(self) -> float | None:
        """The test accuracy of `NaiveBayes`; None for so many training sentences that it would take minutes."""
        ids, labels, test = self.train["ids"], self.train["labels"], self.tested["test", ""]
        if len(ids) > 100_000:
            return None
        model = NaiveBayes(len(ids), self.block_size, len(self.corpus.classes), self.vocab_size, weight=1.0)
        model.fit(ids, labels)
        return (model(test["ids"]).argmax(dim=1) == test["labels"]).float().mean().item()

    def reference_metrics(self) -> dict[str, float | None]:
        """Return test accuracies of what needs no network, and None for groups that may have no sentence."""
        majority_class = self.train["labels"].bincount().argmax()
        accuracy = (self.tested["test", ""]["labels"] == majority_class).float().mean().item()
        groups = dict.fromkeys(("test_accuracy_in_train", "test_accuracy_not_in_train"))
        references = {"majority_accuracy": accuracy, "naive_bayes_accuracy": self.naive_bayes_accuracy}
        return {**references, **self.corpus.ceilings, **groups}


class TextSize(NamedTuple):
    """The size of a text that is evaluated: its targets, its bytes in UTF-8, and its words between white space."""

    tokens: int
    bytes: int
    words: int


class StreamData(SpeechData):
    """Running text.

    The task's config adds `stride` of the sliding window, `lengths`, longer contexts to test, and
    `evaluation_tokens`, the targets of train that are evaluated.

    Attributes:
        stream: the ids of train.
        extra_tests: on longer contexts.
        streams: the ids of the validation text and of each test.
        targets: the number of targets of the validation text and of each test.
        text_sizes: of each test.
    """

    labelled = False
    sampled: ClassVar[tuple[str, ...]] = ("train",)  # splits of which `evaluation_tokens` are evaluated
    shortest: ClassVar[int] = 2  # tokens of a test text
    long_stream: ClassVar[int] = LONG_STREAM  # tokens; from here on an epoch is no permutation of all windows
    monitored: dict[Part, Windows]
    tested: dict[Part, Windows]
    extra_tests: dict[Part, Windows]

    def encode(self) -> None:
        size = self.block_size
        stride = self.task["stride"] or max(1, size // 2)
        require(stride <= size, "task.stride", f"between 1 and block_size={size}", stride)
        texts = self.encode_texts()
        if ("test", "mean") in texts:
            raise UserError("test_LM_mean.txt: 'mean' is the name of the mean over the tests; rename the file.")
        self.stream = texts["train", ""][0]
        self.streams = {part: stream for part, (stream, *_) in texts.items() if part[0] != "train"}
        self.targets, self.text_sizes = dict[Part, int](), dict[str, TextSize]()
        for (part, name), (stream, *size_of_text) in texts.items():
            least = size + 1 if part == "train" else self.shortest
            if len(stream) < least:
                raise UserError(
                    f"The {name or part} text has {len(stream)} tokens and needs at least {least}; use more text or "
                    "a smaller block_size, or of documents another corpus.separator or protocol.validation=0."
                )
            cover = functools.partial(Windows.cover, stream, *self.segments(stream))
            blocks = cover(size, size)
            self.targets[part, name] = blocks.tokens
            if part in self.sampled:
                blocks = blocks.sample(self.task["evaluation_tokens"])
            if part != "test":
                self.monitored[part, name] = blocks
                continue
            self.text_sizes[name] = TextSize(blocks.tokens, *size_of_text)
            self.tested[part, name] = blocks
            self.tested["test_sliding", name] = cover(size, stride)
            for length in self.task["lengths"]:
                self.extra_tests[f"test_length_{length}", name] = cover(length, length)
        self.train_tokens, self.evaluated_tokens = len(self.stream) - 1, self.monitored["train", ""].tokens

    def encode_texts(self) -> dict[Part, tuple[Stream, int, int]]:
        """Return the ids and the bytes and words of each text: ("train", ""), ("validation", ""), ("test", NAME)."""
        if self.task["documents"] != "joined":
            raise UserError("task.documents=separate needs documents: set corpus=text or corpus=stories.")
        rows = {("train", ""): self.splits.train, ("validation", ""): self.splits.validation}
        rows |= {("test", name): lines for name, lines in self.splits.test.items()}
        texts = {}
        for part in (part for part, lines in rows.items() if lines):
            lines = [line for _, line in rows[part]]
            text = " ".join(lines)
            if isinstance(self.tokenizer, PretrainedTokenizer):  # whose tokens are those of the whole text
                ids = self.tokenizer.encode(text)
            else:
                ids, text = [index for line in lines for index in self.tokenizer.encode(line)], f" {text}"
            texts[part] = torch.tensor(ids), len(text.encode()), len(text.encode().split())
        return texts

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return where what is evaluated by itself begins and ends: all of a text, or each document of it."""
        return torch.tensor([0]), torch.tensor([len(stream)])

    def ids_of_test(self, name: str) -> list[int]:
        return self.streams["test", name].tolist()

    def train_dataloader(self) -> SeededBatches:
        size, sharing = self.block_size + 1, (self.batch_size, self.seed, self.shard)
        if len(self.stream) >= self.long_stream:
            return WindowBatches(self.stream, size, *sharing)
        windows = self.stream.unfold(0, size, 1)
        return TrainingBatches({"ids": windows, "start": torch.arange(len(windows))}, *sharing)

    def examples(self) -> list[Example]:
        """Return the beginning of each text of the part that selects the checkpoint."""
        texts = [stream for (part, _), stream in self.streams.items() if part == self.chosen_on]
        return [self.example(text[: min(16, self.block_size, len(text) - 1)].long()) for text in texts]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the fraction of unknown words among the targets of the validation text and of each test.

        Also that of the mean of the tests.
        """
        unknown = {part: int((stream[1:] == self.tokenizer.unknown).sum()) for part, stream in self.streams.items()}
        rates = {part: count / self.targets[part] for part, count in unknown.items()}
        tests = [rate for (part, _), rate in rates.items() if part == "test"]
        metrics = {f"{part}_unknown_rate{name and f'_{name}'}": rate for (part, name), rate in rates.items()}
        return {**metrics, "test_unknown_rate_mean": sum(tests) / len(tests)}
