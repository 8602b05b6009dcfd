"""Compose and validate the config: every value is checked before anything is read or trained.

Hydra reports an unknown group, choice or key itself, at length; `explain` turns that into one sentence.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechformer.errors import UserError, is_choice, one_sentence, unknown
from speechformer.keys import CONF, corrected, describe, suggest

ENDLESS = ("inverse_sqrt", "vaswani")  # schedules that do not depend on the length of the run

_RANGES: list[tuple[float, float, str]] = [  # least and greatest value, and the keys: of whole numbers if both are
    # whole. A key with a question mark may be null; a list is checked item by item.
    (-1, 10**9, "trainer.max_epochs? trainer.max_steps"),
    (0, 10**9, "recipe.warmup_steps trainer.min_epochs? trainer.min_steps?"),
    (1, 10**9, "eval_interval? checkpoint_every keep_every_n_steps?"),
    (1, 10**9, "trainer.log_every_n_steps trainer.accumulate_grad_batches"),
    (0, 2**32 - 1, "seed corpus.seed pattern.seed"),
    (1, 2**20, "batch_size vocab_size? task.vocab_size? task.batch_tokens?"),
    (1, 10**9, "task.min_count task.evaluation_tokens corpus.documents corpus.words"),
    (1, 2**20, "pattern.window pattern.block pattern.stride pattern.dilation"),
    (0, 2**20, "pattern.tokens"),
    (1, 2**16, "width ff architecture.classifier_width block_size task.stride? task.lengths model.hidden"),
    (2, 2**16, "model.buckets model.max_distance model.max_positions"),
    (1, 500, "heads layers threads? task.average_checkpoints trainer.num_nodes"),
    (1, 100, "task.beam"),
    (2, 10, "task.ngram"),
    (0, 100, "pattern.links"),
    (5, 200, "corpus.max_length"),
    (1, 1024, "probe.min_length probe.max_length probe.test_lengths probe.symbols probe.keys probe.values"),
    (1, 1024, "probe.queries probe.answers probe.tokens probe.needles"),
    (0, 1024, "probe.hints probe.base"),
    (1, 10**5, "task.test_rows"),
    (1.0, 1e6, "corpus.clean.words? corpus.clean.ratio?"),
    (0.0, 0.999, "dropout embedding_dropout? recipe.label_smoothing protocol.validation probe.ignore"),
    (0.0, 0.999, "task.bpe_dropout"),
    (0.0, 1.0, "task.unknown_rate task.ngram_targets"),
    (0.0, 1e3, "recipe.lr recipe.matrix_lr? recipe.weight_decay recipe.init_std"),
    (0.0, 10.0, "task.length_penalty"),
    (0.0, 1e3, "task.naive_bayes"),
    (0.0, 1e9, "trainer.gradient_clip_val?"),
    (-1e6, 1e6, "model.scale model.slopes"),
    (1e-6, 1e12, "model.base"),
    (1e-6, 1e6, "model.fraction model.factor model.gamma model.scale_base model.threshold?"),
]
RANGES = {key.rstrip("?"): (least, most, key.endswith("?")) for least, most, keys in _RANGES for key in keys.split()}
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # other keys: what the value must be
    "trainer.devices": ("a number of devices, or [K] for device number K", lambda value: count_devices(value) > 0),
    "trainer.deterministic": ("true, false or warn", lambda value: type(value) is bool or value == "warn"),
    "trainer.strategy": ("auto or ddp", lambda value: value in ("auto", "ddp")),
    "trainer.profiler": (
        "simple, advanced, pytorch or null",
        lambda value: value in ("simple", "advanced", "pytorch", None),
    ),
    "trainer.precision": ("a precision of Lightning, such as bf16-mixed", lambda value: type(value) in (str, int)),
    "trainer.limit_train_batches": (
        "a whole number of batches, a share of them such as 0.5, or null",
        lambda value: (
            value is None or (type(value) is int and 1 <= value <= 10**9) or (type(value) is float and 0 < value <= 1)
        ),
    ),
    "protocol.fold": (
        "a whole number from 0 on, or seed",
        lambda value: value == "seed" or (type(value) is int and value >= 0),
    ),
    "recipe.betas": (
        "two numbers in [0, 1)",
        lambda value: (
            type(value) is list
            and len(value) == 2
            and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value)
        ),
    ),
    "corpus.classes": (
        "a list of different names of printable characters, one for each label from 0 on",
        lambda value: (
            type(value) is list
            and all(type(name) is str and name.strip() and name.isprintable() for name in value)
            and len(set(value)) == len(value)
        ),
    ),
    "corpus.separator": (
        "a text that stands between documents, or null",
        lambda value: value is None or (type(value) is str and value != ""),
    ),
    "model.encoding": ("a choice of model, such as rope", is_choice),
    **dict.fromkeys(
        ("model.layers", "pattern.layers"),
        (
            "a list of choices, such as [NAME,NAME] or [{name:NAME,OPTION:VALUE},NAME]",
            lambda value: type(value) is list and len(value) > 0 and all(map(is_choice, value)),
        ),
    ),
    "model.slopes": ("a word or a list", lambda value: type(value) in (str, list)),  # ALiBi validates it
}
TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a word", (str,)),
    list: ("a list", (list,)),
}
MOST_DEVICES = 64
SET_ALREADY = "speechformer sets it"
WHOLE_PART = "metrics always cover the whole of each part"
FIXED_TRAINER_ARGUMENTS = {  # Lightning's arguments that a run sets itself: why, and what to set instead
    "val_check_interval": f"{SET_ALREADY}; set eval_interval",
    "check_val_every_n_epoch": f"{SET_ALREADY}; set eval_interval",
    "logger": f"{SET_ALREADY}; set logger",
    "callbacks": SET_ALREADY,
    "enable_checkpointing": f"{SET_ALREADY}; set checkpoint_every",
    "default_root_dir": f"{SET_ALREADY}; set hydra.run.dir",
    "limit_val_batches": WHOLE_PART,
    "limit_test_batches": WHOLE_PART,
    "overfit_batches": "evaluation uses all batches; set trainer.limit_train_batches",
    "fast_dev_run": "a run always writes its result; set trainer.max_steps",
    "barebones": "a run always reports its metrics",
    "num_sanity_val_steps": "eval_interval determines every evaluation",
    "plugins": SET_ALREADY,
    "enable_progress_bar": SET_ALREADY,
    "enable_model_summary": "a run prints its number of parameters",
}


def by_model(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Resolve `${by_model:{rnn:300,alibi:256,others:200}}` to the entry of the model, or else of `others`."""
    name = str(_root_.model.name)
    if name not in table and "others" not in table:
        raise UserError(f"this experiment has a size only for model={', '.join(map(str, table))}, not for {name}.")
    return table.get(name, table.get("others"))


