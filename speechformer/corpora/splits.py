"""Split a corpus into train, validation and test for one task: `protocol=` in the config.

The reports' test set for classification leaks: most of its sentences also appear in the training set.
`protocol=paper` keeps these sentences, as the reports did, and marks them.
`protocol=clean` removes them from train, and holds out a part of train for choosing the checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, replace

from speechformer.corpora.duplicates import kinds_in, plain
from speechformer.corpora.speeches import Corpus
from speechformer.errors import UserError

Row = tuple[int | None, str]
SHARED = 8  # words in a row that make one text a repetition of another


@dataclass(frozen=True, eq=False)
class Splits:
    """The rows (class or None, text) of one task.

    Attributes:
        test: rows of each test set, by name.
        vocabulary_texts: texts to fit a tokenizer on.
        removed: number of rows removed from train.
        extra: number of rows at the end of train that `with_extra_text` added; they have no class.
    """

    train: list[Row]
    validation: list[Row]
    test: dict[str, list[Row]]
    vocabulary_texts: list[str]
    removed: int
    extra: int = 0

    @functools.cached_property
    def kinds_in_train(self) -> dict[str, list[str]]:
        """For each row of each test set, the kind of duplicate of it in `train`; see `kinds_in`."""
        train = {text for _, text in self.train}
        return {name: kinds_in([text for _, text in rows], train) for name, rows in self.test.items()}


def held_out(text: str, share: float, fold: int = 0) -> bool:
    """Return whether a text belongs to the held-out `share`, the fold-th of those that do not overlap.

    A hash of the text decides. So copies of a sentence are on the same side, and the choice is independent of the
    order of the lines and of the run's seed.
    """
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return fold * share * 2**64 <= place < (fold + 1) * share * 2**64


def number_of_folds(validation: float) -> int:
    """Return how many shares to hold out do not overlap; 1 if nothing is held out."""
    return int(1 / validation + 1e-9) if validation else 1


def with_extra_text(splits: Splits, corpus: Corpus) -> Splits:
    """Add to train, which is running text, the labelled training sentences that repeat no other text.

    A sentence repeats a text, or an earlier one, if they share SHARED words in a row. It also repeats a text
    if it is a near-duplicate of one of its lines. Comparing lines is not enough, since the files split the same
    speech at other places. Shorter ones are left out.

    Raises:
        UserError: nothing remains.
    """
    sentences = [text for _, text in corpus.classify_test]
    files = [corpus.lm_train, *corpus.lm_test.values()]
    taken = set().union(*map(runs_of_words, (*sentences, *(" ".join(lines) for lines in files))))
    candidates = [text for _, text in corpus.classify_train]
    extra: list[Row] = []
    for text, copy in zip(candidates, kinds_in(candidates, [*sentences, *itertools.chain(*files)])):
        words = runs_of_words(text)
        if words and not copy and not words & taken:
            extra.append((None, text))
            taken |= words
    if not extra:
        raise UserError(
            f"task.extra_text: {corpus.where} has no labelled sentence of {SHARED} words or more that is in no other "
            "text; set it to false."
        )
    known = set(splits.vocabulary_texts)
    vocabulary = [*splits.vocabulary_texts, *(text for _, text in extra if text not in known)]
    return replace(splits, train=[*splits.train, *extra], vocabulary_texts=vocabulary, extra=len(extra))


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """Return all SHARED words in a row, without case and punctuation."""
    words = plain(text).split()
    return {tuple(words[k : k + SHARED]) for k in range(len(words) - SHARED + 1)}


def split(
    corpus: Corpus,
    task: str,
    labelled: bool,
    *,
    remove_test_sentences: bool,
    validation: float,
    vocabulary: str,
    fold: int = 0,
) -> Splits:
    """Split a corpus for a task.

    Args:
        task: its name, for error messages.
        labelled: whether it reads the labelled sentences or the running text.
        remove_test_sentences: remove every row of train whose text appears in the task's test files.
        validation: share of train to hold out, in [0, 1).
        fold: which share, from 0: those of different folds do not overlap.
        vocabulary: "corpus" fits the tokenizer on the training files of both kinds, as the reports did; "task", on
            the training set of this task.

    Raises:
        UserError: a file that the task needs is missing, or no training data remains.
    """
    if not 0 <= fold < (folds := number_of_folds(validation)):
        raise UserError(f"protocol.fold={fold} must be below {folds}, the folds of protocol.validation={validation}.")
    if labelled:
        train: list[Row] = list(corpus.classify_train)
        test: dict[str, list[Row]] = {"test": list(corpus.classify_test)}
    else:
        train = [(None, text) for text in corpus.lm_train]
        test = {name: [(None, text) for text in lines] for name, lines in corpus.lm_test.items()}
    names = ("train_CLS.tsv", "test_CLS.tsv") if labelled else ("train_LM.txt", "test_LM_<name>.txt")
    missing = [name for name, found in zip(names, (train, any(test.values()))) if not found]
    if missing:
        lacks = " and ".join(missing)
        raise UserError(f"task={task} needs {' and '.join(names)}; {corpus.where} lacks {lacks}.")
    tested = {text for rows in test.values() for _, text in rows} if remove_test_sentences else set()
    allowed = [row for row in train if row[1] not in tested]
    removed = len(train) - len(allowed)
    held, remaining = list[Row](), list[Row]()
    for row in allowed:
        (held if held_out(row[1], validation, fold) else remaining).append(row)
    if not remaining or (validation and not held):
        raise UserError(
            f"Of the {len(train)} training lines in {corpus.where}, {removed} also appear in test and {len(held)} "
            f"are held out, which leaves {len(remaining)} to train on; use more text, or protocol=paper."
        )
    both = [text for _, text in corpus.classify_train] + corpus.lm_train
    texts = both if vocabulary == "corpus" else [text for _, text in remaining]
    return Splits(remaining, held, test, texts, removed)
