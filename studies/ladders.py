"""Ladders: settings added one after another, each step compared with the rung below it.

`claims.yaml` has a line for each rung: what it adds to the rung above it in the list. A line with "+" stands beside
the ladder, on the last line with one "+" less. A rung may have a name, `NAME: overrides`, which is that of a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from speechformer.report.figures import INK, panels, wrapped
from speechformer.report.statistics import Effect, Summary, contrast, holm
from speechformer.report.tables import NONE, estimate, heading, is_better_higher, number, scale
from studies.results import PageError, Place, Results, Values, baseline_name, mixed, read_yaml

ON_TOP, BRANCH = "#3b7dd8", "#8b98a5"
STRONGEST = ("kneser_ney_5", "kneser_ney_5_unknown", "naive_bayes", "tfidf_logistic")  # baselines in the figure
MOST_ROWS = 12  # of a figure with the rungs beside a ladder
NOT_A_STEP = ("seed=", "study=", "experiment=", "corpus=", "hydra", "threads=")


@dataclass(eq=False)
class Rung:
    """A rung of a ladder.

    Attributes:
        step: the overrides that it adds to `below`.
        on_top: whether it is part of the ladder, or stands beside it.
        path: the steps since it left the ladder; of a rung of the ladder its own.
    """

    name: str
    step: tuple[str, ...]
    below: Rung | None
    on_top: bool
    path: tuple[str, ...]
    place: Place

    def values(self, metric: str) -> Values:
        """Return a metric by seed; of a model that is mixed with counts that of the mixture."""
        return mixed(self.place.study, self.place.variant.label, metric)

    def less(self, other: Rung, metric: str) -> Effect | None:
        """Return the metric of this rung less that of another."""
        return contrast([(1, self.values(metric)), (-1, other.values(metric))])


def normalised(override: str) -> str:
    """Return an override with its number as Python writes it: `recipe.lr=0.003` for `recipe.lr=3e-3`."""
    key, _, value = override.partition("=")
    try:
        return f"{key}={float(value):g}"
    except ValueError:
        return f"{key}={value.lower()}"


def rungs(results: Results, name: str) -> list[Rung]:
    """Return the rungs of a ladder in the order of the file.

    Raises:
        PageError: there is no such ladder, or no finished run of a rung.
    """
    text = read_yaml("claims.yaml")["ladders"].get(name)
    studies = [study for study in results.studies if study.study == name]
    if text is None or not studies:
        raise PageError(f"there is no ladder {name}, or no run of it.")
    study = studies[0]
    found = {}
    for variant in study.variants:
        if finished := study.finished_runs(variant.label):
            words = [normalised(word) for word in finished[0].result["overrides"] if not word.startswith(NOT_A_STEP)]
            found[tuple(words)] = variant
    built: list[Rung] = []
    words_of: dict[int, tuple[str, ...]] = {}
    last: dict[int, Rung] = {}  # by depth
    for line in text.strip().splitlines():
        depth = len(line) - len(line.lstrip("+"))
        label, _, words = line.lstrip("+ ").rpartition(": ")
        step = tuple(words.split()) if built or "=" in words else ()
        below = last.get(max(depth - 1, 0)) if depth else last.get(0)
        key = (*(words_of[id(below)] if below else ()), *map(normalised, step))
        if key not in found:
            raise PageError(f"the ladder {name} has no finished run of {line!r}.")
        path = (*(below.path if below and not below.on_top else ()), *step) if depth else step
        last[depth] = Rung(label, step, below, not depth, path, Place(study, found[key]))
        words_of[id(last[depth])] = key
        built.append(last[depth])
    return built


def name_variants(results: Results) -> None:
    """Add the named rungs of all ladders to the variants."""
    for name in read_yaml("claims.yaml")["ladders"]:
        for rung in rungs(results, name):
            if rung.name:
                results.places[rung.name, rung.place.study.protocol["name"]] = rung.place


def with_verdicts(ladder: Sequence[Rung], metric: str) -> Iterator[tuple[Rung, Effect, str]]:
    """Yield each rung that stands on another with the effect of its step, and the verdict after Holm's correction."""
    measured = [(rung, effect) for rung in ladder if rung.below and (effect := rung.less(rung.below, metric))]
    sign = 1 if is_better_higher(metric) else -1
    for (rung, effect), p in zip(measured, holm([effect.p for _, effect in measured])):
        yield rung, effect, "Inconclusive" if not p < 0.05 else "Better" if sign * effect.mean > 0 else "Worse"


def code(words: Sequence[str], between: str = " ") -> str:
    """Return overrides as code."""
    return between.join(f"`{word}`" for word in words)


