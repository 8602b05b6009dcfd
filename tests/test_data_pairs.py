"""Batches of pairs: each pair once, of like length, bounded, in an order that is known; and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import group

from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.data.pairs import PairBatches, PairData, PairEvaluation, TokenBatches
from speechformer.errors import UserError


def ragged(count: int = 700) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (count, 2), generator=generator).tolist()
    source = [torch.full((a,), k % 900 + 4) for k, (a, _) in enumerate(lengths)]
    target = [torch.full((b + 1,), k % 900 + 4) for k, (_, b) in enumerate(lengths)]
    return source, target


def make(root: Path, *, task: dict[str, Any] | None = None, **changes: Any) -> PairData:
    corpus = load_pairs({**group("corpus", "ted"), "root": str(root), **changes.pop("corpus", {})})
    arguments = {
        "protocol": group("protocol", "paper"),
        "block_size": 200,
        "batch_size": 8,
        "vocab_size": None,
        "seed": 0,
    }
    return PairData(
        corpus, task={**group("task", "translate"), "vocab_size": 50, **(task or {})}, **{**arguments, **changes}
    )


@pytest.mark.parametrize("tokens", [64, 300, 2000])
def test_token_batches_hold_each_pair_once_and_no_more_tokens_than_they_may(tokens: int) -> None:
    source, target = ragged()
    batches = TokenBatches(source, target, tokens, seed=1)
    for epoch in (0, 1, 5):
        chosen = batches.order(epoch)
        assert len(chosen) == len(batches)  # Lightning asks once
        assert sorted(torch.cat(chosen).tolist()) == list(range(len(source)))
    for batch in batches:
        for ids in (batch["source"], batch["target"][:, 1:]):
            assert ids.numel() <= tokens


def test_a_pair_longer_than_a_batch_is_one_alone() -> None:
    source, target = ragged(50)
    source[7] = torch.full((500,), 5)
    chosen = TokenBatches(source, target, 100, seed=0).order(0)
    assert [7] in [batch.tolist() for batch in chosen]


def test_buckets_leave_less_padding_than_random_batches_of_as_many_pairs() -> None:
    source, target = ragged()
    buckets = TokenBatches(source, target, 600, seed=0)
    plain = PairBatches(source, target, len(source) // len(buckets), seed=0)
    assert max(buckets.padding().values()) < 0.35 < min(plain.padding().values())


def test_the_share_of_padding_is_what_it_says() -> None:
    """Oracle: zeros counted in the batches themselves."""
    source, target = ragged(100)
    for batches in (TokenBatches(source, target, 300, seed=0), PairBatches(source, target, 8, seed=0)):
        said, counted = batches.padding(), list(batches)
        for name, first in (("source", 0), ("target", 1)):
            ids = [batch[name][:, first:] for batch in counted]
            share = sum(int((part == PAD).sum()) for part in ids) / sum(part.numel() for part in ids)
            assert said[name] == pytest.approx(share)


@pytest.mark.parametrize("kind", [TokenBatches, PairBatches])
def test_the_order_is_a_function_of_seed_and_epoch_and_goes_on_where_it_stood(kind: Any) -> None:
    def rows(batches: PairBatches) -> list[list[int]]:
        return [batch["source"][:, 0].tolist() for batch in batches]

    source, target = ragged(200)
    first = kind(source, target, 100, seed=3)
    epochs = [rows(first), rows(first)]
    assert epochs[0] != epochs[1] and first.epoch == 2
    assert rows(kind(source, target, 100, seed=3)) == epochs[0] != rows(kind(source, target, 100, seed=4))
    stopped = kind(source, target, 100, seed=3)
    stopped.set_epoch(1)
    iterator = iter(stopped)
    for _ in range(2):
        next(iterator)
    again = kind(source, target, 100, seed=3)
    again.load_state_dict(stopped.state_dict())
    again.set_epoch(1)
    assert rows(again) == epochs[1][2:]


@pytest.mark.parametrize("devices", [2, 3])
def test_shards_of_devices_are_the_whole_and_weigh_by_their_target_tokens(devices: int) -> None:
    """Oracle: the mean over all tokens is the mean over devices of weight times the mean over a device's tokens."""
    source, target = ragged(100)
    whole = list(TokenBatches(source, target, 200, seed=0))
    parts = [list(TokenBatches(source, target, 200, seed=0, shard=(k, devices))) for k in range(devices)]
    for index, batch in enumerate(whole):
        expected = batch["target"][:, 1:][batch["target"][:, 1:] != PAD].double().mean()
        total = 0.0
        for part in parts:
            own = part[index]["target"][:, 1:]
            total += part[index]["weight"] * float(own[own != PAD].double().mean()) / devices
        assert total == pytest.approx(float(expected))


def test_evaluation_has_each_pair_once_with_its_place(little_pairs: Path) -> None:
    data = make(little_pairs)
    batches = list(PairEvaluation(data.held_out))
    for part, pairs in data.texts.items():
        rows = [row for batch in batches if batch["part"] == part for row in batch["rows"]]
        assert sorted(rows) == list(range(len(pairs)))
    for batch in batches:
        for row, source, target in zip(batch["rows"], batch["source"], batch["target"]):
            assert data.tokenizer.decode(source.tolist()) == data.texts[batch["part"]][row][0]
            assert data.tokenizer.decode(target[1:].tolist()) == data.texts[batch["part"]][row][1]
            assert target[0] == BEGIN and END in source.tolist()


