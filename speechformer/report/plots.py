"""The pictures of the report: learning curves, bars, and perplexity over the length of the context.

A variant has the same colour in every picture: it is a function of its settings. The colours are those of Okabe and
Ito 2008 ("Color Universal Design") and of Paul Tol's "muted" scheme; rows of one colour in one table differ in line
style, hatch and marker.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from PIL import Image

from speechformer.report import published
from speechformer.report.results import Row, Run, Table, higher_is_better
from speechformer.report.statistics import Summary
from speechformer.report.tables import comparisons, per_cent

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import patheffects
from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e8ed"
MODELS = {
    "sinusoidal": "#0072B2",
    "learned": "#E69F00",
    "alibi": "#009E73",
    "rope": "#D55E00",
    "relative": "#CC79A7",
    "nope": "#7a7a7a",
    "rnn": "#882255",
    "rnn_attention": "#EE7733",
}
PATTERNS = {
    "window": "#56B4E9",
    "block": "#882255",
    "strided": "#117733",
    "dilated": "#AA4499",
    "global": "#999933",
    "bigbird": "#BBBBBB",
}
OTHER = "#332288"
ALIBI_SCALES = {0.25: "#CC79A7", 0.5: "#E69F00", 1.0: MODELS["alibi"], 1.1: "#332288", 2.0: "#56B4E9", 4.0: "#0072B2"}
MORE: list[tuple[Any, str, str]] = [("-", "", "o"), ((0, (4, 2)), "//", "s"), ((0, (1.5, 1.5)), "..", "^")]
MORE += [((0, (6, 2, 1.5, 2)), "xx", "v"), ((0, (8, 3)), "\\\\", "D")]
OUTLINE = patheffects.withStroke(linewidth=3.5, foreground="white")
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


class Look(NamedTuple):
    """How a variant is drawn."""

    colour: str
    line: Any
    hatch: str
    marker: str


def colour(settings: dict[str, Any]) -> str:
    """The colour of a variant: by pattern where it is not full, else by initialisation where it is not the usual one
    of its task, else by model, and of ALiBi by its scale."""
    model, pattern = str(settings.get("model.name")), str(settings.get("pattern.name"))
    if pattern != "full":
        return PATTERNS.get(pattern, OTHER)
    usual = "xavier" if settings.get("task.name") == "translate" else "torch"
    if settings.get("recipe.init", usual) != usual:
        return OTHER
    if model == "alibi" and settings.get("model.slopes") == "learned":
        return "#882255"
    if model == "alibi":
        return ALIBI_SCALES.get(settings.get("model.scale", 1.0), OTHER)
    return MODELS.get(model, OTHER)


def looks(rows: list[Row]) -> dict[str, Look]:
    """The look of each row of a table, by label: rows of one colour differ in line, hatch and marker."""
    found: dict[str, Look] = {}
    used: dict[str, int] = {}
    for row in rows:
        own = colour(row.settings)
        found[row.label] = Look(own, *MORE[used.setdefault(own, 0) % len(MORE)])
        used[own] += 1
    return found


def axis_label(figure: str, task: str) -> str:
    """The name of a figure with its unit."""
    split, metric = figure.split("_")[:2]
    kinds = {"in_train": ", in train too", "not_in_train": ", not in train"}
    detail = kinds.get(figure.rpartition("_")[2], "")
    split = {"validation": "dev" if task == "translate" else "held-out"}.get(split, split)
    if metric == "accuracy":
        return f"{split} accuracy{detail} (%)"
    if metric == "bleu":
        return f"{split} BLEU"
    return f"{split} perplexity per token" + (" (mean of tests)" if figure.endswith("mean") else "")


def curves(table: Table, path: Path) -> str:
    """Learning curves: mean over seeds, a band from the lowest to the highest, published points as open marks."""
    wanted = ["test_accuracy", "test_accuracy_not_in_train", "validation_accuracy", "train_accuracy"]
    if table.task == "lm":
        wanted = ["test_perplexity_mean", "validation_perplexity", "train_perplexity"]
    if table.task == "translate":
        wanted = ["validation_bleu", "validation_perplexity"]
    if not any(row.curve("test_accuracy_in_train") for row in table.rows):
        wanted = [name for name in wanted if name != "test_accuracy_not_in_train"]  # that is all of them
    wanted = [name for name in wanted if any(row.curve(name) for row in table.rows)]
    if not wanted:
        return ""
    style, theirs = looks(table.rows), False
    figure, axes = plt.subplots(1, len(wanted), figsize=(4.1 * len(wanted) + 0.6, 4.4), squeeze=False)
    for axis, name in zip(axes[0], wanted):
        for row in table.rows:
            theirs = curve(axis, row, name, style[row.label], table.judged) or theirs
        axis.set_xlabel("epoch" if table.task == "classify" else "step")
        if table.task == "lm":
            sizes = {(row.settings["batch_size"], row.settings["block_size"]) for row in table.rows}
            one = f" (of {next(iter(sizes))[0]} × {next(iter(sizes))[1]} tokens)" if len(sizes) == 1 else ""
            axis.set_xlabel(f"step{one}")
        drawn = [value for row in table.rows for values in row.curve(name).values() for value in values]
        if "perplexity" in name and max(drawn) > 2 * min(drawn):
            axis.set_yscale("log")
            subs = (1, 2, 5) if max(drawn) > 20 * min(drawn) else (1, 1.5, 2, 3, 4, 5, 6, 8)
            axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
            axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
            axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_ylabel(axis_label(name, table.task))
    save(figure, axes[0][0], path)
    return "Mean over seeds; band: lowest to highest run" + ("; open marks: published." if theirs else ".")


def curve(axis: Axes, row: Row, name: str, style: Look, judged: bool) -> bool:
    """Draw one row's curve; whether published points were drawn with it."""
    found = {place: Summary(values) for place, values in row.curve(name).items()}
    if not found:
        return False
    x, unit = list(found), per_cent(name)
    means = [unit * at.mean for at in found.values()]
    axis.plot(x, means, color=style.colour, linestyle=style.line, linewidth=1.9, label=row.label)
    low, high = ([unit * at.extremes[k] for at in found.values()] for k in (0, 1))
    axis.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    points = published.curve(row.published, name) if judged and row.published else []
    if points:
        u, v = zip(*points)
        theirs = [unit * value for value in v]
        axis.plot(u, theirs, style.marker, mfc="white", mec=style.colour, mew=1.4, ms=5)
    return bool(points)


