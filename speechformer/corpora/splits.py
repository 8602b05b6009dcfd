"""What a task trains on, chooses by and is tested on: `protocol=` in the config.

The reports' test set of the classification task leaks: most of its sentences stand word for word in train.
`protocol=paper` keeps it so, as the reports did, and marks each test sentence as seen or unseen.
`protocol=clean` takes them out of train, and holds out a part of train to choose the checkpoint by.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from speechformer.corpora.duplicates import kinds_in
from speechformer.corpora.speeches import Corpus
from speechformer.errors import UserError, pick

Row = tuple[int | None, str]


@dataclass(frozen=True, eq=False)
class Splits:
    """The rows (class or None, text) of one task: `test` by name, `vocabulary_texts` to fit a tokenizer on."""

    train: list[Row]
    validation: list[Row]
    test: dict[str, list[Row]]
    vocabulary_texts: list[str]
    removed: int

    def in_train(self, name: str) -> list[bool]:
        """For each row of a test set, whether its text stands word for word in what is trained on."""
        return [kind == "exact" for kind in self.kinds_in_train[name]]

    @functools.cached_property
    def kinds_in_train(self) -> dict[str, list[str]]:
        """For each row of each test set how its text stands in what is trained on; see `kinds_in`."""
        train = {text for _, text in self.train}
        return {name: kinds_in([text for _, text in rows], train) for name, rows in self.test.items()}


def held_out(text: str, share: float) -> bool:
    """Whether a text belongs to the held-out `share`. By a hash of the text: copies of one sentence fall on the
    same side, and the choice depends neither on the order of the lines nor on the run's seed."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


@functools.lru_cache(maxsize=16)  # the jobs of a sweep share it
def split(corpus: Corpus, task: str, *, remove_test_sentences: bool, validation: float, vocabulary: str) -> Splits:
    """Split a corpus for `task` ("classify" or "lm").

    Args:
        remove_test_sentences: take every row of train out whose text stands in the task's test files.
        validation: the share of train to hold out, in [0, 1).
        vocabulary: "corpus" fits the tokenizer on the training files of both tasks, as the reports did; "task"
            on what this task trains on.

    Raises:
        UserError: a file that the task needs is not there, or nothing is left to train on.
    """
    pick(dict.fromkeys(("corpus", "task")), vocabulary, "protocol.vocabulary")
    if not 0 <= validation < 1:
        raise UserError(f"protocol.validation is a share of train in [0, 1), not {validation}.")
    train: list[Row]
    test: dict[str, list[Row]]
    if task == "classify":
        train, test = list(corpus.classify_train), {"test": list(corpus.classify_test)}
        needed = {"train_CLS.tsv": len(train), "test_CLS.tsv": len(test["test"])}
    else:
        train = [(None, text) for text in corpus.lm_train]
        test = {name: [(None, text) for text in lines] for name, lines in corpus.lm_test.items()}
        needed = {"train_LM.txt": len(train), "test_LM_<name>.txt": len(test)}
    for file, rows in needed.items():
        if not rows:
            raise UserError(f"task={task} needs {file}, and {corpus.where} has none.")

    tested = {text for rows in test.values() for _, text in rows}
    kept = [row for row in train if not (remove_test_sentences and row[1] in tested)]
    held = [row for row in kept if held_out(row[1], validation)]
    trained = [row for row in kept if not held_out(row[1], validation)]
    if not trained or (validation and not held):
        raise UserError(
            f"Of the {len(train)} training lines in {corpus.where}, {len(train) - len(kept)} stand in test and "
            f"{len(held)} are held out, which leaves {len(trained)} to train on; use more text, or protocol=paper."
        )
    own: Iterable[str] = (text for _, text in trained)
    both = [text for _, text in corpus.classify_train] + corpus.lm_train
    return Splits(
        train=trained,
        validation=held,
        test=test,
        vocabulary_texts=both if vocabulary == "corpus" else list(own),
        removed=len(train) - len(kept),
    )
