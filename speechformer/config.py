"""Compose and validate the config: every value is checked before anything is read or trained.

Hydra reports an unknown group, choice or key itself, at length; `explain` turns that into one sentence.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechformer.errors import UserError, one_sentence, unknown
from speechformer.runs.legacy import RENAMED_CHOICES, RENAMED_KEYS, renamed_key

_beside = Path(__file__).parent / "conf"  # in an installed package
CONF = _beside if _beside.is_dir() else Path(__file__).parents[1] / "conf"  # in a checkout

WHOLE_NUMBERS = {  # the least value: keys; a key with a question mark may be null
    -1: "trainer.max_epochs? trainer.max_steps?",
    0: "seed recipe.warmup_steps",
    1: "width heads layers ff block_size batch_size vocab_size? threads? eval_interval? checkpoint_every "
    "architecture.classifier_width task.vocab_size task.beam task.stride? task.average_checkpoints "
    "task.batch_tokens? trainer.log_every_n_steps? trainer.accumulate_grad_batches?",
}
NULLABLE = {key[:-1] for keys in WHOLE_NUMBERS.values() for key in keys.split() if key.endswith("?")}
NUMBERS = {  # key: least and greatest value
    "dropout": (0.0, 0.999),
    "recipe.lr": (0.0, 1e3),
    "recipe.weight_decay": (0.0, 1e3),
    "recipe.init_std": (0.0, 1e3),
    "recipe.label_smoothing": (0.0, 0.999),
    "protocol.validation": (0.0, 0.999),
    "task.length_penalty": (0.0, 10.0),
}
TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a word", (str,)),
    list: ("a list", (list,)),
}
SET_ALREADY = "speechformer sets it"
WHOLE_PART = "metrics always cover the whole of each part"
FIXED_TRAINER_ARGUMENTS = {  # Lightning's arguments that a run sets itself: why, and what to set instead
    "val_check_interval": f"{SET_ALREADY}; set eval_interval",
    "check_val_every_n_epoch": f"{SET_ALREADY}; set eval_interval",
    "logger": "TensorBoard and CSV are always on",
    "callbacks": SET_ALREADY,
    "enable_checkpointing": f"{SET_ALREADY}; set checkpoint_every",
    "default_root_dir": f"{SET_ALREADY}; set hydra.run.dir",
    "limit_val_batches": WHOLE_PART,
    "limit_test_batches": WHOLE_PART,
    "overfit_batches": "evaluation uses all batches; set trainer.limit_train_batches",
    "fast_dev_run": "a run always writes its result; set trainer.max_steps",
    "barebones": "a run always reports its metrics",
    "num_sanity_val_steps": "eval_interval determines every evaluation",
    "num_nodes": "a run uses one machine",
    "plugins": SET_ALREADY,
    "enable_progress_bar": SET_ALREADY,
    "enable_model_summary": "a run prints its number of parameters",
}


def by_model(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Resolve `${by_model:{rnn:300,alibi:256}}` to the entry of the model, to match models in size."""
    name = str(_root_.model.name)
    if name not in table:
        raise UserError(f"this experiment has a size only for model={', '.join(map(str, table))}, not for {name}.")
    return table[name]


OmegaConf.register_new_resolver("by_model", by_model, replace=True)