def config_help(*, _root_: DictConfig) -> str:
    """Resolve `${config_help:}` to the config with an explanation of each key, in the template of `--help`."""
    own = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    if "recipe" in own:
        OmegaConf.resolve(own.recipe)  # it may depend on the model
    return describe(OmegaConf.to_yaml(own), _root_.hydra.runtime.choices).replace("$", "$$")


OmegaConf.register_new_resolver("by_model", by_model, replace=True)
OmegaConf.register_new_resolver("config_help", config_help, replace=True)


def check_config(config: dict[str, Any]) -> None:
    """Validate a resolved config as plain data; models and corpora validate their own options.

    Raises:
        UserError: with the key, what is wrong and what is valid.
    """
    default = defaults(config)
    check_value(config, default, "")
    check_finite(config, "")
    for group in ("model", "pattern"):
        check_inner_choices(config[group], group)
    if "task" in default and config["task"]["data"] != default["task"]["data"]:
        raise UserError("task.data is fixed by the task; remove it.")
    if "probe" in config and config["task"]["name"] != "probe":
        raise UserError(f"probe={value_of(config, 'probe.name')} needs task=probe; set it, or remove probe.")
    lengths, trained = config["task"].get("lengths", []), config["block_size"]
    if any(length <= trained for length in lengths):
        raise UserError(f"task.lengths must be a list of whole numbers above block_size={trained}, not {lengths}.")
    if config["protocol"]["name"] == "clean" and not config["protocol"]["validation"]:
        raise UserError(
            "protocol=clean chooses on a held-out part, so protocol.validation must be above 0; to only remove test "
            "sentences from train: protocol=paper protocol.remove_test_sentences=true."
        )
    if config["recipe"]["matrix_lr"] is not None and config["recipe"]["optimizer"] != "muon":
        raise UserError("recipe.matrix_lr is the learning rate of Muon; choose recipe=muon, or set it to null.")
    steps, warmup = config["trainer"].get("max_steps", -1), config["recipe"]["warmup_steps"]
    if warmup and config["recipe"]["schedule"] not in ENDLESS and 0 <= steps <= warmup:
        raise UserError(f"recipe.warmup_steps={warmup} must be less than trainer.max_steps={steps}.")
    check_trainer_arguments(config["trainer"])


