"""conf/ is a test parameter: each file has its class, each class its file, each experiment its report's count."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import COMPOSED, EXPERIMENTS, MODELS, PATTERNS, RECURRENT, compose, group
from omegaconf import OmegaConf

from speechformer.config import CONF, check_config
from speechformer.corpora.speeches import load_corpus
from speechformer.data.speeches import SentenceData
from speechformer.layers.mechanisms import MECHANISMS
from speechformer.layers.patterns import PATTERNS as PATTERN_FUNCTIONS
from speechformer.layers.positions import POSITIONS, Positions
from speechformer.models.stack import count_parameters
from speechformer.options import options_of
from speechformer.probes.registry import PROBES
from speechformer.tasks.classify import Classify
from speechformer.tasks.optim import OPTIMIZERS, SCHEDULES
from speechformer.tasks.registry import TASKS
from speechformer.training.run import execute

DATA = ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        ("model", [*POSITIONS, *RECURRENT, *COMPOSED]),
        ("pattern", [*PATTERN_FUNCTIONS, "by_layer"]),
        ("attention", [*MECHANISMS, "by_layer"]),
        ("task", TASKS),
        ("probe", PROBES),
    ],
)
def test_each_file_has_its_class_and_each_class_its_file(folder: str, kinds: Iterable[str]) -> None:
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


@pytest.mark.parametrize("name", sorted({*MECHANISMS, *(file.stem for file in (CONF / "attention").glob("*.yaml"))}))
def test_an_attention_file_shows_every_option_at_its_default(name: str) -> None:
    if name != "by_layer":
        assert name in MECHANISMS, (
            f"{name} has a yaml file but no class: add it to MECHANISMS in layers/mechanisms.py"
        )
        kind: Any = MECHANISMS[name]
        own = {key: option.default for key, option in options_of(kind, "layer").model_fields.items()}
        assert group("attention", name) == {"name": name, **own}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (CONF / "recipe").glob("*.yaml")))
def test_a_recipe_names_what_there_is(recipe: str) -> None:
    chosen = group("recipe", recipe)
    assert set(chosen) == set(group("recipe", "adam"))
    assert chosen["optimizer"] in OPTIMIZERS
    assert chosen["schedule"] in SCHEDULES


@pytest.mark.parametrize("model", ["sinusoidal", "rope", "rnn", "rnn_attention"])
def test_translation_has_a_recipe_for_each_model(model: str) -> None:
    """Oracle: the table of the file, where `others` are the transformers."""
    listed = (CONF / "recipe" / "translate.yaml").read_text(encoding="utf-8")
    rates = dict(re.findall(r"(\w+):([\d.e-]+)", listed.split("lr: ${by_model:")[1].split("}")[0]))
    recipe = compose("task=translate", f"model={model}").recipe
    assert recipe.lr == float(rates.get(model, rates["others"]))
    check_config(OmegaConf.to_container(compose("task=translate", f"model={model}"), resolve=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", sorted(path.stem for path in (CONF / "machine").glob("*.yaml")))
def test_a_machine_sets_the_trainers_device(machine: str) -> None:
    trainer = compose(f"machine={machine}").trainer
    is_split = machine in ("ddp", "fsdp")
    assert trainer.accelerator == ("auto" if is_split else machine)
    assert (trainer.devices, trainer.get("strategy")) == ((2, machine) if is_split else (1, None))


def test_the_most_used_keys_are_at_the_top_level() -> None:
    flat = "seed width heads layers ff block_size batch_size dropout vocab_size eval_interval checkpoint_every"
    assert set(flat.split()) <= set(compose())


def plain(experiment: str, *overrides: str) -> dict:
    return OmegaConf.to_container(compose(f"experiment={experiment}", *overrides), resolve=True)  # type: ignore


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_for_two_steps(
    experiment: str, little: Path, little_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle of the count of parameters: what the report says of this model, where it says it (as printed there)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", "trainer.accelerator=cpu"]
    config = compose(f"experiment={experiment}")
    if config.task.name == "translate":
        own = ["corpus=ted", f"corpus.root={little_pairs}", "trainer.accelerator=cpu"]
    elif config.corpus.name == "stories":
        own = ["corpus.documents=100", "trainer.accelerator=cpu", "block_size=64", "batch_size=4"]
    result = execute(
        compose(f"experiment={experiment}", *own, "trainer.max_steps=2", "recipe.warmup_steps=1"), tmp_path / "run"
    )
    assert result["status"] == "finished" and result["steps"] == 2
    published = CONF.parent / "studies" / "published.yaml"
    rows = yaml.safe_load(published.read_text(encoding="utf-8"))["rows"] if published.exists() else {}
    reported = rows[experiment].get("parameters") if experiment in rows else None
    if experiment == "marsol_table1_alibi":
        # the report says that the count is unchanged, yet ALiBi has no table of 32 x 64 learned positions
        assert result["parameters"]["total"] == reported - 32 * 64
    elif reported:
        assert result["parameters"]["total"] == reported


def test_marsols_encoder_does_not_have_the_parameters_that_he_gives() -> None:
    """857,208 is the decoder's 864,011 less the head's 6,803; the encoder that the text describes has fewer."""
    cfg = plain("marsol_classify", "corpus=sample")
    data = SentenceData(load_corpus(cfg["corpus"]), **{key: cfg[key] for key in DATA})
    total = count_parameters(Classify.from_config(cfg, data).model)
    assert total["total"] - total["head"] == 570_304 != 864_011 - total["head"] == 857_208


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_says_how_to_run_it_how_long_that_takes_and_what_to_expect(experiment: str) -> None:
    header = Path(CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    header = "".join(line for line in header.splitlines(keepends=True) if line.startswith("#"))
    assert re.search(rf"# python -m speechformer\.train experiment={experiment} +\(.*(minute|hour).*\)", header)
    assert re.search(r"Expect(, [a-z ]*:)?\s+#?\s*(\d|the steeper|rope|global|no |about)", header), header


SWEEPS = [name for name in EXPERIMENTS if "sweeper" in (CONF / "experiment" / f"{name}.yaml").read_text()]


@pytest.mark.parametrize("experiment", SWEEPS)
def test_every_value_that_an_experiment_sweeps_composes(experiment: str) -> None:
    file = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml"))
    composed = set()
    for key, values in file["hydra"]["sweeper"]["params"].items():  # type: ignore
        for value in [values] if values.startswith("range") else values.split(","):
            if not value.startswith("range"):
                config = plain(experiment, f"{key}={value}")
                check_config(config)
                composed.add((key, value))
                assert config["study"]
    assert len(composed) >= 2
