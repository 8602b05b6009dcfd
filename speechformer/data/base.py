"""The LightningDataModule that the data of every task extends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speechformer.corpora.files import on_any_machine
from speechformer.corpora.load import AnyTokenizer
from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data import pl
from speechformer.data.batches import EvaluationBatches, Example, Part, Rows, SeededBatches, Windows
from speechformer.errors import UserError


class TaskData(pl.LightningDataModule):
    """A corpus, split by a protocol and tokenized, for one task.

    A subclass defines the methods that raise `NotImplementedError`. The constructor calls `split`, `fit_tokenizer`,
    `encode` and `count` in this order.

    Args:
        corpus: what `load` returned.
        task: the config group.
        protocol: the config group.
        block_size: the longest row, in tokens.
        batch_size: rows of a training batch.
        vocab_size: rows of the embedding table, at least the size of the vocabulary; None for exactly that.
        seed: of the order of the training batches.

    Attributes:
        counts: how much there is of everything, as plain data for the result.
        monitored: rows of the parts that are evaluated during training.
        tested: rows of the parts that are evaluated at the end, and during training if they select the checkpoint.
        extra_tests: rows of the tests that are evaluated at the end, even if no checkpoint is selected.

    Raises:
        UserError: the corpus or the config does not allow it.
    """

    has_folds: ClassVar[bool] = False  # whether protocol.fold can hold out another part of train
    corpus: Any  # of the class that the task reads
    tokenizer: AnyTokenizer
    monitored: Mapping[Part, Rows | Windows]
    tested: Mapping[Part, Rows | Windows]
    extra_tests: Mapping[Part, Rows | Windows]

    def __init__(
        self,
        corpus: Any,
        *,
        task: Mapping[str, Any],
        protocol: Mapping[str, Any],
        block_size: int,
        batch_size: int,
        vocab_size: int | None,
        seed: int,
        tokenizer: AnyTokenizer | None = None,
    ) -> None:
        super().__init__()
        self.corpus, self.task, self.protocol = corpus, dict(task), dict(protocol)
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        if self.protocol["fold"] != 0 and not self.has_folds:
            raise UserError("protocol.fold is for the sentences and texts of speeches; remove it.")
        self.monitored, self.tested, self.extra_tests = {}, {}, {}
        self.split()
        self.tokenizer = self.fit_tokenizer() if tokenizer is None else tokenizer
        tokens = len(self.tokenizer)
        self.vocab_size = tokens if vocab_size is None else vocab_size
        if self.vocab_size < tokens:
            raise UserError(
                f"vocab_size={vocab_size} is less than the {tokens} tokens of the vocabulary; set it to {tokens} or "
                "more, or to null."
            )
        self.encode()
        self.counts: dict[str, Any] = self.count()

    def split(self) -> None:
        """Split the corpus by the protocol."""
        raise NotImplementedError

    def fit_tokenizer(self) -> Tokenizer | Subwords:
        """Return a tokenizer fitted on the training text."""
        raise NotImplementedError

    def encode(self) -> None:
        """Turn the text into ids."""
        raise NotImplementedError

    def count(self) -> dict[str, Any]:
        """Return `counts`."""
        raise NotImplementedError

    def examples(self) -> list[Example]:
        """Return the texts that TensorBoard shows during training."""
        raise NotImplementedError

    def train_dataloader(self) -> SeededBatches:
        """Return the training batches."""
        raise NotImplementedError

    def example(self, ids: Tensor, label: int | None = None) -> Example:
        """Return a row of ids, [T], without its padding, as an example."""
        ids = ids[ids != PAD]
        return Example([ids], [self.tokenizer.tokens(ids.tolist())], label)

    @property
    def chosen_on(self) -> str:
        """The part that selects the best checkpoint: test if nothing is held out, as in the reports."""
        return "validation" if ("validation", "") in self.monitored else "test"

    def corpus_line(self) -> str:
        """Return the first line that a run prints: the corpus, and how much there is of what."""
        counts = (f"{name.replace('_', ' ')} {n:,}" for name, n in self.counts.items() if isinstance(n, int) and n)
        return f"Corpus {self.corpus.name} ({self.corpus.where}): {', '.join(counts)}."

    @property
    def description(self) -> dict[str, Any]:
        """The corpus as `result.json` describes it, as plain data."""
        corpus = self.corpus
        about = {"name": corpus.name, "where": on_any_machine(corpus.where), "sha256": corpus.sha256}
        return {**about, "classes": corpus.classes, "settings": corpus.identity, "counts": self.counts}

    @property
    def shard(self) -> tuple[int, int]:
        """The index of this device and the number of devices that share each training batch."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def reference_metrics(self) -> dict[str, float | None]:
        """Return metrics that need no model, for comparison."""
        return {}

    def limit_length(self, max_length: int | None) -> None:
        """Drop extra tests of rows longer than `max_length` tokens, the positions of the model; None: no limit."""

        def fits(rows: Rows | Windows) -> bool:
            length = rows["ids"].shape[1] if isinstance(rows, dict) else int(rows.size.max())
            return max_length is None or length <= max_length

        self.extra_tests = {part: rows for part, rows in self.extra_tests.items() if fits(rows)}

    def val_dataloader(self) -> EvaluationBatches:
        """Return what is evaluated during training."""
        return EvaluationBatches({**self.monitored, **({} if self.chosen_on == "validation" else self.tested)})

    def test_dataloader(self) -> EvaluationBatches:
        """Return what is evaluated once, at the end: everything."""
        return EvaluationBatches({**self.monitored, **self.tested, **self.extra_tests})

    def extra_dataloader(self) -> EvaluationBatches | None:
        """Return tests that are measured at the end even if no checkpoint is selected; None if there are none."""
        return EvaluationBatches(self.extra_tests) if self.extra_tests else None
