"""Train and evaluate one run: from a config, its corpus and its folder to a result.

data, task  ->  Trainer.fit  ->  evaluation of the last step  ->  test of the chosen checkpoint  ->  result
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.kernels.dispatch import compile_blocks
from speechformer.runs.folder import RunFolder
from speechformer.training import devices, runtime
from speechformer.training.build import Run, build_data, build_trainer, lease_devices
from speechformer.training.callbacks import PhaseTimer
from speechformer.training.checkpoints import AtomicCheckpointIO, load_chosen_weights, resumable
from speechformer.training.result import describe_machine, make_result


def fit(
    config: dict[str, Any],
    corpus: Corpus | Pairs,
    folder: RunFolder,
    launcher: str | None = None,
    start: runtime.Start | None = None,
) -> dict[str, Any]:
    """Train, evaluate and test one run. It resumes from the folder's `last.ckpt`, if there is one.

    Args:
        config: the resolved config as plain data.
        folder: the run's folder, which this process owns.
        launcher: of the sweep that this run belongs to, or None.
        start: when the run began; now by default.

    Returns:
        The content of `result.json`.

    Raises:
        UserError: the config or the corpus asks for something impossible.
    """
    start = start or runtime.Start()
    with runtime.threads(config, folder.owner) as threads:
        data = build_data(config, corpus)
        run = Run(config, folder, data)
        if rank := int(os.environ.get("LOCAL_RANK", 0)):
            torch.manual_seed(config["seed"] + rank)  # so that each device drops out other elements
        waiting = time.perf_counter()
        with lease_devices(config["trainer"], threads, launcher) as device:
            timer = PhaseTimer(start.seconds + time.perf_counter() - waiting)
            checkpoint = resumable(folder.path)
            trainer = build_trainer(
                config,
                [folder],
                device,
                timer,
                logger=run.logger,
                callbacks=run.callbacks,
                checkpoint_io=AtomicCheckpointIO(),
            )
            if config["compile"] is not None:
                compile_blocks(run.task, config["compile"], trainer.strategy.root_device)
            if not rank:
                prepare_folders([run], threads, resumes=checkpoint is not None)
                announce([run], trainer, threads, start, resumes=checkpoint is not None)
            train_and_evaluate(run, trainer, timer, checkpoint)
        timer.enter("evaluation")
        result = make_result(run, timer.seconds, describe_machine(trainer, threads))
    if not rank:
        console.say(console.summary(result))
    return result


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


def train_and_evaluate(run: Run, trainer: pl.Trainer, timer: PhaseTimer, checkpoint: Any) -> None:
    """Train, evaluate the last step, and test the chosen weights; the metrics go into `run.metrics`."""
    task, data, directory = run.task, run.data, run.folder.path
    trainer.fit(task, datamodule=data, ckpt_path=checkpoint)
    timer.enter("evaluation")
    sound = not task.diverged()
    if sound and (not task.curve or task.curve[-1]["step"] != trainer.global_step):
        trainer.validate(task, datamodule=data, verbose=False)  # the last step, wherever the interval ends
    trainer.save_checkpoint(directory / "last.ckpt")
    if not sound:
        return
    add_last_evaluation(run)
    if data.chosen_on == "validation":
        if run.checkpoints.best is not None:
            load_chosen_weights(task, directory, run.averaged)
            trainer.test(task, datamodule=data, verbose=False)
            run.metrics |= task.compute_metrics()
    elif (extra := data.extra_dataloader()) is not None:  # the rest was measured at the last step
        trainer.test(task, extra, verbose=False)
        run.metrics |= task.compute_metrics()


def add_last_evaluation(run: Run) -> None:
    """Add to a run's metrics those that need no model, and those of its last evaluation."""
    run.metrics |= run.data.reference_metrics()
    run.metrics |= {name: value for name, value in run.task.curve[-1].items() if name != "step"}
