"""Reading runs, and sorting them into tables.

A table holds the runs of one study, task, corpus and protocol: runs on different corpora or protocols never meet. A
row of it holds the runs of one config, whatever their seed. Nothing is dropped: what failed, diverged or is missing
stands in its row, and what is no result at all is named.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from speechformer.errors import UserError
from speechformer.report import published
from speechformer.runs.folder import OWNER, RESULT, read_result
from speechformer.runs.identity import NOT_IDENTITY, plain_number

# What does not change what is measured, or is a table's and not a row's
NOT_A_ROWS = ("seed", "study", "trainer.log_every_n_steps", *NOT_IDENTITY)
NOT_A_ROWS_GROUPS = ("corpus.", "protocol.")
ABSENT = object()
MAIN_FIGURES = {"classify": "test_accuracy", "lm": "test_perplexity_mean", "translate": "test_bleu"}


def higher_is_better(figure: str) -> bool:
    """Whether more of a figure is better: of all but perplexities and losses."""
    return "perplexity" not in figure and "loss" not in figure


@dataclass(frozen=True)
class Run:
    """One `result.json`: what it says, where it lies, and its config with dotted keys."""

    folder: Path
    result: dict[str, Any]
    config: dict[str, Any]

    @property
    def task(self) -> str:
        return self.result["task"]

    @property
    def seed(self) -> int | None:
        return self.result["seed"]

    @property
    def baseline(self) -> str | None:
        """The name of the baseline that this is, or None."""
        return self.result["baseline"]["name"] if "baseline" in self.result else None

    @property
    def metrics(self) -> dict[str, float | None]:
        return self.result.get("metrics", {})

    @property
    def main_figure(self) -> str:
        return MAIN_FIGURES[self.task]

    @property
    def status(self) -> str:
        """ "finished", "diverged", "failed" or "killed"; without its main figure (an infinite one) a run diverged."""
        if self.result["status"] == "finished" and self.metrics.get(self.main_figure) is None:
            return "diverged"
        return self.result["status"]

    @property
    def protocol(self) -> str:
        """The config group as JSON."""
        settings = {key.partition(".")[2]: value for key, value in self.config.items() if key.startswith("protocol.")}
        return json.dumps(settings, sort_keys=True)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training rows."""
        batches = math.ceil(self.result["corpus"]["counts"]["train"] / self.config["batch_size"])
        limit = self.config.get("trainer.limit_train_batches")
        if limit is not None:  # a number of batches, or a share of them
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(batches / self.config.get("trainer.accumulate_grad_batches", 1))

    @property
    def command(self) -> str:
        """How to run it again, up to the seed and the folder."""
        if self.result.get("overrides") is None:
            return "called from Python; its config is in result.json"
        module = "baselines" if self.baseline else "train"
        overrides = [quoted(override) for override in self.result["overrides"] if not override.startswith("seed=")]
        return " ".join([f"python -m speechformer.{module}", *overrides])

    @cached_property
    def row_settings(self) -> dict[str, Any]:
        """The settings that make a row."""
        settings = {
            key: plain_number(value, key)
            for key, value in self.config.items()
            if key not in NOT_A_ROWS and not key.startswith(NOT_A_ROWS_GROUPS)
        }
        if settings.get("recipe.init") != "normal":  # nobody else reads it
            settings.pop("recipe.init_std", None)
        own = any(override.startswith("pattern.seed=") for override in self.result.get("overrides") or [])
        if settings.get("pattern.seed") == self.seed and not own:  # it follows the seed
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
        """The runs that count."""
        return [run for run in self.runs if run.status == "finished"]

    def values(self, figure: str) -> dict[int | None, float]:
        """The last value of a figure in each run that has it, by seed."""
        found = {run.seed: run.metrics.get(figure) for run in self.finished}
        return {seed: value for seed, value in found.items() if value is not None}

    def best_values(self, figure: str) -> dict[int | None, float]:
        """The best value of a figure in the course of each run, by seed; of a mean over the tests, the mean of their
        best values."""
        best = max if higher_is_better(figure) else min
        found = {}
        for run in self.finished:
            curve = run.result.get("curve", [])
            parts = [figure]
            if figure == "test_perplexity_mean":
                parts = [name for name in run.metrics if name.startswith("test_perplexity_") and name != figure]
            columns = [[point[name] for point in curve if point.get(name) is not None] for name in parts]
            if columns and all(columns):
                found[run.seed] = sum(map(best, columns)) / len(columns)
        return found

    def curve(self, figure: str) -> dict[float, list[float]]:
        """The values of a figure in all runs at each evaluation, by epoch (classification) or step (else)."""
        found: dict[float, list[float]] = {}
        for run in self.finished:
            unit = run.steps_per_epoch if run.task == "classify" else 1
            for point in run.result.get("curve", []):
                if point.get(figure) is not None:
                    found.setdefault(point["step"] / unit, []).append(point[figure])
        return {place: values for place, values in sorted(found.items()) if len(values) == len(self.finished)}

    def at_length(self, length: int) -> list[float] | None:
        """Test perplexities in contexts of a length; None where that was not asked for, empty where it cannot be."""
        if length == self.settings["block_size"]:
            return list(self.values("test_perplexity_mean").values())
        if length not in (self.settings.get("task.lengths") or []):
            return None
        return list(self.values(f"test_length_{length}_perplexity_mean").values())

    @property
    def state(self) -> str:
        """How many runs count, and what became of the others."""
        words = [str(len(self.finished))]
        for status in ("diverged", "failed", "killed"):
            seeds = [str(run.seed) for run in self.runs if run.status == status]
            if seeds:
                words.append(f"{status}: seed {', '.join(seeds)}")
        if self.missing:
            words.append(f"missing: seed {', '.join(map(str, self.missing))}")
        return "; ".join(words)