def check_inner_choices(entry: Any, key: str) -> None:
    """Validate the options of the choices within a choice, of `by_layer` and `randomised`, like those of a choice."""
    inner = {f"{key}.layers[{k}]": own for k, own in enumerate(entry.get("layers", []))}
    inner |= {f"{key}.encoding": entry[name] for name in ("encoding",) if name in entry}
    for path, own in inner.items():
        name = own.get("name") if isinstance(own, dict) else None
        file = CONF / key.partition(".")[0] / f"{name}.yaml"
        if isinstance(name, str) and name.isidentifier() and file.exists():
            default = load_plain(file)
            for option in own.keys() & default.keys():
                check_value(own[option], default[option], f"{path}.{option}")
            check_inner_choices(own, path)


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Load the defaults in `conf/` for the choices that `config` made, as plain data."""
    plain = dict(load_plain(CONF / "config.yaml"))
    del plain["defaults"], plain["hydra"]
    probe = ["probe"] if "probe" in config or value_of(config, "task.name") == "probe" else []
    for group in ("model", "pattern", "protocol", "recipe", "logger", "task", "corpus", *probe):
        # a recipe has no name, but all recipes have the same keys
        name = "adam" if group == "recipe" else value_of(config, f"{group}.name")
        if not isinstance(config.get(group), dict) or type(name) is not str:
            choices = ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml")))
            raise UserError(f"{group} is missing or has no name; choose one of {choices} with {group}=CHOICE.")
        file = CONF / group / f"{name}.yaml"
        if file.exists():
            content = load_plain(file)
            plain[group] = content.get(group, content)  # some set keys of other groups
    if "defaults" in plain.get("corpus", {}):  # auto
        parts = {part: load_plain(CONF / "corpus" / f"{part}.yaml") for part in ("speeches", "ted", "sample")}
        plain["corpus"] = {key: value for key, value in plain["corpus"].items() if key != "defaults"} | parts
    return plain


@functools.cache
def load_plain(file: Path) -> dict[str, Any]:
    """Load a file of `conf/` as plain data, which must not be changed."""
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]


def check_value(value: Any, default: Any, key: str) -> None:
    """Require that a value obeys `RANGES` and `RULES`, or has the type of its default.

    A default of null stands for a word; one that is an interpolation, and a key without default, for anything.
    """
    own = re.sub(r"^corpus\.(speeches|ted|sample)\.", "corpus.", key)  # the parts of corpus=auto
    own = re.sub(r"\.(layers\[\d+\]|encoding)(?=\.)", "", own)  # choices within by_layer and randomised
    if isinstance(default, dict):
        if not isinstance(value, dict):
            raise UserError(f"{key} is a group of keys ({', '.join(default)}), not {value!r}.")
        for name in {**default, **value}:
            path = f"{key}.{name}" if key else str(name)
            if name not in value:
                raise UserError(f"{path} is missing; keys cannot be removed.")
            check_value(value[name], default.get(name, MISSING), path)
    elif own in RULES:
        rule, is_valid = RULES[own]
        if not is_valid(value):
            raise UserError(f"{key} must be {rule}, not {value!r}.")
    elif own in RANGES and not isinstance(default, list):
        check_range(value, key, *RANGES[own])
    else:
        check_type(value, default, key)
    for item in value if own in RANGES and isinstance(value, list) else ():
        check_range(item, key, *RANGES[own])


def check_type(value: Any, default: Any, key: str) -> None:
    """Require that a value has the type of its default; see `check_value`."""
    if default is MISSING or "${" in str(default) or (default is None and value is None):
        return
    word, types = TYPES[str if default is None else type(default)]
    if type(value) not in types:
        raise UserError(f"{key} must be {word}{' or null' if default is None else ''}, not {value!r}.")


def check_range(value: Any, key: str, least: float, greatest: float, nullable: bool) -> None:
    """Require that a value is a number between two others, both included; a whole one, if those are whole."""
    if value is None and nullable:
        return
    whole = isinstance(least, int)
    word, types = TYPES[int if whole else float]
    if type(value) not in types:
        raise UserError(f"{key} must be {word}{' or null' if nullable else ''}, not {value!r}.")
    if not whole and not least <= value <= greatest:
        raise UserError(f"{key} must be a number between {least:g} and {greatest:g}, not {value!r}.")
    if not least <= value <= greatest:
        limit = f"at least {least}" if value < least else f"at most {greatest}"
        raise UserError(f"{key} must be a whole number of {limit}, not {value!r}.")


def check_finite(value: Any, key: str) -> None:
    """Require that all numbers in a config are finite, and none is absurdly large."""
    if isinstance(value, dict):
        for name, own in value.items():
            check_finite(own, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            check_finite(item, key)
    elif isinstance(value, int | float) and not abs(value) <= 1e12:
        raise UserError(f"{key} must be a finite number of at most 10^12 in size, not {value!r}.")


MISSING = object()


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key, or MISSING."""
    for name in key.split("."):
        config = config.get(name, MISSING) if isinstance(config, dict) else MISSING
    return config


