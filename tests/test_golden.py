"""The fast golden runs against the figures in tests/golden.json: does this code still compute the same?

The figures depend on the processor through the order of summation. What that does to a perplexity or to the norm of
the weights after some dozen steps of Adam stays below 1e-5; a learning rate 1 % higher changes perplexity by 4e-3 and
the norm by 1e-4 or more. The tolerances lie between. Sentences that are nearly as probable under two classes may fall
on either side, so shares of sentences are equal up to two of the 40.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from conftest import compose
from golden_runs import CASES, FAST, GOLDEN, ROOT, figures, overrides, write_corpus

from speechformer.runs.identity import NUMERICS_VERSION
from speechformer.training.run import execute

CHANGED = (
    "the numerics changed: if that is intended, raise NUMERICS_VERSION in speechformer/runs/identity.py and run "
    "`python tests/golden_runs.py record`"
)
CHOSEN_BY_DEFAULT = {
    **{
        "task": ["classify"],
        "model": ["sinusoidal"],
        "pattern": ["full"],
        "attention": ["softmax"],
        "protocol": ["paper"],
    },
    "recipe": ["adam", "translate"],
}
# The pattern in the name of a figure, and how far it may be from the golden one: relative, absolute
TOLERANCES = {
    r"^weight_norm$": (3e-5, 0.0),
    r"perplexity|bits": (2e-4, 0.0),
    r"^(train|validation|test)_accuracy$": (0.0, 2 / 40),
    r"_accuracy_": (0.0, 2 / 10),  # of a class, or of sentences in train
    r"^(validation|test)_(bleu|chrf)": (0.0, 1.0),
}


def differences(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs by more than rounding, one line for each figure; a new metric is no difference."""
    lines = []
    expected, actual = ({**run, **run["metrics"]} for run in (golden, now))
    for name in sorted(expected.keys() - {"metrics"}):
        one, other = expected[name], actual.get(name, "no such metric")
        found = (within for pattern, within in TOLERANCES.items() if re.search(pattern, name))
        relative, absolute = next(found, (1e-6, 0.0))
        if other != (pytest.approx(one, rel=relative, abs=absolute) if isinstance(one, float) else one):
            lines.append(f"{name}: {other}, not {one}")
    return lines


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(ROOT, tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("case", FAST)
def test_numerics_are_unchanged(
    case: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    execute(compose(*overrides(case, corpus)), tmp_path / "run")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if lines := differences(golden["cases"][case], figures(tmp_path / "run")):
        pytest.fail("\n".join([f"{case}: {CHANGED}", *lines]), pytrace=False)


@pytest.mark.parametrize("group", ["task", "model", "pattern", "attention", "recipe", "protocol"])
def test_the_golden_runs_cover_every_choice(group: str) -> None:
    """Oracle: the files of conf; what a config takes by default is that of a case."""
    words = " ".join(CASES.values())
    named = re.findall(rf"(?<!\S){group}=(\S+)", words) + re.findall(rf"{group}\.layers=\[(\S+)\]", words)
    chosen = {*CHOSEN_BY_DEFAULT[group], *",".join(named).split(",")}
    assert chosen >= {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_the_golden_figures_are_of_this_version_and_of_every_fast_case() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["numerics_version"] == NUMERICS_VERSION, CHANGED
    assert sorted(golden["cases"]) == sorted(FAST)


@pytest.mark.parametrize(
    ("versions", "after", "code"),
    [((1, 1), "other", 1), ((1, 2), "other", 0), ((0, 1), "other", 1), ((1, 1), "same", 0), ((1, 2), "failed", 1)],
)
def test_results_may_differ_only_under_another_version(
    versions: tuple[int, int], after: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"status": "finished", "steps": 1, "corpus": "", "metrics": {}, "sha256": {"last": "a"}}
    with_new_metric = {**run, "sha256": {"last": "a", "metric b": "c"}}  # which is no difference
    outcomes: dict[str, Any] = {
        "same": [with_new_metric],
        "other": [{**run, "sha256": {"last": "b"}}],
        "failed": {"error": "it failed"},
    }
    monkeypatch.setattr(golden_runs, "run", lambda at, *_: {"lm": outcomes[after] if at.name == "1" else [run]})
    monkeypatch.setattr(golden_runs, "numerics_version", lambda checkout: versions[int(checkout.name)])
    assert golden_runs.compare(tmp_path / "0", tmp_path / "1", ["lm"], 1) == code


def test_figures_that_changed_are_not_recorded_under_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GOLDEN.read_text(encoding="utf-8")
    cases = json.loads(before)["cases"]
    outcomes = {case: [{**run, "weight_norm": run["weight_norm"] * 1.01}] for case, run in cases.items()}
    monkeypatch.setattr(golden_runs, "run", lambda *_: outcomes)
    assert golden_runs.record(1) == 1 and GOLDEN.read_text(encoding="utf-8") == before
