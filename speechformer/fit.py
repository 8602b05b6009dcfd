"""One run, from a config and a folder to a result: train, evaluate, write; go on where it was interrupted.

Heavy imports stand inside functions, so that a run that is done already, or that another process works on, is
answered at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import math
import os
import shutil
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from speechformer import devices, runs, screen
from speechformer.config import as_plain, count_devices
from speechformer.corpora.load import load
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.subwords import on_one_line
from speechformer.refusals import UserError, one_sentence, pick

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from speechformer.callbacks import Checkpoints, Record, Stopwatch
    from speechformer.data import SpeechData
    from speechformer.pair_data import PairData
    from speechformer.tasks import Task

LEFT_BY_A_RUN = ("best.ckpt", "last.ckpt", "average.ckpt", "metrics.csv", "translations.tsv", runs.RESULT)
STRANGE = ("tensorboard", "best.ckpt", "last.ckpt", "metrics.csv")  # in a folder that is no run's


def build_data(config: dict[str, Any], corpus: Corpus | Pairs) -> SpeechData | PairData:
    """The LightningDataModule of a config's task."""
    from speechformer.data import SpeechData
    from speechformer.pair_data import PairData

    arguments = {key: config[key] for key in ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")}
    return PairData(corpus, **arguments) if isinstance(corpus, Pairs) else SpeechData(corpus, **arguments)


def core_arguments(config: dict[str, Any], data: SpeechData | PairData) -> dict[str, Any]:
    """The arguments of the task's core, as plain data."""
    from speechformer.cores.classifier import POOLS
    from speechformer.layers.block import ACTIVATIONS, NORMS

    kinds: dict[str, Any] = {"pool": POOLS, "norm": NORMS, "activation": ACTIVATIONS}
    for key, valid in kinds.items():  # also where they are not used
        pick(valid, config["core"][key], f"core.{key}")
    own = {
        "classify": {"pool", "classifier_width"},
        "lm": {"tied_output"},
        "translate": {"tied_output", "shared_embeddings"},
    }
    unused = set.union(*own.values()) - own[data.task["name"]]
    arguments = {key: value for key, value in config["core"].items() if key not in unused}
    for key in ("width", "heads", "layers", "ff", "block_size", "dropout", "model", "pattern"):
        arguments[key] = config[key]
    if isinstance(data.corpus, Corpus) and data.task["name"] == "classify":
        arguments["classes"] = len(data.corpus.classes)
    return {**arguments, "vocab_size": data.vocab_size}


def fit(
    cfg: DictConfig, directory: Path, overrides: Sequence[str] | None = None, launcher: str | None = None
) -> dict[str, Any]:
    """Train, evaluate and write one run; a run that came to its end is not done again, and one that was interrupted
    goes on from its `last.ckpt`.

    Args:
        cfg: the composed config; see `conf/config.yaml`.
        directory: the run's folder; it is made, and must not hold another run (one with another identity).
        overrides: of the command line, for the result to name; None if there was none.
        launcher: of the sweep that this run is part of, or None: a run of a sweep steps aside, and does not wait, if
            another process works on it.

    Returns:
        The content of `result.json`; the README explains its entries.

    Raises:
        UserError: the config or the corpus asks for what cannot be, or a file cannot be written.
        OccupiedError: of a sweep, and another process works on it.
        ForeignError: the folder holds another run.
    """
    started = time.perf_counter()
    config = as_plain(cfg)
    force = config.pop("force")
    corpus = load(config)
    fingerprint = runs.identity(config, corpus.sha256, corpus.identity)
    about: dict[str, Any] = {"identity": fingerprint, "overrides": None if overrides is None else list(overrides)}
    if int(os.environ.get("LOCAL_RANK", 0)):  # a helper of a run on several devices; the first process has the claim
        own = {**about, "attempts": 1, "threads": devices.share_of_threads()}
        return train(config, directory, corpus, own, started)

    begun = directory.exists() and any(directory.iterdir())
    try:
        with runs.claim(directory, wait=launcher is None) as earlier:
            result = runs.result_or_none(directory)
            if force and (earlier or result):
                clear_for_start(directory, anew=True)
                clear(directory, runs.CLAIM)
                earlier, result = {}, None
            for found in filter(None, (earlier, result)):
                refused = found.get("identity") is None and found.get("status") == "failed"
                if found.get("identity") != fingerprint and not refused:
                    raise runs.ForeignError(
                        f"{directory} holds another run (of another config, corpus or version of the code); choose "
                        "another folder, or overwrite it with force=true."
                    )
            if (
                not earlier
                and result is None
                and (strange := [name for name in STRANGE if (directory / name).exists()])
            ):
                raise runs.ForeignError(
                    f"{directory} holds {', '.join(strange)}, but no {runs.CLAIM}: whatever it is, it would be lost; "
                    "choose another folder, or remove that."
                )
            if result is not None and result["status"] in runs.OVER:
                return result
            about |= {"attempts": earlier.get("attempts", 0) + 1}
            about |= {"threads": earlier.get("threads") or devices.share_of_threads()}
            try:
                claim = runs.sign(directory, about)
                clear(directory, runs.RESULT)  # of an attempt that failed
                (directory / "config.yaml").write_text(OmegaConf.to_yaml(config), encoding="utf-8")
                result = train(config, directory, corpus, claim, started, launcher)
                runs.write_result(directory, result)
                shutil.rmtree(directory / "weights", ignore_errors=True)  # see callbacks.WEIGHTS
                return result
            except UserError:
                if not begun:
                    clear(directory, runs.CLAIM, "config.yaml", "tokenizer.json")
                raise
            except Exception as error:
                with contextlib.suppress(OSError):
                    runs.write_result(directory, failure(config, overrides, fingerprint, error))
                raise
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: {error.strerror or one_sentence(error)}. When that is mended, the same "
            "command goes on from the last checkpoint."
        ) from error
    except UserError:
        if not begun and not (directory / runs.CLAIM).exists():
            with contextlib.suppress(OSError):
                clear(directory, runs.LOCK)
                directory.rmdir()
        raise


