"""`hydra/sweeper=tuned`: tune each row of a study on the same grid under the same budget, then run fresh seeds.

The settings to tune have the tag `tune`: `'recipe.lr=tag(tune, choice(1e-3,3e-3))'`. A row is a combination of the
other swept values, without the seed. The stages are:

1. every row with every point of the grid and every tuning seed, as `study=<name>_tuning`;
2. for each row, the point with the best mean score on held-out data (written to `tuned.json`);
3. every row with its choice, and as it is without tuning, with the seeds of the command.

A grid that suits one row and not another is the commonest reason for a false difference between them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.search import check_held_out

TUNED = "tuned.json"  # in the sweep's folder: grid, seeds, and the choice of each row
Row = tuple[str, ...]  # overrides


class TunedSweeper(Sweeper):
    """Hydra's plugin; the arguments are those of `conf/hydra/sweeper/tuned.yaml`."""

    def __init__(self, tuning_seeds: Sequence[int], params: Any = None) -> None:
        self.tuning_seeds, self.params = list(tuning_seeds or []), params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.cfg, self.loader = config, hydra_context.config_loader
        arguments: Any = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self.launch = Plugins.instance().instantiate_launcher(**arguments).launch

    def sweep(self, arguments: list[str]) -> Any:
        words = [f"{key}={value}" for key, value in self.params.items()]
        parser = OverridesParser.create(config_loader=self.loader)
        last = {own.get_key_element(): own for own in parser.parse_overrides([*words, *arguments])}
        seeds = expand([last.pop("seed")]) if "seed" in last else [()]
        grid = {key: own for key, own in last.items() if "tune" in getattr(own.value(), "tags", ())}
        if not grid or not self.tuning_seeds:
            example = "'recipe.lr=tag(tune, choice(1e-3,3e-3))'"
            raise UserError(
                f"hydra/sweeper=tuned needs something to tune, such as {example}, and hydra.sweeper.tuning_seeds."
            )
        rows = expand([own for key, own in last.items() if key not in grid])
        points = expand([*grid.values()])
        mode = self.check(rows, seeds)
        study = self.cfg.study or self.cfg.task.name
        tuning = [f"seed={seed}" for seed in self.tuning_seeds]
        jobs = [(*row, *point, f"study={study}_tuning", seed) for row in rows for point in points for seed in tuning]
        returned = self.run(jobs)
        values = iter([job.return_value for job in returned])
        scores = {row: {point: statistics.mean(next(values) for _ in tuning) for point in points} for row in rows}
        choices = {row: choose(own, mode) for row, own in scores.items()}
        self.write(points, choices, scores)
        chosen = [(*row, *point) for row, point in choices.items() if point is not None]
        final = [(*row, *seed) for row in dict.fromkeys([*chosen, *rows]) for seed in seeds]
        return [*returned, *self.run(final)]

    def check(self, rows: Sequence[Row], seeds: Sequence[Row]) -> str:
        """Return the direction of the task's metric, "max" or "min".

        Raises:
            UserError: nothing is held out, the rows are of several tasks, or a seed is used in both stages.
        """
        if both := {f"seed={seed}" for seed in self.tuning_seeds} & {word for seed in seeds for word in seed}:
            raise UserError(
                f"{', '.join(sorted(both))} is in hydra.sweeper.tuning_seeds, too; tune with other seeds."
            )
        modes = {check_held_out(self.cfg, self.loader, row) for row in rows}
        if len(modes) > 1:
            raise UserError("hydra/sweeper=tuned tunes one task at a time.")
        return modes.pop()

    def run(self, jobs: Sequence[Row]) -> Sequence[Any]:
        """Run some jobs and return what Hydra's launcher returns."""
        own = [list(job) for job in jobs]
        sweeps.write_jobs(
            Path(self.cfg.hydra.sweep.dir), sys.argv[1:], own, self.cfg.hydra.runtime.choices["hydra/launcher"]
        )
        return self.launch(own, initial_job_idx=0)

    def write(self, points: Sequence[Row], choices: Mapping[Row, Row | None], scores: Mapping[Row, Any]) -> None:
        """Write `tuned.json`; rows are named by what differs between them."""
        names = sweeps.names([*choices])
        rows = [
            {
                "row": name,
                "choice": choice and list(choice),
                "scores": [None if math.isnan(score) else score for score in scores[row].values()],
            }
            for name, (row, choice) in zip(names, choices.items())
        ]
        content = {"points": [list(point) for point in points], "tuning_seeds": self.tuning_seeds, "rows": rows}
        runs.write_json(Path(self.cfg.hydra.sweep.dir) / TUNED, content)


def expand(overrides: Sequence[Override]) -> list[Row]:
    """Return every combination of the values of some overrides."""
    return [*map(tuple, itertools.chain(*BasicSweeper.split_arguments([*overrides], None)))]


def choose(scores: Mapping[Row, float], mode: str) -> Row | None:
    """Return the point with the best score, the first of equal ones; None if none has a score."""
    sign = 1 if mode == "max" else -1
    valid = [point for point, score in scores.items() if math.isfinite(score)]
    return max(valid, key=lambda point: sign * scores[point], default=None)


def register() -> None:
    """Register the sweeper with Hydra, which takes plugins only from the package `hydra_plugins`."""
    TunedSweeper.__module__ = "hydra_plugins.speechformer_tuned"
    sys.modules[TunedSweeper.__module__] = sys.modules[__name__]
    Plugins.instance().register(TunedSweeper)
