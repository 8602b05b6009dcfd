"""Oracles: sets and sums over all batches, and windows made one token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import group

from speechformer.corpora.special_tokens import IGNORE
from speechformer.corpora.speeches import Corpus, load_corpus
from speechformer.corpora.tokenizer import split_words
from speechformer.data.batches import Windows
from speechformer.data.speeches import SentenceData, SpeechData, StreamData
from speechformer.errors import UserError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(group("corpus", "sample"))


def make(corpus: Corpus, task: str = "classify", protocol: str = "paper", **changes: Any) -> SpeechData:
    """Return the data of a task; `changes` are those of its config group and of the sizes."""
    sizes = {"block_size": 32, "batch_size": 16, "vocab_size": None, "seed": 0}
    sizes |= {key: changes.pop(key) for key in sizes.keys() & changes.keys()}
    kind = SentenceData if task == "classify" else StreamData
    return kind(corpus, task=group("task", task) | changes, protocol=group("protocol", protocol), **sizes)


@pytest.mark.parametrize("n", [2, 32, 33, 100])
@pytest.mark.parametrize(("block_size", "stride"), [(32, 32), (32, 16), (8, 3), (1, 1)])
def test_every_token_but_the_first_is_scored_once_with_the_context_promised(
    n: int, block_size: int, stride: int
) -> None:
    stream = torch.arange(100, 100 + n)
    windows = Windows.cover(stream, torch.tensor([0]), torch.tensor([n]), block_size, stride)
    rows = windows.rows(torch.arange(len(windows.start)))
    scored = []
    for ids, targets in zip(rows["ids"].tolist(), rows["targets"].tolist()):
        for t, target in enumerate(targets):
            if target != IGNORE:
                scored.append(target)
                assert target == ids[t] + 1  # the token after its input
                context = t + 1
                assert context >= min(target - 100, block_size - stride + 1)
                assert ids[:context] == list(range(target - context, target))
    assert scored == list(range(101, 100 + n))


def ids_of(batches: Any, part: tuple[str, str]) -> list[tuple[int, ...]]:
    """Return the label and the ids without padding of each row of a part, and require that batches are cut."""
    rows = []
    for batch in batches:
        assert (batch["ids"][:, -1] != 0).any()
        if batch.get("part", part) == part:
            rows += [(int(k), *ids[ids != 0].tolist()) for k, ids in zip(batch["labels"], batch["ids"])]
    return sorted(rows)


def test_sentences_become_rows_of_ids_with_their_labels(corpus: Corpus) -> None:
    """Longer sentences are cut, and counted; a text of task=lm is one stream."""
    data = make(corpus, block_size=12)
    for part, rows in (("train", corpus.classify_train), ("test", corpus.classify_test)):
        expected = sorted((label, *data.tokenizer.encode(text)[:12]) for label, text in rows)
        assert ids_of(data.test_dataloader(), (part, "")) == expected
        assert part == "test" or ids_of(data.train_dataloader(), ("train", "")) == expected
    long = sum(len(split_words(text)) > 12 for _, text in corpus.classify_train + corpus.classify_test)
    assert data.counts["cut_at_block_size"] == long > 0
    assert make(corpus, "lm", block_size=12).counts["cut_at_block_size"] == 0


def test_language_model_windows_are_stretches_of_the_text(corpus: Corpus) -> None:
    data = make(corpus, "lm", block_size=8)
    stream = [k for text in corpus.lm_train for k in data.tokenizer.encode(text)]
    windows = [tuple(stream[k : k + 9]) for k in range(len(stream) - 8)]
    rows = torch.cat([batch["ids"] for batch in data.train_dataloader()])
    assert sorted(map(tuple, rows.tolist())) == sorted(windows)


def test_language_model_is_evaluated_on_every_token_of_every_file(corpus: Corpus) -> None:
    data = make(corpus, "lm", lengths=[64, 100])
    data.limit_length(64)
    scored: dict[tuple[str, str], list[int]] = {}
    for batch in data.test_dataloader():
        targets = batch["targets"][batch["targets"] != IGNORE]
        scored.setdefault(batch["part"], []).extend(targets.tolist())
    texts = {("train", ""): corpus.lm_train}
    for name, lines in corpus.lm_test.items():
        texts |= {(split, name): lines for split in ("test", "test_sliding", "test_length_64")}
    assert scored.keys() == texts.keys()
    for part, lines in texts.items():
        assert sorted(scored[part]) == sorted([k for line in lines for k in data.tokenizer.encode(line)][1:])
    assert data.train_tokens == len(scored["train", ""])


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_protocols_decide_what_is_looked_at_in_training(task: str, corpus: Corpus) -> None:
    def parts(batches: Any) -> set[str]:
        return {batch["part"][0] for batch in batches} - {"test_sliding"}

    paper, clean = make(corpus, task), make(corpus, task, "clean")
    assert parts(paper.val_dataloader()) == {"train", "test"} and paper.chosen_on == "test"
    assert parts(clean.val_dataloader()) == {"train", "validation"} and clean.chosen_on == "validation"
    assert parts(clean.test_dataloader()) == {"train", "validation", "test"}
    for name in ("train", "validation"):
        batches = [batch for batch in clean.val_dataloader() if batch["part"] == (name, "")]
        seen = sum(int((batch["ids"] != 0).sum()) for batch in batches)
        encoded = [clean.tokenizer.encode(text) for _, text in getattr(clean.splits, name)]
        assert seen == (sum(map(len, encoded)) - 1 if task == "lm" else sum(len(ids[:32]) for ids in encoded))


def test_leaked_test_sentences_are_marked(corpus: Corpus) -> None:
    """Oracle: every third sentence of test is put into train."""
    leaks = corpus.classify_test[::3]
    data = make(replace(corpus, classify_train=corpus.classify_train + leaks))
    rows = data.tested["test", ""]
    assert rows["in_train"].tolist() == [k % 3 == 0 for k in range(750)]
    assert rows["labels"].tolist() == [label for label, _ in corpus.classify_test]
    assert rows["ids"][1].tolist()[:3] == data.tokenizer.encode(corpus.classify_test[1][1])[:3]
    assert data.counts["test_in_train"] == len(leaks) and f"test in train {len(leaks)}, " in data.corpus_line()


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_a_large_train_is_evaluated_on_a_sample(task: str, corpus: Corpus) -> None:
    data, whole = make(corpus, task, "clean", evaluation_tokens=3000), make(corpus, task, "clean")
    count = sum(int((batch["ids"] != 0).sum()) for batch in data.val_dataloader() if batch["part"][0] == "train")
    assert 2900 < count <= 3000 and data.counts["evaluated_tokens"] == count
    assert whole.counts["evaluated_tokens"] == whole.train_tokens
    assert data.train_tokens == whole.train_tokens and len(data.train_dataloader()) == len(whole.train_dataloader())
    held_out, expected = (
        [batch["ids"] for batch in each.val_dataloader() if batch["part"] == ("validation", "")]
        for each in (data, whole)
    )
    assert all(map(torch.equal, held_out, expected)) and len(held_out) == len(expected) > 0


def line(word: str, words: int = 9) -> str:
    """Return a text of different words, which no other text has."""
    return " ".join(f"{word}{k}" for k in range(words))


def test_extra_text_repeats_nothing() -> None:
    """Oracle: words that occur once, so that each labelled sentence says where it stands."""
    running, tested = line("r", 40).split(), line("t", 40).split()
    new = [line("a"), " ".join([*running[30:37], "new"]), " ".join([*tested[:7], *line("y").split()])]
    repeats = [
        line("x", 7),  # too short
        f"{line('A')}!",  # the first again
        " ".join(running[30:38]),  # over the end of a line
        f"Well, {' '.join(tested[3:11])}",
        line("c"),
        line("n", 12).replace("n6", "other"),  # a near-duplicate of a line, without eight words in a row
    ]
    train, test = [(0, text) for text in new + repeats], [(0, line("c", 20))]
    lm_train = [" ".join(running[:34]), " ".join(running[34:])]
    lm_test = {"a": [" ".join(tested), line("n", 12)]}
    corpus = Corpus("mine", "here", "0", ["x"], train, test, lm_train, lm_test)
    data = make(corpus, "lm", extra_text=True, block_size=8)
    assert [text for _, text in data.splits.train] == lm_train + new
    assert "train 5, extra lines 3, " in data.corpus_line()
    assert data.counts["extra_lines"] == 3 and data.train_tokens == 40 + 9 + 8 + 16 - 1


def test_errors(corpus: Corpus) -> None:
    words = len(make(corpus).tokenizer)
    assert make(corpus).vocab_size == words and make(corpus, vocab_size=5760).vocab_size == 5760
    with pytest.raises(UserError, match=f"vocab_size=10 is less than the {words} tokens"):
        make(corpus, vocab_size=10)
    with pytest.raises(UserError, match="train text has [0-9]+ tokens and needs at least 100001; use more text"):
        make(corpus, "lm", block_size=100_000)
    with pytest.raises(UserError, match=r"task\.stride must be between 1 and block_size=32, not 33"):
        make(corpus, "lm", stride=33)
