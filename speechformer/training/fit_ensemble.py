"""Train several runs as one ensemble, on top of the ordinary run, which knows nothing of ensembles."""

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
from speechformer.runs import identity
from speechformer.runs.folder import (
    OWNER,
    ForeignError,
    OccupiedError,
    RunFolder,
    check_is_ours,
    lock,
    read_json,
    result_or_none,
)
from speechformer.tasks.registry import build_data
from speechformer.training import devices
from speechformer.training.build import Run, build_trainer, compile_for, lease_devices
from speechformer.training.callbacks import PhaseTimer
from speechformer.training.checkpoints import load_chosen_weights
from speechformer.training.ensemble import CallMemberCallbacks, Ensemble, EnsembleProgress
from speechformer.training.fit import (
    add_last_evaluation,
    announce,
    conclude,
    describe_machine,
    make_result,
    prepare_folder,
)
from speechformer.training.trackers import closed_at_failure

Member = tuple[dict[str, Any], RunFolder]  # its config as plain data


def execute_ensemble(jobs: Sequence[tuple[DictConfig, Path, Sequence[str]]]) -> list[Path]:
    """Train runs that `sweeps.launcher.group_jobs` has grouped as one ensemble, those whose folders are new.

    Args:
        jobs: config, folder and overrides of each run.

    Returns:
        The folders of the runs that have a result now; none if fewer than two were new.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as locks:
        members = [member for job in jobs if (member := own_if_new(locks, *job)) is not None]
        if len(members) < 2:
            return []
        for config, folder in members:
            folder.begin(config, devices.share_of_threads())
        fit_ensemble(members, start)
    return [folder.path for _, folder in members]


def own_if_new(
    locks: contextlib.ExitStack, cfg: DictConfig, directory: Path, overrides: Sequence[str]
) -> Member | None:
    """Lock the folder of a run and return its config and folder; None if the folder is not new or not free."""
    config = as_plain(cfg)
    config.pop("force")
    logger = config.pop("logger")
    corpus = load(config)
    try:
        check_is_ours(directory)
        locks.enter_context(lock(directory, wait=False))
        if read_json(directory / OWNER) or result_or_none(directory):
            return None
    except (ForeignError, OccupiedError):
        return None
    fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    return config, RunFolder(directory, fingerprint, overrides, logger=logger)


def fit_ensemble(members: Sequence[Member], start: float) -> None:
    """Train, evaluate and test an ensemble, and write the result of each of its runs."""
    config, folders = members[0][0], [folder for _, folder in members]
    with devices.threads(config, folders[0].owner) as threads:
        data = build_data(config, load(config))
        runs = [build_member(own_config, folder, data) for own_config, folder in members]
        data.limit_length(runs[0].task.model.max_length)
        ensemble = Ensemble(runs)
        waiting = time.perf_counter()
        with lease_devices(config["trainer"], threads, None) as device:
            timer = PhaseTimer(start + time.perf_counter() - waiting)
            callbacks = [timer, EnsembleProgress(folders), CallMemberCallbacks()]
            options = {"callbacks": callbacks, "logger": False, "enable_checkpointing": False}
            trainer = build_trainer(config, folders[0].path, device, **options)
            compile_for(trainer, ensemble, config["compile"])
            with closed_at_failure(*(run.tracker for run in runs)):
                for run in runs:
                    prepare_folder(run, threads, resumes=False)
                announce(runs[0], trainer.strategy.root_device, resumes=False)
                console.say(f"and {len(runs) - 1} more folders, in an ensemble")
                train_and_evaluate(runs, ensemble, trainer, timer)
        timer.enter("evaluation")
        machine = describe_machine(trainer) | {"ensemble_size": len(runs), "peak_bytes": None}
        for run in runs:
            conclude(run, make_result(run, timer.seconds, machine))


def build_member(config: dict[str, Any], folder: RunFolder, data: Any) -> Run:
    """Return a run that draws its random numbers as it would alone: from where its seed has come to."""
    run = Run(config, folder, data)
    run.task.generator = torch.Generator()
    run.task.generator.set_state(torch.get_rng_state())
    return run


def train_and_evaluate(runs: Sequence[Run], ensemble: Ensemble, trainer: pl.Trainer, timer: PhaseTimer) -> None:
    """Train, evaluate the last step, and test the chosen weights of each run; the metrics go into `run.metrics`."""
    trainer.fit(ensemble)
    timer.enter("evaluation")
    sound = [run for run in runs if not run.task.diverged()]
    if any(not run.task.curve or run.task.curve[-1]["step"] != trainer.global_step for run in sound):
        trainer.validate(ensemble, verbose=False)
    ensemble.tie()  # Lightning has moved it back from its device
    for run in runs:
        run.task.trainer.save_checkpoint(run.folder.path / "last.ckpt")
    for run in sound:
        add_last_evaluation(run)
    tested, extra = [], None
    if runs[0].data.chosen_on == "validation":
        tested = [run for run in sound if run.checkpoints.best is not None]
        for run in tested:
            load_chosen_weights(run.task, run.folder.path, run.averaged)
    elif (extra := runs[0].data.extra_dataloader()) is not None:
        tested = sound
    if tested:
        trainer.test(ensemble, extra, verbose=False)
    for run in tested:
        run.metrics |= run.task.compute_metrics()
