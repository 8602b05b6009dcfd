"""Lightning's Trainer for a config."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy

from speechformer.errors import UserError, one_sentence
from speechformer.runs.rank import local_rank, node_rank, processes
from speechformer.training import devices
from speechformer.training.checkpoints import AtomicCheckpointIO


class Environment(LightningEnvironment):
    """Lightning's environment, with this process's ranks as `runs.rank` tells them."""

    def local_rank(self) -> int:
        return local_rank()

    def node_rank(self) -> int:
        return node_rank()


class NoProfiler(PassThroughProfiler):
    """A profiler that costs nothing: Lightning enters its profiler a hundred times in a step."""

    NOTHING = contextlib.nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.NOTHING


def build_trainer(
    config: dict[str, Any], folder: Path, device: Any, callbacks: Sequence[pl.Callback], loggers: Sequence[Logger]
) -> pl.Trainer:
    """Return Lightning's Trainer for a config, with these callbacks and those of the config.

    Raises:
        UserError: Lightning does not accept an argument or value of `trainer.*`.
    """
    arguments = {**config["trainer"], "devices": device}
    devices.check_processes(arguments)
    if config["eval_interval"] is not None:
        batches = config["eval_interval"] * arguments["accumulate_grad_batches"]
        arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
    defaults: dict[str, Any] = {
        "profiler": NoProfiler(),
        "enable_progress_bar": any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    try:
        arguments = hydra.utils.instantiate(arguments, _convert_="all")  # what has a `_target_`
        if arguments.get("strategy") == "fsdp":  # Lightning's own of that name neither clips norms nor takes a CPU
            arguments["strategy"] = ModelParallelStrategy(processes(), 1, save_distributed_checkpoint=False)
            arguments["inference_mode"] = False  # gathered weights would not be trained further
        return pl.Trainer(
            default_root_dir=folder,
            # inside a SLURM job Lightning would choose devices and requeue by itself; both are decided here
            plugins=[AtomicCheckpointIO(), Environment(), *arguments.pop("plugins", [])],
            logger=loggers or False,
            callbacks=[*callbacks, *arguments.pop("callbacks", [])],
            **{**defaults, **arguments},
        )
    except Exception as error:  # a bad value raises almost any
        remedy = " Omit machine=gpu or trainer.accelerator=gpu, or install a torch that sees the GPU."
        remedy *= "gpu backend" in str(error)
        raise UserError(f"trainer: {one_sentence(error) or type(error).__name__}{remedy}") from error
