"""Hydra's side of a sweep: its folder's name, the callback that records its jobs, and `hydra/launcher=ensemble`.

Runs of a sweep that have the same shapes train as one model (see `training.ensemble`): they may differ in seed,
`recipe.lr`, pattern, and positions whose parameters have the same shapes. They train first, in one process, and leave
their folders as if each had run alone. Then Hydra's basic launcher takes all jobs one after another. It passes over
the runs that have ended, and runs what could not be an ensemble. A small model leaves a GPU almost idle, so an
ensemble is much faster there. On a CPU it saves the overhead of a step.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from speechformer import console
from speechformer.config import as_plain, check_sweep, count_devices
from speechformer.errors import UserError, fail, one_sentence, require
from speechformer.runs import folder as runs
from speechformer.runs import identity, naming
from speechformer.sweeps.folder import COMMAND, CURVES, JOBS, SWEEP, names, write_jobs
from speechformer.sweeps.progress import IN_PROCESS, LIVE
from speechformer.sweeps.sweeper import register_plugin
from speechformer.training import runtime
from speechformer.workers import end_with_parent

DRAWN_FOR_EACH_RUN = ("unknown_rate", "ngram_targets")
Job = tuple[DictConfig, Path, Sequence[str]]  # a run's config, folder and overrides


def sweep_name(*, _root_: DictConfig) -> str:
    """Return `${sweep_name:}`: the words of the command, and a hash of them and of the numerics' version.

    The same command has the same folder, and so resumes there.
    """
    cache = OmegaConf.get_cache(_root_)["sweep_name"]  # Hydra passes it on to the jobs, whose overrides differ
    if "name" not in cache:
        ignored = ("machine", *identity.NOT_IDENTITY)
        words = [word for word in _root_.hydra.overrides.task if word.lstrip("+").split("=")[0] not in ignored]
        content = json.dumps([sorted(words), identity.NUMERICS_VERSION])
        words.sort(key=lambda word: not re.search(r"^experiment=|=\w*\(|=[^\[{(]*,", word))  # swept keys first
        readable = naming.joined(map(naming.safe, words)) or "sweep"
        cache["name"] = f"{readable}_{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    return cache["name"]


class SweepCallback(Callback):
    """Hydra callback that checks the config and records the jobs at the start of a multirun."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder, launcher = Path(config.hydra.sweep.dir), config.hydra.runtime.choices["hydra/launcher"]
        if not config.hydra.sweep.dir.strip():
            fail("hydra.sweep.dir is empty; name a folder, or omit it.")
        check_subdir(config.hydra.sweep)
        try:
            check_sweep({"trainer": OmegaConf.to_container(config.trainer, resolve=True)})
            jobs = expand(config)
            folder.mkdir(parents=True, exist_ok=True)
            write_jobs(folder, sys.argv[1:], jobs, launcher)
        except UserError as error:  # Hydra would turn errors into warnings
            fail(str(error))
        except OSError as error:
            fail(f"{error.filename or folder}: {error.strerror}.")
        COMMAND.folder = folder
        if launcher not in IN_PROCESS:
            LIVE.start(folder)
        if launcher == "joblib":
            tie_workers()


def tie_workers() -> None:
    """Let joblib's workers end with this process from their first moment on, also before they have a job.

    A worker that waits for a job holds both ends of its queue, so it would wait for ever, and keep our output open.
    """
    from joblib import register_parallel_backend
    from joblib.parallel import LokyBackend

    tied = functools.partial(LokyBackend, initializer=end_with_parent, initargs=(os.getpid(),))
    register_parallel_backend("loky", tied)


def check_subdir(sweep: DictConfig) -> None:
    """End the program if the folders of a sweep's runs would be that of the sweep, or files of ours in it."""
    name = str(OmegaConf.to_container(sweep, resolve=False)["subdir"])  # type: ignore[call-overload, index]
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or parts[0] in (SWEEP, JOBS, CURVES, "report"):
        fail(f"hydra.sweep.subdir={name} is not a folder of its own in the sweep's; choose another, or omit it.")