def test_the_vocabulary_is_of_train_alone(little_pairs: Path, tmp_path: Path) -> None:
    for file in little_pairs.iterdir():
        content = file.read_bytes() if file.name.startswith("train") else b"xyzzy plugh\n" * 3
        (tmp_path / file.name).write_bytes(content)
    own, other = make(little_pairs), make(tmp_path)
    assert own.tokenizer.tokenizer.to_str() == other.tokenizer.tokenizer.to_str()


def test_what_is_left_out_is_counted(little_pairs: Path, tmp_path: Path) -> None:
    for file in little_pairs.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    train = [(tmp_path / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "fr")]
    test = [(tmp_path / f"test.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "fr")]
    for side in range(2):  # two of test's sentences, and a tag
        lines = [*train[side], test[side][0], test[side][1], "<url>"]
        (tmp_path / f"train.{('en', 'fr')[side]}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    paper = make(tmp_path).counts
    assert (paper["read"], paper["cleaned"]["markup"]) == (203, 1)
    assert (paper["train"], paper["test_in_train"], paper["removed_from_train"]) == (202, 2, 0)
    clean = make(tmp_path, protocol=group("protocol", "clean")).counts
    assert (clean["train"], clean["test_in_train"], clean["removed_from_train"]) == (200, 0, 2)
    assert paper["removed_from_validation"] == clean["removed_from_validation"] == 0
    short = make(tmp_path, block_size=20).counts
    assert short["longer_than_block_size"] == 202 - short["train"] > 0
    assert sum(paper["test_by_length"].values()) == paper["test"] == 12


def test_clean_pairs_share_neither_source_nor_reference_with_test(little_pairs: Path, tmp_path: Path) -> None:
    """Oracle: the lines put into the files; a source of train that is a reference of test is no leak."""
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in little_pairs.iterdir()}
    source, target = lines["test.en"][:3], lines["test.fr"][:3]
    leaks = [(source[0], f"{target[0]} bis"), (f"{source[1]} again", target[1]), (source[2], target[2])]
    for part, more in (("train", [*leaks, (target[0], source[0])]), ("dev", leaks)):
        for side, language in enumerate(("en", "fr")):
            lines[f"{part}.{language}"] += [pair[side] for pair in more]
    for name, own in lines.items():
        (tmp_path / name).write_text("\n".join(own) + "\n", encoding="utf-8")
    paper, clean = (make(tmp_path, protocol=group("protocol", name)) for name in ("paper", "clean"))
    assert [paper.counts[f"removed_from_{part}"] for part in ("train", "validation")] == [0, 0]
    assert [clean.counts[f"removed_from_{part}"] for part in ("train", "validation")] == [3, 3]
    assert clean.training_pairs == paper.training_pairs[:-4] + paper.training_pairs[-1:]
    assert clean.texts == {"validation": paper.texts["validation"][:-3], "test": paper.texts["test"]}
    assert clean.counts["validation"] == len(clean.held_out["validation"][0]) == 12
    assert "selects on 12 (left out: test 3), tests on 12" in clean.corpus_line()
    assert "selects on 15, tests on 12" in paper.corpus_line()


@pytest.mark.parametrize("part", ["train", "dev"])
def test_clean_that_leaves_no_pair_is_an_error(part: str, little_pairs: Path, tmp_path: Path) -> None:
    for path in little_pairs.iterdir():
        own = little_pairs / path.name.replace(part, "test")
        (tmp_path / path.name).write_bytes(own.read_bytes())
    with pytest.raises(UserError, match=f"every pair of {part} shares its source or reference with a pair of test"):
        make(tmp_path, protocol=group("protocol", "clean"))


def test_of_the_ted_pairs_clean_removes_these(ted_pairs: Pairs) -> None:
    """Oracle: a count in a double loop over the distinct sentences of test."""
    arguments = {"block_size": 200, "batch_size": 8, "vocab_size": None, "seed": 0}
    task = {**group("task", "translate"), "tokens": "words", "vocab_size": 50}
    data = PairData(ted_pairs, task=task, protocol=group("protocol", "clean"), **arguments)
    for part, pairs in (("train", ted_pairs.train), ("validation", ted_pairs.dev)):
        expected = {
            k for pair in ted_pairs.test for k, own in enumerate(pairs) if own[0] == pair[0] or own[1] == pair[1]
        }
        assert data.counts[f"removed_from_{part}"] == len(expected) > 0


def test_what_a_models_positions_do_not_reach_is_cut_and_counted(little_pairs: Path) -> None:
    data = make(little_pairs)
    before = sum(len(ids) > 20 for side in data.held_out.values() for ids in side[0])
    data.limit_length(None)
    assert data.counts["cut_at_block_size"] == 0
    data.limit_length(20)
    assert data.counts["cut_at_block_size"] == before > 0
    assert max(len(ids) for side in data.held_out.values() for ids in side[0]) == 20
    assert max(len(ids) for side in data.held_out.values() for ids in side[1]) <= 21


def test_copying_the_source_is_the_floor(little_pairs: Path) -> None:
    floor = make(little_pairs).reference_metrics()
    assert set(floor) == {"copy_bleu", "copy_chrf"} and 0 <= floor["copy_bleu"] < 5 < floor["copy_chrf"]  # type: ignore


def test_errors(little_pairs: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size=20 is less than the \d+ tokens"):
        make(little_pairs, vocab_size=20)
    with pytest.raises(UserError, match=r"No training pair has at most block_size=2 tokens"):
        make(little_pairs, block_size=2)
