"""The result of a run: what `result.json` says."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf

from speechformer.runs import identity
from speechformer.training.build import Run

NOT_SHOWN = ("hydra", "corpus", "threads", "compile", "force")  # overrides that say nothing about the model


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
