"""Read `result.json` files, and sort the runs into tables.

A table holds the runs of one study, task, corpus and protocol; each of its rows holds the runs of one configuration
over several seeds. Nothing is left out silently: failed, diverged and missing runs are listed in their row, and files
that cannot be read are listed above the tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.config import CONF, load_plain
from speechformer.errors import UserError
from speechformer.report import legacy, published
from speechformer.report.labels import ABSENT, name_rows
from speechformer.report.statistics import Summary
from speechformer.report.tuning import TUNED
from speechformer.runs.folder import OWNER, PREDICTIONS, RESULT, DamagedError, read_result
from speechformer.runs.identity import (
    ADDED,
    NOT_IDENTITY,
    NUMERICS_VERSION,
    added_to,
    flatten,
    plain_number,
)
from speechformer.runs.predictions import read_predictions

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Config keys that do not change what is measured, or that belong to the table and not to the row
NOT_IN_ROW = ("seed", "study", "trainer.log_every_n_steps", *NOT_IDENTITY)
NOT_IN_ROW_GROUPS = ("corpus.", "protocol.")
FAILED = ("failed", "killed", "pruned")
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)")  # rows are sorted by the value of those in their names
TABLE = ["study", "task", "protocol", "corpus_key"]  # attributes that the runs of a table have in common


def is_better_higher(metric: str) -> bool:
    """Return whether a higher value of a metric is better; of perplexities and losses a lower one is."""
    return "perplexity" not in metric and "loss" not in metric


class Run:
    """One `result.json`.

    Attributes:
        config: with dotted keys.
        report: what to show of it (main metric, columns, comparisons, x axis, note, unit).
        baseline: the name of the baseline, or None for a trained model.
        status: "finished", "diverged", "failed" or "killed"; a run whose main metric is infinite has diverged.
        protocol: the config group as JSON.
        corpus_key: sha256 of the corpus, and of pairs the direction and how many were left out; None if unknown.
    """

    def __init__(self, folder: Path, result: dict[str, Any], config: dict[str, Any]) -> None:
        self.folder, self.result, self.config = folder, result, config
        self.task: str = result["task"]
        study = config.get("study")
        self.study = "" if study is None else str(study)
        self.seed: int | None = result["seed"]
        self.metrics: dict[str, float | None] = result.get("metrics") or {}
        self.report = legacy.describe(result)
        self.baseline: str | None = result["baseline"]["name"] if "baseline" in result else None
        main, self.status = self.report["metric"], str(result.get("status"))
        if self.status == "finished" and main and self.metrics.get(main) is None:
            self.status = "diverged"
        own = {key: value for key, value in config.items() if key.startswith("protocol.")}
        protocol = {key.partition(".")[2]: value for key, value in own.items() if ADDED.get(key, ABSENT) != value}
        self.protocol = json.dumps(protocol, sort_keys=True)
        corpus = result.get("corpus") or {}
        counts = corpus.get("counts", {})
        left_out = [*counts.get("cleaned", {}).values(), counts.get("removed_from_validation")]
        parts = [corpus["sha256"], *corpus.get("languages", []), *map(str, filter(None, left_out))] if corpus else []
        self.corpus_key = " ".join(parts) or None

    @property
    def is_outdated(self) -> bool:
        """Whether an earlier version of the code computed the result, whose numbers differ from today's."""
        return int(self.result.get("numerics", 1)) < NUMERICS_VERSION

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training rows."""
        counts = self.result["corpus"]["counts"]
        batches = math.ceil(counts.get("train_rows", counts["train"]) / self.config["batch_size"])
        limit = self.config.get("trainer.limit_train_batches")
        if limit is not None:  # a number of batches, or a fraction of them
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(max(batches, 1) / self.config.get("trainer.accumulate_grad_batches", 1))

    def value(self, metric: str, at: float | None = None) -> float | None:
        """Return a metric, or the ratio of two (`a / b`): the final value, or that at an epoch or step."""
        if " / " in metric:
            over, under = (self.value(name, at) for name in metric.split(" / "))
            return over / under if over is not None and under else None
        if metric.endswith("_balanced_accuracy"):  # the mean over the classes
            start = metric.replace("_balanced_accuracy", "_accuracy_of_")
            of_classes = [self.value(name, at) for name in self.metrics if name.startswith(start)]
            known = [value for value in of_classes if value is not None]
            return sum(known) / len(known) if known else None
        if metric in self.costs:
            return self.costs[metric]
        if at is None:
            return self.metrics.get(metric)
        step = round(at * (self.steps_per_epoch if self.report["x_axis"] == "epoch" else 1))
        return next((point.get(metric) for point in self.result.get("curve", []) if point["step"] == step), None)

    @property
    def costs(self) -> dict[str, float | None]:
        """The time of training, and the most memory that the run's process had, or on a GPU its tensors."""
        peak = (self.result.get("machine") or {}).get("peak_bytes")
        seconds = (self.result.get("seconds_by_phase") or {}).get("training")
        return {"training_seconds": seconds, "peak_megabytes": None if peak is None else peak / 1e6}

    def predictions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return for each test sentence whether its class was predicted, and whether train has it, too: bool [N].

        Returns None if the run has no `predictions.tsv`.

        Raises:
            DamagedError: the file is not what the run has written.
        """
        path, corpus, accuracy = (
            self.folder / PREDICTIONS,
            self.result.get("corpus"),
            self.metrics.get("test_accuracy"),
        )
        if not corpus or accuracy is None or not os.path.lexists(path):
            return None
        return read_predictions(path, corpus.get("classes", []), corpus["counts"]["test"], accuracy)

    @property
    def command(self) -> str:
        """The command that repeats the run, without seed and folder; of an ensemble with its members.

        It fixes the number of threads, which decides the last bits.
        """
        if "members" in self.result:
            return evaluation_command(self)
        if self.result.get("overrides") is None:
            return "called from Python; its config is in result.json"
        module = "baselines" if self.baseline else "train"
        overrides = [override for override in self.result["overrides"] if not override.startswith("seed=")]
        threads = (self.result.get("machine") or {}).get("threads")
        if isinstance(threads, int):
            overrides = [override for override in overrides if not override.lstrip("+").startswith("threads=")]
            overrides.append(f"threads={threads}")
        return shlex.join(["python", "-m", f"speechformer.{module}", *overrides])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The part of the config that decides the row."""
        own = {key: value for key, value in self.config.items() if key not in NOT_IN_ROW}
        settings = {key: plain_number(own[key], key) for key in own if not key.startswith(NOT_IN_ROW_GROUPS)}
        added = added_to(settings.get("task.name"))
        settings = {key: value for key, value in settings.items() if key not in added or value != added[key]}
        if settings.get("recipe.init") != "normal":  # no other initialisation reads it
            settings.pop("recipe.init_std", None)
        explicit = any(override.startswith("pattern.seed=") for override in self.result.get("overrides") or [])
        if settings.get("pattern.seed") == self.seed and not explicit:  # it follows the run's seed
            settings.pop("pattern.seed", None)
        return settings

    @cached_property
    def row_key(self) -> str:
        return json.dumps(self.settings, sort_keys=True)


