"""The pictures of the report: learning curves, bars, and perplexity over the length of the context.

A variant has the same colour in every picture: it is a function of its settings. The colours are those of Okabe and
Ito 2008 ("Color Universal Design") and of Paul Tol's "muted" scheme; what they do not tell apart, line style, hatch
and marker do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from speechformer.report import published
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import summarise
from speechformer.report.tables import length_figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e8ed"
MODELS = {
    "sinusoidal": "#0072B2",
    "learned": "#E69F00",
    "alibi": "#009E73",
    "rope": "#D55E00",
    "relative": "#CC79A7",
    "nope": "#7a7a7a",
}
PATTERNS = {
    "window": "#56B4E9",
    "block": "#882255",
    "strided": "#D55E00",
    "dilated": "#CC79A7",
    "global": "#999933",
    "bigbird": "#000000",
}
OTHER = "#332288"
ALIBI_SCALES = {0.25: "#c7e9c0", 0.5: "#8fd19e", 1.0: MODELS["alibi"], 1.1: "#117a5b", 2.0: "#0b5d45", 4.0: "#04301f"}
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
    "savefig.dpi": 130,
}


class Look(NamedTuple):
    """How a variant is drawn."""

    colour: str
    line: Any = "-"
    hatch: str = ""
    marker: str = "o"


def look(settings: dict[str, Any]) -> Look:
    """The look of a variant: colour by pattern where it is not full, else by model (and ALiBi's scale, dark for
    steep); line, hatch and marker by what is left."""
    model, pattern = settings.get("model.name"), settings.get("pattern.name")
    colour = MODELS.get(str(model), OTHER)
    if model == "alibi":
        colour = ALIBI_SCALES.get(settings.get("model.scale", 1.0), colour)
        if settings.get("model.slopes") == "learned":
            return Look("#DDCC77", (0, (5, 1.5)), "..", "s")
    if pattern != "full":
        colour = PATTERNS.get(str(pattern), OTHER)
        if settings.get("pattern.window", 5) == 3 and pattern == "window":
            return Look(colour, (0, (4, 2)), "//", "s")
    if settings.get("recipe.init") not in ("torch", None):
        return Look(OTHER, (0, (4, 2)), "//", "s")
    return Look(colour)


def per_cent(figure: str) -> float:
    return 100.0 if "accuracy" in figure else 1.0


def axis_label(figure: str) -> str:
    """The name of a figure with its unit."""
    split, metric = figure.split("_")[:2]
    kinds = {"seen": ", in train too", "unseen": ", not in train"}
    detail = kinds.get(figure.rpartition("_")[2], "")
    split = {"validation": "held-out"}.get(split, split)
    if metric == "accuracy":
        return f"{split} accuracy{detail} (%)"
    return f"{split} perplexity per token" + (" (mean of tests)" if figure.endswith("mean") else "")


def curves(table: Table, path: Path) -> bool:
    """Learning curves: mean over seeds, a band from the lowest to the highest, published points as open marks."""
    wanted = ["test_accuracy", "test_accuracy_unseen", "validation_accuracy", "train_accuracy"]
    if table.task == "lm":
        wanted = ["test_perplexity_mean", "validation_perplexity", "train_perplexity"]
    have = {name for row in table.rows for run in row.finished for point in run.result["curve"] for name in point}
    wanted = [name for name in wanted if name in have]
    if not wanted:
        return False
    figure, axes = plt.subplots(1, len(wanted), figsize=(4.1 * len(wanted) + 0.6, 4.4), squeeze=False)
    for axis, name in zip(axes[0], wanted):
        for row in table.rows:
            curve(axis, row, name)
        axis.set_xlabel("epoch" if table.task == "classify" else "step (16 windows of 32 tokens)")
        if table.task == "lm":
            sizes = {(row.settings["batch_size"], row.settings["block_size"]) for row in table.rows}
            one = f" (of {next(iter(sizes))[0]} × {next(iter(sizes))[1]} tokens)" if len(sizes) == 1 else ""
            axis.set_xlabel(f"step{one}")
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
            axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
            axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_ylabel(axis_label(name))
    save(figure, axes[0][0], path)
    return True


def curve(axis: Axes, row: Row, name: str) -> None:
    found = row.curve(name)
    if not found:
        return
    style = look(row.settings)
    y = [summarise(values) for values in found.values()]
    x, unit = list(found), per_cent(name)
    axis.plot(
        x, [unit * at.mean for at in y], color=style.colour, linestyle=style.line, linewidth=1.9, label=row.label
    )
    low, high = ([unit * at.extremes[k] for at in y] for k in (0, 1))
    axis.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    if row.published and row.finished[0].config["protocol.name"] == "paper":
        theirs = their_curve(row.published, name)
        if theirs:
            u, v = zip(*theirs)
            axis.plot(
                u, [value * per_cent(name) for value in v], style.marker, mfc="white", mec=style.colour, mew=1.4, ms=5
            )


def their_curve(row: str, name: str) -> list[tuple[float, float]]:
    """Published points; a mean over the tests is the mean of the published tests."""
    direct = published.curve(row, name)
    if direct or not name.endswith("perplexity_mean"):
        return direct
    tests = [published.curve(row, f"test_perplexity_{test}") for test in ("obama", "wbush", "hbush")]
    return [
        (at[0][0], sum(value for _, value in at) / 3)
        for at in zip(*tests)
        if all(place == at[0][0] for place, _ in at)
    ]


def bars(table: Table, path: Path) -> bool:
    """Bars of each test's figure and of their mean, with 95 % intervals; published figures as diamonds, the best
    baseline as a line. As Marsol's figure 5."""
    if table.task == "classify":
        groups = ["test_accuracy", "test_accuracy_seen", "test_accuracy_unseen"]
        groups = [name for name in groups if name in table.figures()]
        if "test_accuracy_seen" not in groups:
            groups = groups[:1]  # all are unseen
        names = {"test_accuracy": "all", "test_accuracy_seen": "in train too", "test_accuracy_unseen": "not in train"}
    else:
        groups = [name for name in table.figures() if name.startswith("test_perplexity_")]
        groups = [*groups[1:], groups[0]]
        names = {name: name.removeprefix("test_perplexity_") for name in groups}
    rows = [row for row in table.rows if row.finished]
    if not rows:
        return False
    best = "best" in {line.chosen for row in rows if row.published for line in published.final_figures(row.published)}
    if table.protocol != "paper":
        best = False
    figure, axis = plt.subplots(figsize=(max(6.5, 1.6 + len(groups) * (0.55 + 0.27 * len(rows))), 4.4))
    width = 0.82 / len(rows)
    for k, row in enumerate(rows):
        style = look(row.settings)
        for at, name in enumerate(groups):
            values = row.best_values(name) if best else row.values(name)
            if not values:
                continue
            summary = summarise(list(values.values()))
            unit = per_cent(name)
            x = at + (k - (len(rows) - 1) / 2) * width
            half = (summary.interval[1] - summary.mean) * unit
            axis.bar(
                x,
                summary.mean * unit,
                width * 0.92,
                color=style.colour,
                hatch=style.hatch,
                edgecolor="white",
                linewidth=0.5,
                yerr=None if summary.n < 2 else half,
                error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2},
                label=row.label if at == 0 else None,
            )
            for theirs in their_finals(row, name) if table.protocol == "paper" else []:
                label = "published" if "published" not in axis.get_legend_handles_labels()[1] else None
                axis.plot(x, theirs * unit, "D", mfc="white", mec=INK, mew=1.2, ms=5, zorder=4, label=label)
    for run in best_baselines(table):
        for at, name in enumerate(groups):
            value = run.metrics.get(name)
            if value is not None:
                label = run.result["baseline"]["name"] if at == 0 else ""
                y = value * per_cent(name)
                axis.hlines(y, at - 0.46, at + 0.46, color=INK, linestyle=(0, (1.5, 1.2)), linewidth=1.5, label=label)
    axis.set_xticks(range(len(groups)), [names[name] for name in groups])
    axis.grid(axis="x", visible=False)
    unit_label = "test accuracy (%)" if table.task == "classify" else "test perplexity per token"
    axis.set_ylabel(unit_label + (", best of the run" if best else ""))
    if table.task == "classify":
        axis.set_ylim(0, 105)
        axis.set_xlabel("test sentences")
    else:
        axis.set_xlabel("test text")
    save(figure, axis, path)
    return True


