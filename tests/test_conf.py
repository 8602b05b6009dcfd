"""conf/ is a test parameter: each file has its class, each class its file, each experiment its report's count."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from conftest import EXPERIMENTS, MODELS, PATTERNS, compose, group
from omegaconf import OmegaConf

from speechformer.config import CONF, check_config
from speechformer.cores.stack import INITIALISATIONS, count_parameters
from speechformer.corpora.speeches import load_corpus
from speechformer.data import SpeechData
from speechformer.layers.patterns import PATTERNS as PATTERN_FUNCTIONS
from speechformer.layers.positions import POSITIONS, Positions
from speechformer.tasks import OPTIMIZERS, SCHEDULES, TASKS
from speechformer.train import core_arguments


@pytest.mark.parametrize(("folder", "kinds"), [("model", POSITIONS), ("pattern", PATTERN_FUNCTIONS), ("task", TASKS)])
def test_each_file_has_its_class_and_each_class_its_file(folder: str, kinds: dict) -> None:
    assert {path.stem for path in (CONF / folder).glob("*.yaml")} == set(kinds)
    for name in kinds:
        assert group(folder, name)["name"] == name


@pytest.mark.parametrize("model", MODELS)
def test_a_model_file_shows_every_option_at_its_default(model: str) -> None:
    common = inspect.signature(Positions).parameters
    own = {
        name: parameter.default
        for name, parameter in inspect.signature(POSITIONS[model]).parameters.items()
        if name not in common
    }
    assert {key: value for key, value in group("model", model).items() if key != "name"} == own


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_file_shows_every_option_at_its_default(pattern: str) -> None:
    own = {name: p.default for name, p in inspect.signature(PATTERN_FUNCTIONS[pattern]).parameters.items()}
    assert {key: value for key, value in group("pattern", pattern).items() if key != "name"} == own


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (CONF / "recipe").glob("*.yaml")))
def test_a_recipe_names_what_there_is(recipe: str) -> None:
    chosen = group("recipe", recipe)
    assert set(chosen) == set(group("recipe", "adam"))
    assert chosen["optimizer"] in OPTIMIZERS
    assert chosen["schedule"] in SCHEDULES
    assert chosen["init"] in INITIALISATIONS


@pytest.mark.parametrize("machine", sorted(path.stem for path in (CONF / "machine").glob("*.yaml")))
def test_a_machine_sets_the_trainers_device(machine: str) -> None:
    assert compose(f"machine={machine}").trainer.accelerator == machine
    assert compose(f"machine={machine}").trainer.devices == 1


def test_what_people_change_most_stands_flat_at_the_top() -> None:
    flat = "seed width heads layers ff block_size batch_size dropout vocab_size eval_interval checkpoint_every"
    assert set(flat.split()) <= set(compose())


PUBLISHED = {  # parameters that the reports give; see the seeds' tables and texts
    "kulkarni_classify": 494_563,
    "kulkarni_lm": 861_963,
    "singhal_classify": 586_947,
    "singhal_lm": 943_739,
    "marsol_lm": 864_011,
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_has_the_parameters_of_its_report(experiment: str) -> None:
    cfg = compose(f"experiment={experiment}", "corpus=sample")
    config = OmegaConf.to_container(cfg, resolve=True)
    check_config(config)
    keys = ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")
    data = SpeechData(load_corpus(config["corpus"]), **{key: config[key] for key in keys})
    task = TASKS[config["task"]["name"]](core=core_arguments(config, data), recipe=config["recipe"])
    assert count_parameters(task.core)["total"] == PUBLISHED[experiment]


def test_every_experiment_says_how_to_run_it() -> None:
    for name in EXPERIMENTS:
        header = Path(CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"python -m speechformer.train experiment={name}" in header