@dataclass
class Table:
    """The rows of one study, task, corpus and protocol, and the baselines on the same.

    `protocol_settings` is the config group as JSON; `name` is unique in the report, for files and links; `expected`
    holds the labels of published rows of which there is no run.
    """

    study: str | None
    task: str
    protocol_settings: str
    corpus: str
    sha256: str
    rows: list[Row]
    baselines: list[Run]
    name: str = ""
    direction: str = ""
    expected: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        known = published.content()["studies"].get(self.study)
        return known["title"] if known else self.study or f"Runs without a study: {self.task}"

    @property
    def protocol(self) -> str:
        return json.loads(self.protocol_settings)["name"]

    @property
    def judged(self) -> bool:
        """Whether published figures may stand beside these: the same corpus, measured in the same way."""
        theirs = published.content()["corpus"]
        return self.sha256 == theirs["sha256"] and json.loads(self.protocol_settings) == theirs["protocol"]

    @property
    def main_figure(self) -> str:
        return self.rows[0].runs[0].main_figure

    def tests(self) -> list[str]:
        """The perplexities of the tests, in the order of the classes where they are the same people."""
        names = dict.fromkeys(name for row in self.rows for run in row.finished for name in run.metrics)
        found = [name for name in names if name.startswith("test_perplexity_") and name != self.main_figure]
        classes: list[str] = next((run.result["corpus"]["classes"] for row in self.rows for run in row.finished), [])
        order = [f"test_perplexity_{name}" for name in classes]
        return [name for name in order if name in found] + [name for name in found if name not in order]

    def figures(self) -> list[str]:
        """The figures to show, those that matter most first."""
        if self.task == "classify":
            wanted = ["test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train", "train_accuracy"]
            if not any(row.values("test_accuracy_in_train") for row in self.rows):
                wanted.remove("test_accuracy_not_in_train")  # that is all of them
        elif self.task == "translate":
            wanted = [self.main_figure, "test_bleu_interval", "test_chrf", "test_length_ratio", "test_exact"]
            wanted.append("validation_bleu")
        else:
            wanted = [self.main_figure, *self.tests(), "test_sliding_perplexity_mean", "train_perplexity"]
        return [name for name in wanted if any(row.values(name) for row in self.rows)]

    def source_lengths(self) -> dict[str, int]:
        """The buckets of source lengths of a translation's test, in words, and the sentences of each."""
        runs = (run for row in self.rows for run in row.finished)
        counts: dict[str, Any] = next((run.result["corpus"]["counts"] for run in runs), {})
        return {name: count for name, count in counts.get("test_by_length", {}).items() if count}

    def lengths(self) -> list[int]:
        """The contexts that its runs were tested on, in tokens, if some were longer than those of training."""
        longer = {length for row in self.rows for length in row.settings.get("task.lengths") or []}
        return sorted(longer | {row.settings["block_size"] for row in self.rows}) if longer else []


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


def read_run(folder: Path) -> Run:
    """The run that left a result in a folder.

    Raises:
        ValueError: the file is cut short, or lacks what a result has; it says which.
    """
    result = read_result(folder)
    if not isinstance(result, dict):
        raise ValueError("it is no object")
    needed = {"status", "task", "seed", "config"}
    if result.get("status") not in ("failed", "killed"):
        needed |= {"metrics", "corpus", "parameters"}
    if missing := needed - {name for name, value in result.items() if value is not None or name == "seed"}:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    return Run(folder, result, dict(flat(result["config"])))


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
                    runs.append(read_run(folder))
                except ValueError as error:
                    remarks.append(f"{folder / RESULT} is no result that can be read ({error}); run it again.")
            elif OWNER in files:  # what a run writes when it begins
                remarks.append(f"{folder} has no result: it still runs, or was stopped.")
    if not runs:
        found = "".join(f" {remark}" for remark in remarks[:3])
        raise UserError(f"There is no {RESULT} to read under {', '.join(map(str, folders))}.{found}")
    return runs, remarks


