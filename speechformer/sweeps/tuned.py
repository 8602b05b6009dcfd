"""`hydra/sweeper=tuned`: tune each row of a study on the same grid under the same budget, then run fresh seeds.

The settings to tune have the tag `tune`: `'recipe.lr=tag(tune, choice(1e-3,3e-3))'`. A row is a combination of the
other swept values, without the seed. The stages are:

1. every row with every point of the grid and every tuning seed, as `study=<name>_tuning`;
2. for each row, the point with the best mean score on held-out data (written to `tuned.json`). The config without
   tuning, if it is a point, stays unless the gain over the tuning seeds is more than twice its standard error;
3. every row with its choice, and as it is without tuning, with the seeds of the command; `untuned_seeds` limits how
   many of them run without tuning.

A grid that suits one row and not another is the commonest reason for a false difference between them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import Override

from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.runs.naming import plain
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.folder import Overrides
from speechformer.sweeps.sweeper import HeldOutSweeper, best_score, combinations

TUNED = "tuned.json"  # in the sweep's folder: grid, seeds, and the choice of each row


class TunedSweeper(HeldOutSweeper):
    """Hydra's plugin; the arguments are those of `conf/hydra/sweeper/tuned.yaml`."""

    def __init__(
        self,
        tuning_seeds: Sequence[int],
        untuned_seeds: int | None = None,
        params: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(params)
        self.tuning_seeds, self.untuned_seeds = list(tuning_seeds or []), untuned_seeds

    def choose_jobs(self, overrides: Mapping[str, Override]) -> None:
        grid = [word for word in overrides.values() if "tune" in getattr(word.value(), "tags", ())]
        if not grid or not self.tuning_seeds:
            example = "'recipe.lr=tag(tune, choice(1e-3,3e-3))'"
            raise UserError(
                f"hydra/sweeper=tuned needs something to tune, such as {example}, and hydra.sweeper.tuning_seeds."
            )
        seeds = combinations([overrides["seed"]]) if "seed" in overrides else [(f"seed={self.config.seed}",)]
        both = {word for seed in seeds for word in seed} & {f"seed={seed}" for seed in self.tuning_seeds}
        if both:
            raise UserError(f"{', '.join(both)} is in hydra.sweeper.tuning_seeds, too; tune with other seeds.")
        rows = combinations(word for key, word in overrides.items() if word not in grid and key != "seed")
        points = combinations(grid)
        sign = 1 if self.mode_of(rows) == "max" else -1
        study = f"study={self.config.study or self.config.task.name}_tuning"
        tuning = [(study, f"seed={seed}") for seed in self.tuning_seeds]
        jobs = {(row, point): [(*row, *point, *words) for words in tuning] for row in rows for point in points}
        ended = self.run(job for of_point in jobs.values() for job in of_point)
        if missing := sorted(state.status for state in ended.values() if state.status not in runs.TERMINAL_STATES):
            raise UserError(  # a choice without them would have another budget
                f"{len(missing)} of {len(ended)} tuning runs in {self.folder} have no score "
                f"({', '.join(dict.fromkeys(missing))}), so nothing is chosen. Run the same command again."
            )
        each = {key: [sign * best_score(ended[job]) for job in jobs[key]] for key in jobs}  # the higher the better
        means = {key: statistics.mean(scores) for key, scores in each.items()}
        choices = dict[Overrides, Overrides | None]()
        for row in rows:
            valid = [point for point in points if math.isfinite(means[row, point])]
            best = max(valid, key=lambda point: means[row, point], default=None)
            untuned = plain(self.compose(row))
            default = next((point for point in valid if plain(self.compose([*row, *point])) == untuned), None)
            if best is not None and default is not None:
                best = best if is_gain(each[row, best], each[row, default]) else default
            choices[row] = best
        self.write(points, choices, {key: sign * mean for key, mean in means.items()})
        final = [(*row, *point, *seed) for row, point in choices.items() for seed in seeds if point is not None]
        self.run([*final, *((*row, *seed) for row in rows for seed in seeds[: self.untuned_seeds])])

    def write(
        self,
        points: Sequence[Overrides],
        choices: Mapping[Overrides, Overrides | None],
        scores: Mapping[tuple[Overrides, Overrides], float],
    ) -> None:
        """Write `tuned.json`; rows are named by what differs between them."""
        rows = [
            {"row": name, "choice": choices[row], "scores": [scores[row, point] for point in points]}
            for name, row in zip(sweeps.names([*choices]), choices)
        ]
        content = {"points": points, "tuning_seeds": self.tuning_seeds, "rows": rows}
        runs.write_json(self.folder / TUNED, content)


def is_gain(scores: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether scores are better than others of the same seeds by more than noise; of one seed, at all."""
    gains = [score - other for score, other in zip(scores, others, strict=True)]
    noise = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return statistics.mean(gains) > 2 * noise
