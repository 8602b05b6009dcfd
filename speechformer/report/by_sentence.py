"""Classifiers and baselines compared sentence by sentence: who is right how often, on which, and after how many.

Shapes: R runs, N test sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speechformer.errors import UserError
from speechformer.report.ladder import by_name
from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Effect, Summary, over_seeds_and_items
from speechformer.report.tables import NONE, baseline_name, estimate, mean_and_sd, number

if TYPE_CHECKING:
    import numpy as np

METRIC = "test_accuracy"


def right_answers(runs: Sequence[Run]) -> np.ndarray:
    """Return whether each run is right on each test sentence, bool [R, N].

    Raises:
        UserError: a run has no predictions.
    """
    import numpy as np

    predictions = [run.predictions() for run in runs]
    if missing := [run.folder for run, own in zip(runs, predictions) if own is None]:
        raise UserError(f"{missing[0]} has no predictions.tsv; run it again.")
    return np.array([own[0] for own in predictions if own is not None])


def less(row: Row, baseline: Run) -> Effect:
    """Return the accuracy of a row less that of a baseline, over both seeds and sentences."""
    own = right_answers(row.finished)
    effect = over_seeds_and_items([(1, own), (-1, right_answers([baseline]))])
    return effect if len(own) > 1 else Effect(effect.n, effect.mean)  # one seed says nothing about others


def against_baselines(table: Table, row: Row, names: Sequence[str]) -> Markdown:
    """Return the accuracy of a row and of baselines, and what the row has more, over both seeds and sentences."""
    rows = [["the model", mean_and_sd(METRIC, Summary(row.values(METRIC).values())), NONE]]
    for run in by_name(table, names):
        effect = less(row, run)
        rows.append([baseline_name(run), number(METRIC, run.metrics[METRIC]), " ".join(estimate(METRIC, effect))])
    return markdown_table(["", "test accuracy, %", "the model less the baseline, points"], rows)


def difficulty(table: Table, row: Row, names: Sequence[str]) -> Markdown:
    """Return how many sentences are answered right by baselines and by most seeds of a row: by all, none, some."""
    import numpy as np

    model = right_answers(row.finished).mean(axis=0) > 0.5
    right_RN = np.stack([model, *right_answers(by_name(table, names))])
    shares = {
        "all are right": right_RN.all(axis=0),
        "at least one is right": right_RN.any(axis=0),
        "none is right": ~right_RN.any(axis=0),
        "the model alone is right": right_RN[0] & ~right_RN[1:].any(axis=0),
        "the model alone is wrong": ~right_RN[0] & right_RN[1:].all(axis=0),
    }
    rows = [[words, str(own.sum()), number(METRIC, own.mean())] for words, own in shares.items()]
    return markdown_table(["", "sentences", "%"], rows)


def learning_curve(tables: Sequence[Table], names: Sequence[str]) -> Markdown:
    """Return the accuracy of each table's first row and of baselines, by the number of sentences in train.

    The last row has what a doubling of train adds, by the largest and about half of it.
    """
    rows, means = [], []
    for table in sorted(tables, key=sentences_in_train):
        summary = Summary(next(row for row in table.rows if row.finished).values(METRIC).values())
        baselines = [float(run.metrics[METRIC] or 0) for run in by_name(table, names)]
        rows.append(
            [
                str(sentences_in_train(table)),
                mean_and_sd(METRIC, summary),
                *(number(METRIC, own) for own in baselines),
            ]
        )
        means.append((math.log2(sentences_in_train(table)), summary.mean, *baselines))
    smaller = [own for own in means if own[0] < means[-1][0] - 0.9]  # in doublings
    if smaller:
        doublings, *gains = (last - before for before, last in zip(smaller[-1], means[-1]))
        rows.append(["for each doubling", *(number(METRIC, gain / doublings, True) for gain in gains)])
    heads = [baseline_name(run) for run in by_name(tables[0], names)]
    return markdown_table(["sentences in train", "the model", *heads], rows)


def sentences_in_train(table: Table) -> int:
    """Return on how many sentences the runs of a table train, by the first."""
    return table.finished[0].result["corpus"]["counts"]["train"]
