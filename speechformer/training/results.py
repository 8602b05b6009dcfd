"""A run under way, and the result of one that came to its end: `result.json`, and what shows it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.config import debug_arguments
from speechformer.data.base import TaskData
from speechformer.errors import one_sentence
from speechformer.models.pretrained import is_pretrained, load_weights, read_small_files
from speechformer.models.stack import count_parameters
from speechformer.runs import identity
from speechformer.runs.find import find_checkpoint
from speechformer.runs.folder import PRETRAINED, TOKENIZER, RunFolder, sha256, write_json
from speechformer.tasks.base import Task
from speechformer.tasks.registry import TASKS, read_checkpoint
from speechformer.training.checkpoints import best_of, save_weights
from speechformer.training.loggers import RunLoggers
from speechformer.training.runtime import peak_bytes

NOT_SHOWN = ("hydra", "corpus", "threads", "compile", "force", "logger")  # overrides that say nothing about the model


class Run:
    """A run under way: config, folder, data, task.

    Attributes: `monitor`, the metric that chooses the best evaluation; `averaged`, of how many evaluations the
    weights are averaged; `metrics`, the final ones; `new_modules`, which `init_from` has no weights for; `loggers`
    and `trainer`, once there are any.
    """

    loggers: RunLoggers
    trainer: pl.Trainer

    def __init__(self, config: dict[str, Any], folder: RunFolder, data: TaskData) -> None:
        self.config, self.folder, self.data = config, folder, data
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        self.task = TASKS[config["task"]["name"]].from_config(config, data)
        self.new_modules = begin_with(self.task, config["init_from"]["folder"], data) if config["init_from"] else []
        self.task.attach(data)
        self.averaged = config["task"].get("average_checkpoints", 1)
        self.monitor = self.task.metric_name(data.chosen_on)
        self.metrics: dict[str, float | None] = {}
        self.parameters = count_parameters(self.task.model)

    @property
    def best(self) -> tuple[float | None, int | None]:
        """The metric of the best evaluation, and its step."""
        return best_of(self.task.curve, self.monitor, self.task)

    @property
    def steps(self) -> int:
        """The steps that the run has done."""
        return self.task.diverged_at or self.trainer.global_step

    def save_weights(self, name: str) -> None:
        """Write the weights into a file of the run's folder."""
        save_weights(self.task, self.folder.path / name, self.steps, self.folder.identity)

    def open(self, threads: int, ensemble_size: int, resumes: bool) -> None:
        """Write what belongs to a run that begins, and remove what an interrupted attempt left."""
        self.folder.remove_outputs(keep_results=resumes)
        tokenizer = self.folder.path / TOKENIZER
        self.data.tokenizer.save(tokenizer)
        if place := self.config.get("init_from"):
            write_json(self.folder.path / PRETRAINED, read_small_files(Path(place["folder"])))
        self.folder.owner |= {"threads": threads, "ensemble": ensemble_size > 1}
        self.folder.owner |= {"tokenizer_sha256": sha256(tokenizer)}
        if self.loggers.tracker is not None:
            self.loggers.tracker.open(self.loggers.csv.rows)
            console.say(self.loggers.tracker.about)
        self.folder.report_progress()


def begin_with(task: Task, folder: str, data: TaskData) -> list[str]:
    """Load the weights of `init_from`; return the names of the modules that it has none for.

    A classifier of other classes keeps all but the layer of the classes. A model may have fewer learned positions.
    """
    if is_pretrained(Path(folder)):
        return load_weights(task.model, Path(folder), new_classifier=True)
    checkpoint, result = find_checkpoint(folder)
    loaded, new = read_checkpoint(Path(folder) / checkpoint)["state_dict"], list[str]()
    if result is not None and result["corpus"]["classes"] != data.corpus.classes:
        new = ["head.2"]
    with torch.no_grad():
        for name, value in task.model.state_dict().items():
            if not name.startswith(tuple(new)):
                stored = loaded[f"model.{name}"]
                value.copy_(stored[: len(value)] if name.endswith("positions.table.weight") else stored)
    return new


def describe_machine(trainer: pl.Trainer, ensemble_size: int) -> dict[str, Any]:
    """Return the machine and devices of a run, as plain data."""
    device = trainer.strategy.root_device
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "ensemble_size": ensemble_size,
        "peak_bytes": peak_bytes(device) if ensemble_size == 1 else None,
    }


def make_result(run: Run, seconds: dict[str, float], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run that came to its end, and write its artifacts."""
    config, task, metrics, owner, (best, best_step) = run.config, run.task, run.metrics, run.folder.owner, run.best
    diverged = not metrics or not all(value is None or math.isfinite(value) for value in metrics.values())
    run.loggers.flush()
    result = {
        "status": "diverged" if diverged else "finished",
        "task": task.name,
        "metrics": metrics,
        "report": task.view.report(metrics),
        "best": {"metric": run.monitor, "value": best, "step": best_step, "chosen_on": run.data.chosen_on},
        "curve": task.curve,
        "parameters": run.parameters,
        "corpus": run.data.description,
        "config": config,
        "overrides": owner["overrides"],
        "identity": owner["identity"],
        "numerics": identity.NUMERICS_VERSION,
        "seed": config["seed"],
        "steps": run.steps,
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
    if debugged := debug_arguments(config):
        result["debug"] = True
        console.say(f"This run is left out of reports, because it sets trainer.{', trainer.'.join(debugged)}.")
    if metrics:
        result["summary"] = [list(row) for row in task.view.summary(result)]
    if task.diverged_at is not None:
        result["error"] = f"The loss was NaN or infinite at step {task.diverged_at}."
    elif diverged:
        result["error"] = "Weights or metrics were NaN or infinite at the end."
    return result


def conclude(run: Run, result: dict[str, Any]) -> None:
    """Write the result of a run, and after it what only shows it: final metrics of the loggers, the summary."""
    run.folder.finish(result)
    constant = run.data.reference_metrics()
    values = {name: value for name, value in run.metrics.items() if value not in (None, constant.get(name))}
    final: dict[str, Any] = {f"metrics_final/{name}": value for name, value in values.items()}
    if run.loggers.tensorboard is not None:
        with warning_only("TensorBoard's table of hyperparameters"):
            shown = hyperparameters(run.config, run.folder.overrides or ())
            run.loggers.tensorboard.log_hyperparams(shown, final)
            run.loggers.tensorboard.save()
            run.loggers.tensorboard.experiment.close()
    if run.loggers.tracker is not None:
        run.loggers.tracker.close(result["status"] == "finished", final)
    if run.folder.writes:
        console.say(console.summary(result))


def hyperparameters(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what TensorBoard's table shows of a config: what most people vary, and what the command line sets."""
    shown = {"model": config["model"]["name"], "pattern": config["pattern"]["name"], "seed": config["seed"]}
    for override in overrides:
        key, _, text = override.lstrip("+~").partition("=")
        if not key.startswith(NOT_SHOWN):
            value: Any = config
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            shown.setdefault(key, value if isinstance(value, str | int | float | bool) else text)
    return shown


@contextlib.contextmanager
def warning_only(what: str) -> Iterator[None]:
    """Turn an exception into a warning that `what` has failed."""
    try:
        yield
    except Exception as error:
        console.say(f"Warning: {what} could not be written: {one_sentence(error) or type(error).__name__}")
