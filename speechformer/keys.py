"""The files of `conf/`: their keys, the one that a wrong name stands for, and values quoted for Hydra's grammar."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_beside = Path(__file__).parent / "conf"  # in an installed package
CONF = _beside if _beside.is_dir() else Path(__file__).parents[1] / "conf"  # in a checkout
# With the package `hydra_plugins`, which Hydra searches when it composes its first config
sys.path.append(str(Path(__file__).parent / "sweeps" / "plugins"))
GROUPS = (
    "model",
    "pattern",
    "attention",
    "recipe",
    "protocol",
    "corpus",
    "logger",
    "probe",
    "task",
)  # whose keys have their name


def load_plain(file: Path) -> Any:
    """Load a file of `conf/` as plain data."""
    return OmegaConf.to_container(OmegaConf.load(file))


def dotted(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested options."""
    for name, value in options.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")


def suggest(key: str) -> str:
    """Return a sentence on the key that a user may have meant by one that the config does not have, or ""."""
    choices: dict[str, list[str]] = {known: [] for known in dotted(load_plain(CONF / "config.yaml"))}
    for group in GROUPS:
        choices[group] = []
        for file in sorted((CONF / group).glob("*.yaml")):
            options = load_plain(file)
            for name in dotted(options.get(group, options), f"{group}."):
                choices.setdefault(name, []).append(f"{group}={file.stem}")
    if needed := choices.get(key):
        group, _, option = key.partition(".")
        swept = group in ("model", "pattern", "attention")
        sweep = f" A sweep can give it to one choice alone: '{group}=A,{{name:B,{option}:VALUE}}'." if swept else ""
        return f" {key} needs {' or '.join(needed)} in the command.{sweep}"
    ends = {known: known.rpartition(".")[2] for known in choices if not known.endswith("name")}
    name = key.rpartition(".")[2]
    initials = "".join(word[:1] for word in name.split("_"))  # learning_rate: lr
    for wanted in (name, initials, *difflib.get_close_matches(name, ends.values(), n=1, cutoff=0.7)):
        if close := [known for known, end in ends.items() if end == wanted]:
            shown = [f"{name} (of {', '.join(of)})" if 0 < len(of := choices[name]) < 5 else name for name in close]
            return f" Did you mean {' or '.join(shown)}?"
    return ""


def quote(text: str) -> str:
    """Return a text in quotes, as a value of Hydra's grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


def setting(key: str, value: str | Iterable[str]) -> str:
    """Return KEY=VALUE, of a text or a list of texts, as a word for the shell."""
    text = quote(value) if isinstance(value, str) else f"[{','.join(map(quote, value))}]"
    return shlex.quote(f"{key}={text}")
