"""The data of translation: pairs of sentences as subwords, ragged in memory; a batch is padded to its longest pair.

    source    ids and <eos>, padded with 0, [B, S]
    target    <bos>, ids and <eos>, padded with 0, [B, T + 1]; all but the last are inputs, all but the first targets

Training batches hold pairs of similar length and a bounded number of tokens (`TokenBatches`), or a fixed number of
pairs in random order (`PairBatches`).
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechformer.corpora.pairs import Pair, Pairs
from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.corpora.subwords import BPEDropout, Subwords
from speechformer.data.base import TaskData
from speechformer.data.batches import EVALUATION_TOKENS, Batch, EvaluationBatches, Example, Rows, SeededBatches
from speechformer.errors import UserError
from speechformer.metrics.bleu import LENGTHS, length_bucket, score

SORTED_BATCHES = 8  # of one bucket, whose pairs are sorted together
PairIds = tuple[Tensor, Tensor]  # of source and target


def pad_pairs(pairs: Sequence[PairIds]) -> Rows:
    """Return pairs as a batch, each side padded to its longest."""
    source, target = (pad_sequence(list(side), batch_first=True, padding_value=PAD) for side in zip(*pairs))
    return {"source": source, "target": target}


def pair_ids(source: Sequence[int], target: Sequence[int]) -> PairIds:
    """Return the ids of two texts as a pair."""
    return torch.tensor([*source, END]), torch.tensor([BEGIN, *target, END])


def longer_side(pair: PairIds) -> int:
    """Return the number of positions that a pair takes: of its source, or of the inputs of its target."""
    return max(len(pair[0]), len(pair[1]) - 1)


class PairBatches(SeededBatches):
    """Batches of `size` pairs.

    Attributes:
        resegment: returns other ids of a pair, from its epoch and index, with `task.bpe_dropout`.
    """

    resegment: Callable[[int, int], PairIds] | None = None

    def __init__(self, pairs: Sequence[PairIds], size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(len(pairs), size, seed, shard)
        self.pairs = pairs

    def batch(self, chosen: Tensor) -> Batch:
        resegment = self.resegment
        return pad_pairs([resegment(self.epoch, k) if resegment else self.pairs[k] for k in chosen.tolist()])

    def weight(self, batch: Batch) -> int:
        """Return the number of target tokens that are predicted."""
        return int((batch["target"][:, 1:] != PAD).sum())


class TokenBatches(PairBatches):
    """Batches of pairs of similar length in random order, with at most `size` tokens per side, padding included.

    Pairs fall into buckets by their longer side. In each epoch a bucket is shuffled, sorted by length within every
    `SORTED_BATCHES` batches, and cut into batches. The rest of a bucket joins the next longer one, so every epoch has
    the same number of batches. A pair longer than `size` is a batch of its own.
    """

    @functools.cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each pair, [N]."""
        return torch.tensor([len(source) + len(target) - 1 for source, target in self.pairs])

    @functools.cached_property
    def buckets(self) -> tuple[Tensor, list[int]]:
        """The bucket of each pair, [N], and the number of pairs of a batch of each bucket."""
        longer, edges = torch.tensor([longer_side(pair) for pair in self.pairs]), [8]
        while edges[-1] < int(longer.max()):
            edges.append(max(edges[-1] + 2, int(edges[-1] * 1.1)))
        return torch.bucketize(longer, torch.tensor(edges)), [max(1, self.size // edge) for edge in edges]

    @functools.cached_property
    def number(self) -> int:
        """The number of batches of any epoch."""
        return len(self.order(0))

    def __len__(self) -> int:
        return self.number

    def order(self, epoch: int) -> list[Tensor]:
        generator, (bucket, sizes) = self.generator(epoch), self.buckets
        order = torch.randperm(self.N, generator=generator)
        order = order[bucket[order].argsort(stable=True)]
        batches, rest = list[Tensor](), order[:0]
        for members, size in zip(order.split(bucket.bincount(minlength=len(sizes)).tolist()), sizes):
            members = torch.cat((rest, members))
            full = len(members) // size * size
            for together in members[:full].split(size * SORTED_BATCHES) if full else ():
                batches += together[self.lengths[together].argsort(stable=True)].split(size)
            rest = members[full:]
        batches += [rest] if len(rest) else []
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def evaluation_batches(pairs: Sequence[PairIds]) -> list[Batch]:
    """Return the pairs, sorted by length, in batches of at most `EVALUATION_TOKENS`; `rows` has their indices."""
    lengths = [max(map(len, pair)) for pair in pairs]
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > EVALUATION_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return [{"rows": rows, **pad_pairs([pairs[row] for row in rows])} for rows in batches]


class PairData(TaskData):
    """A parallel corpus. `TaskData` documents the arguments.

    The task's config adds `tokens` ("bpe" or "words") and `vocab_size` of the vocabulary, which is fitted on train,
    and `batch_tokens`; None: batches of `batch_size` pairs. `bpe_dropout` segments the training pairs anew in each
    epoch; batches are made, and limits of length hold, for their usual segmentation. Of the protocol,
    `remove_test_sentences` removes training and validation pairs that share their source or their reference with a
    test pair. Training pairs longer than `block_size` are left out, and counted.

    Attributes:
        training_pairs: the pairs of train as text that the protocol leaves.
        texts: the pairs of "validation" and "test" as text.
        held_out: their ids.
        train: the ids of the training pairs.
        trained_texts: the training pairs as text.
    """

    corpus: Pairs
    tokenizer: Subwords
    chosen_on = "validation"
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
        texts = [text for pair in self.training_pairs for text in pair]
        return Subwords.fit(texts, self.task["tokens"], self.task["vocab_size"])

    def encode(self) -> None:
        encoded = zip(self.encode_pairs(self.training_pairs), self.training_pairs)
        fitting = [(ids, text) for ids, text in encoded if longer_side(ids) <= self.block_size]
        if not fitting:
            raise UserError(f"No training pair has at most block_size={self.block_size} tokens on each side.")
        self.train, self.trained_texts = map(list, zip(*fitting))
        self.held_out = {part: self.encode_pairs(pairs) for part, pairs in self.texts.items()}
        if rate := self.task["bpe_dropout"]:
            if self.task["tokens"] != "bpe":
                raise UserError(f"task.bpe_dropout needs task.tokens=bpe: {self.task['tokens']} are not merged.")
            self.bpe_dropout = BPEDropout(self.tokenizer, rate)

    def encode_pairs(self, pairs: list[Pair]) -> list[PairIds]:
        """Return the ids of pairs."""
        sources, targets = (self.tokenizer.encode_all(side) for side in zip(*pairs))
        return list(map(pair_ids, sources, targets))

    def resegment(self, epoch: int, index: int) -> PairIds:
        """Return other ids of a training pair, by the epoch and the seed alone; the usual ones if they are too long.

        A rate of 0.1 adds a sixth to a quarter of tokens, and batches grow by as much.
        """
        assert self.bpe_dropout is not None
        generator = random.Random(f"{self.seed} {epoch} {index}")
        pair = pair_ids(*(self.bpe_dropout.encode(text, generator) for text in self.trained_texts[index]))
        return pair if longer_side(pair) <= self.block_size else self.train[index]

    def count(self) -> dict[str, Any]:
        corpus, trained = self.corpus, {source for source, _ in self.trained_texts}
        lengths = Counter(length_bucket(source) for source, _ in corpus.test)
        return {
            "read": corpus.read,
            "cleaned": corpus.cleaned,
            "removed_from_train": len(corpus.train) - len(self.training_pairs),
            "removed_from_validation": len(corpus.dev) - len(self.texts["validation"]),
            "longer_than_block_size": len(self.training_pairs) - len(self.train),
            "train": len(self.train),
            "validation": len(self.texts["validation"]),
            "test": len(corpus.test),
            "test_in_train": sum(source in trained for source, _ in corpus.test),
            "test_by_length": {name: lengths[name] for name in LENGTHS},
            "train_tokens": sum(len(source) + len(target) - 1 for source, target in self.train),
            "cut_at_block_size": 0,
            "vocabulary": len(self.tokenizer),
        }

    def limit_length(self, max_length: int | None) -> None:
        """Cut held-out pairs at `max_length` tokens, and count them; None: no limit."""
        if max_length is None:
            return
        for part, pairs in self.held_out.items():
            self.counts["cut_at_block_size"] += sum(len(source) > max_length for source, _ in pairs)
            self.held_out[part] = [(source[:max_length], target[: max_length + 1]) for source, target in pairs]

    @property
    def description(self) -> dict[str, Any]:
        return super().description | {"languages": [self.corpus.source, self.corpus.target]}

    def examples(self) -> list[Example]:
        """Return the first validation pair."""
        source, target = self.held_out["validation"][0]
        read, written = (self.tokenizer.tokens(ids.tolist()) for ids in (source, target))
        return [Example([source, target[:-1]], [read, written[:-1], written[1:]])]

    def reference_metrics(self) -> dict[str, float | None]:
        """Return BLEU and chrF of the untranslated test sources."""
        sources, references = zip(*self.corpus.test)
        copy = score(sources, references, resamples=0)
        return {"copy_bleu": copy["bleu"], "copy_chrf": copy["chrf"]}

    def train_dataloader(self) -> PairBatches:
        tokens = self.task["batch_tokens"]
        batch_class = TokenBatches if tokens else PairBatches
        batches = batch_class(self.train, tokens or self.batch_size, self.seed, self.shard)
        batches.resegment = self.resegment if self.bpe_dropout else None
        return batches

    def val_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches({"validation": evaluation_batches(self.held_out["validation"])})

    def test_dataloader(self) -> EvaluationBatches:
        return EvaluationBatches({part: evaluation_batches(pairs) for part, pairs in self.held_out.items()})
