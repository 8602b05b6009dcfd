"""The two protocols, counted by hand and on the real speeches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import group

from speechformer.corpora.speeches import Corpus
from speechformer.corpora.splits import Splits, held_out, number_of_folds, split
from speechformer.errors import UserError

CORPUS = Corpus(
    name="speeches",
    where="here",
    sha256="",
    classes=["a", "b"],
    classify_train=[(0, "in both"), (0, "train one"), (1, "train two"), (1, "in both")] * 10,
    classify_test=[(0, "in both"), (1, "test alone")],
    lm_train=["lm one", "lm two", "shared"] * 10,
    lm_test={"x": ["shared", "x alone"], "y": ["y alone"]},
)


def in_train(splits: Splits, name: str) -> list[bool]:
    return [kind == "exact" for kind in splits.kinds_in_train[name]]


def cut(protocol: str, task: str = "classify", corpus: Corpus = CORPUS, **changes: object) -> Splits:
    options = {key: value for key, value in group("protocol", protocol).items() if key != "name"}
    return split(corpus, task, task == "classify", **{**options, **changes})


def test_paper_trains_on_all_of_train_and_marks_leaked_sentences() -> None:
    splits = cut("paper")
    assert splits.train == CORPUS.classify_train and not splits.validation and splits.removed == 0
    assert splits.test == {"test": CORPUS.classify_test} and in_train(splits, "test") == [True, False]
    running = cut("paper", "lm")
    assert running.train == [(None, line) for line in CORPUS.lm_train] and in_train(running, "x") == [True, False]
    assert running.test == {"x": [(None, "shared"), (None, "x alone")], "y": [(None, "y alone")]}
    both = {"in both", "lm one", "lm two", "shared", "train one", "train two"}
    assert set(splits.vocabulary_texts) == set(running.vocabulary_texts) == both


def test_clean_removes_test_sentences_and_fits_its_vocabulary_on_the_rest() -> None:
    splits = cut("clean", validation=0.0)
    assert splits.removed == 20 and in_train(splits, "test") == [False, False]
    assert splits.train == [(0, "train one"), (1, "train two")] * 10
    assert splits.test == {"test": CORPUS.classify_test}
    assert set(splits.vocabulary_texts) == {"train one", "train two"}
    assert set(cut("clean", "lm", validation=0.0).vocabulary_texts) == {"lm one", "lm two"}


def test_the_held_out_part_shares_no_text_with_train_and_has_its_share() -> None:
    texts = [f"sentence {k}" for k in range(20_000)]
    share = sum(held_out(text, 0.1) for text in texts) / len(texts)
    assert share == pytest.approx(0.1, abs=5 * (0.1 * 0.9 / 20_000) ** 0.5)
    for share, folds in ((0.1, 10), (0.3, 3)):  # each text is in one fold, or of three tenths in none
        counts = [sum(held_out(text, share, fold) for fold in range(folds)) for text in texts[:1000]]
        assert number_of_folds(share) == folds and {*counts} == ({1} if share == 0.1 else {0, 1})
    rows: list[tuple[int, str]] = [(0, text) for text in texts[:500]]
    corpus = replace(CORPUS, classify_train=rows * 2, classify_test=rows[400:])
    splits = cut("clean", corpus=corpus)
    assert splits.validation == [row for row in rows[:400] if held_out(row[1], 0.1)] * 2
    assert splits.train == [row for row in rows[:400] if not held_out(row[1], 0.1)] * 2
    assert {*splits.vocabulary_texts} == {text for _, text in splits.train}
    assert not {*splits.validation} & {*cut("clean", corpus=corpus, fold=1).validation}
    backwards = cut("clean", corpus=replace(corpus, classify_train=corpus.classify_train[::-1]))
    assert sorted(backwards.validation) == sorted(splits.validation)


def test_errors() -> None:
    with pytest.raises(UserError, match=r"task=lm needs train_LM\.txt and .*; here lacks train_LM\.txt\."):
        cut("paper", "lm", replace(CORPUS, lm_train=[]))
    with pytest.raises(UserError, match=r"lacks test_CLS\.tsv"):
        cut("paper", corpus=replace(CORPUS, classify_test=[]))
    with pytest.raises(UserError, match="leaves 0 to train on"):
        cut("clean", corpus=replace(CORPUS, classify_train=[(0, "in both")]))
    with pytest.raises(UserError, match=r"protocol\.fold=10 must be below 10, the folds of"):
        cut("clean", fold=10)


def test_the_leak_of_the_real_speeches(speeches: Corpus) -> None:
    """Oracle: 551 of 750 test sentences appear in train; 1,539 of 2,092 rows remain without them."""
    splits = cut("paper", corpus=speeches)
    assert sum(in_train(splits, "test")) == 551
    clean_labels = [row[0] for row, leaks in zip(splits.test["test"], in_train(splits, "test")) if not leaks]
    assert [clean_labels.count(label) for label in range(3)] == [53, 84, 62]
    assert len(cut("clean", corpus=speeches, validation=0.0).train) == 1539
