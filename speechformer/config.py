"""What a config may hold: every value is checked before anything is read or trained, and refused in one sentence.

Hydra answers an unknown group, choice or key itself, at length; `explain` makes one sentence of that.
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

_beside = Path(__file__).parent / "conf"  # in an installed package
CONF = _beside if _beside.is_dir() else Path(__file__).parents[1] / "conf"  # in a checkout


def by_model(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """`${by_model:{rnn:300,alibi:256}}` in an experiment: the value of the model, to match others in size."""
    name = str(_root_.model.name)
    if name not in table:
        raise UserError(f"this experiment has a size for model={', '.join(map(str, table))} alone, not for {name}.")
    return table[name]


OmegaConf.register_new_resolver("by_model", by_model, replace=True)

WHOLE_NUMBERS = {  # key: the least that makes sense
    "seed": 0,
    "width": 1,
    "heads": 1,
    "layers": 1,
    "ff": 1,
    "block_size": 1,
    "batch_size": 1,
    "checkpoint_every": 1,
    "architecture.classifier_width": 1,
    "recipe.warmup_steps": 0,
}
OF_A_TASK = {"task.vocab_size": 1, "task.beam": 1, "task.average_checkpoints": 1}  # only some tasks have them
OPTIONAL_WHOLE_NUMBERS = {  # these may be null
    "vocab_size": 1,
    "threads": 1,
    "eval_interval": 1,
    "task.stride": 1,
    "task.batch_tokens": 1,
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
    "recipe.label_smoothing": (0.0, 0.999),
    "protocol.validation": (0.0, 0.999),
    "task.length_penalty": (0.0, 10.0),
}


KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a word", (str,)),
    list: ("a list", (list,)),
}


def check_config(config: dict[str, Any]) -> None:
    """Refuse a composed config that cannot be run; what a model or a corpus refuses, it says itself.

    Args:
        config: the resolved config as plain data.

    Raises:
        UserError: with the key, what is wrong and what is valid.
    """
    check_kinds(config, defaults(config), "")
    check_numbers(config)
    check_trainer_arguments(config["trainer"])


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config as `conf/` has it for the choices that `config` made, as plain data."""
    plain = dict(load_plain(CONF / "config.yaml"))
    del plain["defaults"], plain["hydra"]
    for group in ("model", "pattern", "protocol", "recipe", "task"):
        # a recipe has no name, and all have the keys of each other
        name = "adam" if group == "recipe" else config[group]["name"] if isinstance(config[group], dict) else None
        file = CONF / group / f"{name}.yaml"
        if file.exists():
            plain[group] = load_plain(file)
            if group == "task":  # its file sets other keys too
                plain[group] = plain[group]["task"]
    return plain


@functools.cache
def load_plain(file: Path) -> dict[str, Any]:
    """A file of `conf/` as plain data, not to be changed."""
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]


def check_kinds(given: Any, default: Any, key: str) -> None:
    """Refuse a value that is of another kind (number, word, true or false, list, group of keys) than its default.

    A default of null and an interpolation say nothing of the kind; Lightning looks at the values of `trainer`, and
    ALiBi at its slopes.
    """
    if isinstance(default, dict):
        if not isinstance(given, dict):
            raise UserError(f"{key} is a group of keys ({', '.join(default)}), not {given!r}.")
        for name, value in default.items():
            path = f"{key}.{name}" if key else name
            if name not in given:
                raise UserError(f"{path} is missing; a key cannot be taken away.")
            check_kinds(given[name], value, path)
    elif not (default is None or "${" in str(default) or key.startswith("trainer.") or key == "model.slopes"):
        word, kinds = KINDS[type(default)]
        if type(given) not in kinds and not (given is None and key in OPTIONAL_WHOLE_NUMBERS):
            raise UserError(f"{key} must be {word}, not {given!r}.")


def check_numbers(config: dict[str, Any]) -> None:
    """Refuse numbers that are out of range."""

    def value_of(key: str) -> Any:
        value: Any = config
        for name in key.split("."):
            value = value.get(name)
        return value

    for key, least in {**WHOLE_NUMBERS, **OF_A_TASK, **OPTIONAL_WHOLE_NUMBERS}.items():
        value = value_of(key)
        if key in OF_A_TASK and key.partition(".")[2] not in config["task"]:
            continue
        if not (value is None and key in OPTIONAL_WHOLE_NUMBERS) and (type(value) is not int or value < least):
            raise UserError(f"{key} must be a whole number of at least {least}, not {value!r}.")
    for key, (low, high) in NUMBERS.items():
        if value_of(key) is not None and not low <= value_of(key) <= high:
            raise UserError(f"{key} must be a number between {low:g} and {high:g}, not {value_of(key)!r}.")
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
            "protocol=clean chooses on a held-out part, so protocol.validation must be above 0; to take test "
            "sentences out of train and nothing else: protocol=paper protocol.remove_test_sentences=true."
        )


