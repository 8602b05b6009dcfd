"""Batches of pairs: each pair once, of like length, bounded, in an order that is known; and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import group

from speechformer.corpora.pairs import Pair, load_pairs
from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.data.pairs import PairBatches, PairData, TokenBatches
from speechformer.errors import UserError


def ragged(count: int = 700) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (count, 2), generator=generator).tolist()
    return [(torch.full((a,), k % 900 + 4), torch.full((b + 1,), k % 900 + 4)) for k, (a, b) in enumerate(lengths)]


def make(root: Path, *, protocol: str = "paper", **changes: Any) -> PairData:
    corpus = load_pairs({**group("corpus", "ted"), "root": str(root)})
    task = {**group("task", "translate"), "vocab_size": 50, **changes.pop("task", {})}
    sizes = {"block_size": 200, "batch_size": 8, "vocab_size": None, "seed": 0, **changes}
    return PairData(corpus, task=task, protocol=group("protocol", protocol), **sizes)


@pytest.mark.parametrize("tokens", [64, 2000])
def test_token_batches_hold_each_pair_once_and_no_more_tokens_than_they_may(tokens: int) -> None:
    pairs = ragged()
    batches = TokenBatches(pairs, tokens, seed=1)
    for epoch in (0, 1, 5):
        chosen = batches.order(epoch)
        assert len(chosen) == len(batches)  # Lightning asks once
        assert sorted(torch.cat(chosen).tolist()) == list(range(len(pairs)))
    assert all(ids.numel() <= tokens for batch in batches for ids in (batch["source"], batch["target"][:, 1:]))
    pairs[7] = (torch.full((5000,), 5), pairs[7][1])  # longer than a batch may be
    assert [7] in [batch.tolist() for batch in TokenBatches(pairs, tokens, seed=1).order(0)]


def test_buckets_leave_less_padding_than_random_batches_of_as_many_pairs() -> None:
    pairs = ragged()
    buckets = TokenBatches(pairs, 600, seed=0)
    plain = PairBatches(pairs, len(pairs) // len(buckets), seed=0)

    def padding(batches: PairBatches) -> list[float]:
        rows = list(batches)
        sides = [torch.cat([batch[name].flatten() for batch in rows]) for name in ("source", "target")]
        return [(ids == PAD).double().mean().item() for ids in sides]

    assert max(padding(buckets)) < 0.35 < min(padding(plain))


@pytest.mark.parametrize("kind", [TokenBatches, PairBatches])
def test_the_order_is_a_function_of_seed_and_epoch_and_goes_on_where_it_stood(kind: Any) -> None:
    def rows(batches: PairBatches) -> list[list[int]]:
        return [batch["source"][:, 0].tolist() for batch in batches]

    pairs = ragged(200)
    first = kind(pairs, 100, seed=3)
    epochs = [rows(first), rows(first)]
    assert epochs[0] != epochs[1] and first.epoch == 2
    assert rows(kind(pairs, 100, seed=3)) == epochs[0] != rows(kind(pairs, 100, seed=4))
    stopped = kind(pairs, 100, seed=3)
    stopped.set_epoch(1)
    iterator = iter(stopped)
    next(iterator), next(iterator)
    again = kind(pairs, 100, seed=3)
    again.load_state_dict(stopped.state_dict())
    again.set_epoch(1)
    assert rows(again) == epochs[1][2:]


def test_shards_of_devices_are_the_whole_and_weigh_by_their_target_tokens() -> None:
    """Oracle: the mean over all tokens is the mean over devices of weight times the mean over a device's tokens."""
    pairs = ragged(100)
    whole = list(TokenBatches(pairs, 200, seed=0))
    shards = [list(TokenBatches(pairs, 200, seed=0, shard=(k, 3))) for k in range(3)]
    for batch, *parts in zip(whole, *shards):
        means = [part["target"][:, 1:][part["target"][:, 1:] != PAD].double().mean() for part in (batch, *parts)]
        total = sum(part["weight"] * float(mean) / 3 for part, mean in zip(parts, means[1:]))
        assert total == pytest.approx(float(means[0]))