def check_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Require that `trainer.*` names arguments of Lightning's Trainer that can be set, with values of their type."""
    known = set(load_plain(CONF / "config.yaml")["trainer"]) | {"strategy"}
    for name in arguments:
        if name in FIXED_TRAINER_ARGUMENTS:
            raise UserError(f"trainer.{name} cannot be set, because {FIXED_TRAINER_ARGUMENTS[name]}.")
        if name not in known:  # Lightning takes seconds to import: ask it only about other names
            from lightning.pytorch import Trainer

            parameters = inspect.signature(Trainer).parameters
            if name not in parameters:
                raise unknown("trainer", "argument", name, sorted(set(parameters) - set(FIXED_TRAINER_ARGUMENTS)))
            if not has_type(arguments[name], parameters[name].annotation):
                words = inspect.formatannotation(parameters[name].annotation)
                raise UserError(f"trainer.{name} must be of Lightning's type {words}, not {arguments[name]!r}.")


def has_type(value: Any, annotation: Any) -> bool:
    """Return whether a plain value has an annotated type; the numbers of a dict, durations, must not be negative."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is dict:
        items = value.items() if isinstance(value, dict) else [(None, None)]
        return all(type(name) is str and type(number) is int and number >= 0 for name, number in items)
    return type(value) is (origin or annotation)


def uses_several_devices(config: Mapping[str, Any]) -> bool:
    """Return whether a run trains on several devices, of one machine or of several."""
    return count_devices(config["trainer"]["devices"]) > 1 or config["trainer"].get("num_nodes", 1) > 1


def count_devices(devices: Any) -> int:
    """Return how many devices `trainer.devices` requests; 0 if the value is invalid."""
    if isinstance(devices, list):
        valid = all(type(device) is int and 0 <= device < MOST_DEVICES for device in devices)
        return len(devices) if valid and len(set(devices)) == len(devices) else 0
    if isinstance(devices, str) and re.fullmatch("[0-9]{1,4}", devices):
        devices = int(devices)
    return devices if type(devices) is int and 0 < devices <= MOST_DEVICES else 0


def check_sweep(config: dict[str, Any]) -> None:
    """Require that each run of a sweep uses one device."""
    devices, machines = config["trainer"]["devices"], config["trainer"].get("num_nodes", 1)
    if uses_several_devices(config):
        several = f"num_nodes={machines}" if machines > 1 else f"devices={devices}"
        raise UserError(
            f"trainer.{several} in a sweep: sweeps do not support multi-device runs, because Lightning would "
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

    words = list(overrides)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", overrides=words)
    except Exception as error:  # Hydra raises almost any
        raise UserError(explain(error, words)) from error


def as_plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolve and validate a composed config, and return it as plain data.

    Raises:
        UserError: see `check_config`.
    """
    try:
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    check_config(config)
    return config