def check_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Refuse `trainer.*` keys that Lightning's Trainer does not have, or that this project sets itself."""
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
        "num_nodes": "a run is on one machine",
        "plugins": "the run has its own",
        "enable_progress_bar": "the run has its own",
        "enable_model_summary": "the run prints its parameters",
    }
    known = set(load_plain(CONF / "config.yaml")["trainer"]) | {"strategy"}
    for name in arguments:
        if name in own:
            raise UserError(f"trainer.{name} is not free here; {own[name]}.")
        if name not in known:  # Lightning takes seconds to import: ask it only about what we do not name
            from lightning.pytorch import Trainer

            valid = set(inspect.signature(Trainer).parameters) - set(own)
            if name not in valid:
                raise unknown("trainer", "argument", name, sorted(valid))
    devices, number = arguments["devices"], count_devices(arguments["devices"])
    if number < 1:
        raise UserError(f"trainer.devices must be a number of devices, or [K] for device number K, not {devices!r}.")


def count_devices(devices: Any) -> int:
    """How many devices `trainer.devices` asks for; 0 if it is no such thing."""
    if isinstance(devices, list):
        return len(devices) if all(type(device) is int and device >= 0 for device in devices) else 0
    if isinstance(devices, str) and devices.isdecimal():
        return int(devices)
    return devices if type(devices) is int and devices > 0 else 0


def check_sweep(config: dict[str, Any]) -> None:
    """Refuse what a run may be alone but not in a sweep: one on several devices."""
    devices = config["trainer"]["devices"]
    if count_devices(devices) > 1:
        raise UserError(
            f"trainer.devices={devices} in a sweep: Lightning starts a run's other processes by giving the whole "
            "command again, which here is the whole sweep. Give each run one device and let the sweep fill the others"
            " (machine=gpu hydra/launcher=joblib hydra.launcher.n_jobs=NUMBER_OF_GPUS, or hydra/launcher="
            "submitit_slurm), or start runs on several devices one by one, without -m."
        )


def compose(overrides: Iterable[str]) -> DictConfig:
    """The config that a command line with these overrides has.

    Raises:
        UserError: an override that is none, or names what there is not.
    """
    import hydra

    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def as_plain(cfg: DictConfig) -> dict[str, Any]:
    """A composed config, resolved and checked, as plain data.

    Raises:
        UserError: see `check_config`.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    check_config(config)
    return config


def explain(error: HydraException | OmegaConfBaseException) -> str:
    """Hydra's complaint about the command line in one sentence, with the valid choices or keys."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return str(unknown(group, "choice", choice, error.options))
    if several := re.search(r"Ambiguous value for argument '([^']+)'", str(error)):
        return f"{several[1]}: several values are a sweep, so put -m before the first setting."
    cause = error.__cause__
    wrong = re.search(r"Could not override '([^']+)'", str(error))
    if wrong:
        node = cause.parent_node if isinstance(cause, OmegaConfBaseException) else None
        full_key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else wrong[1].replace("/", ".")
        parent, _, key = full_key.rpartition(".")
        keys = list(node) if parent and isinstance(node, DictConfig) else top_level_keys()
        return str(unknown(parent or "the config", "key", key, keys))
    if isinstance(cause, OmegaConfBaseException):
        return f"{one_sentence(error)}: {one_sentence(cause)}"
    return one_sentence(error)


def top_level_keys() -> list[str]:
    """The keys and groups that stand at the top of the config."""
    keys = {str(key) for key in OmegaConf.load(CONF / "config.yaml")}
    keys |= {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    return sorted(keys - {"defaults", "hydra"})


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse `GROUP.name=CHOICE`, which leaves the old choice's keys, and `+KEY=VALUE` that nothing would read."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group = key.removesuffix(".name")
        if key != group and (CONF / group).is_dir():
            raise UserError(f"{override}: a choice is made with {group}={value}.")
        if override.startswith("+") and not key.startswith("trainer.") and key not in top_level_keys():
            raise UserError(
                f"{override} adds a key that nothing reads: only arguments of lightning's Trainer can be added, as "
                "in +trainer.max_time=00:00:10:00; to change a key that is there, leave the + away."
            )