def evaluation_command(run: Run) -> str:
    """Return the command that repeats the evaluation of a run or an ensemble."""
    members = run.result["members"]
    checkpoints = {member["checkpoint"] for member in members}
    checkpoint = ["--checkpoint", *checkpoints] if len(checkpoints) == 1 else []
    study = ["--study", run.study] if run.study else []
    folders = [member["folder"] for member in members]
    return shlex.join(["python", "-m", "speechformer.evaluate", *folders, *checkpoint, *study])


def members_of(run: Run) -> frozenset[str]:
    """Return the runs of an ensemble; of a single run nothing."""
    members = run.result.get("members", ())
    return frozenset(own["identity"] or own["folder"] for own in members) if len(members) > 1 else frozenset()


@dataclass
class Row:
    """The runs of one configuration.

    Attributes:
        label: unique in its table; in words.
        overrides: the settings in which it differs from the others, by key, as on the command line.
        words: their names by key; name: the overrides as one text.
        published: the name of the published row with this configuration, or None.
        missing: seeds that other rows of the table have.
        is_usual: whether it has no setting that most rows do not have.
    """

    label: str
    settings: dict[str, Any]
    runs: list[Run]
    published: str | None = None
    missing: list[int] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    name: str = ""
    is_usual: bool = False

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def metrics(self) -> list[str]:
        """The metrics that some of its finished runs have."""
        return list(dict.fromkeys(name for run in self.finished for name in run.metrics))

    @property
    def ran(self) -> bool:
        """Whether some run came to its end; else its settings may be what it failed of."""
        return any(run.status not in FAILED for run in self.runs)

    def values(self, metric: str, at: float | None = None) -> dict[int | None, float]:
        """Return a metric by seed, of the runs that have it: the final value, or that at an epoch or step."""
        values = {run.seed: run.value(metric, at) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}

    def mixed(self, metric: str) -> str:
        """Return the name of a metric; of a model that is mixed with counts, of the same of the mixture."""
        name = re.sub("^(test|validation)_", r"\1_mixture_", metric)
        return name if self.values(name) else metric

    def mixed_values(self, metric: str) -> dict[int | None, float]:
        """Return a metric by seed; of a model that is mixed with counts, that of the mixture."""
        return self.values(self.mixed(metric))

    def summary(self, metric: str, best: bool = False) -> Summary | None:
        """Return the statistics of the final or best values of a metric, or None if no run has it."""
        values = (self.best_values(metric) if best else self.values(metric)).values()
        return Summary(values) if values else None

    def best_values(self, metric: str) -> dict[int | None, float]:
        """Return the best value of a metric during each run by seed; for a mean over tests, the mean of the bests."""
        best = max if is_better_higher(metric) else min
        values = {}
        for run in self.finished:
            parts = [metric]
            if metric == "test_perplexity_mean":
                parts = [name for name in run.metrics if name.startswith("test_perplexity_") and name != metric]
            curve = run.result.get("curve", [])
            columns = [[point[name] for point in curve if point.get(name) is not None] for name in parts]
            if columns and all(columns):
                values[run.seed] = sum(map(best, columns)) / len(columns)
        return values

    def curve(self, metric: str) -> dict[float, Summary]:
        """Return the values of a metric by epoch or step, where every finished run has one."""
        curve: dict[float, list[float]] = {}
        for run in self.finished:
            unit = run.steps_per_epoch if run.report["x_axis"] == "epoch" else 1
            for point in run.result.get("curve", []):
                if point.get(metric) is not None:
                    curve.setdefault(point["step"] / unit, []).append(point[metric])
        return {x: Summary(values) for x, values in sorted(curve.items()) if len(values) == len(self.finished)}

    def at_length(self, length: int) -> Summary | str:
        """Return the mean test perplexity in contexts of `length` tokens, or why there is none."""
        if not self.ran:
            return "–"
        trained, requested = self.settings["block_size"], self.settings.get("task.lengths") or []
        metric = "test_perplexity_mean" if length == trained else f"test_length_{length}_perplexity_mean"
        if length != trained and length not in requested:
            return "not tested"
        return self.summary(metric) or ("cannot run" if self.finished else "–")

    @property
    def state(self) -> str:
        """The number of finished runs, and the seeds of the others."""
        others = {word: [run.seed for run in self.runs if run.status == word] for word in ("diverged", *FAILED)}
        others["missing"] = [*self.missing]
        words = [f"{word}: seed {ranges(seeds)}" for word, seeds in others.items() if seeds]
        return "; ".join([str(len(self.finished)), *words])


