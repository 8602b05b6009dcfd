"""One command, one run: `python -m speechformer.train task=classify model=alibi`.

`main` is the Hydra edge: it composes the config, answers bad input in one sentence, and hands over to `fit`,
a plain function from a config and a folder to a result. Heavy imports stand inside functions, so that
`--help`, shell completion and a typo are answered at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechformer import runs
from speechformer.refusals import UserError, pick, unknown

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from speechformer.callbacks import Stopwatch
    from speechformer.data import SpeechData
    from speechformer.tasks import Task

_beside = Path(__file__).parent / "conf"  # in an installed package
CONF = _beside if _beside.is_dir() else Path(__file__).parents[1] / "conf"  # in a checkout

WHOLE_NUMBERS = {  # key: the least that makes sense
    "seed": 0,
    "width": 1,
    "heads": 1,
    "layers": 1,
    "ff": 1,
    "block_size": 1,
    "batch_size": 1,
    "checkpoint_every": 1,
    "core.classifier_width": 1,
    "recipe.warmup_steps": 0,
}
OPTIONAL_WHOLE_NUMBERS = {
    "vocab_size": 1,
    "eval_interval": 1,
    "task.stride": 1,
    "trainer.max_epochs": -1,
    "trainer.max_steps": -1,
    "trainer.log_every_n_steps": 1,
    "trainer.accumulate_grad_batches": 1,
}
NUMBERS = {  # key: least and most
    "dropout": (0.0, 0.999),
    "recipe.lr": (0.0, 1e3),
    "recipe.weight_decay": (0.0, 1e3),
    "recipe.init_std": (0.0, 1e3),
    "protocol.validation": (0.0, 0.999),
}


KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a word", (str,)),
    list: ("a list", (list,)),
}


def check_kinds(cfg: DictConfig) -> None:
    """Refuse a value that is of another kind (number, word, true or false, list, group) than its default in `conf/`.

    A default of null and an interpolation say nothing of the kind; Lightning looks at the values of `trainer`, and
    ALiBi at its slopes.
    """
    defaults = OmegaConf.load(CONF / "config.yaml")
    for group, name in (("model", None), ("pattern", None), ("recipe", "adam"), ("protocol", None)):
        own = CONF / group / f"{name or OmegaConf.select(cfg, f'{group}.name')}.yaml"
        if own.exists():
            OmegaConf.update(defaults, group, OmegaConf.load(own))

    def check(given: Any, default: Any, key: str) -> None:
        if isinstance(default, dict):
            if not isinstance(given, dict):
                raise UserError(f"{key} is a group of keys ({', '.join(default)}), not {given!r}.")
            for name, value in default.items():
                path = f"{key}.{name}" if key else name
                if name not in given:
                    raise UserError(f"{path} is missing; a key cannot be taken away.")
                check(given[name], value, path)
        elif not (default is None or "${" in str(default) or key.startswith("trainer.") or key == "model.slopes"):
            word, kinds = KINDS[type(default)]
            if type(given) not in kinds:
                raise UserError(f"{key} must be {word}, not {given!r}.")

    plain: Any = OmegaConf.to_container(defaults)
    check(
        OmegaConf.to_container(cfg, resolve=True),
        {key: value for key, value in plain.items() if key not in ("defaults", "hydra")},
        "",
    )


def check_numbers(cfg: DictConfig) -> None:
    """Refuse numbers that are out of range."""
    for key, least in {**WHOLE_NUMBERS, **OPTIONAL_WHOLE_NUMBERS}.items():
        value = OmegaConf.select(cfg, key)
        if value is None and key in OPTIONAL_WHOLE_NUMBERS:
            continue
        if type(value) is not int or value < least:
            raise UserError(f"{key} must be a whole number of at least {least}, not {value!r}.")
    betas = list(cfg.recipe.betas)
    if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"recipe.betas must be two numbers in [0, 1), not {betas}.")
    if cfg.seed >= 2**32:
        raise UserError(f"seed must be less than 2^32, not {cfg.seed}.")
    if cfg.protocol.name == "clean" and not cfg.protocol.validation:
        raise UserError(
            "protocol=clean chooses on a held-out part, so protocol.validation must be above 0; to take test "
            "sentences out of train and nothing else: protocol=paper protocol.remove_test_sentences=true."
        )
    for key, (low, high) in NUMBERS.items():
        value = OmegaConf.select(cfg, key)
        if type(value) not in (int, float) or not low <= value <= high:
            raise UserError(f"{key} must be a number between {low:g} and {high:g}, not {value!r}.")


def check_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Refuse `trainer.*` keys that Lightning's Trainer does not have, or that this project sets itself."""
    from lightning.pytorch import Trainer

    whole = "every figure is over the whole of its part"
    own = {
        "val_check_interval": "set eval_interval",
        "check_val_every_n_epoch": "set eval_interval",
        "logger": "TensorBoard and CSV are always on",
        "callbacks": "the run has its own",
        "enable_checkpointing": "set checkpoint_every",
        "default_root_dir": "set hydra.run.dir",
        "limit_val_batches": whole,
        "limit_test_batches": whole,
        "overfit_batches": "set trainer.limit_train_batches",
        "fast_dev_run": "set trainer.max_steps",
        "barebones": "a run without its figures is no run",
        "num_sanity_val_steps": "evaluation begins with eval_interval",
        "num_nodes": "a run is on one device",
    }
    valid = set(inspect.signature(Trainer).parameters) - set(own)
    for name in arguments:
        if name in own:
            raise UserError(f"trainer.{name} is not free here; {own[name]}.")
        if name not in valid:
            raise unknown("trainer", "argument", name, sorted(valid))
    devices = arguments["devices"]
    if devices not in (1, "1") and not (isinstance(devices, list) and len(devices) == 1):
        raise UserError(f"trainer.devices must be 1, or [K] for device number K, not {devices}: a run is on one.")


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

    check_trainer_arguments(config["trainer"])
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
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {one_sentence(error)}") from error
    return trainer, best, stopwatch


