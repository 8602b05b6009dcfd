"""Name the variants of a study in words: by the settings in which they differ."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ABSENT = object()
LONGEST = 100  # characters of a label with all settings; with more, a study's labels leave out the usual ones
USUAL = "the usual settings"


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
        return " ".join(self.overrides.values()) or " ".join(
            override(key, self.settings.get(key)) for key in ("model.name", "pattern.name")
        )


@functools.cache
def content() -> dict[str, Any]:
    """Return `labels.yaml`, which explains itself at its top."""
    return yaml.safe_load((Path(__file__).parent / "labels.yaml").read_text(encoding="utf-8"))


def override(key: str, value: Any) -> str:
    """Return a setting as on the command line."""
    text = json.dumps(value).replace('"', "") if isinstance(value, list) or value is None else str(value)
    return f"{key.removesuffix('.name')}={text}"


def group_of(key: str) -> str:
    """Return the key that chooses the config group of a setting: `pattern.name` for `pattern.window`."""
    return f"{key.partition('.')[0]}.name"


def is_option(key: str) -> bool:
    """Return whether a setting is one that only some models or patterns have."""
    return key.startswith(("model.", "pattern.")) and not key.endswith(".name")


def differing(variant: Variant, variants: Sequence[Variant]) -> Iterator[str]:
    """Yield the keys in which a variant differs.

    An option of a model or pattern is compared among the variants that have it. The size of an ensemble and the main
    option of a pattern (`window 3`, not `window`) always count.
    """
    always = {
        "ensemble",
        *(content()["shown"] if len({v.settings.get("pattern.name") for v in variants}) > 1 else ()),
    }
    for key in sorted(variant.settings, key=lambda key: not key.endswith(".name")):
        group = group_of(key)
        similar = (v for v in variants if key == group or v.settings.get(group) == variant.settings.get(group))
        if key in always or any(v.settings.get(key, ABSENT) != variant.settings[key] for v in similar):
            yield key


def in_words(setting: str, names: Mapping[str, str]) -> str:
    """Return the name of a setting `key=value`: one of `names`, that of labels.yaml, or the words of its key."""
    key, _, value = setting.partition("=")
    known, keys = {**content()["settings"], **names}, content()["keys"]
    if setting in known:
        return known[setting]
    if key in ("model", "pattern"):
        return value
    return keys[key].format(value) if key in keys else f"{key.rpartition('.')[2].replace('_', ' ')} {value}"


def joined(words: Iterable[str]) -> str:
    """Return words as a list, without repeats and without those that another one begins with."""
    texts = list(dict.fromkeys(words))
    return ", ".join(text for text in texts if not any(other.startswith(f"{text} ") for other in texts))


def usual_settings(variants: Sequence[Variant]) -> dict[str, Any]:
    """Return the value that more than half of the variants have, of each setting of which there is one.

    Options of models and patterns count among the variants that have them; elsewhere ABSENT is a value.
    """
    usual: dict[str, Any] = {}
    for key in dict.fromkeys(key for variant in variants for key in variant.overrides):
        values = [v.settings.get(key, ABSENT) for v in variants if key in v.settings or not is_option(key)]
        value = max(values, key=values.count)
        if 2 * values.count(value) > len(values):
            usual[key] = value
    return usual


def unusual(
    variant: Variant, variants: Sequence[Variant], usual: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[str]:
    """Yield, in words, the settings of a variant that are not usual."""
    for key in dict.fromkeys(key for other in variants for key in other.overrides):
        value, group = usual.get(key, ABSENT), group_of(key)
        if key in variant.settings:
            is_shown = key in content()["shown"] and variant.settings.get(group) != usual.get(group)
            if variant.settings[key] != value or is_shown:
                yield in_words(override(key, variant.settings[key]), names)


def name_variants(variants: Sequence[Variant], names: Mapping[str, str] | None = None) -> str:
    """Set the overrides, words and label of each variant.

    Labels have all settings that differ. Where one would be longer than 100 characters, they have the unusual
    settings alone.

    Args:
        names: labels of settings (`model=alibi`) and of variants.

    Returns:
        The usual settings in words; "" if labels do not leave them out.
    """
    names, usual_words = names or {}, ""
    for variant in variants:
        variant.overrides = {key: override(key, variant.settings[key]) for key in differing(variant, variants)}
        variant.words = {key: in_words(text, names) for key, text in variant.overrides.items()}
    usual = usual_settings(variants)
    labels = [
        joined(variant.words.values() or (in_words(text, names) for text in variant.name.split()))
        for variant in variants
    ]
    differences = [joined(unusual(variant, variants, usual, names)) for variant in variants]
    for variant, words in zip(variants, differences):
        variant.is_usual = not words
    if any(len(label) > LONGEST for label in labels):
        labels = [words or USUAL for words in differences]
        settings = (override(key, value) for key, value in usual.items() if value is not ABSENT)
        usual_words = joined(in_words(setting, names) for setting in settings)
    labels = [names.get(label, names.get(variant.name, label)) for variant, label in zip(variants, labels)]
    for variant, label in zip(variants, labels):
        variant.label = label if labels.count(label) == 1 else f"{label} ({variant.name})"
    return usual_words
