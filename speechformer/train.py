"""One command, one run: `python -m speechformer.train task=classify model=alibi`.

`main` is the Hydra edge: it composes the config, answers bad input in one sentence, and hands over to `fit`,
a plain function from a config and a folder to a result. Heavy imports stand inside functions, so that
`--help`, shell completion and a typo are answered at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechformer import runs
from speechformer.config import CONF, as_plain, check_overrides, explain, one_sentence
from speechformer.refusals import UserError, pick

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from speechformer.callbacks import Stopwatch
    from speechformer.data import SpeechData
    from speechformer.tasks import Task


def core_arguments(config: dict[str, Any], data: SpeechData) -> dict[str, Any]:
    """The arguments of the task's core, as plain data."""
    from speechformer.cores.classifier import POOLS

    pick(POOLS, config["core"]["pool"], "core.pool")  # also where it is not used
    own = {
        "classify": {"pool", "classifier_width"},
        "lm": {"tied_output"},
    }
    unused = set.union(*own.values()) - own[data.task["name"]]
    arguments = {key: value for key, value in config["core"].items() if key not in unused}
    for key in ("width", "heads", "layers", "ff", "block_size", "dropout", "model", "pattern"):
        arguments[key] = config[key]
    if data.task["name"] == "classify":
        arguments["classes"] = len(data.corpus.classes)
    return {**arguments, "vocab_size": data.vocab_size}


def build_trainer(
    config: dict[str, Any], directory: Path, task: Task, monitor: str
) -> tuple[Trainer, ModelCheckpoint, Stopwatch]:
    """Lightning's Trainer with the run's loggers and checkpoints; what keeps the best one; and the clock.

    Raises:
        UserError: `trainer.*` has an argument or value that Lightning does not take.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from speechformer.callbacks import Progress, Stopwatch

    overwriting: dict[str, Any] = {"dirpath": directory, "enable_version_counter": False}
    overwriting["save_on_train_epoch_end"] = False
    best = ModelCheckpoint(filename="best", monitor=monitor, mode=task.mode, save_weights_only=True, **overwriting)
    last = ModelCheckpoint(filename="last", every_n_train_steps=config["checkpoint_every"], **overwriting)
    stopwatch = Stopwatch()
    arguments = dict(config["trainer"])
    if config["eval_interval"] is not None:
        batches = config["eval_interval"] * arguments["accumulate_grad_batches"]
        arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
    try:
        trainer = pl.Trainer(
            default_root_dir=directory,
            logger=[
                TensorBoardLogger(directory, name="", version="tensorboard", default_hp_metric=False),
                CSVLogger(directory, name="", version=""),
            ],
            callbacks=[best, last, stopwatch, Progress()],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **arguments,
        )
    except (TypeError, ValueError, ImportError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"trainer: {one_sentence(error)}") from error
    return trainer, best, stopwatch


def fit(cfg: DictConfig, directory: Path, overrides: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, evaluate and write one run.

    Args:
        cfg: the composed config; see `conf/config.yaml`.
        directory: the run's folder; it is made, and must not hold the result of a run that came to its end.
        overrides: of the command line, for the result to name; None if there was none.

    Returns:
        The content of `result.json`; the README explains its entries.

    Raises:
        UserError: the config or the corpus asks for what cannot be.
    """
    started = time.perf_counter()
    config = as_plain(cfg)
    if runs.is_over(directory):
        raise UserError(f"{directory} already holds a finished run; choose another hydra.run.dir or remove it.")

    import torch
    from lightning.pytorch import seed_everything

    from speechformer import screen
    from speechformer.cores.decoder import Decoder
    from speechformer.cores.stack import count_parameters
    from speechformer.corpora.speeches import load_corpus
    from speechformer.data import EvaluationBatches, SpeechData
    from speechformer.tasks import TASKS

    quieten()
    seed_everything(config["seed"], workers=True, verbose=False)
    data = SpeechData(
        load_corpus(config["corpus"]),
        **{key: config[key] for key in ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")},
    )
    task = TASKS[config["task"]["name"]](core=core_arguments(config, data), recipe=config["recipe"])
    parameters = count_parameters(task.core)
    # Without a held-out part the best checkpoint is chosen on test, as the reports did, and the result says so.
    chosen_on = "validation" if data.splits.validation else "test"
    monitor = task.figure_of(chosen_on)
    trainer, best, stopwatch = build_trainer(config, directory, task, monitor)
    if isinstance(task.core, Decoder):
        data.drop_lengths_above(task.core.decoder.longest)

    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)  # of a run here that did not finish
    for left in ("best.ckpt", "last.ckpt", "metrics.csv", runs.RESULT):
        (directory / left).unlink(missing_ok=True)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    data.tokenizer.save(directory / "tokenizer.json")
    screen.say(screen.corpus_line(data.description))
    screen.say(screen.parameters_line(parameters))
    screen.say(f"Folder: {directory}")

    ready = time.perf_counter()
    trainer.fit(task, datamodule=data)
    training = time.perf_counter() - ready - stopwatch.seconds

    diverged = task.diverged()
    trainer.save_checkpoint(directory / "last.ckpt")
    best_figure = None if best.best_model_score is None else float(best.best_model_score)
    if stopwatch.evaluated_at != trainer.global_step:  # the last step is evaluated wherever the interval ends
        trainer.validate(task, datamodule=data, verbose=False)
        last_figure = task.figures()[monitor]
        if best_figure is None or task.better(last_figure, best_figure):
            best_figure = last_figure
            trainer.save_checkpoint(directory / "best.ckpt", weights_only=True)
    checkpoint = torch.load(directory / "best.ckpt", weights_only=True)
    figures_are_finite = all(map(math.isfinite, task.figures().values()))
    metrics = {**data.reference_figures(), **task.figures()}
    if chosen_on == "validation":
        task.load_state_dict(checkpoint["state_dict"])
        trainer.test(task, datamodule=data, verbose=False)
        metrics |= task.figures()
    elif data.tested_at_lengths:  # the rest was measured at the last step
        trainer.test(task, EvaluationBatches(data.tested_at_lengths), verbose=False)
        metrics |= task.figures()
    # TensorBoard's table of hyperparameters, to sort a sweep by
    varied = {key: value for key, value in config.items() if key not in ("trainer", "corpus", "checkpoint_every")}
    final = {f"final/{name}": value for name, value in metrics.items() if value is not None}
    trainer.loggers[0].log_hyperparams(varied, final)
    for logger in trainer.loggers:
        logger.finalize("success")
    result = {
        "status": "diverged" if diverged or not figures_are_finite else "finished",
        "task": config["task"]["name"],
        "metrics": metrics,
        "best": {
            "metric": monitor,
            "value": best_figure,
            "step": checkpoint["global_step"],
            "chosen_on": chosen_on,
        },
        "curve": task.curve,
        "parameters": parameters,
        "corpus": data.description,
        "config": config,
        "overrides": None if overrides is None else list(overrides),
        "seed": config["seed"],
        "steps": trainer.global_step,
        "seconds": time.perf_counter() - started,
        "seconds_by_phase": {
            "start-up": ready - started,
            "training": training,
            "evaluation": stopwatch.seconds,
        },
        "tokens_per_second": int(task.tokens) / training,
        "commit": runs.commit(),
        "versions": runs.versions(),
    }
    runs.write_result(directory, result)
    screen.say(screen.summary(result))
    return result


