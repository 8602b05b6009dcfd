"""What the README shows works as it is shown."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY, compose
from test_cores import T, decoder, sentences

from speechformer.config import CONF
from speechformer.layers import patterns, positions
from speechformer.training.run import execute

README = CONF.parent / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not a checkout")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def examples() -> Iterator[dict[str, dict]]:
    """The README's examples as if they stood in the files that they name; their yaml by name."""
    for module, kinds in ((positions, positions.POSITIONS), (patterns, patterns.PATTERNS)):
        before = dict(kinds)
        for block in blocks("python"):
            if f"# {module.__name__.replace('.', '/')}.py" in block:
                exec(block, {**vars(module)})
        assert kinds.keys() - before.keys() <= {"kerple", "sinks"}
    yield {spec["name"]: spec for spec in map(yaml.safe_load, blocks("yaml"))}
    del positions.POSITIONS["kerple"], patterns.PATTERNS["sinks"]


def test_the_added_position_and_pattern_are_their_formulas(examples: dict[str, dict]) -> None:
    model = decoder(model=examples["kerple"], pattern=examples["sinks"], layers=1)
    bias = model.decoder.positions.bias(T, T)
    assert bias[1, 9, 2].item() == pytest.approx(-math.log(8))
    weights = model.attention(sentences())["decoder"][0]
    for i in range(T):
        for j in range(T):
            seen = j <= i and (i - j < 5 or j < 4)
            assert (weights[0, 0, i, j].item() > 0) == seen
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, T))


def test_every_file_has_its_line() -> None:
    text = README.read_text(encoding="utf-8")
    for path in (CONF.parent / "speechformer").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"| `{path.relative_to(CONF.parent).as_posix()}` |" in text, path


def test_every_choice_is_named() -> None:
    text = README.read_text(encoding="utf-8")
    for path in CONF.glob("*/*.yaml"):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{path.parent.name}` |"))
        assert f"`{path.stem}`" in row, path


def test_what_was_trained_can_be_used_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    execute(compose(*TINY, "trainer.max_steps=2"), tmp_path / "run")
    capsys.readouterr()
    (block,) = [block for block in blocks("python") if "load_trained" in block]
    exec(block.replace('"outputs/runs/..."', repr(str(tmp_path / "run"))), {})
    shares, words, weights = ast.literal_eval(capsys.readouterr().out.replace("} [", "}, [").replace("] [", "], ["))
    assert list(shares) == ["marlowe", "okafor", "vance"] and len(words) == len(weights) == 7
    assert sum(shares.values()) == pytest.approx(1)
