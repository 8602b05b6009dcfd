"""Fit the limits of the dispatcher of kernels (`speechformer/kernels/dispatch.py`) to the rows of benchmarks/gpu.py.

Each set of limits chooses a kernel for each measured row. The set with the least time wins, relative to the fastest
kernel of each row; of equally good ones, the nearest to today's. It prints the limits, and how much slower than the
fastest kernels both sets are.

    python benchmarks/limits.py FOLDER
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from common import Row, read_rows

from speechformer.errors import ArgumentParser, UserError, run_command

# FLEX_MIN_PAIRS, PARTIAL_TILES, SPARSE_MIN_ON_GPU of the dispatcher
Limits = tuple[int, float, int]
FLEX, DENSE, BLOCKS = "FlexAttention", "dense mask", "blocks"  # sides of a row


def choose(row: Row, limits: Limits) -> str:
    """Return the side of a row that the dispatcher would take with these limits."""
    min_pairs, most_partial, sparse_min = limits
    shape = row.facts["limits"]
    if FLEX in row.seconds and shape["B"] * shape["T"] ** 2 >= min_pairs and shape["partial"] <= most_partial:
        return FLEX
    return BLOCKS if BLOCKS in row.seconds and shape["T"] >= sparse_min else DENSE


def loss(rows: Sequence[Row], limits: Limits) -> float:
    """Return the mean log of the time with these limits over that of the fastest kernel of each row."""
    logs = []
    for row in rows:
        times = {side: statistics.median(values) for side, values in row.seconds.items()}
        logs.append(math.log(times.get(choose(row, limits), math.inf) / min(times.values())))
    return statistics.mean(logs)


def fit(rows: Sequence[Row], today: Limits) -> Limits:
    """Return the best limits, of those that tell the rows apart and today's."""
    shapes = [row.facts["limits"] for row in rows]
    pairs = {today[0], *(shape["B"] * shape["T"] ** 2 for shape in shapes), 1 << 62}
    partial = {today[1], *(shape["partial"] for shape in shapes)}
    lengths = {today[2], *(shape["T"] for shape in shapes), 1 << 31}

    def rank(limits: Limits) -> tuple[float, float]:
        distance = sum(abs(math.log((new + 1e-9) / (old + 1e-9))) for new, old in zip(limits, today))
        return round(loss(rows, limits), 9), distance

    return min(itertools.product(pairs, partial, lengths), key=rank)


def main() -> None:
    """Run the command line."""
    from speechformer.kernels import dispatch

    parser = ArgumentParser("python benchmarks/limits.py", description="Fit the limits of the dispatcher of kernels.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="that holds gpu.json")
    path = parser.parse_args().folder / "gpu.json"

    def run() -> None:
        rows = [row for row in read_rows(path) if "limits" in row.facts and DENSE in row.seconds]
        if not rows:
            raise UserError(f"{path} has no rows of the part `patterns`; run benchmarks/gpu.py patterns first.")
        names = ("FLEX_MIN_PAIRS", "PARTIAL_TILES", "SPARSE_MIN_ON_GPU")
        today = dispatch.FLEX_MIN_PAIRS, dispatch.PARTIAL_TILES, dispatch.SPARSE_MIN_ON_GPU
        best = fit(rows, today)
        for name, old, new in zip(names, today, best):
            print(f"{name} = {new:,}".replace(",", "_") + ("" if new == old else f"  # today {old:,}"))
        before, after = (100 * (math.exp(loss(rows, limits)) - 1) for limits in (today, best))
        print(f"{len(rows)} rows: {after:.1f} % slower than the fastest kernels on average, today {before:.1f} %")

    run_command(run)


if __name__ == "__main__":
    main()
