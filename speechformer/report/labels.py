"""Names of rows in words, and what `--reference`, `--label`, `--order` and `--title` change."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from speechformer.errors import UserError, unknown
from speechformer.report import published
from speechformer.runs.identity import added_to

if TYPE_CHECKING:
    from speechformer.report.results import Row, Table

ABSENT = object()
LONGEST = 100  # characters of a label with all settings; with more, a table's labels leave out the usual ones
USUAL = "the usual settings"


class Options(NamedTuple):
    """How a report shows its rows.

    Attributes:
        reference: the row that the others of its table are compared with.
        labels: "NAME=LABEL", where NAME is a row or a setting such as `model=alibi`.
        order: rows that come first, in this order.
        title: of the page.
        formats: of the figures, beside PNG.
        baselines: a folder with baselines, which are added to runs on the same corpus.
    """

    reference: str | None = None
    labels: Sequence[str] = ()
    order: Sequence[str] = ()
    title: str | None = None
    formats: Sequence[str] = ("png", "svg", "pdf")
    baselines: Path | None = None


@functools.cache
def content() -> dict[str, dict[str, str]]:
    """Return the file: `settings`, `keys` and `baselines`, explained at its top."""
    return yaml.safe_load((Path(__file__).parent / "labels.yaml").read_text(encoding="utf-8"))


def override(key: str, value: Any) -> str:
    """Return a setting as on the command line."""
    text = json.dumps(value).replace('"', "") if isinstance(value, list) or value is None else str(value)
    return f"{key.removesuffix('.name')}={text}"


def differing(rows: Sequence[Row], row: Row) -> list[str]:
    """Return the keys in which a row differs; an option of a model or pattern counts among rows that have it.

    The size of an ensemble is always one.
    """

    def differs(key: str) -> bool:
        if key == "ensemble":
            return True
        kind = f"{key.partition('.')[0]}.name"
        similar = [other for other in rows if key == kind or other.settings.get(kind) == row.settings.get(kind)]
        return any(other.settings.get(key, ABSENT) != row.settings[key] for other in similar)

    return [key for key in sorted(row.settings, key=lambda key: not key.endswith(".name")) if differs(key)]


def in_words(setting: str, own: Mapping[str, str]) -> str:
    """Return the name of a setting `key=value`: one of `own`, that of labels.yaml, or the words of its key."""
    key, _, value = setting.partition("=")
    names, keys = {**content()["settings"], **own}, content()["keys"]
    if setting in names:
        return names[setting]
    if key in ("model", "pattern"):
        return value
    return keys[key].format(value) if key in keys else f"{key.rpartition('.')[2].replace('_', ' ')} {value}"


def joined(words: Iterable[str]) -> str:
    """Return words as a list, without repeats and without those that another one begins with."""
    texts = list(dict.fromkeys(words))
    return ", ".join(text for text in texts if not any(other.startswith(f"{text} ") for other in texts))


def usual_settings(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the value that more than half of the rows have, of each setting of which there is one.

    Options of models and patterns count among the rows that have them; elsewhere ABSENT is a value.
    """
    usual: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row.overrides):
        values = [row.settings.get(key, ABSENT) for row in rows if key in row.settings or not is_option(key)]
        value = max(values, key=values.count)
        if 2 * values.count(value) > len(values):
            usual[key] = value
    return usual


def is_option(key: str) -> bool:
    """Return whether a setting is one that only some models or patterns have."""
    return key.startswith(("model.", "pattern.")) and not key.endswith(".name")


def unusual(row: Row, rows: Sequence[Row], usual: Mapping[str, Any], own: Mapping[str, str]) -> Iterator[str]:
    """Yield, in words, the settings of a row that are not usual, and the usual ones that it is without."""
    defaults = added_to(row.settings.get("task.name"))
    for key in dict.fromkeys(key for row in rows for key in row.overrides):
        value, kind = usual.get(key, ABSENT), f"{key.partition('.')[0]}.name"
        if key in row.settings:
            if row.settings[key] != value:
                yield in_words(override(key, row.settings[key]), own)
        elif value is not ABSENT and key in defaults:
            if not is_option(key) and not defaults[key]:
                yield f"without {in_words(override(key, value), own)}"
            elif not is_option(key) or row.settings.get(kind) in [
                o.settings.get(kind) for o in rows if key in o.settings
            ]:
                yield in_words(override(key, defaults[key]), own)