def clear(directory: Path, *names: str) -> None:
    """Remove files, if they are there."""
    for name in names:
        (directory / name).unlink(missing_ok=True)


def failure(
    config: dict[str, Any], overrides: Sequence[str] | None, fingerprint: str | None, error: BaseException
) -> dict[str, Any]:
    """The result of a run that raised `error`."""
    reason = one_sentence(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename}: {error.strerror}"
    return {
        "status": "failed",
        "error": reason,
        "traceback": "".join(traceback.format_exception(error)),
        "task": task.get("name") if isinstance(task := config.get("task"), dict) else None,
        "config": config,
        "overrides": None if overrides is None else list(overrides),
        "identity": fingerprint,
        "seed": config.get("seed"),
        "commit": runs.commit(),
        "versions": runs.versions(),
    }


def build_trainer(
    config: dict[str, Any],
    directory: Path,
    monitor: str,
    device: Any,
    claim: dict[str, Any],
    started: float,
    data: SpeechData | PairData,
) -> tuple[Trainer, Checkpoints, Stopwatch, Record]:
    """Lightning's Trainer with what accompanies a training.

    Raises:
        UserError: `trainer.*` has an argument or value that Lightning does not take.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from speechformer.callbacks import Checkpoints, Progress, Record, Stopwatch, WholeFiles
    from speechformer.dashboard import Dashboard

    averaged = config["task"].get("average", 1)
    stopwatch = Stopwatch(started)
    keep = Checkpoints(directory, monitor, config["checkpoint_every"], averaged if averaged > 1 else 0)
    tensorboard = TensorBoardLogger(directory, name="", version="tensorboard", default_hp_metric=False)
    record = Record([tensorboard, CSVLogger(directory, name="", version="")])
    arguments = {**config["trainer"], "devices": device}
    if config["eval_interval"] is not None:
        batches = config["eval_interval"] * arguments["accumulate_grad_batches"]
        arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
    try:
        trainer = pl.Trainer(
            default_root_dir=directory,
            logger=record,
            callbacks=[
                record,
                stopwatch,
                Progress(directory, claim),
                Dashboard(record, data.examples(), data.tokenizer),
                keep,
            ],
            # Inside a SLURM job Lightning would settle devices and requeueing by itself; both are settled here.
            plugins=[WholeFiles(), LightningEnvironment()],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **arguments,
        )
    except (TypeError, ValueError, ImportError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"trainer: {one_sentence(error)}") from error
    return trainer, keep, stopwatch, record


@contextlib.contextmanager
def device_of(arguments: dict[str, Any], threads: int, launcher: str | None) -> Iterator[Any]:
    """What to give Lightning as `devices`, leased for this run: a free GPU where it asks for any one of them, and
    those that it names, or that Lightning takes where it asks for several."""
    import torch

    wanted = arguments["devices"]
    with contextlib.ExitStack() as leases:
        if arguments["accelerator"] in ("gpu", "cuda", "auto") and torch.cuda.is_available():
            names = devices.gpu_names()
            if wanted in (1, "1"):
                wanted = [leases.enter_context(devices.lease(names))]
            elif not int(os.environ.get("LOCAL_RANK", 0)):  # the first process has them for all
                several = wanted if isinstance(wanted, list) else range(count_devices(wanted))
                for index in sorted(several):  # in order, so that no two runs wait for each other
                    leases.enter_context(devices.lease(names[index : index + 1] or names))
        elif launcher == "submitit_local":  # it starts all jobs at once
            leases.enter_context(devices.lease(devices.cpu_slots(threads)))
        yield wanted


def set_threads(config: dict[str, Any], claim: dict[str, Any]) -> int:
    """Give torch the run's threads; one that goes on has as many as before, for sums are cut into as many parts."""
    import torch

    processes, every = count_devices(config["trainer"]["devices"]), devices.all_threads()
    threads = config["threads"] or claim.get("threads") or max(1, every // processes)
    torch.set_num_threads(threads)
    if processes > 1:  # otherwise Lightning divides the cores by itself
        os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def train(
    config: dict[str, Any],
    directory: Path,
    corpus: Corpus | Pairs,
    claim: dict[str, Any],
    started: float,
    launcher: str | None = None,
) -> dict[str, Any]:
    """The run itself, in a folder that is ours; returns its result."""
    import torch
    from lightning.pytorch import seed_everything

    from speechformer.callbacks import WEIGHTS, average
    from speechformer.cores.stack import count_parameters
    from speechformer.data import EvaluationBatches, SpeechData
    from speechformer.pair_data import PairData
    from speechformer.quality import signatures
    from speechformer.tasks import TASKS, Translate

    quieten()
    spare_memory_management()
    threads = set_threads(config, claim)
    seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config, corpus)
    arguments = {"core": core_arguments(config, data), "recipe": config["recipe"]}
    if isinstance(corpus, Corpus) and config["task"]["name"] == "classify":
        arguments["classes"] = list(corpus.classes)
    if config["task"]["name"] == "translate":
        arguments["decoding"] = {key: config["task"][key] for key in ("beam", "length_penalty")}
    task: Task = TASKS[config["task"]["name"]](**arguments)
    if isinstance(task, Translate) and isinstance(data, PairData):
        task.tokenizer, task.texts = data.tokenizer, data.texts
    parameters = count_parameters(task.core)
    chosen_on, averaged = data.chosen_on, config["task"].get("average", 1)
    monitor = task.figure_of(chosen_on)
    data.reach(getattr(task.core, "longest", None))

    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank:
        torch.manual_seed(config["seed"] + rank)  # each device drops out others
    waiting = time.perf_counter()
    with device_of(config["trainer"], threads, launcher) as device:
        started += time.perf_counter() - waiting
        goes_on_from = checkpoint_in(directory)
        trainer, keep, stopwatch, record = build_trainer(config, directory, monitor, device, claim, started, data)
        if rank == 0:
            runs.write_json(directory / runs.CLAIM, {**claim, "threads": threads})
            claim["threads"] = threads
            clear_for_start(directory, anew=goes_on_from is None)
            data.tokenizer.save(directory / "tokenizer.json")
            screen.say(screen.corpus_line(data.description))
            screen.say(screen.parameters_line(parameters))
            screen.say(f"Folder: {directory}")
            if goes_on_from:
                screen.say("It was interrupted, and goes on from its last checkpoint.")

        trainer.fit(task, datamodule=data, ckpt_path=goes_on_from)
        stopwatch.turn("evaluation")
        diverged = task.diverged()
        if not diverged and (not task.curve or task.curve[-1]["step"] != trainer.global_step):
            trainer.validate(task, datamodule=data, verbose=False)  # the last step, wherever the interval ends
        trainer.save_checkpoint(directory / "last.ckpt")
        metrics: dict[str, float | None] = {}
        constant: dict[str, float | None] = {}  # of the corpus alone
        if not diverged:
            constant = data.reference_figures()
            metrics |= constant
            metrics |= {name: value for name, value in task.curve[-1].items() if name != "step"}
            if chosen_on == "validation" and keep.best is not None:
                if averaged > 1:
                    steps = list(dict.fromkeys(int(point["step"]) for point in task.curve))[-averaged:]
                    files = [directory / WEIGHTS / f"{step}.ckpt" for step in steps]
                    if (directory / "average.ckpt").exists() and not all(file.exists() for file in files):
                        load_weights(task, directory / "average.ckpt")  # of this run, whose result was lost
                    else:
                        task.load_state_dict(average(files))
                        trainer.save_checkpoint(directory / "average.ckpt", weights_only=True)
                else:
                    load_weights(task, directory / "best.ckpt")
                trainer.test(task, datamodule=data, verbose=False)
                metrics |= task.figures()
            elif isinstance(data, SpeechData) and data.tested_at_lengths:  # the rest was measured at the last step
                trainer.test(task, EvaluationBatches(data.tested_at_lengths), verbose=False)
                metrics |= task.figures()
            diverged = not all(value is None or math.isfinite(value) for value in metrics.values())
        device_name = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else task.device.type
    # TensorBoard's table of hyperparameters, to sort a sweep by
    final = {f"final/{name}": value for name, value in metrics.items() if value not in (None, constant.get(name))}
    record.loggers[0].log_hyperparams(hyperparameters(config, claim["overrides"] or ()), final)
    record.finalize("success")
    stopwatch.turn("evaluation")
    result = {
        "status": "diverged" if diverged else "finished",
        "task": config["task"]["name"],
        "metrics": metrics,
        "best": {"metric": monitor, "value": keep.best, "step": keep.best_step, "chosen_on": chosen_on},
        "curve": task.curve,
        "parameters": parameters,
        "corpus": data.description,
        "config": config,
        "overrides": claim["overrides"],
        "identity": claim["identity"],
        "seed": config["seed"],
        "steps": trainer.global_step,
        "attempts": claim["attempts"],
        "seconds": sum(stopwatch.seconds.values()),
        "seconds_by_phase": stopwatch.seconds,
        "tokens_per_second": int(task.tokens) / max(stopwatch.seconds["training"], 1e-9),
        "machine": {
            "host": socket.gethostname(),
            "device": device_name,
            "threads": threads,
            "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
        },
        "commit": runs.commit(),
        "versions": runs.versions(),
    }
    if isinstance(task, Translate):
        result["scoring"] = signatures()
    if task.diverged_at is not None:
        result["error"] = f"The loss was NaN or infinite at step {task.diverged_at}."
    elif diverged:
        result["error"] = "Weights or figures were NaN or infinite at the end."
    if rank == 0:
        if isinstance(task, Translate) and (found := task.translations.get("test")):
            write_translations(directory / "translations.tsv", task.texts["test"], found)
        screen.say(screen.summary(result))
    return result


