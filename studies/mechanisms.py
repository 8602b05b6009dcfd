"""The study of mechanisms: what each recalls, keeps of a text, costs in a step, and whether probes predict its loss.

Spearman's correlation, with a 95 % interval by the bootstrap over mechanisms: Efron 1979, "Bootstrap Methods".

    python -m studies.mechanisms outputs/reproduce-mechanisms    time a step of each mechanism
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats

from speechformer.errors import ArgumentParser, run_command
from speechformer.report.figures import INK, LOOKS, Figure, plt, style, write
from speechformer.report.labels import in_words
from speechformer.report.load import Study, build_studies, read_runs
from speechformer.report.statistics import Interval, Summary, contrast, holm
from speechformer.report.tables import NONE, mean_and_sd, number, within_scale
from studies import probes
from studies.probes import ACCURACY, Cell, Rows, mechanism, named, skill
from studies.results import HERE, Claim, PageError, Values, read_yaml

TITLE = "Attention mechanisms: what they recall, keep and cost"
STEPS = HERE.parent / "outputs" / "reference" / "mechanisms" / "steps.json"
STUDY, OF_POSITIONS, TUNING = "mechanisms", "mechanisms_positions", "mechanisms_tuning"
LOSS = "test_loss"
TOKENS, CHUNK = 1024, 128  # after so many tokens a state is measured; so many are read at once
RECALL, PAIRS = "recall", (8, 16)
DRAWS = 10_000  # of mechanisms, for an interval of a correlation
APART, ASIDE = 5.0, 0.13  # of a figure: per cent between two labels, octaves between points of about one state
MARGINS = (2.8, 2.4)  # octaves left and right of all points
LEADER = {"arrowstyle": "-", "color": "#8a949e", "lw": 0.6, "shrinkA": 1, "shrinkB": 4}


class Mechanisms:
    """What the page of mechanisms can say. Mechanisms are named as in the config: "delta", "gated_delta,softmax".

    Attributes:
        cells: of the map.
        losses: of a corpus and a mechanism in words, the log of the test perplexity by seed.
    """

    def __init__(self, folder: Path, steps: Path = STEPS) -> None:
        self.cells, self.steps_file = probes.read_cells(folder, STUDY), steps
        self.all_studies = build_studies(read_runs([folder])[0])[0]
        self.studies = [study for study in self.all_studies if study.study == STUDY]
        self.losses = defaultdict[str, dict[str, Values]](dict)
        for study in sorted((own for own in self.studies if own.task == "lm"), key=lambda study: study.corpus):
            for variant in study.variants:
                if values := study.values(variant.label, study.metric):
                    self.losses[study.corpus][mechanism(variant)] = {s: math.log(v) for s, v in values.items()}

    @cached_property
    def tuned(self) -> list[Cell]:
        """The cells with the settings that tuning chose."""
        return [cell for cell in self.cells if cell["tuned"] and cell["runs"]]

    @cached_property
    def states(self) -> dict[str, int]:
        """Numbers that each mechanism keeps of a text; see `state_size`."""
        return {name: state_size(config) for name, config in configs(self.studies).items()}

    @cached_property
    def steps(self) -> dict[str, dict[str, Any]]:
        """The times of a training step, rows of benchmarks/common.py."""
        if not self.steps_file.exists():
            raise PageError(f"{self.steps_file} is missing; the end of studies/mechanisms.sh has its command.")
        return {row["name"]: row for row in json.loads(self.steps_file.read_text(encoding="utf-8"))["rows"]}

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """The score of each mechanism on each probe, and their mean: how far it is from chance to 1, over lengths."""
        found = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
        for cell in sorted(self.tuned, key=lambda cell: cell["probe"]):
            found[cell["attention"]][cell["probe"]].append(skill(cell))
        scores = {name: {probe: statistics.mean(own) for probe, own in of.items()} for name, of in found.items()}
        complete = max(map(len, scores.values()), default=0)
        return {
            name: {**of, "mean": statistics.mean(of.values())} for name, of in scores.items() if len(of) == complete
        }

    def values(self, name: str, where: Mapping[str, Any]) -> Values:
        """Return by seed the accuracies of a mechanism on a probe at one length, or its losses on a corpus."""
        words = named(name.split(","))
        if "corpus" in where:
            return self.losses.get(where["corpus"], {}).get(words, {})
        at = (words, where["probe"], where["length"])
        cells = (cell for cell in self.tuned if (cell["attention"], cell["probe"], cell["length"]) == at)
        return {run["seed"]: run["value"] for cell in cells for run in cell["runs"]}

    @cached_property
    def claims(self) -> dict[str, Claim]:
        """The claims of `claims.yaml: mechanisms` whose runs are all there; see `studies.results`."""
        found = []
        for name, entry in read_yaml("claims.yaml")["mechanisms"].items():
            where, sign = entry["effect"], {"more": 1, "less": -1, "same": 0}[entry["expect"]]
            effect = contrast([(1, self.values(where["of"], where)), (-1, self.values(where["less"], where))])
            metric = ACCURACY if "probe" in where else LOSS
            if effect is not None:
                found.append(Claim(name, "mechanisms", entry["by"], entry["says"], sign, False, metric, effect))
        corrected = holm([claim.estimated.p for claim in found])
        return {claim.name: replace(claim, p=p) for claim, p in zip(found, corrected)}

    # Tables

    def accuracies(self, tuned: bool = True, **lengths: int) -> Rows:
        """Return accuracies on probes, each at one length, the best first."""
        return probes.accuracies(self.cells, "attention", {"tuned": tuned}, lengths)

    def positions(self, length: int) -> Rows:
        """Return accuracies on recall by positions, those of the last layer, of mechanisms that have several."""
        found = defaultdict[str, dict[str, str]](dict)
        for study in self.all_studies:
            for variant in study.variants if is_of(study, RECALL) and study.study in (STUDY, OF_POSITIONS) else ():
                if summary := study.summary(variant.label, f"{ACCURACY}_length_{length}"):
                    model = (variant.settings.get("model.layers") or [variant.settings["model.name"]])[-1]
                    found[mechanism(variant)][in_words(f"model={model}", {})] = mean_and_sd(ACCURACY, summary)
        return table({name: cells for name, cells in found.items() if len(cells) > 1})

    def rates(self, **lengths: int) -> Rows:
        """Return accuracies of the seeds that tuned, on probes at one length each, by the learning rate."""
        found = defaultdict[str, dict[str, str]](dict)
        for probe, length in lengths.items():
            for study in self.all_studies:
                for variant in study.variants if is_of(study, probe) and study.study == TUNING else ():
                    summary = study.summary(variant.label, f"{ACCURACY}_length_{length}")
                    column = f"{probes.words(probe)}, {length}, at {variant.settings['recipe.lr']}"
                    found[mechanism(variant)][column] = mean_and_sd(ACCURACY, summary) if summary else NONE
        return table(found)

    def two_groups(self) -> str:
        """Return which mechanisms have seeds in two groups far apart, at the longest length of training."""
        found = []
        for name, cells in probes.at_longest(self.tuned, beyond=False):
            apart = [c["attention"] for c in cells if Summary(run["value"] for run in c["runs"]).is_bimodal]
            found += [f"{name}: {'; '.join(sorted(apart))}"] if apart else []
        return " and ".join(found) or "none"

    def tuning(self, beyond: bool) -> Rows:
        """Return what tuning changes."""
        return probes.tuning_gains(self.cells, beyond)

    def costs(self) -> Rows:
        """Return the mean score, what it takes, and the losses of each mechanism, the best score first."""
        losses_on = (f"loss, {corpus}" for corpus in self.losses)
        rows = [["", "mean score", "numbers kept", "a step, times softmax", *losses_on]]
        for name in sorted(self.scores, key=lambda name: -self.scores[name]["mean"]):
            losses = (self.losses[corpus].get(name) for corpus in self.losses)
            cells = (loss_text(Summary(own.values())) if own else NONE for own in losses)
            score = number(ACCURACY, self.scores[name]["mean"])
            rows.append([name, score, f"{self.states[name]:,}", times(self.steps.get(name)), *cells])
        return rows

    def correlations(self) -> Rows:
        """Return the correlation of each score with each loss, the mean last."""
        rows = [["score", *(f"loss on {corpus}" for corpus in self.losses)]]
        for probe in next(iter(self.scores.values()), ()):
            found = (self.correlation(corpus, probe) for corpus in self.losses)
            rows.append([probes.words(probe), *(f"{text}; {verdict} 0" for text, verdict in found)])
        return rows

    def write(self, output: Path) -> None:
        """Write the map and the figures of the page into a folder."""
        probes.write_map(self.cells, output, TITLE)
        with style():
            write(draw(self), output.joinpath, "state", ["png"])

    # Words of sentences

    def state(self, name: str) -> int:
        """Return how many numbers a mechanism keeps."""
        return self.states[named(name.split(","))]

    def step(self, name: str) -> str:
        """Return the time of a training step as a multiple of that of softmax, with its interval."""
        return times(self.steps.get(named(name.split(","))))

    def correlation(self, corpus: str, probe: str = "mean") -> tuple[str, str]:
        """Return Spearman's correlation of a score with the loss, with its interval; "excludes" or "includes" (0)."""
        losses = self.losses[corpus]
        both = sorted(name for name in self.scores if name in losses)
        score = [self.scores[name][probe] for name in both]
        rho, interval = spearman(score, [statistics.mean(losses[name].values()) for name in both])
        texts = [f"{value:+.2f}".replace("-", "−") for value in (rho, *interval)]
        return "{} [{}, {}]".format(*texts), includes_0(interval)

    def compared(self, corpus: str) -> int:
        """Return of how many mechanisms scores and losses are compared."""
        return len(self.scores.keys() & self.losses[corpus].keys())


