"""The LightningDataModule of pairs of sentences: subwords, ragged in memory; a batch is padded to its max_length.

    source    ids and <eos>, padded with 0, [B, S]
    target    <bos>, ids and <eos>, padded with 0, [B, T + 1]; all but the last go in, all but the first come out

Training batches hold pairs of like length and a bounded number of tokens (`TokenBatches`), or a fixed number of pairs
in random order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechformer.corpora.pairs import Pair, Pairs
from speechformer.corpora.special_tokens import BEGIN, END, PAD, UNKNOWN
from speechformer.corpora.subwords import Subwords, fitted
from speechformer.data.batches import Batch, Example, SeededBatches
from speechformer.errors import UserError
from speechformer.metrics.bleu import LENGTHS, bucket, measured

TOKENS_A_BATCH = 4096  # of an evaluation batch, on either side
SORTED_TOGETHER = 8  # batches of one bucket


def padded(sequences: Sequence[Tensor]) -> Tensor:
    """Sequences as one tensor, padded with 0 to the max_length."""
    return pad_sequence(list(sequences), batch_first=True, padding_value=PAD)


class PairBatches(SeededBatches):
    """Pairs in random order, a fixed number to a batch; the last batch may be smaller.

    Args:
        source, target: a tensor of ids for each pair.
        size: pairs of a batch.
    """

    def __init__(
        self, source: list[Tensor], target: list[Tensor], size: int, seed: int, share: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(seed, share)
        self.source, self.target, self.size = source, target, size

    def __len__(self) -> int:
        return -(-len(self.source) // self.size)

    def order(self, epoch: int) -> Sequence[Tensor]:
        return torch.randperm(len(self.source), generator=self.generator(epoch)).split(self.size)

    def batch(self, chosen: Tensor) -> Batch:
        pairs = chosen.tolist()
        return {
            "source": padded([self.source[index] for index in pairs]),
            "target": padded([self.target[index] for index in pairs]),
        }

    def weight(self, chosen: Tensor) -> int:
        """The target tokens that are predicted."""
        return sum(len(self.target[index]) - 1 for index in chosen.tolist())

    def padding(self) -> dict[str, float]:
        """The share of padding on each side in the first epoch's batches."""
        batches = self.order(0)
        shares = {}
        for name, side, shorter in (("source", self.source, 0), ("target", self.target, 1)):
            lengths = torch.tensor([len(ids) - shorter for ids in side])
            computed = sum(len(chosen) * int(lengths[chosen].max()) for chosen in batches)
            shares[name] = 1 - int(lengths.sum()) / computed
        return shares


