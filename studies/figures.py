"""The figures of the pages, by the names that pages link: `figures/STUDY_FUNCTION.png`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speechformer.report import figures as drawn
from speechformer.report.figures import INK, LOOKS, add_legend, draw_effect, panels, plt, style, wrapped
from speechformer.report.labels import joined
from speechformer.report.load import Study
from speechformer.report.tables import heading, scale
from studies import published
from studies.ladders import ladder_figure
from studies.results import Claim, PageError, Results, read_yaml

VERDICTS = {
    "supported": ("#0072B2", "o"),
    "equivalent": ("#009E73", "^"),
    "inconclusive": ("#8a949e", "s"),
    "contradicted": ("#D55E00", "v"),
}
COSTS = {"training_seconds": "training, seconds (log scale)", "peak_megabytes": "peak of memory, MB"}
SLIDING = "test_sliding_perplexity_mean"  # in which the first tokens of a block have a context, too
TICKS = (-30, -10, -5, 0, 5, 10, 30)  # logarithmic beyond 5
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
            figure = draw(name, results)
            drawn.write(figure, output.joinpath, name, ["png"])


def draw(name: str, results: Results) -> Any:
    """Return the figure of a study by its name, `STUDY_FUNCTION`."""
    study_name, _, function = name.rpartition("_")
    if study_name == "claims":
        return claims(results, function)
    if function == "ladder":
        return ladder_figure(results, study_name)
    study = next((study for study in results.studies if study.study == study_name), None)
    if study is None or function not in {*OF_STUDY, *OF_PAPER}:
        raise PageError(f"there is no figure {name}.")
    if function in OF_PAPER:
        return OF_PAPER[function](study)
    return next(iter(OF_STUDY[function](study)))[0]


def claims(results: Results, name: str) -> Any:
    """Draw effects as claimed by the questions of a picture in `claims.yaml`, for a slide; or all by unit."""
    questions = read_yaml("claims.yaml")["pictures"].get(name, {})
    groups = defaultdict[str, list[Claim]](list)
    for title, claim in ((title, own) for title, names in questions.items() for own in names):
        if claim in results.claims:
            groups[title].append(results.claims[claim])
    for claim in () if questions else results.claims.values():
        if claim.is_on_speeches and not np.isnan(claim.estimated.interval[0]):
            groups[unit_of(claim)[0]].append(claim)
    if questions:
        figure, axes = effects(groups, 12, 52, sharex=True)
        axes[-1].set_xlabel(f"effect, positive as claimed, {unit_of(next(iter(groups.values()))[0])[0]}")
        return figure
    figure, axes = effects(groups, 8, 120)
    for axis in axes:
        axis.set_xlabel("effect, positive as claimed", fontsize=8)
        if max(map(abs, axis.get_xlim())) > 20:
            axis.set_xlabel("effect, positive as claimed, on a logarithmic axis beyond ±5", fontsize=8)
            axis.set_xscale("symlog", linthresh=5)
            axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
            axis.minorticks_off()
    return figure


def unit_of(claim: Claim) -> tuple[str, float]:
    """Return the unit in which a figure has an effect, and the factor to it."""
    if "perplexity" in claim.metric and " / " not in claim.metric:
        return "per cent of the perplexity", 100 / claim.reference
    if " / " in claim.metric:
        return "ratio", 1.0
    unit = claim.metric.split("_")[1]
    return "points of accuracy" if unit == "accuracy" else unit, scale(claim.metric)


def effects(
    groups: Mapping[str, Sequence[Claim]], size: int, width: int, **options: Any
) -> tuple[Any, Sequence[Any]]:
    """Draw effects with their intervals, positive as claimed, a panel for each group.

    A grey bar is what two single runs differ by without an effect, a diamond the published effect.
    """
    heights = [len(group) + 1 for group in groups.values()]
    inches = (11.0, 0.027 * size * sum(heights) + 0.07 * size * len(groups) + 0.5)
    options = {"height_ratios": heights, "figsize": inches, "squeeze": False, "layout": "constrained", **options}
    figure, axes = plt.subplots(len(groups), 1, **options)
    for axis, (title, group) in zip(axes[:, 0], groups.items()):
        axis.set_title(title, fontsize=size + 1, loc="left")
        axis.tick_params(labelsize=size)
        axis.use_sticky_edges = False
        for y, claim in enumerate(group):
            factor, found = claim.sign * unit_of(claim)[1], published.effect(claim)
            axis.barh(y, 2 * abs(factor) * claim.noise, left=-abs(factor) * claim.noise, height=0.7, color="#dfe3e8")
            if found is not None:
                axis.plot(factor * found, y, "D", color=INK, mfc="white", ms=7, zorder=4)
            effect = replace(claim.estimated, mean=claim.sign * claim.estimated.mean)
            draw_effect(axis, y, effect, abs(factor), *VERDICTS[claim.verdict])
        axis.axvline(0, color=INK, lw=0.9)
        axis.set_yticks(range(len(group)), [wrapped(f"{claim.by}: {claim.says}", width) for claim in group])
        axis.set_ylim(len(group) - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
    shown = {claim.verdict for group in groups.values() for claim in group}
    for text in (text for text in VERDICTS if text in shown):
        axis.plot([], [], VERDICTS[text][1], color=VERDICTS[text][0], label=text)
    axis.plot([], [], "D", color=INK, mfc="white", label="published, where it is")
    axis.barh([0], [0], color="#dfe3e8", label="noise of two single runs")
    add_legend(figure, axis, loc="outside lower center", ncols=3)
    return figure, axes[:, 0]


def cost(study: Study) -> Any:
    """Draw perplexity over time and memory of training, with standard deviations over seeds.

    Each pattern has a line, longer contexts have larger marks.
    """
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
            xerr, yerr = ([summary.sd for summary in column] for column in zip(*points))
            axis.errorbar(x, y, yerr, xerr, fmt="none", ecolor=look["color"], lw=1)
        axis.set_xlabel(label)
    axes[0].set_xscale("log", base=2)
    axes[1].set_xlim(left=0)
    axes[0].xaxis.set_major_formatter("{x:g}")
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
    xlabel = "digits of the source (strings)" if study.corpus == "digits" else "words of the source (sentences)"
    figure, (axis,) = drawn.draw_lines(study, {name: (scale(metric), lines)}, xlabel=xlabel)
    axis.set_xticks(range(len(buckets)), [f"{bucket}\n({count})" for bucket, count in buckets.items()])
    axis.set_ylim(bottom=0)
    for text, variant in zip(figure.legends[0].get_texts(), study.finished_variants()):
        form = " (Bahdanau's)" if variant.settings.get("model.attention") == "bahdanau" else ""
        text.set_text(MODELS[variant.settings["model.name"]] + form)
    return figure


OF_PAPER = {"cost": cost, "sources": sources}
