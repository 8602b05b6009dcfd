"""Test trained runs again, by themselves or as an ensemble: the mean of their probabilities decides.

Hansen and Salamon 1990, "Neural network ensembles". Weights are not averaged, so members may differ in their models.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment

from speechformer import console
from speechformer.config import as_plain, compose
from speechformer.corpora.documents import files_of_parts
from speechformer.corpora.files import OutputFolder
from speechformer.corpora.load import load as load_corpus
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.splits import number_of_folds
from speechformer.data.base import TaskData
from speechformer.errors import UserError
from speechformer.keys import quote
from speechformer.models.stack import count_parameters
from speechformer.process import standard_state
from speechformer.runs import folder as runs_folder
from speechformer.runs import identity
from speechformer.runs.find import find_checkpoint
from speechformer.tasks.registry import build_data
from speechformer.tasks.translate import TRANSLATIONS
from speechformer.training.runtime import quiet

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun

ARTIFACTS = (runs_folder.PREDICTIONS, TRANSLATIONS)


@standard_state()
def evaluate(runs: Sequence[TrainedRun], root: str | None = None) -> dict[str, Any]:
    """Evaluate the ensemble of some runs on the held-out part and the tests of the first one, in single precision.

    The first run also decides the settings of evaluation: `block_size`, lengths, beam, and mixture with counts.

    Args:
        runs: finished ones of the same task, corpus, protocol and vocabulary.
        root: the folder of the corpus; None: where the first run had it.

    Returns:
        The content of a `result.json` for `report`: that of the first run with the metrics of the ensemble, its
        members, and their checkpoints as a setting. Its seed is that of the first.

    Raises:
        UserError: a run has no result, runs do not fit together, or the corpus has changed since.
    """
    start, results = time.perf_counter(), results_of(runs)
    task, config = runs[0].task, results[0]["config"]
    data = data_of(runs[0], root)
    metrics = measure(runs, data)
    settings: dict[str, Any] = {"checkpoint": " and ".join(sorted({run.checkpoint for run in runs}))}
    is_run = len(runs) == 1 and not runs[0].is_pretrained
    again = is_run and runs[0].checkpoint == find_checkpoint(runs[0].directory)[0]
    if len(runs) > 1:
        settings["ensemble"] = name_of(results)
    result = {
        **{name: results[0][name] for name in ("status", "task", "seed", "corpus", "steps", "numerics")},
        "metrics": metrics,
        "report": task.view.report(metrics),
        "config": config | settings,
        "overrides": [*(results[0]["overrides"] or []), *(f"{name}={value}" for name, value in settings.items())],
        "members": [
            {"folder": str(run.directory), "checkpoint": run.checkpoint}
            | {name: result.get(name) for name in ("seed", "identity", "commit")}
            for run, result in zip(runs, results)
        ],
        "parameters": {"total": sum(result["parameters"]["total"] for result in results)},
        "curve": [],
        "again": again,  # the run's own result has the same weights
        "evaluation_seconds": time.perf_counter() - start,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }
    if runs[0].is_pretrained:
        result["corpus"] = data.description
    return result | {"summary": [list(row) for row in task.view.summary(result)]}


def with_corpus(run: TrainedRun, folder: Path) -> TrainedRun:
    """Return a model from elsewhere as a run that ended with it, on a folder of text (`corpus=text`).

    Raises:
        UserError: it is no language model from elsewhere, or the folder is no such corpus.
    """
    if not run.is_pretrained:
        raise UserError(f"--corpus is for models from elsewhere; {run.directory} is a run, which has its corpus.")
    if "generate" not in run.task.abilities:
        raise UserError(f"--corpus measures the perplexity of a language model, and {run.directory} is none.")
    if not any(part.startswith("test_") for part in files_of_parts(folder)):
        raise UserError(
            f"--corpus: {folder} has no test_LM_<name>.txt, and no folder test_LM_<name> of .txt files; it "
            "needs one of these, and train_LM.txt or a folder train_LM."
        )
    words = ["task=lm", "corpus=text", "protocol=paper", f"block_size={min(run.block_size, 1024)}"]
    places = {"corpus.root": folder.resolve(), "init_from": run.directory.resolve()}
    words += [f"{key}={quote(str(place))}" for key, place in places.items()]
    config = as_plain(compose(words))
    corpus = load_corpus(config)
    result = {
        **{"status": "finished", "task": "lm", "seed": 0, "steps": 0, "numerics": identity.NUMERICS_VERSION},
        **{"config": config, "overrides": words, "parameters": count_parameters(run.model)},
        "corpus": {"name": "text", "where": corpus.where, "sha256": corpus.sha256, "classes": corpus.classes},
    }
    return replace(run, result=result)


def name_of(results: Sequence[dict[str, Any]]) -> int | str:
    """Return the number of runs of an ensemble and, if their settings differ, those of each."""
    settings = []
    for result in results:
        flat = dict(identity.flatten(identity.identity_settings(result["config"])))
        follows = ["pattern.seed"] if flat.get("pattern.seed") == result["seed"] else []  # the run's seed
        settings.append({key: value for key, value in flat.items() if key not in ("seed", "study", *follows)})
    keys = dict.fromkeys(itertools.chain(*settings))
    differ = [key for key in keys if len({repr(each.get(key)) for each in settings}) > 1]
    members = [
        " ".join(f"{key.removesuffix('.name')}={each[key]}" for key in differ if key in each) for each in settings
    ]
    return f"{len(results)} ({'; '.join(members)})" if differ else len(results)


def measure(runs: Sequence[TrainedRun], data: TaskData) -> dict[str, float | None]:
    """Return the metrics of an ensemble on all that is evaluated at the end of a run, by Lightning's `test`."""
    task, device = runs[0].task, runs[0].task.device
    data.limit_length(min((run.max_length for run in runs if run.max_length is not None), default=None))
    weights = {name: weight.clone() for name, weight in task.state_dict().items()}
    task.attach(data)
    task.load_state_dict(weights)  # `attach` may set initial ones
    task.averaged_tasks = [run.task for run in runs] if len(runs) > 1 else ()
    with quiet():
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],  # also inside a SLURM job
        )
        trainer.test(task, datamodule=data, verbose=False)
    task.to(device)  # Lightning has moved it to the CPU
    return data.reference_metrics() | task.metrics


