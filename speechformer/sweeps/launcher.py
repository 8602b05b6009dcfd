"""`hydra/launcher=ensemble`: runs of a sweep that have the same shapes train as one model (see `pack`).

Together go runs that differ in seed, `recipe.lr`, pattern, and positions as long as these have the same parameters
(none, for most): they are trained first, in one process, and leave their folders as if each had run alone. Then all
jobs go to Hydra's basic launcher, one after another: those are done already, and whatever was not packed, or failed
to be, runs as before.

It is made for a GPU that a small model leaves almost idle; on a CPU it saves what a step costs beside its arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from speechformer.config import as_plain, check_overrides, check_sweep, count_devices
from speechformer.errors import UserError, one_sentence
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.sweeps import folder as sweeps
from speechformer.training.fit import fit_ensemble

Job = tuple[DictConfig, Path, list[str]]  # its config, the folder of its run, its overrides


class EnsembleLauncher(Launcher):
    """Hydra's plugin.

    Args:
        members: the most runs that train as one.
    """

    def __init__(self, members: int = 32) -> None:
        self.members = members
        self.basic = BasicLauncher()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        self.basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        if type(self.members) is not int or self.members < 1:
            raise UserError(f"hydra.launcher.members must be a whole number of at least 1, not {self.members}.")
        jobs = [self.job(overrides, initial_job_idx + k) for k, overrides in enumerate(job_overrides)]
        # what was begun goes on by itself
        groups, alone = grouped(job for job in jobs if runs.state(job[1]).status == "left")
        for group in groups:
            for first in range(0, len(group), self.members):
                self.train(group[first : first + self.members])
        for why, count in alone.items():
            print(f"Not packed: {count} of {len(job_overrides)} runs, as {why}.", flush=True)
        return self.basic.launch(job_overrides, initial_job_idx)

    def job(self, overrides: Sequence[str], number: int) -> Job:
        """What Hydra will make of a job's overrides."""
        cfg = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(cfg)
        try:
            directory = Path(cfg.hydra.sweep.dir) / str(cfg.hydra.sweep.subdir)
            own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            OmegaConf.resolve(own)
            return own, directory, list(cfg.hydra.overrides.task)
        finally:
            HydraConfig.instance().cfg = before

    def train(self, jobs: list[Job]) -> None:
        """Train some as one; if that fails, say so, and they will run one after another."""
        if len(jobs) < 2:
            return
        names = sweeps.names([overrides for _, _, overrides in jobs])
        print(f"As one: {len(jobs)} runs, {names[0]} to {names[-1]}", flush=True)
        try:
            fit_ensemble(jobs, "packed")
        except Exception as error:
            reason = one_sentence(error) or type(error).__name__
            print(f"They did not train as one ({reason}), and go one after another.", flush=True)


def grouped(jobs: Any) -> tuple[list[list[Job]], dict[str, int]]:
    """The jobs that can train as one, and how many cannot for what reason."""
    groups: dict[str, list[Job]] = {}
    alone: dict[str, int] = {}
    for cfg, directory, overrides in jobs:
        try:
            key = shape(cfg, overrides)
        except Exception as error:
            why = one_sentence(error).rstrip(".") or type(error).__name__
            alone[why] = alone.get(why, 0) + 1
        else:
            groups.setdefault(key, []).append((cfg, directory, overrides))
    if single := sum(len(group) == 1 for group in groups.values()):
        alone["no other run of the sweep has their shapes and settings"] = single
    return [group for group in groups.values() if len(group) > 1], alone


def shape(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """What runs must have in common to train as one.

    Raises:
        UserError: a run that cannot, and why.
    """
    check_overrides(overrides)
    config = as_plain(cfg)
    check_sweep(config)
    task, model = config["task"]["name"], config["model"]
    if task == "translate":
        raise UserError("batches of translation differ in size from seed to seed")
    if model["name"].startswith("rnn"):
        raise UserError("recurrent layers are not packed")
    if count_devices(config["trainer"]["devices"]) != 1:
        raise UserError("they take several devices")
    if config["force"]:
        raise UserError("force=true begins each run anew by itself")
    recipe = {name: value for name, value in config["recipe"].items() if name != "lr"}
    common = {key: value for key, value in config.items() if key not in ("seed", "pattern", *identity.NOT_IDENTITY)}
    return json.dumps({**common, "recipe": recipe, "model": parameters(config)}, sort_keys=True)


def parameters(config: dict[str, Any]) -> dict[str, list[int]]:
    """The parameters of a config's positional encoding, by name, and their shapes."""
    from speechformer.layers.positions import build_positions

    sizes = {"width": config["width"], "heads": config["heads"], "length": config["block_size"]}
    positions = build_positions(config["model"], **sizes, causal=config["task"]["name"] == "lm")
    return {name: list(parameter.shape) for name, parameter in positions.named_parameters()}


def register() -> None:
    """Make the launcher known to Hydra, which takes plugins from the package `hydra_plugins` alone."""
    EnsembleLauncher.__module__ = "hydra_plugins.speechformer"
    sys.modules[EnsembleLauncher.__module__] = sys.modules[__name__]
    Plugins.instance().register(EnsembleLauncher)
