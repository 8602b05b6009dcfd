"""Oracles: each pattern's definition, in a double loop over i and j."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import PATTERNS, group

from speechformer.errors import UserError
from speechformer.layers.attention import attention_mask
from speechformer.layers.patterns import PATTERNS as FUNCTIONS
from speechformer.layers.patterns import build_pattern

LENGTH = 40


def dense(spec: dict, length: int = LENGTH) -> torch.Tensor:
    index = torch.arange(length)
    return build_pattern(spec)(index[:, None], index[None, :]).expand(length, length)


def bigbird(i: int, j: int, window: int = 3, tokens: int = 2, links: int = 2, seed: int = 9) -> bool:
    """Window, global tokens, and the links that the later position draws among the earlier ones."""
    if abs(i - j) < window or min(i, j) < tokens:
        return True
    drawn = []
    for link in range(links):
        x = max(i, j) * 2654435761 + seed * 40503 + link * 2246822519
        for _ in range(2):
            x %= 2**32
            x = ((x >> 16) ^ x) * 0x45D9F3B
        drawn.append(tokens + (x % 2**32 >> 1) % (max(i, j) - window - tokens + 1))
    return min(i, j) in drawn


DEFINITIONS: dict[str, tuple[dict, Callable[[int, int], bool]]] = {
    "full": ({}, lambda i, j: True),
    "window": ({"window": 4}, lambda i, j: abs(i - j) < 4),
    "block": ({"block": 6}, lambda i, j: j // 6 in (i // 6, i // 6 - 1)),
    "strided": ({"stride": 5}, lambda i, j: abs(i - j) < 5 or abs(i - j) % 5 == 0),
    "dilated": ({"window": 3, "dilation": 4}, lambda i, j: abs(i - j) in (0, 4, 8)),
    "global": ({"window": 3, "tokens": 2}, lambda i, j: abs(i - j) < 3 or i in (0, 1) or j in (0, 1)),
    "sinks": ({"window": 3, "tokens": 2}, lambda i, j: abs(i - j) < 3 or j < 2),
    "bigbird": ({"window": 3, "tokens": 2, "links": 2, "seed": 9}, bigbird),
}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *PATTERNS}))
def test_pattern_is_its_definition(name: str) -> None:
    assert name in FUNCTIONS, f"{name} has a yaml file but no function: add it to PATTERNS in layers/patterns.py"
    assert name in PATTERNS, f"PATTERNS[{name!r}] has no file conf/pattern/{name}.yaml"
    assert name in DEFINITIONS, f"pattern={name} has no definition: add DEFINITIONS[{name!r}] to this file"
    options, definition = DEFINITIONS[name]
    mask = dense({"name": name, **options})
    for i in range(LENGTH):
        for j in range(LENGTH):
            assert mask[i, j].item() == definition(i, j), (i, j)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_bigbird_is_window_and_global_and_a_few_links(seed: int) -> None:
    window, tokens, links = 3, 2, 3
    mask = dense({"name": "bigbird", "window": window, "tokens": tokens, "links": links, "seed": seed}, 200)
    near = dense({"name": "global", "window": window, "tokens": tokens}, 200)
    assert torch.equal(mask, mask.T)
    assert torch.equal(mask & near, near)
    backward = (mask & ~near).tril().sum(dim=1)  # links that each position has drawn
    assert backward.max() <= links
    first = window + tokens  # the first position that has anything to draw from
    assert backward[:first].sum() == 0 and (backward[first:] >= 1).all()
    # drawn with replacement, so nearly all of them differ where there is much to draw from
    assert backward[100:].float().mean() > links - 0.2


def test_bigbird_links_are_spread_evenly() -> None:
    """Oracle: uniform draws, by a chi-squared statistic over ten bins (9 degrees of freedom; 33.7 is p = 1e-4)."""
    mask = dense({"name": "bigbird", "window": 1, "tokens": 0, "links": 8, "seed": 3}, 1200)
    i, j = (mask & ~torch.eye(1200, dtype=torch.bool)).tril().nonzero().T
    share = (j[i > 200].float() / i[i > 200]).clamp(max=0.9999)
    counts = (share * 10).long().bincount(minlength=10).double()
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 33.7


def test_bigbird_links_depend_on_the_seed_and_not_on_the_length() -> None:
    spec = {"name": "bigbird", "window": 2, "tokens": 1, "links": 2}
    assert torch.equal(dense({**spec, "seed": 5}, 100)[:40, :40], dense({**spec, "seed": 5}, 40))
    assert not torch.equal(dense({**spec, "seed": 5}), dense({**spec, "seed": 6}))


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_keeps_the_diagonal(name: str) -> None:
    assert dense(group("pattern", name)).diagonal().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["window", "strided"])
def test_one_as_long_as_the_sequence_equals_full(name: str, causal: bool) -> None:
    option = {"window": "window", "strided": "stride"}[name]
    wide = attention_mask(build_pattern({"name": name, option: 32}), 32, 32, causal)
    assert torch.equal(wide, attention_mask(build_pattern({"name": "full"}), 32, 32, causal))


def test_sinks_are_global_tokens_in_a_decoder() -> None:
    options = {"window": 3, "tokens": 4}
    sinks, tokens = (build_pattern({"name": name, **options}) for name in ("sinks", "global"))
    assert torch.equal(attention_mask(sinks, 12, 12, True), attention_mask(tokens, 12, 12, True))
    assert not torch.equal(attention_mask(sinks, 12, 12, False), attention_mask(tokens, 12, 12, False))


def test_causality_and_padding_join_the_pattern() -> None:
    token_mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    mask = attention_mask(build_pattern({"name": "window", "window": 2}), 6, 6, True, token_mask)
    for b in range(2):
        for i in range(6):
            for j in range(6):
                expected = (i - 2 < j <= i) and (bool(token_mask[b, j]) or i == j)
                assert mask[b, 0, i, j].item() == expected


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "window", "window": 0},
        {"name": "window", "window": 2.5},
        {"name": "block", "block": -1},
        {"name": "dilated", "dilation": 0},
        {"name": "global", "tokens": -1},
        {"name": "bigbird", "links": "many"},
        {"name": "sinks", "tokens": -1},
    ],
)
def test_an_invalid_size_is_an_error(spec: dict) -> None:
    with pytest.raises(UserError, match=r"pattern\.\w+ must be an integer of at least [01], not"):
        build_pattern(spec)
