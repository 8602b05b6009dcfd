"""Means, intervals and contrasts over seeds, from `scipy.stats`.

    confidence interval   of a mean or an effect, estimate ± t standard errors
    prediction interval   of one more run, mean ± t sd sqrt(1 + 1/n)
    contrast, paired      the values of each seed combined, then as for a mean, as in ttest_1samp and ttest_rel
    contrast, Welch       of independent samples, as in ttest_ind(equal_var=False); Welch 1947
    Holm                  p-values corrected for the number of tests in a family; Holm 1979
    two groups            values with a gap that a normal distribution hardly has: `Summary.is_bimodal`

All are 95 %, assume independent and nearly normal runs, and cover the spread over seeds alone, not over test sets.
Equal values (accuracies on few sentences) give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, stats

Interval = tuple[float, float]
Values = Mapping[int | None, float]  # by seed
Terms = Sequence[tuple[float, Values]]  # coefficient and values


def t_interval(mean: float, error: float, freedom: float) -> Interval:
    """Return the interval of Student's t that has 95 %; NaN without a standard error."""
    low, high = stats.t.interval(0.95, freedom, mean, error)
    return float(low), float(high)


class Summary:
    """The values of one metric over n >= 1 seeds, or their paired differences.

    Attributes: `n`, `mean`, `sd` (sample standard deviation), `error` (of the mean), `extremes` (lowest, highest),
    `confidence_interval` and `prediction_interval` (95 %; none of values in two groups), `p` (of a mean of zero).
    What n or the values do not determine is NaN.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array([*values], dtype=float)
        self.n, self.mean = len(self.values), float(self.values.mean())
        self.sd = float(self.values.std(ddof=1)) if self.n > 1 else math.nan
        self.extremes: Interval = (float(self.values.min()), float(self.values.max()))
        rounding = 1e-6 * max(1.0, float(np.abs(self.values).max()))  # metrics are computed in single precision
        self.varies = bool(np.ptp(self.values) > rounding)
        self.error = self.sd / math.sqrt(self.n) if self.varies else math.nan

    @property
    def confidence_interval(self) -> Interval:
        return t_interval(self.mean, self.error, self.n - 1)

    @property
    def p(self) -> float:
        return Effect((self.n,), self.mean, self.error, self.n - 1).p

    @cached_property
    def is_bimodal(self) -> bool:
        """Whether the values form two groups, such as runs that learned and runs that did not.

        The largest gap between neighbouring values is compared with the standard deviation within the groups on its
        two sides, or a hundredth of the values if that is more. The limit, 3 + 350 / n² of them, is what fewer than
        one in 200 normal samples of 5 to 20 exceed.
        """
        if self.n < 5 or not self.varies:
            return False
        values = np.sort(self.values)
        place = int(np.diff(values).argmax()) + 1
        squares = sum(group.var() * len(group) for group in (values[:place], values[place:]))
        within = max(math.sqrt(squares / (self.n - 2)), 0.01 * float(np.abs(values).max()))
        return bool(values[place] - values[place - 1] > (3 + 350 / self.n**2) * within)

    @cached_property
    def prediction_interval(self) -> Interval:
        # which of two groups one more run may be in is no matter of a normal distribution
        error = math.nan if self.is_bimodal else self.error * math.sqrt(self.n + 1)
        return t_interval(self.mean, error, self.n - 1)


@dataclass(frozen=True)
class Effect:
    """An estimated contrast; what the values do not determine is NaN.

    Attributes:
        n: seeds, or of independent samples those of each.
        mean: the estimate.
        error: its standard error, with its degrees of `freedom`.
        paired: whether the seeds were paired.
    """

    n: tuple[int, ...]
    mean: float
    error: float = math.nan
    freedom: float = math.nan
    paired: bool = False

    @property
    def interval(self) -> Interval:
        """The 95 % confidence interval."""
        return t_interval(self.mean, self.error, self.freedom)

    @property
    def p(self) -> float:
        """The p-value of an effect of zero, two-sided."""
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    @property
    def detectable(self) -> float:
        """The smallest effect that a study of this size finds with a probability of 80 %."""
        return math.nan if math.isnan(self.error) else self.error * detectable(self.freedom)


def contrast(terms: Terms, constant: float = 0.0) -> Effect | None:
    """Estimate the sum of coefficients times means, plus a constant; None if a term has no value.

    Terms with two or more common seeds are paired over these, because runs of one seed may share what is drawn.
    Otherwise the samples count as independent (Welch).

    Args:
        terms: such as [(1, first), (-1, second)] for a difference.
    """
    if not all(values for _, values in terms):
        return None
    seeds = sorted(seed for seed in set.intersection(*({*values} for _, values in terms)) if seed is not None)
    if seeds and (len(seeds) > 1 or len(terms) == 1):
        own = Summary(constant + sum(weight * values[seed] for weight, values in terms) for seed in seeds)
        return Effect((own.n,), own.mean, own.error, own.n - 1, len(terms) > 1)
    summaries = [Summary(values.values()) for _, values in terms]
    mean = constant + sum(weight * own.mean for (weight, _), own in zip(terms, summaries))
    n = tuple(own.n for own in summaries)
    squares = {own: (weight * own.error) ** 2 for (weight, _), own in zip(terms, summaries) if own.varies}
    if not squares or min(n) == 1:
        return Effect(n, mean)
    total = sum(squares.values())
    freedom = total**2 / sum(square**2 / (own.n - 1) for own, square in squares.items())
    return Effect(n, mean, math.sqrt(total), freedom)


def detectable(freedom: float, power: float = 0.8) -> float:
    """Return the effect, in standard errors, that a two-sided t-test at 5 % finds with a probability of `power`."""
    critical = stats.t.ppf(0.975, freedom)
    return float(optimize.brentq(lambda d: stats.nct.sf(critical, freedom, d) - power, 0, 200))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down procedure; NaN stays and does not count."""
    p = np.array(p_values, dtype=float)
    order, tests = np.argsort(p), np.count_nonzero(~np.isnan(p))  # NaN is last
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * (tests - np.arange(len(p)))).clip(max=1)
    return corrected.tolist()
