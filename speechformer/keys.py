"""The keys of the config as a user meets them: what each means (`--help`), which one a wrong name stands for, and how
Hydra's grammar wants a value."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_beside = Path(__file__).parent / "conf"  # in an installed package
CONF = _beside if _beside.is_dir() else Path(__file__).parents[1] / "conf"  # in a checkout
GROUPS = ("model", "pattern", "recipe", "protocol", "corpus", "machine", "logger", "probe", "task")
LINE = re.compile(r"( *)([\w.-]+):( [^#]*)?(?:#\s*(.*))?")  # of a YAML file: a key, perhaps a value and a comment


def walk(text: str) -> Iterator[tuple[str, str, re.Match[str] | None]]:
    """Yield the lines of a YAML text, each with its dotted key ("" without one) and the match of `LINE`."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := LINE.fullmatch(line):
            depth = len(match[1])
            above = [*((own, name) for own, name in above if own < depth), (depth, match[2])]
        yield line, ".".join(name for _, name in above) if match else "", match


def read_keys(group: str, choice: str) -> dict[str, str]:
    """Return the dotted keys that a choice of a group sets, with their comments; "" for those without one."""
    text = (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8")
    package = re.match(r"# @package (\w+)", text)
    prefix = "" if package and package[1] == "_global_" else f"{package[1] if package else group}."
    keys = {f"{prefix}{key}": match[4] or "" for _, key, match in walk(text) if match and key != "defaults"}
    for part in re.findall(r"- \w+@(\w+)$", text, re.MULTILINE):  # of corpus=auto
        own = read_keys(group, part)
        keys |= {key.replace(f"{group}.", f"{group}.{part}.", 1): comment for key, comment in own.items()}
    return keys


def describe(yaml: str, choices: Mapping[str, str]) -> str:
    """Add to each line of a config as YAML the comment on its key in `conf/`, for the choice of each group."""
    comments = {key: match[4] for _, key, match in walk((CONF / "config.yaml").read_text("utf-8")) if match}
    for group in GROUPS:
        if choices.get(group):
            comments |= {key: comment for key, comment in read_keys(group, choices[group]).items() if comment}
    notes = ((line, comments.get(key)) for line, key, _ in walk(yaml))
    return "".join(f"{line}  # {note}\n" if note else f"{line}\n" for line, note in notes)


def places() -> dict[str, list[str]]:
    """Return every key of `conf/`, with the choices that have it, "pattern=window"; none if every config has it."""
    known: dict[str, list[str]] = {key: [] for _, key, _ in walk((CONF / "config.yaml").read_text("utf-8")) if key}
    known = {key: [] for key in known if key.split(".")[0] not in ("defaults", "hydra")}
    for group in GROUPS:
        files = sorted((CONF / group).glob("*.yaml"))
        for file in files:
            if file.stem != "auto":
                for key in read_keys(group, file.stem):
                    if key.startswith(f"{group}.") or known.get(key, group == "machine"):
                        known.setdefault(key, []).append(f"{group}={file.stem}")
        known |= {key: [] for key, choices in known.items() if choices == [f"{group}={file.stem}" for file in files]}
    return known


def suggest(key: str) -> str:
    """Return a sentence on the key that a user may have meant by one that the config does not have, or ""."""
    known = places()
    if choices := known.get(key):
        return f"{key} needs {' or '.join(choices)} in the command."
    name = key.rpartition(".")[2].lower()
    names = [*known, *(own.rpartition(".")[2] for own in known)]
    initials = "".join(word[:1] for word in name.split("_")) if "_" in name else name  # learning_rate: lr
    for wanted in (name, initials, *difflib.get_close_matches(name, names, n=1, cutoff=0.7)):
        matches = [own for own in known if wanted in (own, own.rpartition(".")[2]) and own != "recipe.name"]
        if matches and wanted != "name":
            shown = [f"{own} (of {', '.join(known[own])})" if known[own] else own for own in matches]
            return f"Did you mean {' or '.join(shown)}?"
    return ""


def quote(value: str) -> str:
    """Return a text as a quoted value of Hydra's grammar."""
    return '"' + re.sub(r'(\\*)"', r'\1\1\\"', re.sub(r"(\\+)$", r"\1\1", value)) + '"'


def setting(key: str, value: str | Iterable[str]) -> str:
    """Return KEY=VALUE as a word for the shell, with quotes where Hydra's grammar would not take a text as itself."""
    texts = [value] if isinstance(value, str) else list(value)
    items = ",".join(text if parsed(f"x={text}") == text else quote(text) for text in texts)
    return shlex.quote(f"{key}={items if isinstance(value, str) else f'[{items}]'}")


def parsed(override: str) -> object:
    """Return the value of an override, or None if Hydra's grammar does not take it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        return OverridesParser.create().parse_override(override).value()
    except Exception:  # hydra's and antlr's
        return None


def corrected(override: str, sweep: bool = False) -> str:
    """Return an override that Hydra cannot parse with quotes that make it valid, as a word for the shell; or "".

    Args:
        sweep: whether commas outside a list separate the values of a sweep.
    """
    key, equals, value = override.partition("=")
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    items = re.findall(r"""\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^,]*)\s*(?:,|$)""", inner)
    items = [item.strip() for item in items[:-1]] if is_list or sweep else [value.strip()]
    items = [item if parsed(f"x={item}") is not None else quote(item) for item in items]
    own = f"{key}={'[' if is_list else ''}{','.join(items)}{']' if is_list else ''}"
    return shlex.quote(own) if equals and not value.startswith("=") and parsed(own) is not None else ""