def name_rows(rows: Sequence[Row], own: Mapping[str, str] | None = None) -> str:
    """Set the overrides of each row and its label: as published, or in words; `own` names settings and rows.

    If a label with all settings would be longer than LONGEST, labels have the unusual ones alone.

    Returns:
        The usual settings in words; "" if labels do not leave them out.
    """
    own = own or {}
    names = [published.content()["rows"][row.published]["label"] if row.published else "" for row in rows]
    all_words, left_out = [], ""
    for row in rows:
        row.overrides = {key: override(key, row.settings[key]) for key in differing(rows, row)}
        row.words = {key: in_words(text, own) for key, text in row.overrides.items()}
        settings = list(row.overrides.values())
        settings = settings or [override(key, row.settings[key]) for key in ("model.name", "pattern.name")]
        row.name = " ".join(settings)
        all_words.append(joined(in_words(text, own) for text in settings))
    usual = usual_settings(rows)
    differences = [joined(unusual(row, rows, usual, own)) for row in rows]
    for row, words in zip(rows, differences):
        row.is_usual = not words
    if any(len(words) > LONGEST for words in all_words):
        all_words = [words or USUAL for words in differences]
        left_out = joined(in_words(override(key, value), own) for key, value in usual.items() if value is not ABSENT)
    labels = []
    for row, name, words in zip(rows, names, all_words):
        label = name if name and names.count(name) == 1 else f"{name}: {words}" if name else words
        labels.append(own.get(label, own.get(row.name, label)))
    for row, label in zip(rows, labels):
        row.label = label if labels.count(label) == 1 else f"{label} ({row.name})"
    return left_out


def arrange(tables: Sequence[Table], options: Options) -> None:
    """Apply the options to the tables.

    Raises:
        UserError: no table has such a row or setting.
    """
    own = dict(parse_label(text, tables) for text in options.labels)
    if own:
        for table in tables:
            table.usual = name_rows(table.rows, own)
    wanted = options.order or ([] if options.reference is None else [options.reference])
    for name in [*options.order, *([] if options.reference is None else [options.reference])]:
        check_row(name, tables)
    for table in tables:
        table.rank()
        first = [row for name in wanted if (row := find_row(table, name))]
        table.rows.sort(key=lambda row: first.index(row) if row in first else len(first))
        reference = find_row(table, options.reference) if options.reference is not None else None
        table.reference = reference or table.reference


def parse_label(text: str, tables: Sequence[Table]) -> tuple[str, str]:
    """Return the setting or row of `NAME=LABEL` and the label; a name may have "=" in it, as `model=alibi`."""
    rows = [row for table in tables for row in table.rows]
    names = {name for row in rows for name in (row.label, row.name)}
    names |= {override(key, value) for row in rows for key, value in row.settings.items()}
    for place in reversed([match.start() for match in re.finditer("=", text)]):
        name, label = text[:place].strip(), text[place + 1 :].strip()
        if name in names and label:
            return name, label
    raise UserError(
        f"--label {text}: expected NAME=LABEL, where NAME is a setting such as model=alibi or a row: "
        f"{', '.join(dict.fromkeys(row.label for row in rows))}."
    )


def find_row(table: Table, name: str) -> Row | None:
    """Return the row of a table with this label, these overrides, or this setting alone; None without one."""
    rows = [row for row in table.rows if name in (row.label, row.name, row.published)]
    rows = rows or [row for row in table.rows if name in row.overrides.values()]
    return rows[0] if len(rows) == 1 else None


def check_row(name: str, tables: Sequence[Table]) -> None:
    """Raise a UserError unless some table has this row."""
    rows = [row for table in tables for row in table.rows]
    if not any(find_row(table, name) for table in tables):
        similar = [row.label for row in rows if name in row.overrides.values()]
        if similar:
            raise UserError(f"{name} is the setting of several rows; name one of them: {', '.join(similar)}.")
        raise unknown("The report", "row", name, dict.fromkeys(row.label for row in rows))