def check_config(config: dict[str, Any]) -> None:
    """Validate a resolved config as plain data; models and corpora validate their own options.

    Raises:
        UserError: with the key, what is wrong and what is valid.
    """
    for old in RENAMED_KEYS:
        if value_of(config, old) is not MISSING:
            raise UserError(renamed(old))
    default = defaults(config)
    check_types(config, default, "")
    if "task" in default and config["task"]["data"] != default["task"]["data"]:
        raise UserError("task.data is fixed by the task; remove it.")
    check_numbers(config)
    check_trainer_arguments(config["trainer"])


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Load the defaults in `conf/` for the choices that `config` made, as plain data."""
    plain = dict(load_plain(CONF / "config.yaml"))
    del plain["defaults"], plain["hydra"]
    for group in ("model", "pattern", "protocol", "recipe", "task"):
        # a recipe has no name, but all recipes have the same keys
        name = "adam" if group == "recipe" else config[group]["name"] if isinstance(config[group], dict) else None
        file = CONF / group / f"{name}.yaml"
        if file.exists():
            content = load_plain(file)
            plain[group] = content["task"] if group == "task" else content  # a task sets keys of other groups too
    return plain


@functools.cache
def load_plain(file: Path) -> dict[str, Any]:
    """Load a file of `conf/` as plain data, which must not be changed."""
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]


def check_types(value: Any, default: Any, key: str) -> None:
    """Require that a value has the type of its default: number, word, true or false, list, or group of keys.

    Null and an interpolation say nothing about the type. Lightning validates `trainer`, and ALiBi its slopes.
    """
    if isinstance(default, dict):
        if not isinstance(value, dict):
            raise UserError(f"{key} is a group of keys ({', '.join(default)}), not {value!r}.")
        for name, own in default.items():
            path = f"{key}.{name}" if key else name
            if name not in value:
                raise UserError(f"{path} is missing; keys cannot be removed.")
            check_types(value[name], own, path)
    elif not (default is None or "${" in str(default) or key.startswith("trainer.") or key == "model.slopes"):
        word, types = TYPES[type(default)]
        if type(value) not in types and not (value is None and key in NULLABLE):
            raise UserError(f"{key} must be {word}, not {value!r}.")


MISSING = object()


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key, or MISSING."""
    for name in key.split("."):
        config = config.get(name, MISSING) if isinstance(config, dict) else MISSING
    return config


def check_numbers(config: dict[str, Any]) -> None:
    """Require that numbers are within their range; keys that the task does not have are skipped."""
    for least, keys in WHOLE_NUMBERS.items():
        for key in keys.replace("?", "").split():
            value = value_of(config, key)
            absent = value is MISSING or (value is None and key in NULLABLE)
            if not absent and (type(value) is not int or value < least):
                raise UserError(f"{key} must be a whole number of at least {least}, not {value!r}.")
    for key, (low, high) in NUMBERS.items():
        value = value_of(config, key)
        if value not in (MISSING, None) and not low <= value <= high:
            raise UserError(f"{key} must be a number between {low:g} and {high:g}, not {value!r}.")
    betas = config["recipe"]["betas"]
    if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"recipe.betas must be two numbers in [0, 1), not {betas}.")
    lengths, trained = config["task"].get("lengths", []), config["block_size"]
    if type(lengths) is not list or not all(type(length) is int and length > trained for length in lengths):
        raise UserError(f"task.lengths must be a list of whole numbers above block_size={trained}, not {lengths}.")
    if config["study"] is not None and type(config["study"]) is not str:
        raise UserError(f"study must be a name or null, not {config['study']!r}.")
    if config["seed"] >= 2**32:
        raise UserError(f"seed must be less than 2^32, not {config['seed']}.")
    if config["protocol"]["name"] == "clean" and not config["protocol"]["validation"]:
        raise UserError(
            "protocol=clean chooses on a held-out part, so protocol.validation must be above 0; to only remove test "
            "sentences from train: protocol=paper protocol.remove_test_sentences=true."
        )


def check_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Require that `trainer.*` names arguments of Lightning's Trainer that can be set."""
    known = set(load_plain(CONF / "config.yaml")["trainer"]) | {"strategy"}
    for name in arguments:
        if name in FIXED_TRAINER_ARGUMENTS:
            raise UserError(f"trainer.{name} cannot be set, because {FIXED_TRAINER_ARGUMENTS[name]}.")
        if name not in known:  # Lightning takes seconds to import: ask it only about other names
            from lightning.pytorch import Trainer

            valid = set(inspect.signature(Trainer).parameters) - set(FIXED_TRAINER_ARGUMENTS)
            if name not in valid:
                raise unknown("trainer", "argument", name, sorted(valid))
    devices = arguments["devices"]
    if count_devices(devices) < 1:
        raise UserError(f"trainer.devices must be a number of devices, or [K] for device number K, not {devices!r}.")


