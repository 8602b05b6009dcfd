"""Test trained runs again, by themselves or as an ensemble: the mean of their probabilities decides.

Hansen and Salamon 1990, "Neural network ensembles". Weights are not averaged, so members may differ in their models.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speechformer.corpora.files import OutputFolder
from speechformer.corpora.load import load as load_corpus
from speechformer.errors import UserError
from speechformer.runs import folder as runs_folder
from speechformer.runs import identity
from speechformer.tasks.registry import build_data
from speechformer.tasks.translate import TRANSLATIONS

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun


def evaluate(runs: Sequence[TrainedRun]) -> dict[str, Any]:
    """Evaluate the ensemble of some runs on the held-out part and the tests of the first one, in single precision.

    Args:
        runs: finished ones of the same task, corpus, protocol and vocabulary.

    Returns:
        The content of a `result.json` for `report`: that of the first run with the metrics of the ensemble, and its
        members. Its seed is that of the first.

    Raises:
        UserError: a run has no result, runs do not fit together, or the corpus has changed since.
    """
    start, results = time.perf_counter(), [result_of(run) for run in runs]
    check_alike(runs, results)
    task, config = runs[0].task, with_defaults(results[0]["config"])
    metrics = measure(runs, data_of(runs[0], config))
    ensemble = {"ensemble": len(runs)} if len(runs) > 1 else {}
    result = {
        **{name: results[0][name] for name in ("status", "task", "seed", "corpus", "steps", "numerics")},
        "metrics": metrics,
        "report": task.report(metrics),
        "config": config | ensemble,
        "overrides": [*(results[0]["overrides"] or []), *(f"{name}={value}" for name, value in ensemble.items())],
        "members": [member_of(run, own) for run, own in zip(runs, results)],
        "parameters": {"total": sum(own["parameters"]["total"] for own in results)},
        "curve": [],
        "seconds": time.perf_counter() - start,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }
    return result | {"summary": [list(row) for row in task.summary(result)]}


@torch.no_grad()
def measure(runs: Sequence[TrainedRun], data: Any) -> dict[str, float | None]:
    """Return the metrics of an ensemble on everything that is evaluated at the end of a run."""
    task = runs[0].task
    data.limit_length(min((run.max_length for run in runs if run.max_length is not None), default=None))
    weights = {name: weight.clone() for name, weight in task.state_dict().items()}
    task.attach(data)
    task.load_state_dict(weights)  # `attach` may set initial ones
    task.on_validation_epoch_start()
    for batch in data.test_dataloader():
        on_device = {name: x.to(task.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        task.evaluate_members([run.task for run in runs], on_device)
    return data.reference_metrics() | task.compute_metrics()


def member_of(run: TrainedRun, result: dict[str, Any]) -> dict[str, Any]:
    """Return what the result of an ensemble says of a member."""
    about = {name: result.get(name) for name in ("seed", "identity", "commit")}
    return {"folder": str(run.directory), "checkpoint": run.checkpoint, **about}


def result_of(run: TrainedRun) -> dict[str, Any]:
    """Return the result of a run that has one."""
    if run.result is None or not run.finished:
        raise UserError(f"{run.directory} has not finished; repeat its command to finish it.")
    return run.result


def check_alike(runs: Sequence[TrainedRun], results: Sequence[dict[str, Any]]) -> None:
    """Require different runs of the same task, corpus, protocol and vocabulary."""
    folders = [run.directory.resolve() for run in runs]
    if twice := [run.directory for run, own in zip(runs, folders) if folders.count(own) > 1]:
        raise UserError(f"{twice[0]} is there twice; an ensemble needs different runs.")
    about = [
        {
            "task": result["task"],
            "corpus": result["corpus"]["sha256"],
            "protocol": result["config"]["protocol"],
            "vocabulary": runs_folder.sha256(run.directory / runs_folder.TOKENIZER),
        }
        for run, result in zip(runs, results)
    ]
    for run, own in zip(runs, about):
        if different := [name for name, value in about[0].items() if own[name] != value]:
            raise UserError(
                f"{run.directory} has another {different[0]} than {runs[0].directory}; an ensemble needs runs of the "
                "same task, corpus, protocol and vocabulary."
            )


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run of any version, with the keys that it lacks."""
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    for key, value in identity.added_to(config["task"]["name"]).items():
        group, _, name = key.rpartition(".")
        (config[group] if group else config).setdefault(name, value)
    return config


def data_of(run: TrainedRun, config: dict[str, Any]) -> Any:
    """Return the data of a run.

    Raises:
        UserError: the corpus is another one now, or was not found.
    """
    corpus, trained = load_corpus(config), result_of(run)["corpus"]
    if corpus.sha256 != trained["sha256"]:
        raise UserError(
            f"{run.directory} trained on a corpus {trained['name']} that is not the one in {corpus.where}: their "
            "sha256 differ. Restore it, or train again."
        )
    return build_data(config, corpus)


def write(result: dict[str, Any], run: TrainedRun, folder: Path) -> Path:
    """Write a result into a folder, with predictions or translations, and return the path of `result.json`.

    Raises:
        UserError: the folder has files that no command of ours has written.
    """
    output = OutputFolder(folder)
    for name in (runs_folder.PREDICTIONS, TRANSLATIONS):
        output.file(name)
    result = result | run.task.write_artifacts(folder)
    path = output.file(runs_folder.RESULT)
    runs_folder.write_json(path, result)
    return path
