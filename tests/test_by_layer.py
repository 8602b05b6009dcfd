"""Another encoding or pattern in each layer. Oracle: each block of the model alone, with its own bias."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose, group
from test_models import decoder, sentences
from test_sampling import draws, draws_without_cache

from speechformer.analysis.exports import as_program, as_safetensors, load_safetensors
from speechformer.analysis.load import load
from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.layers.attention import Attention, Pairs
from speechformer.layers.patterns import build_pattern
from speechformer.layers.positions import build_positions
from speechformer.training.run import execute

WINDOW = {"name": "window", "window": 3}
KINDS: list[tuple[list[Any], list[Any]]] = [
    (["rope", "rope", "nope"], ["full"]),
    (["alibi"], [WINDOW, "window", "full"]),
    (["relative", "rope", {"name": "relative"}], ["sinks", "full", "full"]),
    (["kerple", {"name": "rope", "base": 500.0}, "forgetting"], [WINDOW, WINDOW, "bigbird"]),
]


def as_spec(kind: str, entry: str | dict[str, Any]) -> dict[str, Any]:
    name, options = (entry, {}) if isinstance(entry, str) else (entry["name"], entry)
    return {**group(kind, name), **options}


def by_layer(positions: list[Any], patterns: list[Any], **own: Any) -> Any:
    both = {"model": {"name": "by_layer", "layers": positions}, "pattern": {"name": "by_layer", "layers": patterns}}
    return decoder(**both, layers=3, **own)


@pytest.mark.parametrize(("positions", "patterns"), KINDS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_each_layer_has_its_own_encoding_and_pattern(
    positions: list[Any], patterns: list[Any], training: bool
) -> None:
    model = by_layer(positions, patterns, dropout=0.0).double().train(training)
    ids, stack = sentences(), model.decoder
    x, T, members = stack.embedding(ids), ids.shape[1], {}
    for k, block in enumerate(stack.blocks):
        spec = as_spec("model", positions[k % len(positions)])
        assert members.setdefault(str(spec), stack.positions.at_layer(k)) is stack.positions.at_layer(k)  # shared
        layer = build_positions(spec, width=16, heads=2, length=T, causal=True).double()
        layer.load_state_dict(stack.positions.at_layer(k).state_dict())
        pattern = build_pattern(as_spec("pattern", patterns[k % len(patterns)]))
        pairs = Pairs.of_text(layer, pattern, True, T, None, None)
        x, *_ = block(x, Attention(pairs.bias(*pairs.all), pairs))
    torch.testing.assert_close(model(ids), model.output(stack.final_norm(x)))


@pytest.mark.parametrize(("positions", "patterns"), KINDS, ids=str)
def test_a_cache_changes_nothing(positions: list[Any], patterns: list[Any]) -> None:
    model = by_layer(positions, patterns)
    assert draws(model, [3, 7], 12) == draws_without_cache(model, [3, 7], 12)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model=by_layer model.layers=[sinusoidal,nope]",
            "sinusoidal acts on the embeddings, before the first layer",
        ),
        ("model=by_layer model.layers=[rope,rope,nope]", "layers must be a multiple of 3, not 2"),
        ("pattern=by_layer pattern.layers=[]", r"pattern.layers must be a list of choices.*, not \[\]"),
        ("model=by_layer model.layers=[by_layer]", "model.layers must be a list of choices"),
        ("model=by_layer model.layers=[ropes,nope]", "model.name has no choice 'ropes'.*Did you mean rope"),
        ("pattern=by_layer pattern.layers=[{name:window,window:0},full]", r"pattern.window must be at least 1"),
        ("model=by_layer model.layers=[nope,{name:rope,base:big}]", "model.base must be a number"),
    ],
)
def test_an_invalid_list_is_an_error(overrides: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config = as_plain(compose(*overrides.split()))
        decoder(model=config["model"], pattern=config["pattern"], layers=2)


def test_a_run_by_layer_trains_and_is_exported(tmp_path: Path) -> None:
    own = ["task=lm", "trainer.max_steps=2", "layers=2", "model=by_layer", "pattern=by_layer"]
    entries = ["model.layers=[relative,{name:rope,base:500}]", "pattern.layers=[{name:window,window:3},full]"]
    result = execute(compose(*TINY, *own, *entries), tmp_path / "run")
    assert result["status"] == "finished"
    run = load(tmp_path / "run")
    assert run.label == "[relative, {name: rope, base: 500}], [{name: window, window: 3}, full]"
    (tmp_path / "file").write_bytes(as_safetensors(run))
    ids = torch.randint(4, len(run.tokenizer), (2, 9))
    torch.testing.assert_close(load_safetensors(tmp_path / "file").model(ids), run.model(ids))
    program = torch.export.load(io.BytesIO(as_program(run))).module()
    torch.testing.assert_close(program(ids), run.model(ids))
    run.model.decoder.positions.can_cache = False  # as of model=randomised
    with pytest.raises(UserError, match="torch.export cannot export positions that depend on the length"):
        as_program(run)


def test_a_list_of_layers_ends_where_its_first_member_ends() -> None:
    """Oracle: the `max_positions` of the member; xPos ends where float32 overflows."""
    sizes: dict[str, Any] = {"width": 8, "heads": 2, "length": 8, "causal": True}
    listed = [{"name": "randomised", "max_positions": length} for length in (64, 32)]
    assert build_positions({"name": "by_layer", "layers": listed}, **sizes).max_length == 32
    xpos = build_positions({"name": "xpos", "scale_base": 1}, **sizes)
    q = torch.ones(1, 2, xpos.max_length, 4)
    assert all(x.isfinite().all() for x in xpos.rotate(q, q, xpos.prepare(xpos.max_length)))