def ranges(seeds: Sequence[int | None]) -> str:
    """Return seeds with three or more consecutive ones as a range, "0, 5–19"."""
    parts: list[list[int | None]] = []
    for seed in seeds:
        if parts and seed is not None and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    texts = [f"{own[0]}–{own[-1]}" if len(own) > 2 else ", ".join(map(str, own)) for own in parts]
    return ", ".join(texts)


class Table:
    """The rows of one study, task, corpus and protocol, and the baselines on the same.

    Args:
        key: study (or ""), task, protocol as JSON, corpus as `Run.corpus_key`.
        baselines: those with the same task, protocol and corpus, of any study.

    Attributes:
        name: unique in the report, for files and links.
        usual: settings of most rows, in words, which labels leave out; "" if labels have all.
        reference: the row that the others are compared with.
        expected: labels of published rows without a run.
        comparable: whether published results are measured on the same corpus under the same protocol.
    """

    def __init__(self, key: tuple[str, ...], runs: list[Run], baselines: Iterable[Run]) -> None:
        study, task, protocol, corpus = key
        self.study, self.task = study, task
        self.protocol_settings: dict[str, Any] = json.loads(protocol)
        self.protocol: str = self.protocol_settings["name"]
        self.sha256, _, more = corpus.partition(" ")
        self.direction = " to ".join(more.split()[:2])
        self.corpus = next((run.result["corpus"]["name"] for run in runs if run.corpus_key), "unknown")
        self.rows, self.usual = build_rows(runs)
        self.reference = next((row for row in self.rows if row.finished), self.rows[0])
        self.finished = [run for row in self.rows for run in row.finished]
        counted = list(baselines)
        keys = {key for run in (*runs, *counted) for key in run.report["baseline_keys"]}  # older runs know fewer
        shared = [[row.settings.get(key) for key in keys] for row in self.rows]
        self.baselines = [run for run in counted if [run.settings.get(key) for key in keys] in shared]
        known, about = published.content(), " ".join(filter(None, (task, runs[0].config.get("probe.name"))))
        self.title: str = known["studies"].get(study, {}).get("title") or study or f"Runs without a study: {about}"
        if study and task == "probe":  # of which a study has several
            self.title += f": {runs[0].config['probe.name']}"
        present = {row.published for row in self.rows}
        candidates = [(name, row) for name, row in known["rows"].items() if row["study"] == study]
        self.expected = [row["label"] for name, row in candidates if name not in present]
        measured = self.sha256, self.protocol_settings
        self.comparable = measured == (known["corpus"]["sha256"], known["corpus"]["protocol"])
        self.name = file_name(study or f"runs_{task}", self.protocol, self.sha256[:8])

    @cached_property
    def report(self) -> dict[str, Any]:
        """The description of its runs; a run without one takes that of the others."""
        runs = self.finished + [run for row in self.rows for run in row.runs]
        report = next((run.report for run in runs if run.report["metric"]), runs[0].report)
        columns = dict.fromkeys(name for run in self.finished for name in run.report["columns"])
        return {**report, "columns": list(columns) or report["columns"]}

    @property
    def heading(self) -> str:
        """The title, with the protocol unless it is that of the reports, and what is set otherwise in it."""
        file = CONF / "protocol" / f"{self.protocol}.yaml"
        usual = load_plain(file) if file.exists() else self.protocol_settings
        own = {key: value for key, value in self.protocol_settings.items() if usual.get(key, value) != value}
        words = [self.protocol] * (self.protocol != "paper") + [f"{key} {value}" for key, value in own.items()]
        return self.title + (f" ({', '.join(words)})" if words else "")

    @property
    def metric(self) -> str:
        return self.report["metric"]

    @property
    def held_out(self) -> str | None:
        """The metric on the held-out part of train, by which rows are ranked; None without one."""
        return next((name for name in self.columns if name.startswith("validation_")), None)

    def rank(self) -> None:
        """Sort the rows by the held-out metric, the best first; those of the reports stay in their order."""
        if self.held_out is None or any(row.published for row in self.rows):
            return
        sign = -1 if self.report["higher_is_better"] else 1
        scores = {id(row): summary.mean for row in self.rows if (summary := row.summary(self.held_out))}
        self.rows.sort(key=lambda row: sign * scores.get(id(row), -sign * math.inf))

    def has(self, metric: str) -> bool:
        """Return whether a metric was measured; `not_in_train` is left out where no test sentence is in train."""
        names = {metric, metric.replace("_not_in_train", "_in_train")}
        return all(any(run.metrics.get(name) is not None for run in self.finished) for name in names)

    @property
    def columns(self) -> list[str]:
        return [name for name in self.report["columns"] if self.has(name)]

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of the corpus, as in `result.json`; empty without a finished run."""
        return next((run.result["corpus"]["counts"] for run in self.finished), {})

    def source_lengths(self) -> dict[str, int]:
        """Return the buckets of source lengths of a translation test, in words, with their sentence counts."""
        return {name: count for name, count in self.counts.get("test_by_length", {}).items() if count}

    def lengths(self) -> list[int]:
        """Return the context lengths of the tests in tokens, if some are longer than those of training."""
        ran = [row.settings for row in self.rows if row.ran]
        longer = {length for settings in ran for length in settings.get("task.lengths") or []}
        return sorted(longer | {settings["block_size"] for settings in ran}) if longer else []


def file_name(*parts: str) -> str:
    """Return parts as a name that any system and document takes, with a hash if some characters are left out."""
    text = "_".join(filter(None, parts))
    if len(text) <= 100 and re.fullmatch(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*", text):
        return text
    words = "_".join(re.findall(r"[A-Za-z0-9]+", text))[:80].rstrip("_") or "table"
    return f"{words}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def read_run(folder: Path) -> Run:
    """Read the result of one run, of any version; raise a `DamagedError` if it is not a valid one."""
    result = read_result(folder, "reported")
    return Run(folder, result, dict(flatten(result["config"])))


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read all runs under some folders; the remarks name each folder of a run that has no readable result.

    Raises:
        UserError: a folder does not exist, or there is no readable result.
    """
    runs, remarks, folders = [], [], list(folders)
    for top in folders:
        if not top.is_dir():
            raise UserError(f"{top}: no such folder. Give a folder of runs, for example outputs/sweeps.")
        for place, below, files in os.walk(top):
            below[:] = sorted(name for name in below if not name.startswith("."))  # Hydra's own
            folder, names = Path(place), {*below, *files}
            if RESULT in names:
                try:
                    runs.append(read_run(folder))
                except DamagedError as error:
                    remarks.append(str(error))
            elif OWNER in names:  # written when a run starts
                remarks.append(f"{folder} has no {RESULT}: the run is unfinished.")
    if not runs:
        details = "".join(f" {remark}" for remark in remarks[:3])
        details = details or " Give the folder of your runs, for example outputs/sweeps, or train one first."
        raise UserError(f"No readable {RESULT} under {', '.join(map(str, folders))}.{details}")
    return runs, remarks


