"""Means, intervals and contrasts over seeds, from `scipy.stats`.

    confidence interval   of a mean, Student's t with n - 1 degrees of freedom            ttest_1samp
    prediction interval   of one more run, mean ± t sd sqrt(1 + 1/n)                      t.interval
    contrast, paired      the values of each seed combined, then as for a mean            ttest_1samp, ttest_rel
    contrast, Welch       of independent samples; Welch 1947, Satterthwaite's degrees     ttest_ind(equal_var=False)
    Holm                  p-values corrected for the number of tests in a family          Holm 1979
    two groups            values with a gap that a normal distribution hardly has         is_bimodal

All are 95 %, assume independent and nearly normal runs, and cover the spread over seeds alone, not over test sets;
`over_seeds_and_items` covers both. Equal values (accuracies on few sentences) give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

Interval = tuple[float, float]


class Summary:
    """The values of one metric over n >= 1 seeds, or their paired differences.

    Attributes: `n`, `mean`, `sd` (sample standard deviation), `extremes` (lowest, highest), `confidence_interval` and
    `prediction_interval` (95 %; none of values in two groups), `p` (of a mean of zero). What n or the values do not
    determine is NaN.
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
        squares = sum(((group - group.mean()) ** 2).sum() for group in (values[:place], values[place:]))
        within = max(math.sqrt(squares / (self.n - 2)), 0.01 * float(np.abs(values).max()))
        return bool(values[place] - values[place - 1] > (3 + 350 / self.n**2) * within)

    @cached_property
    def prediction_interval(self) -> Interval:
        if not self.varies or self.is_bimodal:  # which one more run may be in is no matter of a normal distribution
            return math.nan, math.nan
        from scipy import stats

        low, high = stats.t.interval(0.95, self.n - 1, loc=self.mean, scale=self.sd * math.sqrt(1 + 1 / self.n))
        return float(low), float(high)

    def predicts(self, value: float) -> bool | None:
        """Return whether a value lies inside the prediction interval, or None without an interval."""
        low, high = self.prediction_interval
        return None if math.isnan(low) else low <= value <= high


@dataclass(frozen=True)
class Effect:
    """An estimated contrast; what the values do not determine is NaN.

    Attributes:
        n: seeds, or of independent samples those of each.
        mean: the estimate.
        interval: its 95 % confidence interval.
        p: of an effect of zero, two-sided.
        paired: whether the seeds were paired.
        correlation: of the two sides over common seeds.
        error: standard error of the estimate, with its degrees of `freedom`.
    """

    n: tuple[int, ...]
    mean: float
    interval: Interval = (math.nan, math.nan)
    p: float = math.nan
    paired: bool = False
    correlation: float = math.nan
    error: float = math.nan
    freedom: float = math.nan

    @property
    def detectable(self) -> float:
        """The smallest effect that a study of this size finds with a probability of 80 %."""
        return math.nan if math.isnan(self.error) else self.error * detectable(self.freedom)


Values = Mapping[int | None, float]  # by seed
Terms = Sequence[tuple[float, Values]]  # coefficient and values


def contrast(terms: Terms, constant: float = 0.0, same_runs: bool = False) -> Effect | None:
    """Estimate the sum of coefficients times means, plus a constant; None if a term has no value.

    Seeds are paired if the terms come from the same runs. They are paired too if the values correlate over common
    seeds (one-sided 5 %, at least four seeds); otherwise the samples count as independent.

    Args:
        terms: such as [(1, first), (-1, second)] for a difference.
        same_runs: whether the terms are values of the same runs.
    """
    if not all(values for _, values in terms):
        return None
    seeds = sorted(set.intersection(*({*values} - {None} for _, values in terms)), key=lambda seed: seed or 0)
    sides = [sum_over(terms, seeds, sign) for sign in (1, -1)]
    correlation, correlates = correlate(*sides)
    if seeds and (same_runs or correlates or len(terms) == 1):
        summary = Summary(sides[0] + sides[1] + constant)
        n: tuple[int, ...] = (len(seeds),)
        mean, error, freedom = summary.mean, summary.sd / math.sqrt(len(seeds)), float(len(seeds) - 1)
        varies = summary.varies
    else:
        summaries = [(weight, Summary(values.values())) for weight, values in terms]
        n, mean = tuple(own.n for _, own in summaries), constant + sum(weight * own.mean for weight, own in summaries)
        parts = [weight**2 * own.sd**2 / own.n if own.varies else 0.0 for weight, own in summaries]
        error, varies = math.sqrt(sum(parts)), any(own.varies for _, own in summaries) and min(n) > 1
        shares = [part**2 / (own.n - 1) for part, (_, own) in zip(parts, summaries) if part]
        freedom = sum(parts) ** 2 / sum(shares) if varies else 0.0
    paired = len(n) == 1 and len(terms) > 1
    if not varies:
        return Effect(n, mean, paired=paired, correlation=correlation)
    return with_student_t(Effect(n, mean, paired=paired, correlation=correlation), error, freedom)


def with_student_t(effect: Effect, error: float, freedom: float) -> Effect:
    """Return an effect with the interval and p-value of its standard error; unchanged without an error."""
    if not error or not freedom:
        return effect
    from scipy import stats  # it takes a second to load

    half = float(stats.t.ppf(0.975, freedom)) * error
    p = 2 * float(stats.t.sf(abs(effect.mean) / error, freedom))
    interval = (effect.mean - half, effect.mean + half)
    return replace(effect, interval=interval, p=p, error=error, freedom=freedom)


def sum_over(terms: Terms, seeds: Sequence[int | None], sign: int) -> Any:
    """Return the weighted sum of the terms with this sign for each seed."""
    own = [weight * np.array([values[seed] for seed in seeds]) for weight, values in terms if weight * sign > 0]
    return sum(own, np.zeros(len(seeds)))


def correlate(first: Any, second: Any) -> tuple[float, bool]:
    """Return the correlation of what is subtracted, and whether it shows that pairing helps."""
    if len(first) < 4 or not np.ptp(first) or not np.ptp(second):
        return math.nan, False
    from scipy import stats

    test = stats.pearsonr(first, -second, alternative="greater")
    return float(test.statistic), bool(test.pvalue < 0.05)


def detectable(freedom: float, power: float = 0.8) -> float:
    """Return the effect, in standard errors, that a two-sided t-test at 5 % finds with a probability of `power`."""
    from scipy import optimize, stats

    critical = stats.t.ppf(0.975, freedom)
    return float(optimize.brentq(lambda d: stats.nct.sf(critical, freedom, d) - power, 0, 200))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down procedure; NaN stays and does not count."""
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[index] = highest
    return corrected


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
    effect = Effect(tuple(map(len, scaled)), constant + sum(float(own.mean()) for own in scaled))
    return with_student_t(effect, math.sqrt(max(total - twice, parts[0][0])), total**2 / share if share else 0.0)


def variance(values: Any) -> float:
    """Return the sample variance; 0 of a single value."""
    return float(values.var(ddof=1)) if values.size > 1 else 0.0
