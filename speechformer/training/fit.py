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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from speechformer import console
from speechformer.config import as_plain, count_devices
from speechformer.corpora.load import load
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.subwords import on_one_line
from speechformer.errors import UserError, one_sentence, pick
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.training import devices

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from speechformer.data.pairs import PairData
    from speechformer.data.speeches import SpeechData
    from speechformer.tasks.base import Task
    from speechformer.training.callbacks import PhaseTimer
    from speechformer.training.ensemble import Ensemble, EnsembleData

LEFT_BY_A_RUN = ("best.ckpt", "last.ckpt", "average.ckpt", "metrics.csv", "translations.tsv", runs.RESULT)
STRANGE = ("tensorboard", "best.ckpt", "last.ckpt", "metrics.csv")  # in a folder that is no run's


def build_data(config: dict[str, Any], corpus: Corpus | Pairs) -> SpeechData | PairData:
    """The LightningDataModule of a config's task."""
    from speechformer.data.pairs import PairData
    from speechformer.data.speeches import SpeechData

    arguments = {key: config[key] for key in ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")}
    return PairData(corpus, **arguments) if isinstance(corpus, Pairs) else SpeechData(corpus, **arguments)


def architecture_arguments(config: dict[str, Any], data: SpeechData | PairData) -> dict[str, Any]:
    """The arguments of the task's model, as plain data."""
    from speechformer.layers.block import ACTIVATIONS, NORMS
    from speechformer.models.classifier import POOLS

    kinds: dict[str, Any] = {"pool": POOLS, "norm": NORMS, "activation": ACTIVATIONS}
    for key, valid in kinds.items():  # also where they are not used
        pick(valid, config["architecture"][key], f"architecture.{key}")
    own = {
        "classify": {"pool", "classifier_width"},
        "lm": {"tied_output"},
        "translate": {"tied_output", "shared_embeddings"},
    }
    unused = set.union(*own.values()) - own[data.task["name"]]
    arguments = {key: value for key, value in config["architecture"].items() if key not in unused}
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
    fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    about: dict[str, Any] = {"identity": fingerprint, "overrides": None if overrides is None else list(overrides)}
    if int(os.environ.get("LOCAL_RANK", 0)):  # a helper of a run on several devices; the first process has the claim
        own = {**about, "attempts": 1, "threads": devices.share_of_threads()}
        return train([(config, directory, own)], corpus, started)[0]

    begun = directory.exists() and any(directory.iterdir())
    try:
        with runs.lock(directory, wait=launcher is None) as earlier:
            result = runs.result_or_none(directory)
            if force and (earlier or result):
                clear_for_start(directory, anew=True)
                clear(directory, runs.OWNER)
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
                    f"{directory} holds {', '.join(strange)}, but no {runs.OWNER}: whatever it is, it would be lost; "
                    "choose another folder, or remove that."
                )
            if result is not None and result["status"] in runs.TERMINAL_STATES:
                return result
            about |= {"attempts": earlier.get("attempts", 0) + 1}
            about |= {"threads": earlier.get("threads") or devices.share_of_threads()}
            try:
                claim = runs.write_owner(directory, about)
                clear(directory, runs.RESULT)  # of an attempt that failed
                (directory / "config.yaml").write_text(OmegaConf.to_yaml(config), encoding="utf-8")
                result = train([(config, directory, claim)], corpus, started, launcher)[0]
                runs.write_result(directory, result)
                shutil.rmtree(directory / "weights", ignore_errors=True)  # see callbacks.WEIGHTS
                return result
            except UserError:
                if not begun:
                    clear(directory, runs.OWNER, "config.yaml", "tokenizer.json")
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
        if not begun and not (directory / runs.OWNER).exists():
            with contextlib.suppress(OSError):
                clear(directory, runs.LOCK)
                directory.rmdir()
        raise


def fit_ensemble(jobs: Sequence[tuple[DictConfig, Path, Sequence[str]]], launcher: str) -> list[Path]:
    """Train runs of the same shapes together (see `pack`), those of them whose folders are new.

    Args:
        jobs: config, folder and overrides of each; `launcher.grouped` says which can go together.
        launcher: of the sweep that they are part of.

    Returns:
        The folders of those that have their result now: none if there were fewer than two.
    """
    started = time.perf_counter()
    members = []
    with contextlib.ExitStack() as claims:
        for cfg, directory, overrides in jobs:
            config = as_plain(cfg)
            config.pop("force")
            corpus = load(config)
            try:
                earlier = claims.enter_context(runs.lock(directory, wait=False))
            except runs.OccupiedError:
                continue
            if earlier or runs.result_or_none(directory) or any((directory / name).exists() for name in STRANGE):
                continue
            fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
            members.append(
                (config, directory, {"identity": fingerprint, "overrides": list(overrides), "attempts": 1})
            )
        if len(members) < 2:
            return []
        threads = devices.share_of_threads()
        signed = []
        for config, directory, about in members:
            signed.append((config, directory, runs.write_owner(directory, {**about, "threads": threads})))
            (directory / "config.yaml").write_text(OmegaConf.to_yaml(config), encoding="utf-8")
        for (_, directory, _), result in zip(signed, train(signed, corpus, started, launcher)):
            runs.write_result(directory, result)
    return [directory for _, directory, _ in signed]


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
        "commit": identity.commit(),
        "versions": identity.versions(),
    }


