"""What the course reports published, beside our runs: the content of `published.yaml`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from speechformer.report.statistics import Summary
from speechformer.report.tables import p_value
from studies.results import Results, best_values, read_yaml


@dataclass(frozen=True)
class Comparison:
    """One published value beside ours, chosen in the same way; accuracies are fractions.

    Attributes:
        at: the epoch or step, or None if the report gives none.
        chosen: "last", or "best" on test during the run.
        final: whether it is in the last line of its table.
        ours: None where we have no such metric.
    """

    row: str
    report: str
    metric: str
    value: float
    at: float | None
    chosen: str
    final: bool
    ours: Summary | None

    @property
    def inside(self) -> bool | None:
        """Whether the published value lies inside the prediction interval of one run of ours."""
        low, high = self.ours.prediction_interval if self.ours else (math.nan, math.nan)
        return None if math.isnan(low) else low <= self.value <= high


def comparisons(results: Results) -> Iterator[Comparison]:
    """Yield every published value beside ours."""
    content = read_yaml("published.yaml")
    for table in content["tables"]:
        place = results.places.get((table["row"], content["corpus"]["protocol"]["name"]))
        if place is None or place.study.protocol != content["corpus"]["protocol"]:
            continue
        for line, cells in enumerate(table["rows"], start=1):
            metrics = dict(zip(table["columns"], cells))
            at = next((metrics.pop(axis) for axis in ("epoch", "step") if axis in metrics), None)
            final, chosen = line == len(table["rows"]), table["chosen"]
            for metric, value in metrics.items():
                unit = table.get("unit", 100) if "accuracy" in metric else 1
                own = best_values(place, metric) if chosen == "best" else place.values(metric, None if final else at)
                ours = Summary(own.values()) if own else None
                yield Comparison(table["row"], table["report"], metric, value / unit, at, chosen, final, ours)


def agreement(results: Results) -> str:
    """Return how many published final results on test agree with ours, and how many should.

    Each counts once: the last value where the best is printed, too.
    """
    from scipy import stats

    counted: dict[tuple[str, str], Comparison] = {}
    for line in comparisons(results):
        is_test = line.metric.startswith("test") and not line.metric.endswith("mean")
        is_first = (line.row, line.metric) not in counted or line.chosen == "last"
        if line.final and is_test and is_first and line.inside is not None:
            counted[line.row, line.metric] = line
    lines = list(counted.values())
    inside = sum(bool(line.inside) for line in lines)
    p = p_value(float(stats.binom.cdf(inside, len(lines), 0.95)))
    p = p if p.startswith("<") else f"= {p}"
    chosen = read_yaml("claims.yaml")["chosen"]
    rows = {name for entry in chosen for name in entry["rows"]}
    looked = [bool(line.inside) for line in lines if line.row in rows]
    assumptions = ", ".join(dict.fromkeys(entry["what"] for entry in chosen))
    wide = [
        line.row
        for line in lines
        if line.ours and line.ours.prediction_interval[1] - line.ours.prediction_interval[0] > 0.1 * line.ours.mean
    ]
    return (
        f"{inside} of {len(lines)} published final results on test fall inside our 95 % prediction interval of one "
        f"run. If the published runs were like ours, about {0.95 * len(lines):.0f} would (p {p} for {inside} or "
        f"fewer, were they independent). For {len(looked)} of them, an assumption of ours was chosen by looking at "
        f"published results ({assumptions}): {sum(looked)} of these are inside, and {inside - sum(looked)} of the "
        f"other {len(lines) - len(looked)}."
        + (f" Wider than a tenth of the value: the interval of {', '.join(wide)}." if wide else "")
    )
