"""Confidence intervals of metrics."""

from __future__ import annotations


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion of n independent trials. Wilson 1927."""
    from scipy.stats import binomtest

    interval = binomtest(round(share * n), n).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)
