"""Read `result.json` files into studies, each with a pandas DataFrame that has a row for each run.

A study holds the runs of one `study=` name, task, corpus and protocol. Its variants are the configurations in it; the
runs of a variant differ only in their seed. Nothing is left out silently: failed, diverged and missing runs are named
beside their variant, and files that cannot be read are listed above the tables.

    runs, remarks = read_runs([Path("outputs/sweeps")])
    studies, repeated = build_studies(runs)
    studies[0].runs.groupby("variant")["test_accuracy"].agg(["mean", "std"])
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from speechformer.config import CONF, load_plain
from speechformer.errors import UserError, unknown
from speechformer.report.labels import Variant, content, name_variants, override
from speechformer.report.statistics import Summary
from speechformer.runs.folder import OWNER, PREDICTIONS, RESULT, DamagedError, read_result
from speechformer.runs.identity import NOT_IDENTITY, NUMERICS_VERSION, flatten, plain_number
from speechformer.runs.predictions import read_predictions

# Config keys that do not change what is measured, or that belong to the study and not to the variant
NOT_IN_VARIANT = ("seed", "study", "trainer.log_every_n_steps", *NOT_IDENTITY)
NOT_IN_VARIANT_GROUPS = ("corpus.", "protocol.")
FAILED = ("failed", "killed", "pruned")
NUMBER = re.compile(
    r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)"
)  # variants are sorted by the value of those in their names
STUDY = ["study", "task", "protocol", "corpus_key"]  # what the runs of a study have in common
TUNED = "tuned.json"  # in the folder of a tuned sweep
# What the results of failed runs and of baselines do not say
UNDESCRIBED = {"metric": "", "higher_is_better": True, "columns": [], "compare": [], "x_axis": "step", "note": ""}
UNDESCRIBED |= {"unit": "lines", "baseline_keys": []}


class Run:
    """One `result.json`.

    Attributes:
        config: with dotted keys.
        report: what to show of it (main metric, columns, comparisons, x axis, note, unit).
        baseline: the name of the baseline, or None for a trained model.
        status: "finished", "diverged", "failed", "killed" or "pruned"; a run whose main metric is infinite diverged.
        protocol: the config group as JSON.
        corpus_key: sha256 of the corpus, and of pairs the direction and how many were left out; None if unknown.
    """

    def __init__(self, folder: Path, result: dict[str, Any]) -> None:
        self.folder, self.result, self.config = folder, result, dict(flatten(result["config"]))
        self.task: str = result["task"]
        study = self.config.get("study")
        self.study = "" if study is None else str(study)
        self.seed: int | None = result["seed"]
        self.metrics: dict[str, float | None] = result.get("metrics") or {}
        self.report = {**UNDESCRIBED, **(result.get("report") or {})}
        self.baseline: str | None = result["baseline"]["name"] if "baseline" in result else None
        main, self.status = self.report["metric"], str(result.get("status"))
        if self.status == "finished" and main and self.metrics.get(main) is None:
            self.status = "diverged"
        protocol = {key: value for key, value in self.config.items() if key.startswith("protocol.")}
        self.protocol = json.dumps({key.partition(".")[2]: protocol[key] for key in protocol}, sort_keys=True)
        self.corpus = result.get("corpus") or {}
        self.counts: dict[str, Any] = self.corpus.get("counts", {})
        left_out = [*self.counts.get("cleaned", {}).values(), self.counts.get("removed_from_validation")]
        parts = [self.corpus.get("sha256"), *self.corpus.get("languages", []), *filter(None, left_out)]
        self.corpus_key = " ".join(map(str, parts)) if self.corpus else None

    @property
    def is_outdated(self) -> bool:
        """Whether an earlier version of the code computed the result, whose numbers differ from today's."""
        return int(self.result.get("numerics", 1)) < NUMERICS_VERSION

    @property
    def members(self) -> frozenset[str]:
        """The runs of an ensemble; of a single run nothing."""
        members = self.result.get("members", ())
        return frozenset(run["identity"] or run["folder"] for run in members) if len(members) > 1 else frozenset()

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training rows."""
        batches = math.ceil(self.counts.get("train_rows", self.counts["train"]) / self.config["batch_size"])
        limit = self.config.get("trainer.limit_train_batches")
        if limit is not None:  # a number of batches, or a fraction of them
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(max(batches, 1) / self.config.get("trainer.accumulate_grad_batches", 1))

    @property
    def command(self) -> str:
        """The command that repeats the run, without seed and folder; of an ensemble with its members.

        It fixes the number of threads, which decides the last digits.
        """
        if "members" in self.result:
            members = self.result["members"]
            checkpoints = {member["checkpoint"] for member in members}
            options = ["--checkpoint", *checkpoints] if len(checkpoints) == 1 else []
            options += ["--study", self.study] if self.study else []
            return shlex.join(
                ["python", "-m", "speechformer.evaluate", *(run["folder"] for run in members), *options]
            )
        if self.result.get("overrides") is None:
            return "called from Python; its config is in result.json"
        overrides = [word for word in self.result["overrides"] if not word.startswith("seed=")]
        threads = (self.result.get("machine") or {}).get("threads")
        if isinstance(threads, int):
            overrides = [word for word in overrides if not word.lstrip("+").startswith("threads=")]
            overrides.append(f"threads={threads}")
        return shlex.join(["python", "-m", f"speechformer.{'baselines' if self.baseline else 'train'}", *overrides])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The part of the config that decides the variant."""
        settings = {
            key: plain_number(value, key)
            for key, value in self.config.items()
            if key not in NOT_IN_VARIANT and not key.startswith(NOT_IN_VARIANT_GROUPS)
        }
        if settings.get("recipe.init") != "normal":  # no other initialisation reads it
            settings.pop("recipe.init_std", None)
        explicit = any(word.startswith("pattern.seed=") for word in self.result.get("overrides") or [])
        if settings.get("pattern.seed") == self.seed and not explicit:  # it follows the run's seed
            settings.pop("pattern.seed", None)
        return settings

    @cached_property
    def variant_key(self) -> str:
        """The settings as one text."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the run in `Study.runs`."""
        machine, phases = (self.result.get(name) or {} for name in ("machine", "seconds_by_phase"))
        peak = machine.get("peak_bytes")
        return {
            "seed": self.seed,
            "status": self.status,
            "seconds": self.result.get("seconds"),
            "training_seconds": phases.get("training"),
            "peak_megabytes": None if peak is None else peak / 1e6,
            "parameters": (self.result.get("parameters") or {}).get("total"),
            "commit": self.result.get("commit"),
            "command": self.command + (f" seed={self.seed}" if "speechformer.train" in self.command else ""),
            "error": self.result.get("error"),
            "folder": str(self.folder),
            **self.metrics,
        }

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations during training, with the epoch or step as `x`."""
        unit = self.steps_per_epoch if self.report["x_axis"] == "epoch" else 1
        return [{**point, "seed": self.seed, "x": point["step"] / unit} for point in self.result.get("curve", [])]

    def predictions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return for each test sentence whether its class was predicted, and whether train has it, too: bool [N].

        Returns None if the run has no `predictions.tsv`.

        Raises:
            DamagedError: the file is not what the run has written.
        """
        path, accuracy = self.folder / PREDICTIONS, self.metrics.get("test_accuracy")
        if not self.corpus or accuracy is None or not os.path.lexists(path):
            return None
        return read_predictions(path, self.counts["test"], accuracy)