@dataclass
class Attempt:
    """A run that is being made: its config, its folder, what `run.json` says, and what trains it."""

    config: dict[str, Any]
    directory: Path
    claim: dict[str, Any]
    task: Task
    data: SpeechData | PairData
    parameters: dict[str, int]

    def __post_init__(self) -> None:
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

        from speechformer.training.callbacks import Checkpoints, ReplayLogger
        from speechformer.training.tensorboard import Dashboard

        averaged = self.config["task"].get("average_checkpoints", 1)
        self.monitor = self.task.metric_name(self.data.chosen_on)
        self.keep = Checkpoints(
            self.directory, self.monitor, self.config["checkpoint_every"], averaged if averaged > 1 else 0
        )
        tensorboard = TensorBoardLogger(self.directory, name="", version="tensorboard", default_hp_metric=False)
        self.record = ReplayLogger([tensorboard, CSVLogger(self.directory, name="", version="")])
        self.callbacks = [Dashboard(self.record, self.data.examples(), self.data.tokenizer), self.keep]
        self.metrics: dict[str, float | None] = {}


def prepare(
    config: dict[str, Any],
    directory: Path,
    corpus: Corpus | Pairs,
    claim: dict[str, Any],
    data: SpeechData | PairData,
) -> Attempt:
    """A run with its seed and its new task."""
    from lightning.pytorch import seed_everything

    from speechformer.data.pairs import PairData
    from speechformer.models.stack import count_parameters
    from speechformer.tasks.registry import TASKS
    from speechformer.tasks.translate import Translate

    seed_everything(config["seed"], workers=True, verbose=False)
    arguments = {"architecture": architecture_arguments(config, data), "recipe": config["recipe"]}
    if isinstance(corpus, Corpus) and config["task"]["name"] == "classify":
        arguments["classes"] = list(corpus.classes)
    if config["task"]["name"] == "translate":
        arguments["decoding"] = {key: config["task"][key] for key in ("beam", "length_penalty")}
    task: Task = TASKS[config["task"]["name"]](**arguments)
    if isinstance(task, Translate) and isinstance(data, PairData):
        task.tokenizer, task.texts = data.tokenizer, data.texts
    return Attempt(config, directory, claim, task, data, count_parameters(task.model))