def count_devices(devices: Any) -> int:
    """Return how many devices `trainer.devices` requests; 0 if the value is invalid."""
    if isinstance(devices, list):
        return len(devices) if all(type(device) is int and device >= 0 for device in devices) else 0
    if isinstance(devices, str) and devices.isdecimal():
        return int(devices)
    return devices if type(devices) is int and devices > 0 else 0


def check_sweep(config: dict[str, Any]) -> None:
    """Require that each run of a sweep uses one device."""
    devices = config["trainer"]["devices"]
    if count_devices(devices) > 1:
        raise UserError(
            f"trainer.devices={devices} in a sweep: sweeps do not support multi-device runs, because Lightning would "
            "relaunch the whole sweep. Give each run one device and let the sweep use the others"
            " (machine=gpu hydra/launcher=joblib hydra.launcher.n_jobs=NUMBER_OF_GPUS, or hydra/launcher="
            "submitit_slurm), or start the runs one by one, without -m."
        )


def compose(overrides: Iterable[str]) -> DictConfig:
    """Compose the config of a command line with these overrides.

    Raises:
        UserError: an override is malformed, or names an unknown key or choice.
    """
    import hydra

    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def as_plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolve and validate a composed config, and return it as plain data.

    Raises:
        UserError: see `check_config`.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    check_config(config)
    return config


def renamed(key: str) -> str:
    """Return a sentence with the new name of a key or choice of an earlier version, or ""."""
    new = RENAMED_CHOICES.get(key) or renamed_key(key)
    return f"{key} is now {new}." if new else ""


def explain(error: HydraException | OmegaConfBaseException) -> str:
    """Describe an error of Hydra in one sentence, with the valid choices or keys."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return renamed(f"{group}={choice}") or str(unknown(group, "choice", choice, error.options))
    if several := re.search(r"Ambiguous value for argument '([^']+)'", str(error)):
        return f"{several[1]}: several values are a sweep, so put -m before the first setting."
    cause = error.__cause__
    if wrong := re.search(r"Could not override '([^']+)'", str(error)):
        if sentence := renamed(wrong[1]):
            return sentence
        node = cause.parent_node if isinstance(cause, OmegaConfBaseException) else None
        full_key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else wrong[1].replace("/", ".")
        parent, _, key = full_key.rpartition(".")
        keys = list(node) if parent and isinstance(node, DictConfig) else top_level_keys()
        return str(unknown(parent or "the config", "key", key, keys))
    if isinstance(cause, OmegaConfBaseException):
        return f"{one_sentence(error)}: {one_sentence(cause)}"
    return one_sentence(error)


def top_level_keys() -> list[str]:
    """List the keys and groups at the top of the config."""
    keys = {str(key) for key in OmegaConf.load(CONF / "config.yaml")}
    keys |= {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    return sorted(keys - {"defaults", "hydra"})


def check_overrides(overrides: Iterable[str]) -> None:
    """Reject `GROUP.name=CHOICE`, which keeps the keys of another choice, and `+KEY=VALUE` that nothing reads."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group = key.removesuffix(".name")
        if sentence := renamed(key):
            raise UserError(sentence)
        if key != group and (CONF / group).is_dir():
            raise UserError(f"{override}: make a choice with {group}={value}.")
        if override.startswith("+") and not key.startswith("trainer.") and key not in top_level_keys():
            raise UserError(
                f"{override} adds a key that nothing reads; only arguments of Lightning's Trainer can be added, as "
                "in +trainer.max_time=00:00:10:00. To change an existing key, omit the +."
            )
