"""Statistics of the report against scipy, closed forms and simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from scipy import stats

from speechformer.report.statistics import Effect, Summary, contrast, detectable, holm

DRAWS = stats.norm(0, 1).rvs((3, 12), random_state=1)


def by_seed(values: Iterable[float]) -> dict[int | None, float]:
    return dict(enumerate(map(float, values)))


def difference(first: Iterable[float], second: Iterable[float], constant: float = 0.0) -> Effect:
    effect = contrast([(1, by_seed(first)), (-1, by_seed(second))], constant)
    assert effect is not None
    return effect


def test_summary_is_the_textbooks() -> None:
    """1 ... 5: sd sqrt(2.5), t(4) = 2.776445."""
    summary = Summary([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.n, summary.mean, summary.extremes) == (5, 3, (1, 5))
    assert summary.sd == pytest.approx(math.sqrt(2.5))
    half = 2.776445 * math.sqrt(0.5)
    assert summary.confidence_interval == pytest.approx((3 - half, 3 + half))
    half = 2.776445 * math.sqrt(2.5 * 1.2)
    assert summary.prediction_interval == pytest.approx((3 - half, 3 + half))


@pytest.mark.parametrize("values", [[2.0], [0.88133335, 0.8813333, 0.88133337]])
def test_without_a_spread_there_is_no_interval(values: list[float]) -> None:
    """Equal accuracies differ in the last digits of single precision."""
    summary = Summary(values)
    assert summary.mean == pytest.approx(values[0])
    assert all(map(math.isnan, (*summary.confidence_interval, *summary.prediction_interval)))
    assert math.isnan(difference(values, [value - 0.004 for value in values]).p)


def test_values_are_paired_over_common_seeds() -> None:
    """Oracle: differences 1, 2, 3 over seeds 1-3: mean 2, t(2) = 4.302653, half 4.302653 / sqrt(3)."""
    first, second = {0: 99.0, 1: 11.0, 2: 22.0, 3: 33.0}, {1: 10.0, 2: 20.0, 3: 30.0, 4: 0.0}
    effect = contrast([(1, first), (-1, second)])
    assert effect is not None and (effect.n, effect.mean, effect.paired) == ((3,), 2, True)
    half = 4.302653 / math.sqrt(3)
    assert effect.interval == pytest.approx((2 - half, 2 + half))


@pytest.mark.parametrize("common", [0, 1])
def test_a_difference_of_other_seeds_is_welchs_test(common: int) -> None:
    """Oracle: scipy's ttest_ind."""
    first, second = 3 + DRAWS[0], 2 + 3 * DRAWS[1, :7]
    later = {seed + 12 - common: value for seed, value in enumerate(map(float, second))}
    effect, test = contrast([(1, by_seed(first)), (-1, later)]), stats.ttest_ind(first, second, equal_var=False)
    assert effect is not None and (effect.n, effect.paired) == ((12, 7), False)
    assert effect.p == pytest.approx(test.pvalue) and effect.interval == pytest.approx(test.confidence_interval(0.95))


@pytest.mark.parametrize("n", [2, 12])
def test_a_difference_of_the_same_seeds_is_the_paired_test(n: int) -> None:
    """Oracle: scipy's ttest_rel, also of values that do not correlate."""
    first, second = 10 + DRAWS[0, :n], 9 + DRAWS[1, :n]
    effect, test = difference(first, second), stats.ttest_rel(first, second)
    assert effect.paired and effect.p == pytest.approx(test.pvalue)
    assert effect.interval == pytest.approx(test.confidence_interval(0.95))


def test_one_mean_is_tested_against_a_constant() -> None:
    """Oracle: scipy's ttest_1samp."""
    effect = contrast([(1, by_seed(DRAWS[0]))], constant=-0.5)
    assert effect is not None and effect.p == pytest.approx(stats.ttest_1samp(DRAWS[0], 0.5).pvalue)
    assert contrast([(1, {0: 1.0}), (-1, {})]) is None
    assert math.isnan(difference([1.0], [2.0]).p)


def test_what_a_number_of_seeds_detects() -> None:
    """Oracle: of a normal distribution, 1.960 + 0.842 standard errors have a power of 80 %."""
    assert detectable(1e5) == pytest.approx(2.802, abs=0.002) and detectable(1.0) > detectable(3.0) > 3
    effect = difference(DRAWS[0], DRAWS[1])
    assert effect.detectable == pytest.approx(effect.error * detectable(effect.freedom))


def test_holm_corrects_for_the_number_of_tests() -> None:
    """Oracle: by hand: 0.01 x 4, 0.02 x 3, then its own x 2 and x 1 or as large as before; NaN does not count."""
    assert holm([0.03, 0.01, math.nan, 0.02, 0.04]) == pytest.approx([0.06, 0.04, math.nan, 0.06, 0.06], nan_ok=True)
    assert holm([0.7, 0.8]) == [1.0, 1.0]