def expand(config: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job, in order; None for a sweeper that chooses them one by one."""
    sweeper = config.hydra.sweeper._target_.rpartition(".")[2]
    if sweeper != "BasicSweeper":
        return [] if sweeper in ("OptunaSweeper", "TunedSweeper") else None  # ours add theirs
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*swept, *config.hydra.overrides.task])
    for override in overrides:
        if override.is_sweep_override() and not list(override.sweep_string_iterator()):
            raise UserError(f"{override.input_line} has no values, so the sweep has no runs.")
    return [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]


class EnsembleLauncher(Launcher):
    """Hydra's plugin; an ensemble has at most `members` runs."""

    def __init__(self, members: int = 32) -> None:
        self.members = members
        self.basic = BasicLauncher()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        self.basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        valid = type(self.members) is int and self.members >= 1
        require(valid, "hydra.launcher.members", "a whole number of at least 1", self.members)
        jobs = [self.compose_job(overrides, initial_job_idx + k) for k, overrides in enumerate(job_overrides)]
        # a run that was interrupted alone resumes alone
        states = [runs.state(directory) for _, directory, _ in jobs]
        new = [state.status == "left" or (state.result is None and state.owner.get("ensemble")) for state in states]
        groups, alone = group_jobs(job for job, is_new in zip(jobs, new) if is_new)
        for group in groups:
            for first in range(0, len(group), self.members):
                self.train(group[first : first + self.members])
        for reason, count in alone.items():
            console.say(f"Not in an ensemble: {count} of {len(job_overrides)} runs, because {reason}.")
        return self.basic.launch(job_overrides, initial_job_idx)

    def compose_job(self, overrides: Sequence[str], number: int) -> Job:
        """Return the job that Hydra composes from its overrides."""
        cfg = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(cfg)
        try:
            directory = Path(cfg.hydra.sweep.dir) / str(cfg.hydra.sweep.subdir)
            run_cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            OmegaConf.resolve(run_cfg)
            return run_cfg, directory, list(cfg.hydra.overrides.task)
        finally:
            HydraConfig.instance().cfg = before

    def train(self, jobs: list[Job]) -> None:
        """Train some jobs as an ensemble. If that fails, say so: the basic launcher runs them one after another."""
        if len(jobs) < 2:
            return
        job_names = names([overrides for _, _, overrides in jobs])
        console.say(f"Ensemble of {len(jobs)} runs: {job_names[0]} to {job_names[-1]}")
        try:
            with runtime.process_set_up():
                from speechformer.training.run import execute_ensemble

                execute_ensemble(jobs)
        except Exception as error:
            reason = one_sentence(error) or type(error).__name__
            console.say(f"The ensemble failed ({reason}); its runs run one after another.")


def group_jobs(jobs: Iterable[Job]) -> tuple[list[list[Job]], dict[str, int]]:
    """Return the groups of jobs that can be an ensemble, and how many jobs cannot for which reason."""
    groups: dict[str, list[Job]] = collections.defaultdict(list)
    alone: dict[str, int] = collections.Counter()
    for cfg, directory, overrides in jobs:
        try:
            key = common_settings(cfg, overrides)
        except Exception as error:
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            alone[reason] += 1
        else:
            groups[key].append((cfg, directory, overrides))
    if single := sum(len(group) == 1 for group in groups.values()):
        alone["no other run of the sweep has the same shapes and settings"] = single
    return [group for group in groups.values() if len(group) > 1], alone


def common_settings(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """Return what the runs of an ensemble must have in common, as JSON, or raise why the run cannot be in one."""
    from speechformer.layers.positions import build_positions
    from speechformer.tasks.registry import TASKS

    config = as_plain(cfg)
    check_sweep(config)
    task, model = config["task"], config["model"]["name"]
    if reason := TASKS[task["name"]].no_ensemble:
        raise UserError(reason)
    obstacles = {
        "recurrent layers cannot be stacked": model.startswith("rnn"),
        "positions that differ by layer, or are random, cannot be stacked": model in ("by_layer", "randomised"),
        **{f"task.{key} draws or counts words for each run": task.get(key) for key in DRAWN_FOR_EACH_RUN},
        "task.ngram_mixture counts words for each run": task.get("ngram_mixture", "none") != "none",
        "task.naive_bayes counts words for each run": task.get("naive_bayes"),
        "protocol.fold=seed gives each seed data of its own": config["protocol"]["fold"] == "seed",
        "torch's Muon takes matrices, not stacks of them": config["recipe"]["optimizer"] == "muon",
        "they use several devices": count_devices(config["trainer"]["devices"]) != 1,
        "force=true discards each run by itself": config["force"],
    }
    for reason, applies in obstacles.items():
        if applies:
            raise UserError(reason)
    recipe = {name: value for name, value in config["recipe"].items() if name != "lr"}
    common = {key: value for key, value in config.items() if key not in ("seed", "pattern", *identity.NOT_IDENTITY)}
    sizes = {"width": config["width"], "heads": config["heads"], "length": config["block_size"]}
    positions = build_positions(config["model"], **sizes, causal=True)  # the shapes are the same for both
    shapes = {name: list(parameter.shape) for name, parameter in positions.named_parameters()}
    return json.dumps({**common, "recipe": recipe, "model": shapes}, sort_keys=True)


def register() -> None:
    """Register the launcher with Hydra."""
    register_plugin(EnsembleLauncher, "speechformer")
