"""Hydra's side of a sweep: its folder's name, and the callback that writes down its jobs."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from speechformer.config import check_sweep
from speechformer.errors import UserError
from speechformer.runs import identity
from speechformer.sweeps.folder import COMMAND, write_jobs


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
        readable = "_".join(identity.safe(word) for word in words)[:60].rstrip("-_.") or "sweep"
        cache["name"] = f"{readable}_{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    return cache["name"]


class SweepCallback(Callback):
    """Hydra's callback at the start of a multirun: checks that it can be swept, and writes down the jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            trainer: Any = OmegaConf.to_container(config.trainer, resolve=True)
            check_sweep({"trainer": trainer})
        except UserError as error:
            sys.exit(f"Error: {error}")
        folder = Path(config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            launcher = config.hydra.runtime.choices["hydra/launcher"]
            write_jobs(folder, sys.argv[1:], expand(config), launcher)
        except OSError as error:  # Hydra would turn it into a warning
            sys.exit(f"Error: {error.filename or folder}: {error.strerror}.")
        COMMAND.folder = folder


def expand(config: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job, in order; None for a sweeper that chooses them one by one."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return None
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*swept, *config.hydra.overrides.task])
    return [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]