def loss_text(losses: Summary) -> str:
    """Return the mean of losses with its standard deviation, with three decimals: losses are close to each other."""
    return f"{losses.mean:.3f} ± {losses.sd:.3f}"


def times(row: Mapping[str, Any] | None) -> str:
    """Return the ratio of a row of benchmarks/common.py with its interval, or the time of the row that has none."""
    if row is None:
        return NONE
    if row["ratio"] is None:
        (seconds,) = row["seconds"].values()
        return f"1 ({1000 * statistics.median(seconds):.0f} ms)"
    return f"{row['ratio']:.2f}" + (" [{:.2f}, {:.2f}]".format(*row["interval"]) if row["interval"] else "")


def spearman(x: Sequence[float], y: Sequence[float]) -> tuple[float, Interval]:
    """Return Spearman's rank correlation of pairs, and its 95 % interval: percentiles over samples of the pairs.

    Samples in which one side is constant do not count.
    """
    drawn = np.random.default_rng(0).integers(len(x), size=(DRAWS, len(x)))
    drawn = np.vstack((np.arange(len(x)), drawn))  # first the pairs themselves
    a, b = (stats.rankdata(np.asarray(side)[drawn], axis=1) for side in (x, y))
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        rho, *samples = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    low, high = np.nanquantile(samples, (0.025, 0.975)) if not math.isnan(rho) else (math.nan, math.nan)
    return float(rho), (float(low), float(high))


