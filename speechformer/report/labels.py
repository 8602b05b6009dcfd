"""Names of rows in words, and what `--reference`, `--label`, `--order` and `--title` change."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from speechformer.errors import UserError, unknown
from speechformer.report import published

if TYPE_CHECKING:
    from speechformer.report.results import Row, Table

ABSENT = object()


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
    text = json.dumps(value).replace('"', "") if isinstance(value, list) else str(value)
    return f"{key.removesuffix('.name')}={text}"


def differing(rows: Sequence[Row], row: Row) -> list[str]:
    """Return the keys in which a row differs; an option of a model or pattern counts among rows that have it."""

    def differs(key: str) -> bool:
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


def name_rows(rows: Sequence[Row], own: Mapping[str, str] | None = None) -> None:
    """Set the overrides of each row and its label: as published, or in words; `own` names settings and rows."""
    own = own or {}
    names = [published.content()["rows"][row.published]["label"] if row.published else "" for row in rows]
    labels = []
    for row, name in zip(rows, names):
        row.overrides = {key: override(key, row.settings[key]) for key in differing(rows, row)}
        settings = list(row.overrides.values())
        settings = settings or [override(key, row.settings[key]) for key in ("model.name", "pattern.name")]
        row.words = {key: in_words(text, own) for key, text in row.overrides.items()}
        row.name = " ".join(settings)
        texts = list(dict.fromkeys(in_words(setting, own) for setting in settings))
        words = ", ".join(text for text in texts if not any(other.startswith(f"{text} ") for other in texts))
        label = name if name and names.count(name) == 1 else f"{name}: {words}" if name else words
        labels.append(own.get(label, own.get(row.name, label)))
    for row, label in zip(rows, labels):
        row.label = label if labels.count(label) == 1 else f"{label} ({row.name})"


def arrange(tables: Sequence[Table], options: Options) -> None:
    """Apply the options to the tables.

    Raises:
        UserError: no table has such a row or setting.
    """
    own = dict(parse_label(text, tables) for text in options.labels)
    if own:
        for table in tables:
            name_rows(table.rows, own)
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
