"""Means, intervals and paired differences over seeds; all from scipy.stats.

    interval of a mean     Student's t on n - 1 degrees of freedom          scipy.stats.ttest_1samp
    range of one run       mean ± t sd sqrt(1 + 1/n): where one more run     scipy.stats.t.interval
                           falls, 95 times in a hundred
    paired difference      Student's t on the differences over the seeds     scipy.stats.ttest_rel
                           that both have

They hold the spread over seeds (weights, order of batches, dropout) and nothing else: another test set would spread
further. All take the runs as independent and near normal, and no interval is widened for there being many of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

Interval = tuple[float, float]
NOWHERE = (math.nan, math.nan)


@dataclass(frozen=True)
class Summary:
    """n values: mean, sample standard deviation, 95 % interval of the mean, 95 % range of one more value, extremes.

    What n does not allow is NaN.
    """

    n: int
    mean: float
    sd: float
    interval: Interval
    range: Interval
    extremes: Interval


def summarise(values: list[float]) -> Summary:
    """Describe the values of one figure over seeds, at least one."""
    n, x = len(values), np.asarray(values, dtype=float)
    mean, extremes = float(x.mean()), (float(x.min()), float(x.max()))
    if n < 2:
        return Summary(n, mean, math.nan, NOWHERE, NOWHERE, extremes)
    sd = float(x.std(ddof=1))
    if sd == 0:
        return Summary(n, mean, 0.0, (mean, mean), (mean, mean), extremes)
    interval = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    low, high = stats.t.interval(0.95, n - 1, loc=mean, scale=sd * math.sqrt(1 + 1 / n))
    return Summary(n, mean, sd, (float(interval.low), float(interval.high)), (float(low), float(high)), extremes)


@dataclass(frozen=True)
class Difference:
    """Mean of first minus second over n common seeds, its 95 % interval, and the p-value of no difference."""

    n: int
    mean: float
    interval: Interval
    p: float

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
    a, b = (np.array([values[seed] for seed in common]) for values in (first, second))
    mean = float((a - b).mean())
    if len(common) < 2:
        return Difference(1, mean, NOWHERE, math.nan)
    if np.ptp(a - b) == 0:  # the same in every seed: nothing to estimate a spread from
        return Difference(len(common), mean, (mean, mean), math.nan)
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    return Difference(len(common), mean, (float(interval.low), float(interval.high)), float(test.pvalue))
