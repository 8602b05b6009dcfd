"""Accuracies over both seeds and test sentences, from the `predictions.tsv` of classifiers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from speechformer.errors import UserError
from speechformer.report.load import Run
from speechformer.report.statistics import Effect
from speechformer.runs.folder import PREDICTIONS, DamagedError
from speechformer.runs.predictions import HEADER


def predictions(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Return for each test sentence whether its class was predicted, and whether train has it, too: bool [N].

    Returns None if the run has no `predictions.tsv`.

    Raises:
        DamagedError: the file is not what the run has written.
    """
    path, accuracy = run.folder / PREDICTIONS, run.metrics.get("test_accuracy")
    if not run.corpus or accuracy is None or not os.path.lexists(path):
        return None
    sentences = run.counts["test"]
    rows = [line.split("\t") for line in path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")]
    if len(rows) == sentences + 1 and {len(row) for row in rows} == {3}:
        labels, predicted, in_train = np.array(rows[1:]).T
        right = labels == predicted
        if abs(right.mean() - accuracy) < 1e-6:
            return right, in_train == "1"
    raise DamagedError(
        f"{path} is not of this run: expected the columns {HEADER.split()}, {sentences} lines and an accuracy of "
        f"{accuracy:.6f}. Restore or remove it."
    )


def right_answers(runs: Sequence[Run]) -> np.ndarray:
    """Return whether each run is right on each test sentence, bool [runs, sentences].

    Raises:
        UserError: a run has no predictions, or not its own.
    """
    answers = []
    for run in runs:
        predicted = predictions(run)
        if predicted is None:
            raise UserError(f"{run.folder} has no {PREDICTIONS}; run it again.")
        answers.append(predicted[0])
    return np.array(answers)


def over_seeds_and_items(terms: Sequence[tuple[float, Any]], constant: float = 0.0) -> Effect:
    """Estimate a contrast of accuracies over both seeds and the sentences that all runs are tested on.

    Seeds and sentences are crossed random effects. The squared error of the estimate is that of the means of seeds
    plus that of the means of sentences, less that of single answers, which both contain (Searle, Casella and
    McCulloch 1992, "Variance components"). Interval and p-value take Student's t; its degrees of freedom are those of
    the sum of the first two (Satterthwaite 1946), because a difference of three has no good approximation.

    Args:
        terms: coefficient and right answers, booleans [seeds, sentences].
    """
    scaled = [weight * np.asarray(right, dtype=float) for weight, right in terms]
    by_item = sum(own.mean(axis=0) for own in scaled)
    parts, twice = [(variance(by_item) / len(by_item), len(by_item) - 1)], 0.0
    for own in scaled:
        (seeds, items), of_seeds = own.shape, own.mean(axis=1, keepdims=True)
        if seeds > 1 and items > 1:
            rest = own - of_seeds - own.mean(axis=0) + own.mean()
            parts.append((variance(of_seeds) / seeds, seeds - 1))
            twice += (rest**2).sum() / ((seeds - 1) * (items - 1)) / own.size
    total, share = sum(part for part, _ in parts), sum(part**2 / freedom for part, freedom in parts if part)
    mean, n = constant + sum(float(own.mean()) for own in scaled), tuple(map(len, scaled))
    error = math.sqrt(max(total - twice, parts[0][0]))
    return Effect(n, mean, error, total**2 / share) if error and share else Effect(n, mean)


def variance(values: Any) -> float:
    """Return the sample variance; 0 of a single value."""
    return float(values.var(ddof=1)) if values.size > 1 else 0.0
