"""`hydra/sweeper=optuna`: choose settings by the held-out score, through any launcher, over optuna's ask and tell.

search.journal  optuna's study, which a later command continues and which several machines may share
search.json     the trial of each job, by the job's number in `sweep.json`

The stable Hydra plugin for optuna needs an optuna below version 3.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from speechformer import console
from speechformer.errors import UserError, one_sentence, require
from speechformer.runs import folder as runs
from speechformer.runs.search import JOURNAL, SEARCH, STUDY, import_optuna, journal
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import progress
from speechformer.sweeps.sweeper import HeldOutSweeper, register_plugin

COMMANDS = "commands"
FIRST_PRUNING = 3  # evaluation after which a run may be pruned: the first ones say little


class PrunedError(Exception):
    """A run whose curve is so far below that of other trials that it is not continued."""


class OptunaSweeper(HeldOutSweeper):
    """Hydra's plugin; the arguments are those of `conf/hydra/sweeper/optuna.yaml`."""

    def __init__(self, trials: int, at_once: int | None = None, params: Any = None, **classes: Any) -> None:
        self.trials, self.at_once, self.params, self.classes = trials, at_once, params, classes
        self.token = secrets.token_hex(4)

    def sweep(self, arguments: list[str]) -> Any:
        for name, value in (("trials", self.trials), ("at_once", self.at_once)):
            valid = value is None or (type(value) is int and value >= 1)
            require(valid, f"hydra.sweeper.{name}", "a whole number of at least 1", value)
        self.fixed, self.space, self.seeds = split_overrides(self.parse(arguments))
        _, mode = self.task_and_mode(self.fixed)
        self.study = open_study(self.folder, self.classes, "maximize" if mode == "max" else "minimize")
        self.check_space()
        (self.folder / COMMANDS).mkdir(exist_ok=True)
        returned = []
        with FileLock(self.folder / COMMANDS / f"{self.token}.lock"):
            self.repeat_lost_trials()
            while batch := self.ask():
                returned.append(self.run(batch))
        say_best(self.study, sweeps.jobs_of(self.folder), len(self.seeds))
        return returned

    def check_space(self) -> None:
        """Raise a `UserError` if the study is of another search."""
        space = {key: repr(value) for key, value in self.space.items()}
        search: dict[str, Any] = {"space": space, "fixed": sorted(self.fixed), "seeds": self.seeds}
        before = self.study.user_attrs.get("search")
        if before is None:
            self.study.set_user_attr("search", search)
        elif before != search:
            raise UserError(
                f"{self.folder / JOURNAL} holds the search over {before['space']} with "
                f"{' '.join(before['fixed']) or 'the defaults'}, and seeds {before['seeds']}. {sweeps.CHOOSE}"
            )

    def repeat_lost_trials(self) -> None:
        """Queue the trials again whose command was killed; their runs resume from their last checkpoint."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            owner = Path(str(trial.user_attrs.get("command", ""))).name  # a lock elsewhere would be made
            lock = FileLock(self.folder / COMMANDS / f"{owner}.lock")
            try:
                if owner != self.token:
                    with lock.acquire(timeout=0):
                        pass
            except Timeout:
                continue
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params, user_attrs={"repeats": trial.number})

    def ask(self) -> list[Any]:
        """Return the next trials."""
        trials = self.study.get_trials(deepcopy=False)
        repeated = {trial.user_attrs.get("repeats") for trial in trials}
        waiting = [trial for trial in trials if trial.state.name == "WAITING"]
        begun = sum(trial.number not in repeated for trial in trials) - len(waiting)
        batch = []
        for _ in range(min(self.trials_at_once(), self.trials - begun)):
            trial = self.study.ask(self.space)
            trial.set_user_attr("command", self.token)
            batch.append(trial)
        return batch

    def trials_at_once(self) -> int:
        """Return how many trials run at once."""
        launcher, runs_at_once = self.choices["hydra/launcher"], 8
        if launcher == "basic":
            runs_at_once = 1
        elif launcher == "joblib":
            from joblib import effective_n_jobs

            runs_at_once = effective_n_jobs(self.cfg.hydra.launcher.n_jobs)
        return self.at_once or max(1, runs_at_once // len(self.seeds))

    def run(self, batch: Sequence[Any]) -> Any:
        """Run the jobs of some trials, and tell their scores."""
        from optuna.trial import TrialState

        seeds = [[] if seed is None else [f"seed={seed}"] for seed in self.seeds]
        jobs = [[*self.fixed, *chosen(trial), *seed] for trial in batch for seed in seeds]
        for job in jobs:
            self.task_and_mode(job)
        self.plan_jobs(jobs)
        planned = sweeps.plan(self.folder)["jobs"]
        numbers = [planned.index(job) for job in jobs]
        trial_numbers = [trial.number for trial in batch for _ in self.seeds]
        with FileLock(self.folder / sweeps.SWEEP_LOCK):  # another machine may have the same search
            before = (runs.read_json(self.folder / SEARCH) or {}).get("jobs", {})
            trial_of_job = before | dict(zip(map(str, numbers), trial_numbers))
            runs.write_json(self.folder / SEARCH, {"seeds": len(self.seeds), "jobs": trial_of_job})
        returned = self.launch(jobs, initial_job_idx=0)
        states = {job.number: job.state.status for job in sweeps.jobs_of(self.folder)}
        for k, trial in enumerate(batch):
            its_jobs = slice(k * len(self.seeds), (k + 1) * len(self.seeds))
            scores = [job.return_value for job in returned[its_jobs]]
            ended = {states[number] for number in numbers[its_jobs]}
            if ended == {"finished"} and all(map(math.isfinite, scores)):
                self.study.tell(trial, statistics.mean(scores))
            else:
                self.study.tell(trial, state=TrialState.PRUNED if ended == {"pruned"} else TrialState.FAIL)
        return returned


def chosen(trial: Any) -> list[str]:
    """Return the overrides that a trial has chosen; numbers have three digits."""
    values = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in trial.params.items()}
    return [f"{key}={value}" for key, value in values.items()]


def say_best(study: Any, jobs: Sequence[sweeps.Job], seeds: int) -> None:
    """Print the best trial."""
    from optuna.trial import TrialState

    scores = (progress.score(job.state.result or {}) for job in jobs if job.state.status == "finished")
    metric = next((name for name, _ in filter(None, scores)), "")
    if complete := study.get_trials(states=[TrialState.COMPLETE]):
        over = f", the mean of {seeds} seeds" if seeds > 1 else ""
        score = f"{metric.replace('_', ' ')} {console.format_metric(metric, study.best_value)}"
        console.say(f"Best of {len(complete)} complete trials: {' '.join(chosen(study.best_trial))}: {score}{over}.")


def split_overrides(overrides: Sequence[Override]) -> tuple[list[str], dict[str, Any], list[str | None]]:
    """Return the constant overrides, optuna's distributions by key, and the seeds of each trial (None: the default).

    Raises:
        UserError: optuna is missing, a value is no search space, or there is none.
    """
    fixed, space, seeds = list[str](), dict[str, Any](), list[str | None]([None])
    last = {override.get_key_element(): override for override in overrides}  # after those of an experiment
    for key, override in last.items():
        if not override.is_sweep_override():
            fixed.append(f"{key}={override.get_value_element_as_str()}" if override.value_type else key)
        elif key == "seed" and override.is_discrete_sweep():
            seeds = [*override.sweep_string_iterator()]
        else:
            space[key] = distribution(override)
    if not space:
        example = "'recipe.lr=tag(log, interval(1e-4,1e-2))'"
        raise UserError(f"hydra/sweeper=optuna needs something to search, such as {example}.")
    return fixed, space, seeds


def distribution(override: Override) -> Any:
    """Return optuna's distribution of a swept value."""
    optuna, value = import_optuna(), override.value()
    log = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, IntervalSweep):
            whole = isinstance(value.start, int) and isinstance(value.end, int)
            numeric = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
            return numeric(value.start, value.end, log=log)
        if isinstance(value, RangeSweep) and all(isinstance(x, int) for x in (value.start, value.stop, value.step)):
            values: Any = value.range()
            return optuna.distributions.IntDistribution(min(values), max(values), step=abs(values.step))
        return optuna.distributions.CategoricalDistribution([*override.sweep_string_iterator()])
    except ValueError as error:
        raise UserError(f"{override.input_line} is no search space: {error}") from error


