"""Read what versions before 0.2 wrote: rename config keys, metrics and counts in results and checkpoints.

All functions are pure and idempotent: they return new data and leave the current names unchanged.
"""

from __future__ import annotations

import re
from typing import Any

# Old config key -> new. A group stands for all keys below it: `core.norm` is now `architecture.norm`.
RENAMED_KEYS = {
    "core": "architecture",
    "task.size": "task.vocab_size",
    "task.average": "task.average_checkpoints",
    "corpus.longest": "corpus.max_length",
}
RENAMED_CHOICES = {"hydra/launcher=packed": "hydra/launcher=ensemble"}
OLD_METRIC = re.compile(r"_accuracy_(un)?seen$")


def renamed_key(key: str) -> str | None:
    """Return the current name of a dotted config key that was renamed, or None."""
    for old, new in RENAMED_KEYS.items():
        if f"{key}.".startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def upgrade_override(override: str) -> str:
    """Return a command-line override (`KEY=VALUE`, `+KEY=VALUE`, `~KEY`) with the current name of its key."""
    prefix, key, value = re.fullmatch(r"([+~]*)([^=]*)(.*)", override, re.DOTALL).groups()  # type: ignore[union-attr]
    return RENAMED_CHOICES.get(override) or prefix + (renamed_key(key) or key) + value


def upgrade_metric(name: str) -> str:
    """Return the current name of a metric: `test_accuracy_unseen` is now `test_accuracy_not_in_train`."""
    return OLD_METRIC.sub(lambda match: f"_accuracy_{'not_' if match[1] else ''}in_train", name)


def upgrade_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `result.json`, of any version and status, with current names."""
    upgraded = result | {
        name: _rename_metrics(result[name]) for name in ("metrics", "curve", "best") if name in result
    }
    if isinstance(upgraded.get("config"), dict):
        upgraded["config"] = _upgrade_config(upgraded["config"])
    if upgraded.get("overrides"):
        upgraded["overrides"] = [upgrade_override(override) for override in upgraded["overrides"]]
    if corpus := upgraded.get("corpus"):
        counts = _renamed(corpus["counts"], {"test_seen_in_train": "test_in_train"})
        if "tests" in counts:
            tests = counts["tests"].items()
            counts["tests"] = {name: _renamed(test, {"seen_in_train": "in_train"}) for name, test in tests}
        upgraded["corpus"] = {**corpus, "counts": counts}
    if upgraded.get("machine"):
        upgraded["machine"] = _renamed(upgraded["machine"], {"runs_in_one": "ensemble_size"})
    return upgraded


def upgrade_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint or an export's header with current names of arguments and weights.

    An old checkpoint serves to load the model. Training does not resume from it: its run has another fingerprint.
    """
    upgraded = dict(checkpoint)
    if "hyper_parameters" in upgraded:
        arguments = _renamed(upgraded["hyper_parameters"], {"core": "architecture"})
        if arguments.get("masked_lm", "") is None:  # of classifiers between 0.2 and 0.3, most of which did without
            del arguments["masked_lm"]
        upgraded["hyper_parameters"] = arguments
    if "state_dict" in upgraded:
        weights = upgraded["state_dict"].items()
        upgraded["state_dict"] = {re.sub(r"^core\.", "model.", name): weight for name, weight in weights}
    return upgraded


def _renamed(content: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in content.items()}


def _rename_metrics(content: Any) -> Any:
    """Rename metrics among the keys and texts of nested dicts, lists and tuples."""
    if isinstance(content, dict):
        return {_rename_metrics(key): _rename_metrics(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_rename_metrics(item) for item in content)
    return upgrade_metric(content) if isinstance(content, str) else content


def _upgrade_config(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    upgraded = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        name = (renamed_key(path) or path).rpartition(".")[2]
        upgraded[name] = _upgrade_config(value, f"{path}.") if isinstance(value, dict) else value
    return upgraded
