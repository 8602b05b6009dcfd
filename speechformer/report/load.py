"""Read `result.json` files into studies, each with a pandas DataFrame that has a row for each run.

A study holds the runs of one `study=` name, task, corpus and protocol. Its variants are the configurations in it; the
runs of a variant differ only in their seed. Nothing is left out silently: failed, diverged and missing runs are named
beside their variant, and files that cannot be read are listed above the tables.

    runs, remarks = read_runs([Path("outputs/sweeps")])
    studies, repeated = build_studies(runs)
    studies[0].runs.groupby("variant")["test_accuracy"].agg(["mean", "std"])
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from speechformer import console
from speechformer.config import CONF, compose, load_plain
from speechformer.errors import UserError, unknown
from speechformer.paths import path_of
from speechformer.report.labels import Variant, content, name_variants, override
from speechformer.report.statistics import Summary
from speechformer.runs.folder import OWNER, RESULT, DamagedError, read_result
from speechformer.runs.identity import LATER, NOT_IDENTITY, NUMERICS_VERSION, fingerprint, flatten, plain_number
from speechformer.runs.naming import model_name

# Config keys that do not change what is measured, or that belong to the study and not to the variant
NOT_IN_VARIANT = ("seed", "study", "trainer.log_every_n_steps", *NOT_IDENTITY)
NOT_IN_VARIANT_GROUPS = ("corpus.", "protocol.")
FAILED = ("failed", "killed", "pruned")
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
        self.study = str(self.config.get("study") or "")
        self.seed: int | None = result["seed"]
        self.metrics: dict[str, float | None] = result.get("metrics") or {}
        self.report = UNDESCRIBED | (result.get("report") or {})
        self.baseline: str | None = result.get("baseline", {}).get("name")
        main, self.status = self.report["metric"], str(result.get("status"))
        if self.status == "finished" and main and self.metrics.get(main) is None:
            self.status = "diverged"
        self.protocol = json.dumps(result["config"]["protocol"], sort_keys=True)
        self.corpus = result.get("corpus") or {}
        self.counts: dict[str, Any] = self.corpus.get("counts", {})
        left_out = [*self.counts.get("cleaned", {}).values(), self.counts.get("removed_from_validation")]
        parts = [self.corpus.get("sha256"), *self.corpus.get("languages", []), *filter(None, left_out)]
        self.corpus_key = " ".join(map(str, parts)) if self.corpus else None

    @property
    def is_outdated(self) -> bool:
        """Whether an earlier version of the code computed the result, whose numbers differ from today's."""
        return self.result.get("numerics", 1) < NUMERICS_VERSION

    def check_is_unedited(self) -> None:
        """Raise a `DamagedError` if the config is not the one of the run, where the result has what identifies it."""
        place, config, found = self.folder / RESULT, self.result["config"], self.result.get("identity")
        advice = "it was edited, so it is no result of a run. Restore it, or train again"
        if not found or "settings" not in self.corpus or self.result.get("numerics") != NUMERICS_VERSION:
            return
        expected = fingerprint(config, self.corpus["sha256"], self.corpus["settings"])
        for key, value, other in (("identity", found, expected), ("seed", self.seed, config.get("seed"))):
            if value != other:
                raise DamagedError(f"{place}: {key} is {value}, and that of its config is {other}: {advice}.")

    @property
    def members(self) -> tuple[str, ...]:
        """The runs of an ensemble; of a single run nothing."""
        members = tuple(run["identity"] or run["folder"] for run in self.result.get("members", ()))
        return members if len(members) > 1 else ()

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
        words, overrides = ["python", "-m"], self.result.get("overrides")
        if "members" in self.result:
            members = self.result["members"]
            checkpoints = {member["checkpoint"] for member in members}
            words += ["speechformer.evaluate", *(member["folder"] for member in members)]
            words += ["--checkpoint", *checkpoints] if len(checkpoints) == 1 else []
            return shlex.join([*words, *(["--study", self.study] if self.study else [])])
        if overrides is None:
            return "called from Python; its config is in result.json"
        words += [f"speechformer.{'baselines' if self.baseline else 'train'}"]
        if threads := (self.result.get("machine") or {}).get("threads"):
            overrides = [word for word in overrides if not word.startswith("threads=")] + [f"threads={threads}"]
        return shlex.join([*words, *(word for word in overrides if not word.startswith("seed="))])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The part of the config that decides the variant."""
        settings = {
            key: plain_number(value, key)
            for key, value in self.config.items()
            if key not in NOT_IN_VARIANT
            and not key.startswith(NOT_IN_VARIANT_GROUPS)
            and LATER.get(key, ...) != value
        }
        if settings.get("recipe.init") != "normal":  # no other initialisation reads it
            settings.pop("recipe.init_std", None)
        if not any(word.startswith("pattern.seed=") for word in self.result.get("overrides") or []):
            settings.pop("pattern.seed", None)  # it follows the run's seed
        return settings

    @cached_property
    def variant_key(self) -> str:
        """The settings as one text."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the run in `Study.runs`."""
        machine, phases = (self.result.get(name) or {} for name in ("machine", "seconds_by_phase"))
        return {
            "seed": self.seed,
            "status": self.status,
            "seconds": self.result.get("seconds"),
            "training_seconds": phases.get("training"),
            "peak_megabytes": (machine.get("peak_bytes") or math.nan) / 1e6,
            "parameters": (self.result.get("parameters") or {}).get("total"),
            "commit": self.result.get("commit"),
            "command": self.command,
            "error": self.result.get("error"),
            "folder": str(self.folder),
            **self.metrics,
        }

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations during training, with the epoch or step as `x`."""
        unit = self.steps_per_epoch if self.report["x_axis"] == "epoch" else 1
        return [{**point, "seed": self.seed, "x": point["step"] / unit} for point in self.result.get("curve", [])]


def usual_first(variant: Variant) -> tuple[bool, Any]:
    """Return what sorts variants by name, those of the usual settings first."""
    return not variant.is_usual, natural(variant.name)


class Study:
    """The runs of one study, task, corpus and protocol, and the baselines on the same.

    Attributes:
        runs: a row for each run: `variant` (its label), `seed`, `status`, costs, `command`, `folder` and each metric.
            Add a column, and name it in `columns`, to show it in the report.
        curves: a row for each evaluation of a finished run: `variant`, `seed`, `step`, `x` (epoch or step), metrics.
        baselines: a row for each baseline, like `runs`; `variant` is its name in words.
        variants: the configurations in the order of the report.
        name: for files and links; unique in a report.
        metric: the main metric; `columns`: all that tables show; `compare`: those whose differences are tested.
        held_out: the metric on the held-out part of train, by which variants are ranked; None without one.
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
        ordered = [*finished, *self.results]
        self.example = ordered[0]  # of corpus, scoring and what is shown
        described = next((run for run in ordered if run.report["metric"]), first).report
        self.metric, self.higher_is_better = described["metric"], described["higher_is_better"]
        self.compare, self.x_axis = described["compare"], described["x_axis"]
        self.note, self.unit = described["note"], described["unit"]

        groups = defaultdict[str, list[Run]](list)
        for run in self.results:
            groups[run.variant_key].append(run)
        self.variants = [Variant(group[0].settings) for group in groups.values()]
        self.models = {
            override("init_from.sha256", run.config["init_from.sha256"]): f"from {model_name(folder)}"
            for run in self.results
            if (folder := run.config.get("init_from.folder"))
        }
        self.usual = name_variants(self.variants, self.models)
        seeds = {run.seed for run in self.results if run.seed is not None and not run.members}
        for variant, group in zip(self.variants, groups.values()):
            variant.missing = [] if group[0].members else sorted(seeds - {run.seed for run in group})
        labels = dict(zip(groups, (variant.label for variant in self.variants)))
        self.runs = pd.DataFrame([{"variant": labels[run.variant_key], **run.row} for run in self.results])
        points = [{"variant": labels[run.variant_key], **point} for run in finished for point in run.curve]
        self.curves = pd.DataFrame(points, columns=None if points else ["variant", "seed", "step", "x"])
        keys = {key for run in (*results, *baselines) for key in run.report["baseline_keys"]}  # older runs know fewer
        shared = [[variant.settings.get(key) for key in keys] for variant in self.variants]
        self.counted = [run for run in baselines if [run.settings.get(key) for key in keys] in shared]
        names = content()["baselines"]
        rows = [{"variant": names.get(run.baseline, run.baseline), **run.row} for run in self.counted]
        self.baselines = pd.DataFrame(rows, columns=None if rows else ["variant"])

        columns = dict.fromkeys(name for run in finished for name in run.report["columns"])
        self.columns = [name for name in columns if self.has(name)]
        self.held_out = next((name for name in self.columns if name.startswith("validation_")), None)
        probe = first.config.get("probe.name")
        self.title = self.study or f"Runs without a study: {self.task}"
        if probe and self.task == "probe":  # a study has several
            self.title += f": {probe}"
        words = [self.study or f"runs_{self.task}", self.protocol["name"], self.sha256[:8]]
        self.name = re.sub("[^A-Za-z0-9.-]+", "_", "_".join(words)).strip("_.-")[-100:]
        self.variants.sort(key=usual_first)
        if self.held_out:
            sign, measured = -1 if self.higher_is_better else 1, self.runs[self.runs["status"] == "finished"]
            means = sign * measured.groupby("variant")[self.held_out].mean().dropna()
            self.variants.sort(key=lambda variant: means.get(variant.label, math.inf))

    @property
    def reference(self) -> str:
        """The label of the variant that the others are compared with."""
        return self.compared_with.label

    @cached_property
    def compared_with(self) -> Variant:
        """The variant that the others are compared with: the usual one, else that of the defaults, else the first."""
        finished = [variant for variant in self.variants if len(self.finished(variant.label))] or self.variants
        candidates = sorted(finished, key=usual_first)
        first = candidates[0]
        if not first.is_usual and len(self.variants) > 1:
            varied = {name for key in first.overrides for name in (key, key.removesuffix(".name"))}
            words = self.results[0].result.get("overrides") or []
            try:
                defaults = compose([word for word in words if word.lstrip("+").partition("=")[0] not in varied])
            except UserError:  # of another version
                return first
            for variant in candidates:
                if all(OmegaConf.select(defaults, key) == variant.settings[key] for key in variant.overrides):
                    return variant
        return first

    @property
    def heading(self) -> str:
        """The title, with the protocol unless it is that of the reports, and what is set otherwise in it."""
        name, file = self.protocol["name"], CONF / "protocol" / f"{self.protocol['name']}.yaml"
        usual = load_plain(file) if file.exists() else {}
        changed = [f"{key} {value}" for key, value in self.protocol.items() if usual.get(key, value) != value]
        words = ", ".join([name] * (name != "paper") + changed)
        return f"{self.title} ({words})" if words else self.title

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of the corpus, as in `result.json`; empty without a finished run."""
        return self.example.counts

    @property
    def with_baselines(self) -> pd.DataFrame:
        """The rows of `runs`, then those of `baselines`."""
        return pd.concat([self.runs, self.baselines]) if len(self.baselines) else self.runs

    def relabel(self, names: Mapping[str, str]) -> None:
        """Name settings (`model=alibi`) and variants otherwise."""
        before = [variant.label for variant in self.variants]
        self.usual = name_variants(self.variants, self.models | dict(names))
        changed = dict(zip(before, (variant.label for variant in self.variants)))
        for frame in (self.runs, self.curves):
            frame["variant"] = frame["variant"].map(changed)

    def find(self, name: str) -> Variant | None:
        """Return the variant with this label, these overrides, or this setting alone; None without one."""
        variants = [variant for variant in self.variants if name in (variant.label, variant.name)]
        variants = variants or [variant for variant in self.variants if name in variant.overrides.values()]
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
        return {metric, metric.replace("_not_in_train", "_in_train")} <= {*finished.dropna(axis="columns", how="all")}

    def values(self, label: str, metric: str) -> dict[int | None, float]:
        """Return the final values of a metric by seed, of the finished runs of a variant that have it."""
        if metric not in self.runs:
            return {}
        rows = self.finished(label).dropna(subset=[metric])
        return {None if pd.isna(seed) else int(seed): float(v) for seed, v in zip(rows["seed"], rows[metric])}

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

    def finished_variants(self) -> list[Variant]:
        """Return the variants with a finished run; others may have failed of their settings."""
        return [variant for variant in self.variants if len(self.finished(variant.label))]

    def lengths(self) -> list[int]:
        """Return the context lengths of the tests in tokens, if some are longer than those of training."""
        settings = [variant.settings for variant in self.finished_variants()]
        longer = {length for own in settings for length in own.get("task.lengths") or []}
        return sorted(longer | {own["block_size"] for own in settings}) if longer else []

    def source_lengths(self) -> dict[str, int]:
        """Return the buckets of source lengths of a translation test, in words, with their sentence counts."""
        return {name: count for name, count in self.counts.get("test_by_length", {}).items() if count}


def natural(name: str) -> list[Any]:
    """Return what sorts names by the value of the numbers in them."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", name)
    return [float(text) if place % 2 else text for place, text in enumerate(parts)]


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read all runs under some folders; the remarks name each folder of a run that has no readable result.

    A result that is damaged, or was edited, is also named on stderr.

    Raises:
        UserError: a folder does not exist, or there is no readable result.
    """
    runs, remarks, damaged, folders = [], list[str](), list[str](), list(folders)
    for top in folders:
        if not top.is_dir():
            raise UserError(f"{top}: no such folder. Give a folder of runs, for example outputs/sweeps.")
        for place, below, files in os.walk(top):
            below[:] = sorted(name for name in below if not name.startswith("."))  # Hydra's own
            folder, names = Path(place), {*below, *files}
            if RESULT in names:
                try:
                    run = Run(folder, read_result(folder, "reported"))
                    run.check_is_unedited()
                    if run.result.get("debug"):
                        remarks.append(f"{folder} was run with arguments for debugging and is left out.")
                    elif run.result.get("again"):
                        remarks.append(f"{folder} tests the weights of a run's own result again and is left out.")
                    else:
                        runs.append(run)
                except DamagedError as error:
                    damaged.append(str(error))
            elif OWNER in names:  # written when a run starts
                remarks.append(f"{folder} has no {RESULT}: the run is unfinished.")
    if not runs:
        advice = "Give the folder of your runs, such as outputs/sweeps, or train one first."
        details = " ".join([*damaged, *remarks][:3]) or advice
        raise UserError(f"There is no run to report under {', '.join(map(str, folders))}. {details}")
    for remark in damaged:
        console.warn(remark)
    return runs, damaged + remarks


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
    runs, _ = read_runs(map(path_of, folders))
    config = pd.DataFrame([run.config for run in runs])
    baseline = pd.Series([run.baseline for run in runs], dtype=object)
    head = {
        "status": [run.status for run in runs],
        "task": config.pop("task.name"),
        "model": baseline.fillna(config.pop("model.name")),
        "pattern": config.pop("pattern.name").where(baseline.isna(), None),
        "protocol": config.pop("protocol.name"),
        "corpus": [run.corpus.get("name", run.config["corpus.name"]) for run in runs],
        "seed": pd.array([run.seed for run in runs], dtype="Int64"),
    }
    differing = config.loc[:, config.astype(str).nunique() > 1].drop(columns=["seed", "corpus.name"], errors="ignore")
    metrics = pd.DataFrame([run.metrics for run in runs], dtype=float)
    tail = {"seconds": [run.result.get("seconds") for run in runs], "folder": [str(run.folder) for run in runs]}
    return pd.concat([pd.DataFrame(head), metrics, differing, pd.DataFrame(tail)], axis="columns")


def build_studies(runs: Sequence[Run]) -> tuple[list[Study], list[str]]:
    """Sort runs into studies; the remarks say which runs repeat others and are left out.

    Of runs with the same study, config, corpus and seed one stays: a finished one before others, one in the folder of
    a tuned sweep before others, and the last by folder before the rest; of ensembles that share a run, one.
    A run that failed before it read its corpus gets that of runs with the same study, task, protocol and corpus name.
    """
    names = [*STUDY, "baseline", "variant_key", "seed", "members"]
    frame = pd.DataFrame([{"run": run, **{name: getattr(run, name) for name in names}} for run in runs], dtype=object)
    alike = frame.groupby([*STUDY[:3], [run.config["corpus.name"] for run in runs]])["corpus_key"]
    frame["corpus_key"] = frame["corpus_key"].fillna(alike.transform("first")).fillna("")
    for run, key in zip(runs, frame["corpus_key"]):
        run.corpus_key = key
    frame["rank"] = [2 * (run.status == "finished") + (run.folder.parent / TUNED).exists() for run in runs]
    frame = frame.sort_values("rank", kind="stable")
    kept = frame.groupby(names, dropna=False, sort=False)["run"].transform("last")
    repeats = [(run.folder, other.folder) for run, other in zip(frame["run"], kept) if run is not other]
    remarks = [f"{folder} repeats {other} and is left out." for folder, other in repeats]
    frame = frame[frame["run"] == kept].sort_index()
    used, is_independent = set[tuple[str, ...]](), []
    for run in frame["run"]:
        members = {(run.study, run.protocol, run.variant_key, member) for member in run.members}
        is_independent.append(used.isdisjoint(members))
        if is_independent[-1]:
            used |= members
        else:
            remarks.append(f"{run.folder} shares a run with another ensemble and is left out.")
    frame = frame[is_independent]
    trained = frame["baseline"].isna()
    baselines = {key: [*group] for key, group in frame[~trained].groupby(STUDY[1:])["run"]}
    studies = [Study([*group], baselines.get(key[1:], [])) for key, group in frame[trained].groupby(STUDY)["run"]]
    studies.sort(key=lambda study: (study.study, study.task, study.protocol["name"] != "paper"))
    used_names = set[str]()
    for number, study in enumerate(studies):
        if study.name.lower() in used_names:  # also where the file system ignores case
            study.name += f"_{number}"
        used_names.add(study.name.lower())
    return studies, remarks


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
    variants = [variant for study in studies for variant in study.variants]
    settings = {override(key, value) for variant in variants for key, value in variant.settings.items()}
    rows = list(dict.fromkeys(variant.label for variant in variants))
    names = {name: label for name, _, label in (text.rpartition("=") for text in labels)}
    for name, label in names.items():
        if not label or name not in {*settings, *rows, *(variant.name for variant in variants)}:
            raise unknown("--label NAME=LABEL", "row or setting", name, rows)
    for study in studies if names else ():
        study.relabel(names)
    first = [*order, *([] if reference is None else [reference])]
    for name in first:
        if not any(study.find(name) for study in studies):
            raise unknown("The report", "single row", name, dict.fromkeys(v.label for v in variants))
    for name in columns:
        if not any(study.has(name) for study in studies):
            known = dict.fromkeys(key for study in studies for key in map(str, study.runs) if study.has(key))
            raise unknown("The report", "column", name, known)
    for study in studies:
        found = [study.find(name) for name in first]
        study.variants.sort(key=lambda variant: found.index(variant) if variant in found else len(found))
        if reference is not None and (variant := study.find(reference)):
            study.compared_with = variant
        study.columns = [name for name in columns if study.has(name)] or study.columns
