"""The data of translation: pairs of sentences as subwords, ragged in memory; a batch is padded to its longest pair.

    source    ids and <eos>, padded with 0, [B, S]
    target    <bos>, ids and <eos>, padded with 0, [B, T + 1]; all but the last are inputs, all but the first targets

Training batches hold pairs of similar length and a bounded number of tokens (`TokenBatches`), or a fixed number of
pairs in random order (`PairBatches`).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechformer.corpora.bpe_dropout import BPEDropout
from speechformer.corpora.pairs import Pair
from speechformer.corpora.special_tokens import BEGIN, END, PAD, UNKNOWN
from speechformer.corpora.subwords import Subwords, fitted
from speechformer.data.base import TaskData
from speechformer.data.batches import EVALUATION_TOKENS, Batch, EvaluationBatches, Example, Rows, SeededBatches
from speechformer.errors import UserError
from speechformer.metrics.bleu import LENGTHS, length_bucket, score

SORTED_BATCHES = 8  # of one bucket, whose pairs are sorted together


def pad_pairs(source: Sequence[Tensor], target: Sequence[Tensor], rows: Sequence[int]) -> Rows:
    """Return the pairs with these indices, each side padded to its longest."""
    pad = functools.partial(pad_sequence, batch_first=True, padding_value=PAD)
    return {"source": pad([source[k] for k in rows]), "target": pad([target[k] for k in rows])}


class PairBatches(SeededBatches):
    """Batches of `size` pairs; `source` and `target` are the ids of each pair.

    Attributes:
        resegment: returns other ids of a pair, from its epoch and index; None without `task.bpe_dropout`.
    """

    resegment: Callable[[int, int], tuple[Tensor, Tensor]] | None = None

    def __init__(
        self, source: list[Tensor], target: list[Tensor], size: int, seed: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(len(source), size, seed, shard)
        self.source, self.target = source, target

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the ids of a pair in this epoch."""
        if self.resegment is None:
            return self.source[index], self.target[index]
        return self.resegment(self.epoch, index)

    def batch(self, chosen: Tensor) -> Batch:
        source, target = zip(*map(self.pair, chosen.tolist()))
        return pad_pairs(source, target, range(len(source)))

    def weight(self, chosen: Tensor) -> int:
        """Return the number of target tokens that are predicted."""
        return sum(len(self.pair(index)[1]) - 1 for index in chosen.tolist())

    def padding(self) -> dict[str, float]:
        """Return the fraction of padding on each side in the batches of the first epoch."""
        batches = self.order(0)
        fractions = {}
        for name, side, shorter in (("source", self.source, 0), ("target", self.target, 1)):
            lengths = torch.tensor([len(ids) - shorter for ids in side])
            computed = sum(len(chosen) * int(lengths[chosen].max()) for chosen in batches)
            fractions[name] = 1 - int(lengths.sum()) / computed
        return fractions


