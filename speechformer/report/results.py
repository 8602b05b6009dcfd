"""Reading runs, and sorting them into tables.

A table holds the runs of one study, task, corpus and protocol: runs on different corpora or protocols never meet. A
row of it holds the runs of one config, whatever their seed. Nothing is dropped: what failed, diverged or is missing
stands in its row, and what is no result at all is named.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechformer.refusals import UserError
from speechformer.report import published
from speechformer.runs import RESULT, read_result

# What does not change what is measured, or is a table's and not a row's
NOT_A_ROWS = (
    "seed",
    "study",
    "checkpoint_every",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.log_every_n_steps",
)
NOT_A_ROWS_GROUPS = ("corpus.", "protocol.")


@dataclass(frozen=True)
class Run:
    """One `result.json`: what it says, where it lies, and its config with dotted keys."""

    folder: Path
    result: dict[str, Any]
    config: dict[str, Any]

    @property
    def status(self) -> str:
        return self.result["status"]

    @property
    def seed(self) -> int | None:
        return self.result["seed"]

    @property
    def metrics(self) -> dict[str, float | None]:
        return self.result.get("metrics", {})

    @property
    def command(self) -> str:
        """How to run it again, up to the folder."""
        module = "baselines" if "baseline" in self.result else "train"
        return " ".join([f"python -m speechformer.{module}", *map(quoted, self.result.get("overrides", []))])

    def row_settings(self) -> dict[str, Any]:
        """The settings that make a row."""
        settings = {
            key: value
            for key, value in self.config.items()
            if key not in NOT_A_ROWS and not key.startswith(NOT_A_ROWS_GROUPS)
        }
        if settings.get("pattern.seed") == self.seed:  # it follows the seed
            settings.pop("pattern.seed", None)
        return settings


@dataclass
class Row:
    """The runs of one config. `label` is unique in its table; `published` names the row of a report, if it is one."""

    label: str
    settings: dict[str, Any]
    runs: list[Run]
    published: str | None = None
    missing: list[int] = field(default_factory=list)

    @property
    def finished(self) -> list[Run]:
        """The runs that count, by seed."""
        return [run for run in self.runs if run.status == "finished"]

    def values(self, figure: str) -> dict[int | None, float]:
        """The last value of a figure in each run that has it, by seed."""
        found = {run.seed: run.metrics.get(figure) for run in self.finished}
        return {seed: value for seed, value in found.items() if value is not None}

    def best_values(self, figure: str) -> dict[int | None, float]:
        """The best value of a figure in the course of each run, by seed."""
        best = max if "accuracy" in figure else min
        found = {
            run.seed: [point[figure] for point in run.result["curve"] if figure in point] for run in self.finished
        }
        return {seed: best(values) for seed, values in found.items() if values}

    def curve(self, figure: str) -> dict[float, list[float]]:
        """The values of a figure in all runs at each evaluation, by epoch (classification) or step (else)."""
        found: dict[float, list[float]] = {}
        for run in self.finished:
            unit = 1
            if run.result["task"] == "classify":
                unit = math.ceil(run.result["corpus"]["counts"]["train"] / run.config["batch_size"])
            for point in run.result["curve"]:
                if figure in point:
                    found.setdefault(point["step"] / unit, []).append(point[figure])
        return {place: values for place, values in sorted(found.items()) if len(values) == len(self.finished)}

    @property
    def state(self) -> str:
        """How many runs count, and what became of the others."""
        words = [str(len(self.finished))]
        for status in ("diverged", "failed"):
            seeds = [str(run.seed) for run in self.runs if run.status == status]
            if seeds:
                words.append(f"{status}: seed {', '.join(seeds)}")
        if self.missing:
            words.append(f"missing: seed {', '.join(map(str, self.missing))}")
        return "; ".join(words)


@dataclass
class Table:
    """The rows of one study, task, corpus and protocol, and the baselines on the same.

    `protocol_settings` is the config group as JSON; `name` is unique in the report, for files and links.
    """

    study: str | None
    task: str
    protocol_settings: str
    corpus: str
    sha256: str
    rows: list[Row]
    name: str = ""
    baselines: list[Run] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # labels of published rows of which there is no run

    @property
    def title(self) -> str:
        known = published.content()["studies"].get(self.study)
        return known["title"] if known else self.study or f"Runs without a study: {self.task}"

    @property
    def protocol(self) -> str:
        return json.loads(self.protocol_settings)["name"]

    @property
    def main_figure(self) -> str:
        return "test_accuracy" if self.task == "classify" else "test_perplexity_mean"

    def figures(self) -> list[str]:
        """The figures to show, those that matter most first."""
        names = dict.fromkeys(name for row in self.rows for run in row.finished for name in run.metrics)
        if self.task == "classify":
            wanted = ["test_accuracy", "test_accuracy_seen", "test_accuracy_unseen", "train_accuracy"]
        else:
            found = [name for name in names if name.startswith("test_perplexity_") and name != self.main_figure]
            classes: list[str] = next(
                (run.result["corpus"]["classes"] for row in self.rows for run in row.finished), []
            )
            order = [f"test_perplexity_{name}" for name in classes]  # as the classes, where they are the same people
            tests = [name for name in order if name in found] + [name for name in found if name not in order]
            wanted = [self.main_figure, *tests, "test_sliding_perplexity_mean", "train_perplexity"]
        return [name for name in wanted if any(row.values(name) for row in self.rows)]

    def lengths(self) -> list[int]:
        """The longer contexts that some run was tested on, in tokens."""
        found = {length for row in self.rows for length in row.settings.get("task.lengths") or []}
        return sorted(found)


def quoted(override: str) -> str:
    """An override as a shell takes it."""
    return f"'{override}'" if any(sign in override for sign in '[](){}$*?<>|&;~ "') else override


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a config with dotted keys."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All runs under some folders; and, in words, what looks like one but is none.

    Raises:
        UserError: a folder is not there, or there is no run at all.
    """
    runs, remarks = [], []
    for top in folders:
        if not top.is_dir():
            raise UserError(f"{top}: there is no such folder.")
        for place, below, files in os.walk(top):
            below[:] = sorted(name for name in below if not name.startswith("."))  # not Hydra's own
            folder = Path(place)
            if RESULT in files:
                try:
                    result = read_result(folder)
                    missing = {"status", "task", "seed", "config"} - set(result)
                    if missing:
                        raise KeyError(*missing)
                    runs.append(Run(folder, result, dict(flat(result["config"]))))
                except (ValueError, KeyError, TypeError) as error:
                    remarks.append(f"{folder / RESULT} is no result ({type(error).__name__}); run it again.")
            elif "config.yaml" in files:
                remarks.append(f"{folder} has no result: it still runs, or was stopped.")
    if not runs:
        raise UserError(f"There is no {RESULT} under {', '.join(map(str, folders))}; train something first.")
    return runs, remarks