def with_baselines(runs: list[Run], folder: Path | None) -> list[Run]:
    """Return runs with the baselines of a folder for the same task, protocol and corpus, where they have none."""

    def key(run: Run) -> tuple[Any, ...]:
        return run.task, run.protocol, run.corpus_key

    baselines = {key(run) for run in runs if run.baseline}
    needed = {key(run) for run in runs if run.corpus_key} - baselines
    if folder is None or not folder.is_dir():
        return runs
    with contextlib.suppress(UserError):  # no readable result
        runs = runs + [run for run in read_runs([folder])[0] if run.baseline and key(run) in needed]
    return runs


def read_results(*folders: str | Path) -> pd.DataFrame:
    """Read all runs under some folders as a table, one row per run, baselines included.

    Columns: status, task, model, pattern, protocol, corpus, seed; every metric by its name in `result.json`
    (accuracies are fractions); every config key that differs between the runs, dotted; seconds, folder. A cell
    without a value is missing (`NaN` or `None`). The model of a baseline is the baseline's name.

    Example:
        >>> results = read_results("outputs/sweeps/positions")
        >>> results.groupby("model")["test_accuracy"].agg(["mean", "std"])

    Args:
        folders: searched, with everything below them, for `result.json`.

    Raises:
        UserError: a folder does not exist, or there is no readable result.
    """
    import pandas as pd

    runs, _ = read_runs(map(Path, folders))
    config = pd.DataFrame([run.config for run in runs], dtype=object)
    texts = config.map(json.dumps, na_action="ignore").astype(object).fillna("null")
    shown = ("seed", "task.name", "model.name", "pattern.name", "protocol.name", "corpus.name")
    differing = [key for key in config if key not in shown and texts[key].nunique() > 1]
    head = {
        "status": [run.status for run in runs],
        "task": [run.task for run in runs],
        "model": [run.baseline or run.config["model.name"] for run in runs],
        "pattern": [None if run.baseline else run.config["pattern.name"] for run in runs],
        "protocol": config["protocol.name"],
        "corpus": [(run.result.get("corpus") or {}).get("name") or run.config["corpus.name"] for run in runs],
        "seed": pd.array([run.seed for run in runs], dtype="Int64"),
    }
    metrics = pd.DataFrame([run.metrics for run in runs], dtype=float)
    tail = {"seconds": [run.result.get("seconds") for run in runs], "folder": [str(run.folder) for run in runs]}
    parts = [pd.DataFrame(head), metrics, config[differing].infer_objects(), pd.DataFrame(tail)]
    return pd.concat(parts, axis="columns")