def their_finals(row: Row, name: str) -> list[float]:
    """What was published for a row and figure; the mean over three tests where only the tests were."""
    if not row.published:
        return []
    finals = published.final_figures(row.published)
    kind = "best" if any(line.chosen == "best" for line in finals) else "last"
    direct = [line.value for line in finals if line.name == name and line.chosen == kind]
    tests = [line.value for line in finals if line.name.startswith("test_perplexity_") and line.chosen == kind]
    return direct or ([sum(tests) / 3] if name.endswith("perplexity_mean") and len(tests) == 3 else [])


def best_baselines(table: Table) -> list[Run]:
    """The baseline that is hardest to beat."""
    able = [run for run in table.baselines if run.metrics.get(table.main_figure) is not None]
    sign = -1 if table.task == "classify" else 1
    return sorted(able, key=lambda run: sign * run.metrics[table.main_figure])[:1]  # type: ignore[operator]


def over_length(table: Table, path: Path) -> bool:
    """Test perplexity over the length of the context, from that of training on."""
    if not table.lengths():
        return False
    figure, axis = plt.subplots(figsize=(6.5, 4.4))
    drawn = False
    for row in table.rows:
        names = {row.settings["block_size"]: table.main_figure}
        names |= {length: length_figure(length) for length in table.lengths()}
        values = {length: list(row.values(name).values()) for length, name in names.items()}
        found = {length: summarise(own) for length, own in values.items() if own}
        if not found:
            continue
        style, drawn = look(row.settings), True
        axis.plot(
            list(found), [at.mean for at in found.values()], marker="o", color=style.colour, linestyle=style.line,
            linewidth=1.9, ms=5, label=row.label + (" (ends here)" if len(found) == 1 else ""),
        )  # fmt: skip
        low, high = ([at.extremes[k] for at in found.values()] for k in (0, 1))
        axis.fill_between(list(found), low, high, color=style.colour, alpha=0.18, linewidth=0)
    ticks = sorted({*table.lengths(), *(row.settings["block_size"] for row in table.rows)})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("context in the test (tokens); the shortest is that of training")
    axis.set_ylabel("test perplexity per token (mean of tests)")
    save(figure, axis, path)
    return drawn


def save(figure: Any, first: Axes, path: Path) -> None:
    """Put the legend beside the axes and write the picture."""
    handles, labels = first.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(
            handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.55), bbox_transform=figure.transFigure
        )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)


def draw_all(table: Table, folder: Path) -> list[tuple[Path, str]]:
    """Draw the pictures of a table; their files, and what each shows."""
    kinds = (
        (bars, "bars", "Mean over seeds with its 95 % interval; dotted: the best baseline"),
        (curves, "curves", "Mean over seeds; band: lowest to highest run"),
        (
            over_length,
            "lengths",
            "Trained on the shortest context, tested on longer ones; band: lowest to highest run",
        ),
    )
    theirs = {bars: "; diamonds: published", curves: "; open marks: published"}
    if table.protocol != "paper" or not any(row.published for row in table.rows):
        theirs = {}
    drawn = []
    with plt.rc_context(STYLE):
        for draw, kind, caption in kinds:
            path = folder / f"{table.name}_{kind}.png"
            if draw(table, path):
                drawn.append((path, caption + theirs.get(draw, "") + "."))
    return drawn
