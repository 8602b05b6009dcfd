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
from speechformer.data.batches import Example, StreamRows, WindowBatches, Windows, sample_blocks
from speechformer.data.speeches import StreamData, TextSize, check_length
from speechformer.data.token_cache import TokenCache
from speechformer.data.token_file import TokenFile
from speechformer.errors import UserError


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest, and `TokenCache` what the protocol does.

    Attributes:
        files: the token file of each part: ("train", ""), ("validation", ""), ("test", NAME).
    """

    has_folds = False
    corpus: Documents

    def split(self) -> None:
        if self.task.get("extra_text"):
            raise UserError(f"task.extra_text needs labelled sentences, and corpus={self.corpus.name} has none.")
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
        self.check_split()
        for (split, name), file in self.files.items():
            least = self.block_size + 1 if split == "train" else 3  # of which two are <eos>
            check_length(len(file), f"test_LM_{name}.txt" if name else split, least)
        self.stream = self.files["train", ""]
        self.monitored, self.tested, self.longer_contexts, self.text_sizes = {}, {}, {}, {}
        for (split, name), file in self.files.items():
            if split != "test":
                blocks = sample_blocks(*self.segments(file), self.block_size, self.task["evaluation_tokens"])
                self.monitored[split, name] = StreamRows(file, blocks)
                continue
            self.tested["test", name] = self.cover(file, self.block_size, self.block_size)
            self.tested["test_sliding", name] = self.cover(file, self.block_size, stride)
            for length in self.task["lengths"]:
                self.longer_contexts[f"test_length_{length}", name] = self.cover(file, length, length)
            self.text_sizes[name] = TextSize(len(file) - 1, file.counts["bytes"], file.counts["words"])

    def check_split(self) -> None:
        """Require documents on both sides, if some are held out."""
        counts = {split: file.counts["documents"] for (split, _), file in self.files.items()}
        if self.cache.share and not (counts["train"] and counts["validation"]):
            raise UserError(
                f"{self.corpus.where}: {counts['train']} documents are left to train and {counts['validation']} are "
                "held out, and both need some. Name the text between documents with corpus.separator, add "
                "validation_LM.txt, or choose the checkpoint on test with protocol.validation=0."
            )

    def segments(self, file: TokenFile) -> tuple[Tensor, Tensor]:
        """Return where what is evaluated by itself begins and ends: all of a text, or each document of it."""
        if self.task["documents"] == "joined":
            return torch.tensor([0]), torch.tensor([len(file)])
        places = torch.from_numpy(np.array(file.ends))
        return places[:-1], places[1:] + 1  # from one <eos> to the next

    def cover(self, file: TokenFile, length: int, stride: int) -> StreamRows:
        """Return the windows that evaluate a text."""
        return StreamRows(file, Windows.cover(*self.segments(file), length, stride))

    @property
    def chosen_on(self) -> str:
        return "validation" if ("validation", "") in self.files else "test"

    def count(self) -> dict[str, Any]:
        tests = {}
        for name in self.corpus.tests:
            own = self.files["test", name].counts
            tests[name] = {"rows": own["documents"], "tokens": own["tokens"], "unknown_tokens": own["unknown"]}
        held = self.files.get(("validation", ""))
        evaluated = {split: rows.windows.tokens for (split, _), rows in self.monitored.items()}
        train = self.files["train", ""].counts
        return {
            "train": train["documents"],
            "validation": held.counts["documents"] if held else 0,
            "removed_from_train": train["removed"],
            "test": sum(test["rows"] for test in tests.values()),
            "test_in_train": train["leaked"],
            "tests": tests,
            "train_tokens": len(self.files["train", ""]) - 1,
            "evaluated_tokens": evaluated,
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": 0,
        }

    def examples(self) -> list[Example]:
        """Return the beginning of the first text of the part that selects the checkpoint."""
        first = next(file for (split, _), file in self.files.items() if split == self.chosen_on)
        ids = first[torch.arange(1, min(17, len(first)))]
        return [Example([ids], [self.tokenizer.tokens(ids.tolist())])]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return the fraction of unknown tokens in the validation text and in each test."""
        rates: dict[str, float] = {}
        for (split, name), file in self.files.items():
            if split != "train":
                rate = file.counts["unknown"] / (len(file) - 1)
                rates["_".join(filter(None, (split, "unknown_rate", name)))] = rate
        tests = [rates[f"test_unknown_rate_{name}"] for name in self.corpus.tests]
        return {**rates, "test_unknown_rate_mean": sum(tests) / len(tests)}

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
