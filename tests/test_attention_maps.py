"""Oracles: closed forms of entropy and distance; weights that are wrong in one way; the pixels of the picture."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from test_encoder_decoder import pairs, translator
from test_models import classifier, decoder, sentences

from speechformer.analysis.attention_maps import CLS, MASKED, AttentionMap, check_maps, colours, draw, maps_of
from speechformer.attention import format_heads

WORDS = [f"w{k}" for k in range(12)]


def a_map(weights: torch.Tensor, name: str = "encoder") -> AttentionMap:
    T, S = weights.shape[-2:]
    return AttentionMap(name, WORDS[:T], WORDS[:S], weights, torch.ones(T, S, dtype=torch.bool))


def test_entropy_and_distance_of_known_weights() -> None:
    """All alike: ln S, and the mean of |i - j|; one token: 0, and its distance."""
    T = 5
    alike = torch.full((T, T), 1 / T)
    itself, first = torch.eye(T), torch.zeros(T, T)
    first[:, 0] = 1
    part = a_map(torch.stack((alike, itself, first))[None])
    torch.testing.assert_close(part.entropy(), torch.tensor([[math.log(T), 0, 0]]))
    mean = sum(abs(i - j) for i in range(T) for j in range(T)) / T**2
    torch.testing.assert_close(part.distance(), torch.tensor([[mean, 0, (T - 1) / 2]]))
    assert a_map(alike[None, None], "cross").distance() is None


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
def test_the_maps_are_the_models_weights_and_pass_the_checks(model: str, pattern: str) -> None:
    arguments: dict[str, Any] = {"model": group("model", model), "pattern": group("pattern", pattern)}
    ids = sentences()[0]
    for network, name in ((classifier(**arguments), "encoder"), (decoder(**arguments), "decoder")):
        (part,) = maps_of(network, [ids], [WORDS[: len(ids)]])
        assert part.name == name and part.queries == part.keys == WORDS[: len(ids)]
        torch.testing.assert_close(part.weights, torch.stack([w[0] for w in network.attention(ids[None])[name]]))
        checks = check_maps(network, [ids], [part])
        assert all(check.passed for check in checks) and len(checks) == (4 if name == "encoder" else 2)


@pytest.mark.parametrize("model", ["rope", "rnn_attention"])
def test_the_maps_of_a_translator(model: str) -> None:
    network = translator(model)
    source, target = (part[0] for part in pairs(1))
    words = [
        [f"{kind}{k}" for k in range(n)] for kind, n in (("s", len(source)), ("r", len(target)), ("w", len(target)))
    ]
    maps = {part.name: part for part in maps_of(network, [source, target], words)}
    assert set(maps) == ({"cross"} if model == "rnn_attention" else {"encoder", "decoder", "cross"})
    assert (maps["cross"].queries, maps["cross"].keys) == (words[2], words[0])
    if model == "rope":
        assert maps["encoder"].queries == words[0] and maps["decoder"].keys == words[1]
    assert all(check.passed for check in check_maps(network, [source, target], list(maps.values())))


def test_a_cls_token_is_named() -> None:
    ids = sentences()[0][:5]
    (part,) = maps_of(classifier(pool="cls"), [ids], [WORDS[:5]])
    assert part.queries == [CLS, *WORDS[:5]] and part.weights.shape[-2:] == (6, 6)


def test_an_rnn_has_no_maps() -> None:
    ids = sentences()[0]
    assert maps_of(decoder(model=group("model", "rnn")), [ids], [WORDS[: len(ids)]]) == []


class Wrong(torch.nn.Module):
    """A model whose weights are wrong in one way."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how
        self.encoder, self.max_length = model.encoder, None

    def attention(self, ids: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        weights = self.model.attention(ids)
        for layers in weights.values():
            if self.how == "sum":
                layers[1] *= 1.01
            elif self.how == "hidden":
                layers[1][0, 0, 0, 8] += 1e-6
            elif self.how == "nan":
                layers[1][0, 0, 3, 3] = math.nan
            elif self.how == "padding" and (ids == 0).any():
                layers[0][0, 1, 2, -1] = 1e-6
            elif self.how == "moved" and (ids == 0).any():
                layers[0][0, 1, 2, 1] += 1e-3
        return weights


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ("none", []),
        ("sum", ["the weights of each query sum to 1"]),
        ("hidden", ["no weight on masked keys"]),
        ("nan", ["the weights of each query sum to 1", "padding changes no other weight"]),
        ("padding", ["no weight on padding"]),
        ("moved", ["padding changes no other weight"]),
    ],
)
def test_the_check_finds_what_is_wrong(how: str, failed: list[str]) -> None:
    ids = sentences()[0][:9]
    model = Wrong(classifier(pattern={"name": "window", "window": 3}), how)
    maps = maps_of(model, [ids], [WORDS[:9]])
    assert [check.description for check in check_maps(model, [ids], maps) if not check.passed] == failed


def test_the_picture_has_the_colour_of_each_weight() -> None:
    """The middle of each cell, located by the grey of masked pairs."""
    weights = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    part = a_map(weights)
    part.mask[0, 3] = False
    image = draw(part, "title").convert("RGB")
    pixels = torch.tensor(list(image.tobytes())).view(image.height, image.width, 3)
    grey = (pixels == torch.tensor(MASKED)).all(dim=-1)
    grey[-80:] = False  # the legend
    rows, columns = grey.any(dim=1).nonzero().flatten(), grey.any(dim=0).nonzero().flatten()
    cell = 34
    tops = [int(rows[0]), int(rows[rows > rows[0] + cell][0])]
    rights = [int(column) for column in columns if not grey[:, column - 1].any()]
    assert len(rights) == 3
    scale = weights.max()
    for layer, top in enumerate(tops):
        for head, right in enumerate(rights):
            for i in range(4):
                for j in range(4):
                    pixel = pixels[top + i * cell + cell // 2, right + (j - 3) * cell + cell // 2]
                    expected = colours((weights[layer, head, i, j] / scale).numpy())
                    assert pixel.tolist() == (list(MASKED) if (i, j) == (0, 3) else expected.tolist())


@pytest.mark.parametrize("tokens", [1, 40, 128])
def test_a_picture_has_a_readable_size_for_any_text(tokens: int) -> None:
    weights = torch.full((6, 8, tokens, tokens), 1 / tokens)
    words = [f"😀 שלום {k}" for k in range(tokens)]
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    size = draw(AttentionMap("encoder", words, words, weights, mask), "title").size
    assert max(size) < 5000 and size[0] >= 480


def test_a_map_of_one_word_has_room_for_its_headings() -> None:
    """No heading reaches into the next one's column: between them is a column of paper alone."""
    weights = torch.ones(1, 4, 1, 1)
    image = draw(AttentionMap("encoder", ["We"], ["We"], weights, torch.ones(1, 1, dtype=torch.bool)), "").convert(
        "L"
    )
    band = torch.tensor(list(image.crop((0, 66, image.width, 82)).tobytes())).view(16, image.width)
    inked = (band < 200).any(dim=0).nonzero().flatten()
    assert int((inked.diff() > 12).sum()) == 3


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
