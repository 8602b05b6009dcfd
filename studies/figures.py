"""The figures of the pages, by the names that pages link: `figures/STUDY_FUNCTION.png`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from speechformer.report import figures as drawn
from speechformer.report.figures import INK, LOOKS, add_legend, draw_effect, panels, plt, style, wrapped, write_beside
from speechformer.report.labels import joined
from speechformer.report.load import Study
from speechformer.report.tables import estimate, heading, scale
from studies.ladders import ladder_figure
from studies.results import ON_SPEECHES, Claim, PageError, Results

VERDICTS = {"supported": ("#0072B2", "o"), "inconclusive": ("#8a949e", "s"), "contradicted": ("#D55E00", "X")}
UNITS = {"accuracy": "test accuracy, points", "exact": "exact translations, points", "bleu": "BLEU"}
COSTS = {"training_seconds": "training, seconds", "peak_megabytes": "peak of memory, MB"}
SLIDING = "test_sliding_perplexity_mean"  # in which the first tokens of a block have a context, too
LINK = re.compile(r"\]\(figures/(\w+)\.png\)")
OF_STUDY = {
    "dots": drawn.dots,
    "lengths": drawn.context_lengths,
}
MODELS = {"rnn": "GRU without attention", "rnn_attention": "GRU with attention", "sinusoidal": "transformer"}


def draw_links(page: str, output: Path, results: Results) -> None:
    """Draw each figure that a page links, but for those of another module.

    Raises:
        PageError: there is no such figure.
    """
    for name in dict.fromkeys(LINK.findall(page)):
        (output / "figures").mkdir(exist_ok=True)
        with style():
            figure = claims(results) if name == "claims" else draw(name, results)
            drawn.write(figure, output.joinpath, name, ["png"])


def draw(name: str, results: Results) -> Any:
    """Return the figure of a study by its name, `STUDY_FUNCTION`."""
    study_name, _, function = name.rpartition("_")
    if function == "ladder":
        return ladder_figure(results, study_name)
    study = next((study for study in results.studies if study.study == study_name), None)
    if study is None or function not in {*OF_STUDY, *OF_PAPER}:
        raise PageError(f"there is no figure {name}.")
    if function in OF_PAPER:
        return OF_PAPER[function](study)
    return next(iter(OF_STUDY[function](study)))[0]


def claims(results: Results) -> Any:
    """Draw the effect of each claim on the speeches with its interval, positive as claimed, by verdict."""
    groups = defaultdict[str, list[Claim]](list)
    for claim in results.claims.values():
        if claim.family in ON_SPEECHES and not np.isnan(claim.estimated.interval[0]):
            unit = claim.metric.split("_")[1].replace("known", "perplexity")
            groups["ratio" if " / " in claim.metric else unit].append(claim)
    sizes = [len(group) + 1 for group in groups.values()]
    size = (11.0, 0.25 * sum(sizes) + 0.7 * len(groups))
    figure, axes = plt.subplots(
        len(groups), 1, figsize=size, height_ratios=sizes, squeeze=False, layout="constrained"
    )
    for axis, (unit, group) in zip(axes[:, 0], groups.items()):
        axis.tick_params(labelsize=8)
        ends = []
        for y, claim in enumerate(group):
            effect = replace(claim.estimated, mean=claim.sign * claim.estimated.mean)
            draw_effect(axis, y, effect, scale(claim.metric), *VERDICTS[claim.verdict])
            write_beside(axis, y, estimate(claim.metric, effect))
            ends += [abs(end) * scale(claim.metric) for end in effect.interval]
        linear = float(f"{np.median(ends):.0e}")
        beyond = f", logarithmic beyond ±{linear:g}" if max(ends) > 4 * linear else ""
        if beyond:
            axis.set_xscale("symlog", linthresh=linear, linscale=1.5)
            ticks = [tick for tick in (linear / 2, linear, 5 * linear, 50 * linear, 500 * linear) if tick < max(ends)]
            axis.set_xticks([*(-tick for tick in reversed(ticks)), 0, *ticks])
            axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axis.minorticks_off()
        axis.set_xlabel(f"effect, positive as claimed ({UNITS.get(unit, unit)}){beyond}", fontsize=9)
        axis.axvline(0, color=INK, lw=0.9)
        axis.set_yticks(range(len(group)), [wrapped(f"{claim.by}: {claim.says}", 120) for claim in group])
        axis.set_ylim(len(group) - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
    for text, (color, marker) in VERDICTS.items():
        axis.plot([], [], marker, color=color, label=text)
    add_legend(figure, axis, loc="outside lower center", ncols=3)
    return figure


def cost(study: Study) -> Any:
    """Draw perplexity over time and memory of training: a line for each pattern, larger marks for longer contexts."""
    contexts = sorted({variant.settings["block_size"] for variant in study.variants})
    patterns = defaultdict[str, list[Any]](list)
    for variant in sorted(study.variants, key=lambda variant: variant.settings["block_size"]):
        shown = (text for key, text in variant.words.items() if key not in ("block_size", "batch_size"))
        patterns[joined(shown)].append(variant)
    figure, axes = panels(2, 4.4, 4.6, sharey=True)
    for axis, (name, label) in zip(axes, COSTS.items()):
        for (words, variants), look in zip(patterns.items(), LOOKS):
            points = [(study.summary(v.label, name), study.summary(v.label, SLIDING)) for v in variants]
            x, y = ([summary.mean for summary in column] for column in zip(*points))
            axis.plot(x, y, color=look["color"], ls=look["ls"], lw=1.2, label=words)
            sizes = [30 + 50 * contexts.index(variant.settings["block_size"]) for variant in variants]
            axis.scatter(x, y, s=sizes, color=look["color"], marker=look["marker"], zorder=3)
        axis.set_xlabel(label)
    axes[0].set_xscale("log", base=2)
    axes[0].xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes[0].set_ylabel("test perplexity per token, sliding window")
    for k, context in enumerate(contexts):
        axes[0].scatter([], [], s=30 + 50 * k, color=INK, label=f"{context:,} tokens of context")
    add_legend(figure, axes[0])
    return figure


def sources(study: Study) -> Any:
    """Draw exact translations, or BLEU where these are rare, over the length of the source."""
    exact = [study.summary(variant.label, "test_exact") for variant in study.variants]
    metric = "test_exact" if any(own and own.mean > 0.2 for own in exact) else "test_bleu"
    lines, buckets = {}, study.source_lengths()
    for variant in study.finished_variants():
        points = [study.summary(variant.label, f"{metric}_at_{bucket}") for bucket in buckets]
        lines[variant.label] = {float(x): own for x, own in enumerate(points) if own}
    name = f"{heading(metric)}: mean; lowest to highest seed"
    figure, (axis,) = drawn.draw_lines(
        study, {name: (scale(metric), lines)}, xlabel="words of the source (sentences)"
    )
    axis.set_xticks(range(len(buckets)), [f"{bucket}\n({count})" for bucket, count in buckets.items()])
    axis.set_ylim(bottom=0)
    for text, variant in zip(figure.legends[0].get_texts(), study.finished_variants()):
        text.set_text(MODELS[variant.settings["model.name"]])
    return figure


OF_PAPER = {"cost": cost, "sources": sources}
