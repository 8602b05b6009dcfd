"""What the sweepers of this package share: they choose by held-out scores, and launch jobs in several rounds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from speechformer.errors import UserError
from speechformer.sweeps import folder as sweeps


class HeldOutSweeper(Sweeper):
    """A sweeper that chooses by held-out scores; `params` are the swept values of an experiment."""

    params: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.cfg, self.loader = config, hydra_context.config_loader
        self.folder, self.choices = Path(config.hydra.sweep.dir), config.hydra.runtime.choices
        arguments: Any = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self.launch = Plugins.instance().instantiate_launcher(**arguments).launch

    def parse(self, arguments: Sequence[str]) -> list[Override]:
        """Return the overrides of an experiment, then those of the command, which count if a key has both."""
        words = [f"{key}={value}" for key, value in (self.params or {}).items()]
        return OverridesParser.create(config_loader=self.loader).parse_overrides([*words, *arguments])

    def task_and_mode(self, overrides: Sequence[str]) -> tuple[str, str]:
        """Return a job's task and the direction of its metric, "max" or "min".

        Raises:
            UserError: nothing is held out.
        """
        from speechformer.tasks.registry import TASKS

        cfg = self.loader.load_sweep_config(self.cfg, list(overrides))
        if cfg.task.data != "pairs" and not cfg.protocol.validation:
            raise UserError(
                f"hydra/sweeper={self.choices['hydra/sweeper']} chooses by the score on held-out data, and "
                f"protocol={cfg.protocol.name} holds none out: it would choose on test. Add protocol=clean."
            )
        return cfg.task.name, TASKS[cfg.task.name].mode

    def plan_jobs(self, jobs: list[list[str]]) -> None:
        """Add some jobs to `sweep.json`."""
        sweeps.write_jobs(self.folder, sys.argv[1:], jobs, self.choices["hydra/launcher"])


def register_plugin(plugin: type, module: str) -> None:
    """Register a class with Hydra, which takes plugins only from the package `hydra_plugins`."""
    source = sys.modules[plugin.__module__]
    plugin.__module__ = f"hydra_plugins.{module}"
    sys.modules[plugin.__module__] = source
    Plugins.instance().register(plugin)
