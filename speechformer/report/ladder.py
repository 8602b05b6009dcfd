"""A ladder: settings added one after another, each compared with the rung below it.

The rungs are the rows of a study, ordered by the overrides of their commands. A rung stands on the row whose
overrides its own begin with, the most of them. Its step is what it adds. The longest way is the ladder, of
several the one to the best held-out score; the other rows are branches beside it, as are rows of fewer seeds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from speechformer.errors import UserError
from speechformer.report.markdown import Markdown, code, lines
from speechformer.report.markdown import table as markdown_table
from speechformer.report.results import Row, Run, Table, is_better_higher
from speechformer.report.statistics import Effect, Summary, contrast, holm
from speechformer.report.style import INK, axis_label, legend_below, panels, wrapped
from speechformer.report.tables import NONE, baseline_name, estimate, heading, number, scale

ON_TOP, BRANCH = "#3b7dd8", "#8b98a5"
STRONGEST = ("kneser_ney_5", "kneser_ney_5_unknown", "naive_bayes", "tfidf_logistic")  # baselines in the figure
ALONE = "model alone"
NOT_A_STEP = ("seed=", "study=", "experiment=", "corpus=", "hydra", "threads=")


@dataclass(eq=False)
class Rung:
    """A row of a ladder.

    Attributes:
        step: the overrides that it adds to `below`.
        on_top: whether the ladder leads over it.
    """

    row: Row
    step: tuple[str, ...]
    below: Rung | None
    on_top: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """What it adds to the ladder: on a branch of a branch the steps of both."""
        longer = self.below is not None and not self.on_top and not self.below.on_top
        return (*(self.below.path if longer and self.below else ()), *self.step)

    def values(self, metric: str, alone: bool = False) -> dict[int | None, float]:
        """Return a metric by seed; on a rung that mixes its model with counts that of the mixture, unless `alone`."""
        return self.row.values(metric) if alone else self.row.mixed_values(metric)

    def difference(self, metric: str) -> Effect | None:
        """Return the metric of this rung less that of the rung below, over seeds; None without one of them."""
        return None if self.below is None else self.less(self.below, metric)

    def less(self, other: Rung, metric: str) -> Effect | None:
        """Return the metric of this rung less that of another.

        With `protocol.fold=seed` seeds are paired, because those in common have the same data.
        """
        paired = self.row.finished[0].config.get("protocol.fold") == "seed"
        return contrast([(1, self.values(metric)), (-1, other.values(metric))], same_runs=paired)


def overrides_of(run: Run) -> tuple[str, ...]:
    """Return the overrides of a run that are steps of a ladder."""
    words = run.result.get("overrides") or []
    return tuple(normalised(word) for word in words if not word.startswith(NOT_A_STEP))


@functools.cache
def normalised(override: str) -> str:
    """Return an override as a sweep writes it, `recipe.lr=0.003` for `recipe.lr=3e-3`; other words as they are."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override
    key, removes = parsed.get_key_element(), parsed.value_type is None
    return override if removes else f"{key}={parsed.get_value_element_as_str()}"


def rungs(table: Table) -> list[Rung]:
    """Return the rungs of a study from below, each followed by the branches that stand on it."""
    words = {id(row): overrides_of(row.finished[0]) for row in table.rows if row.finished}
    rows = sorted((row for row in table.rows if row.finished), key=lambda row: len(words[id(row)]))
    parents: dict[int, Row | None] = {}
    for row in rows:
        own = words[id(row)]
        lower = [
            other for other in rows if words[id(other)] != own and words[id(other)] == own[: len(words[id(other)])]
        ]
        parents[id(row)] = lower[-1] if lower else None
    depth, seeds = dict[int, int](), max((len(row.finished) for row in rows), default=0)
    for row in rows:
        parent = parents[id(row)]
        depth[id(row)] = 0 if parent is None else depth[id(parent)] + (len(row.finished) == seeds)
    built: dict[int, Rung] = {}
    for row in rows:
        parent = parents[id(row)]
        fewer = () if parent is None else words[id(parent)]
        step = words[id(row)][len(fewer) :]
        built[id(row)] = Rung(row, step, None if parent is None else built[id(parent)])
    whole = [rung for rung in built.values() if len(rung.row.finished) == seeds]
    way = way_up(table, [rung for rung in whole if depth[id(rung.row)] == max(depth.values())])
    for rung in built.values():
        rung.on_top = any(rung is own for own in way)
    return [rung for own in built.values() if own.below is None for rung in with_branches(own, [*built.values()])]


def with_branches(rung: Rung, others: Sequence[Rung]) -> Iterator[Rung]:
    """Yield a rung, its branches, each with its own, and then the rung on top of it, with its branches."""
    yield rung
    for own in sorted((own for own in others if own.below is rung), key=lambda own: own.on_top):
        yield from with_branches(own, others)


