"""Oracles: closed forms of entropy and distance; weights that are wrong in one way; the cells of the picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import BAHDANAU, MODELS, PATTERNS, group
from matplotlib import colormaps
from matplotlib.colors import Normalize, to_hex
from test_encoder_decoder import pairs, translator
from test_models import classifier, decoder, sentences

from speechformer.analysis.attention_maps import (
    CLS,
    AttentionMap,
    check_maps,
    figure_of,
    maps_of,
    save,
)
from speechformer.attention import format_heads

WORDS = [f"w{k}" for k in range(12)]
SVG = "{http://www.w3.org/2000/svg}"


def a_map(weights: torch.Tensor, name: str = "encoder") -> AttentionMap:
    T, S = weights.shape[-2:]
    return AttentionMap(name, WORDS[:T], WORDS[:S], weights, torch.ones(T, S, dtype=torch.bool))


def test_entropy_and_distance_of_known_weights() -> None:
    """All alike: ln 5, and the mean of |i - j|, 1.6; one token, the first for all: 0, and the mean of i, 2."""
    alike, first = torch.full((5, 5), 0.2), torch.eye(5)[:1].expand(5, 5)
    part = a_map(torch.stack((alike, torch.eye(5), first))[None])
    torch.testing.assert_close(part.entropy(), torch.tensor([[math.log(5), 0, 0]]))
    torch.testing.assert_close(part.distance(), torch.tensor([[1.6, 0, 2.0]]))
    assert a_map(alike[None, None], "cross").distance() is None


@pytest.mark.parametrize(
    ("model", "pattern"), [*((name, "window") for name in MODELS), *(("alibi", name) for name in PATTERNS)]
)
def test_the_maps_are_the_models_weights_and_pass_the_checks(model: str, pattern: str) -> None:
    arguments: dict[str, Any] = {"model": group("model", model), "pattern": group("pattern", pattern)}
    ids = sentences()[0]
    for network, name in ((classifier(**arguments), "encoder"), (decoder(**arguments), "decoder")):
        (part,) = maps_of(network, [ids], [WORDS[: len(ids)]])
        assert part.name == name and part.queries == part.keys == WORDS[: len(ids)]
        torch.testing.assert_close(part.weights, torch.stack([w[0] for w in network.attention(ids[None])[name]]))
        checks = check_maps(network, [ids], [part])
        assert all(check.passed for check in checks) and len(checks) == (4 if name == "encoder" else 2)


@pytest.mark.parametrize(
    ("model", "names"),
    [("rope", ["encoder", "decoder", "cross"]), ("rnn_attention", ["cross"]), (BAHDANAU, ["cross"])],
)
def test_the_maps_of_a_translator(model: str, names: list[str]) -> None:
    network = translator(model)
    source, target = (part[0] for part in pairs(1))
    read, written = ([f"{kind}{k}" for k in range(len(target))] for kind in "rw")
    maps = maps_of(network, [source, target], [WORDS[: len(source)], read, written])
    assert [part.name for part in maps] == names
    assert (maps[-1].queries, maps[-1].keys) == (written, WORDS[: len(source)])
    if model == "rope":
        assert maps[0].queries == WORDS[: len(source)] and maps[1].keys == read
    assert all(check.passed for check in check_maps(network, [source, target], maps))


def test_a_cls_token_is_named_and_an_rnn_has_no_maps() -> None:
    ids = sentences()[0][:5]
    (part,) = maps_of(classifier(pool="cls"), [ids], [WORDS[:5]])
    assert part.queries == [CLS, *WORDS[:5]] and part.weights.shape[-2:] == (6, 6)
    assert maps_of(decoder(model=group("model", "rnn")), [ids], [WORDS[:5]]) == []


def test_only_layers_without_scores_are_marked() -> None:
    layers = {"name": "by_layer", "layers": ["softmax", "delta"]}
    (part,) = maps_of(decoder(attention=layers, model=group("model", "rope")), [sentences()[0][:5]], [WORDS[:5]])
    figure = figure_of(part, "title")
    headings = [axis.get_title(loc="left").partition("\n")[0] for axis in figure.axes]
    assert headings[:4] == ["layer 1, head 1", "layer 1, head 2", "layer 2, head 1*", "layer 2, head 2*"]
    assert "\n* without scores: " in figure.get_supxlabel()


ROWS, HIDDEN = "the weights of each query sum to 1", "no weight on masked keys"
PADDING, CHANGES = "no weight on padding", "padding changes no other weight"


@pytest.mark.parametrize(
    ("place", "amount", "failed"),
    [
        ((0, 0, 0, 0), 0.0, []),
        ((1, 1, 2, 1), 1e-3, [ROWS, CHANGES]),
        ((1, 0, 0, 8), 1e-6, [HIDDEN]),
        ((1, 0, 3, 3), math.nan, [ROWS, CHANGES]),
    ],
)
def test_the_check_finds_wrong_weights(place: tuple[int, ...], amount: float, failed: list[str]) -> None:
    ids = sentences()[0][:9]
    model = classifier(pattern={"name": "window", "window": 3})
    (part,) = maps_of(model, [ids], [WORDS[:9]])
    part.weights[place] += amount
    assert [check.description for check in check_maps(model, [ids], [part]) if not check.passed] == failed


@pytest.mark.parametrize(("key", "amount", "failed"), [(-1, 1e-6, [PADDING]), (1, 1e-3, [CHANGES])])
def test_the_check_finds_what_padding_changes(
    key: int, amount: float, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, model = sentences()[0][:9], classifier()
    maps, attention = maps_of(model, [ids], [WORDS[:9]]), model.attention

    def wrong(padded: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        weights = attention(padded)
        weights["encoder"][1][0, 1, 2, key] += amount
        return weights

    monkeypatch.setattr(model, "attention", wrong)
    assert [check.description for check in check_maps(model, [ids], maps) if not check.passed] == failed


HARMFUL = ["<script>alert(1)</script>", "a&b", "]]>", "$x_1$", '"', "\x00\x1b[31m", "\ufffe\u202e", "\ud800", "日😀"]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_an_svg_has_each_cell_in_place_and_each_token_as_text(sign: int, tmp_path: Path) -> None:
    """Oracle: the XML; the colour of each cell is that of its weight, its path where row and column are."""
    weights = torch.rand(2, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    weights[..., 1] *= sign
    part = AttentionMap("decoder", HARMFUL, HARMFUL, weights, torch.ones(9, 9).tril().bool())
    save(part, "a\x00 <b>title</b>", path := tmp_path / "map.svg")
    root = ElementTree.parse(path).getroot()
    elements = [element.tag.rpartition("}")[2] for element in root.iter()]
    texts = [element.text for element in root.iter(f"{SVG}text")]
    labels = ["<script>alert…", "a&b", "]]>", "$x_1$", '"', "□□[31m", "□", "□", "日😀"]
    assert {*labels} <= {*texts} and "a□ <b>title</b>" in texts
    assert all(
        texts.count(label) == 4 * labels.count(label) for label in labels
    )  # two rows and two columns of panels
    assert "layer 2, head 2" in texts and "script" not in elements
    colors = colormaps["Blues" if sign > 0 else "RdBu"]
    scale = Normalize(0 if sign > 0 else -weights.abs().max(), weights.abs().max())
    for k, n in np.ndindex(2, 2):
        (panel,) = root.iterfind(f".//{SVG}g[@id='QuadMesh_{1 + 2 * k + n}']")
        cells = panel.findall(f"{SVG}path")
        for (i, j), cell in zip(np.ndindex(9, 9), cells, strict=True):
            color = to_hex(colors(scale(weights[k, n, i, j].item()))) if i >= j else "none"
            assert f"fill: {color}" in cell.get("style")
        corners = np.array([cell.get("d").split()[1:3] for cell in cells], float).reshape(9, 9, 2)
        assert (np.diff(corners[..., 0], axis=1) > 1).all() and (np.diff(corners[..., 1], axis=0) > 1).all()


def test_a_line_for_each_head_names_its_strongest_key() -> None:
    """Oracle: weights written by hand; the mean is over the queries that may attend to a key, so
    the rows before it do not make the last key of a causal map small."""
    weights = torch.tensor(
        [[[[1.0, 0, 0], [0.8, 0.2, 0], [0.1, 0.0, 0.9]], [[1.0, 0, 0], [0.1, 0.9, 0], [0, 0.9, 0.1]]]]
    )
    mask = torch.ones(3, 3).tril().bool()
    words = ["a", "b", "c"]
    lines = format_heads([AttentionMap("decoder", words, words, weights, mask)]).splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [["c", "(0.90)"], ["b", "(0.90)"]]
    assert lines[1].startswith("decoder, layer 1, head 1")