def explain(error: Exception, overrides: Iterable[str] = ()) -> str:
    """Describe an error of Hydra in one sentence, with the valid choices or keys; `overrides` of the command line."""
    if isinstance(error, OverrideParseException):
        fixed = corrected(error.override, sweep=bool({"-m", "--multirun"} & set(overrides)))
        return (
            f"{error.override!r} cannot be parsed; write KEY=VALUE, and a VALUE with special characters or letters "
            f"outside ASCII in quotes{f': {fixed}' if fixed and fixed.isprintable() else '.'}"
        )
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return str(unknown(group, "choice", choice, error.options))
    if several := re.search(r"Ambiguous value for argument '([^']+)'", str(error)):
        key, _, values = several[1].partition("=")
        brackets = f" A list needs brackets: '{key}=[{values}]'." if "." in key else ""
        return f"{several[1]}: several values are a sweep, so add -m.{brackets}"
    cause = error.__cause__
    if not_overridden := re.search(r"Could not override '([^']+)'", str(error)):
        node = cause.parent_node if isinstance(cause, OmegaConfBaseException) else None
        full_key = (
            str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else not_overridden[1].replace("/", ".")
        )
        parent, _, key = full_key.rpartition(".")
        keys = list(node) if parent and isinstance(node, DictConfig) else top_level_keys()
        sentence = str(unknown(parent or "the config", "key", key, keys))
        hint = suggest(full_key)
        return f"{sentence.partition(' Did you mean')[0]} {hint}" if hint else sentence
    if isinstance(cause, OmegaConfBaseException):
        return f"{one_sentence(error)}: {one_sentence(cause)}"
    groups = [word for word in overrides if (CONF / word.lstrip("+~").partition("=")[0]).is_dir()]
    if named := [word for word in groups if not (CONF / f"{word.replace('=', '/')}.yaml").exists()]:  # GROUP=null
        wrong = ", ".join(named)
        return f"{wrong}: a config group needs the name of a choice. For no experiment, leave experiment= out."
    sentence = (one_sentence(error) or type(error).__name__).rstrip(".")
    key = sentence.partition(" full_key: ")[2].partition(" ")[0]  # OmegaConf appends it
    return f"{key}: {sentence.partition(' full_key: ')[0]}." if key else f"{sentence}."


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
        if key != group and (CONF / group).is_dir():
            raise UserError(f"{override}: make a choice with {group}={value}.")
        if value.startswith("{") and (CONF / key).is_dir():
            raise UserError(
                f"{override}: make a choice with {key}=NAME, and set its options with {key}.OPTION=VALUE."
            )
        if override.startswith("+") and not key.startswith("trainer.") and key not in top_level_keys():
            raise UserError(
                f"{override} adds a key that nothing reads; only arguments of Lightning's Trainer can be added, as "
                f"in +trainer.max_time=00:00:10:00. To change an existing key, omit the +. {suggest(key)}".strip()
            )
