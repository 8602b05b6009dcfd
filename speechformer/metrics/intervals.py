"""Confidence intervals of metrics."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion of n independent trials. Wilson 1927.

    scipy has it, too, but takes a second to import, in every run.
    """
    k, z = round(share * n), NormalDist().inv_cdf(0.975)
    centre, half = k + z**2 / 2, z * math.sqrt(k * (n - k) / n + z**2 / 4)
    return max(0.0, (centre - half) / (n + z**2)), min(1.0, (centre + half) / (n + z**2))