class Study:
    """The runs of one study, task, corpus and protocol, and the baselines on the same.

    Attributes:
        runs: a row for each run: `variant` (its label), `seed`, `status`, costs, `command`, `folder` and each metric.
            Add a column, and name it in `columns`, to show it in the report.
        curves: a row for each evaluation of a finished run: `variant`, `seed`, `step`, `x` (epoch or step), metrics.
        baselines: a row for each baseline, like `runs`; `variant` is its name in words.
        variants: the configurations in the order of the report.
        name: unique in the report, for files and links.
        metric: the main metric; `columns`: all that tables show; `compare`: those whose differences are tested.
        usual: settings of most variants, in words, which labels leave out; "" if labels have all.
        reference: the label of the variant that the others are compared with.
    """

    def __init__(self, results: Sequence[Run], baselines: Iterable[Run] = ()) -> None:
        first = results[0]
        self.study, self.task = first.study, first.task
        self.protocol: dict[str, Any] = json.loads(first.protocol)
        self.sha256, _, more = (first.corpus_key or "").partition(" ")
        self.direction = " to ".join(more.split()[:2])
        self.results = sorted(results, key=lambda run: -1 if run.seed is None else run.seed)
        self.corpus = next((run.corpus["name"] for run in results if run.corpus), "unknown")
        finished = [run for run in self.results if run.status == "finished"]
        self.example = finished[0] if finished else first  # of corpus, scoring and what is shown
        described = next((run for run in [*finished, *self.results] if run.report["metric"]), first).report
        columns = dict.fromkeys(name for run in finished for name in run.report["columns"]) or described["columns"]
        self.metric, self.higher_is_better = described["metric"], described["higher_is_better"]
        self.compare, self.x_axis, self.note, self.unit = (
            described[key] for key in ("compare", "x_axis", "note", "unit")
        )
        groups: dict[str, list[Run]] = {}
        for run in self.results:
            groups.setdefault(run.variant_key, []).append(run)
        self.variants = [Variant(group[0].settings) for group in groups.values()]
        self.usual = name_variants(self.variants)
        labels = {key: variant for key, variant in zip(groups, self.variants)}
        seeds = {run.seed for run in self.results if run.seed is not None and not run.members}
        for variant, group in zip(self.variants, groups.values()):
            has = {run.seed for run in group}
            variant.missing = [] if group[0].members else sorted(seed for seed in seeds if seed not in has)
        self.runs = pd.DataFrame([{"variant": labels[run.variant_key].label, **run.row} for run in self.results])
        points = [{"variant": labels[run.variant_key].label, **point} for run in finished for point in run.curve]
        self.curves = pd.DataFrame(points, columns=None if points else ["variant", "seed", "step", "x"])
        keys = {key for run in (*results, *baselines) for key in run.report["baseline_keys"]}  # older runs know fewer
        shared = [[variant.settings.get(key) for key in keys] for variant in self.variants]
        names = content()["baselines"]
        self.counted = [run for run in baselines if [run.settings.get(key) for key in keys] in shared]
        rows = [{"variant": names.get(run.baseline, run.baseline), **run.row} for run in self.counted]
        self.baselines = pd.DataFrame(rows, columns=None if rows else ["variant"])
        self.columns = [name for name in columns if self.has(name)]
        self.selected = False  # whether `columns` were chosen by the reader
        # the metric on the held-out part of train, by which variants are ranked; None without one
        self.held_out = next((name for name in self.columns if name.startswith("validation_")), None)
        about = " ".join(filter(None, (self.task, first.config.get("probe.name"))))
        self.title = self.study or f"Runs without a study: {about}"
        if self.study and self.task == "probe":  # of which a study has several
            self.title += f": {first.config['probe.name']}"
        self.name = file_name(self.study or f"runs_{self.task}", self.protocol["name"], self.sha256[:8])
        self.variants.sort(key=lambda variant: (not variant.is_usual, natural(variant.name)))
        self.reference = next((v.label for v in self.variants if len(self.finished(v.label))), self.variants[0].label)
        self.rank()

    @property
    def heading(self) -> str:
        """The title, with the protocol unless it is that of the reports, and what is set otherwise in it."""
        name = self.protocol["name"]
        file = CONF / "protocol" / f"{name}.yaml"
        usual = load_plain(file) if file.exists() else self.protocol
        changed = {key: value for key, value in self.protocol.items() if usual.get(key, value) != value}
        words = [name] * (name != "paper") + [f"{key} {value}" for key, value in changed.items()]
        return self.title + (f" ({', '.join(words)})" if words else "")

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of the corpus, as in `result.json`; empty without a finished run."""
        return self.example.counts

    def rank(self) -> None:
        """Sort the variants by the held-out metric, the best first."""
        means = {
            v.label: s.mean for v in self.variants if self.held_out and (s := self.summary(v.label, self.held_out))
        }
        sign = -1 if self.higher_is_better else 1
        self.variants.sort(key=lambda variant: sign * means.get(variant.label, sign * math.inf))

    def relabel(self, names: Mapping[str, str]) -> None:
        """Name settings (`model=alibi`) and variants otherwise."""
        before = [variant.label for variant in self.variants]
        self.usual = name_variants(self.variants, names)
        changed = dict(zip(before, (variant.label for variant in self.variants)))
        self.runs["variant"] = self.runs["variant"].map(changed)
        self.curves["variant"] = self.curves["variant"].map(changed)
        self.reference = changed[self.reference]

    def find(self, name: str) -> Variant | None:
        """Return the variant with this label, these overrides, or this setting alone; None without one."""
        variants = [v for v in self.variants if name in (v.label, v.name)]
        variants = variants or [v for v in self.variants if name in v.overrides.values()]
        return variants[0] if len(variants) == 1 else None

    def finished(self, label: str) -> pd.DataFrame:
        """Return the rows of `runs` of the finished runs of a variant."""
        return self.runs[(self.runs["variant"] == label) & (self.runs["status"] == "finished")]

    def finished_runs(self, label: str) -> list[Run]:
        """Return the results of the finished runs of a variant."""
        folders = set(self.finished(label)["folder"])
        return [run for run in self.results if str(run.folder) in folders]

    def has(self, metric: str) -> bool:
        """Return whether a metric was measured; `not_in_train` is left out where no test sentence is in train."""
        finished = self.runs[self.runs["status"] == "finished"].drop(columns="seed").select_dtypes("number")
        names = [metric, metric.replace("_not_in_train", "_in_train")]
        return all(name in finished and finished[name].notna().any() for name in names)

    def values(self, label: str, metric: str) -> dict[int | None, float]:
        """Return the final values of a metric by seed, of the finished runs of a variant that have it."""
        if metric not in self.runs:
            return {}
        columns = (self.runs[name].tolist() for name in ("variant", "status", "seed", metric))
        return {
            None if seed is None or seed != seed else int(seed): float(value)
            for variant, status, seed, value in zip(*columns)
            if variant == label and status == "finished" and value is not None and value == value
        }

    def summary(self, label: str, metric: str) -> Summary | None:
        """Return the statistics of a metric of a variant, or None if no run has it."""
        values = self.values(label, metric).values()
        return Summary(values) if values else None

    def curve(self, label: str, metric: str) -> dict[float, Summary]:
        """Return the values of a metric by epoch or step, where every finished run has one."""
        if metric not in self.curves:
            return {}
        points = self.curves[self.curves["variant"] == label].dropna(subset=[metric]).groupby("x")[metric]
        runs = len(self.finished(label))
        return {float(x): Summary(values) for x, values in points if len(values) == runs}

    def source_lengths(self) -> dict[str, int]:
        """Return the buckets of source lengths of a translation test, in words, with their sentence counts."""
        return {name: count for name, count in self.counts.get("test_by_length", {}).items() if count}

    def settled(self) -> list[Variant]:
        """Return the variants of which some run came to its end; others may have failed of their settings."""
        ended = set(self.runs.loc[~self.runs["status"].isin(FAILED), "variant"])
        return [variant for variant in self.variants if variant.label in ended]

    def lengths(self) -> list[int]:
        """Return the context lengths of the tests in tokens, if some are longer than those of training."""
        settings = [variant.settings for variant in self.settled()]
        longer = {length for own in settings for length in own.get("task.lengths") or []}
        return sorted(longer | {own["block_size"] for own in settings}) if longer else []


def natural(name: str) -> list[Any]:
    """Return what sorts names by the value of the numbers in them."""
    return [float(text) if place % 2 else text for place, text in enumerate(NUMBER.split(name))]


def file_name(*parts: str) -> str:
    """Return parts as a name that any system and document takes, with a hash if some characters are left out."""
    text = "_".join(filter(None, parts))
    if len(text) <= 100 and re.fullmatch(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*", text):
        return text
    words = "_".join(re.findall(r"[A-Za-z0-9]+", text))[:80].rstrip("_") or "study"
    return f"{words}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


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
                    runs.append(Run(folder, read_result(folder, "reported")))
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

    needed = {key(run) for run in runs if run.corpus_key} - {key(run) for run in runs if run.baseline}
    if folder is None or not folder.is_dir():
        return runs
    with contextlib.suppress(UserError):  # no readable result
        return runs + [run for run in read_runs([folder])[0] if run.baseline and key(run) in needed]
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
        "corpus": [run.corpus.get("name") or run.config["corpus.name"] for run in runs],
        "seed": pd.array([run.seed for run in runs], dtype="Int64"),
    }
    metrics = pd.DataFrame([run.metrics for run in runs], dtype=float)
    tail = {"seconds": [run.result.get("seconds") for run in runs], "folder": [str(run.folder) for run in runs]}
    parts = [pd.DataFrame(head), metrics, config[differing].infer_objects(), pd.DataFrame(tail)]
    return pd.concat(parts, axis="columns")


def build_studies(runs: Sequence[Run]) -> tuple[list[Study], list[str]]:
    """Sort runs into studies; the remarks say which runs repeat others and are left out."""
    frame, remarks = drop_duplicates(identities(runs))
    trained = frame["baseline"].isna()
    baselines = {key: list(group) for key, group in frame[~trained].groupby(STUDY[1:])["run"]}
    studies = [Study(list(group), baselines.get(key[1:], [])) for key, group in frame[trained].groupby(STUDY)["run"]]
    studies.sort(key=lambda study: (study.study, study.task, study.protocol["name"] != "paper"))
    names = set[str]()
    for number, study in enumerate(studies):
        while study.name.lower() in names:  # also where the file system ignores case
            study.name += f"_{number}"
        names.add(study.name.lower())
    return studies, remarks


def identities(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each run: the run, and what decides its study and variant.

    A run that failed before it read its corpus gets that of the runs with the same study, task, protocol and corpus
    name, if they have one in common, else "".
    """
    names = [*STUDY, "baseline", "variant_key", "seed", "members"]
    frame = pd.DataFrame([{"run": run, **{name: getattr(run, name) for name in names}} for run in runs], dtype=object)
    similar = frame.groupby([*STUDY[:3], [run.config["corpus.name"] for run in runs]])["corpus_key"]
    common = similar.transform("first").where(similar.transform("nunique") == 1, "")
    unread = frame["corpus_key"].isna()
    frame["corpus_key"] = frame["corpus_key"].fillna(common)
    for run, key in zip(runs, frame["corpus_key"]):
        run.corpus_key = key
    # of runs that failed before they read a corpus, unless one like them has read it, its settings tell them apart
    keys = [*frame.drop(columns="run").itertuples(index=False, name=None)]
    read = {key for key, is_unread in zip(keys, unread) if not is_unread}
    frame["corpus_settings"] = ["" if key in read else corpus_settings(run) for key, run in zip(keys, runs)]
    return frame


