"""`hydra/sweeper=tuned`: tune each row of a study on the same grid under the same budget, then run fresh seeds.

The settings to tune have the tag `tune`: `'recipe.lr=tag(tune, choice(1e-3,3e-3))'`. A row is a combination of the
other swept values, without the seed. The stages are:

1. every row with every point of the grid and every tuning seed, as `study=<name>_tuning`;
2. for each row, the point with the best mean score on held-out data (written to `tuned.json`), of equal ones that of
   the config without tuning;
3. every row with its choice, and as it is without tuning, with the seeds of the command; `untuned_seeds` limits how
   many of them run without tuning.

A grid that suits one row and not another is the commonest reason for a false difference between them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.sweeper import HeldOutSweeper, register_plugin

TUNED = "tuned.json"  # in the sweep's folder: grid, seeds, and the choice of each row
Row = tuple[str, ...]  # overrides
Key = tuple[Row, Row]  # a row and a point of the grid


class TunedSweeper(HeldOutSweeper):
    """Hydra's plugin; the arguments are those of `conf/hydra/sweeper/tuned.yaml`."""

    def __init__(self, tuning_seeds: Sequence[int], untuned_seeds: int | None = None, params: Any = None) -> None:
        self.tuning_seeds, self.untuned_seeds, self.params = list(tuning_seeds or []), untuned_seeds, params

    def sweep(self, arguments: list[str]) -> Any:
        overrides = {override.get_key_element(): override for override in self.parse(arguments)}
        swept_seed = overrides.pop("seed", None)
        seeds = [()] if swept_seed is None else expand([swept_seed])
        grid = {key: word for key, word in overrides.items() if "tune" in getattr(word.value(), "tags", ())}
        if (n := self.untuned_seeds) is not None and (type(n) is not int or n < 0):
            raise UserError(f"hydra.sweeper.untuned_seeds={n}: expected a number of seeds, or null.")
        if not grid or not self.tuning_seeds:
            example = "'recipe.lr=tag(tune, choice(1e-3,3e-3))'"
            raise UserError(
                f"hydra/sweeper=tuned needs something to tune, such as {example}, and hydra.sweeper.tuning_seeds."
            )
        rows = [*dict.fromkeys(expand([word for key, word in overrides.items() if key not in grid]))]
        points = [*dict.fromkeys(expand([*grid.values()]))]
        mode = self.check(rows, points, seeds)
        tuning = [(f"study={self.cfg.study or self.cfg.task.name}_tuning", f"seed={k}") for k in self.tuning_seeds]
        jobs = {(row, point): [(*row, *point, *words) for words in tuning] for row in rows for point in points}
        returned = self.run([*itertools.chain(*jobs.values())])
        scores = self.read_scores(jobs)
        ordered = {row: self.default_first(row, points) for row in rows}
        choices = {row: choose({point: scores[row, point] for point in ordered[row]}, mode) for row in rows}
        self.write(points, choices, scores)
        chosen = [(*row, *point) for row, point in choices.items() if point is not None]
        final = [(*row, *seed) for row in chosen for seed in seeds]
        untuned = [(*row, *seed) for row in rows for seed in seeds[: self.untuned_seeds]]
        return [*returned, *self.run([*final, *untuned])]

    def read_scores(self, jobs: Mapping[Key, Sequence[Row]]) -> dict[Key, float]:
        """Return the mean score of each row and point; NaN if a run diverged.

        Raises:
            UserError: a run has neither finished nor diverged. A choice without it would have another budget.
        """
        ended = {tuple(job.overrides): job for job in sweeps.jobs_of(self.folder)}
        states = [ended[job].state.status for job in itertools.chain(*jobs.values())]
        if missing := [state for state in states if state not in ("finished", "diverged")]:
            raise UserError(
                f"{len(missing)} of {len(states)} tuning runs in {self.folder} have no score "
                f"({', '.join(sorted({*missing}))}), so nothing is chosen. Run the same command again."
            )
        return {key: statistics.mean(score_of(ended[job].state) for job in seeds) for key, seeds in jobs.items()}

    def check(self, rows: Sequence[Row], points: Sequence[Row], seeds: Sequence[Row]) -> str:
        """Return the direction of the task's metric, "max" or "min".

        Raises:
            UserError: nothing is held out, the rows are of several tasks, or a seed is used in both stages.
        """
        used = {word for seed in seeds for word in seed} or {f"seed={self.cfg.seed}"}
        if both := used & {f"seed={seed}" for seed in self.tuning_seeds}:
            raise UserError(
                f"{', '.join(sorted(both))} is in hydra.sweeper.tuning_seeds, too; tune with other seeds."
            )
        if any(word.startswith("++seed=") for row in rows for word in row):
            raise UserError("hydra/sweeper=tuned takes the seeds of seed=, not of ++seed=.")
        modes = {self.task_and_mode((*row, *point)) for row in rows for point in points}
        if len(modes) > 1:
            raise UserError("hydra/sweeper=tuned tunes one task at a time.")
        return modes.pop()[1]

    def default_first(self, row: Row, points: Sequence[Row]) -> list[Row]:
        """Return the points, that of the config without tuning first."""
        config = self.loader.load_sweep_config(self.cfg, list(row))
        keys = [word.partition("=")[0] for word in points[0]]

        def differs(point: Row) -> bool:
            settings = OmegaConf.from_dotlist(list(point))
            return any(OmegaConf.select(settings, key) != OmegaConf.select(config, key) for key in keys)

        return sorted(points, key=differs)

    def run(self, jobs: Sequence[Row]) -> Sequence[Any]:
        """Run some jobs and return what Hydra's launcher returns."""
        overrides = [list(job) for job in jobs]
        self.plan_jobs(overrides)
        return self.launch(overrides, initial_job_idx=0)

    def write(self, points: Sequence[Row], choices: Mapping[Row, Row | None], scores: Mapping[Key, float]) -> None:
        """Write `tuned.json`; rows are named by what differs between them."""
        names = sweeps.names([*choices])
        rows = [
            {
                "row": name,
                "choice": choice and list(choice),
                "scores": [None if math.isnan(scores[row, point]) else scores[row, point] for point in points],
            }
            for name, (row, choice) in zip(names, choices.items())
        ]
        content = {"points": [list(point) for point in points], "tuning_seeds": self.tuning_seeds, "rows": rows}
        runs.write_json(self.folder / TUNED, content)


def expand(overrides: Sequence[Override]) -> list[Row]:
    """Return every combination of the values of some overrides."""
    return [*map(tuple, itertools.chain(*BasicSweeper.split_arguments([*overrides], None)))]


def score_of(state: runs.State) -> float:
    """Return the best score of a run that has ended; NaN if it diverged or has none."""
    value = (state.result or {})["best"]["value"] if state.status == "finished" else None
    return math.nan if value is None else value


def choose(scores: Mapping[Row, float], mode: str) -> Row | None:
    """Return the point with the best score, the first of equal ones; None if none has a score.

    `TunedSweeper` puts the config's own point first, so that a tie changes nothing.
    """
    sign = 1 if mode == "max" else -1
    valid = [point for point, score in scores.items() if math.isfinite(score)]
    return max(valid, key=lambda point: sign * scores[point], default=None)


def register() -> None:
    """Register the sweeper with Hydra."""
    register_plugin(TunedSweeper, "speechformer_tuned")