def open_study(folder: Path, classes: Any, direction: str | None = None) -> Any:
    """Open the study of a sweep; create it if it is new, and a direction is known.

    Args:
        classes: sampler and pruner with their options. The sampler's seed is raised by the number of trials, so that
            a search that goes on does not draw the same ones again.
    """
    optuna = import_optuna()
    options = {"study_name": STUDY, "storage": journal(folder), "pruner": instance(optuna.pruners, classes, "pruner")}
    if direction is None:
        return optuna.load_study(**options)
    study = optuna.create_study(**options, direction=direction, load_if_exists=True)
    study.sampler = instance(optuna.samplers, classes, "sampler", len(study.trials))
    return study


def instance(module: Any, classes: Any, name: str, more: int = 0) -> Any:
    """Return the chosen sampler or pruner, its seed raised by `more`; raise a `UserError` if there is none."""
    options = dict(classes.get(f"{name}_options") or {})
    if isinstance(options.get("seed"), int):
        options["seed"] += more
    chosen = getattr(module, str(classes.get(name)), None)
    if not isinstance(chosen, type):
        valid = ", ".join(known for known in module.__all__ if known.endswith(name.capitalize()))
        raise UserError(f"hydra.sweeper.{name}={classes.get(name)} is not one of {valid}.")
    try:
        return chosen(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"hydra.sweeper.{name}_options of {chosen.__name__}: {one_sentence(error)}") from error


def reporter(folder: Path, number: int, classes: Any) -> Callable[[int, dict[str, float], str], None] | None:
    """Return a function that reports a job's evaluations and raises a `PrunedError`; None outside a search.

    Args:
        folder, number: of the sweep, and of the job in it.
        classes: the config of the sweeper.
    """
    content = runs.read_json(folder / SEARCH) or {}
    if str(number) not in content.get("jobs", {}) or content["seeds"] > 1:  # the first seed alone would decide
        return None
    study = open_study(folder, classes)
    frozen_trial = study.get_trials(deepcopy=False)[content["jobs"][str(number)]]
    trial = import_optuna().trial.Trial(study, frozen_trial._trial_id)
    evaluations = itertools.count(1)

    def report(step: int, metrics: dict[str, float], metric: str) -> None:
        if math.isfinite(metrics.get(metric, math.nan)):
            trial.report(metrics[metric], step)
            if next(evaluations) >= FIRST_PRUNING and trial.should_prune():
                raise PrunedError(f"pruned at step {step}, where its {metric} was {metrics[metric]:.4g}")

    return report


def register() -> None:
    """Register the sweeper with Hydra."""
    register_plugin(OptunaSweeper, "speechformer_search")
