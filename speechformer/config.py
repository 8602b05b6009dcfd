"""Compose and validate the config: every value is checked before anything is read or trained.

A group is declared beside what reads it: in `corpora/options.py`, `models/options.py` and `tasks/options.py`, as the
classes in `probes/`, and as the constructors of positions and patterns in `layers/`. The rest is here.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field

from speechformer.corpora.options import CORPUS_OPTIONS, Protocol
from speechformer.errors import UserError, pick, unknown
from speechformer.keys import CONF, GROUPS, load_plain, setting, suggest
from speechformer.models.options import Architecture, check_attention
from speechformer.options import Amount, Count, Few, Named, Options, Positive, Rate, Size, Whole, check, options_of
from speechformer.paths import expand_override
from speechformer.process import standard_state
from speechformer.runs.rank import count_devices
from speechformer.tasks.options import TASK_OPTIONS, Recipe

REFUSED = {  # Lightning's arguments that a run sets itself, and the key that decides
    "logger": "logger",
    "default_root_dir": "hydra.run.dir",
    "enable_checkpointing": "checkpoint_every",
    "val_check_interval": "eval_interval",
    "check_val_every_n_epoch": "eval_interval",
}
DEBUG = {"fast_dev_run", "overfit_batches", "limit_val_batches", "limit_test_batches", "callbacks"}
COMPOSING = threading.Lock()
Limit = Annotated[int, Field(ge=-1, lt=2**32)]
Instances = list[dict[str, Any]]  # that Hydra makes, each from a `_target_`


class TrainerOptions(Options):
    """Arguments of Lightning's Trainer; for those that are not here, its signature counts."""

    model_config = ConfigDict(extra="allow")
    accelerator: str
    devices: Few | Annotated[list[Whole], Field(min_length=1)]
    num_nodes: Few = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    max_epochs: Limit | None
    max_steps: Limit
    precision: str | Few
    gradient_clip_val: Amount | None
    accumulate_grad_batches: Count
    log_every_n_steps: Count
    deterministic: bool | Literal["warn"]
    limit_train_batches: Positive | None
    limit_val_batches: Positive = 1.0
    callbacks: Instances = Field([])
    plugins: Instances = Field([])


class LoggerOptions(Named):
    """The keys of W&B and MLflow."""

    project: str = ""
    entity: str | None = None
    offline: bool = False
    experiment: str = ""
    tracking_uri: str | None = None


class Choice(Named):
    """A choice whose options depend on its name."""

    model_config = ConfigDict(extra="allow")


class Config(Options):
    """The config of a run, `conf/config.yaml`."""

    study: str | None
    seed: Whole
    width: Size
    heads: Few
    layers: Few
    ff: Size
    block_size: Size
    batch_size: Size
    dropout: Rate
    embedding_dropout: Rate | None
    vocab_size: Size | None
    eval_interval: Count | None
    checkpoint_every: Count
    keep_every_n_steps: Count | None
    threads: Few | None
    compile: str | None
    init_from: dict[str, str] | None  # after `with_pretrained`
    force: bool
    architecture: Architecture
    trainer: TrainerOptions
    recipe: Recipe
    protocol: Protocol
    logger: LoggerOptions
    model: Choice
    pattern: Choice
    attention: Choice
    corpus: Choice
    task: Choice
    probe: Choice | None = None


