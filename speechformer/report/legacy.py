"""What the report shows of results that do not say it: those from before version 0.2, and of failed runs."""

from __future__ import annotations

from typing import Any

PERPLEXITIES = ["test_perplexity_mean", "test_sliding_perplexity_mean", "train_perplexity"]
ACCURACIES = ["test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train", "train_accuracy"]
SCORES = ["test_bleu", "test_bleu_interval", "test_chrf", "test_length_ratio", "test_exact", "validation_bleu"]

# baseline_keys: config keys that a baseline must share with a run to stand in its table
UNKNOWN = {"metric": "", "higher_is_better": True, "columns": [], "compare": [], "x_axis": "step", "note": ""}
UNKNOWN |= {"unit": "lines", "baseline_keys": []}
TASKS: dict[str, dict[str, Any]] = {
    "classify": {
        "metric": "test_accuracy",
        "columns": ACCURACIES,
        "compare": ["test_accuracy", "test_accuracy_not_in_train"],
        "x_axis": "epoch",
        "baseline_keys": ["block_size"],  # sentences are cut there
    },
    "lm": {
        "metric": "test_perplexity_mean",
        "higher_is_better": False,
        "columns": PERPLEXITIES,
        "compare": ["test_perplexity_mean"],
        "note": "Perplexity per token; lower is better.",
        "baseline_keys": ["task.extra_text"],
    },
    "translate": {"metric": "test_bleu", "columns": SCORES, "compare": ["test_bleu"], "unit": "pairs"},
}


def describe(result: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a result: its entry `report`, completed by that of its task above."""
    description = {**UNKNOWN, **TASKS.get(result["task"], {}), **(result.get("report") or {})}
    if "report" not in result and description["columns"] == PERPLEXITIES:
        tests = [name for name in result.get("metrics") or {} if name.startswith("test_perplexity_")]
        classes = [f"test_perplexity_{name}" for name in (result.get("corpus") or {}).get("classes", [])]
        tests = [name for name in classes if name in tests] + tests  # in the order of the classes
        description["columns"] = list(dict.fromkeys([PERPLEXITIES[0], *tests, *PERPLEXITIES[1:]]))
    return description
