"""Train and evaluate one run: from a config, a corpus and a folder to a result.

data, tasks  ->  Trainer.fit  ->  evaluation of the last step  ->  test of the chosen checkpoint  ->  result
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.config import count_devices
from speechformer.errors import UserError, one_sentence
from speechformer.runs import identity
from speechformer.runs.folder import TOKENIZER, RunFolder, sha256
from speechformer.runs.rank import local_rank, node_rank
from speechformer.tasks.registry import build_data
from speechformer.training import devices
from speechformer.training.build import Run, build_trainer, compile_for, lease_devices, warn_of_slow_precision
from speechformer.training.callbacks import OnEvaluation, PhaseTimer, Progress
from speechformer.training.checkpoints import load_chosen_weights, resumable
from speechformer.training.memory import SIGNS, peak_bytes, reset_peak
from speechformer.training.trackers import closed_at_failure


def fit(
    config: dict[str, Any],
    corpus: Any,
    folder: RunFolder,
    launcher: str | None,
    start: float,
    on_evaluation: OnEvaluation | None = None,
) -> dict[str, Any]:
    """Train, evaluate and test one run. It resumes from the folder's `last.ckpt`, if there is one.

    Args:
        config: the resolved config as plain data.
        folder: the run's folder, which this process owns.
        launcher, on_evaluation: as for `execute`.

    Returns:
        The content of `result.json`.

    Raises:
        UserError: the config or the corpus asks for something impossible.
    """
    rank = node_rank() * count_devices(config["trainer"]["devices"]) + local_rank()
    with devices.threads(config, folder.owner) as threads:
        run = Run(config, folder, build_data(config, corpus))
        run.data.limit_length(run.task.model.max_length)
        if rank:
            torch.manual_seed(config["seed"] + rank)  # so that each device drops out other elements
        waiting = time.perf_counter()
        with lease_devices(config["trainer"], threads, launcher) as device:
            timer = PhaseTimer(start + time.perf_counter() - waiting)
            checkpoint = resumable(run.task, folder.path)
            progress = Progress(folder, on_evaluation)
            callbacks = [run.logger, timer, progress, *run.callbacks]
            trainer = build_trainer(config, folder.path, device, callbacks=callbacks, logger=run.logger)
            compile_for(trainer, run.task, config["compile"])
            with closed_at_failure(run.tracker):
                if not rank:
                    prepare_folder(run, threads, resumes=checkpoint is not None)
                    announce(run, trainer.strategy.root_device, resumes=checkpoint is not None)
                train_and_evaluate(run, trainer, timer, checkpoint)
        timer.enter("evaluation")
        result = make_result(run, timer.seconds, describe_machine(trainer))
        conclude(run, result)
    return result


def prepare_folder(run: Run, threads: int, resumes: bool) -> None:
    """Write what belongs to a run that begins, and remove what an interrupted attempt left."""
    run.folder.remove_outputs(keep_results=resumes)
    tokenizer = run.folder.path / TOKENIZER
    run.data.tokenizer.save(tokenizer)
    run.folder.owner |= {"threads": threads, "tokenizer_sha256": sha256(tokenizer)}
    if run.tracker is not None:
        run.tracker.open()
    run.folder.report_progress()


def announce(run: Run, device: torch.device, resumes: bool) -> None:
    """Print the corpus, the parameters and the folder of a run that begins, and warn if its precision may be slow."""
    console.say(run.data.corpus_line())
    console.say(console.parameters_line(run.parameters))
    console.say(f"Folder: {run.folder.path}")
    if run.tracker is not None:
        console.say(run.tracker.about)
    if resumes:
        console.say("The run was interrupted; it resumes from its last checkpoint.")
    warn_of_slow_precision(str(run.config["trainer"]["precision"]), device)


def train_and_evaluate(run: Run, trainer: pl.Trainer, timer: PhaseTimer, checkpoint: Any) -> None:
    """Train, evaluate the last step, and test the chosen weights; the metrics go into `run.metrics`."""
    task, data = run.task, run.data
    reset_peak(trainer.strategy.root_device)
    with resuming(checkpoint, timer):
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint)
    timer.enter("evaluation")
    sound = not task.diverged()
    if sound and (not task.curve or task.curve[-1]["step"] != trainer.global_step):
        trainer.validate(task, datamodule=data, verbose=False)  # the last step, wherever the interval ends
    trainer.save_checkpoint(run.folder.path / "last.ckpt")
    if not sound:
        return
    add_last_evaluation(run)
    if data.chosen_on == "validation":
        if run.checkpoints.best is None:
            return
        load_chosen_weights(task, run.folder.path, run.averaged)
        trainer.test(task, datamodule=data, verbose=False)
    elif (extra := data.extra_dataloader()) is not None:  # the rest was measured at the last step
        trainer.test(task, extra, verbose=False)
    else:
        return
    run.metrics |= task.compute_metrics()


@contextlib.contextmanager
def resuming(checkpoint: Path | None, timer: PhaseTimer) -> Iterator[None]:
    """Blame the checkpoint for an exception before the first step after it."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        if checkpoint is None or timer.stepped or any(sign in str(error) for sign in SIGNS):
            raise
        raise UserError(
            f"{checkpoint} is not as speechformer writes it ({one_sentence(error) or type(error).__name__}). Remove "
            "it to resume from an earlier one, or begin again with force=true."
        ) from error


