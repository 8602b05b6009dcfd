"""What a search has found (`hydra/sweeper=optuna`): its trials by rank, and optuna's history and importance."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError
from speechformer.report.markdown import Markdown
from speechformer.report.markdown import table as markdown_table
from speechformer.report.tables import number
from speechformer.runs import folder as runs
from speechformer.runs import search

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TRIALS = 30  # in the table
MARKERS = {"COMPLETE": ("o", "#0072B2"), "PRUNED": ("x", "#8a949e")}


def sections(
    folders: Sequence[Path], output: OutputFolder, formats: Sequence[str] | None
) -> Iterator[tuple[str, Markdown]]:
    """Yield the parts of the page on each search: tables by name, others with "". No figures without `formats`."""
    for place, (folder, study) in enumerate(searches(folders)):
        if not (trials := ranked(study)):
            continue
        name, states = f"search{place or ''}", [trial.state.name for trial in study.trials]
        counts = ", ".join(f"{states.count(state)} {state.lower()}" for state in dict.fromkeys(states))
        text = "{} trials: {}. The score is on held-out sentences. Only the best trial shows its test metric."
        yield "", Markdown("## Search {}").format(folder.name)
        yield "", Markdown(text).format(str(len(states)), counts)
        yield name, ranking(folder, trials)
        if formats is not None:
            yield from (("", own) for own in pictures(study, name, output, formats))


def pictures(study: Any, name: str, output: OutputFolder, formats: Sequence[str]) -> Iterator[Markdown]:
    """Draw history and importance, and yield them."""
    from matplotlib import pyplot

    from speechformer.report.page import picture
    from speechformer.report.plots import HERE, write

    figures = {
        "history": (history, "The score of each trial, and the best so far."),
        "importance": (importance, "The share of the score's variance that each setting explains (fANOVA)."),
    }
    for kind, (draw, caption) in figures.items():
        with pyplot.style.context(HERE / "figures.mplstyle"):
            if (figure := draw(study)) is not None:
                path = write(figure, output, f"{name}_{kind}", formats)
                yield picture(f"Search: {kind}", path.relative_to(output.path).as_posix(), caption)


def searches(folders: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield each folder with a search below some folders, and its study, where optuna is installed."""
    for top in folders:
        for place, below, files in os.walk(top):
            below.sort()
            if search.SEARCH in files:
                try:
                    storage = search.journal(Path(place))
                    yield Path(place), search.import_optuna().load_study(study_name=search.STUDY, storage=storage)
                except (UserError, KeyError, OSError):
                    continue


def ranked(study: Any) -> list[Any]:
    """Return the complete trials of a study, the best first."""
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    return sorted(complete, key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")


def ranking(folder: Path, trials: Sequence[Any]) -> Markdown:
    """Return the table of the trials, the best first; the test metric stands beside the best alone.

    To look at the test metric of every trial would be to choose by it.
    """
    metric, results = metric_of(folder)
    keys = sorted({key for trial in trials for key in trial.params})
    rows = []
    for rank, trial in enumerate(trials[:MOST_TRIALS], start=1):
        own = results.get(trial.number, [])
        seconds = sum(result["seconds"] for result in own)
        cells = [str(rank), *(shown(trial.params.get(key)) for key in keys), number(metric, trial.value)]
        rows.append([*cells, f"{seconds:.0f} s", tested(own) if rank == 1 else ""])
    return markdown_table(["rank", *keys, metric.replace("_", " "), "time", "test"], rows)


def tested(results: Sequence[dict[str, Any]]) -> str:
    """Return the mean of the main metric of some runs, which is of test."""
    name = results[0]["report"]["metric"] if results else ""
    values = [value for result in results if (value := result["metrics"].get(name)) is not None]
    return number(name, sum(values) / len(values)) if values else ""


def shown(value: Any) -> str:
    """Return a setting; numbers have the three digits that the run had."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def metric_of(folder: Path) -> tuple[str, dict[int, list[dict[str, Any]]]]:
    """Return the name of the score, and the results of each trial that this folder has, by the trial's number."""
    results: dict[int, list[dict[str, Any]]] = {}
    metric = ""
    for job, trial in (runs.read_json(folder / search.SEARCH) or {}).get("jobs", {}).items():
        pointer = runs.read_or_none(folder / "jobs" / f"{job}.json", "job") or {}
        result = runs.result_or_none(folder / pointer["folder"]) if "folder" in pointer else None
        if result is not None and result["status"] == "finished":
            metric = result["best"]["metric"]
            results.setdefault(trial, []).append(result)
    return metric, results


def history(study: Any) -> Figure:
    """Draw the score of each trial and the best so far."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.4))
    better = max if study.direction.name == "MAXIMIZE" else min
    for state, (marker, colour) in MARKERS.items():
        own = [trial for trial in study.trials if trial.state.name == state]
        points = [(trial.number, trial.value if state == "COMPLETE" else last(trial)) for trial in own]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            axis.plot(*zip(*points), marker, color=colour, label=state.lower(), markersize=5)
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    best = [better(trial.value for trial in complete[: k + 1]) for k in range(len(complete))]
    axis.step([trial.number for trial in complete], best, where="post", color="#D55E00", label="best so far")
    axis.set(xlabel="trial", ylabel="score on held-out sentences")
    axis.locator_params(axis="x", integer=True)
    axis.legend(frameon=False)
    return figure


def last(trial: Any) -> float | None:
    """Return the last score that a trial has reported."""
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None


def importance(study: Any) -> Figure | None:
    """Draw which share of the variance of the score each setting explains (fANOVA); None with too few trials.

    Hutter, Hoos, Leyton-Brown 2014, "An Efficient Approach for Assessing Hyperparameter Importance".
    """
    from matplotlib import pyplot

    optuna = search.import_optuna()
    if len({trial.value for trial in ranked(study)}) < 4:
        return None
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    names, values = [*shares][::-1], [*shares.values()][::-1]
    figure, axis = pyplot.subplots(figsize=(6.4, 0.9 + 0.4 * len(names)))
    axis.hlines(range(len(names)), 0, values, color="0.8")
    axis.plot(values, range(len(names)), "o", color="#0072B2")
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="share of the variance of the score", xlim=(0, 1), ylim=(-0.6, len(names) - 0.4))
    return figure
