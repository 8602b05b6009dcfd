"""The fast golden runs against the figures in tests/golden.json: does this code still compute the same?

The figures depend on the processor through the order of summation alone. Between AVX-512 kernels and plain ones they
differ by 1e-6 in perplexity and 1e-7 in the norm of the weights, and no classified sentence or translation differs.
A learning rate 1 % higher changes perplexity by 4e-3 and the norm by 1e-4 or more. The tolerances lie between.
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
    **{"task": ["classify"], "model": ["sinusoidal"], "pattern": ["full"], "protocol": ["paper"]},
    "recipe": ["adam", "translate"],
}
PERPLEXITY, WEIGHT_NORM, DISCRETE = 2e-4, 3e-5, 1e-6  # relative; the last for what counts sentences or words


def run_in_process(words: list[str], folder: Path) -> None:
    """Make a run in a folder."""

    execute(compose(*words), folder)


def differences(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs by more than rounding, one line for each figure."""
    lines = []
    expected, actual = ({**run, **run["metrics"]} for run in (golden, now))
    for name in sorted((golden.keys() | golden["metrics"].keys() | now["metrics"].keys()) - {"metrics"}):
        one, other = expected.get(name, "no such metric"), actual.get(name, "no such metric")
        within = (
            WEIGHT_NORM
            if name == "weight_norm"
            else PERPLEXITY
            if "perplexity" in name or "bits" in name
            else DISCRETE
        )
        equal = pytest.approx(one, rel=within, abs=0) if isinstance(one, float) else one
        if other != equal:
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
    run_in_process(overrides(case, corpus, ROOT), tmp_path / "run")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    lines = differences(golden["cases"][case], figures(tmp_path / "run"))
    if lines:
        pytest.fail("\n".join([f"{case}: {CHANGED}", *lines]), pytrace=False)


@pytest.mark.parametrize("group", ["task", "model", "pattern", "recipe", "protocol"])
def test_the_golden_runs_cover_every_choice(group: str) -> None:
    """Oracle: the files of conf; what a config takes by default is that of a case."""
    cases = [overrides(case, Path("corpus"), ROOT) for case in CASES]
    named = " ".join(word for words in cases for word in words)
    chosen = {*re.findall(rf"(?<!\S){group}=(\S+)", named)} | {*CHOSEN_BY_DEFAULT[group]}
    chosen = {choice for choices in chosen for choice in choices.split(",")}
    layers = re.findall(rf"{group}\.layers=\[(\S+)\]", named)
    chosen |= {choice for choices in layers for choice in choices.split(",")}
    assert chosen >= {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_every_fast_case_is_recorded() -> None:
    assert sorted(json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]) == sorted(FAST)


def test_the_golden_figures_are_of_this_version_of_the_numerics() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8"))["numerics_version"] == NUMERICS_VERSION, CHANGED


@pytest.mark.parametrize(
    ("versions", "after", "code"),
    [((1, 1), "other", 1), ((1, 2), "other", 0), ((0, 1), "other", 1), ((1, 1), "same", 0), ((1, 2), "failed", 1)],
)
def test_results_may_differ_only_under_another_version(
    versions: tuple[int, int], after: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(checkout: Path, *_: object) -> dict[str, Any]:
        if checkout.name == "1" and after == "failed":
            return {"lm": {"error": "it failed"}}
        weights = "b" if checkout.name == "1" and after == "other" else "a"
        return {"lm": [{"status": "finished", "steps": 1, "corpus": "", "metrics": {}, "sha256": {"last": weights}}]}

    monkeypatch.setattr(golden_runs, "run", outcome)
    monkeypatch.setattr(golden_runs, "numerics_version", lambda checkout: versions[int(checkout.name)])
    assert golden_runs.compare(tmp_path / "0", tmp_path / "1", ["lm"], 1) == code


def test_a_new_metric_is_no_difference_and_one_that_is_gone_is() -> None:
    few = {"status": "finished", "steps": 1, "corpus": "", "metrics": {}, "sha256": {"metric a": "1", "curve a": "2"}}
    more = {**few, "sha256": {**few["sha256"], "metric b": "3", "curve b": "4"}}
    assert not golden_runs.difference([few], [more])
    assert golden_runs.difference([more], [few]).startswith("differs: curve, metric;")
    assert golden_runs.difference([few], [{**more, "sha256": {**more["sha256"], "curve a": "0"}}])


def test_figures_that_changed_are_not_recorded_under_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    outcomes = {case: [{**run, "weight_norm": run["weight_norm"] * 1.01}] for case, run in golden["cases"].items()}
    monkeypatch.setattr(golden_runs, "run", lambda *_: outcomes)
    assert golden_runs.record(1) == 1
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == golden