def build_tables(runs: list[Run]) -> tuple[list[Table], list[str]]:
    """The runs as tables; and, in words, what was left out as being there twice."""
    trained = [run for run in runs if "baseline" not in run.result]
    baselines = [run for run in runs if "baseline" in run.result]
    trained, remarks = once_each(trained)
    shas: dict[Any, set[str]] = defaultdict(set)
    for run in trained:
        if "corpus" in run.result:
            shas[about(run)].add(run.result["corpus"]["sha256"])
    sorted_out: dict[Any, list[Run]] = defaultdict(list)
    for run in trained:
        own = run.result["corpus"]["sha256"] if "corpus" in run.result else None
        if own is None:  # it failed before it read anything: beside its like, if that is clear
            like = shas[about(run)]
            own = next(iter(like)) if len(like) == 1 else ""
        sorted_out[about(run), own].append(run)
    tables = []
    for ((study, task, protocol, _), sha256), members in sorted_out.items():
        named = next((run.result["corpus"]["name"] for run in members if "corpus" in run.result), "unknown")
        table = Table(study, task, protocol, named, sha256, build_rows(members))
        table.baselines = [
            run
            for run in baselines
            if (run.result["task"], run.result["corpus"]["sha256"], protocol_of(run)) == (task, sha256, protocol)
        ]
        if study in published.content()["studies"]:
            have = {row.published for row in table.rows}
            rows = published.content()["rows"].items()
            table.expected = [row["label"] for key, row in rows if row["study"] == study and key not in have]
        tables.append(table)
    order = list(published.content()["studies"])
    tables.sort(
        key=lambda table: (
            order.index(table.study) if table.study in order else len(order),
            table.study or "",
            table.task,
            table.protocol != "paper",
            table.protocol_settings,
            table.sha256,
        )
    )
    for k, table in enumerate(tables):
        parts = (table.study or f"runs_{table.task}", table.protocol, table.sha256[:8])
        name = "_".join(part for part in parts if part)
        taken = {other.name for other in tables[:k]}
        table.name = name if name not in taken else f"{name}_{k}"
    return tables, remarks


