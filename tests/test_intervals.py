"""Confidence intervals. Oracle: scipy."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from speechformer.metrics.intervals import wilson


@pytest.mark.parametrize("n", [1, 2, 20, 199, 750])
def test_wilson_interval(n: int) -> None:
    for k in range(n + 1):
        interval = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert wilson(k / n, n) == pytest.approx((interval.low, interval.high), rel=1e-12, abs=1e-15)
