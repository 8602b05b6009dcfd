"""Name the variants of a study in words: by the settings in which they differ."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from speechformer.runs.identity import LATER

ABSENT = object()
LONGEST = 100  # characters of a label with all settings; with more, a study's labels leave out the usual ones


@dataclass(eq=False)
class Variant:
    """One configuration, which several seeds share.

    Attributes:
        settings: the part of the config that decides it, with dotted keys.
        label: its name in words, unique in its study.
        overrides: the settings in which it differs from the others, by key, as on the command line.
        words: the names of these settings by key.
        missing: seeds that other variants of the study have.
        is_usual: whether it has no setting that most variants do not have.
    """

    settings: dict[str, Any]
    label: str = ""
    overrides: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    is_usual: bool = False

    @property
    def name(self) -> str:
        """The overrides as one text; those of model and pattern if it differs in nothing."""
        names = (override(key, self.settings[key]) for key in ("model.name", "pattern.name"))
        return " ".join(self.overrides.values() or names)


@functools.cache
def content() -> dict[str, Any]:
    """Return `labels.yaml`, which explains itself at its top."""
    return yaml.safe_load((Path(__file__).parent / "labels.yaml").read_text(encoding="utf-8"))


def override(key: str, value: Any) -> str:
    """Return a setting as on the command line."""
    text = json.dumps(value).replace('"', "") if isinstance(value, list) or value is None else str(value)
    return f"{key.removesuffix('.name')}={text}"


def in_words(setting: str, names: Mapping[str, str]) -> str:
    """Return the name of a setting `key=value`: one of `names`, that of labels.yaml, or the words of its key."""
    key, _, value = setting.partition("=")
    known, keys = {**content()["settings"], **names}, content()["keys"]
    plain = "{}" if key in ("model", "pattern", "attention") else key.rpartition(".")[2].replace("_", " ") + " {}"
    return known.get(setting) or keys.get(key, plain).format(value)


def joined(words: Iterable[str]) -> str:
    """Return words as a list, without repeats and without those that another one begins with."""
    texts = list(dict.fromkeys(words))
    return ", ".join(text for text in texts if not any(other.startswith(f"{text} ") for other in texts))


def differing(variant: Variant, variants: Sequence[Variant]) -> Iterator[str]:
    """Yield the keys in which a variant differs, the choices of config groups first.

    An option of a model or pattern is compared among the variants that have it. The size of an ensemble and the main
    option of a pattern (`window 3`, not `window`) always count.
    """
    several_patterns = len({v.settings["pattern.name"] for v in variants}) > 1
    for key, value in sorted(variant.settings.items(), key=lambda item: not item[0].endswith(".name")):
        choice = f"{key.partition('.')[0]}.name"
        others = (v.settings for v in variants)
        if key != choice:
            others = (own for own in others if own.get(choice) == variant.settings.get(choice))
        always = key == "ensemble" or (several_patterns and key in content()["shown"])
        if always or any(own.get(key, ABSENT) != value for own in others):
            yield key


def name_variants(variants: Sequence[Variant], names: Mapping[str, str]) -> str:
    """Set the overrides, words and label of each variant.

    Labels have all settings that differ. Where one would be longer than 100 characters, they have the unusual
    settings alone.

    Args:
        names: labels of settings (`model=alibi`) and of variants.

    Returns:
        The usual settings in words; "" if labels do not leave them out.
    """
    # where some vary what came later, the others had its default
    for key in LATER.keys() & set().union(*(variant.settings for variant in variants)):
        for variant in variants:
            variant.settings.setdefault(key, LATER[key])
    for variant in variants:
        variant.overrides = {key: override(key, variant.settings[key]) for key in differing(variant, variants)}
        variant.words = {key: in_words(text, names) for key, text in variant.overrides.items()}
    usual: dict[str, str] = {}
    for key in dict.fromkeys(key for variant in variants for key in variant.overrides):
        having = [variant.words[key] for variant in variants if key in variant.words]
        if 2 * having.count(word := max(having, key=having.count)) > len(variants):
            usual[key] = word
    labels = [joined(v.words.values() or (in_words(setting, names) for setting in v.name.split())) for v in variants]
    unusual = [joined(word for key, word in v.words.items() if usual.get(key) != word) for v in variants]
    is_long = any(len(label) > LONGEST for label in labels)
    for variant, label, differences in zip(variants, labels, unusual):
        text = (differences or "the usual settings") if is_long else label
        variant.is_usual, variant.label = not differences, names.get(text, names.get(variant.name, text))
    labels = [variant.label for variant in variants]
    for variant in variants:
        if labels.count(variant.label) > 1:
            variant.label += f" ({variant.name})"
    return joined(usual.values()) if is_long else ""
