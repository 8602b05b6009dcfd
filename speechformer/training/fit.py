"""Train and evaluate one run, or several as an ensemble: from configs, a corpus and folders to results.

data, tasks  ->  Trainer.fit  ->  evaluation of the last step  ->  test of the chosen checkpoint  ->  results
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.kernels.dispatch import compile_blocks
from speechformer.runs.folder import RunFolder
from speechformer.training import devices, runtime
from speechformer.training.build import Run, build_data, build_trainer, lease_devices
from speechformer.training.callbacks import PhaseTimer
from speechformer.training.checkpoints import load_chosen_weights, resumable
from speechformer.training.ensemble import Ensemble
from speechformer.training.result import describe_machine, make_result


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