def quieten() -> None:
    """Silence what Lightning and torch say that a user of this project can do nothing about."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        "Checkpoint directory .* exists and is not empty",  # the run's folder holds config.yaml already
        "Experiment logs directory .* exists and is not empty",
        "The number of training batches .* is smaller than the logging interval",  # a small corpus is no fault
        ".*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning's own, against newer torch
    ):
        warnings.filterwarnings("ignore", message=message)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(cfg: DictConfig) -> float:
    """One job of Hydra's; returns the figure that a sweeper may optimise."""
    hydra_config = HydraConfig.get()
    overrides, directory = hydra_config.overrides.task, Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        return job(cfg, directory, overrides, alone=hydra_config.runtime.choices["hydra/launcher"] == "basic")
    try:
        check_overrides(overrides)
        result = fit(cfg, directory, overrides)
    except UserError as error:
        sys.exit(f"Error: {error}")
    return result["best"]["value"]


def job(cfg: DictConfig, directory: Path, overrides: Sequence[str], alone: bool) -> float:
    """One run of a sweep: one that came to its end before is not run again, and one that fails leaves a result that
    says so. What runs side by side with others (not `alone`) talks to `log.txt` in its folder, and says one line."""
    name = " ".join(overrides)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    try:
        if runs.is_over(directory):
            result = runs.read_result(directory)
            if result["config"] != runs.finite(config):
                raise UserError(f"{directory} holds a run of another config; choose another hydra.sweep.dir.")
            print(f"Done before: {name}", flush=True)
            return result["best"]["value"]
        check_overrides(overrides)
        with contextlib.ExitStack() as stack:
            if not alone:
                directory.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(open(directory / "log.txt", "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(log))
                stack.enter_context(contextlib.redirect_stderr(log))
            result = fit(cfg, directory, overrides)
    except Exception as error:
        print(f"Failed: {name}: {error}", file=sys.stderr, flush=True)
        if not runs.is_over(directory):
            directory.mkdir(parents=True, exist_ok=True)
            failure = {"status": "failed", "error": str(error), "traceback": traceback.format_exc()}
            about = {"task": config["task"]["name"], "config": config, "overrides": list(overrides)}
            code = {"commit": runs.commit(), "versions": runs.versions()}
            runs.write_result(directory, {**failure, **about, "seed": config["seed"], **code})
        raise  # Hydra goes on with the other jobs
    best = result["best"]
    if not alone:
        print(f"{result['status'].capitalize()} in {result['seconds']:.0f} s: {name}", flush=True)
    return best["value"]


def main() -> None:
    """The command line; `speechformer-train` is the same."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print, and we print it
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"Error: {explain(error)}")
    except UserError as error:
        sys.exit(f"Error: {error}")
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        sys.exit(f"Error: {error.filename}: {error.strerror}.")
    except ValueError as error:
        if "Config group override must be" not in str(error):  # Hydra's, for GROUP=null
            raise
        sys.exit("Error: a group takes the name of a choice; for no experiment, leave experiment= away.")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")


if __name__ == "__main__":
    main()
