"""Confidence intervals, against statsmodels."""

from __future__ import annotations

import pytest

from speechformer.metrics.intervals import wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (0.9, 10, 0.5958, 0.9821), (0.0, 20, 0.0, 0.1611), (1.0, 20, 0.8389, 1.0)],
)
def test_wilson_interval(share: float, n: int, low: float, high: float) -> None:
    """Oracle: statsmodels' proportion_confint(method="wilson"), to four decimals."""
    assert wilson(share, n) == pytest.approx((low, high), abs=5e-5)
