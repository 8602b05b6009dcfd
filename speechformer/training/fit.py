"""Train and evaluate: from configs, a corpus and folders to results. One run, or the runs of an ensemble.

data, tasks  ->  Trainer.fit  ->  evaluation of the last step  ->  test of the chosen weights  ->  results

`Trainer.fit` calls `tasks.base.Task` (or `Ensemble`, for several): `training_step` makes a batch a loss, and
`validation_step` and `end_evaluation` measure. `Checkpoints` and `Progress` write what is written meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer import console
from speechformer.corpora.load import tokenizer_of
from speechformer.data.base import TaskData
from speechformer.errors import UserError, one_sentence
from speechformer.models.stack import compile_blocks
from speechformer.runs.folder import LAST, RunFolder
from speechformer.runs.rank import count_devices, local_rank, node_rank
from speechformer.tasks.optim import has_amx
from speechformer.tasks.registry import AnyCorpus, build_data
from speechformer.training import devices
from speechformer.training.callbacks import OnEvaluation, PhaseTimer, Progress, progress_bars
from speechformer.training.checkpoints import Checkpoints, load_chosen_weights, resumable, resumed_file
from speechformer.training.ensemble import Ensemble, EnsembleData
from speechformer.training.loggers import RunLoggers
from speechformer.training.pictures import Pictures
from speechformer.training.results import Run, conclude, describe_machine, make_result
from speechformer.training.runtime import check_memory, lacks_memory, reset_peak
from speechformer.training.trainer import build_trainer


def fit(
    members: Sequence[tuple[dict[str, Any], RunFolder]],
    corpus: AnyCorpus,
    launcher: str | None,
    start: float,
    on_evaluation: OnEvaluation | None = None,
) -> list[dict[str, Any]]:
    """Train, evaluate and test one run, or several as an ensemble. It resumes from `last.ckpt`, if there is one.

    Args:
        members: the resolved config as plain data, and the folder, which this process owns, of each run.
        launcher, on_evaluation: as for `execute`.
        start: when the process began with it, by `time.perf_counter`.

    Returns:
        The content of each `result.json`.

    Raises:
        UserError: the config or the corpus asks for something impossible.
    """
    config, folder = members[0]
    rank = node_rank() * count_devices(config["trainer"]["devices"]) + local_rank()
    with devices.threads(config, folder.owner) as threads, contextlib.ExitStack() as stack:
        place = config["init_from"]
        data = build_data(config, corpus, tokenizer_of(Path(place["folder"])) if place else None)
        check_memory(config, data.vocab_size)
        runs = [build_run(*member, data, len(members) > 1) for member in members]
        data.limit_length(runs[0].task.model.max_length)
        module: pl.LightningModule = runs[0].task if len(runs) == 1 else Ensemble(runs)
        source = data if len(runs) == 1 else EnsembleData(data, [run.config["seed"] for run in runs])
        if rank:
            torch.manual_seed(config["seed"] + rank)  # so that each device drops out other elements
        waiting = time.perf_counter()
        device = stack.enter_context(devices.lease_devices(config["trainer"], threads, launcher))
        timer = PhaseTimer(start + time.perf_counter() - waiting)

        checkpoint, content = resumable(module, runs)
        for run, rows in zip(runs, content.get("rows") or [[]] * len(runs), strict=True):
            run.loggers = RunLoggers(run.folder, run.config, run.task.view.charts, rows, content.get("global_step"))
            stack.enter_context(closed_at_failure(run))
        callbacks = [
            timer,
            Progress(runs, on_evaluation),
            Pictures(runs),
            Checkpoints(runs),
            *progress_bars(len(runs)),
        ]
        loggers = runs[0].loggers.all if len(runs) == 1 else []  # an ensemble logs by itself
        trainer = build_trainer(config, folder.path, device, callbacks, loggers)
        for run in runs:
            run.trainer = trainer
            if not rank:
                run.open(threads, len(runs), resumes=checkpoint is not None)
        if not rank:
            announce(runs, trainer.strategy.root_device, resumes=checkpoint is not None)

        train(runs, module, source, trainer, checkpoint, timer)
        test(runs, module, source, trainer)
        timer.enter("evaluation")
        results = [make_result(run, timer.seconds, describe_machine(trainer, len(runs))) for run in runs]
        for run, result in zip(runs, results):
            conclude(run, result)
    return results


def build_run(config: dict[str, Any], folder: RunFolder, data: TaskData, is_member: bool) -> Run:
    """Return a run; a member of an ensemble goes on drawing the random numbers that it would draw alone."""
    run = Run(config, folder, data)
    if is_member:
        run.task.generator = torch.Generator()
        run.task.generator.set_state(torch.get_rng_state())
    return run


def announce(runs: Sequence[Run], device: torch.device, resumes: bool) -> None:
    """Print the corpus, the parameters and the folder of a run that begins, and warn if its precision may be slow."""
    console.say(runs[0].data.corpus_line())
    console.say(console.parameters_line(runs[0].parameters))
    more = f" and {len(runs) - 1} more, in an ensemble" if len(runs) > 1 else ""
    console.say(f"Folder: {runs[0].folder.path}{more}")
    if place := runs[0].config["init_from"]:
        new = f"; initialised at random: {', '.join(runs[0].new_modules)}" if runs[0].new_modules else ""
        console.say(f"Weights: {place['folder']}{new}")
        words = [word.partition("=")[0] for word in runs[0].folder.overrides or ["experiment"]]
        usual = {"block_size": "block_size=128", "recipe.lr": "recipe.lr=1e-4"}
        unset = {key: usual[key] for key in usual if not {key, "experiment"} & {*words}}
        if unset and runs[0].config["task"].get("tokens") == "pretrained":
            console.say(
                f"The default of {' and '.join(unset)} is for small models from scratch; set, for example, "
                f"{' '.join(unset.values())}."
            )
    if resumes:
        console.say("The run was interrupted; it resumes from its last checkpoint.")
    precision = str(runs[0].config["trainer"]["precision"])
    if device.type == "cpu" and precision.startswith("bf16") and has_amx() is False:
        console.warn(
            f"trainer.precision={precision} may be slower than 32-true on this CPU, because it has no AMX. "
            "Compare with trainer.precision=32-true."
        )


def train(
    runs: Sequence[Run],
    module: pl.LightningModule,
    source: pl.LightningDataModule,
    trainer: pl.Trainer,
    checkpoint: Path | None,
    timer: PhaseTimer,
) -> None:
    """Train to the last step, evaluate it wherever the interval ends, and write `last.ckpt`."""
    config = runs[0].config
    if config["compile"] is not None:
        compile_blocks(module, config["compile"], trainer.strategy.root_device, trainer.accumulate_grad_batches)
    reset_peak(trainer.strategy.root_device)
    with resuming(checkpoint, timer):
        trainer.fit(module, datamodule=source, ckpt_path=checkpoint)
    timer.enter("evaluation")
    sound = [run for run in runs if not run.task.diverged()]
    if any(not run.task.curve or run.task.curve[-1]["step"] != trainer.global_step for run in sound):
        trainer.validate(module, datamodule=source, verbose=False)
    trainer.save_checkpoint(resumed_file(runs))
    if isinstance(module, Ensemble):
        module.tie()  # Lightning has moved it back from its device
        for run in runs:
            run.save_weights(LAST)


def test(
    runs: Sequence[Run], module: pl.LightningModule, source: pl.LightningDataModule, trainer: pl.Trainer
) -> None:
    """Test each run that has not diverged; the metrics go into `run.metrics`.

    If a part of train is held out, the weights that it chooses are tested, else the last ones, on test texts that
    were not evaluated in training.
    """
    data, extra, tested = runs[0].data, None, []
    for run in runs:
        if run.task.diverged():
            continue
        last = {name: value for name, value in run.task.curve[-1].items() if name != "step"}
        run.metrics |= data.reference_metrics() | last
        if data.chosen_on == "validation" and run.best[0] is not None:
            load_chosen_weights(run)
            tested.append(run)
    if data.chosen_on != "validation" and (extra := data.extra_dataloader()) is not None:
        tested = [run for run in runs if run.metrics]  # the rest was measured at the last step
    if tested:
        trainer.test(module, extra, datamodule=None if extra else source, verbose=False)
    for run in tested:
        run.metrics |= run.task.metrics


@contextlib.contextmanager
def resuming(checkpoint: Path | None, timer: PhaseTimer) -> Iterator[None]:
    """Blame the checkpoint for an exception before the first step after it."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if checkpoint is None or timer.stepped or lacks_memory(error):
            raise
        raise UserError(
            f"{checkpoint} is not as speechformer writes it ({one_sentence(error) or type(error).__name__}). Remove "
            "it to resume from an earlier one, or begin again with force=true."
        ) from error


@contextlib.contextmanager
def closed_at_failure(run: Run) -> Iterator[None]:
    """End the tracking service's run as failed if the block raises."""
    try:
        yield
    except BaseException:
        if run.loggers.tracker is not None:
            run.loggers.tracker.close(False, {})
        raise