def test_evaluation_has_each_pair_once_with_its_place(little_pairs: Path) -> None:
    data = make(little_pairs)
    assert 0 <= data.reference_metrics()["copy_bleu"] < 5 < data.reference_metrics()["copy_chrf"]  # type: ignore
    places: dict[str, list[int]] = {"validation": [], "test": []}
    for batch in (*data.val_dataloader(), *data.test_dataloader()):
        places[batch["part"]] += batch["rows"]
        for row, source, target in zip(batch["rows"], batch["source"], batch["target"]):
            text, reference = data.texts[batch["part"]][row]
            assert source[source != PAD].tolist() == [*data.tokenizer.encode(text), END]
            assert target[target != PAD].tolist() == [BEGIN, *data.tokenizer.encode(reference), END]
    assert sorted(places["test"]) == list(range(12))  # of the end alone, and validation of training, too
    assert sorted(places["validation"]) == sorted(2 * list(range(12)))


def lines_of(folder: Path, part: str) -> list[Pair]:
    sides = [(folder / f"{part}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "fr")]
    return list(zip(*sides))


def write(folder: Path, **parts: list[Pair]) -> Path:
    for part, pairs in parts.items():
        for language, lines in zip(("en", "fr"), zip(*pairs)):
            (folder / f"{part}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def test_clean_pairs_share_neither_source_nor_reference_with_test(little_pairs: Path, tmp_path: Path) -> None:
    """Oracle: the lines put into the files; a source of train that is a reference of test is no leak."""
    train, dev, test = (lines_of(little_pairs, part) for part in ("train", "dev", "test"))
    (source, reference), (other, other_reference), same = test[:3]
    leaks = [(source, f"{reference} bis"), (f"{other} again", other_reference), same]
    no_leak = (reference, source)
    root = write(tmp_path, train=[*train, *leaks, ("<url>", "<url>"), no_leak], dev=[*dev, *leaks], test=test)
    task = {"tokens": "words", "vocab_size": 5000}
    paper, clean = (make(root, protocol=protocol, task=task) for protocol in ("paper", "clean"))
    assert paper.training_pairs == [*train, *leaks, no_leak] and clean.training_pairs == [*train, no_leak]
    assert paper.texts == {"validation": [*dev, *leaks], "test": test}
    assert clean.texts == {"validation": dev, "test": test}
    names = ("read", "train", "test_in_train", "removed_from_train", "removed_from_validation", "validation", "test")
    assert [paper.counts[name] for name in names] == [205, 204, 2, 0, 0, 15, 12]
    assert [clean.counts[name] for name in names] == [205, 201, 0, 3, 3, 12, 12]
    vocabularies = [set(data.tokenizer.tokenizer.get_vocab()) for data in (paper, clean)]
    assert " bis" in vocabularies[0] and " bis" not in vocabularies[1]
    assert paper.counts["cleaned"]["markup"] == 1 and sum(paper.counts["test_by_length"].values()) == 12
    assert "train 201, validation 12, test 12, " in clean.corpus_line()
    for part in ("train", "dev"):
        with pytest.raises(UserError, match=f"every pair of {part} shares its source or reference with a pair of"):
            make(write(tmp_path, **{"train": train, "dev": dev, "test": test, part: test}), protocol="clean")


def test_what_is_too_long_is_left_out_of_train_and_cut_elsewhere(little_pairs: Path) -> None:
    data = make(little_pairs, block_size=20)
    assert max(len(a) for a, _ in data.train) <= 20 and max(len(b) for _, b in data.train) <= 21
    assert data.counts["longer_than_block_size"] == 200 - data.counts["train"] > 0
    long = sum(len(a) > 20 for pairs in data.held_out.values() for a, _ in pairs)
    data.limit_length(None)
    assert data.counts["cut_at_block_size"] == 0
    data.limit_length(20)
    assert data.counts["cut_at_block_size"] == long > 0
    assert max(len(a) for pairs in data.held_out.values() for a, _ in pairs) == 20
    assert max(len(b) for pairs in data.held_out.values() for _, b in pairs) == 21
    with pytest.raises(UserError, match=r"vocab_size=20 is less than the \d+ tokens"):
        make(little_pairs, vocab_size=20)
    with pytest.raises(UserError, match=r"No training pair has at most block_size=2 tokens"):
        make(little_pairs, block_size=2)