def includes_0(interval: Interval) -> str:
    """Return whether an interval "excludes" or "includes" 0."""
    return "excludes" if interval[0] > 0 or interval[1] < 0 else "includes"


# Models


def table(cells: Mapping[str, Mapping[str, str]]) -> Rows:
    """Return named rows of named cells as a table."""
    columns = sorted(set().union(*cells.values()))
    rows = [[name, *(cells[name].get(column, NONE) for column in columns)] for name in sorted(cells)]
    return [["", *columns], *rows]


def is_of(study: Study, probe: str) -> bool:
    """Return whether a study is of a probe."""
    return study.title.endswith(f": {probe}")


def configs(studies: Sequence[Study], probe: str = RECALL) -> dict[str, dict[str, Any]]:
    """Return the config of a run of each mechanism on a probe."""
    found: dict[str, dict[str, Any]] = {}
    for study in studies:
        for variant in study.variants if is_of(study, probe) else ():
            found.setdefault(mechanism(variant), probes.all_runs(study, variant)[0].result["config"])
    return found


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    """Build the task of a config, with random weights, and its data. From then on torch has one thread."""
    import torch

    from speechformer.corpora.load import load
    from speechformer.tasks.registry import TASKS, build_data

    torch.set_num_threads(1)  # several wait for each other on a busy machine
    torch.manual_seed(0)
    data = build_data(config, load(config))
    return TASKS[config["task"]["name"]].from_config(config, data), data


