"""The data of `task=lm` on documents: token files, of which a batch reads what it needs, so that any text will do.

The first run tokenizes the text, into files in the user's cache folder. Later runs, and other processes, map them into
memory. Evaluation during training reads a fixed sample, so the text may have any size.

Shapes: see `batches`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speechformer.corpora.documents import Documents
from speechformer.corpora.special_tokens import END, UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.data.batches import Part, Stream
from speechformer.data.speeches import DEFAULTS, StreamData, TextSize, check_length
from speechformer.data.token_files import TokenFiles
from speechformer.errors import UserError


class DocumentData(StreamData):
    """Documents. `StreamData` and `TaskData` describe the rest.

    Of the protocol, `validation` holds out that share of the documents of train, unless the corpus has a validation
    text; `remove_test_sentences` removes documents of train that are in a test text.
    """

    has_folds = False
    sampled = ("train", "validation")
    long_stream = 0
    corpus: Documents
    tokenizer: Subwords

    def split(self) -> None:
        if self.task.get("extra_text"):
            raise UserError(f"task.extra_text needs labelled sentences, and corpus={self.corpus.name} has none.")
        self.task = DEFAULTS | self.task
        share = 0.0 if "validation" in self.corpus.parts else self.protocol["validation"]
        self.files = TokenFiles(self.corpus, share, bool(self.protocol["remove_test_sentences"]))

    def fit_tokenizer(self) -> Subwords:
        return self.files.tokenizer(*(self.task[key] for key in ("tokens", "vocab_size", "min_count")))

    def encode_texts(self) -> dict[Part, tuple[Stream, TextSize]]:
        streams, self.text_counts = self.files.open(self.tokenizer)
        texts: dict[Part, tuple[Stream, TextSize]] = {}
        for name, counts in self.text_counts.items():
            if not counts["documents"]:
                raise UserError(
                    f"{self.corpus.where}: {name} has no document. Name the text between documents with "
                    "corpus.separator, add validation_LM.txt, or choose the checkpoint on test with "
                    "protocol.validation=0."
                )
            check_length(len(streams[name]), name, self.block_size + 1 if name == "train" else 3)
            size = TextSize(len(streams[name]) - 1, counts["bytes"], counts["words"])
            is_test = name.startswith("test_")
            texts[("test", name.removeprefix("test_")) if is_test else (name, "")] = streams[name], size
        return dict(sorted(texts.items(), key=lambda text: ("train", "validation", "test").index(text[0][0])))

    def segments(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if self.task["documents"] == "joined":
            return super().segments(stream)
        pieces = stream.split(1 << 24)  # so that little memory is needed
        ends = torch.cat([(ids == END).nonzero().flatten() + (k << 24) for k, ids in enumerate(pieces)])
        return ends[:-1], ends[1:] + 1  # from one <eos> to the next

    def count(self) -> dict[str, Any]:
        documents = {part: counts["documents"] for part, counts in self.text_counts.items()}
        tests = {}
        for name in self.corpus.tests:
            stream = self.streams["test", name]
            unknown = int((stream == UNKNOWN).sum())
            tests[name] = {"rows": documents[f"test_{name}"], "tokens": len(stream), "unknown_tokens": unknown}
        return {
            "train": documents["train"],
            "validation": documents.get("validation", 0),
            "removed_from_train": self.text_counts["train"]["removed"],
            "test": sum(test["rows"] for test in tests.values()),
            "test_in_train": self.text_counts["train"]["leaked"],
            "tests": tests,
            "train_tokens": self.train_tokens,
            "evaluated_tokens": {split: windows.tokens for (split, _), windows in self.monitored.items()},
            "vocabulary": len(self.tokenizer),
            "cut_at_block_size": 0,
        }

    def corpus_line(self) -> str:
        corpus, counts = self.corpus, self.counts
        held = f", selects on {counts['validation']:,}" if counts["validation"] else ""
        return (
            f"Corpus {corpus.name} ({corpus.where}): trains on {counts['train']:,} documents of "
            f"{counts['train_tokens']:,} tokens{held}, tests on {counts['test']:,}, of which "
            f"{counts['test_in_train']:,} appear verbatim in the training set."
        )