def protocol_of(run: Run) -> str:
    settings = {key.partition(".")[2]: value for key, value in run.config.items() if key.startswith("protocol.")}
    return json.dumps(settings, sort_keys=True)


def about(run: Run) -> tuple[str | None, str, str, str]:
    """What a table is about: study, task, protocol, and the corpus that was asked for."""
    return run.config.get("study"), run.result["task"], protocol_of(run), run.config["corpus.name"]


def once_each(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """One run for each study, config, corpus and seed, rather one that finished, rather a later one; and, in words,
    those left out."""
    kept: dict[str, Run] = {}
    remarks = []
    for run in runs:
        sha256 = run.result.get("corpus", {}).get("sha256")
        key = json.dumps([about(run), run.row_settings(), sha256, run.seed], sort_keys=True)
        other = kept.get(key)
        if other is None:
            kept[key] = run
            continue
        better = run if (run.status == "finished") >= (other.status == "finished") else other
        kept[key] = better
        left = other if better is run else run
        remarks.append(f"{left.folder} is the same run as {better.folder}, and is not counted again.")
    return list(kept.values()), remarks


def build_rows(runs: list[Run]) -> list[Row]:
    """The runs of a table by config: those of the reports in their order, the study's reference, the others."""
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[json.dumps(run.row_settings(), sort_keys=True)].append(run)
    rows = []
    for members in by_settings.values():
        members.sort(key=lambda run: -1 if run.seed is None else run.seed)
        rows.append(Row("", members[0].row_settings(), members, published.row_of(members[0].config)))
    seeds = {run.seed for row in rows for run in row.runs if run.seed is not None}
    for row in rows:
        row.missing = sorted(seeds - {run.seed for run in row.runs})
    order = list(published.content()["rows"])
    for row, label in zip(rows, labels(rows)):
        row.label = label
    study = published.content()["studies"].get(runs[0].config.get("study"), {})
    reference = study.get("reference", {None: None})
    rows.sort(
        key=lambda row: (
            order.index(row.published) if row.published else len(order),
            any(row.settings.get(key, ...) != value for key, value in reference.items()),
            row.label,
        )
    )
    return rows


def labels(rows: list[Row]) -> list[str]:
    """The published rows' own names; for others what differs in their config, as one would type it."""

    def differs(key: str, row: Row) -> bool:
        """Whether rows differ in a key; in an option of a model or pattern, rows of the same model or pattern."""
        name = f"{key.partition('.')[0]}.name"
        like = [other for other in rows if key == name or other.settings.get(name) == row.settings.get(name)]
        return len({json.dumps(other.settings[key]) for other in like if key in other.settings}) > 1

    own = []
    for row in rows:
        words = []
        for key, value in row.settings.items():
            if differs(key, row):
                said = json.dumps(value).replace('"', "") if isinstance(value, list) else str(value)
                words.append(f"{key.removesuffix('.name')}={said}")
        own.append(" ".join(words) or "(one setting)")
    names = [published.content()["rows"][row.published]["label"] if row.published else "" for row in rows]
    return [
        name if name and names.count(name) == 1 else f"{name}: {typed}" if name else typed
        for name, typed in zip(names, own)
    ]
