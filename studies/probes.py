"""The studies of probes: accuracy by encoding or mechanism, probe and length, in tables, a figure and a page.

python -m studies.probes outputs/sweeps/mine    write index.html and the figure for other runs of task=probe
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from speechformer.config import as_plain, compose
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.report.figures import INK, plt, style, write
from speechformer.report.labels import Variant, in_words, override
from speechformer.report.load import Run, Study, build_studies, read_runs
from speechformer.report.statistics import Effect, Summary, contrast, holm
from speechformer.report.tables import NONE, found_below, mean_and_sd, number, state
from speechformer.runs.folder import read_json
from speechformer.runs.identity import LATER
from studies.results import HERE, PageError, read_yaml

AXES = ("model", "attention", "pattern", "layers", "tuned", "more")
SEEDS = 5  # of a model, at least, to say that it differs from another
ACCURACY = "test_accuracy"  # for the number of digits
TITLE = "Encodings and patterns on ten probes"
OWN_POSITIONS = "positions of the mechanism"
Cell = dict[str, Any]
Rows = list[list[str]]


def read_cells(folder: Path, of: str | None = None) -> list[Cell]:
    """Return a cell for each variant and length of the probes: where it stands, its accuracy, and its runs.

    With `of`, only the study of that name counts.

    Accuracies are fractions. `mean` and `interval` (95 %, of the mean) are over seeds; `chance` is a guess among the
    symbols that could stand there. `longest` is the longest in training. A length beyond the positions of a model has
    no runs; a variant without finished runs has neither, and its `state` says why.

    A tuned study also runs variants as by default. Where the choice is the default, both are the same runs, which
    have a cell in both places.

    Where mechanisms have different positions, each those of its own, these are no axis but `positions` of a cell.
    """
    tuned = {
        file.parent: {word.partition("=")[0] for point in (read_json(file) or {})["points"] for word in point}
        for file in found_below([folder], "tuned.json")
    }
    studies, _ = build_studies(read_runs([folder])[0])
    studies = [study for study in studies if study.task == "probe" and not study.study.endswith("_tuning")]
    studies = [study for study in studies if of in (None, study.study)]
    several = len({(study.study, study.protocol["name"]) for study in studies}) > 1
    placed = []
    for study in studies:
        about = f"{study.study or 'no study'}, {study.protocol['name']}" if several else ""
        placed += [(place(study, variant, tuned, about), study, variant) for variant in study.variants]
    models = defaultdict[str, set[str]](set)
    for cell, *_ in placed:
        models[cell["attention"]].add(cell["model"])
    if len(set().union(*models.values())) > 1 and len(models) > 1 and all(len(own) == 1 for own in models.values()):
        for cell, *_ in placed:
            cell |= {"positions": cell["model"], "model": OWN_POSITIONS}
    untuned = {key_of(cell) for cell, *_ in placed if not cell["tuned"]}
    for cell, study, variant in [*placed]:
        again = {**cell, "tuned": False}
        if cell["tuned"] and key_of(again) not in untuned and is_default(all_runs(study, variant)[0], tuned):
            placed.append((again, study, variant))
    cells: dict[tuple, Cell] = {}
    for cell, study, variant in placed:
        if key_of(cell) in {key[:-1] for key in cells}:
            cell["more"] = f"{cell['more']} {variant.name}".strip()  # so that no two variants share a cell
        for length in variant.settings["probe.test_lengths"]:
            cells[(*key_of(cell), length)] = {**cell, "length": length, **measured(study, variant, length)}
    return [*cells.values()]


def all_runs(study: Study, variant: Variant) -> list[Run]:
    """Return the runs of a variant, finished or not."""
    folders = set(study.runs.loc[study.runs["variant"] == variant.label, "folder"])
    return [run for run in study.results if str(run.folder) in folders]


def key_of(cell: Cell) -> tuple:
    """Return where a variant stands."""
    return tuple(cell[axis] for axis in (*AXES, "probe"))


def overridden(run: Run) -> set[str]:
    """Return the settings that the command of a run overrides."""
    return {word.lstrip("+").partition("=")[0] for word in run.result.get("overrides") or []}


def tuned_keys(run: Run, tuned: Mapping[Path, set[str]]) -> set[str]:
    """Return the settings that the study of a run has tuned."""
    return set().union(*(keys for folder, keys in tuned.items() if run.folder.is_relative_to(folder)))


def is_default(run: Run, tuned: Mapping[Path, set[str]]) -> bool:
    """Return whether the settings that a study chose for a run are those of the config without them."""
    keys = tuned_keys(run, tuned)
    words = run.result.get("overrides") or []
    try:
        config = as_plain(compose([word for word in words if word.lstrip("+").partition("=")[0] not in keys]))
    except UserError:  # of another version
        return False
    chosen = OmegaConf.create(config)
    return all(OmegaConf.select(chosen, key) == run.config.get(key) for key in keys)


def mechanism(variant: Variant) -> str:
    """Return the name of the attention of a variant, with the options in which it differs and that are not usual."""
    settings = variant.settings
    layers = settings.get("attention.layers") or [settings.get("attention.name", LATER["attention.name"])]
    changed = (key for key in variant.words if key.startswith("attention.") and settings[key] != LATER.get(key))
    options = (variant.words[key] for key in changed if key not in ("attention.name", "attention.layers"))
    return ", ".join([named(layers), *options])


def named(layers: Sequence[str]) -> str:
    """Return the name of an attention of one or several layers in words."""
    return ", then ".join(in_words(f"attention={layer}", {}) for layer in layers)


def place(study: Study, variant: Variant, tuned: Mapping[Path, set[str]], about: str) -> Cell:
    """Return where a variant stands on the axes; encodings and patterns have the options in which they differ."""
    runs = all_runs(study, variant)
    outside = set().union(*(overridden(run) for run in runs if not tuned_keys(run, tuned)))
    chosen = ("layers", *(set().union(*tuned.values()) - outside))  # recipe.init_std goes with recipe.init
    words = {key: text for key, text in variant.words.items() if not key.startswith(chosen)}
    cell: Cell = {}
    for group in ("model", "pattern"):
        name = in_words(override(group, variant.settings[f"{group}.name"]), {})
        options = (text for key, text in words.items() if key.startswith(f"{group}.") and key != f"{group}.name")
        cell[group] = ", ".join([name, *options])
    cell |= {"attention": mechanism(variant), "layers": variant.settings["layers"]}
    cell["tuned"] = any(tuned_keys(run, tuned) & overridden(run) for run in runs)
    rest = [text for key, text in words.items() if key.partition(".")[0] not in AXES]
    cell["more"] = ", ".join(filter(None, [about, *rest]))
    cell |= {"probe": variant.settings["probe.name"], "longest": variant.settings["probe.max_length"]}
    longer = variant.settings.get("task.longer", 1)  # than in training, the rows of the curve
    return cell | ({"longer": longer} if longer > 1 else {})


def measured(study: Study, variant: Variant, length: int) -> Cell:
    """Return the accuracies of a variant on a length, and what a reader may ask about them."""
    metric, finished = f"test_accuracy_length_{length}", study.finished_runs(variant.label)
    summary = study.summary(variant.label, metric)
    shared = {"state": state(study, variant), "finished": bool(finished)}
    if summary is None:
        return {**shared, "runs": []}
    exact = study.summary(variant.label, metric.replace("accuracy", "exact"))
    chance = finished[0].metrics.get(f"chance_accuracy_length_{length}")
    names = [name for name in finished[0].metrics if name.startswith(f"{metric}_")]  # by gap, place or depth
    parts = (
        (name.removeprefix(f"{metric}_").replace("_", " "), study.summary(variant.label, name)) for name in names
    )
    return {
        **shared,
        "mean": round(summary.mean, 8),
        "interval": [round(end, 4) for end in summary.confidence_interval] if summary.varies else None,
        "chance": round(chance or 0, 4),
        "exact": None if exact is None else round(exact.mean, 4),
        "command": finished[0].command,
        "runs": [about_run(run, metric) for run in finished if run.metrics.get(metric) is not None],
        "parts": [(name, round(own.mean, 4)) for name, own in parts if own],
    }


def about_run(run: Run, metric: str) -> Cell:
    """Return the seed, accuracy, commit and curve (steps and accuracy on held-out rows) of a run."""
    split = "test" if run.metrics.get("validation_accuracy") is None else "validation"
    points = ((point["step"], point.get(f"{split}_accuracy")) for point in run.result.get("curve", []))
    curve = [(step, round(value, 4)) for step, value in points if value is not None]
    value = round(run.metrics[metric] or 0, 8)
    return {"seed": run.seed, "value": value, "commit": run.result.get("commit"), "curve": curve}


def skill(cell: Mapping[str, Any] | None) -> float:
    """Return how far an accuracy is from chance to 1, from 0 to 1; NaN without runs."""
    if cell is None or not cell["runs"]:
        return math.nan
    return float(np.clip((cell["mean"] - cell["chance"]) / max(1 - cell["chance"], 1e-9), 0, 1))


def rows_of(cells: Sequence[Cell]) -> str:
    """Return what the rows are: mechanisms, if there are more of them than encodings."""
    return max(("model", "attention"), key=lambda axis: len({cell[axis] for cell in cells}))


def usual(cells: Sequence[Cell], by: str | None = None) -> list[Cell]:
    """Return the cells that differ in one axis alone, by default in that of `rows_of`.

    Of all such groups it is the one with the most values of the axis that have runs; of equal ones, a tuned one.
    """
    by, groups = by or rows_of(cells), dict[tuple, list[Cell]]()
    for cell in cells:
        groups.setdefault(tuple(cell[axis] for axis in AXES if axis != by), []).append(cell)

    def size(group: list[Cell]) -> tuple[int, bool, int]:
        having = [cell for cell in group if cell["runs"]]
        return len({cell[by] for cell in having}), by != "tuned" and group[0]["tuned"], len(having)

    return max(groups.values(), key=size)


def in_table(cell: Cell | None) -> str:
    """Return mean ± sd of an accuracy in per cent; a dash beyond the positions of a model, a cross without a run."""
    if cell and cell["runs"]:
        return mean_and_sd(ACCURACY, Summary(run["value"] for run in cell["runs"]))
    return NONE if cell is None or cell["finished"] else "×"


def at_longest(cells: Sequence[Cell], beyond: bool) -> Iterator[tuple[str, list[Cell]]]:
    """Yield each probe with its cells at the longest length of training, or the longest beyond it."""
    for probe in sorted({cell["probe"] for cell in cells}):
        own = [cell for cell in cells if cell["probe"] == probe and (cell["length"] > cell["longest"]) == beyond]
        longest = max((cell["length"] for cell in own), default=0)
        yield f"{words(probe)}, {longest}", [cell for cell in own if cell["length"] == longest]


def words(probe: str) -> str:
    """Return the name of a probe in words."""
    return probe.replace("_", " ")


# Tables


def accuracies(cells: Sequence[Cell], by: str, fixed: Mapping[str, Any], lengths: Mapping[str, int]) -> Rows:
    """Return accuracies on each probe at one length, a row for each value of an axis, the best above chance first.

    Args:
        fixed: values of axes, such as {"layers": 3, "tuned": False}.
    """
    chosen = [cell for cell in cells if all(cell[axis] == value for axis, value in fixed.items())]
    chosen = [cell for cell in chosen if lengths.get(cell["probe"]) == cell["length"]]
    if missing := [p for p in lengths if not any(cell["runs"] for cell in chosen if cell["probe"] == p)]:
        raise PageError(f"there is no run of probe={missing[0]} at length {lengths[missing[0]]}.")
    at = {(cell[by], cell["probe"]): cell for cell in usual(chosen, by)}
    names = dict.fromkeys(value for value, _ in at)
    order = sorted(names, key=lambda name: -sum(np.nan_to_num(skill(at.get((name, probe)))) for probe in lengths))
    rows = [[str(name), *(in_table(at.get((name, probe))) for probe in lengths)] for name in order]
    return [["", *(f"{words(probe)}, {length}" for probe, length in lengths.items())], *rows]


def separations(cells: Sequence[Cell], beyond: bool, without: Sequence[str]) -> Rows:
    """Return the best and the worst model on each probe, and how many pairs of models it separates.

    A pair is separated if its means differ at 5 % by Welch's test, after Holm's correction over all pairs of the
    table. Two models whose seeds all agree are not compared. Models with fewer than five seeds are left out.

    Args:
        without: names of models that are no part of pairs, such as those without attention; they stand beside.
    """
    rows = [["probe, length", "best", "worst", *without, "chance", "pairs separated"]]
    p_values, counts = list[float](), []
    for at, models in at_longest(usual(cells), beyond):
        beside = {cell["model"]: in_table(cell) for cell in models}
        own = [cell for cell in models if cell["model"] not in without and len(cell["runs"]) >= SEEDS]
        if len(own) > 1:
            effects = [welch(*pair) for pair in itertools.combinations(own, 2)]
            p_values += [effect.p for effect in effects if effect]
            counts.append(len(effects))
            extremes = [most(own, key=lambda cell: cell["mean"]) for most in (max, min)]
            named = [f"{cell['model']} {in_table(cell)}" for cell in extremes]
            trained = f" (trained to {own[0]['longest']})" if beyond else ""
            others = [beside.get(name, NONE) for name in without]
            rows.append([at + trained, *named, *others, number(ACCURACY, own[0]["chance"])])
    corrected = iter(holm(p_values))
    for row, count in zip(rows[1:], counts):
        row.append(f"{sum(p < 0.05 for p in itertools.islice(corrected, count))} of {count}")
    return rows


def welch(cell: Cell, other: Cell) -> Effect | None:
    """Return the mean of a cell less that of another, whose seeds count as independent; None without runs."""
    first, second = ([run["value"] for run in own["runs"]] for own in (cell, other))
    return contrast([(1, dict(enumerate(first))), (-1, dict(enumerate(second, len(first))))])


def tuning_gains(cells: Sequence[Cell], beyond: bool) -> Rows:
    """Return what tuning does to models on each probe, at the longest length of training, or the longest beyond.

    A change is the mean tuned less the mean as by default, of models for which other settings were chosen.
    """
    rows = [["probe, length", "as by default", "tuned", "change", "other settings chosen", "largest", "smallest"]]
    at, by = {(key_of(cell), cell["length"]): cell for cell in cells}, rows_of(cells)
    for name, own in at_longest(usual(cells), beyond):
        both = [(at.get((key_of({**cell, "tuned": False}), cell["length"])), cell) for cell in own]
        pairs = [(old, new) for old, new in both if old and old["runs"] and new["runs"] and new["tuned"]]
        changed = {
            new[by]: new["mean"] - old["mean"]
            for old, new in pairs
            if re.sub(r" threads=\d+", "", old["command"]) != re.sub(r" threads=\d+", "", new["command"])
        }
        if len(pairs) > 1:
            means = [float(np.mean([cell["mean"] for cell in column])) for column in zip(*pairs)]
            extremes = [most(changed, key=changed.__getitem__) for most in (max, min)] if changed else []
            named = [f"{row} {number(ACCURACY, changed[row], True)}" for row in extremes] or [NONE, NONE]
            shown = [*(number(ACCURACY, mean) for mean in means), number(ACCURACY, means[1] - means[0], True)]
            rows.append([name, *shown, f"{len(changed)} of {len(pairs)}", *named])
    return rows


def retuned(cells: Sequence[Cell], again: Sequence[Cell], probe: str, length: int) -> Rows:
    """Return accuracies as by default, with the settings that were chosen, and with those chosen `again`."""
    at = {(key_of(cell), cell["length"]): cell for cell in cells}
    rows = [[f"{words(probe)}, {length}", "as by default", "tuned with one seed", "tuned with three seeds"]]
    for cell in sorted(again, key=lambda cell: cell["model"]):
        if cell["tuned"] and (cell["probe"], cell["length"]) == (probe, length):
            before = (at.get((key_of({**cell, "tuned": tuned}), length)) for tuned in (False, True))
            rows.append([cell["model"], *map(in_table, before), in_table(cell)])
    return rows


def longer(cells: Sequence[Cell]) -> Rows:
    """Return where each comparison of `claims.yaml: longer` is supported and contradicted, by Welch's test.

    One seed has no test, nor have values that do not vary over seeds.
    """
    own = usual(cells)
    table = {(cell["probe"], cell["length"], cell["model"]): cell for cell in own}
    beyond = sorted({(cell["probe"], cell["length"]) for cell in own if cell["length"] > cell["longest"]})
    compared = []
    for at in beyond:
        for claim in read_yaml("claims.yaml")["longer"]:
            better, worse = (in_words(f"model={claim[side]}", {}) for side in ("better", "worse"))
            effect = welch(*(table.get((*at, model), {"runs": []}) for model in (better, worse)))
            if effect is not None:
                compared.append((f"{words(at[0])} {at[1]}", f"{better} − {worse}", effect))
    found: dict[str, dict[str, list[str]]] = {}
    for (at_name, names, effect), p in zip(compared, holm([effect.p for *_, effect in compared])):
        verdict = "not tested" if math.isnan(p) else "supported" if effect.mean > 0 else "contradicted"
        verdict = "inconclusive" if p > 0.05 else verdict
        found.setdefault(names, {}).setdefault(verdict, []).append(at_name)
    rows = [["claim: above 0", "supported", "contradicted", "inconclusive", "not tested"]]
    for names, by_verdict in found.items():
        counts = Counter({verdict: len(places) for verdict, places in by_verdict.items()})
        named = [", ".join(by_verdict.get(verdict, ())) or NONE for verdict in rows[0][1:3]]
        rows.append([names, *named, *(str(counts[verdict]) for verdict in rows[0][3:])])
    return rows


# The map


def draw(cells: Sequence[Cell]) -> tuple[Any, str]:
    """Draw the map of the encodings or mechanisms."""
    cells, by = usual(cells), rows_of(cells)
    table = {(cell[by], cell["probe"], cell["length"]): cell for cell in cells}
    columns = sorted({(cell["probe"], cell["length"]): cell["length"] > cell["longest"] for cell in cells}.items())
    skills: dict[str, list[float]] = {}
    for cell in cells:
        skills.setdefault(cell[by], []).append(skill(cell))
    rows = sorted(skills, key=lambda row: -float(np.mean(np.nan_to_num(skills[row]))))
    figure, axis = plt.subplots(figsize=(2.6 + 0.25 * len(columns), 1.7 + 0.32 * len(rows)), layout="constrained")
    values = [[skill(table.get((row, *at))) for at, _ in columns] for row in rows]
    axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        shown = table.get((rows[y], *columns[x][0]))
        text = f"{100 * shown['mean']:.0f}" if shown and shown["runs"] else in_table(shown) if shown else ""
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
    axis.set_xlabel("length of the test; bold: longer than any in training.\nColour: from chance (dark) to 100 %")
    return figure, "Accuracy per symbol in per cent, mean over seeds."


def write_map(cells: Sequence[Cell], output: Path, title: str = TITLE) -> None:
    """Write `index.html`, which needs no other file, and `figures/probes.png` into a folder."""
    (output / "figures").mkdir(parents=True, exist_ok=True)
    template = (HERE / "probe_map.html").read_text(encoding="utf-8")
    start = {**{axis: usual(cells)[0][axis] for axis in AXES}, "rows": rows_of(cells)}
    content = {"cells": cells, "start": start}
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script
    digest = hashlib.sha256(script[1].replace("DATA", data).encode()).digest()
    parts = {"TITLE": html.escape(title), "DIGEST": base64.b64encode(digest).decode(), "DATA": data}
    page = re.sub("|".join(parts), lambda match: parts[match[0]], template)
    (output / "index.html").write_text(page, encoding="utf-8")
    with style():
        write(draw(cells)[0], output.joinpath, "probes", ["png"])


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m studies.probes", description="Draw the map of runs of task=probe.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="searched for result.json files")
    parser.add_argument("--output", type=Path, default=Path("outputs/probes"), help="folder (outputs/probes)")
    arguments = parser.parse_args()

    def command() -> None:
        cells = read_cells(arguments.folder)
        if not any(cell["runs"] for cell in cells):
            raise UserError(f"{arguments.folder} has no finished run of task=probe.")
        write_map(cells, arguments.output, f"Probes of {arguments.folder}")
        print(arguments.output / "index.html")

    run_command(command)


if __name__ == "__main__":
    main()
