"""The data of task=probe: rows that are generated when a batch needs them, and evaluation rows generated once.

ids        the symbols of a row but the last, padded with 0, [B, T]
targets    of each, the symbol that follows it if it must be predicted; else -100, [B, T]
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
from speechformer.data.batches import Batch, EvaluationBatches, Example, Part, Rows, SeededBatches
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
    targets = ids[:, 1:].where(choices > 0, IGNORE)
    return {"ids": ids[:, :-1], "targets": targets, "choices": choices, "groups": groups}


class ProbeBatches(SeededBatches):
    """Batches of fresh training rows; a row is a function of (seed, epoch, index)."""

    def __init__(self, probe: Probe, size: int, seed: Any, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(EPOCH * size, size, 0, shard)
        self.probe, self.row_seed = probe, seed

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        return torch.arange(self.N).split(self.size)

    def batch(self, chosen: Tensor) -> Batch:
        rows = as_tensors(self.probe.rows(chosen.numpy(), self.row_seed, "train", self.epoch))
        return {name: rows[name] for name in ("ids", "targets")}

    def weight(self, chosen: Tensor) -> int:
        return int((self.batch(chosen)["targets"] != IGNORE).sum()) if len(chosen) else 0


class ProbeData(TaskData):
    """Rows of a probe: validation and test as in training, and tests of one length each; all of different rows.

    Attributes:
        probe: their generator.
        monitored: what is evaluated during training.
        tested: what is evaluated at the end.
        too_long: test lengths beyond the positions of the model.
    """

    def split(self) -> None:
        self.probe: Probe = self.corpus.probe
        self.row_seed = (self.seed, self.corpus.seed)
        self.too_long: list[int] = []

    def fit_tokenizer(self) -> Tokenizer:
        return Tokenizer([PAD_TOKEN, UNKNOWN_TOKEN, *self.probe.vocabulary])

    def encode(self) -> None:
        needed = self.probe.symbols_of(self.probe.max_length) - 1
        rule = f"at least {needed}, the symbols of the longest training row"
        require(self.block_size >= needed, "block_size", rule, self.block_size)
        self.validation = self.evaluation_rows("validation")
        self.tested: dict[Part, Rows] = {("test", ""): self.evaluation_rows("test")}
        self.monitored = {("test", ""): self.tested["test", ""]}
        if self.chosen_on == "validation":
            self.monitored = {("validation", ""): self.validation}
        for length in self.probe.test_lengths:
            self.tested["test", f"length_{length}"] = self.evaluation_rows("test", length)

    def evaluation_rows(self, part: str, length: int | None = None) -> Rows:
        """Return `task.test_rows` rows without repetitions, or as many as there are."""
        rows = self.probe.rows(np.arange(self.task["test_rows"]), self.row_seed, part, length=length)
        _, first = np.unique(rows.symbols, axis=0, return_index=True)
        first.sort()
        return as_tensors(Symbols(rows.symbols[first], rows.choices[first], rows.groups[first]))

    def count(self) -> dict[str, Any]:
        tests = {name: {"rows": len(rows["ids"])} for (_, name), rows in self.tested.items() if name}
        return {
            "train": EPOCH * self.batch_size,  # of an epoch
            "validation": len(self.validation["ids"]),
            "test": len(self.tested["test", ""]["ids"]),
            "test_in_train": 0,
            "tests": tests,
            "vocabulary": len(self.tokenizer),
        }

    def limit_length(self, max_length: int | None) -> None:
        for part, name in list(self.tested):
            if name and max_length is not None and self.tested[part, name]["ids"].shape[1] > max_length:
                del self.tested[part, name]
                self.too_long.append(int(name.removeprefix("length_")))

    def corpus_line(self) -> str:
        probe, lengths = self.probe, ", ".join(map(str, self.probe.test_lengths)) or "no other ones"
        ends = f" The positions of the model end before length {min(self.too_long)}." if self.too_long else ""
        return (
            f"Corpus {self.corpus.name} ({self.corpus.where}): trains on rows of length {probe.min_length} to "
            f"{probe.max_length}, tests also {lengths}; no test row is among the training rows.{ends}"
        )

    @property
    def chosen_on(self) -> str:
        """The part that selects the best checkpoint: with protocol=paper test, and the metrics are of the last."""
        return "validation" if self.protocol["validation"] else "test"

    def train_dataloader(self) -> ProbeBatches:
        return ProbeBatches(self.probe, self.batch_size, self.row_seed, self.shard)

    def val_dataloader(self) -> EvaluationBatches:
        """Return what is evaluated during training: rows of the lengths in training."""
        return EvaluationBatches(self.monitored)

    def test_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches(self.monitored | self.tested)

    def extra_dataloader(self) -> EvaluationBatches | None:
        """Return the tests of one length each."""
        lengths = {part: rows for part, rows in self.tested.items() if part[1]}
        return EvaluationBatches(lengths) if lengths else None

    def examples(self) -> list[Example]:
        """Return two validation rows."""
        rows = [ids[ids != PAD] for ids in self.validation["ids"][:2]]
        return [Example([ids], [self.tokenizer.tokens(ids.tolist())]) for ids in rows]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the accuracies of chance: of guesses among the symbols that could stand there, all alike."""
        metrics: dict[str, float | None] = {}
        for (_, name), rows in self.tested.items():
            scored, end = rows["targets"] != IGNORE, f"_{name}" if name else ""
            share = torch.where(scored, 1 / rows["choices"].double().clamp(min=1), 1)
            metrics[f"chance_accuracy{end}"] = share[scored].mean().item()
            metrics[f"chance_exact{end}"] = share.prod(dim=1).mean().item()
        return metrics
