"""What the benchmarks share: timing in turns, ratios with intervals, a JSON file of rows, and their tables.

The sides of a row are timed in turns, one block of each in every round, so that other load on the machine slows all
of them alike. `--show` needs neither torch nor scipy, because the ratios stand in the file.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from speechformer.corpora.files import write_file
from speechformer.errors import ArgumentParser, UserError, run_command, unknown
from speechformer.runs import identity

TASKS = {"classify": "classifier", "lm": "language model"}
OUTPUT = Path("outputs/reference/bench")
BLOCK_SECONDS = 0.2  # the least time that a side runs in one round
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in a run: waiting threads would crawl beside a busy process


@dataclass
class Row:
    """One line of a table.

    Attributes:
        table: the caption of its table.
        name: what was timed.
        seconds: of each side, the seconds per unit of work in each round. The first side is ours.
        facts: other figures, for the columns of a script.
        compared: whether there is a ratio.
        ratio: how many times as fast our side is as the fastest other of each round, the geometric mean over rounds.
        interval: the 95 % confidence interval of `ratio`; None with fewer than two rounds.
        machine, commit: where it was measured, and what.
    """

    table: str
    name: str
    seconds: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)
    compared: bool = True
    ratio: float | None = None
    interval: Sequence[float] | None = None
    machine: str = ""
    commit: str = ""

    def compare(self) -> None:
        """Set `ratio` and `interval`: a t-interval of the logarithms of the ratios of the rounds."""
        ours, *others = self.seconds.values()
        if not others or not self.compared:
            return
        logs = [math.log(min(values) / own) for own, *values in zip(ours, *others)]
        mean = statistics.mean(logs)
        self.ratio = math.exp(mean)
        if len(logs) > 1:
            from scipy.stats import t

            half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
            self.interval = (math.exp(mean - half), math.exp(mean + half))


Key = TypeVar("Key")
Columns = Mapping[str, Callable[[Row], str]]  # a heading, and the cell of a row; a column of empty cells is left out
Part = Callable[..., Iterable[Row]]  # of the rounds, and sizes if there are any; measure_X measures the part X


def time_in_turns(
    sides: Mapping[Key, Callable[[], object]], rounds: int, units: int = 1, threads: int | None = None
) -> dict[Key, list[float]]:
    """Return the seconds per unit of work of each function in each round, after a round to warm up.

    In a round each function is called once, and then for `BLOCK_SECONDS` or longer, with so many `threads` of torch
    (None: as many as now). A call does so many `units` of work.
    """
    import torch
    from torch.utils.benchmark import Timer

    threads = threads or torch.get_num_threads()
    timers = {name: Timer("side()", globals={"side": side}, num_threads=threads) for name, side in sides.items()}
    blocks = [
        {name: timer.blocked_autorange(min_run_time=BLOCK_SECONDS).median / units for name, timer in timers.items()}
        for _ in range(rounds + 1)
    ]
    return {name: [block[name] for block in blocks[1:]] for name in sides}


def find_machine() -> str:
    """Return the name of the GPU, or of the CPU with its cores, and the version of torch."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpus = Path("/proc/cpuinfo")  # Linux
    model = re.search(r"model name\s*: (.*)", cpus.read_text(encoding="utf-8") if cpus.exists() else "")
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a benchmark.

    Raises:
        UserError: the file is missing or is not one of a benchmark.
    """
    try:
        return [Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; measure first, without --show.") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged, or is not the file of a benchmark; measure again.") from None


def format_seconds(value: float) -> str:
    """Format a time in s or ms."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def format_ratio(row: Row) -> str:
    """Format a ratio and its interval; empty without a ratio."""
    texts = [f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in (row.ratio, *(row.interval or ())) if x is not None]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else "".join(texts)


def format_tables(rows: Sequence[Row], columns: Columns) -> str:
    """Format rows in Markdown: each table with its medians, ratios and columns, and where it was measured."""
    texts = []
    for caption in dict.fromkeys(row.table for row in rows):
        group = [row for row in rows if row.table == caption]
        sides = dict.fromkeys(side for row in group for side in row.seconds)
        cells: dict[str, list[str]] = {caption: [row.name for row in group]}
        for side in sides:
            times = (row.seconds.get(side) for row in group)
            cells[side] = [format_seconds(statistics.median(values)) if values else "" for values in times]
        cells["times as fast"] = [format_ratio(row) for row in group]
        cells |= {heading: [cell(row) for row in group] for heading, cell in columns.items()}
        cells = {heading: column for heading, column in cells.items() if any(column)}
        lines = [[*cells], ["---"] * len(cells), *map(list, zip(*cells.values()))]
        measured = dict.fromkeys(f"Measured on {row.machine}, at commit {row.commit}." for row in group)
        texts.append("\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *measured]))
    return "\n\n".join(texts)


def main(doc: str | None, measures: Sequence[Part], columns: Columns, rounds: int, sizes: Sequence[Any] = ()) -> None:
    """Run the command line of the benchmark with a docstring.

    Args:
        rounds: the default.
        sizes: of a benchmark that needs CUDA, and of its dry run, which does not.
    """
    name = Path(sys.argv[0]).stem
    parts = {measure.__name__.removeprefix("measure_"): measure for measure in measures}
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(f"python benchmarks/{name}.py", description=doc, formatter_class=formatter)
    if len(parts) > 1:
        parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; without: all")
    parser.add_argument("--rounds", type=int, default=rounds, help="blocks of each side (%(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"folder of {name}.json (%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the tables of that file, measure nothing")
    if sizes:
        parser.add_argument("--dry", action="store_true", help="tiny sizes, on any machine: does it work?")
    options = parser.parse_args()
    dry = getattr(options, "dry", False)
    path = options.output / f"{name}.json"

    def run() -> None:
        global BLOCK_SECONDS
        if options.show:
            print(format_tables(read_rows(path), columns))
            return
        if options.rounds < 1:
            raise UserError(f"--rounds must be at least 1, not {options.rounds}.")
        chosen = getattr(options, "parts", None) or [*parts]
        for part in chosen:
            if part not in parts:
                raise unknown(parser.prog, "part", part, parts)
        if sizes and not dry and "cores" in find_machine():  # a CPU
            raise UserError(f"there is no CUDA device here, which {parser.prog} needs.")
        rounds, BLOCK_SECONDS = (1, 0.0) if dry else (options.rounds, BLOCK_SECONDS)
        for part in chosen:
            rows: list[Row] = []
            for row in parts[part](rounds, *([sizes[dry]] if sizes else [])):
                rows.append(row)
                record(path, rows)  # now, so that an interruption loses no measurement
            print(format_tables(rows, columns), flush=True)

    run_command(run)


def record(path: Path, rows: Sequence[Row]) -> None:
    """Complete the last row, and write all into a file, where they replace the tables that they belong to."""
    rows[-1].compare()
    rows[-1].machine = find_machine()
    rows[-1].commit = re.sub(r"(?<=^.{7})[0-9a-f]+", "", identity.commit() or "unknown")
    kept = [row for row in read_rows(path) if row.table not in {row.table for row in rows}] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content["rows"] = [asdict(row) for row in (*kept, *rows)]
    write_file(path, f"{json.dumps(content, indent=1)}\n".encode())  # whole, if the process is killed meanwhile
