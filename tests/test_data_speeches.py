"""Oracles: sets and sums over all batches, and windows made one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import group

from speechformer.corpora.special_tokens import IGNORE
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.corpora.tokenizer import split_words
from speechformer.data.batches import TrainingBatches, evaluation_rows
from speechformer.data.speeches import SentenceData, SpeechData, StreamData
from speechformer.errors import UserError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(group("corpus", "sample"))


def make(corpus: Corpus, task: str = "classify", protocol: str = "paper", **changes: Any) -> SpeechData:
    arguments = {"block_size": 32, "batch_size": 16, "vocab_size": None, "seed": 0, **changes}
    kind = SentenceData if task == "classify" else StreamData
    return kind(corpus, task=group("task", task), protocol=group("protocol", protocol), **arguments)


@pytest.mark.parametrize("n", [2, 3, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize(("block_size", "stride"), [(32, 32), (32, 16), (32, 1), (8, 3), (1, 1)])
def test_every_token_but_the_first_is_scored_once_with_the_context_promised(
    n: int, block_size: int, stride: int
) -> None:
    stream = torch.arange(100, 100 + n)
    rows = evaluation_rows(stream, block_size, stride)
    scored = []
    for ids, targets in zip(rows["ids"].tolist(), rows["targets"].tolist()):
        for t, target in enumerate(targets):
            if target != IGNORE:
                scored.append(target)
                assert target == ids[t] + 1  # the token after its input
                context = t + 1
                assert context >= min(target - 100, block_size - stride + 1)
                assert ids[: t + 1] == list(range(target - context, target))
    assert scored == list(range(101, 100 + n))


def test_training_order_is_a_function_of_seed_and_epoch() -> None:
    rows = {"ids": torch.arange(1, 51)[:, None]}

    def epochs(seed: int, count: int) -> list[list[int]]:
        batches = TrainingBatches(rows, 16, seed)
        return [[int(x) for batch in batches for x in batch["ids"]] for _ in range(count)]

    first, second = epochs(0, 2)
    assert epochs(0, 2) == [first, second] and first != second
    assert epochs(1, 1)[0] != first
    assert sorted(first) == sorted(second) == list(range(1, 51))
    batches = TrainingBatches(rows, 16, 0)
    assert len(batches) == 4 and [len(batch["ids"]) for batch in batches] == [16, 16, 16, 2]


def test_sentences_become_rows_of_ids_with_their_labels(corpus: Corpus) -> None:
    data = make(corpus, block_size=12)
    for part, rows in (("train", corpus.classify_train), ("test", corpus.classify_test)):
        expected = sorted((label, *data.tokenizer.encode(text)[:12]) for label, text in rows)
        got = [
            (int(label), *[k for k in ids.tolist() if k])
            for batch in data.test_dataloader()
            if batch["part"] == (part, "")
            for ids, label in zip(batch["ids"], batch["labels"])
        ]
        assert sorted(got) == expected
    trained = {tuple(k for k in ids.tolist() if k) for batch in data.train_dataloader() for ids in batch["ids"]}
    assert trained == {tuple(data.tokenizer.encode(text)[:12]) for _, text in corpus.classify_train}


def test_sentences_that_are_cut_are_counted(corpus: Corpus) -> None:
    texts = [text for _, text in corpus.classify_train + corpus.classify_test]
    for block_size in (12, 100):
        expected = sum(len(split_words(text)) > block_size for text in texts)
        assert make(corpus, block_size=block_size).description["counts"]["cut_at_block_size"] == expected
    assert make(corpus, "lm", block_size=12).description["counts"]["cut_at_block_size"] == 0  # a text is one stream


def test_batches_are_cut_to_their_longest_row(corpus: Corpus) -> None:
    data = make(corpus)
    for batches in (data.train_dataloader(), data.test_dataloader()):
        for batch in batches:
            assert (batch["ids"][:, -1] != 0).any()


def test_language_model_windows_are_stretches_of_the_text(corpus: Corpus) -> None:
    data = make(corpus, "lm", block_size=8)
    stream = [k for text in corpus.lm_train for k in data.tokenizer.encode(text)]
    windows = {tuple(stream[k : k + 9]) for k in range(len(stream) - 8)}
    batches = list(data.train_dataloader())
    assert sum(len(batch["ids"]) for batch in batches) == len(stream) - 8
    assert {tuple(row) for batch in batches[:50] for row in batch["ids"].tolist()} <= windows


def test_language_model_is_evaluated_on_every_token_of_every_file(corpus: Corpus) -> None:
    data = make(corpus, "lm")
    scored: dict = {}
    for batch in data.test_dataloader():
        targets = batch["targets"][batch["targets"] != IGNORE]
        scored.setdefault(batch["part"], []).extend(targets.tolist())
    for name, lines in corpus.lm_test.items():
        stream = [k for line in lines for k in data.tokenizer.encode(line)]
        for how in ("test", "test_sliding"):
            assert sorted(scored[how, name]) == sorted(stream[1:])
    assert (
        len(scored["train", ""])
        == data.description["counts"]["train_tokens"]
        == sum(len(data.tokenizer.encode(text)) for text in corpus.lm_train) - 1
    )


def test_protocols_decide_what_is_looked_at_in_training(corpus: Corpus) -> None:
    def parts(batches: Any) -> set:
        return {batch["part"] for batch in batches}

    paper, clean = make(corpus), make(corpus, protocol="clean")
    assert parts(paper.val_dataloader()) == {("train", ""), ("test", "")}
    assert parts(clean.val_dataloader()) == {("train", ""), ("validation", "")}
    assert parts(clean.test_dataloader()) == {("train", ""), ("validation", ""), ("test", "")}


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_a_large_train_is_evaluated_on_a_sample(task: str, corpus: Corpus) -> None:
    config = group("task", task) | {"evaluation_tokens": 3000}
    options: dict[str, Any] = {"block_size": 32, "batch_size": 16, "vocab_size": None, "seed": 0}
    kind = SentenceData if task == "classify" else StreamData
    data = kind(corpus, task=config, protocol=group("protocol", "clean"), **options)
    whole = make(corpus, task, "clean")
    count = sum(int((batch["ids"] != 0).sum()) for batch in data.val_dataloader() if batch["part"][0] == "train")
    assert 2900 < count <= 3000 and data.counts["evaluated_tokens"] == {"train": count}
    assert "evaluated_tokens" not in whole.counts
    assert data.train_tokens == whole.train_tokens and len(data.train["ids"]) == len(whole.train["ids"])
    assert torch.equal(data.monitored["validation", ""]["ids"], whole.monitored["validation", ""]["ids"])


def test_extra_text_repeats_nothing() -> None:
    """Oracle: a corpus of words that occur once, in which each labelled sentence says where it stands."""

    def text(word: str, words: int = 9) -> str:
        return " ".join(f"{word}{k}" for k in range(words))

    running, tested, labelled = text("r", 40), text("t", 40), text("c", 20)
    sentences = [
        *(text("a"), text("b"), text("x", 7), text("A").lower() + "!"),  # new, new, short, the first again
        *(
            " ".join(running.split()[30:38]),
            f"Well, {' '.join(tested.split()[3:11])}",
            " ".join(labelled.split()[:8]),
        ),
        *(" ".join(running.split()[30:37]) + " new", " ".join([*tested.split()[:7], *text("y").split()])),
        text("n", 12).replace("n6", "other"),  # a near-duplicate of a line, without eight words in a row
    ]
    lm_train = [" ".join(running.split()[:34]), " ".join(running.split()[34:])]
    lm_test = {"a": [tested, text("n", 12)]}
    own = Corpus("own", "here", "0", ["x"], [(0, own) for own in sentences], [(0, labelled)], lm_train, lm_test)
    config = group("task", "lm") | {"extra_text": True}
    options: dict[str, Any] = {"block_size": 8, "batch_size": 2, "vocab_size": None, "seed": 0}
    data = StreamData(own, task=config, protocol=group("protocol", "paper"), **options)
    assert [row for _, row in data.splits.train] == [*lm_train, *(sentences[k] for k in (0, 1, 7, 8))]
    assert (
        data.counts["extra_lines"] == 4 and "trains on 6 lines, 4 of them labelled sentences, " in data.corpus_line()
    )
    assert data.train_tokens == 40 + 9 + 9 + 8 + 16 - 1
    none = Corpus("own", "here", "0", ["x"], [(0, tested)], [], lm_train, {"a": [tested]})
    with pytest.raises(UserError, match="task.extra_text: here has no labelled sentence of 8 words or more"):
        StreamData(none, task=config, protocol=group("protocol", "paper"), **options)


def test_vocab_size_pads_the_table(corpus: Corpus) -> None:
    words = len(make(corpus).tokenizer)
    assert make(corpus).vocab_size == words
    assert make(corpus, vocab_size=5760).vocab_size == 5760
    with pytest.raises(UserError, match=f"vocab_size=10 is less than the {words} tokens"):
        make(corpus, vocab_size=10)


def test_errors(corpus: Corpus) -> None:
    with pytest.raises(
        UserError, match="training text has [0-9]+ tokens and needs at least 100001; use more text or a smaller"
    ):
        make(corpus, "lm", block_size=100_000)
    task = group("task", "lm") | {"stride": 33}
    with pytest.raises(UserError, match=r"task\.stride must be between 1 and block_size=32, not 33"):
        StreamData(
            corpus,
            task=task,
            protocol=group("protocol", "paper"),
            block_size=32,
            batch_size=16,
            vocab_size=None,
            seed=0,
        )
