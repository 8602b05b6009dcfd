"""Train and evaluate one run, or several as an ensemble: from configs, a corpus and folders to results.

data, tasks  ->  Trainer.fit  ->  evaluation of the last step  ->  test of the chosen checkpoint  ->  results
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf

from speechformer import console
from speechformer.kernels.dispatch import compile_blocks
from speechformer.runs import identity
from speechformer.runs.folder import RunFolder
from speechformer.training import devices, runtime
from speechformer.training.build import Run, build_data, build_trainer, lease_devices
from speechformer.training.callbacks import PhaseTimer
from speechformer.training.checkpoints import load_chosen_weights, resumable
from speechformer.training.ensemble import Ensemble

NOT_SHOWN = ("hydra", "corpus", "threads", "compile", "force")  # overrides that say nothing about the model


def fit(
    jobs: Sequence[tuple[dict[str, Any], RunFolder]], corpus: Any, launcher: str | None, start: runtime.Start
) -> list[dict[str, Any]]:
    """Train, evaluate and test one run, or several as an ensemble. A run resumes from its folder's `last.ckpt`.

    Args:
        jobs: the resolved config of each run as plain data, and its folder, which this process owns.
        corpus: of all of them.
        launcher: of the sweep that they belong to, or None.

    Returns:
        The content of each `result.json`.

    Raises:
        UserError: a config or the corpus asks for something impossible.
    """
    (config, folder), rank = jobs[0], int(os.environ.get("LOCAL_RANK", 0))
    with runtime.threads(config, folder.owner) as threads:
        data = build_data(config, corpus)
        runs = [Run(own_config, own_folder, data, alone=len(jobs) == 1) for own_config, own_folder in jobs]
        ensemble = Ensemble(runs) if len(runs) > 1 else None
        if rank:
            torch.manual_seed(config["seed"] + rank)  # so that each device drops out other elements
        waiting = time.perf_counter()
        with lease_devices(config["trainer"], threads, launcher) as device:
            timer = PhaseTimer(start.seconds + time.perf_counter() - waiting)
            checkpoint = resumable(folder.path)
            trainer = build_trainer(runs, device, timer)
            if config["compile"] is not None:
                compile_blocks(ensemble or runs[0].task, config["compile"], trainer.strategy.root_device)
            if not rank:
                prepare_folders(runs, threads, resumes=checkpoint is not None)
                announce(runs, trainer, threads, start, resumes=checkpoint is not None)
            train_and_evaluate(runs, ensemble, trainer, timer, checkpoint)
        timer.enter("evaluation")
        machine = describe_machine(trainer, threads, len(runs))
        results = [make_result(run, timer.seconds, machine) for run in runs]
    for result in results if not rank else ():
        console.say(console.summary(result))
    return results


def prepare_folders(runs: Sequence[Run], threads: int, resumes: bool) -> None:
    """Write what belongs to a run that begins, and remove what an interrupted attempt left."""
    for run in runs:
        run.folder.owner["threads"] = threads
        run.folder.report_progress()
        run.folder.remove_outputs(keep_results=resumes)
        run.data.tokenizer.save(run.folder.path / "tokenizer.json")


def announce(runs: Sequence[Run], trainer: pl.Trainer, threads: int, start: runtime.Start, resumes: bool) -> None:
    """Print the corpus, the parameters and the folder of a run that begins."""
    first, others = runs[0], len(runs) - 1
    console.say(first.data.corpus_line())
    console.say(console.parameters_line(first.parameters))
    console.say(f"Folder: {first.folder.path}" + (f", and {others} more" if others else ""))
    busy = devices.cores_of_others(start.cpu)
    free = devices.cores() - busy
    if busy > 0.5 and 1 < threads > free + 0.5 and trainer.strategy.root_device.type == "cpu":
        console.say(console.busy_line(threads, max(1, round(free))))
    if resumes:
        console.say("The run was interrupted; it resumes from its last checkpoint.")


def train_and_evaluate(
    runs: Sequence[Run], ensemble: Ensemble | None, trainer: pl.Trainer, timer: PhaseTimer, checkpoint: Any
) -> None:
    """Train, evaluate the last step, and test the chosen weights; the metrics go into `run.metrics`."""
    module, data = ensemble or runs[0].task, runs[0].data
    loaders = None if ensemble else data  # an ensemble has its own
    trainer.fit(module, datamodule=loaders, ckpt_path=checkpoint)
    timer.enter("evaluation")
    sound = [run for run in runs if not run.task.diverged()]
    if any(not run.task.curve or run.task.curve[-1]["step"] != trainer.global_step for run in sound):
        trainer.validate(module, datamodule=loaders, verbose=False)  # the last step, wherever the interval ends
    if ensemble:
        ensemble.tie()  # Lightning has moved it back from its device
    for run in runs:
        run.task.trainer.save_checkpoint(run.folder.path / "last.ckpt")
    for run in sound:
        run.metrics |= data.reference_metrics()
        run.metrics |= {name: value for name, value in run.task.curve[-1].items() if name != "step"}
    if data.chosen_on == "validation":
        tested = [run for run in sound if run.checkpoints.best is not None]
        for run in tested:
            load_chosen_weights(run.task, run.folder.path, run.averaged)
        if tested:
            trainer.test(module, datamodule=loaders, verbose=False)
    elif sound and (extra := data.extra_dataloader()) is not None:  # the rest was measured at the last step
        tested = sound
        trainer.test(module, extra, verbose=False)
    else:
        tested = []
    for run in tested:
        run.metrics |= run.task.compute_metrics()


def describe_machine(trainer: pl.Trainer, threads: int, ensemble_size: int) -> dict[str, Any]:
    """Return the machine and devices of a run, as plain data."""
    device = trainer.strategy.root_device
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": threads,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "ensemble_size": ensemble_size,
    }


def make_result(run: Run, seconds: dict[str, float], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run that came to its end, and write its hyperparameters and artifacts."""
    config, task, metrics, owner, saved = run.config, run.task, run.metrics, run.folder.owner, run.checkpoints
    diverged = not metrics or not all(value is None or math.isfinite(value) for value in metrics.values())
    best = {"metric": saved.monitor, "value": saved.best, "step": saved.best_step, "chosen_on": run.data.chosen_on}
    log_hyperparameters(run)
    result = {
        "status": "diverged" if diverged else "finished",
        "task": task.name,
        "metrics": metrics,
        "report": task.report(metrics),
        "best": best,
        "curve": task.curve,
        "parameters": run.parameters,
        "corpus": run.data.description,
        "config": config,
        "overrides": owner["overrides"],
        "identity": owner["identity"],
        "seed": config["seed"],
        "steps": task.trainer.global_step,
        "attempts": owner["attempts"],
        "seconds": sum(seconds.values()),
        "seconds_by_phase": dict(seconds),
        "tokens_per_second": int(task.tokens) / max(seconds["training"], 1e-9),
        "machine": machine,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }
    if run.folder.writes:
        result |= task.write_artifacts(run.folder.path)
    if metrics:
        result["summary"] = [list(row) for row in task.summary(result)]
    if task.diverged_at is not None:
        result["error"] = f"The loss was NaN or infinite at step {task.diverged_at}."
    elif diverged:
        result["error"] = "Weights or metrics were NaN or infinite at the end."
    return result


def log_hyperparameters(run: Run) -> None:
    """Write TensorBoard's table of hyperparameters and final metrics, and close the loggers."""
    constant = run.data.reference_metrics()
    final = {f"final/{name}": value for name, value in run.metrics.items() if value not in (None, constant.get(name))}
    run.logger.loggers[0].log_hyperparams(hyperparameters(run.config, run.folder.owner["overrides"] or ()), final)
    run.logger.finalize("success")


def hyperparameters(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what TensorBoard's table shows of a config: what most people vary, and what the command line sets.

    All of it would be fifty columns, of which a sweep varies two.
    """
    shown = {"model": config["model"]["name"], "pattern": config["pattern"]["name"], "seed": config["seed"]}
    whole = OmegaConf.create(config)
    for override in overrides:
        key, _, text = override.lstrip("+~").partition("=")
        if not key.startswith(NOT_SHOWN):
            value = OmegaConf.select(whole, key)
            shown.setdefault(key, value if isinstance(value, str | int | float | bool) else text)
    return shown