def build_trainer(
    attempts: Sequence[Attempt], device: Any, started: float
) -> tuple[Trainer, Task | Ensemble, SpeechData | PairData | EnsembleData, PhaseTimer]:
    """Lightning's Trainer, with what accompanies a training, and what it is to train on what: a task, or several in
    one.

    Raises:
        UserError: `trainer.*` has an argument or value that Lightning does not take.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from speechformer.data.speeches import SpeechData
    from speechformer.training.callbacks import AtomicCheckpointIO, NoProfiler, PhaseTimer, Progress

    config, first, stopwatch = attempts[0].config, attempts[0], PhaseTimer(started)
    module: Task | Ensemble = first.task
    data: SpeechData | PairData | EnsembleData = first.data
    own: dict[str, Any] = {"logger": first.record, "callbacks": [first.record], "plugins": [AtomicCheckpointIO()]}
    last: list[Any] = first.callbacks
    if len(attempts) > 1:
        from speechformer.training.ensemble import Ensemble, EnsembleCheckpointIO, EnsembleData, Forward, Member

        assert isinstance(data, SpeechData)
        module = Ensemble([Member(run.task, run.directory, run.record, run.keep, run.callbacks) for run in attempts])
        data = EnsembleData(data, [run.config["seed"] for run in attempts])
        own = {"logger": False, "callbacks": [], "plugins": [EnsembleCheckpointIO(module, stopwatch)]}
        last = [Forward(module)]
    progress = Progress([(run.directory, run.claim) for run in attempts])
    arguments = {**config["trainer"], "devices": device}
    arguments["profiler"] = arguments.get("profiler") or NoProfiler()
    if config["eval_interval"] is not None:
        batches = config["eval_interval"] * arguments["accumulate_grad_batches"]
        arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
    try:
        trainer = pl.Trainer(
            default_root_dir=first.directory,
            logger=own["logger"],
            callbacks=[*own["callbacks"], stopwatch, progress, *last],
            # Inside a SLURM job Lightning would settle devices and requeueing by itself; both are settled here.
            plugins=[*own["plugins"], LightningEnvironment()],
            enable_checkpointing=len(attempts) == 1,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **arguments,
        )
    except (TypeError, ValueError, ImportError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"trainer: {one_sentence(error)}") from error
    return trainer, module, data, stopwatch


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
    members: Sequence[tuple[dict[str, Any], Path, dict[str, Any]]],
    corpus: Corpus | Pairs,
    started: float,
    launcher: str | None = None,
) -> list[dict[str, Any]]:
    """Runs themselves, in folders that are ours; returns their results.

    Args:
        members: config, folder and claim of each; several are trained as one, see `pack`.
        started: when, by `time.perf_counter`.
    """
    clock = devices.cpu_clock()
    tune_memory()
    import torch

    from speechformer.data.batches import EvaluationBatches
    from speechformer.data.speeches import SpeechData
    from speechformer.kernels.dispatch import compile_blocks

    silence_libraries()
    config, _, claim = members[0]
    threads = set_threads(config, claim)
    data = build_data(config, corpus)
    attempts = []
    for config, directory, claim in members:
        attempts.append(prepare(config, directory, corpus, claim, data))
        if len(members) > 1:  # each goes on from where its seed has come to
            attempts[-1].task.generator = torch.Generator()
            attempts[-1].task.generator.set_state(torch.get_rng_state())
    first, config = attempts[0], attempts[0].config
    data.extend_to(getattr(first.task.model, "max_length", None))

    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank:
        torch.manual_seed(config["seed"] + rank)  # each device drops out others
    waiting = time.perf_counter()
    with device_of(config["trainer"], threads, launcher) as device:
        started += time.perf_counter() - waiting
        goes_on_from = checkpoint_in(first.directory) if len(attempts) == 1 else None
        trainer, module, batches, stopwatch = build_trainer(attempts, device, started)
        if config["compile"] is not None:
            compile_blocks(module, config["compile"], trainer.strategy.root_device)
        if rank == 0:
            for run in attempts:
                runs.write_json(run.directory / runs.OWNER, {**run.claim, "threads": threads})
                run.claim["threads"] = threads
                clear_for_start(run.directory, anew=goes_on_from is None)
                data.tokenizer.save(run.directory / "tokenizer.json")
            console.say(console.corpus_line(data.description))
            console.say(console.parameters_line(first.parameters))
            console.say(f"Folder: {first.directory}" + (f", and {len(attempts) - 1} more" if attempts[1:] else ""))
            taken = devices.cores_of_others(clock)
            left = devices.cores() - taken
            if taken > 0.5 and 1 < threads > left + 0.5 and trainer.strategy.root_device.type == "cpu":
                console.say(console.busy_line(threads, max(1, round(left))))
            if goes_on_from:
                console.say("It was interrupted, and goes on from its last checkpoint.")

        trainer.fit(module, datamodule=batches, ckpt_path=goes_on_from)
        stopwatch.turn("evaluation")
        sound = [run for run in attempts if not run.task.diverged()]
        if any(not run.task.curve or run.task.curve[-1]["step"] != trainer.global_step for run in sound):
            trainer.validate(module, datamodule=batches, verbose=False)  # the last step, wherever the interval ends
        if len(attempts) > 1:
            module.tie()  # type: ignore[operator]  # Lightning has moved it back from its device
        for run in attempts:
            run.task.trainer.save_checkpoint(run.directory / "last.ckpt")
        for run in sound:
            run.metrics |= data.reference_figures()
            run.metrics |= {name: value for name, value in run.task.curve[-1].items() if name != "step"}
        if data.chosen_on == "validation" and (chosen := [run for run in sound if run.keep.best is not None]):
            for run in chosen:
                load_chosen(run)
            trainer.test(module, datamodule=batches, verbose=False)
            for run in chosen:
                run.metrics |= run.task.figures()
        elif isinstance(data, SpeechData) and data.tested_at_lengths and sound:
            # the rest was measured at the last step
            trainer.test(module, EvaluationBatches(data.tested_at_lengths), verbose=False)
            for run in sound:
                run.metrics |= run.task.figures()
        device = trainer.strategy.root_device
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    stopwatch.turn("evaluation")
    about = {
        "host": socket.gethostname(),
        "device": device_name,
        "threads": threads,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
    results = []
    for run in attempts:
        results.append(conclude(run, stopwatch.seconds, {**about, "ensemble_size": len(attempts)}))
        if rank == 0:
            console.say(console.summary(results[-1]))
    return results


def load_chosen(run: Attempt) -> None:
    """Give a task the weights to test: the best, or the mean of the last few evaluations'."""
    from speechformer.training.callbacks import WEIGHTS, average

    task, directory, averaged = run.task, run.directory, run.config["task"].get("average_checkpoints", 1)
    if averaged == 1:
        load_weights(task, directory / "best.ckpt")
        return
    steps = list(dict.fromkeys(int(point["step"]) for point in task.curve))[-averaged:]
    files = [directory / WEIGHTS / f"{step}.ckpt" for step in steps]
    if (directory / "average.ckpt").exists() and not all(file.exists() for file in files):
        load_weights(task, directory / "average.ckpt")  # of this run, whose result was lost
    else:
        task.load_state_dict(average(files))
        task.trainer.save_checkpoint(directory / "average.ckpt", weights_only=True)


