"""Names from before version 0.2: results and checkpoints are read with the current ones."""

from __future__ import annotations

import copy

import pytest

from speechformer.runs.legacy import (
    RENAMED_KEYS,
    renamed_key,
    upgrade_checkpoint,
    upgrade_metric,
    upgrade_override,
    upgrade_result,
)

OLD_RESULT = {
    "status": "finished",
    "task": "classify",
    "metrics": {"test_accuracy": 0.8, "test_accuracy_seen": 0.9, "test_accuracy_unseen": None},
    "curve": [{"step": 1, "test_accuracy_seen": 0.5, "test_accuracy_of_seen": 0.1}],
    "best": {"metric": "test_accuracy", "value": 0.8, "step": 1, "chosen_on": "test"},
    "config": {
        "core": {"norm": "pre", "pool": "mean"},
        "task": {"name": "translate", "size": 10, "average": 5},
        "corpus": {"name": "digits", "longest": 20},
        "width": 8,
    },
    "overrides": ["core.norm=pre", "++core.bias=false", "~task.average", "corpus.longest=20", "width=8"],
    "corpus": {
        "name": "digits",
        "counts": {"test": 2, "test_seen_in_train": 1, "tests": {"obama": {"lines": 2, "seen_in_train": 1}}},
    },
    "machine": {"device": "cpu", "runs_in_one": 3},
    "seed": 0,
}
NEW_RESULT = {
    **OLD_RESULT,
    "metrics": {"test_accuracy": 0.8, "test_accuracy_in_train": 0.9, "test_accuracy_not_in_train": None},
    "curve": [{"step": 1, "test_accuracy_in_train": 0.5, "test_accuracy_of_seen": 0.1}],
    "config": {
        "architecture": {"norm": "pre", "pool": "mean"},
        "task": {"name": "translate", "vocab_size": 10, "average_checkpoints": 5},
        "corpus": {"name": "digits", "max_length": 20},
        "width": 8,
    },
    "overrides": [
        "architecture.norm=pre",
        "++architecture.bias=false",
        "~task.average_checkpoints",
        "corpus.max_length=20",
        "width=8",
    ],
    "corpus": {
        "name": "digits",
        "counts": {"test": 2, "test_in_train": 1, "tests": {"obama": {"lines": 2, "in_train": 1}}},
    },
    "machine": {"device": "cpu", "ensemble_size": 3},
}
WEIGHT = object()
OLD_CHECKPOINT = {
    "task": "classify",
    "hyper_parameters": {"core": {"width": 8}, "classes": ["a"]},
    "state_dict": {"core.output.weight": WEIGHT},
}


def test_a_result_gets_the_current_names() -> None:
    before = copy.deepcopy(OLD_RESULT)
    assert upgrade_result(OLD_RESULT) == NEW_RESULT
    assert before == OLD_RESULT
    assert upgrade_result(NEW_RESULT) == NEW_RESULT


@pytest.mark.parametrize(
    "result", [{"status": "failed", "error": "out of memory"}, {"overrides": None, "corpus": None}]
)
def test_a_result_that_lacks_entries_stays_as_it_is(result: dict) -> None:
    assert upgrade_result(result) == result


def test_a_checkpoint_gets_the_current_names() -> None:
    upgraded = upgrade_checkpoint(OLD_CHECKPOINT)
    assert upgraded == {
        "task": "classify",
        "hyper_parameters": {"architecture": {"width": 8}, "classes": ["a"]},
        "state_dict": {"model.output.weight": WEIGHT},
    }
    assert upgrade_checkpoint(upgraded) == upgraded
    assert "core" in OLD_CHECKPOINT["hyper_parameters"]
    weights = {"task": "lm", "state_dict": {"core.a": WEIGHT}, "hyper_parameters": {"core": {}}}  # of weights alone
    assert upgrade_checkpoint(weights)["state_dict"] == {"model.a": WEIGHT}


def test_a_key_is_renamed_as_a_whole() -> None:
    assert [renamed_key(key) for key in RENAMED_KEYS] == list(RENAMED_KEYS.values())
    assert renamed_key("core.norm") == "architecture.norm"
    assert renamed_key("corelation.norm") is renamed_key("task.sizes") is renamed_key("task") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("core.norm=pre", "architecture.norm=pre"),
        ("+core={norm: pre}", "+architecture={norm: pre}"),
        ("task.size=a=b", "task.vocab_size=a=b"),
        ("hydra/launcher=packed", "hydra/launcher=ensemble"),
        ("model=alibi", "model=alibi"),
    ],
)
def test_an_override_is_renamed_before_its_value(old: str, new: str) -> None:
    assert upgrade_override(old) == new


def test_only_the_end_of_a_metric_is_renamed() -> None:
    assert upgrade_metric("test_accuracy_unseen") == "test_accuracy_not_in_train"
    assert upgrade_metric("test_perplexity_unseen") == "test_perplexity_unseen"  # a text of this name
