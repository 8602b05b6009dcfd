"""What a run is made of: its data, its task, what accompanies its training, and Lightning's Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment

from speechformer import console
from speechformer.config import count_devices, value_of
from speechformer.errors import UserError, one_sentence, pick
from speechformer.kernels.dispatch import compile_blocks
from speechformer.models.stack import count_parameters
from speechformer.runs.folder import RunFolder
from speechformer.runs.rank import local_rank, node_rank
from speechformer.tasks.optim import has_amx
from speechformer.tasks.registry import TASKS
from speechformer.training import devices
from speechformer.training.callbacks import NoProfiler
from speechformer.training.checkpoints import AtomicCheckpointIO, Checkpoints
from speechformer.training.memory import check_memory
from speechformer.training.tensorboard import ReplayLogger, TensorBoardCallback
from speechformer.training.trackers import TRACKERS, Tracker

NOT_SHOWN = ("hydra", "corpus", "threads", "compile", "force", "logger")  # overrides that say nothing about the model


class Environment(LightningEnvironment):
    """Lightning's environment, which ignores NODE_RANK unless `num_nodes` > 1."""

    def node_rank(self) -> int:
        return node_rank()


def hyperparameters(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what TensorBoard's table shows of a config: what most people vary, and what the command line sets.

    All of it would be fifty columns, of which a sweep varies two.
    """
    shown = {"model": config["model"]["name"], "pattern": config["pattern"]["name"], "seed": config["seed"]}
    for override in overrides:
        key, _, text = override.lstrip("+~").partition("=")
        if not key.startswith(NOT_SHOWN):
            value = value_of(config, key)
            shown.setdefault(key, value if isinstance(value, str | int | float | bool) else text)
    return shown


class Run:
    """A run under way: config, folder, data, task, and what accompanies its training.

    Attributes: `checkpoints`, `logger` and `callbacks` (its own, in Lightning's order); `metrics`, the final ones;
    `hyperparameters`, as TensorBoard shows them; `tracker`, of `logger=wandb` and `logger=mlflow`, or None.
    """

    def __init__(self, config: dict[str, Any], folder: RunFolder, data: Any) -> None:
        self.config, self.folder, self.data = config, folder, data
        self.hyperparameters = hyperparameters(config, folder.overrides or ())
        check_memory(lambda: TASKS[config["task"]["name"]].from_config(config, data), config, data.vocab_size)
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        self.task = TASKS[config["task"]["name"]].from_config(config, data)
        self.task.attach(data)
        self.averaged = config["task"].get("average_checkpoints", 1)
        monitor = self.task.metric_name(data.chosen_on)
        keep = self.averaged if self.averaged > 1 else 0
        every, keep_every = config["checkpoint_every"], config["keep_every_n_steps"]
        self.checkpoints = Checkpoints(folder.path, monitor, every, keep, keep_every)
        loggers: list[Logger] = [CSVLogger(folder.path, name="", version="")]
        kind, self.tracker = folder.logger["name"], None
        pick({"csv": None, "tensorboard": None, **TRACKERS}, kind, "logger")
        if kind in TRACKERS:
            self.tracker = Tracker(folder.logger, folder, config)
            loggers.append(self.tracker)
        elif kind == "tensorboard":
            tensorboard = TensorBoardLogger(folder.path, name="", version="tensorboard", default_hp_metric=False)
            loggers.insert(0, tensorboard)
        self.logger = ReplayLogger(loggers, self.task.charts)
        tensorboard_callback = TensorBoardCallback(self.logger, data.examples(), data.tokenizer)
        self.callbacks: list[pl.Callback] = [tensorboard_callback, self.checkpoints]
        self.metrics: dict[str, float | None] = {}
        self.parameters = count_parameters(self.task.model)


def build_trainer(config: dict[str, Any], folder: Path, device: Any, **more: Any) -> pl.Trainer:
    """Return Lightning's Trainer for a config.

    Args:
        more: arguments that the config does not have: logger, callbacks.

    Raises:
        UserError: Lightning does not accept an argument or value of `trainer.*`.
    """
    arguments = {**config["trainer"], "devices": device}
    check_processes(arguments)
    arguments["profiler"] = arguments.get("profiler") or NoProfiler()
    if config["eval_interval"] is not None:
        batches = config["eval_interval"] * arguments["accumulate_grad_batches"]
        arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
    try:
        return pl.Trainer(
            default_root_dir=folder,
            # inside a SLURM job Lightning would choose devices and requeue by itself; both are decided here
            plugins=[AtomicCheckpointIO(), Environment()],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **more,
            **arguments,
        )
    except Exception as error:  # a bad value raises almost any
        remedy = " Omit machine=gpu or trainer.accelerator=gpu, or install a torch that sees the GPU."
        remedy *= "gpu backend" in str(error)
        raise UserError(f"trainer: {one_sentence(error) or type(error).__name__}{remedy}") from error


def compile_for(trainer: pl.Trainer, module: pl.LightningModule, mode: str | None) -> None:
    """Compile the blocks of a module as `compile` says."""
    if mode is not None:
        compile_blocks(module, mode, trainer.strategy.root_device, trainer.accumulate_grad_batches)


def warn_of_slow_precision(precision: str, device: torch.device) -> None:
    """Warn if the run may be faster in single precision: with bfloat16 on a CPU that is known to have no AMX."""
    if device.type == "cpu" and precision.startswith("bf16") and has_amx() is False:
        console.warn(
            f"trainer.precision={precision} may be slower than 32-true on this CPU, because it has no AMX. "
            "Compare with trainer.precision=32-true."
        )


def check_processes(arguments: dict[str, Any]) -> None:
    """Require that a run on the CPU starts no more processes than there are cores; two may try it on one core.

    Raises:
        UserError: `trainer.devices` is higher.
    """
    accelerator = arguments["accelerator"]
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and count_devices(arguments["devices"]) > max(2, devices.cores()):
        raise UserError(
            f"trainer.devices={arguments['devices']} would start as many processes, and this machine lends "
            f"{devices.cores()} cores. One device is the fastest on a CPU: omit trainer.devices."
        )


@contextlib.contextmanager
def lease_devices(arguments: dict[str, Any], threads: int, launcher: str | None) -> Iterator[Any]:
    """Lock the devices that a run with `trainer.*` arguments uses, for as long as it uses them.

    Yields:
        Lightning's `devices`: one free GPU where any one is asked for, otherwise what the config names.
    """
    wanted = arguments["devices"]
    with contextlib.ExitStack() as leases:
        if arguments["accelerator"] in ("gpu", "cuda", "auto") and torch.cuda.is_available():
            names = devices.gpu_names()
            if wanted in (1, "1"):
                wanted = [leases.enter_context(devices.lease(names))]
            elif local_rank() == 0:  # the first process of a machine locks them for all
                several = wanted if isinstance(wanted, list) else range(int(wanted))
                for index in sorted(several):  # in order, so that no two runs wait for each other
                    leases.enter_context(devices.lease(names[index : index + 1] or names))
        elif launcher == "submitit_local":  # it starts all jobs at once
            leases.enter_context(devices.lease(devices.cpu_slots(threads)))
        yield wanted