def hyperparameters(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """What TensorBoard's table shows of a config: what most people vary, and what this command line sets. All of it
    would be fifty columns, of which a sweep varies two."""
    shown = {"model": config["model"]["name"], "pattern": config["pattern"]["name"], "seed": config["seed"]}
    whole = OmegaConf.create(config)
    for override in overrides:
        key, _, given = override.lstrip("+~").partition("=")
        if not key.startswith(("hydra", "corpus", "threads", "force")):
            value = OmegaConf.select(whole, key)
            plain = isinstance(value, str | int | float | bool)
            shown.setdefault(key, value if plain else given)
    return shown


def write_translations(path: Path, pairs: list[tuple[str, str]], translations: list[str]) -> None:
    """A line for each sentence: source, reference and translation, with tabs between."""
    rows = [("source", "reference", "translation")]
    rows += [(source, reference, found) for (source, reference), found in zip(pairs, translations)]
    path.write_text("".join("\t".join(map(on_one_line, row)) + "\n" for row in rows), encoding="utf-8")


def checkpoint_in(directory: Path) -> Path | None:
    """The checkpoint to go on from; None if there is none that can be read."""
    import torch

    last = directory / "last.ckpt"
    if not last.exists():
        return None
    try:
        torch.load(last, map_location="cpu", weights_only=True)["progress"]
        return last
    except Exception as error:  # torch raises whatever it trips over in a file that is cut or none of its own
        reason = type(error).__name__
        screen.say(f"{last} cannot be read ({reason}; cut short?), so the run begins anew.")
        return None


def clear_for_start(directory: Path, anew: bool) -> None:
    """Remove what an interrupted run left and this one writes again."""
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    for partial in directory.glob("*.partial"):
        partial.unlink(missing_ok=True)
    clear(directory, "metrics.csv", *(LEFT_BY_A_RUN if anew else ()))


def load_weights(task: Task, path: Path) -> None:
    """Give the task the weights of a checkpoint."""
    import torch

    try:
        task.load_state_dict(torch.load(path, map_location=task.device, weights_only=True)["state_dict"])
    except Exception as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}); begin the run anew with force=true."
        ) from error


@functools.cache
def spare_memory_management() -> None:
    """Two things that cost a short run on a CPU a tenth of its time, once for each process.

    Python's garbage collector is told that what was imported stays: otherwise it looks through it all again, for a
    fifth of a second, and joblib has it do so after each job. The C library (glibc) is told to keep what is freed:
    otherwise it hands the memory of each chunk of logits back to the system, and gets it again, zeroed, for the next.
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(mmap_threshold, 32 << 20)  # the most that it takes
            libc.mallopt(trim_threshold, 1 << 30)


def quieten() -> None:
    """Silence what Lightning and torch say that a user of this project can do nothing about."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        "Checkpoint directory .* exists and is not empty",  # the run's folder holds config.yaml already
        "Experiment logs directory .* exists and is not empty",
        "The number of training batches .* is smaller than the logging interval",  # a small corpus is no fault
        ".*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning's own, against newer torch
        ".*sync_dist=True.*",  # each device evaluates everything, so there is nothing to bring together
        "The `srun` command is available on your system but is not used",  # a login node; launchers see to it
    ):
        warnings.filterwarnings("ignore", message=message)