def add_last_evaluation(run: Run) -> None:
    """Add to a run's metrics those that need no model, and those of its last evaluation."""
    run.metrics |= run.data.reference_metrics()
    run.metrics |= {name: value for name, value in run.task.curve[-1].items() if name != "step"}


def describe_machine(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the machine and devices of a run, as plain data."""
    device = trainer.strategy.root_device
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "ensemble_size": 1,
        "peak_bytes": peak_bytes(device),
    }


def make_result(run: Run, seconds: dict[str, float], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run that came to its end, and write its artifacts."""
    config, task, metrics, owner, saved = run.config, run.task, run.metrics, run.folder.owner, run.checkpoints
    diverged = not metrics or not all(value is None or math.isfinite(value) for value in metrics.values())
    best = {"metric": saved.monitor, "value": saved.best, "step": saved.best_step, "chosen_on": run.data.chosen_on}
    run.logger.save()
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
        "numerics": identity.NUMERICS_VERSION,
        "seed": config["seed"],
        "steps": task.trainer.global_step,
        "attempts": owner["attempts"],
        "tokenizer_sha256": owner.get("tokenizer_sha256"),
        "seconds": sum(seconds.values()),
        "seconds_by_phase": dict(seconds),
        "tokens_per_second": int(task.tokens) / max(seconds["training"], 1e-9),
        "machine": machine,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }
    if run.folder.writes:
        with warning_only("further files of the task"):
            result |= task.write_artifacts(run.folder.path)
    if metrics:
        result["summary"] = [list(row) for row in task.summary(result)]
    if task.diverged_at is not None:
        result["error"] = f"The loss was NaN or infinite at step {task.diverged_at}."
    elif diverged:
        result["error"] = "Weights or metrics were NaN or infinite at the end."
    return result


def conclude(run: Run, result: dict[str, Any]) -> None:
    """Write the result of a run, and after it what only shows it: final metrics of the logger, the summary."""
    run.folder.finish(result)
    constant = run.data.reference_metrics()
    values = {name: value for name, value in run.metrics.items() if value not in (None, constant.get(name))}
    final: dict[str, Any] = {f"metrics_final/{name}": value for name, value in values.items()}
    with warning_only("TensorBoard's table of hyperparameters"):
        for tensorboard in run.logger.tensorboards:
            tensorboard.log_hyperparams(run.hyperparameters, final)
        run.logger.finalize("success")
    if run.tracker is not None:
        run.tracker.close(result["status"] == "finished", final)
    if run.folder.writes:
        console.say(console.summary(result))


@contextlib.contextmanager
def warning_only(what: str) -> Iterator[None]:
    """Turn an exception into a warning that `what` has failed."""
    try:
        yield
    except Exception as error:
        console.say(f"Warning: {what} could not be written: {one_sentence(error) or type(error).__name__}")
