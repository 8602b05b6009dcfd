"""Names from before version 0.2: results and checkpoints are read with the current ones."""

from __future__ import annotations

import copy
from typing import Any

from speechformer.runs.legacy import RENAMED_KEYS, renamed_key, upgrade_checkpoint, upgrade_override, upgrade_result

OVERRIDES = {
    "+core={norm: pre}": "+architecture={norm: pre}",
    "~task.average": "~task.average_checkpoints",
    "task.size=a=b": "task.vocab_size=a=b",
    "hydra/launcher=packed": "hydra/launcher=ensemble",
    "task.sizes=3": "task.sizes=3",
}
OLD: dict[str, Any] = {
    "status": "finished",
    "metrics": {"test_accuracy_seen": 0.9, "test_accuracy_unseen": None},
    "curve": [{"step": 1, "test_accuracy_seen": 0.5, "test_accuracy_of_seen": 0.1, "test_perplexity_unseen": 3.0}],
    "best": {"metric": "test_accuracy_unseen", "value": 0.8},
    "config": {"core": {"norm": "pre"}, "task": {"name": "lm", "size": 10}, "corpus": {"longest": 20}, "width": 8},
    "overrides": [*OVERRIDES],
    "corpus": {"counts": {"test_seen_in_train": 1, "tests": {"obama": {"lines": 2, "seen_in_train": 1}}}},
    "machine": {"device": "cpu", "runs_in_one": 3},
}
NEW = OLD | {
    "metrics": {"test_accuracy_in_train": 0.9, "test_accuracy_not_in_train": None},
    "curve": [
        {"step": 1, "test_accuracy_in_train": 0.5, "test_accuracy_of_seen": 0.1, "test_perplexity_unseen": 3.0}
    ],
    "best": {"metric": "test_accuracy_not_in_train", "value": 0.8},
    "overrides": [*OVERRIDES.values()],
    "corpus": {"counts": {"test_in_train": 1, "tests": {"obama": {"lines": 2, "in_train": 1}}}},
    "machine": {"device": "cpu", "ensemble_size": 3},
}
NEW["config"] = {
    "architecture": {"norm": "pre"},
    "task": {"name": "lm", "vocab_size": 10},
    "corpus": {"max_length": 20},
    "width": 8,
}


def test_a_result_gets_the_current_names() -> None:
    before = copy.deepcopy(OLD)
    assert upgrade_result(OLD) == upgrade_result(NEW) == NEW and before == OLD
    failed = {"status": "failed", "overrides": None, "corpus": None}
    assert upgrade_result(failed) == failed


def test_a_checkpoint_gets_the_current_names() -> None:
    old = {"hyper_parameters": {"core": {"width": 8}}, "state_dict": {"core.output.core.weight": 1}, "task": "lm"}
    new = {"hyper_parameters": {"architecture": {"width": 8}}, "state_dict": {"model.output.core.weight": 1}}
    assert upgrade_checkpoint(old) == upgrade_checkpoint(new | {"task": "lm"}) == new | {"task": "lm"}
    assert "core" in old["hyper_parameters"]


def test_a_checkpoint_of_a_classifier_without_masked_words_loads() -> None:
    without, masked = ({"hyper_parameters": {"recipe": {}, "masked_lm": value}} for value in (None, {"weight": 1.0}))
    assert upgrade_checkpoint(without) == {"hyper_parameters": {"recipe": {}}}
    assert upgrade_checkpoint(masked) == masked


def test_a_key_is_renamed_as_a_whole() -> None:
    assert [renamed_key(key) for key in RENAMED_KEYS] == list(RENAMED_KEYS.values())
    assert renamed_key("corelation.norm") is renamed_key("task") is None
    assert {old: upgrade_override(old) for old in OVERRIDES} == OVERRIDES
