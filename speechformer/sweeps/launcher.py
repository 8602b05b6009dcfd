"""`hydra/launcher=ensemble`: train the runs of a sweep that have the same shapes as one model.

They may differ in seed, `recipe.lr`, pattern, and positions whose parameters have the same shapes. They train first,
in one process, and leave their folders as if each had run alone (`training.ensemble`). Then all jobs run one after
another. That passes over the runs that have ended, and runs what could not be in an ensemble. A small model leaves a
GPU almost idle, so an ensemble is much faster there. On a CPU it saves the overhead of a step.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from speechformer import console
from speechformer.config import as_plain, check_sweep, debug_arguments
from speechformer.errors import UserError, one_sentence, require
from speechformer.process import standard_state
from speechformer.runs import folder as runs
from speechformer.runs.identity import NOT_IDENTITY
from speechformer.runs.naming import plain
from speechformer.runs.rank import count_devices
from speechformer.sweeps.folder import names
from speechformer.training import runtime

COUNTING = ("unknown_rate", "ngram_targets", "ngram_mixture", "naive_bayes")  # settings of tasks
Member = tuple[DictConfig, Path, Sequence[str]]  # a run's config, folder and overrides


class EnsembleLauncher(Launcher):
    """Hydra's plugin; an ensemble has at most `members` runs."""

    def __init__(self, members: int = 32) -> None:
        require(
            type(members) is int and members >= 1, "hydra.launcher.members", "a whole number of at least 1", members
        )
        self.members = members

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        configs = [self.context.config_loader.load_sweep_config(self.config, list(job)) for job in job_overrides]
        jobs = [
            (
                OmegaConf.create(plain(cfg)),
                Path(cfg.hydra.sweep.dir) / cfg.hydra.sweep.subdir,
                list(cfg.hydra.overrides.task),
            )
            for cfg in configs
        ]
        groups, alone = group_jobs(filter(may_join, jobs))
        for group in groups:
            for first in range(0, len(group), self.members):
                train(group[first : first + self.members])
        for reason, count in alone.items():
            console.say(f"Not in an ensemble: {count} of {len(configs)} runs, because {reason}.")
        returned = []
        for number, cfg in enumerate(configs, start=initial_job_idx):
            with open_dict(cfg):
                cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            returned.append(run_job(self.task_function, cfg, "hydra.sweep.dir", "hydra.sweep.subdir", self.context))
        return returned


def may_join(job: Member) -> bool:
    """Return whether a run has not begun, or was interrupted in an ensemble: one that was alone resumes alone."""
    state = runs.state(job[1])
    return state.status == "left" or (state.result is None and bool(state.owner.get("ensemble")))


def train(jobs: list[Member]) -> None:
    """Train some jobs as an ensemble. If that fails, say so: they run one after another."""
    if len(jobs) < 2:
        return
    job_names = names([overrides for _, _, overrides in jobs])
    console.say(f"Ensemble of {len(jobs)} runs: {job_names[0]} to {job_names[-1]}")
    try:
        with standard_state(), runtime.process_set_up():
            from speechformer.training.run import execute_ensemble

            execute_ensemble(jobs)
    except Exception as error:
        reason = one_sentence(error) or type(error).__name__
        runtime.free_memory()
        console.say(f"The ensemble failed ({reason}); its runs run one after another.")


def group_jobs(jobs: Iterable[Member]) -> tuple[list[list[Member]], dict[str, int]]:
    """Return the groups of jobs that can be an ensemble, and how many jobs cannot for which reason."""
    groups: dict[str, list[Member]] = collections.defaultdict(list)
    alone: dict[str, int] = collections.Counter()
    for cfg, directory, overrides in jobs:
        try:
            groups[common_settings(cfg)].append((cfg, directory, overrides))
        except Exception as error:
            alone[one_sentence(error).rstrip(".") or type(error).__name__] += 1
    if single := sum(len(group) == 1 for group in groups.values()):
        alone["no other run of the sweep has the same shapes and settings"] = single
    return [group for group in groups.values() if len(group) > 1], alone


def common_settings(cfg: DictConfig) -> str:
    """Return what the runs of an ensemble must have in common, as JSON, or raise why the run cannot be in one."""
    from speechformer.layers.positions import build_positions
    from speechformer.tasks.registry import TASKS

    config = as_plain(cfg)
    check_sweep(config)
    task, model = config["task"], config["model"]["name"]
    obstacles: dict[str | None, object] = {
        (reason := TASKS[task["name"]].no_ensemble): reason,
        "recurrent layers cannot be stacked": model.startswith("rnn"),
        "positions that differ by layer, or are random, cannot be stacked": model in ("by_layer", "randomised"),
        **{
            f"task.{key} draws or counts words for each run": task.get(key, "none") not in (0, "none")
            for key in COUNTING
        },
        "protocol.fold=seed gives each seed data of its own": config["protocol"]["fold"] == "seed",
        "torch's Muon takes matrices, not stacks of them": config["recipe"]["optimizer"] == "muon",
        "they use several devices": count_devices(config["trainer"]["devices"]) != 1,
        "force=true discards each run by itself": config["force"],
        "a run for debugging trains alone": debug_arguments(config),
    }
    if reasons := [reason for reason, applies in obstacles.items() if reason and applies]:
        raise UserError(reasons[0])
    recipe = {name: value for name, value in config["recipe"].items() if name != "lr"}
    common = {key: value for key, value in config.items() if key not in ("seed", "pattern", *NOT_IDENTITY)}
    sizes = {"width": config["width"], "heads": config["heads"], "length": config["block_size"]}
    positions = build_positions(config["model"], **sizes, causal=True)  # the shapes are the same for both
    shapes = {name: list(parameter.shape) for name, parameter in positions.named_parameters()}
    return json.dumps({**common, "recipe": recipe, "model": shapes}, sort_keys=True)