def build_tables(runs: list[Run]) -> tuple[list[Table], list[str]]:
    """Sort runs into tables; return these, and a remark for each run that repeats another and is left out."""
    frame, remarks = drop_duplicates(index(runs))
    trained = frame["baseline"].isna()
    baselines = {key: list(group) for key, group in frame[~trained].groupby(TABLE[1:])["run"]}
    groups = frame[trained].groupby(TABLE)["run"]
    tables = [Table(key, list(group), baselines.get(key[1:], [])) for key, group in groups]
    studies = list(published.content()["studies"])
    tables.sort(  # stable: the groups are sorted already
        key=lambda table: (
            studies.index(table.study) if table.study in studies else len(studies),
            *(table.study, table.task, table.protocol != "paper"),
        )
    )
    names = set[str]()
    for number, table in enumerate(tables):
        while table.name.lower() in names:  # also where the file system ignores case
            table.name += f"_{number}"
        names.add(table.name.lower())
    return tables, remarks


def index(runs: list[Run]) -> pd.DataFrame:
    """Return one row per run: the run, and what decides its table and row.

    A run that failed before it read its corpus gets that of the runs with the same study, task, protocol and corpus
    name, if they have one in common, else "".
    """
    import pandas as pd

    names = [*TABLE, "baseline", "row_key", "seed"]
    frame = pd.DataFrame([{"run": run, **{name: getattr(run, name) for name in names}} for run in runs], dtype=object)
    similar = frame.groupby([*TABLE[:3], [run.config["corpus.name"] for run in runs]])["corpus_key"]
    common = similar.transform("first").where(similar.transform("nunique") == 1, "")
    return frame.assign(corpus_key=frame["corpus_key"].fillna(common))