def way_up(table: Table, deepest: Sequence[Rung]) -> list[Rung]:
    """Return the rungs of the ladder, the highest first; it is the one of these with the best held-out score."""
    way, at = list[Rung](), min(deepest, key=lambda rung: held_out_loss(table, rung), default=None)
    while at is not None:
        way.append(at)
        at = at.below
    return way


def held_out_loss(table: Table, rung: Rung) -> float:
    """Return the mean of what chooses between rungs, lower is better: the held-out score, or else that on test."""
    metric, sign = table.held_out or table.metric, -1 if table.report["higher_is_better"] else 1
    values = rung.values(metric.replace("validation_accuracy", "validation_balanced_accuracy"))
    return sign * Summary(values.values()).mean if values else math.inf


def highest(table: Table) -> dict[str, Rung]:
    """Return the last rung that is a model alone, and the best one on the held-out part that is mixed with counts.

    In a study of mixtures the first is the model within the best one. A mixture counts if it has as many seeds.
    """
    ladder = rungs(table)
    is_mixed = {id(rung): bool(rung.row.values("test_mixture_perplexity_mean")) for rung in ladder}
    on_top = [rung for rung in ladder if rung.on_top]
    alone = ([rung for rung in on_top if not is_mixed[id(rung)]] or on_top)[-1]
    mixed = [rung for rung in ladder if is_mixed[id(rung)] and len(rung.row.finished) == len(alone.row.finished)]
    best = min(mixed, key=lambda rung: held_out_loss(table, rung), default=None)
    return {ALONE: alone} | ({} if best is None else {"with counts": best})


def ratios_in_words(table: Table, baselines: Sequence[str], goals: Sequence[float] = ()) -> str:
    """Return the perplexities of `highest` as ratios to that of the best of some baselines, beside their goals.

    Over all words, and over known ones, where the best baseline may be another.
    """
    runs, parts = by_name(table, baselines), []
    for (kind, rung), goal in itertools.zip_longest(highest(table).items(), goals):
        ratios = [
            Summary(rung.values(name, alone=kind == ALONE).values()).mean / min(run.metrics[name] for run in runs)  # type: ignore[type-var, operator]
            for name in ("test_perplexity_mean", "test_known_perplexity_mean")
        ]
        aim = f"; the goal of {goal} is {'met' if ratios[0] <= goal else 'missed'}" if goal else ""
        parts.append(f"{ratios[0]:.3f} ({kind}; over known words {ratios[1]:.3f}{aim})")
    return " and ".join(parts)


def by_name(table: Table, names: Sequence[str]) -> list[Run]:
    """Return baselines of a table by name.

    Raises:
        UserError: the table has not all of them.
    """
    known = {run.baseline: run for run in table.baselines}
    if missing := [name for name in names if name not in known]:
        raise UserError(f"study={table.study} has no baseline {missing[0]}.")
    return [known[name] for name in names]


def against_table(table: Table, baselines: Sequence[str]) -> Markdown:
    """Return what the rungs of `highest` have less than baselines, on each text."""
    shown = highest(table)
    texts = [name.removeprefix("test_perplexity_") for name in table.columns if name.startswith("test_perplexity_")]
    rows: list[list[str]] = []
    for (kind, rung), run in itertools.product(shown.items(), by_name(table, baselines)):
        for part, words in (("test_perplexity", "all words"), ("test_known_perplexity", "known words")):
            cells = []
            for metric in (f"{part}_{text}" for text in texts):
                counted, cell = run.metrics.get(metric), NONE
                values = rung.values(metric, alone=kind == ALONE)
                effect = None if counted is None else contrast([(1, values)], constant=-counted)
                if counted is not None and effect is not None:
                    cell = lines([f"{1 + effect.mean / counted:.3f}", " ".join(estimate(metric, effect))])
                cells.append(cell)
            rows.append([f"{kind}, {words}", baseline_name(run), *cells])
    return markdown_table(["", "beside", *texts], rows)


def steps_table(table: Table, metrics: Sequence[str], first: str = "the defaults") -> Markdown:
    """Return the rungs with their metrics and the difference of each to the rung below, then the baselines.

    Args:
        first: what the lowest rung is called.
    """
    rows: list[list[str]] = []
    is_ladder = sum(rung.on_top for rung in rungs(table)) > 1  # else all rows stand beside one
    for rung in rungs(table):
        step = lines([code(word) for word in rung.path]) if rung.step else Markdown.escape(first)
        cells: list[str] = [step if rung.on_top or not is_ladder else Markdown("*beside:* {}").format(step)]
        for metric in metrics:
            of_seeds, effect = rung.values(metric), rung.difference(metric)
            mean = number(metric, Summary(of_seeds.values()).mean) if of_seeds else NONE
            cells.append(mean if effect is None else lines([mean, " ".join(estimate(metric, effect))]))
        rows.append([*cells, str(len(rung.row.finished))])
    for run in table.baselines:
        values = [number(metric, run.value(metric)) for metric in metrics]
        rows.append([Markdown("*{}*").format(baseline_name(run)), *values, "exact"])
    return markdown_table(["step", *map(heading, metrics), "seeds"], rows)


