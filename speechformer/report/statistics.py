"""Means, intervals and paired differences over seeds, all from `scipy.stats`.

    confidence interval   of a mean, Student's t with n - 1 degrees of freedom       ttest_1samp
    prediction interval   of one more run, mean ± t sd sqrt(1 + 1/n)                 t.interval
    paired difference     Student's t on the differences over common seeds           ttest_1samp, here ttest_rel

All are 95 %, assume independent and nearly normal runs, cover the spread over seeds alone (not over test sets), and
are not corrected for multiple comparisons. Equal values (accuracies on few sentences) give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

Interval = tuple[float, float]


class Summary:
    """The values of one metric over n >= 1 seeds, or their paired differences.

    Attributes: `n`, `mean`, `sd` (sample standard deviation), `extremes` (lowest, highest), `confidence_interval` and
    `prediction_interval` (95 %), `p` (of a mean of zero). What n or the values do not determine is NaN.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array(list(values), dtype=float)
        self.n = len(self.values)
        self.mean = float(self.values.mean())
        self.sd = float(self.values.std(ddof=1)) if self.n > 1 else math.nan
        self.extremes: Interval = (float(self.values.min()), float(self.values.max()))
        rounding = 1e-6 * max(1.0, float(np.abs(self.values).max()))  # metrics are computed in single precision
        self.varies = self.n > 1 and bool(np.ptp(self.values) > rounding)

    @cached_property
    def test(self) -> Any:
        """The t-test of a mean of zero."""
        from scipy import stats  # it takes a second to load

        return stats.ttest_1samp(self.values, 0)

    @property
    def p(self) -> float:
        return float(self.test.pvalue) if self.varies else math.nan

    @property
    def confidence_interval(self) -> Interval:
        low, high = self.test.confidence_interval(0.95) if self.varies else (math.nan, math.nan)
        return float(low), float(high)

    @cached_property
    def prediction_interval(self) -> Interval:
        if not self.varies:
            return math.nan, math.nan
        from scipy import stats

        low, high = stats.t.interval(0.95, self.n - 1, loc=self.mean, scale=self.sd * math.sqrt(1 + 1 / self.n))
        return float(low), float(high)

    def predicts(self, value: float) -> bool | None:
        """Return whether a value lies inside the prediction interval, or None without an interval."""
        low, high = self.prediction_interval
        return low <= value <= high if self.varies else None

    @property
    def significant(self) -> bool | None:
        """Whether the confidence interval excludes zero, or None without an interval."""
        low, high = self.confidence_interval
        return not low <= 0 <= high if self.varies else None


def paired_difference(first: Mapping[int | None, float], second: Mapping[int | None, float]) -> Summary | None:
    """Return the differences first minus second over the common seeds (the keys), or None without a common seed."""
    seeds = sorted(seed for seed in first if seed in second and seed is not None)
    return Summary(first[seed] - second[seed] for seed in seeds) if seeds else None
