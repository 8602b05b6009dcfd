"""The map of `task=probe`: accuracy by encoding, probe and length, as a figure and a page to explore (index.html)."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speechformer.config import as_plain, compose, value_of
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError
from speechformer.report import probe_claims
from speechformer.report.labels import in_words, override
from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.report.page import picture
from speechformer.report.plots import Figure, write
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Summary
from speechformer.report.style import HERE, INK, plt
from speechformer.report.tables import NONE, mean_and_sd, number
from speechformer.report.tuning import TUNING, tuned_keys

AXES = ("model", "pattern", "layers", "tuned", "more")
SEEDS = 5  # of a model, at least, to say that it differs from another
TEMPLATE = Path(__file__).parent / "probe_map.html"
Cell = dict[str, Any]


def content(tables: Sequence[Table], folders: Sequence[Path]) -> list[Cell]:
    """Return a cell for each row and length of the probes: where it stands, its accuracy, and its runs.

    Accuracies are fractions. `mean` and `interval` (95 %, of the mean) are over seeds; `chance` is a guess among the
    symbols that could stand there. `longest` is the longest in training. A length beyond the positions of a model has
    no runs; a row without finished runs has neither, and its `state` says why.

    A tuned study also runs rows as by default. Where the choice is the default, both are the same runs, which then
    have a cell in both places.
    """
    keys = tuned_keys(folders)
    probes = [table for table in tables if table.task == "probe" and not table.study.endswith(TUNING)]
    several = len({(table.study, table.protocol) for table in probes}) > 1
    placed = []
    for table in probes:
        about = f"{table.study or 'no study'}, {table.protocol}" if several else ""
        placed += [(place(row, keys, about), row) for row in table.rows]
    untuned = {key_of(own) for own, _ in placed if not own["tuned"]}
    same = [({**own, "tuned": False}, row) for own, row in placed if own["tuned"]]
    placed += [(own, row) for own, row in same if key_of(own) not in untuned and is_default(row.runs[0], keys)]
    cells: dict[tuple, Cell] = {}
    for own, row in placed:
        if key_of(own) in {key[:-1] for key in cells}:
            own["more"] = f"{own['more']} {row.name}".strip()  # so that no two rows share a cell
        for length in row.settings["probe.test_lengths"]:
            cells[(*key_of(own), length)] = {**own, "length": length, **measured(row, length)}
    return [*cells.values()]


def key_of(cell: Cell) -> tuple:
    """Return where a row stands."""
    return tuple(cell[axis] for axis in (*AXES, "probe"))


def explicit(run: Run) -> set[str]:
    """Return the settings that the command of a run overrides."""
    return {word.lstrip("+").partition("=")[0] for word in run.result.get("overrides") or []}


def keys_of(run: Run, tuned: Mapping[Path, set[str]]) -> set[str]:
    """Return the settings that the study of a run has tuned."""
    return set().union(*(keys for folder, keys in tuned.items() if run.folder.is_relative_to(folder)))


def is_default(run: Run, tuned: Mapping[Path, set[str]]) -> bool:
    """Return whether the settings that a study chose for a run are those of the config without them."""
    keys = keys_of(run, tuned)
    words = run.result.get("overrides") or []
    try:
        config = as_plain(compose(word for word in words if word.lstrip("+").partition("=")[0] not in keys))
    except UserError:  # of another version
        return False
    return all(value_of(config, key) == run.config.get(key) for key in keys)


def place(row: Row, tuned: Mapping[Path, set[str]], about: str) -> Cell:
    """Return where a row stands on the axes; an encoding and a pattern have the options in which they differ."""
    outside = set().union(*(explicit(run) for run in row.runs if not keys_of(run, tuned)))
    chosen = ("layers", *(set().union(*tuned.values()) - outside))  # recipe.init_std goes with recipe.init
    words = {key: text for key, text in row.words.items() if not key.startswith(chosen)}
    own: Cell = {}
    for group in ("model", "pattern"):
        name = in_words(override(group, row.settings[f"{group}.name"]), {})
        own[group] = ", ".join([name, *(text for key, text in words.items() if is_option(key, group))])
    rest = [text for key, text in words.items() if key.partition(".")[0] not in ("model", "pattern")]
    own |= {"layers": row.settings["layers"], "tuned": any(keys_of(run, tuned) & explicit(run) for run in row.runs)}
    own["more"] = ", ".join(filter(None, [about, *rest]))
    return {**own, "probe": row.settings["probe.name"], "longest": row.settings["probe.max_length"]}


def is_option(key: str, group: str) -> bool:
    """Return whether a key is an option of a config group."""
    return key.startswith(f"{group}.") and key != f"{group}.name"


def measured(row: Row, length: int) -> Cell:
    """Return the accuracies of a row on a length, and what a reader may ask about them."""
    metric = f"test_accuracy_length_{length}"
    values, state = row.values(metric), {"state": row.state, "finished": bool(row.finished)}
    if not values:
        return {**state, "runs": []}
    summary = Summary(values.values())
    runs = [about(run, metric) for run in row.finished if run.value(metric) is not None]
    chance = row.finished[0].metrics.get(f"chance_accuracy_length_{length}")
    interval = [round(end, 4) for end in summary.confidence_interval] if summary.varies else None
    numbers = {"mean": round(summary.mean, 4), "interval": interval, "chance": round(chance or 0, 4)}
    exact = row.summary(metric.replace("accuracy", "exact"))
    numbers["exact"] = None if exact is None else round(exact.mean, 4)
    return {**state, **numbers, "command": row.finished[0].command, "runs": runs, "parts": parts(row, metric)}


def about(run: Run, metric: str) -> Cell:
    """Return the seed, accuracy, commit and curve (steps and accuracy at the lengths of training) of a run."""
    split = "test" if run.metrics.get("validation_accuracy") is None else "validation"
    points = ((point["step"], point.get(f"{split}_accuracy")) for point in run.result.get("curve", []))
    curve = [(step, round(value, 4)) for step, value in points if value is not None]
    own = {"seed": run.seed, "value": round(run.metrics[metric] or 0, 4)}
    return {**own, "commit": run.result.get("commit"), "curve": curve}


def parts(row: Row, metric: str) -> list[tuple[str, float]]:
    """Return the mean accuracy by gap, place or depth, where the probe has them."""
    names = [name for name in row.metrics if name.startswith(f"{metric}_")]
    means = ((name.removeprefix(f"{metric}_").replace("_", " "), row.summary(name)) for name in names)
    return [(name, round(own.mean, 4)) for name, own in means if own]


def skill(cell: Mapping[str, Any]) -> float:
    """Return how far an accuracy is from chance to 1, from 0 to 1; NaN without runs."""
    if not cell["runs"]:
        return math.nan
    return float(np.clip((cell["mean"] - cell["chance"]) / max(1 - cell["chance"], 1e-9), 0, 1))


def write_page(cells: Sequence[Cell], title: str, output: OutputFolder) -> None:
    """Write `index.html`, which needs no other file."""
    template = TEMPLATE.read_text(encoding="utf-8")
    content = {"cells": cells, "start": {axis: usual(cells)[0][0][axis] for axis in AXES}}
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script
    digest = hashlib.sha256(script[1].replace("DATA", data).encode()).digest()
    parts = {"TITLE": html.escape(title), "DIGEST": base64.b64encode(digest).decode(), "DATA": data}
    page = re.sub("|".join(parts), lambda match: parts[match[0]], template)
    output.file("index.html").write_text(page, encoding="utf-8")


def usual(cells: Sequence[Cell], by: str = "model") -> tuple[list[Cell], str]:
    """Return the cells that differ in one axis alone, and what they have in common besides the model.

    Of all such groups it is the one with the most values of the axis that have runs; of equal ones, a tuned one.
    """
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell[axis] for axis in AXES if axis != by), []).append(cell)

    def size(group: list[Cell]) -> tuple[int, bool, int]:
        measured = [cell for cell in group if cell["runs"]]
        return len({cell[by] for cell in measured}), by != "tuned" and group[0]["tuned"], len(measured)

    own = max(groups.values(), key=size)
    return own, f"{own[0]['pattern']}, {own[0]['layers']} layers, {'tuned' if own[0]['tuned'] else 'as by default'}"


def draw(cells: Sequence[Cell]) -> Figure:
    """Draw the map of the encodings."""
    cells, about = usual(cells)
    table = {(cell["model"], cell["probe"], cell["length"]): cell for cell in cells}
    columns = sorted({(cell["probe"], cell["length"]): cell["length"] > cell["longest"] for cell in cells}.items())
    skills: dict[str, list[float]] = {}
    for cell in cells:
        skills.setdefault(cell["model"], []).append(skill(cell))
    rows = sorted(skills, key=lambda row: -float(np.mean(np.nan_to_num(skills[row]))))
    size = (2.6 + 0.36 * len(columns), 1.7 + 0.32 * len(rows))
    figure, axis = plt.subplots(figsize=size)
    values = [[skill(table[row, *at]) if (row, *at) in table else math.nan for at, _ in columns] for row in rows]
    axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        at = (rows[y], *columns[x][0])
        text = "" if at not in table else as_text(table[at])
        axis.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if value <= 0.5 else INK)
    axis.set_yticks(range(len(rows)), rows)
    ticks = axis.set_xticks(range(len(columns)), [str(length) for (_, length), _ in columns], fontsize=7)
    for tick, (_, beyond) in zip(ticks, columns):
        tick.label1.set_fontweight("bold" if beyond else "normal")
    axis.tick_params(length=0)
    axis.grid(visible=False)
    names = [probe for (probe, _), _ in columns]
    for probe in dict.fromkeys(names):
        first, count = names.index(probe), names.count(probe)
        axis.text(first + (count - 1) / 2, -0.75, probe.replace("_", "\n"), ha="center", va="bottom", fontsize=8)
        axis.axvline(first - 0.5, color="white", lw=3)
    axis.set_xlabel("length of the test")
    caption = (
        f"Accuracy per symbol in per cent, mean over seeds ({about}). Bold lengths are longer than any in training. "
        "Colour: from chance (dark) to 100 % (bright). A dash: beyond the positions of the model. A cross: "
        "no run has finished."
    )
    return figure, caption


def lengths_table(cells: Sequence[Cell], by: str, lengths: Mapping[str, int]) -> Markdown:
    """Return accuracies on each probe at one length, mean ± sd over seeds, a row for each value of an axis.

    The best ones above chance come first.
    """
    at = {(cell[by], cell["probe"]): cell for cell in cells if lengths.get(cell["probe"]) == cell["length"]}
    values = {value: [at.get((value, probe)) for probe in lengths] for value in dict.fromkeys(key[0] for key in at)}
    order = sorted(values, key=lambda value: -sum(np.nan_to_num(skill(cell)) for cell in values[value] if cell))
    rows = [[str(value), *(in_table(cell) if cell else NONE for cell in values[value])] for value in order]
    return markdown_table(["", *(f"{probe.replace('_', ' ')}, {length}" for probe, length in lengths.items())], rows)


def separations(cells: Sequence[Cell], beyond: bool, without: Sequence[str] = ()) -> Markdown:
    """Return the best and the worst model on each probe, and how many pairs of models it separates.

    A pair is separated if the 95 % confidence intervals of its means do not overlap. A model whose seeds agree has a
    point in place of an interval, and two points are not compared. Models with fewer than five seeds are left out.
    Tests are of the longest length of training, or of the longest one beyond it.

    Args:
        without: names of models that do not count, such as those without attention.
    """
    rows = []
    cells = [cell for cell in cells if cell["model"] not in without]
    for probe in dict.fromkeys(cell["probe"] for cell in cells):
        own = [cell for cell in cells if cell["probe"] == probe and (cell["length"] > cell["longest"]) == beyond]
        longest = max((cell["length"] for cell in own), default=0)
        own = [cell for cell in own if cell["length"] == longest and len(cell["runs"]) >= SEEDS]
        if len(own) > 1:
            ends = sorted(tuple(cell["interval"] or (cell["mean"], cell["mean"])) for cell in own)
            pairs = [*itertools.combinations(ends, 2)]
            apart = sum(
                first[1] < second[0] and (first[0], second[0]) != (first[1], second[1]) for first, second in pairs
            )
            extremes = [most(own, key=lambda cell: cell["mean"]) for most in (max, min)]
            named = [f"{cell['model']} {in_table(cell)}" for cell in extremes]
            at = f"{probe.replace('_', ' ')}, {longest}" + (f" (trained to {own[0]['longest']})" if beyond else "")
            rows.append([at, *named, f"{apart} of {len(pairs)}"])
    return markdown_table(["probe, length", "best", "worst", "pairs separated"], rows)


def tuning_gains(cells: Sequence[Cell], beyond: bool) -> Markdown:
    """Return what tuning does to models on each probe, at the longest length of training, or the longest beyond.

    A change is the mean tuned less the mean as by default, of models for which other settings were chosen.
    """
    rows, tuned = [], usual(cells)[0] if cells else []
    at = {(key_of(cell), cell["length"]): cell for cell in cells}
    for probe in dict.fromkeys(cell["probe"] for cell in tuned):
        own = [cell for cell in tuned if cell["probe"] == probe and (cell["length"] > cell["longest"]) == beyond]
        longest = max((cell["length"] for cell in own), default=0)
        both = [
            (at.get((key_of({**cell, "tuned": False}), longest)), cell) for cell in own if cell["length"] == longest
        ]
        pairs = [(old, new) for old, new in both if old and old["runs"] and new["runs"] and new["tuned"]]
        changed = {
            new["model"]: new["mean"] - old["mean"]
            for old, new in pairs
            if without_threads(old["command"]) != without_threads(new["command"])
        }
        if len(pairs) > 1:
            average = [
                number("test_accuracy", float(np.mean([cell["mean"] for cell in column]))) for column in zip(*pairs)
            ]
            named = [NONE, NONE]
            if changed:
                extremes = [most(changed, key=changed.__getitem__) for most in (max, min)]
                named = [f"{model} {number('test_accuracy', changed[model], True)}" for model in extremes]
            chosen = f"{len(changed)} of {len(pairs)}"
            rows.append([f"{probe.replace('_', ' ')}, {longest}", *average, chosen, *named])
    names = ["probe, length", "as by default", "tuned", "other settings chosen", "largest change", "smallest change"]
    return markdown_table(names, rows)


def without_threads(command: str) -> str:
    """Return a command without its number of threads, which is no setting of a model."""
    return re.sub(r" threads=\d+", "", command)


def in_table(cell: Cell) -> str:
    """Return mean ± sd of an accuracy in per cent, or why there is none, as in the figure."""
    values = [run["value"] for run in cell["runs"]]
    return mean_and_sd("test_accuracy", Summary(values)) if values else as_text(cell)


def as_text(cell: Cell) -> str:
    """Return the accuracy in per cent; a dash beyond the positions of a model, a cross if no run has finished."""
    return f"{100 * cell['mean']:.0f}" if cell["runs"] else "–" if cell["finished"] else "×"


def sections(
    cells: Sequence[Cell], title: str | None, output: OutputFolder, formats: Sequence[str] | None
) -> Iterator[tuple[str, Markdown]]:
    """Write the page of the probes, if there are any, and yield the part of the report on them."""
    if not any(cell["runs"] for cell in cells):
        return
    write_page(cells, title or "Encodings and patterns on ten probes", output)
    yield "", Markdown("## Map of the probes")
    yield "", Markdown("[The map to explore](index.html) has the runs, curve and command of each cell.")
    if formats is not None:
        with plt.style.context(HERE / "figures.mplstyle"):
            figure, caption = draw(cells)
            path = write(figure, output, "probes", formats)
        yield "", picture("Accuracy by encoding, probe and length", path.relative_to(output.path).as_posix(), caption)
    yield from probe_claims.sections(usual(cells)[0])