def ladder_rows(results: Results, name: str, metrics: Sequence[str], first: str) -> list[list[str]]:
    """Return the rungs with their metrics and the difference of each to the rung below, then the baselines.

    A difference is bold if it is significant after Holm's correction.
    """
    ladder = rungs(results, name)
    is_ladder = sum(rung.on_top for rung in ladder) > 1  # else all rows stand beside one
    rows = [["step", *map(heading, metrics), "seeds"]]
    verdicts = {(rung, name): verdict for name in metrics for rung, _, verdict in with_verdicts(ladder, name)}
    for rung in ladder:
        step = code(rung.path, "<br>") if rung.below else first
        cells = [step if rung.on_top or not is_ladder else f"*beside:* {step}"]
        for metric in metrics:
            own, effect = rung.values(metric), rung.less(rung.below, metric) if rung.below else None
            mean = number(metric, Summary(own.values()).mean) if own else NONE
            bold = "**" * (verdicts.get((rung, metric)) in ("Better", "Worse"))
            cells.append(mean if effect is None else f"{mean}<br>{bold}{estimate(metric, effect)}{bold}")
        rows.append([*cells, str(len(rung.place.runs))])
    for run in ladder[0].place.study.counted:
        shown = [number(metric, run.metrics.get(metric)) for metric in metrics]
        rows.append([f"*{baseline_name(run)}*", *shown, "exact"])
    return rows


def step_text(results: Results, name: str, metric: str, step: str) -> str:
    """Return the verdict on a step, its effect and 95 % confidence interval; of several like it, for each.

    Args:
        step: its overrides, with spaces between.
    """
    texts = []
    for rung, effect, verdict in with_verdicts(rungs(results, name), metric):
        if tuple(map(normalised, rung.step)) == tuple(map(normalised, step.split())):
            low, high = effect.interval
            corrected = " after correction" * (verdict == "Inconclusive" and low * high > 0)
            texts.append(f"{verdict.lower()}{corrected}, {estimate(metric, effect)}")
    if not texts:
        raise PageError(f"the ladder {name} has no step {step!r} whose {metric} was compared.")
    return "; ".join(texts)


def steps_text(results: Results, name: str, metric: str) -> str:
    """Return as a list which steps change a metric after Holm's correction, and how many are inconclusive."""
    ladder = rungs(results, name)
    groups: dict[str, list[str]] = {"Better": [], "Worse": [], "Inconclusive": []}
    for rung, effect, verdict in with_verdicts(ladder, metric):
        text = f"{code(rung.step)}{', beside' * (not rung.on_top)} ({number(metric, effect.mean, True)})"
        groups[verdict].append(text)
    groups["Inconclusive"] = [f"the other steps ({len(groups['Inconclusive'])})"]
    lines = [f"- **{verdict}**: {'; '.join(texts)}." for verdict, texts in groups.items() if texts]
    on_top = [rung for rung in ladder if rung.on_top]
    if len(on_top) > 1 and (whole := on_top[-1].less(on_top[0], metric)):
        lines.append(f"- **The whole ladder**: {estimate(metric, whole)}.")
    return "\n".join(lines)


def ladder_figure(results: Results, name: str) -> Any:
    """Draw the main metric on each rung, over all words and, of language models, over known ones.

    Rungs beside a long ladder are left out.
    """
    ladder = rungs(results, name)
    if len(ladder) > MOST_ROWS:
        ladder = [rung for rung in ladder if rung.on_top]
    study = ladder[0].place.study
    metrics = [metric for metric in (study.metric, "test_known_perplexity_mean") if study.has(metric)]
    names = []
    for rung in ladder:
        parts = (word.partition("=") for word in rung.path)
        texts = [f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, _, value in parts]
        names.append("beside: " * (not rung.on_top) + (", ".join(texts) if rung.below else "the first rung"))
    figure, axes = panels(len(metrics), 4.4 if len(metrics) > 1 else 6.5, 0.32 * len(names) + 1.5, sharey=True)
    for axis, metric in zip(axes, metrics):
        for y, rung in enumerate(ladder):
            if own := rung.values(metric):
                summary, unit = Summary(own.values()), scale(metric)
                ends = summary.confidence_interval if summary.varies else (summary.mean, summary.mean)
                low, high = (unit * end for end in ends)
                colour = ON_TOP if rung.on_top else BRANCH
                axis.plot([low, high], [y, y], color=colour, lw=2)
                axis.scatter([unit * summary.mean], [y], color=colour, s=36, zorder=3)
                look: dict[str, Any] = {
                    "xytext": (6, 0),
                    "textcoords": "offset points",
                    "va": "center",
                    "fontsize": 8,
                }
                look["bbox"] = {"fc": "white", "ec": "none", "pad": 0.6}
                axis.annotate(number(metric, summary.mean), (high, y), **look)
        strongest = [run for run in study.counted if run.baseline in STRONGEST]
        for dashes, run in zip(("--", ":", "-."), strongest):
            if (value := run.metrics.get(metric)) is not None:
                axis.axvline(scale(metric) * value, color=INK, lw=1.1, ls=dashes, label=baseline_name(run), zorder=0)
        axis.set_xlabel(f"{heading(metric)}, 95 % interval over seeds")
        axis.margins(x=0.2)
    axes[0].set_yticks(range(len(names)), [wrapped(text, 46) for text in names], fontsize=8)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