def drop_duplicates(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep one run of each study, config, corpus and seed, and of ensembles of one config those that share no run.

    A finished run comes before one that is not, a run in the folder of a tuned study before others, and the last by
    folder before the rest. A run as by default may repeat a tuned one.
    """
    frame["members"] = frame["run"].map(members_of)
    identity = [name for name in frame if name != "run"]
    keys = [*frame[identity].itertuples(index=False, name=None)]
    known = {key for key, run in zip(keys, frame["run"]) if run.corpus_key is not None}
    # of runs that failed before they read a corpus
    frame["corpus_settings"] = ["" if key in known else corpus_settings(run) for key, run in zip(keys, frame["run"])]
    identity.append("corpus_settings")

    def rank(run: Run) -> int:
        return 2 * (run.status == "finished") + (run.folder.parent / TUNED).exists()

    frame = frame.sort_values("run", key=lambda runs: [*map(rank, runs)], kind="stable")
    repeated = frame.duplicated(identity, keep="last")
    unique = frame[~repeated].sort_index()
    pairs = frame[repeated].sort_index().merge(unique, on=identity, suffixes=("", "_unique"))
    remarks = [f"{a.folder} repeats {b.folder} and is left out." for a, b in zip(pairs["run"], pairs["run_unique"])]
    return drop_overlapping(unique, remarks), remarks


def corpus_settings(run: Run) -> str:
    """Return the settings of a run's corpus as JSON."""
    return json.dumps({key: value for key, value in run.config.items() if key.startswith("corpus.")}, sort_keys=True)


def drop_overlapping(frame: pd.DataFrame, remarks: list[str]) -> pd.DataFrame:
    """Keep of the ensembles of a row those that share no run with an earlier one; add a remark for each other."""
    first: dict[tuple[object, ...], Run] = {}
    independent = []
    for run, *row in frame[["run", *TABLE, "row_key"]].itertuples(index=False):
        members = [(*row, member) for member in members_of(run)]
        others = sorted(first[member].folder for member in members if member in first)
        if others:
            remarks.append(f"{run.folder} shares a run with {others[0]}, another ensemble, and is left out.")
        else:
            first |= dict.fromkeys(members, run)
        independent.append(not others)
    return frame[independent]


def build_rows(runs: list[Run]) -> tuple[list[Row], str]:
    """Group the runs of a table by config: published rows, the reference of the study, the usual row, the others.

    Returns:
        The rows, and the usual settings that their labels leave out, in words.
    """
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: -1 if run.seed is None else run.seed):
        groups.setdefault(run.row_key, []).append(run)
    known, seeds = published.content(), {run.seed for run in runs if run.seed is not None and not members_of(run)}
    rows = [Row("", own[0].settings, own, published.row_of(own[0].settings)) for own in groups.values()]
    usual = name_rows(rows)
    for row in rows:
        row.missing = [] if members_of(row.runs[0]) else sorted(seeds - {run.seed for run in row.runs})
    reference = known["studies"].get(runs[0].study, {}).get("reference", {})
    order = list(known["rows"])
    rows.sort(
        key=lambda row: (
            order.index(row.published) if row.published else len(order),
            any(row.settings.get(key, ABSENT) != value for key, value in reference.items()),
            not row.is_usual,
            [float(text) if place % 2 else text for place, text in enumerate(NUMBER.split(row.name))],
        )
    )
    return rows, usual
