"""Names of runs: their folder says what differs from the defaults."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf

from speechformer.keys import CONF
from speechformer.runs.identity import identity_settings

MOST_CHARACTERS = 60  # of a folder's name before seed and fingerprint
CHOICES = ("task", "probe", "model", "pattern", "protocol", "corpus")
FIRST = (*CHOICES, "recipe", "dropout", "width", "layers", "heads")  # an experiment sets the others
USUAL = {"full", "paper", "auto", "None"}


def safe(name: str) -> str:
    """Return a name as a part of a path that is valid on any system."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")


def folder_name(config: Mapping[str, Any], fingerprint: str) -> str:
    """Return the name of a run's folder: the choices of the groups, other differences, seed and fingerprint."""
    choices = [safe(name_of(config.get(group)))[:30] for group in (*CHOICES, "study")]
    words = [name for name in choices if name not in USUAL]
    for word in map(safe, differences(config)):
        if len("_".join([*words, word])) <= MOST_CHARACTERS:
            words.append(word)
    return "_".join([*words, f"seed{safe(str(config.get('seed')))[:12]}", fingerprint])


def joined(words: Iterable[str], most: int = MOST_CHARACTERS) -> str:
    """Join those words with "_" that fit into some characters, whole."""
    text = ""
    for word in words:
        longer = f"{text}_{word}" if text else word
        text = longer if len(longer) <= most else text
    return text


def name_of(choice: Any) -> str:
    """Return the name of the choice of a config group."""
    return str(choice.get("name") if isinstance(choice, Mapping) else choice)


def differences(config: Mapping[str, Any]) -> list[str]:
    """Return what differs from the defaults of the run's task, model and pattern, as "key=value" of its last keys."""
    chosen = {group: choice(group, name_of(config.get(group))) for group in ("task", "probe", "model", "pattern")}
    defaults = chosen["task"].get("defaults", [])
    recipe = next((default["override /recipe"] for default in defaults if "override /recipe" in default), "adam")
    resolved = OmegaConf.create({"model": {"name": name_of(config.get("model"))}, "recipe": choice("recipe", recipe)})
    OmegaConf.resolve(resolved)  # a recipe may depend on the model; `config` has the resolver
    merged = OmegaConf.merge(choice(".", "config"), resolved, chosen["probe"], chosen["task"])
    expected: dict[str, Any] = OmegaConf.to_container(merged)  # type: ignore[assignment]
    expected |= {group: chosen[group] for group in ("model", "pattern")}
    unnamed = ("seed", "hydra", "protocol", "corpus", "study")
    keys = [key for key in dict.fromkeys((*FIRST, *expected)) if key not in unnamed]
    settings = {key: config[key] for key in keys if key in config}
    return changes(identity_settings(settings), identity_settings(expected))


@functools.cache
def choice(group: str, name: str) -> dict[str, Any]:
    """Return the content of a choice of a config group; empty if there is none."""
    path = CONF / group / f"{name}.yaml"
    exists = re.fullmatch(r"\w+", name) and path.is_file()
    return OmegaConf.to_container(OmegaConf.load(path)) if exists else {}  # type: ignore[return-value]


def changes(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return "key=value" of the last keys of what differs between two nested mappings."""
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            below = expected.get(key)
            words += changes(value, below if isinstance(below, Mapping) else {})
        elif key not in expected or expected[key] != value:
            words.append(f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return words