def by_model(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Resolve `${by_model:{rnn:300,alibi:256,others:200}}` to the value of the model, or else of `others`."""
    name = _root_.model.name
    if (value := table.get(name, table.get("others"))) is None:
        raise UserError(f"this experiment has a size only for model={', '.join(table)}, not for {name}.")
    return value


def config_help(*, _root_: DictConfig) -> str:
    """Resolve `${config_help:}` to the files of `conf/` that a command line composes, in the template of `--help`."""
    text, choices = (CONF / "config.yaml").read_text("utf-8").partition("\nhydra:")[0], _root_.hydra.runtime.choices
    for group, choice in choices.items():
        if group in Config.model_fields and choice:
            text += f"\n\n# {group}={choice}\n{(CONF / group / f'{choice}.yaml').read_text('utf-8')}"
    return text.replace("$", "$$")


OmegaConf.register_new_resolver("by_model", by_model, replace=True)
OmegaConf.register_new_resolver("config_help", config_help, replace=True)


def check_config(config: dict[str, Any]) -> None:
    """Validate a resolved config as plain data; torch is imported only if options of model or pattern are set.

    Raises:
        UserError: with the key, what is wrong and what is valid.
    """
    check(Config, config)
    check(pick(CORPUS_OPTIONS, config["corpus"]["name"], "corpus.name"), config["corpus"], "corpus")
    check(TASK_OPTIONS.get(config["task"]["name"], Choice), config["task"], "task")  # a new task may declare none
    protocol, trainer = config["protocol"], config["trainer"]
    if config["task"].get("tokens") == "pretrained" and not config["init_from"]:
        raise UserError("task.tokens=pretrained is the tokenizer of a model: set init_from to its folder.")
    if ("probe" in config) != (config["task"]["name"] == "probe"):
        raise UserError("task=probe and a choice of probe need each other; set both, or neither.")
    if "probe" in config:
        from speechformer.probes.registry import load_probe  # takes numpy

        load_probe(config)
    if protocol["name"] == "clean" and not protocol["validation"]:
        raise UserError(
            "protocol=clean chooses on a held-out part, so protocol.validation must be above 0; to only remove test "
            "sentences from train: protocol=paper protocol.remove_test_sentences=true."
        )
    if config["recipe"]["matrix_lr"] is not None and config["recipe"]["optimizer"] != "muon":
        raise UserError("recipe.matrix_lr is the learning rate of Muon; choose recipe=muon, or set it to null.")
    if trainer.get("strategy") == "fsdp":
        optimizer = config["recipe"]["optimizer"]
        if optimizer not in ("adam", "adamw"):
            reason = "needs whole matrices" if optimizer == "muon" else "cannot be fused"
            raise UserError(f"recipe.optimizer={optimizer} {reason} where machine=fsdp splits them; choose adamw.")
        if config["task"]["data"] == "pairs":
            raise UserError(
                "machine=fsdp cannot train a translator: its devices would wait for each other; use machine=ddp."
            )
    lengths, trained = config["task"].get("lengths", []), config["block_size"]
    if any(length <= trained for length in lengths):
        raise UserError(f"task.lengths must be above block_size={trained}, not {lengths}.")
    if refused := REFUSED.keys() & trainer.keys():
        name = min(refused)
        raise UserError(f"trainer.{name} cannot be set, because a run sets it; set {REFUSED[name]}.")
    if others := trainer.keys() - TrainerOptions.model_fields.keys():
        with standard_state():
            from lightning.pytorch import Trainer  # takes seconds

        check(options_of(Trainer), {name: trainer[name] for name in others}, "trainer")
    own_options = False
    for group in ("model", "pattern", "attention"):
        files = {file.stem: file for file in sorted((CONF / group).glob("*.yaml"))}
        own_options |= config[group] != load_plain(pick(files, config[group]["name"], f"{group}.name"))
    if own_options:
        check_attention(config)


def debug_arguments(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of `trainer` that are set and make a run one for debugging, not for a report."""
    return sorted(DEBUG & config["trainer"].keys())


def check_sweep(config: Mapping[str, Any]) -> None:
    """Require that each run of a sweep uses one device."""
    trainer = config["trainer"]
    if count_devices(trainer["devices"]) > 1 or trainer.get("num_nodes", 1) > 1:
        raise UserError(
            "trainer.devices or trainer.num_nodes above 1 in a sweep: sweeps do not support multi-device runs, "
            "because Lightning would relaunch the whole sweep. Give each run one device and let the sweep use the "
            "others (machine=gpu hydra/launcher=joblib hydra.launcher.n_jobs=NUMBER_OF_GPUS, or hydra/launcher="
            "submitit_slurm), or start the runs one by one, without -m."
        )


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Lend Hydra's only instance to one thread, without the program's that uses it, perhaps with `hydra.main`."""
    from hydra.core.global_hydra import GlobalHydra

    with COMPOSING:
        before, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = before


def words_of_choice(word: str) -> list[str]:
    """Return the overrides that GROUP={name:CHOICE,OPTION:VALUE} stands for; one word of another kind, or a sweep."""
    group, _, value = word.partition("=")
    if not value.startswith("{") or group not in GROUPS:
        return [word]
    (override,) = OverridesParser.create().parse_overrides([word])
    options: Any = override.value()
    if not isinstance(options, dict):  # a sweep over several
        return [word]
    if "name" not in options:
        raise UserError(f"{word} has no name; write {group}={{name:CHOICE,OPTION:VALUE}}.")
    of_group = {key: Transformer.str(option) for key, option in options.items()}
    return [f"{group}={of_group.pop('name')}", *(f"{group}.{key}={option}" for key, option in of_group.items())]


def expand_words(words: Iterable[str]) -> list[str]:
    """Return a command line as Hydra reads it: with `expand_override` and `words_of_choice`."""
    return [part for word in words for part in words_of_choice(expand_override(word))]


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of a command line with these overrides.

    Raises:
        UserError: an override is malformed, or names an unknown key or choice.
    """
    import hydra

    try:
        with own_hydra(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", overrides=expand_words(overrides))
    except Exception as error:  # Hydra raises almost any
        raise UserError(explain(error, overrides)) from error


def as_plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolve and validate a composed config, and return it as plain data.

    Raises:
        UserError: see `check_config`.
    """
    try:
        config: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    config = with_pretrained(config)
    check_config(config)
    return config


def with_pretrained(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `init_from`, if it names a folder, decides the architecture; torch is then imported."""
    place = config.get("init_from")
    if place is None or (isinstance(place, dict) and place.keys() == {"folder", "sha256"}):
        return config
    if not isinstance(place, str):
        raise UserError(f"init_from must be the folder of a model, not {place}.")
    from speechformer.models.pretrained import settings_of

    return settings_of(config)


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Describe an error of Hydra in one sentence, with the valid choices or keys; `overrides` of the command line."""
    cause = error.__cause__
    context: BaseException | None = error
    while context is not None:  # OmegaConf leaves no cause
        if isinstance(context, UserError):  # of a resolver, such as run_name
            return str(context)
        context = context.__context__
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        fixed = f": {setting(key, value[1:-1].split(',') if value.startswith('[') else value)}" if value else "."
        return (
            f"{error.override!r} cannot be parsed; write KEY=VALUE, and a VALUE with special characters or letters "
            f"outside ASCII in quotes{fixed}"
        )
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        quoted = f" Quote braces for the shell: '{group}={{name:CHOICE,OPTION:VALUE}}'." if ":" in choice else ""
        return f"{unknown(group, 'choice', choice, error.options)}{quoted}"
    if isinstance(cause, OmegaConfBaseException) and "Could not override" in str(error):
        full_key = str(cause.full_key)
        parent, _, key = full_key.rpartition(".")
        names = cause.parent_node if parent else [*Config.model_fields, "experiment", "machine"]
        if parent == "trainer":
            with standard_state():
                from lightning.pytorch import Trainer

            if key in inspect.signature(Trainer).parameters:
                return f"trainer.{key} is not listed in config.yaml, so it needs a +: +trainer.{key}=..."
        valid = ", ".join(names) + (", and with a + those of Lightning's Trainer" if parent == "trainer" else "")
        return f"{parent or 'the config'} has no key '{key}'; the valid ones are: {valid}.{suggest(full_key)}"
    reasons = [str(each).strip().partition("\n")[0].rstrip(".") for each in (error, cause) if each is not None]
    if "Ambiguous value" in reasons[0]:
        return f"{reasons[0]}: several values are a sweep, so add -m; a list needs brackets, as in '[a,b]'."
    for word in overrides:
        group, _, choice = word.partition("=")
        if (CONF / group).is_dir() and not (CONF / group / f"{choice}.yaml").exists():
            return f"{word}: a config group needs the name of a choice. For no experiment, leave experiment= out."
    if place := getattr(error, "full_key", None):
        reasons.insert(0, place)
    return f"{': '.join(reasons)}."