class TokenBatches(PairBatches):
    """Batches of pairs of similar length in random order, with at most `tokens` tokens per side, padding included.

    Pairs fall into buckets by their longer side. In each epoch a bucket is shuffled, sorted by length within every
    `SORTED_BATCHES` batches, and cut into batches. The rest of a bucket joins the next longer one, so every epoch has
    the same number of batches. A pair longer than `tokens` is a batch of its own.
    """

    def __init__(
        self, source: list[Tensor], target: list[Tensor], tokens: int, seed: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(source, target, 1, seed, shard)
        self.lengths = torch.tensor([(len(a), len(b) - 1) for a, b in zip(source, target)])
        longer = self.lengths.max(dim=1).values
        edges = [8]
        while edges[-1] < int(longer.max()):
            edges.append(max(edges[-1] + 2, int(edges[-1] * 1.1)))
        self.bucket = torch.bucketize(longer, torch.tensor(edges))
        self.counts = torch.bincount(self.bucket, minlength=len(edges)).tolist()
        self.sizes = [max(1, tokens // edge) for edge in edges]
        self.number = len(self.order(0))

    def __len__(self) -> int:
        return self.number

    def order(self, epoch: int) -> Sequence[Tensor]:
        generator = self.generator(epoch)
        order = torch.randperm(self.N, generator=generator)
        order = order[self.bucket[order].argsort(stable=True)]
        batches: list[Tensor] = []
        rest = order[:0]
        for members, size in zip(order.split(self.counts), self.sizes):
            members = torch.cat((rest, members))
            full = len(members) // size * size
            for together in members[:full].split(size * SORTED_BATCHES) if full else ():
                batches += together[self.lengths[together].sum(dim=1).argsort(stable=True)].split(size)
            rest = members[full:]
        batches += [rest] if len(rest) else []
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def evaluation_batches(source: list[Tensor], target: list[Tensor]) -> Iterator[Batch]:
    """Yield the pairs, sorted by length, in batches of at most `EVALUATION_TOKENS`; `rows` has their indices."""
    lengths = [max(len(a), len(b)) for a, b in zip(source, target)]
    rows: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if rows and (len(rows) + 1) * lengths[index] > EVALUATION_TOKENS:
            yield {"rows": rows, **pad_pairs(source, target, rows)}
            rows = []
        rows.append(index)
    yield {"rows": rows, **pad_pairs(source, target, rows)}


class PairData(TaskData):
    """A parallel corpus. `TaskData` documents the arguments.

    The task's config adds `tokens` ("bpe" or "words") and `vocab_size` of the vocabulary, which is fitted on train,
    and `batch_tokens`; None: batches of `batch_size` pairs. `bpe_dropout` segments the training pairs anew in each
    epoch; batches are made, and limits of length hold, for their usual segmentation. Of the protocol,
    `remove_test_sentences` removes training and validation pairs that share their source or their reference with a
    test pair. Training pairs longer than `block_size` are left out, and counted.

    Attributes:
        texts: the pairs of "validation" and "test" as text.
        held_out: their ids, sources and targets.
        train: the ids of the training pairs, sources and targets.
        trained_texts: the training pairs as text.
    """

    bpe_dropout: BPEDropout | None = None

    def split(self) -> None:
        remaining = {"train": self.corpus.train, "dev": self.corpus.dev}
        if self.protocol["remove_test_sentences"]:
            sources, references = map(set, zip(*self.corpus.test))
            for part, pairs in remaining.items():
                remaining[part] = [(a, b) for a, b in pairs if a not in sources and b not in references]
                if not remaining[part]:
                    raise UserError(
                        f"{self.corpus.where}: every pair of {part} shares its source or reference with a pair of "
                        "test, so protocol=clean removes it; use other files, or protocol=paper."
                    )
        self.training_pairs = remaining["train"]
        self.texts = {"validation": remaining["dev"], "test": self.corpus.test}

    def fit_tokenizer(self) -> Subwords:
        texts = tuple(text for pair in self.training_pairs for text in pair)
        return fitted(texts, self.task["tokens"], self.task["vocab_size"])

    def encode(self) -> None:
        source, target = self.encode_pairs(self.training_pairs)
        fits = [max(len(a), len(b) - 1) <= self.block_size for a, b in zip(source, target)]
        self.train = list(itertools.compress(source, fits)), list(itertools.compress(target, fits))
        self.trained_texts = list(itertools.compress(self.training_pairs, fits))
        if not self.train[0]:
            raise UserError(f"No training pair has at most block_size={self.block_size} tokens on each side.")
        self.held_out = {part: self.encode_pairs(pairs) for part, pairs in self.texts.items()}
        if rate := self.task.get("bpe_dropout"):  # configs of version 0.2 have none
            if self.task["tokens"] != "bpe":
                raise UserError(f"task.bpe_dropout needs task.tokens=bpe: {self.task['tokens']} are not merged.")
            self.bpe_dropout = BPEDropout(self.tokenizer, rate)

    def encode_pairs(self, pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the ids of both sides."""
        sources, targets = (self.tokenizer.encode_all(side) for side in zip(*pairs))
        return [torch.tensor([*ids, END]) for ids in sources], [torch.tensor([BEGIN, *ids, END]) for ids in targets]

    def resegment(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Return other ids of a training pair, by the epoch and the seed alone; the usual ones if they are too long.

        A rate of 0.1 adds a sixth to a quarter of tokens, and batches grow by as much.
        """
        assert self.bpe_dropout is not None
        generator = random.Random(f"{self.seed} {epoch} {index}")
        source, target = (self.bpe_dropout.encode(text, generator) for text in self.trained_texts[index])
        if max(len(source), len(target)) >= self.block_size:
            return self.train[0][index], self.train[1][index]
        return torch.tensor([*source, END]), torch.tensor([BEGIN, *target, END])

    def count(self) -> dict[str, Any]:
        corpus = self.corpus
        trained = {source for source, _ in self.trained_texts}
        tokens = [sum(map(len, side)) for side in self.train]
        unknown = [int((torch.cat(side) == UNKNOWN).sum()) for side in self.held_out["test"]]
        lengths = Counter(length_bucket(source) for source, _ in corpus.test)
        return {
            "read": corpus.read,
            "cleaned": corpus.cleaned,
            "removed_from_train": len(corpus.train) - len(self.training_pairs),
            "removed_from_validation": len(corpus.dev) - len(self.texts["validation"]),
            "longer_than_block_size": len(self.training_pairs) - len(self.trained_texts),
            "train": len(self.train[0]),
            "validation": len(self.texts["validation"]),
            "test": len(corpus.test),
            "test_in_train": sum(source in trained for source, _ in corpus.test),
            "test_by_length": {name: lengths[name] for name in LENGTHS},
            "train_tokens": tokens[0] + tokens[1] - len(self.train[1]),
            "test_unknown_tokens": dict(zip(("source", "target"), unknown)),
            "cut_at_block_size": 0,
            "vocabulary": len(self.tokenizer),
            "padding": self.train_dataloader().padding(),
        }

    def limit_length(self, max_length: int | None) -> None:
        """Cut held-out pairs at `max_length` tokens, and count them; None: no limit."""
        if max_length is None:
            return
        for part, (source, target) in self.held_out.items():
            self.counts["cut_at_block_size"] += sum(len(ids) > max_length for ids in source)
            self.held_out[part] = [ids[:max_length] for ids in source], [ids[: max_length + 1] for ids in target]

    @property
    def description(self) -> dict[str, Any]:
        return super().description | {"languages": [self.corpus.source, self.corpus.target]}

    def corpus_line(self) -> str:
        corpus, counts = self.corpus, self.counts
        reasons = {"test": counts["removed_from_train"], "block_size": counts["longer_than_block_size"]}
        left_out = ", ".join(f"{why} {n}" for why, n in {**counts["cleaned"], **reasons}.items() if n) or "none"
        padding = ", ".join(f"{100 * part:.1f} % of the {side}" for side, part in counts["padding"].items())
        cut, removed = counts["cut_at_block_size"], counts["removed_from_validation"]
        return (
            f"Corpus {corpus.name}, {corpus.source} to {corpus.target} ({corpus.where}): trains on {counts['train']} "
            f"of {counts['read']} pairs (left out: {left_out}), selects on {counts['validation']}"
            f"{f' (left out: test {removed})' if removed else ''}, tests on {counts['test']}, of whose sources "
            f"{counts['test_in_train']} appear in the training set{f'; block_size cuts {cut}' if cut else ''}. "
            f"Vocabulary {counts['vocabulary']}; padding: {padding}."
        )

    def examples(self) -> list[Example]:
        """Return the first validation pair that is neither short nor long."""
        source, target = self.held_out["validation"]
        suitable = (k for k, ids in enumerate(source) if 8 <= len(ids) <= 20 and len(target[k]) <= 24)
        k = next(suitable, 0)
        read, written = (self.tokenizer.tokens(ids.tolist()) for ids in (source[k], target[k]))
        return [Example([source[k], target[k][:-1]], [read, written[:-1], written[1:]])]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return BLEU and chrF of the untranslated test sources."""
        sources, references = zip(*self.corpus.test)
        copy = score(sources, references, resamples=0)
        return {"copy_bleu": copy["bleu"], "copy_chrf": copy["chrf"]}

    def train_dataloader(self) -> PairBatches:
        batches: PairBatches
        if self.task["batch_tokens"] is None:
            batches = PairBatches(*self.train, self.batch_size, self.seed, self.shard)
        else:
            batches = TokenBatches(*self.train, self.task["batch_tokens"], self.seed, self.shard)
        batches.resegment = self.resegment if self.bpe_dropout else None
        return batches

    def val_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches({"validation": [*evaluation_batches(*self.held_out["validation"])]})

    def test_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches({part: [*evaluation_batches(*pairs)] for part, pairs in self.held_out.items()})