def state_size(config: dict[str, Any], tokens: int = TOKENS) -> int:
    """Count the numbers in the cache of a config's model after so many tokens of one text, a multiple of 128."""
    import torch

    model = build(config)[0].model.eval()
    cache = model.decoder.new_cache()
    with torch.no_grad():
        for _ in range(tokens // CHUNK):
            model.hidden(torch.ones(1, CHUNK, dtype=torch.long), cache)
    return sum(x.numel() for layer in cache for name, x in layer.items() if name != "j")  # the places of keys


def training_step(config: dict[str, Any]) -> Callable[[], None]:
    """Return a training step of a config's model, always on the same batch."""
    import torch

    task, data = build(config)
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, fused=True)
    batch = next(iter(data.train_dataloader()))

    def step() -> None:
        optimizer.zero_grad()
        task.training_loss(batch).backward()
        optimizer.step()

    return step


def time_steps(folder: Path, output: Path, rounds: int) -> None:
    """Time a training step of each mechanism in turns on one thread, and write the rows, relative to softmax."""
    sys.path.append(str(HERE.parent / "benchmarks"))  # whose scripts import each other by name
    from common import Row, record, time_in_turns

    found = configs(Mechanisms(folder).studies)
    seconds = time_in_turns({name: training_step(config) for name, config in found.items()}, rounds, threads=1)
    rows: list[Any] = []
    for name in found:
        rows.append(Row("a training step", name, {side: seconds[side] for side in ("softmax", name)}))
        record(output, rows)
        print(f"{name}: {1000 * statistics.median(seconds[name]):.1f} ms, times softmax {times(vars(rows[-1]))}")


# The figure


def draw(found: Mechanisms) -> Figure:
    """Draw accuracy on recall over the numbers that a mechanism keeps, with intervals over seeds."""
    figure, axes = plt.subplots(len(PAIRS), 1, figsize=(9, 4 * len(PAIRS)), sharex=True, layout="constrained")
    for axis, length in zip(axes, PAIRS):
        cells = [cell for cell in found.tuned if (cell["probe"], cell["length"]) == (RECALL, length)]
        cells.sort(key=lambda cell: (found.states[cell["attention"]], cell["mean"]))
        states = [found.states[cell["attention"]] for cell in cells]
        gaps = np.flatnonzero(np.diff(np.log2(states)) > 0.5) + 1
        groups = np.split(np.arange(len(cells)), gaps)
        for group, look in zip(groups, LOOKS):
            is_last = len(groups) > 1 and group is groups[-1]
            y = np.array([100 * cells[k]["mean"] for k in group])
            x = [states[k] * 2.0 ** (ASIDE * (k - group.mean())) for k in group]  # or intervals hide each other
            for k, place, mean, height in zip(group, x, y, spread_labels(y)):
                interval = within_scale(ACCURACY, cells[k]["interval"] or (cells[k]["mean"],) * 2)
                axis.plot([place] * 2, 100 * np.array(interval), color=look["color"], lw=1.6, zorder=2)
                axis.plot(place, mean, look["marker"], color=look["color"], mec=INK, zorder=3)
                axis.annotate(
                    cells[k]["attention"],
                    (place, mean),
                    xytext=(x[-1] * 2**0.5 if is_last else x[0] / 2**0.5, height),
                    textcoords="data",
                    ha="left" if is_last else "right",
                    va="center",
                    fontsize=7,
                    arrowprops={**LEADER, "relpos": (0 if is_last else 1, 0.5)},
                )
        axis.set_xscale("log", base=2)
        axis.set_xlim(states[0] / 2 ** MARGINS[0], states[-1] * 2 ** MARGINS[1])
        axis.set_xticks([4**k for k in range(2, 14) if states[0] / 2 < 4**k < states[-1] * 2])
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set(title=f"{length} pairs" + " (trained to 8)" * (length > 8), ylim=(-8, 120), yticks=range(0, 101, 20))
        axis.set_ylabel(f"accuracy on {RECALL}, %")
    axes[-1].set_xlabel(f"numbers kept of a text of {TOKENS:,} tokens")
    return figure


def spread_labels(heights: np.ndarray) -> np.ndarray:
    """Return the heights that are nearest to some heights and `APART` or more from each other."""
    order = np.argsort(heights, kind="stable")
    steps = APART * np.arange(len(order))
    spread = np.empty(len(order))
    spread[order] = optimize.isotonic_regression(heights[order] - steps).x + steps
    return spread


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m studies.mechanisms", description="Time a step of each mechanism.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="runs of studies/mechanisms.sh")
    parser.add_argument("--output", type=Path, default=STEPS, help="file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each (%(default)s)")
    arguments = parser.parse_args()
    run_command(lambda: time_steps(arguments.folder, arguments.output, arguments.rounds))


if __name__ == "__main__":
    main()
