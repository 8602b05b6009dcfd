"""The LightningDataModule: a corpus, tokenized once, as tensors in memory; batches are slices of them.

    classify    ids [N, block_size] padded with 0, labels [N], and for test sentences whether train has them
    lm          a text is one stream of ids; training draws windows of block_size + 1 anywhere in it,
                evaluation covers it so that each token is predicted exactly once (see `evaluation_rows`)

Shapes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from speechformer.corpora.cache import remember_words
from speechformer.corpora.special_tokens import PAD, UNKNOWN
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.splits import Row, Splits, split
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data.batches import EvaluationBatches, Example, Part, Rows, TrainingBatches, evaluation_rows
from speechformer.errors import UserError, pick


class SpeechData(pl.LightningDataModule):
    """A corpus, split by a protocol and tokenized, for one task.

    Args:
        corpus: what `load_corpus` read.
        task: the config group: `name` ("classify" or "lm"); for "lm" also `stride` of the sliding window, and
            `lengths`, longer contexts to test in blocks of at the end.
        protocol: the config group: `remove_test_sentences`, `validation`, `vocabulary`.
        vocab_size: rows of the embedding table, at least the vocabulary; None for exactly the vocabulary.
        tokenizer: one that is already fitted (to look at a trained run); None fits it.

    Attributes: `tokenizer`, `vocab_size`, `splits`, `description` (for the result).
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        task: Mapping[str, Any],
        protocol: Mapping[str, Any],
        block_size: int,
        batch_size: int,
        vocab_size: int | None,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__()
        self.corpus, self.task, self.block_size = corpus, dict(task), block_size
        self.batch_size, self.seed = batch_size, seed
        remember_words(corpus)
        name = pick({"classify": "classify", "lm": "lm"}, task["name"], "task.name")
        self.splits: Splits = split(
            corpus,
            name,
            remove_test_sentences=protocol["remove_test_sentences"],
            validation=protocol["validation"],
            vocabulary=protocol["vocabulary"],
        )
        self.tokenizer = tokenizer or Tokenizer.fit(self.splits.vocabulary_texts)
        self.vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        if self.vocab_size < len(self.tokenizer):
            raise UserError(
                f"vocab_size={vocab_size} is less than the {len(self.tokenizer)} words of the training files; it "
                "pads the embedding table, so set it at least as large, or to null."
            )
        prepare = self.prepare_sentences if name == "classify" else self.prepare_streams
        self.train: Rows
        self.watched: dict[Part, Rows]  # train and the held-out part
        self.tested: dict[Part, Rows]
        self.tested_at_lengths: dict[Part, Rows] = {}  # once, at the end
        prepare()
        self.counts = self.count()

    def prepare_sentences(self) -> None:
        """Rows of ids [N, block_size] and labels [N]; a longer sentence is cut, as in the reports."""
        self.train = self.encode_sentences(self.splits.train)
        self.watched = {("train", ""): self.train}
        if self.splits.validation:
            self.watched["validation", ""] = self.encode_sentences(self.splits.validation)
        seen = torch.tensor(self.splits.in_train("test"))
        self.tested = {("test", ""): {**self.encode_sentences(self.splits.test["test"]), "in_train": seen}}

    def prepare_streams(self) -> None:
        """Streams of ids [n] to train on, and their evaluation rows; tests also with a sliding window."""
        stride = self.task["stride"]
        if stride is None:
            stride = max(1, self.block_size // 2)
        if not 1 <= stride <= self.block_size:
            raise UserError(f"task.stride must be between 1 and block_size={self.block_size}, not {stride}.")
        if "mean" in self.splits.test:
            raise UserError("test_LM_mean.txt: 'mean' is the name of the mean over the tests; rename the file.")
        stream = self.encode_stream(self.splits.train, "training", least=self.block_size + 1)
        self.train = {"ids": stream.unfold(0, self.block_size + 1, 1)}
        self.watched = {("train", ""): evaluation_rows(stream, self.block_size, self.block_size)}
        if self.splits.validation:
            held = self.encode_stream(self.splits.validation, "validation", least=2)
            self.watched["validation", ""] = evaluation_rows(held, self.block_size, self.block_size)
        self.tested = {}
        for name, rows in self.splits.test.items():
            stream = self.encode_stream(rows, f"test_LM_{name}.txt", least=2)
            self.tested["test", name] = evaluation_rows(stream, self.block_size, self.block_size)
            self.tested["test_sliding", name] = evaluation_rows(stream, self.block_size, stride)
            for length in self.task["lengths"]:
                self.tested_at_lengths[f"test_length_{length}", name] = evaluation_rows(stream, length, length)

    def encode_sentences(self, rows: list[Row]) -> Rows:
        ids = torch.full((len(rows), self.block_size), PAD)
        for row, (_, text) in enumerate(rows):
            words = self.tokenizer.encode(text)[: self.block_size]
            ids[row, : len(words)] = torch.tensor(words)
        return {"ids": ids, "labels": torch.tensor([label for label, _ in rows])}

    def encode_stream(self, rows: list[Row], part: str, least: int) -> Tensor:
        stream = torch.tensor([index for _, text in rows for index in self.tokenizer.encode(text)])
        if len(stream) < least:
            raise UserError(
                f"The {part} text has {len(stream)} tokens and needs at least {least}; use more text"
                f"{' or a smaller block_size' if least > 2 else ''}."
            )
        return stream

    def extend_to(self, max_length: int | None) -> None:
        """Leave out tests on contexts that the model's positions do not reach; None reaches all."""
        for part, name in list(self.tested_at_lengths):
            if max_length is not None and self.tested_at_lengths[part, name]["ids"].shape[1] > max_length:
                del self.tested_at_lengths[part, name]

    @property
    def chosen_on(self) -> str:
        """The part that chooses the best checkpoint: without a held-out part test, as the reports did."""
        return "validation" if self.splits.validation else "test"

    @property
    def description(self) -> dict[str, Any]:
        """The corpus as a result names it, as plain data."""
        corpus = self.corpus
        return {
            "name": corpus.name,
            "where": corpus.where,
            "sha256": corpus.sha256,
            "classes": corpus.classes,
            "counts": self.counts,
        }

    def count(self) -> dict[str, Any]:
        """How much there is of everything, as plain data."""
        tests = {
            name: {
                "rows": len(rows),
                "in_train": self.splits.kinds_in_train[name].count("exact"),
                "nearly_in_train": sum(kind in ("same", "near") for kind in self.splits.kinds_in_train[name]),
                "tokens": sum(len(self.tokenizer.encode(text)) for _, text in rows),
                "unknown_tokens": sum(self.tokenizer.encode(text).count(UNKNOWN) for _, text in rows),
            }
            for name, rows in self.splits.test.items()
        }
        return {
            "train": len(self.splits.train),
            "validation": len(self.splits.validation),
            "removed_from_train": self.splits.removed,
            "test": sum(test["rows"] for test in tests.values()),
            "test_in_train": sum(test["in_train"] for test in tests.values()),
            "test_nearly_in_train": sum(test["nearly_in_train"] for test in tests.values()),
            "tests": tests,
            "train_tokens": int((self.watched["train", ""]["ids"] != PAD).sum()),
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": sum(
                len(self.tokenizer.encode(text)) > self.block_size
                for rows in (self.splits.train, self.splits.validation, *self.splits.test.values())
                for label, text in rows
                if label is not None
            ),
        }

    def examples(self) -> list[Example]:
        """Texts of the part that chooses the checkpoint: the first sentence of each class that is neither short nor
        long, or the beginning of each text."""
        parts = [rows for (part, _), rows in (self.watched | self.tested).items() if part == self.chosen_on]
        found = []
        for rows in parts:
            if "labels" not in rows:
                chosen = [(rows["ids"][0][:16], None)]
            else:
                lengths = (rows["ids"] != PAD).sum(dim=1)
                fit = (lengths >= min(8, int(lengths.max()))) & (lengths <= 16)
                labels = rows["labels"].unique().tolist()
                firsts = [(label, ((rows["labels"] == label) & fit).nonzero().flatten()[:1]) for label in labels]
                chosen = [(rows["ids"][k], label) for label, first in firsts for k in first.tolist()]
            for ids, label in chosen:
                ids = ids[ids != PAD]
                found.append(Example([ids], [self.tokenizer.decode(ids.tolist())], label))
        return found

    def reference_figures(self) -> dict[str, float | None]:
        """What needs no model: the accuracy on test of always saying the commonest class of train; and None for
        the figures of seen and unseen test sentences, which stay so where there are none of them."""
        if self.task["name"] != "classify":
            return {}
        commonest = self.train["labels"].bincount().argmax()
        majority = (self.tested["test", ""]["labels"] == commonest).float().mean().item()
        return {"majority_accuracy": majority, "test_accuracy_in_train": None, "test_accuracy_not_in_train": None}

    def train_dataloader(self) -> TrainingBatches:
        share = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return TrainingBatches(self.train, self.batch_size, self.seed, share)

    def val_dataloader(self) -> EvaluationBatches:
        """What is looked at during training: train and the held-out part; without one, as in the reports, test."""
        return EvaluationBatches(self.watched if self.splits.validation else self.watched | self.tested)

    def test_dataloader(self) -> EvaluationBatches:
        """What is measured once, at the end: everything."""
        return EvaluationBatches(self.watched | self.tested | self.tested_at_lengths)
