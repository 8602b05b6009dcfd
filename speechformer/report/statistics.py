"""Means, intervals and paired differences over seeds, all from `scipy.stats`.

    confidence interval   of a mean, Student's t with n - 1 degrees of freedom       ttest_1samp
    prediction interval   of one more run, mean ± t sd sqrt(1 + 1/n)                 t.interval
    paired difference     Student's t on the differences over common seeds           ttest_rel

All are 95 %, assume independent and nearly normal runs, cover the spread over seeds alone (not over test sets), and
are not corrected for multiple comparisons. Equal values (accuracies on few sentences) give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Interval = tuple[float, float]
NO_INTERVAL = (math.nan, math.nan)


def equal(x: np.ndarray) -> bool:
    """Return whether values differ by rounding alone (metrics are computed in single precision)."""
    return bool(np.ptp(x) <= 1e-6 * max(1.0, float(np.abs(x).max())))


class Summary:
    """The values of one metric over n >= 1 seeds.

    Attributes: `n`, `mean`, `sd` (sample standard deviation), `extremes` (lowest, highest), `confidence_interval` and
    `prediction_interval` (95 %). What n or the values do not determine is NaN.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array(list(values), dtype=float)
        self.n = len(self.values)
        self.mean = float(self.values.mean())
        self.sd = float(self.values.std(ddof=1)) if self.n > 1 else math.nan
        self.extremes: Interval = (float(self.values.min()), float(self.values.max()))

    @cached_property
    def confidence_interval(self) -> Interval:
        if self.n < 2 or equal(self.values):
            return NO_INTERVAL
        from scipy import stats  # it takes a second to load

        interval = stats.ttest_1samp(self.values, 0).confidence_interval(0.95)
        return float(interval.low), float(interval.high)

    @cached_property
    def prediction_interval(self) -> Interval:
        if self.n < 2 or equal(self.values):
            return NO_INTERVAL
        from scipy import stats

        low, high = stats.t.interval(0.95, self.n - 1, loc=self.mean, scale=self.sd * math.sqrt(1 + 1 / self.n))
        return float(low), float(high)

    def predicts(self, value: float) -> bool | None:
        """Return whether a value lies inside the prediction interval, or None without an interval."""
        low, high = self.prediction_interval
        return None if math.isnan(low) else low <= value <= high


@dataclass(frozen=True)
class Difference:
    """The mean of first minus second over n common seeds, its confidence interval and p-value."""

    n: int
    mean: float
    confidence_interval: Interval = NO_INTERVAL
    p: float = math.nan

    @property
    def significant(self) -> bool | None:
        """Whether the confidence interval excludes zero, or None without an interval."""
        low, high = self.confidence_interval
        return None if math.isnan(low) else not low <= 0 <= high


def paired_difference(first: Mapping[int | None, float], second: Mapping[int | None, float]) -> Difference | None:
    """Compare two configurations over the seeds (the keys) that both have.

    Returns:
        The paired difference, or None without a common seed.
    """
    seeds = sorted(seed for seed in first if seed in second and seed is not None)
    if not seeds:
        return None
    a, b = (np.array([values[seed] for seed in seeds], dtype=float) for values in (first, second))
    mean = float((a - b).mean())
    if len(seeds) < 2 or equal(a - b):
        return Difference(len(seeds), mean)
    from scipy import stats

    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    return Difference(len(seeds), mean, (float(interval.low), float(interval.high)), float(test.pvalue))