def bars(table: Table, path: Path) -> str:
    """Bars of each test's figure and of their mean, with 95 % intervals; published figures as diamonds, the best
    baseline as a line. As Marsol's figure 5."""
    names = {
        "test_accuracy": "all",
        "test_accuracy_in_train": "in train too",
        "test_accuracy_not_in_train": "not in train",
    }
    if table.task == "lm":
        names = {name: name.removeprefix("test_perplexity_") for name in (*table.tests(), table.main_figure)}
    if table.task == "translate":
        names = {"test_bleu": "BLEU", "test_chrf": "chrF"}
    groups = [name for name in names if name in table.figures()]
    rows = [row for row in table.rows if row.values(table.main_figure)]
    if not rows or not groups:
        return ""
    # Where a report chose its perplexities by the test, ours are chosen so too.
    best = table.task == "lm" and table.judged and any(line.theirs.chosen == "best" for line in comparisons(table))
    figure, axis = plt.subplots(figsize=(max(4.6, 1.6 + len(groups) * (0.55 + 0.27 * len(rows))), 4.4))
    width, style, theirs = 0.82 / len(rows), looks(table.rows), False
    for k, row in enumerate(rows):
        for at, name in enumerate(groups):
            values = row.best_values(name) if best else row.values(name)
            if not values:
                continue
            summary, unit = Summary(list(values.values())), per_cent(name)
            x = at + (k - (len(rows) - 1) / 2) * width
            half = (summary.interval[1] - summary.mean) * unit
            axis.bar(
                x,
                summary.mean * unit,
                width * 0.92,
                color=style[row.label].colour,
                hatch=style[row.label].hatch,
                edgecolor="white",
                linewidth=0.5,
                yerr=None if math.isnan(half) else half,
                error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2},
                label=row.label if at == 0 else None,
            )
            end = None
            if table.judged and row.published:
                end = published.final(row.published, name, "best" if best else "last")
            if end is not None:
                label = "" if theirs else "published"
                axis.plot(x, end * unit, "D", mfc="white", mec=INK, mew=1.2, ms=5, zorder=4, label=label)
                theirs = True
    counted = best_baselines(table)
    for run in counted:
        for at, name in enumerate(groups):
            value = run.metrics.get(name)
            if value is not None:
                label = str(run.baseline) if at == 0 else ""
                y = value * per_cent(name)
                line: Any = {"color": INK, "linestyle": (0, (1.5, 1.2)), "linewidth": 1.5, "path_effects": [OUTLINE]}
                axis.hlines(y, at - 0.46, at + 0.46, label=label, **line)
    axis.set_xticks(range(len(groups)), [names[name] for name in groups])
    axis.set_xlim(-0.7, len(groups) - 0.3)
    axis.grid(axis="x", visible=False)
    labels = {
        "classify": ("test accuracy (%)", "test sentences"),
        "lm": ("test perplexity per token", "test text"),
        "translate": ("test score, 0 to 100", "all test sentences"),
    }
    axis.set_ylabel(labels[table.task][0] + (", best of the run" if best else ""))
    axis.set_xlabel(labels[table.task][1])
    if table.task == "classify":
        axis.set_ylim(0, 105)
    save(figure, axis, path)
    extras = ("; diamonds: published" if theirs else "") + ("; dotted: the best baseline" if counted else "")
    which = ", each text's best on test in the course of a run, as published" if best else ""
    many = any(len(row.finished) > 1 for row in rows)
    return f"{'Mean over seeds with its 95 % interval' if many else 'One run each'}{which}{extras}."


