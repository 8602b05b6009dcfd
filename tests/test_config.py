"""Validation of the config: what a key accepts, and the sentence about what it does not. Oracle: written by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from conftest import TINY
from conftest import compose as composed
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from pydantic import Field

from speechformer.config import CONF, as_plain, check_config, check_sweep, compose, debug_arguments, expand_words
from speechformer.errors import UserError
from speechformer.options import Options, Size, build, check
from speechformer.training.run import execute


@pytest.mark.parametrize("word", ["=0", "", "model=null", "task=[1,2]", "width=)"])
def test_what_hydra_cannot_follow_is_an_error_that_names_it(word: str) -> None:
    with pytest.raises(UserError, match=f"^'?{re.escape(word)}'?(:| cannot be parsed)"):
        compose([word])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("recipe.lr=-1", "recipe.lr must be at least 0.0, not -1."),
        ("width=0", "width must be at least 1, not 0."),
        ("dropout=null", "dropout must be a number, not None."),
        ("dropout=1", "dropout must be less than 1, not 1."),
        ("architecture.bias=off", "architecture.bias must be true or false, not 'off'."),
        ("architecture.norm=mid", "architecture.norm must be 'pre', 'post', 'sandwich' or 'parallel', not 'mid'."),
        ("trainer.max_epochs=-2", "trainer.max_epochs must be at least -1, not -2."),
        ("recipe.betas=[0.9]", "recipe.betas must be a list of at least 2, not [0.9]."),
        ("recipe.betas=[0.9,x]", "recipe.betas.1 must be a number, not 'x'."),
        ("corpus=speeches corpus.classes=[a,a]", "corpus.classes must be a list of different names"),
        ("task=lm task.data=pairs", "task.data must be 'texts', not 'pairs'."),
        ("model=alibi model.scale=far", "model.scale must be a number, not 'far'."),
        ("probe=copy task=probe probe.symbols=no", "probe.symbols must be a whole number, not 'no'."),
        ("~architecture.norm", "architecture lacks norm; every key of its yaml file is required."),
        ("+foo=1", "the config has no key 'foo'; the valid ones are: study, seed"),
        ("+architecture.nrm=1", "the config has no key 'architecture.nrm'"),
        ("task.name=lm", "task"),
        ("attention.name=squard", "attention.name has no choice 'squard'; the valid ones are: by_layer, delta"),
        ("model.name=rop", "model.name has no choice 'rop'; the valid ones are: alibi"),
        ("+trainer.logger=true", "trainer.logger cannot be set, because a run sets it; set logger."),
        ("+trainer.max_tim=1", "trainer has no key 'max_tim'; the valid ones are: accelerator"),
        ("+trainer.callbacks=[1]", "trainer.callbacks.0 must be a"),
        ("protocol=clean protocol.validation=0", "protocol=clean chooses on a held-out part"),
    ],
)
def test_an_invalid_value_is_one_sentence_with_its_key(overrides: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        as_plain(composed(*overrides.split()))
    assert str(error.value).startswith(message)


CONFIGS: list[list[str]] = [  # every key of `conf/` is in one of them
    [],
    *([f"model={path.stem}"] for path in (CONF / "model").glob("*.yaml")),
    *([f"pattern={path.stem}"] for path in (CONF / "pattern").glob("*.yaml")),
    *([f"attention={path.stem}"] for path in (CONF / "attention").glob("*.yaml")),
    *(["task=probe", f"probe={path.stem}"] for path in (CONF / "probe").glob("*.yaml")),
    *([f"logger={path.stem}"] for path in (CONF / "logger").glob("*.yaml")),
    ["task=lm", "corpus=sample", "protocol=clean"],
    ["task=lm", "corpus=stories"],
    *(["task=translate", f"corpus={corpus}"] for corpus in ("auto", "digits", "sample", "ted")),
]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all values that are no groups of keys."""
    for name, own in value.items():
        yield from leaves(own, (*path, name)) if isinstance(own, dict) else [(*path, name)]


@pytest.mark.parametrize("overrides", CONFIGS, ids=" ".join)
def test_no_value_is_believed_that_makes_no_sense(overrides: list[str]) -> None:
    """No key accepts NaN, an infinity, a list of lists, or a group of keys; and no whole number is without bound."""
    valid = as_plain(composed(*overrides))
    own = {word.partition("=")[0] for word in overrides}  # the keys of other groups are checked without overrides
    nonsense = [math.nan, -math.inf, 10**30, [[1]], [math.nan, 0.5], {"a": 1}]
    for *groups, name in leaves(valid):
        of_rnn = groups == ["model"] and valid["model"]["name"].startswith("rnn")  # `build` checks these
        if of_rnn or (own and not own & {*groups[:1]}):
            continue
        for value in nonsense:
            config = copy.deepcopy(valid)
            functools.reduce(dict.__getitem__, groups, config)[name] = value
            with pytest.raises(UserError) as error:
                check_config(config)
            said = str(error.value)
            assert re.match(r"[a-z_.0-9]+ (must be|has no choice)", said), (groups, name, value)


class Example(Options):
    count: Size
    share: Annotated[float, Field(ge=0, lt=1)]
    fold: Size | Literal["seed"] | None
    items: list[int]