def results_of(runs: Sequence[TrainedRun]) -> list[dict[str, Any]]:
    """Return the results of different runs that can be an ensemble.

    Raises:
        UserError: a run has no result, is there twice, has another task, corpus, protocol or vocabulary than the
            first, or reads less than a block of it.
    """
    folders, results = [run.directory.resolve() for run in runs], []
    for run in runs:
        if run.is_pretrained and run.result is None:
            raise UserError(f"{run.directory} is a model from elsewhere: name a folder of text with --corpus.")
        if run.result is None or not run.finished:
            raise UserError(f"{run.directory} has not finished; repeat its command to finish it.")
        results.append(run.result)
    if twice := [run.directory for run, folder in zip(runs, folders) if folders.count(folder) > 1]:
        raise UserError(f"{twice[0]} is there twice; an ensemble needs different runs.")
    about = [learned_from(run, result) for run, result in zip(runs, results)]
    for run, described in zip(runs, about):
        if different := [name for name, value in about[0].items() if described[name] != value]:
            raise UserError(
                f"{run.directory} has another {different[0]} than {runs[0].directory}; an ensemble needs runs of the "
                "same task, corpus, protocol and vocabulary."
            )
        if run.max_length is not None and run.max_length < runs[0].block_size:
            raise UserError(
                f"{run.directory} reads at most {run.max_length} tokens, and {runs[0].directory} is evaluated on "
                f"{runs[0].block_size}. Name the run with the shortest block_size first."
            )
    return results


def learned_from(run: TrainedRun, result: dict[str, Any]) -> dict[str, Any]:
    """Return what the runs of an ensemble must have in common, by name."""
    config, corpus, protocol = result["config"], result["corpus"], dict(result["config"]["protocol"])
    if protocol.get("fold") == "seed":
        protocol["fold"] = config["seed"] % number_of_folds(protocol["validation"])
    return {
        "task": result["task"],
        "corpus": [corpus["sha256"], config["corpus"].get("separator")],
        "direction": corpus.get("languages"),
        "list of classes": corpus.get("classes"),
        "protocol": {name: value for name, value in protocol.items() if name != "fold"},
        "held-out part (protocol.fold)": protocol.get("fold", 0),
        "vocabulary": runs_folder.sha256(run.directory / runs_folder.TOKENIZER),
        "vocab_size": run.task.hparams["architecture"]["vocab_size"],
    }


def data_of(run: TrainedRun, root: str | None = None) -> Any:
    """Return the data of a finished run; its corpus is in `root`, or where it was.

    Raises:
        UserError: the corpus is another one now, or was not found.
    """
    assert run.result is not None
    config, trained = run.result["config"], run.result["corpus"]
    place = config["corpus"]
    if place["name"] == "auto":  # the corpus that it was, with its settings
        place = place.get(trained["name"], place) | {"name": trained["name"]}
    config = config | {"corpus": place if root is None else place | {"root": root}}
    corpus = load_corpus(config)
    if corpus.sha256 != trained["sha256"]:
        raise UserError(
            f"{run.directory} trained on a corpus {trained['name']} that is not the one in {corpus.where}: their "
            "sha256 differ. Restore it, name its folder with --root, or train again."
        )
    return build_data(config, corpus, run.tokenizer if isinstance(run.tokenizer, PretrainedTokenizer) else None)


def default_folder(runs: Sequence[TrainedRun]) -> Path:
    """Return the folder for the result of some runs and checkpoints, which no others have."""
    more = f"_and_{len(runs) - 1}_more" if len(runs) > 1 else ""
    members = "\n".join(f"{run.directory.resolve()} {run.checkpoint}" for run in runs)
    name = f"{runs[0].directory.resolve().name}{more}_{hashlib.sha256(members.encode()).hexdigest()[:8]}"
    return Path("outputs/evaluate") / name


def prepare(folder: Path) -> OutputFolder:
    """Return a folder for a result.

    Raises:
        UserError: it is that of a run, or has files that no command of ours has written.
    """
    if (folder / runs_folder.OWNER).exists():
        raise UserError(f"{folder} is the folder of a run; choose another for the evaluation.")
    output = OutputFolder(folder)
    for name in (*ARTIFACTS, runs_folder.RESULT):
        output.file(name)
    return output


def write(result: dict[str, Any], run: TrainedRun, output: OutputFolder) -> Path:
    """Write a result with its predictions or translations, in place of an older one, and return its path."""
    for name in ARTIFACTS:
        (output.path / name).unlink(missing_ok=True)
    result = result | run.task.write_artifacts(output.path)
    if "caution" in result:
        console.say(result["caution"])
    path = output.file(runs_folder.RESULT)
    runs_folder.write_json(path, result)
    return path