def fit(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """Train, evaluate and write one run.

    Args:
        cfg: the composed config; see `conf/config.yaml`.
        directory: the run's folder; it is made, and must not hold a result already.

    Returns:
        The content of `result.json`; the README explains its entries.

    Raises:
        UserError: the config or the corpus asks for what cannot be.
    """
    started = time.perf_counter()
    check_kinds(cfg)
    check_numbers(cfg)
    if (directory / runs.RESULT).exists():
        raise UserError(f"{directory} already holds a finished run; choose another hydra.run.dir or remove it.")

    import torch
    from lightning.pytorch import seed_everything

    from speechformer import screen
    from speechformer.cores.stack import count_parameters
    from speechformer.corpora.speeches import load_corpus
    from speechformer.data import SpeechData
    from speechformer.tasks import TASKS

    quieten()
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
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

    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)  # of a run here that did not finish
    for left in ("best.ckpt", "last.ckpt", "metrics.csv"):
        (directory / left).unlink(missing_ok=True)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    data.tokenizer.save(directory / "tokenizer.json")
    print(screen.corpus_line(data.description))
    print(screen.parameters_line(parameters))
    print(f"Folder: {directory}", flush=True)

    ready = time.perf_counter()
    trainer.fit(task, datamodule=data)
    training = time.perf_counter() - ready - stopwatch.seconds

    trainer.save_checkpoint(directory / "last.ckpt")
    best_figure = None if best.best_model_score is None else float(best.best_model_score)
    if stopwatch.evaluated_at != trainer.global_step:  # the last step is evaluated wherever the interval ends
        trainer.validate(task, datamodule=data, verbose=False)
        last_figure = task.figures()[monitor]
        if best_figure is None or task.better(last_figure, best_figure):
            best_figure = last_figure
            trainer.save_checkpoint(directory / "best.ckpt", weights_only=True)
    checkpoint = torch.load(directory / "best.ckpt", weights_only=True)
    if chosen_on == "validation":
        task.load_state_dict(checkpoint["state_dict"])
        trainer.test(task, datamodule=data, verbose=False)

    metrics = {**data.reference_figures(), **task.figures()}
    final = {f"final/{name}": value for name, value in metrics.items() if value is not None}
    trainer.loggers[0].log_hyperparams(config, final)  # TensorBoard's table of hyperparameters
    for logger in trainer.loggers:
        logger.finalize("success")
    result = {
        "status": "finished",
        "task": config["task"]["name"],
        "metrics": metrics,
        "best": {
            "metric": monitor,
            "value": best_figure,
            "step": checkpoint["global_step"],
            "chosen_on": chosen_on,
        },
        "parameters": parameters,
        "corpus": data.description,
        "config": config,
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
    print(screen.summary(result), flush=True)
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


def one_sentence(error: BaseException) -> str:
    """The first paragraph of an error's message, on one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def explain(error: HydraException | OmegaConfBaseException) -> str:
    """Hydra's complaint about the command line in one sentence, with the valid choices or keys."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return str(unknown(group, "choice", choice, error.options))
    cause = error.__cause__
    wrong = re.search(r"Could not override '([^']+)'", str(error))
    if wrong:
        parent, _, key = wrong[1].replace("/", ".").rpartition(".")
        node = cause.parent_node if isinstance(cause, OmegaConfBaseException) else None
        keys = list(node) if parent and isinstance(node, DictConfig) else top_level_keys()
        return str(unknown(parent or "the config", "key", key, keys))
    if isinstance(cause, OmegaConfBaseException):
        return f"{one_sentence(error)}: {one_sentence(cause)}"
    return one_sentence(error)


def top_level_keys() -> list[str]:
    """The keys and groups that stand at the top of the config."""
    keys = {str(key) for key in OmegaConf.load(CONF / "config.yaml")} - {"defaults", "hydra"}
    return sorted(keys | {folder.name for folder in CONF.iterdir() if folder.is_dir()})


def check_added_keys(overrides: Iterable[str]) -> None:
    """Refuse `+KEY=VALUE` where nothing would read it; only Lightning's Trainer has keys that the config hides."""
    for override in overrides:
        key = override.lstrip("+").split("=")[0]
        if override.startswith("+") and not key.startswith("trainer.") and key not in top_level_keys():
            raise UserError(
                f"{override} adds a key that nothing reads: only arguments of lightning's Trainer can be added, as "
                "in +trainer.max_time=00:00:10:00; to change a key that is there, leave the + away."
            )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(cfg: DictConfig) -> float:
    """One job of Hydra's; returns the figure that a sweeper may optimise."""
    hydra_config = HydraConfig.get()
    try:
        check_added_keys(hydra_config.overrides.task)
        result = fit(cfg, Path(hydra_config.runtime.output_dir))
    except UserError as error:
        if hydra_config.mode == RunMode.RUN:
            sys.exit(f"Error: {error}")
        raise  # in a sweep the other jobs go on
    return result["best"]["value"]


def main() -> None:
    """The command line; `speechformer-train` is the same."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print, and we print it
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"Error: {explain(error)}")
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
