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