def best_baselines(table: Table) -> list[Run]:
    """The baseline that is hardest to beat."""
    able = [run for run in table.baselines if run.metrics.get(table.main_figure) is not None]
    sign = -1 if higher_is_better(table.main_figure) else 1
    return sorted(able, key=lambda run: sign * run.metrics[table.main_figure])[:1]  # type: ignore[operator]


def over_length(table: Table, path: Path) -> str:
    """Test perplexity over the length of the context; the length of training as a filled mark."""
    style = looks(table.rows)
    drawn = {}
    for row in table.rows:
        found = {length: row.at_length(length) for length in table.lengths()}
        drawn[row.label] = {length: Summary(values) for length, values in found.items() if values}
    if not any(len(points) > 1 for points in drawn.values()):
        return ""
    figure, axis = plt.subplots(figsize=(6.5, 4.4))
    for row in table.rows:
        points = drawn[row.label]
        if points:
            own, x = style[row.label], list(points)
            asked = any(row.at_length(length) == [] for length in table.lengths())
            label = row.label + (" (ends here)" if asked and len(points) == 1 else "")
            means = [at.mean for at in points.values()]
            axis.plot(x, means, marker="o", mfc="white", color=own.colour, linestyle=own.line, lw=1.9, label=label)
            trained = row.settings["block_size"]
            if trained in points:
                axis.plot(trained, points[trained].mean, "o", color=own.colour, ms=7)
            low, high = ([at.extremes[k] for at in points.values()] for k in (0, 1))
            axis.fill_between(x, low, high, color=own.colour, alpha=0.18, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(table.lengths(), list(map(str, table.lengths())))
    axis.minorticks_off()
    axis.set_xlabel("context in the test (tokens)")
    axis.set_ylabel("test perplexity per token (mean of tests)")
    save(figure, axis, path)
    return "Filled mark: the context of training; mean over seeds; band: lowest to highest run."


def over_source_length(table: Table, path: Path) -> str:
    """BLEU and chrF over the length of the source."""
    buckets = table.source_lengths()
    if len(buckets) < 2:
        return ""
    style = looks(table.rows)
    shown = {"bleu": "BLEU", "chrf": "chrF"}
    if (
        max((Summary(list(row.values("test_exact").values())).mean for row in table.rows if row.finished), default=0)
        > 0.2
    ):
        shown["exact"] = "translations right to the letter (%)"  # of a toy
    figure, axes = plt.subplots(1, len(shown), figsize=(4.5 * len(shown) + 0.4, 4.4), squeeze=False)
    places = range(len(buckets))
    many = False
    for axis, (name, label) in zip(axes[0], shown.items()):
        for row in table.rows:
            found = [list(row.values(f"test_{name}_at_{bucket}").values()) for bucket in buckets]
            if not all(found):
                continue
            unit = per_cent(name)
            own, sums = style[row.label], [Summary([unit * value for value in values]) for values in found]
            means = [at.mean for at in sums]
            axis.plot(
                places,
                means,
                marker=own.marker,
                mfc="white",
                color=own.colour,
                linestyle=own.line,
                lw=1.9,
                label=row.label,
            )
            low, high = ([at.extremes[k] for at in sums] for k in (0, 1))
            if sums[0].n == 1 and name != "exact":  # one run: what other sentences could have shown
                halves = [row.values(f"test_{name}_interval_at_{bucket}") for bucket in buckets]
                half = [next(iter(values.values()), 0.0) for values in halves]
                low, high = ([mean + sign * width for mean, width in zip(means, half)] for sign in (-1, 1))
            many = many or sums[0].n > 1
            axis.fill_between(places, low, high, color=own.colour, alpha=0.18, linewidth=0)
        axis.set_xticks(places, [f"{bucket}\n({count})" for bucket, count in buckets.items()])
        axis.set_xlabel("words of the source (sentences)")
        axis.set_ylabel(f"test {label}" if name != "exact" else label)
        axis.set_ylim(bottom=0)
    save(figure, axes[0][0], path)
    band = "from the lowest to the highest run" if many else "the 95 % interval over sentences (bootstrap)"
    return f"Mean over seeds, each length on its sentences alone; band: {band}."


def save(figure: Any, first: Axes, path: Path) -> None:
    """Put the legend beside the axes and write the picture."""
    handles, labels = first.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(
            handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.55), bbox_transform=figure.transFigure
        )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    # 256 colours are enough, and a third of the bytes
    Image.open(content).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_all(table: Table, folder: Path) -> list[tuple[Path, str]]:
    """Draw the pictures of a table; their files, and what each shows."""
    drawn = []
    with plt.rc_context(STYLE):
        for draw, kind in (
            (bars, "bars"),
            (over_source_length, "sources"),
            (curves, "curves"),
            (over_length, "lengths"),
        ):
            path = folder / f"{table.name}_{kind}.png"
            caption = draw(table, path)
            if caption:
                drawn.append((path, caption))
    return drawn
