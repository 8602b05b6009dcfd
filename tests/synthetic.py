"""Results as runs leave them, with known numbers: the tests of the report read these."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from conftest import compose
from omegaconf import OmegaConf

from speechformer.report.load import Run, Study, build_studies, read_runs
from speechformer.runs.folder import write_result

SPEECHES = "e2ce08d791799162277034058b90e278d3b48525c285370a924685d67d4acd0c"  # sha256 of the corpus of the reports
ACCURACIES = ("test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train")
PERPLEXITIES = tuple(f"test_perplexity_{name}" for name in ("mean", "obama", "wbush", "hbush"))
DESCRIPTIONS: dict[str, dict[str, Any]] = {  # what tasks write into `result.json`
    "classify": {
        "metric": "test_accuracy",
        "columns": [*ACCURACIES, "train_accuracy"],
        "compare": ["test_accuracy", "test_accuracy_not_in_train"],
        "x_axis": "epoch",
        "baseline_keys": ["block_size"],
    },
    "lm": {
        "metric": "test_perplexity_mean",
        "higher_is_better": False,
        "columns": [*PERPLEXITIES, "train_perplexity"],
        "compare": ["test_perplexity_mean"],
        "baseline_keys": ["task.extra_text"],
    },
    "translate": {
        "metric": "test_bleu",
        "columns": [
            "test_bleu",
            "test_bleu_interval",
            "test_chrf",
            "test_length_ratio",
            "test_exact",
            "validation_bleu",
        ],
        "compare": ["test_bleu"],
        "unit": "pairs",
    },
}


def config_of(*overrides: str) -> dict[str, Any]:
    """Return a composed config as plain data."""
    return OmegaConf.to_container(compose(*overrides), resolve=True)  # type: ignore[return-value]


def settings_of(*overrides: str) -> dict[str, Any]:
    """Return the part of a config that decides the variant."""
    return Run(Path(), result(*overrides)).settings


def result(
    *overrides: str, value: float | None = 0.8, sha256: str = SPEECHES, status: str = "finished", **more: Any
) -> dict[str, Any]:
    """Return a `result.json`; `value` is its main figure at each of 15 evaluations."""
    config = config_of(*overrides)
    task = config["task"]["name"]
    metrics = dict.fromkeys(ACCURACIES if task == "classify" else PERPLEXITIES, value)
    about = {"status": status, "task": task, "config": config, "seed": config["seed"], "overrides": list(overrides)}
    if status in ("failed", "killed"):
        return {**about, "error": "it broke", "commit": "c" * 40}
    counts = {"train": 2092, "test": 750, "test_in_train": 551}
    return {
        **about,
        "metrics": metrics,
        "report": DESCRIPTIONS.get(task, {}),
        "curve": [{"step": 131 * epoch, **metrics} for epoch in range(1, 16)],
        "corpus": {"name": "speeches", "sha256": sha256, "classes": ["obama", "wbush", "hbush"], "counts": counts},
        "parameters": {"total": 7},
        "seconds": 2.5,
        "commit": "c" * 40,
        "versions": {"torch": "2", "python": "3", "lightning": "2"},
        **more,
    }


def baseline(name: str, *overrides: str, **more: Any) -> dict[str, Any]:
    """Return the result of a baseline, which has no seed."""
    run = {**result(*overrides, **more), "baseline": {"name": name}, "seed": None}
    del run["report"]
    return run


def translated(model: str, seed: int, bleu: float, **more: Any) -> dict[str, Any]:
    """Return the result of a translation: BLEU falls by 1 from one length of the source to the next."""
    lengths = {"1-10": 300, "11-20": 150, "21-30": 50, "31+": 0}
    metrics = {"test_bleu": bleu, "test_bleu_interval": 0.8, "test_chrf": 2 * bleu, "test_length_ratio": 0.955}
    metrics |= {"test_exact": 0.25, "validation_bleu": bleu - 1}
    for place, name in enumerate(["1-10", "11-20", "21-30"]):
        metrics |= {f"test_bleu_at_{name}": bleu - place, f"test_chrf_at_{name}": 2 * bleu - place}
        metrics |= {f"test_length_ratio_at_{name}": 1.0, f"test_exact_at_{name}": 0.5 - 0.1 * place}
    counts = {"train": 9000, "test": 500, "test_in_train": 3, "test_by_length": lengths}
    return {
        **result("task=translate", "corpus=sample", f"model={model}", f"seed={seed}"),
        "metrics": metrics,
        "curve": [{"step": step, "validation_bleu": bleu - 10 / step} for step in (5, 10)],
        "corpus": {"name": "sample", "sha256": "5" * 64, "classes": [], "languages": ["en", "fr"], "counts": counts},
        "scoring": {"bleu": "nrefs:1|tok:13a"},
        **more,
    }


def put(folder: Path, *results: dict[str, Any]) -> Path:
    """Write each result into a folder of its own below this one."""
    for number, content in enumerate(results):
        (folder / str(number)).mkdir(parents=True)
        write_result(folder / str(number), content)
    return folder


def studies_of(folder: Path) -> list[Study]:
    """Return the studies of the runs below a folder."""
    return build_studies(read_runs([folder])[0])[0]


def study_of(folder: Path, *results: dict[str, Any]) -> Study:
    """Write results below a folder and return their only study."""
    (study,) = studies_of(put(folder, *results))
    return study


def single_spaced(text: object) -> str:
    """Return Markdown without the spaces that align its columns."""
    return re.sub(" +", " ", str(text))


def markdown_of(output: Path) -> str:
    """Return the report in a folder."""
    return single_spaced((output / "report.md").read_text(encoding="utf-8"))