def judged(ladder: Sequence[Rung], metric: str) -> Iterator[tuple[Rung, Effect, str]]:
    """Yield each rung of a ladder that stands on another with the effect of its step, and the verdict after Holm's
    correction: "Better", "Worse" or "Inconclusive".
    """
    measured = [(rung, effect) for rung in ladder if (effect := rung.difference(metric))]
    sign = 1 if is_better_higher(metric) else -1
    for (rung, effect), p in zip(measured, holm([effect.p for _, effect in measured])):
        yield rung, effect, "Inconclusive" if not p < 0.05 else "Better" if sign * effect.mean > 0 else "Worse"


def step_in_words(table: Table, metric: str, step: str) -> Markdown:
    """Return the verdict on a step, its effect and 95 % confidence interval; of several like it, for each.

    Args:
        step: its overrides, with spaces between.

    Raises:
        UserError: there is no such step.
    """
    own = []
    for rung, effect, verdict in judged(rungs(table), metric):
        low, high = effect.interval
        if rung.step == tuple(map(normalised, step.split())):
            corrected = " after correction" * (verdict == "Inconclusive" and low * high > 0)
            own.append(
                Markdown("{}, {}").format(verdict.lower() + corrected, Markdown(" ").join(estimate(metric, effect)))
            )
    if not own:
        raise UserError(f"study={table.study} has no step {step!r} whose {metric} was compared.")
    return Markdown("; ").join(own)


def steps_in_words(table: Table, metric: str) -> Markdown:
    """Return as a list which steps change a metric for better or worse after Holm's correction, and which may not."""
    ladder = rungs(table)
    groups: dict[str, list[Markdown]] = {"Better": [], "Worse": [], "Inconclusive": []}
    for rung, effect, verdict in judged(ladder, metric):
        step = spaced(rung.step)
        if rung.below and not rung.on_top:
            again = [own for own in ladder if own.step == rung.step and not own.on_top]
            step += Markdown(", beside") + Markdown(" {}").format(spaced(rung.below.step)) * (len(again) > 1)
        if verdict != "Inconclusive":
            step += Markdown(" ({})").format(number(metric, effect.mean, True))
        groups[verdict].append(step)
    shown = [Markdown("- **{}**: {}.").format(name, Markdown("; ").join(own)) for name, own in groups.items() if own]
    way = [rung for rung in ladder if rung.on_top]
    if len(way) > 1 and (together := way[-1].less(way[0], metric)):
        whole = Markdown(" ").join(estimate(metric, together))
        shown.append(Markdown("- **The whole ladder**: {}.").format(whole))
    return Markdown("\n").join(shown)


def spaced(step: Sequence[str]) -> Markdown:
    """Return overrides as code, with spaces between."""
    return Markdown(" ").join([code(word) for word in step])


def ladder_figure(table: Table) -> tuple[Any, str] | None:
    """Draw the main metric on each rung of a study called `ladder...`, over all words and, of lm, over known ones."""
    if not table.study.startswith("ladder") or len(ladder := rungs(table)) < 3:
        return None
    metrics = [name for name in (table.metric, "test_known_perplexity_mean") if table.has(name)]
    names = [
        ("beside: " if not rung.on_top else "") + (", ".join(map(short, rung.path)) or "the first rung")
        for rung in ladder
    ]
    figure, axes = panels(len(metrics), 4.4 if len(metrics) > 1 else 6.5, 0.32 * len(names) + 1.3, sharey=True)
    for axis, metric in zip(axes, metrics):
        unit = scale(metric)
        for place, rung in enumerate(ladder):
            if values := rung.values(metric):
                summary = Summary(values.values())
                ends = summary.confidence_interval if summary.varies else (summary.mean, summary.mean)
                low, high = (unit * end for end in ends)
                colour = ON_TOP if rung.on_top else BRANCH
                axis.plot([low, high], [place, place], color=colour, lw=2)
                axis.scatter([unit * summary.mean], [place], color=colour, s=36, zorder=3)
                at: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
                axis.annotate(
                    number(metric, summary.mean), (high, place), **at, bbox={"fc": "white", "ec": "none", "pad": 0.6}
                )
        for line, run in zip(("--", ":", "-."), (run for run in table.baselines if run.baseline in STRONGEST)):
            if (value := run.metrics.get(metric)) is not None:
                axis.axvline(unit * value, color=INK, lw=1.1, ls=line, label=baseline_name(run), zorder=0)
        axis.set_xlabel(axis_label(metric))
        axis.margins(x=0.2)
    axes[0].set_yticks(range(len(names)), [wrapped(name, 46) for name in names], fontsize=8)
    axes[0].invert_yaxis()
    legend_below(figure, axes[0].get_legend_handles_labels()[0])
    return (
        figure,
        "Each rung adds its settings to the one above it. Lines: 95 % confidence intervals over seeds.",
    )


def short(override: str) -> str:
    """Return an override without its group."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2].replace('_', ' ')} {value}"
