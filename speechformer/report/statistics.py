"""Means, intervals and paired differences over seeds; all from scipy.stats.

    interval of a mean     Student's t on n - 1 degrees of freedom          scipy.stats.ttest_1samp
    range of one run       mean ± t sd sqrt(1 + 1/n): where one more run     scipy.stats.t.interval
                           falls, 95 times in a hundred
    paired difference      Student's t on the differences over the seeds     scipy.stats.ttest_rel
                           that both have

They hold the spread over seeds (weights, order of batches, dropout) and nothing else: another test set would spread
further. All take the runs as independent and near normal, and no interval is widened for there being many. Where all
values are equal (accuracies on few sentences can be), there is no spread to judge by, and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

Interval = tuple[float, float]
NOWHERE = (math.nan, math.nan)


def equal(x: np.ndarray) -> bool:
    """Whether values are the same but for rounding (metrics are computed in single precision)."""
    return bool(np.ptp(x) <= 1e-6 * max(1.0, float(np.abs(x).max())))


class Summary:
    """n values of one figure over seeds, at least one.

    Attributes: `n`, `mean`, `sd` (of the sample), `extremes`, and when asked for `interval` (95 %, of the mean) and
    `range` (95 %, of one more value). What n or the values do not allow is NaN.
    """

    def __init__(self, values: list[float]) -> None:
        self.x = np.asarray(values, dtype=float)
        self.n = len(self.x)
        self.mean = float(self.x.mean())
        self.sd = float(self.x.std(ddof=1)) if self.n > 1 else math.nan
        self.extremes: Interval = (float(self.x.min()), float(self.x.max()))

    @cached_property
    def interval(self) -> Interval:
        if self.n < 2 or equal(self.x):
            return NOWHERE
        found = stats.ttest_1samp(self.x, 0).confidence_interval(0.95)
        return float(found.low), float(found.high)

    @cached_property
    def range(self) -> Interval:
        if self.n < 2 or equal(self.x):
            return NOWHERE
        low, high = stats.t.interval(0.95, self.n - 1, loc=self.mean, scale=self.sd * math.sqrt(1 + 1 / self.n))
        return float(low), float(high)

    def holds(self, value: float) -> bool | None:
        """Whether a value lies in the range of one run; None where there is no range."""
        low, high = self.range
        return None if math.isnan(low) else low <= value <= high


@dataclass(frozen=True)
class Difference:
    """Mean of first minus second over n common seeds, its 95 % interval, and the p-value of no difference."""

    n: int
    mean: float
    interval: Interval = NOWHERE
    p: float = math.nan

    @property
    def apart(self) -> bool | None:
        """Whether the interval leaves out nought; None where there is no interval."""
        low, high = self.interval
        return None if math.isnan(low) else not low <= 0 <= high


def paired(first: Mapping[int | None, float], second: Mapping[int | None, float]) -> Difference | None:
    """The difference over the seeds (keys) that both have; None if they share none."""
    common = sorted(seed for seed in first if seed in second and seed is not None)
    if not common:
        return None
    a, b = (np.array([values[seed] for seed in common], dtype=float) for values in (first, second))
    mean = float((a - b).mean())
    if len(common) < 2 or equal(a - b):
        return Difference(len(common), mean)
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    return Difference(len(common), mean, (float(interval.low), float(interval.high)), float(test.pvalue))
