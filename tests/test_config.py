"""Validation of the config: types, ranges, and the names of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import compose as composed
from omegaconf import OmegaConf

from speechformer.config import as_plain, check_config, check_overrides, check_sweep, compose
from speechformer.errors import UserError
from speechformer.runs.legacy import RENAMED_KEYS


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["core.norm=post"], "core.norm is now architecture.norm."),
        (["core.width=3"], "core.width is now architecture.width."),
        (["task=translate", "task.size=100"], "task.size is now task.vocab_size."),
        (["task=translate", "task.average=5"], "task.average is now task.average_checkpoints."),
        (["corpus=digits", "corpus.longest=9"], "corpus.longest is now corpus.max_length."),
        (["hydra/launcher=packed"], "hydra/launcher=packed is now hydra/launcher=ensemble."),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert str(error.value) == message


def test_an_old_name_is_explained_if_it_is_added_or_in_an_experiment() -> None:
    with pytest.raises(UserError, match=r"core\.norm is now architecture\.norm"):
        check_overrides(["+core.norm=post"])
    with pytest.raises(UserError, match=r"^core is now architecture\.$"):
        as_plain(composed("+core.norm=post"))
    assert not any(old in RENAMED_KEYS.values() for old in RENAMED_KEYS)


def test_the_data_of_a_task_are_fixed() -> None:
    with pytest.raises(UserError, match=r"task\.data is fixed by the task"):
        as_plain(composed("task=lm", "task.data=pairs"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.lr=-1"], "recipe.lr must be a number between 0 and 1000, not -1."),
        (["width=0"], "width must be a whole number of at least 1, not 0."),
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