def corpus_settings(run: Run) -> str:
    """Return the settings of a run's corpus as JSON."""
    return json.dumps({key: value for key, value in run.config.items() if key.startswith("corpus.")}, sort_keys=True)


def drop_duplicates(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep one run of each study, config, corpus and seed, and of ensembles of one config those that share no run.

    A finished run comes before one that is not, a run in the folder of a tuned sweep before others, and the last by
    folder before the rest. A run as by default may repeat a tuned one.
    """

    def rank(run: Run) -> int:
        return 2 * (run.status == "finished") + (run.folder.parent / TUNED).exists()

    identity = [name for name in frame if name != "run"]
    frame = frame.sort_values("run", key=lambda runs: [*map(rank, runs)], kind="stable")
    repeated = frame.duplicated(identity, keep="last")
    unique = frame[~repeated].sort_index()
    pairs = frame[repeated].sort_index().merge(unique, on=identity, suffixes=("", "_unique"))
    remarks = [f"{a.folder} repeats {b.folder} and is left out." for a, b in zip(pairs["run"], pairs["run_unique"])]
    first: dict[tuple[object, ...], Run] = {}
    independent = []
    for run, *place in unique[["run", *STUDY, "variant_key"]].itertuples(index=False):
        members = [(*place, member) for member in run.members]
        others = sorted(first[member].folder for member in members if member in first)
        if others:
            remarks.append(f"{run.folder} shares a run with {others[0]}, another ensemble, and is left out.")
        else:
            first |= dict.fromkeys(members, run)
        independent.append(not others)
    return unique[independent], remarks


def right_answers(runs: Sequence[Run]) -> np.ndarray:
    """Return whether each run is right on each test sentence, bool [runs, sentences].

    Raises:
        UserError: a run has no predictions, or not its own.
    """
    predictions = [run.predictions() for run in runs]
    if missing := [run.folder for run, answers in zip(runs, predictions) if answers is None]:
        raise UserError(f"{missing[0]} has no {PREDICTIONS}; run it again.")
    return np.array([answers[0] for answers in predictions if answers is not None])


def arrange(
    studies: Sequence[Study],
    labels: Sequence[str] = (),
    order: Sequence[str] = (),
    reference: str | None = None,
    columns: Sequence[str] = (),
) -> None:
    """Change how studies are shown.

    Args:
        labels: "NAME=LABEL", where NAME is a variant or a setting such as `model=alibi`.
        order: variants that come first.
        reference: the variant that the others of its study are compared with; it comes first without an order.
        columns: the metrics that tables show, in this order.

    Raises:
        UserError: no study has such a variant, setting or metric.
    """
    names = dict(parse_label(text, studies) for text in labels)
    for study in studies if names else ():
        study.relabel(names)
    for name in [*order, *([] if reference is None else [reference])]:
        if not any(study.find(name) for study in studies):
            variants = [variant for study in studies for variant in study.variants]
            if similar := [v.label for v in variants if name in v.overrides.values()]:
                raise UserError(f"{name} is the setting of several rows; name one of them: {', '.join(similar)}.")
            raise unknown("The report", "row", name, dict.fromkeys(variant.label for variant in variants))
    for name in columns:
        if not any(study.has(name) for study in studies):
            known = dict.fromkeys(key for study in studies for key in map(str, study.runs) if study.has(key))
            raise unknown("The report", "column", name, known)
    for study in studies:
        found = [study.find(name) for name in (order or ([] if reference is None else [reference]))]
        first = [variant for variant in found if variant]
        study.variants.sort(key=lambda variant: first.index(variant) if variant in first else len(first))
        if reference is not None and (variant := study.find(reference)):
            study.reference = variant.label
        if chosen := [name for name in columns if study.has(name)]:
            study.columns, study.selected = chosen, True


def parse_label(text: str, studies: Sequence[Study]) -> tuple[str, str]:
    """Return the setting or variant of `NAME=LABEL` and the label; a name may have "=" in it, as `model=alibi`."""
    variants = [variant for study in studies for variant in study.variants]
    names = {name for variant in variants for name in (variant.label, variant.name)}
    names |= {override(key, value) for variant in variants for key, value in variant.settings.items()}
    for place in reversed([match.start() for match in re.finditer("=", text)]):
        name, label = text[:place].strip(), text[place + 1 :].strip()
        if name in names and label:
            return name, label
    raise UserError(
        f"--label {text}: expected NAME=LABEL, where NAME is a setting such as model=alibi or a row: "
        f"{', '.join(dict.fromkeys(variant.label for variant in variants))}."
    )
