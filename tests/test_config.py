"""Validation of the config: types, ranges, and the names of earlier versions."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import compose as composed
from omegaconf import OmegaConf

from speechformer.config import (
    CONF,
    RANGES,
    as_plain,
    check_config,
    check_range,
    check_sweep,
    compose,
)
from speechformer.errors import UserError


@pytest.mark.parametrize("word", ["=0", "", "model=null", "task=[1,2]", "width=)"])
def test_what_hydra_cannot_follow_is_an_error_that_names_it(word: str) -> None:
    with pytest.raises(UserError, match=f"^'?{re.escape(word)}'?(:| cannot be parsed)"):
        compose([word])


def test_the_data_of_a_task_are_fixed() -> None:
    with pytest.raises(UserError, match=r"task\.data is fixed by the task"):
        as_plain(composed("task=lm", "task.data=pairs"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.lr=-1"], "recipe.lr must be a number between 0 and 1000, not -1."),
        (["width=0"], "width must be a whole number of at least 1, not 0."),
        (["keep_every_n_steps=0"], "keep_every_n_steps must be a whole number of at least 1, not 0."),
        (["width=2.5"], "width must be a whole number, not 2.5."),
        (["width=true"], "width must be a whole number, not True."),
        (["dropout=null"], "dropout must be a number, not None."),
        (["architecture.bias=off"], "architecture.bias must be true or false, not 'off'."),
        (["trainer.max_epochs=-2"], "trainer.max_epochs must be a whole number of at least -1, not -2."),
        (["recipe.betas=[0.9]"], "recipe.betas must be two numbers in [0, 1), not [0.9]."),
        (["+trainer.callbacks=x"], "trainer.callbacks cannot be set, because speechformer sets it."),
        (["~architecture.norm"], "architecture.norm is missing; keys cannot be removed."),
    ],
)
def test_an_invalid_value_is_one_sentence_with_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        as_plain(composed(*overrides))
    assert str(error.value) == message


CONFIGS = [  # every key of `conf/` is in one of them
    *([f"model={path.stem}"] for path in (CONF / "model").glob("*.yaml")),
    *([f"pattern={path.stem}"] for path in (CONF / "pattern").glob("*.yaml")),
    ["task=lm", "corpus=sample", "protocol=clean"],
    *(["task=translate", f"corpus={corpus}"] for corpus in ("auto", "digits", "sample", "ted")),
]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all values that are no groups of keys."""
    for name, own in value.items():
        yield from leaves(own, (*path, name)) if isinstance(own, dict) else [(*path, name)]


@pytest.mark.parametrize("overrides", CONFIGS, ids=" ".join)
def test_no_value_is_believed_that_makes_no_sense(overrides: list[str]) -> None:
    """No key accepts NaN, an infinity, a number without bound, a list of lists, or a group of keys."""
    valid = as_plain(composed(*overrides))
    nonsense = [math.nan, math.inf, -math.inf, 10**30, -(10**30), 1e30, [[1]], [math.nan, 0.5], {"a": 1}]
    for *groups, name in leaves(valid):
        for value in nonsense:
            config = copy.deepcopy(valid)
            functools.reduce(dict.__getitem__, groups, config)[name] = value
            with pytest.raises(UserError) as error:
                check_config(config)
            assert re.match(r"[a-z_.]+ (must be|is fixed|is missing)", str(error.value)), (groups, name, value)


@pytest.mark.parametrize("key", RANGES)
def test_a_range_ends_where_the_table_says(key: str) -> None:
    least, greatest, nullable = RANGES[key]
    step = 1 if isinstance(least, int) else 1e-3 * abs(greatest)
    check_range(least, key, least, greatest, nullable)
    check_range(greatest, key, least, greatest, nullable)
    for value in (least - step, greatest + step, math.nan, True, "3", *([] if nullable else [None])):
        with pytest.raises(UserError, match=rf"^{re.escape(key)} must be a (whole )?number"):
            check_range(value, key, least, greatest, nullable)


@pytest.mark.parametrize(
    ("setting", "is_valid"),
    [
        ("trainer.deterministic=maybe", False),
        ("trainer.deterministic=warn", True),
        ("trainer.gradient_clip_val=-1", False),
        ("trainer.gradient_clip_val=0.5", True),
        ("trainer.limit_train_batches=0", False),
        ("trainer.limit_train_batches=1.5", False),
        ("trainer.limit_train_batches=1.0", True),
        ("trainer.limit_train_batches=7", True),
        ("trainer.devices=[0,0]", False),
        ("trainer.devices=[0,1]", True),
        ("+trainer.strategy=ddp", True),
        ("+trainer.strategy=[ddp]", False),
        ("+trainer.min_steps=-1", False),
        ("+trainer.detect_anomaly=maybe", False),
        ("+trainer.detect_anomaly=true", True),
        ("+trainer.max_time={days:1}", True),
        ("+trainer.max_time={days:-1}", False),
        ("+trainer.max_time=00:00:10:00", True),
        ("compile=[a]", False),
    ],
)
def test_what_a_trainer_accepts(setting: str, is_valid: bool) -> None:
    """Oracle: Lightning's documentation of the arguments."""
    with contextlib.nullcontext() if is_valid else pytest.raises(UserError, match=setting.strip("+").split("=")[0]):
        as_plain(composed(setting))


@pytest.mark.parametrize("overrides", [["eval_interval=null"], ["dropout=0"], ["trainer.max_epochs=null"], ["lr=1"]])
def test_valid_values_and_unknown_keys(overrides: list[str]) -> None:
    if overrides == ["lr=1"]:
        with pytest.raises(UserError, match="the config has no key 'lr'"):
            compose(overrides)
    else:
        as_plain(compose(overrides))


def test_a_sweep_gives_each_run_one_device() -> None:
    config: Any = OmegaConf.to_container(composed("machine=ddp"), resolve=True)
    check_config(config)
    with pytest.raises(UserError, match=r"trainer\.devices=2 in a sweep: sweeps do not support multi-device runs"):
        check_sweep(config)