def test_a_declaration_is_compared_strictly() -> None:
    valid: dict[str, Any] = {"count": 3, "share": 0, "fold": None, "items": [1, 2]}
    assert check(Example, valid).model_dump() == valid
    for fold in (1, "seed"):
        assert check(Example, valid | {"fold": fold}).fold == fold
    wrong = {
        ("count", True): "here.count must be a whole number, not True.",
        ("count", 2**20 + 1): f"here.count must be at most {2**20}, not {2**20 + 1}.",
        ("share", 1.0): "here.share must be less than 1, not 1.0.",
        ("share", "0"): "here.share must be a number, not '0'.",
        ("fold", 0): "here.fold must be at least 1 or 'seed', not 0.",
        ("items", (1, "x")): "here.items must be a valid list, not (1, 'x').",
        ("itms", 1): "here has no key 'itms'; the valid ones are: count, share, fold, items. Did you mean items?",
    }
    for (key, value), message in wrong.items():
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            check(Example, valid | {key: value}, "here")


def window(width: int, size: Size = 3) -> tuple[int, int]:
    return width, size


def test_the_parameters_with_a_default_are_options() -> None:
    assert build({"window": window}, {"name": "window", "size": 5}, "pattern", width=8) == (8, 5)
    with pytest.raises(
        UserError, match=r"^pattern has no key 'sise'; the valid ones are: size\. Did you mean size\?$"
    ):
        build({"window": window}, {"name": "window", "sise": 5}, "pattern", width=8)
    with pytest.raises(UserError, match=r"^pattern\.size must be at least 1, not 0\.$"):
        build({"window": window}, {"name": "window", "size": 0}, "pattern", width=8)
    with pytest.raises(UserError, match=r"^<lambda>: power needs a type, for example power: Positive = 2\.0\.$"):
        build({"window": lambda power=2: power}, {"name": "window"}, "pattern")


@pytest.mark.parametrize(
    ("setting", "is_valid"),
    [
        ("trainer.deterministic=maybe", False),
        ("trainer.deterministic=warn", True),
        ("trainer.gradient_clip_val=-1", False),
        ("trainer.limit_train_batches=0", False),
        ("+trainer.limit_val_batches=0", False),
        ("trainer.devices=[0,1]", True),
        ("trainer.devices=0", False),
        ("+trainer.strategy=[ddp]", False),
        ("+trainer.min_steps=few", False),
        ("+trainer.detect_anomaly=maybe", False),
        ("+trainer.detect_anomaly=true", True),
        ("+trainer.fast_dev_run=2", True),
        ("+trainer.num_sanity_val_steps=2", True),
        ("+trainer.callbacks=[{_target_: lightning.pytorch.callbacks.LearningRateMonitor}]", True),
        ("+trainer.max_time={days:1}", True),
        ("+trainer.max_time=00:00:10:00", True),
        ("compile=[a]", False),
    ],
)
def test_what_a_trainer_accepts(setting: str, is_valid: bool) -> None:
    """Oracle: Lightning's documentation of the arguments."""
    with contextlib.nullcontext() if is_valid else pytest.raises(UserError, match=setting.strip("+").split("=")[0]):
        as_plain(composed(setting))


def test_what_makes_a_run_one_for_debugging() -> None:
    cosmetic = composed("trainer.limit_train_batches=2", "+trainer.enable_progress_bar=true")
    assert debug_arguments(as_plain(cosmetic)) == []
    limited = composed("+trainer.limit_val_batches=1", "+trainer.fast_dev_run=true", "+trainer.detect_anomaly=true")
    assert debug_arguments(as_plain(limited)) == ["fast_dev_run", "limit_val_batches"]


class Counter(Callback):
    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        Counter.steps += 1


def test_a_callback_of_the_config_is_called(tmp_path: Path) -> None:
    callbacks = "+trainer.callbacks=[{_target_: test_config.Counter}]"
    execute(composed(*TINY, "trainer.max_steps=3", callbacks), tmp_path / "run")
    assert Counter.steps == 3


def test_checking_positions_draws_no_random_number() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    as_plain(composed("model=fire", "model.hidden=16"))
    assert torch.rand(1) == expected


def test_a_config_without_options_is_checked_without_torch() -> None:
    """Oracle: the modules of the process."""
    code = (
        "import sys; from speechformer.config import as_plain, compose\n"
        "as_plain(compose(['model=rope', 'pattern=window', 'width=128', 'task=probe']))\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_devices_that_split_matrices_refuse_optimizers_of_whole_ones(optimizer: str) -> None:
    words = f"recipe.optimizer={optimizer}", "recipe.lr=0.1"
    as_plain(composed("machine=ddp", *words))
    with pytest.raises(UserError, match=f"recipe.optimizer={optimizer} .* machine=fsdp .* choose adamw"):
        as_plain(composed("machine=fsdp", *words))


def test_devices_that_split_weights_refuse_a_translator() -> None:
    as_plain(composed("machine=ddp", "task=translate"))
    with pytest.raises(UserError, match="machine=fsdp cannot train a translator"):
        as_plain(composed("machine=fsdp", "task=translate"))


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("model={name: alibi, slopes: [0.5,0.1]}", ["model=alibi", "model.slopes=[0.5,0.1]"]),
        ("pattern={name:window,window:3},full", ["pattern={name:window,window:3},full"]),
        ("+trainer.max_time={days:1}", ["+trainer.max_time={days:1}"]),
    ],
)
def test_a_choice_with_options_in_braces_is_several_overrides(word: str, words: list[str]) -> None:
    """A sweep of several choices stays one word, which the sweeper reads."""
    assert expand_words([word, "seed=1"]) == [*words, "seed=1"]


@pytest.mark.parametrize("machine", ["ddp", "fsdp"])
def test_a_sweep_gives_each_run_one_device(machine: str) -> None:
    config: Any = OmegaConf.to_container(composed(f"machine={machine}"), resolve=True)
    check_config(config)
    with pytest.raises(UserError, match="in a sweep: sweeps do not support multi-device runs"):
        check_sweep(config)
