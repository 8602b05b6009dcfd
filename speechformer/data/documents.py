"""The data of `task=lm` on documents: token files, of which a batch reads what it needs, so that any text will do.

The first run tokenizes each part of the text, into a token file in the user's cache folder. Later runs, and other
processes, map it into memory. Evaluation during training reads a fixed sample, so the text may have any size.

Shapes: see `batches`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechformer.corpora.documents import Documents
from speechformer.corpora.subwords import Subwords
from speechformer.data.batches import Example, Part, Stream, WindowBatches
from speechformer.data.speeches import DEFAULTS, StreamData, TextSize, check_length
from speechformer.data.token_cache import TokenCache
from speechformer.data.token_file import TokenFile
from speechformer.errors import UserError


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest, and `TokenCache` what the protocol does.

    Attributes:
        files: the token file of each part: ("train", ""), ("validation", ""), ("test", NAME).
    """

    has_folds = False
    sampled = ("train", "validation")
    corpus: Documents

    def split(self) -> None:
        if self.task.get("extra_text"):
            raise UserError(f"task.extra_text needs labelled sentences, and corpus={self.corpus.name} has none.")
        self.task = DEFAULTS | self.task
        self.cache = TokenCache(self.corpus, self.protocol)

    def fit_tokenizer(self) -> Subwords:
        return self.cache.tokenizer(*(self.task[key] for key in ("tokens", "vocab_size", "min_count")))

    def encode(self) -> None:
        stride = self.checked_stride()
        opened: dict[str, TokenFile] = {}
        for part in self.corpus.parts:
            opened |= self.cache.files(part, self.tokenizer)
        parts = ["train", *(["validation"] if "validation" in opened else [])]
        self.files = {(part, ""): opened[part] for part in parts}
        self.files |= {("test", name): opened[f"test_{name}"] for name in self.corpus.tests}
        counts = {split: file.counts["documents"] for (split, _), file in self.files.items()}
        if self.cache.share and not (counts["train"] and counts["validation"]):
            raise UserError(
                f"{self.corpus.where}: {counts['train']} documents are left to train and {counts['validation']} are "
                "held out, and both need some. Name the text between documents with corpus.separator, add "
                "validation_LM.txt, or choose the checkpoint on test with protocol.validation=0."
            )
        for (split, name), file in self.files.items():
            least = self.block_size + 1 if split == "train" else 3  # of which two are <eos>
            check_length(len(file), f"test_LM_{name}.txt" if name else split, least)
        self.text_sizes = {
            name: TextSize(len(file) - 1, file.counts["bytes"], file.counts["words"])
            for (split, name), file in self.files.items()
            if split == "test"
        }
        self.cover_streams({**self.files}, stride)

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if self.task["documents"] == "joined":
            return super().segments(stream)
        assert isinstance(stream, TokenFile)
        places = torch.from_numpy(np.array(stream.ends))
        return places[:-1], places[1:] + 1  # from one <eos> to the next

    @property
    def chosen_on(self) -> str:
        return "validation" if ("validation", "") in self.files else "test"

    def count(self) -> dict[str, Any]:
        counts = {part: file.counts for part, file in self.files.items()}
        train, validation = counts["train", ""], counts.get(("validation", ""), {})
        tests = {
            name: {"rows": test["documents"], "tokens": test["tokens"], "unknown_tokens": test["unknown"]}
            for (split, name), test in counts.items()
            if split == "test"
        }
        return {
            "train": train["documents"],
            "validation": validation.get("documents", 0),
            "removed_from_train": train["removed"],
            "test": sum(test["rows"] for test in tests.values()),
            "test_in_train": train["leaked"],
            "tests": tests,
            "train_tokens": self.train_tokens,
            "evaluated_tokens": {split: rows.windows.tokens for (split, _), rows in self.monitored.items()},
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": 0,
        }

    def examples(self) -> list[Example]:
        """Return the beginning of the first text of the part that selects the checkpoint."""
        first = next(file for (split, _), file in self.files.items() if split == self.chosen_on)
        return [self.example(first[torch.arange(1, min(17, len(first)))])]

    def unknown_rates(self) -> dict[Part, float]:
        texts = {part: file for part, file in self.files.items() if part[0] != "train"}
        return {part: file.counts["unknown"] / (len(file) - 1) for part, file in texts.items()}

    def corpus_line(self) -> str:
        corpus, counts = self.corpus, self.counts
        held = f", selects on {counts['validation']:,}" if counts["validation"] else ""
        return (
            f"Corpus {corpus.name} ({corpus.where}): trains on {counts['train']:,} documents of "
            f"{counts['train_tokens']:,} tokens{held}, tests on {counts['test']:,}, of which "
            f"{counts['test_in_train']:,} appear verbatim in the training set."
        )

    def train_dataloader(self) -> WindowBatches:
        return WindowBatches(self.stream, self.block_size + 1, self.batch_size, self.seed, self.shard)