def build_tables(runs: list[Run]) -> tuple[list[Table], list[str]]:
    """The runs as tables; and, in words, what was left out as being there twice."""
    shas = corpora(runs)
    runs, remarks = once_each(runs, shas)
    baselines = [run for run in runs if run.baseline]
    members: dict[tuple[str | None, str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if not run.baseline:
            members[run.config.get("study"), run.task, run.protocol, shas[run.folder]].append(run)
    tables = []
    for (study, task, protocol, sha256), own in members.items():
        name = next((run.result["corpus"]["name"] for run in own if "corpus" in run.result), "unknown")
        rows = build_rows(own)
        beside = [run for run in baselines if (run.task, run.protocol, shas[run.folder]) == (task, protocol, sha256)]
        if task == "classify":  # its sentences are cut there
            sizes = {row.settings["block_size"] for row in rows}
            beside = [run for run in beside if run.config["block_size"] in sizes]
        key, _, more = sha256.partition(" ")
        table = Table(study, task, protocol, name, key, rows, beside, direction=" to ".join(more.split()[:2]))
        if study in published.content()["studies"]:
            have = {row.published for row in rows}
            known = published.content()["rows"].items()
            table.expected = [row["label"] for key, row in known if row["study"] == study and key not in have]
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
        name = "_".join(re.sub(r"[^\w.-]", "-", part) for part in parts if part)
        taken = {other.name for other in tables[:k]}
        table.name = name if name not in taken else f"{name}_{k}"
    return tables, remarks


def corpus_key(corpus: dict[str, Any]) -> str:
    """What tells corpora apart: the sha256 of the files, and of pairs the direction and what was cleaned out."""
    if "languages" not in corpus:
        return corpus["sha256"]
    cleaned = [count for count in corpus["counts"].get("cleaned", {}).values() if count]
    return " ".join([corpus["sha256"], *corpus["languages"], *map(str, cleaned)])


def corpora(runs: list[Run]) -> dict[Path, str]:
    """The key of each run's corpus, by folder. One that failed before it read anything has that of its like
    (study, task, protocol, name of the corpus) if they have one in common, else an empty one."""

    def like(run: Run) -> tuple[str | None, str, str, str]:
        return run.config.get("study"), run.task, run.protocol, run.config["corpus.name"]

    known: dict[Any, set[str]] = defaultdict(set)
    for run in runs:
        if "corpus" in run.result:
            known[like(run)].add(corpus_key(run.result["corpus"]))
    found = {}
    for run in runs:
        own = {corpus_key(run.result["corpus"])} if "corpus" in run.result else known[like(run)]
        found[run.folder] = next(iter(own)) if len(own) == 1 else ""
    return found


def once_each(runs: list[Run], shas: dict[Path, str]) -> tuple[list[Run], list[str]]:
    """One run for each study, config, corpus and seed: rather one that finished, else the last by name of folder;
    and, in words, those left out."""
    kept: dict[str, Run] = {}
    remarks = []
    for run in runs:
        about = [run.baseline, run.config.get("study"), run.task, run.protocol, shas[run.folder], run.seed]
        key = json.dumps([about, run.row_settings], sort_keys=True)
        other = kept.get(key)
        if other is None:
            kept[key] = run
            continue
        kept[key] = run if (run.status == "finished") >= (other.status == "finished") else other
        left = other if kept[key] is run else run
        remarks.append(f"{left.folder} is the same run as {kept[key].folder}, and is not counted again.")
    return list(kept.values()), remarks


def build_rows(runs: list[Run]) -> list[Row]:
    """The runs of a table by config: those of the reports in their order, the study's reference, the others."""
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[json.dumps(run.row_settings, sort_keys=True)].append(run)
    rows = []
    for members in by_settings.values():
        members.sort(key=lambda run: -1 if run.seed is None else run.seed)
        settings = members[0].row_settings
        rows.append(Row("", settings, members, published.row_of(settings)))
    seeds = {run.seed for row in rows for run in row.runs if run.seed is not None}
    for row, label in zip(rows, labels(rows)):
        row.label = label
        row.missing = sorted(seeds - {run.seed for run in row.runs})
    study = published.content()["studies"].get(runs[0].config.get("study"), {})
    reference = study.get("reference", {})
    order = list(published.content()["rows"])
    rows.sort(
        key=lambda row: (
            order.index(row.published) if row.published else len(order),
            any(row.settings.get(key, ABSENT) != value for key, value in reference.items()),
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
        return any(other.settings.get(key, ABSENT) != row.settings[key] for other in like)

    own = []
    for row in rows:
        words = []
        for key, value in sorted(row.settings.items(), key=lambda item: not item[0].endswith(".name")):
            if differs(key, row):
                said = json.dumps(value).replace('"', "") if isinstance(value, list) else str(value)
                words.append(f"{key.removesuffix('.name')}={said}")
        alone = f"model={row.settings['model.name']} pattern={row.settings['pattern.name']}"
        own.append(" ".join(words) or alone)
    names = [published.content()["rows"][row.published]["label"] if row.published else "" for row in rows]
    return [
        name if name and names.count(name) == 1 else f"{name}: {typed}" if name else typed
        for name, typed in zip(names, own)
    ]