class TokenBatches(PairBatches):
    """Batches of pairs of like length, in random order, with at most `tokens` tokens on either side, padding too.

    Pairs fall into buckets by their longer side. Each epoch a bucket is shuffled, sorted by both sides within every
    `SORTED_TOGETHER` batches, and cut; what is left over of a bucket goes on with the next longer one. So the number
    of batches is the same in every epoch. A pair of more tokens than that is a batch alone.
    """

    def __init__(
        self, source: list[Tensor], target: list[Tensor], tokens: int, seed: int, share: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(source, target, 1, seed, share)
        self.lengths = torch.tensor([(len(a), len(b) - 1) for a, b in zip(source, target)])
        longer = self.lengths.max(dim=1).values
        edges = [8]
        while edges[-1] < int(longer.max()):
            edges.append(max(edges[-1] + 2, int(edges[-1] * 1.1)))
        self.bucket = torch.bucketize(longer, torch.tensor(edges))
        self.counts = torch.bincount(self.bucket, minlength=len(edges)).tolist()
        self.sizes = [max(1, tokens // edge) for edge in edges]
        self.number, left = 0, 0
        for count, size in zip(self.counts, self.sizes):
            full, left = divmod(count + left, size)
            self.number += full
        self.number += left > 0

    def __len__(self) -> int:
        return self.number

    def order(self, epoch: int) -> Sequence[Tensor]:
        generator = self.generator(epoch)
        order = torch.randperm(len(self.bucket), generator=generator)
        order = order[self.bucket[order].argsort(stable=True)]
        found: list[Tensor] = []
        left = order[:0]
        for members, size in zip(order.split(self.counts), self.sizes):
            members = torch.cat((left, members))
            full = len(members) // size * size
            for together in members[:full].split(size * SORTED_TOGETHER) if full else ():
                found += together[self.lengths[together].sum(dim=1).argsort(stable=True)].split(size)
            left = members[full:]
        if len(left):
            found.append(left)
        return [found[index] for index in torch.randperm(len(found), generator=generator).tolist()]


class PairEvaluation:
    """All pairs of some parts, each once, by length; a batch carries its part and its pairs' indices there."""

    def __init__(self, parts: Mapping[str, tuple[list[Tensor], list[Tensor]]]) -> None:
        self.parts = [
            {
                "part": part,
                "rows": rows,
                "source": padded([source[k] for k in rows]),
                "target": padded([target[k] for k in rows]),
            }
            for part, (source, target) in parts.items()
            for rows in self.cut([max(len(a), len(b)) for a, b in zip(source, target)])
        ]

    @staticmethod
    def cut(lengths: list[int]) -> Iterator[list[int]]:
        rows: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if rows and (len(rows) + 1) * lengths[index] > TOKENS_A_BATCH:
                yield rows
                rows = []
            rows.append(index)
        yield rows

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.parts)


class PairData(pl.LightningDataModule):
    """A parallel corpus, tokenized.

    Args:
        corpus: what `load_pairs` read.
        task: the config group: `tokens` ("bpe" or "words") and `size` of the vocabulary; `batch_tokens`, or None for
            batches of `batch_size` pairs.
        protocol: the config group; `remove_test_sentences` takes pairs out of train whose source stands in test. The
            rest is for corpora without a dev part.
        block_size: a pair of train with more tokens on a side is left out, and counted.
        vocab_size: rows of the embedding table, at least the vocabulary; None for exactly the vocabulary.
        tokenizer: one that is already fitted; None fits it, on train alone.

    Attributes: `chosen_on`, the part that chooses the best checkpoint; `tokenizer`, `vocab_size`, `description` (for
    the result), `texts` (the pairs of dev and test as text).
    """

    chosen_on = "validation"

    def __init__(
        self,
        corpus: Pairs,
        *,
        task: Mapping[str, Any],
        protocol: Mapping[str, Any],
        block_size: int,
        batch_size: int,
        vocab_size: int | None,
        seed: int,
        tokenizer: Subwords | None = None,
    ) -> None:
        super().__init__()
        self.corpus, self.task, self.batch_size, self.seed = corpus, dict(task), batch_size, seed
        tested = {source for source, _ in corpus.test}
        kept = [pair for pair in corpus.train if not (protocol["remove_test_sentences"] and pair[0] in tested)]
        self.tokenizer = tokenizer or fitted(
            tuple(text for pair in kept for text in pair), task["tokens"], task["vocab_size"]
        )
        self.vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        if self.vocab_size < len(self.tokenizer):
            raise UserError(
                f"vocab_size={vocab_size} is less than the {len(self.tokenizer)} tokens of the vocabulary; it pads "
                "the embedding table, so set it at least as large, or to null."
            )
        source, target = self.encode(kept)
        fits = [max(len(a), len(b) - 1) <= block_size for a, b in zip(source, target)]
        self.train = (
            [side for side, fit in zip(source, fits) if fit],
            [side for side, fit in zip(target, fits) if fit],
        )
        if not self.train[0]:
            raise UserError(f"No pair of train has at most block_size={block_size} tokens on each side.")
        self.texts = {"validation": corpus.dev, "test": corpus.test}
        self.held = {part: self.encode(pairs) for part, pairs in self.texts.items()}
        trained = {pair[0] for pair, fit in zip(kept, fits) if fit}
        tokens = [sum(map(len, side)) for side in self.train]
        unknown = [int((torch.cat(side) == UNKNOWN).sum()) for side in self.held["test"]]
        lengths = Counter(bucket(source) for source, _ in corpus.test)
        self.counts: dict[str, Any] = {
            "read": corpus.read,
            "cleaned": corpus.cleaned,
            "removed_from_train": len(corpus.train) - len(kept),
            "longer_than_block_size": fits.count(False),
            "train": len(self.train[0]),
            "validation": len(corpus.dev),
            "test": len(corpus.test),
            "test_in_train": sum(source in trained for source, _ in corpus.test),
            "test_by_length": {name: lengths[name] for name in LENGTHS},
            "train_tokens": tokens[0] + tokens[1] - len(self.train[1]),
            "test_unknown_tokens": dict(zip(("source", "target"), unknown)),
            "cut_at_block_size": 0,
            "vocabulary": len(self.tokenizer),
            "padding": self.train_dataloader().padding(),
        }

    def encode(self, pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
        """The ids of both sides."""
        sources, targets = (self.tokenizer.encode_all(side) for side in zip(*pairs))
        return [torch.tensor([*ids, END]) for ids in sources], [torch.tensor([BEGIN, *ids, END]) for ids in targets]

    def extend_to(self, max_length: int | None) -> None:
        """Cut what is held out where the model's positions end, and count it; None for no end."""
        if max_length is None:
            return
        for part, (source, target) in self.held.items():
            self.counts["cut_at_block_size"] += sum(len(ids) > max_length for ids in source)
            self.held[part] = [ids[:max_length] for ids in source], [ids[: max_length + 1] for ids in target]

    @property
    def description(self) -> dict[str, Any]:
        """The corpus as a result names it, as plain data."""
        corpus = self.corpus
        about = {"name": corpus.name, "where": corpus.where, "sha256": corpus.sha256}
        return {**about, "classes": [], "languages": [corpus.source, corpus.target], "counts": self.counts}

    def examples(self) -> list[Example]:
        """The first pair of dev that is neither short nor long."""
        source, target = self.held["validation"]
        fit = [k for k, ids in enumerate(source) if 8 <= len(ids) <= 20 and len(target[k]) <= 24] or [0]
        words = [self.tokenizer.tokens(ids.tolist()) for ids in (source[fit[0]], target[fit[0]])]
        return [Example([source[fit[0]], target[fit[0]][:-1]], [words[0], words[1][:-1], words[1][1:]])]

    def reference_figures(self) -> dict[str, float | None]:
        """What needs no model: the test's sources, untranslated, scored as translations."""
        sources, references = zip(*self.corpus.test)
        floor = measured(sources, references, resamples=0)
        return {"copy_bleu": floor["bleu"], "copy_chrf": floor["chrf"]}

    def train_dataloader(self) -> PairBatches:
        share = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        if self.task["batch_tokens"] is None:
            return PairBatches(*self.train, self.batch_size, self.seed, share)
        return TokenBatches(*self.train, self.task["batch_tokens"], self.seed, share)

    def val_dataloader(self) -> PairEvaluation:
        """What is looked at during training: dev."""
        return PairEvaluation({"validation": self.held["validation"]})

    def test_dataloader(self) -> PairEvaluation:
        """What is measured at the end: dev again, with the weights that were chosen, and test."""
        return PairEvaluation(self.held)
