"""`hydra/sweeper=optuna`: choose settings by the held-out score, through any launcher, over optuna's ask and tell.

`search.journal` in the sweep's folder is optuna's study, which a later command continues, and which several machines
may share. A trial keeps its jobs in the attribute `jobs`. The stable Hydra plugin needs an optuna below version 3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.utils import instantiate
from omegaconf import DictConfig

from speechformer import console
from speechformer.errors import UserError, require
from speechformer.runs.search import JOURNAL, STUDY, import_optuna, journal
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.sweeper import HeldOutSweeper, best_score, words_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

FIRST_PRUNING = 3  # evaluation after which a run may be pruned: the first ones say little


class PrunedError(Exception):
    """A run whose curve is so far below that of other trials that it is not continued."""


class OptunaSweeper(HeldOutSweeper):
    """Hydra's plugin; the arguments are those of `conf/hydra/sweeper/optuna.yaml`."""

    def __init__(
        self,
        trials: int,
        at_once: int,
        sampler: DictConfig,
        pruner: DictConfig,
        params: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(params)
        self.trials, self.at_once, self.sampler, self.pruner = trials, at_once, sampler, pruner

    def choose_jobs(self, overrides: Mapping[str, Override]) -> None:
        valid = type(self.trials) is int and self.trials >= 1
        require(valid, "hydra.sweeper.trials", "a whole number of at least 1", self.trials)
        fixed, space, seeds = split_overrides(overrides)
        direction = {"max": "maximize", "min": "minimize"}[self.mode_of([fixed])]
        at_once = 1 if self.choices["hydra/launcher"] == "basic" else self.at_once
        sweeps.add_jobs(self.folder, {})
        sampler, pruner, storage = instantiate(self.sampler), instantiate(self.pruner), journal(self.folder)
        study = import_optuna().create_study(
            storage=storage,
            sampler=sampler,
            pruner=pruner,
            study_name=STUDY,
            direction=direction,
            load_if_exists=True,
        )
        if study.trials:  # it goes on, and does not draw the same ones again
            sampler.reseed_rng()
        search = {"space": {key: repr(value) for key, value in space.items()}, "fixed": fixed, "seeds": seeds}
        if study.user_attrs.setdefault("search", search) != search:
            raise UserError(f"{self.folder} holds another search. {sweeps.CHOOSE}")
        study.set_user_attr("search", search)
        # trials of a command that was killed, or of one that runs elsewhere; their runs resume
        batch = {
            trial.number: trial.user_attrs.get("jobs", []) for trial in study.trials if not trial.state.is_finished()
        }
        self.run_trials(study, batch)
        while (missing := self.trials - len(study.trials)) > 0:
            batch = {}
            for _ in range(min(at_once, missing)):
                trial = study.ask(space)
                batch[trial.number] = [[*fixed, *chosen(trial.params), *seed] for seed in seeds]
                trial.set_user_attr("jobs", batch[trial.number])
            self.run_trials(study, batch)
        if any(trial.state.name == "COMPLETE" for trial in study.trials):
            over = f", the mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
            console.say(f"Best trial: {' '.join(chosen(study.best_params))}: {study.best_value:.4g}{over}.")

    def run_trials(self, study: Study, batch: Mapping[int, Sequence[Sequence[str]]]) -> None:
        """Run the jobs of some trials, by number, and tell their scores."""
        from optuna.trial import TrialState

        ended = self.run(tuple(job) for jobs in batch.values() for job in jobs)
        for number, jobs in batch.items():
            states = [ended[tuple(job)] for job in jobs]
            scores = [best_score(state) for state in states]
            if states and all(map(math.isfinite, scores)):
                study.tell(number, statistics.mean(scores), skip_if_finished=True)
            else:
                pruned = {state.status for state in states} == {"pruned"}
                study.tell(number, state=TrialState.PRUNED if pruned else TrialState.FAIL, skip_if_finished=True)


def chosen(params: Mapping[str, object]) -> list[str]:
    """Return the overrides that a trial has chosen; numbers have three digits."""
    return [f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()]


def split_overrides(
    overrides: Mapping[str, Override],
) -> tuple[list[str], dict[str, BaseDistribution], list[list[str]]]:
    """Return the constant overrides, optuna's distributions by key, and the override of each seed of a trial.

    Raises:
        UserError: optuna is missing, a value is no search space, or there is none.
    """
    fixed, space, seeds = list[str](), {}, [list[str]()]
    for key, override in overrides.items():
        if not override.is_sweep_override():
            fixed += words_of(override)
        elif key == "seed" and override.is_discrete_sweep():
            seeds = [[word] for word in words_of(override)]
        else:
            space[key] = distribution(override)
    if not space:
        example = "'recipe.lr=tag(log, interval(1e-4,1e-2))'"
        raise UserError(f"hydra/sweeper=optuna needs something to search, such as {example}.")
    return fixed, space, seeds


def distribution(override: Override) -> BaseDistribution:
    """Return optuna's distribution of a swept value."""
    distributions, value = import_optuna().distributions, override.value()
    try:
        if isinstance(value, IntervalSweep):
            whole = isinstance(value.start, int) and isinstance(value.end, int)
            numeric = distributions.IntDistribution if whole else distributions.FloatDistribution
            return numeric(value.start, value.end, log="log" in value.tags)
        return distributions.CategoricalDistribution([*override.sweep_string_iterator()])
    except ValueError as error:
        raise UserError(f"{override.input_line} is no search space: {error}") from error


def reporter(
    folder: Path, job: Sequence[str], sweeper: DictConfig
) -> Callable[[int, dict[str, float], str], None] | None:
    """Return a function that reports a job's evaluations and raises a `PrunedError`.

    Returns None outside a search, and if the trial has several seeds: the first alone would decide.

    Args:
        folder, job: of the sweep, and the overrides of a job in it.
        sweeper: its config.
    """
    if not (folder / JOURNAL).exists():
        return None
    study = import_optuna().load_study(study_name=STUDY, storage=journal(folder), pruner=instantiate(sweeper.pruner))
    found = [trial for trial in study.trials if trial.user_attrs.get("jobs") == [list(job)]]
    if not found:
        return None
    trial = import_optuna().trial.Trial(study, found[-1]._trial_id)
    reported = set(found[-1].intermediate_values)

    def report(step: int, metrics: dict[str, float], metric: str) -> None:
        if math.isfinite(metrics.get(metric, math.nan)):
            trial.report(metrics[metric], step)
            reported.add(step)
            if len(reported) >= FIRST_PRUNING and trial.should_prune():
                raise PrunedError(f"pruned at step {step}, where its {metric} was {metrics[metric]:.4g}")

    return report