def conclude(run: Attempt, seconds: dict[str, float], machine: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that came to its end, and what else it leaves."""
    from speechformer.metrics.bleu import signatures
    from speechformer.tasks.translate import Translate

    config, task, metrics = run.config, run.task, run.metrics
    diverged = not metrics or not all(value is None or math.isfinite(value) for value in metrics.values())
    # TensorBoard's table of hyperparameters, to sort a sweep by
    constant = run.data.reference_figures()
    final = {f"final/{name}": value for name, value in metrics.items() if value not in (None, constant.get(name))}
    run.record.loggers[0].log_hyperparams(hyperparameters(config, run.claim["overrides"] or ()), final)
    run.record.finalize("success")
    result = {
        "status": "diverged" if diverged else "finished",
        "task": config["task"]["name"],
        "metrics": metrics,
        "best": {
            "metric": run.monitor,
            "value": run.keep.best,
            "step": run.keep.best_step,
            "chosen_on": run.data.chosen_on,
        },
        "curve": task.curve,
        "parameters": run.parameters,
        "corpus": run.data.description,
        "config": config,
        "overrides": run.claim["overrides"],
        "identity": run.claim["identity"],
        "seed": config["seed"],
        "steps": task.trainer.global_step,
        "attempts": run.claim["attempts"],
        "seconds": sum(seconds.values()),
        "seconds_by_phase": dict(seconds),
        "tokens_per_second": int(task.tokens) / max(seconds["training"], 1e-9),
        "machine": machine,
        "commit": identity.commit(),
        "versions": identity.versions(),
    }
    if isinstance(task, Translate):
        result["scoring"] = signatures()
        if (found := task.translations.get("test")) and not int(os.environ.get("LOCAL_RANK", 0)):
            write_translations(run.directory / "translations.tsv", task.texts["test"], found)
    if task.diverged_at is not None:
        result["error"] = f"The loss was NaN or infinite at step {task.diverged_at}."
    elif diverged:
        result["error"] = "Weights or figures were NaN or infinite at the end."
    return result


def hyperparameters(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """What TensorBoard's table shows of a config: what most people vary, and what this command line sets. All of it
    would be fifty columns, of which a sweep varies two."""
    shown = {"model": config["model"]["name"], "pattern": config["pattern"]["name"], "seed": config["seed"]}
    whole = OmegaConf.create(config)
    for override in overrides:
        key, _, given = override.lstrip("+~").partition("=")
        if not key.startswith(("hydra", "corpus", "threads", "compile", "force")):
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
        console.say(f"{last} cannot be read ({reason}; cut short?), so the run begins anew.")
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
def tune_memory() -> None:
    """Import all that a run does, and two things that cost a short run on a CPU a tenth of its time, once for each
    process.

    Python's garbage collector rests meanwhile, which saves a sixth of the imports, and is told that what was imported
    stays: otherwise it looks through it all again, for a fifth of a second, and joblib has it do so after each job.
    The C library (glibc) is told to keep what is freed: otherwise it hands the memory of each chunk of logits back to
    the system, and gets it again, zeroed, for the next.
    """
    collecting = gc.isenabled()
    gc.disable()
    import speechformer.training.tensorboard  # noqa: F401 (it imports the rest)

    gc.freeze()
    if collecting:
        gc.enable()
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(mmap_threshold, 32 << 20)  # the most that it takes
            libc.mallopt(trim_threshold, 1 << 30)


def silence_libraries() -> None:
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
