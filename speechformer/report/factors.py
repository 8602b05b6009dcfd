"""The figure of a table whose rows differ in one or two settings: lines over a numeric one, else a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FormatStrFormatter

from speechformer.report.labels import content
from speechformer.report.results import Row, Table
from speechformer.report.style import INK, Axes, add_legend, axis_label, panels, short, styles, wrapped
from speechformer.report.tables import number, scale

Values = list[Any]  # of a factor, by row


def factors(rows: Sequence[Row]) -> dict[str, Values]:
    """Return the settings in which rows differ, those that change together once; {} if some row lacks one of them."""
    values: dict[str, Values] = {}
    for key in dict.fromkeys(key for row in rows for key in row.overrides):
        if any(key not in row.settings for row in rows):
            return {}
        column = [row.settings[key] for row in rows]
        parts = [[column.index(value) for value in column], *([own.index(v) for v in own] for own in values.values())]
        if parts[0] not in parts[1:]:
            values[key] = column
    return values


def is_numeric(values: Values) -> bool:
    """Return whether there are three different numbers or more."""
    return len({*map(str, values)}) > 2 and all(type(value) in (int, float) for value in values)


def factors_figure(table: Table) -> tuple[Any, str] | None:
    """Draw the main metrics over the two settings in which the rows differ, or over one that is numeric."""
    rows = [row for row in table.rows if row.values(table.metric)]
    values = factors(rows)
    metrics = [name for name in dict.fromkeys([table.metric, *table.report["compare"]]) if table.has(name)]
    ordered = sorted(values, key=lambda key: (not is_numeric(values[key]), -len({*map(str, values[key])})))
    if not metrics or len(ordered) not in (1, 2) or (len(ordered) == 1 and not is_numeric(values[ordered[0]])):
        return None
    keys = {key for row in rows for key in row.overrides}
    if len(ordered) == 1 and sum(is_numeric([row.settings[key] for row in rows]) for key in keys) > 1:
        return None  # settings that were drawn at random, not one after the other
    cells = {tuple(str(values[key][place]) for key in ordered): row for place, row in enumerate(rows)}
    if len(cells) < len(rows) or (len(ordered) == 2 and len(cells) in [len({*own}) for own in zip(*cells)]):
        return None  # more differs than these, or one of them follows from the other
    lines = is_numeric(values[ordered[0]]) and (len(ordered) == 1 or len({*map(str, values[ordered[1]])}) <= 8)
    draw = draw_lines if lines else draw_heat_map
    return draw(table, rows, {key: values[key] for key in ordered}, metrics)


def name_of(key: str) -> str:
    """Return the name of a factor for an axis."""
    key = key.removesuffix(".name")
    return content()["keys"].get(key, "").replace("{}", "").strip() or short(key.rpartition(".")[2].replace("_", " "))


def draw_lines(
    table: Table, rows: Sequence[Row], values: dict[str, Values], metrics: Sequence[str]
) -> tuple[Any, str]:
    """Draw each metric over the first factor, with a line for each value of the second one."""
    key, *others = values
    figure, axes = panels(len(metrics), 5.0, 4.2)
    second = values[others[0]] if others else [None] * len(rows)
    groups = {str(value): [row for row, own in zip(rows, second) if own == value] for value in second}
    looks = styles([own[0] for own in groups.values()])
    for axis, metric in zip(axes, metrics):
        for group, style in zip(groups.values(), looks):
            points = {row.settings[key]: own for row in group if (own := row.summary(metric))}
            for at, own in points.items():
                dots: dict[str, Any] = {"alpha": 0.5, "ms": 5, "mew": 0}
                axis.plot([at] * own.n, scale(metric) * own.values, ".", color=style.colour, **dots)
                interval = [scale(metric) * end for end in own.confidence_interval]
                axis.plot([at, at], interval, color=style.colour, lw=1.2)
            x = sorted(points)
            look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
            look["label"] = wrapped(group[0].words[others[0]]) if others else None
            axis.plot(x, [scale(metric) * points[at].mean for at in x], lw=1.9, **look)
        set_ticks(axis, sorted(set(values[key])))
        axis.set(xlabel=axis.get_xlabel() or name_of(key), ylabel=wrapped(axis_label(metric), 28))
    if others:
        add_legend(figure, axes[0])
    return figure, f"Mean over seeds by {name_of(key)}. Dots: runs. Bars: 95 % confidence interval of the mean."


def set_ticks(axis: Axes, values: Values) -> None:
    """Put ticks at the values of a factor, on a logarithmic scale if they span more than a factor of eight."""
    if values[0] > 0 and values[-1] > 8 * values[0]:
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    if len(values) <= 8:
        names = [f"{value:g}" for value in values]
        axis.set_xticks(values, names)
        axis.tick_params(axis="x", rotation=40 if sum(map(len, names)) > 20 else 0)


def draw_heat_map(
    table: Table, rows: Sequence[Row], values: dict[str, Values], metrics: Sequence[str]
) -> tuple[Any, str]:
    """Draw each metric as colours and numbers, with a row for each value of one factor and a column of the other."""
    down, across = values
    places = [dict(zip(map(str, values[key]), (row.words[key] for row in rows))) for key in values]
    names = [list(own) for own in places]
    size = (1.9 + 0.85 * len(names[1]), 1.5 + 0.42 * len(names[0]))
    figure, axes = panels(len(metrics), *size)
    for axis, metric in zip(axes, metrics):
        means = np.full([len(own) for own in names], np.nan)
        for row, *own in zip(rows, values[down], values[across]):
            if summary := row.summary(metric):
                means[tuple(name.index(str(value)) for name, value in zip(names, own))] = summary.mean
        best = np.nanmax(means) if table.report["higher_is_better"] else np.nanmin(means)
        axis.imshow(scale(metric) * means, cmap="cividis", aspect="auto")
        for place, mean in np.ndenumerate(means):
            text = number(metric, mean) if not np.isnan(mean) else "–"
            dark = mean < (np.nanmin(means) + np.nanmax(means)) / 2
            weight = "bold" if mean == best else "normal"
            axis.text(
                place[1], place[0], text, ha="center", va="center", color="white" if dark else INK, weight=weight
            )
        for place_names, ticks in zip(places, (axis.set_yticks, axis.set_xticks)):
            ticks(range(len(place_names)), [wrapped(text, 16) for text in place_names.values()])
        axis.tick_params(axis="x", rotation=0 if len(names[1]) < 4 else 40, length=0)
        axis.set_title(axis_label(metric))
        axis.grid(visible=False)
    return figure, f"Mean over seeds by {name_of(down)} and {name_of(across)}. Bold: best."
