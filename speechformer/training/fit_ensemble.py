"""Train several runs as one ensemble: the ordinary run on top of which `fit` knows nothing of ensembles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig

from speechformer import console
from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.kernels.dispatch import compile_blocks
from speechformer.runs import identity
from speechformer.runs.folder import FOREIGN, OccupiedError, RunFolder, lock, result_or_none
from speechformer.training import devices, runtime
from speechformer.training.build import Run, build_data, build_trainer, lease_devices
from speechformer.training.callbacks import PhaseTimer
from speechformer.training.checkpoints import load_chosen_weights
from speechformer.training.ensemble import Ensemble, EnsembleCheckpointIO, EnsembleData, ForwardHooks, Member
from speechformer.training.fit import add_last_evaluation, announce, prepare_folders
from speechformer.training.result import describe_machine, make_result

Job = tuple[DictConfig, Path, Sequence[str]]  # a run's config, folder and overrides


def fit_ensemble(jobs: Sequence[Job], launcher: str) -> list[Path]:
    """Train runs of the same shapes as one ensemble: those of them whose folders are new.

    Args:
        jobs: which can be an ensemble; `sweeps.launcher.group_jobs` decides.
        launcher: of the sweep that they belong to.

    Returns:
        The folders of the runs that have a result now; none if fewer than two were new.
    """
    start = runtime.Start()
    with contextlib.ExitStack() as locks:
        members = [member for job in jobs if (member := own_if_new(locks, *job)) is not None]
        if len(members) < 2:
            return []
        threads = devices.share_of_threads()
        for config, folder in members:
            folder.begin(config, threads)
        for (_, folder), result in zip(members, train_ensemble(members, launcher, start)):
            folder.finish(result)
    return [folder.path for _, folder in members]


def own_if_new(
    locks: contextlib.ExitStack, cfg: DictConfig, directory: Path, overrides: Sequence[str]
) -> tuple[dict[str, Any], RunFolder] | None:
    """Lock the folder of a run and return its config and folder; None if the folder is not new or not free."""
    config = as_plain(cfg)
    config.pop("force")
    corpus = load(config)
    try:
        previous = locks.enter_context(lock(directory, wait=False))
    except OccupiedError:
        return None
    if previous or result_or_none(directory) or any((directory / name).exists() for name in FOREIGN):
        return None
    fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    return config, RunFolder(directory, fingerprint, overrides)


def train_ensemble(
    members: Sequence[tuple[dict[str, Any], RunFolder]], launcher: str, start: runtime.Start
) -> list[dict[str, Any]]:
    """Train, evaluate and test an ensemble; return the result of each of its runs."""
    config, owner = members[0][0], members[0][1].owner
    with runtime.threads(config, owner) as threads:
        data = build_data(config, load(config))
        runs = [build_member(member_config, folder, data) for member_config, folder in members]
        waiting = time.perf_counter()
        with lease_devices(config["trainer"], threads, launcher) as device:
            timer = PhaseTimer(start.seconds + time.perf_counter() - waiting)
            ensemble = Ensemble(
                [Member(run.task, run.folder.path, run.logger, run.checkpoints, run.callbacks) for run in runs]
            )
            trainer = build_trainer(
                config,
                [run.folder for run in runs],
                device,
                timer,
                logger=False,
                callbacks=[ForwardHooks(ensemble)],
                checkpoint_io=EnsembleCheckpointIO(ensemble, timer),
                enable_checkpointing=False,
            )
            if config["compile"] is not None:
                compile_blocks(ensemble, config["compile"], trainer.strategy.root_device)
            prepare_folders(runs, threads, resumes=False)
            announce(runs, trainer, threads, start, resumes=False)
            train_and_evaluate(runs, ensemble, trainer, timer)
        timer.enter("evaluation")
        machine = describe_machine(trainer, threads, len(runs))
        results = [make_result(run, timer.seconds, machine) for run in runs]
    for result in results:
        console.say(console.summary(result))
    return results


def build_member(config: dict[str, Any], folder: RunFolder, data: Any) -> Run:
    """Return a run that draws its random numbers as it would alone: from where its seed has come to."""
    run = Run(config, folder, data)
    run.task.generator = torch.Generator()
    run.task.generator.set_state(torch.get_rng_state())
    return run


def train_and_evaluate(runs: Sequence[Run], ensemble: Ensemble, trainer: pl.Trainer, timer: PhaseTimer) -> None:
    """Train, evaluate the last step, and test the chosen weights of each run; the metrics go into `run.metrics`."""
    data = EnsembleData(runs[0].data, [run.config["seed"] for run in runs])
    trainer.fit(ensemble, datamodule=data)
    timer.enter("evaluation")
    sound = [run for run in runs if not run.task.diverged()]
    if any(not run.task.curve or run.task.curve[-1]["step"] != trainer.global_step for run in sound):
        trainer.validate(ensemble, datamodule=data, verbose=False)
    ensemble.tie()  # Lightning has moved it back from its device
    for run in runs:
        run.task.trainer.save_checkpoint(run.folder.path / "last.ckpt")
    for run in sound:
        add_last_evaluation(run)
    tested, loader = [], None
    if runs[0].data.chosen_on == "validation":
        tested = [run for run in sound if run.checkpoints.best is not None]
        for run in tested:
            load_chosen_weights(run.task, run.folder.path, run.averaged)
    elif (loader := runs[0].data.extra_dataloader()) is not None:
        tested = sound
    if tested:
        trainer.test(ensemble, loader, datamodule=None if loader is not None else data, verbose=False)
    for run in tested:
        run.metrics |= run.task.compute_metrics()
