"""The data of task=probe: rows that are generated when a batch needs them, and evaluation rows generated once.

ids        the symbols of a row but the last, padded with 0, [B, T]
targets    of each, the symbol to predict after it, mostly the next one; -100 if there is none, [B, T]
choices    how many symbols could be the target, [B, T]; of evaluation rows alone
groups     the index of the target's group in `Probe.groups`, [B, T]; of evaluation rows alone
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechformer.corpora.special_tokens import IGNORE, PAD
from speechformer.corpora.tokenizer import PAD_TOKEN, UNKNOWN_TOKEN, Tokenizer
from speechformer.data.base import TaskData
from speechformer.data.batches import Batch, Example, Part, Rows, SeededBatches
from speechformer.errors import require
from speechformer.probes.base import Probe
from speechformer.probes.base import Rows as Symbols

EPOCH = 1000  # batches; a run is measured in steps
FIRST = 2  # id of a vocabulary's first symbol, after <pad> and <unk>


def as_tensors(rows: Symbols) -> Rows:
    """Return rows of a probe as the inputs and targets of a decoder."""
    choices, groups = torch.from_numpy(rows.choices[:, 1:]), torch.from_numpy(rows.groups[:, 1:])
    ids = torch.from_numpy(rows.symbols + FIRST)
    ids = ids.where(ids >= FIRST, PAD)
    targets = torch.from_numpy(rows.answers[:, 1:] + FIRST).where(choices > 0, IGNORE)
    return {"ids": ids[:, :-1], "targets": targets, "choices": choices, "groups": groups}


class ProbeBatches(SeededBatches):
    """Batches of fresh training rows; a row is a function of (seed, epoch, index)."""

    def __init__(self, probe: Probe, size: int, seed: object, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(EPOCH * size, size, 0, shard)
        self.probe, self.row_seed = probe, seed

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        return torch.arange(self.N).split(self.size)

    def batch(self, chosen: Tensor) -> Batch:
        rows = as_tensors(self.probe.rows(chosen.numpy(), self.row_seed, "train", self.epoch))
        return {name: rows[name] for name in ("ids", "targets")}

    def weight(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())


class ProbeData(TaskData):
    """Rows of a probe: validation and test as in training, and tests of one length each; all of different rows.

    Attributes:
        probe: their generator.
        extra_tests: of one length each.
    """

    monitored: dict[Part, Rows]
    tested: dict[Part, Rows]
    extra_tests: dict[Part, Rows]

    def split(self) -> None:
        self.probe: Probe = self.corpus.probe
        self.row_seed = (self.seed, self.corpus.seed)

    def fit_tokenizer(self) -> Tokenizer:
        return Tokenizer([PAD_TOKEN, UNKNOWN_TOKEN, *self.probe.vocabulary])

    def encode(self) -> None:
        needed = self.probe.symbols_of(self.probe.max_length) - 1
        rule = f"at least {needed}, the symbols of the longest training row"
        require(self.block_size >= needed, "block_size", rule, self.block_size)
        self.hold_out(self.longer_length())
        self.tested = {("test", ""): self.evaluation_rows("test")}
        lengths = self.probe.test_lengths
        self.extra_tests = {("test", f"length_{n}"): self.evaluation_rows("test", n) for n in lengths}

    def longer_length(self) -> int | None:
        """Return the length of validation rows by `task.longer`, at most that of a test; None: as in training."""
        probe = self.probe
        length = min(int(self.task["longer"] * probe.max_length), max(probe.test_lengths))
        return length if length > probe.max_length else None

    def hold_out(self, length: int | None) -> None:
        """Set the validation rows, all of one length; None: of lengths as in training."""
        self.validation = self.evaluation_rows("validation", length)
        self.monitored = {("validation", ""): self.validation} if self.protocol["validation"] else {}

    def limit_length(self, max_length: int | None) -> None:
        """Do as the base class, and validate on lengths as in training where longer rows do not fit."""
        super().limit_length(max_length)
        if max_length is not None and self.validation["ids"].shape[1] > max_length:
            self.hold_out(None)

    def evaluation_rows(self, part: str, length: int | None = None) -> Rows:
        """Return `task.test_rows` rows without repetitions, or as many as there are."""
        rows = self.probe.rows(np.arange(self.task["test_rows"]), self.row_seed, part, length=length)
        _, first = np.unique(rows.symbols, axis=0, return_index=True)
        return {name: tensor[np.sort(first)] for name, tensor in as_tensors(rows).items()}

    def count(self) -> dict[str, Any]:
        tests = {name: {"rows": len(rows["ids"])} for (_, name), rows in self.extra_tests.items()}
        return {
            "train": EPOCH * self.batch_size,  # of an epoch
            "validation": len(self.validation["ids"]),
            "test": len(self.tested["test", ""]["ids"]),
            "test_in_train": 0,
            "tests": tests,
            "vocabulary": len(self.tokenizer),
        }

    def train_dataloader(self) -> ProbeBatches:
        return ProbeBatches(self.probe, self.batch_size, self.row_seed, self.shard)

    def examples(self) -> list[Example]:
        """Return two validation rows."""
        return [self.example(ids) for ids in self.validation["ids"][:2]]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the accuracies of chance: of guesses among the symbols that could stand there, all alike."""
        metrics: dict[str, float | None] = {}
        for (_, name), rows in (self.tested | self.extra_tests).items():
            scored, end = rows["targets"] != IGNORE, f"_{name}" if name else ""
            share = torch.where(scored, 1 / rows["choices"].double().clamp(min=1), 1)
            metrics[f"chance_accuracy{end}"] = share[scored].mean().item()
            metrics[f"chance_exact{end}"] = share.prod(dim=1).mean().item()
        return metrics
