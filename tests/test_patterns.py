"""Oracles: each pattern's definition, in a double loop over i and j."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import PATTERNS, group

from speechformer.errors import UserError
from speechformer.layers.attention import Pairs, attention_mask
from speechformer.layers.patterns import PATTERNS as FUNCTIONS
from speechformer.layers.patterns import TopBlocks, build_pattern, with_first_token
from speechformer.layers.positions import build_positions

LENGTH = 40
SIZES = {"width": 8, "heads": 2, "length": 14, "causal": True}


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
    "top_blocks": ({"block": 3, "top": 1}, lambda i, j: True),  # before it sees the keys
}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *PATTERNS}))
def test_pattern_is_its_definition(name: str) -> None:
    assert name in FUNCTIONS, f"{name} has a yaml file but no function: add it to PATTERNS in layers/patterns.py"
    assert name in PATTERNS, f"PATTERNS[{name!r}] has no file conf/pattern/{name}.yaml"
    assert name in DEFINITIONS, f"pattern={name} has no definition: add DEFINITIONS[{name!r}] to this file"
    options, definition = DEFINITIONS[name]
    mask = dense({"name": name, **options})
    expected = torch.tensor([[definition(i, j) for j in range(LENGTH)] for i in range(LENGTH)])
    assert torch.equal(mask, expected)


def test_bigbird_links_are_spread_evenly() -> None:
    """Oracle: uniform draws, by a chi-squared statistic over ten bins (9 degrees of freedom; 33.7 is p = 1e-4)."""
    mask = dense({"name": "bigbird", "window": 1, "tokens": 0, "links": 8, "seed": 3}, 1200)
    i, j = (mask & ~torch.eye(1200, dtype=torch.bool)).tril().nonzero().T
    share = (j[i > 200].float() / i[i > 200]).clamp(max=0.9999)
    counts = (share * 10).long().bincount(minlength=10).double()
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 33.7


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_keeps_the_diagonal(name: str) -> None:
    assert dense(group("pattern", name)).diagonal().all()


def test_causality_and_padding_join_the_pattern() -> None:
    token_mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    index = torch.arange(6)
    mask = attention_mask(
        build_pattern({"name": "window", "window": 2}), index[:, None], index[None, :], True, token_mask
    )
    for b, i, j in itertools.product(range(2), range(6), range(6)):
        assert mask[b, i, j].item() == ((i - 2 < j <= i) and (bool(token_mask[b, j]) or i == j))


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "window", "window": 0},
        {"name": "window", "window": 2.5},
        {"name": "global", "tokens": -1},
        {"name": "bigbird", "links": "many"},
    ],
)
def test_an_invalid_size_is_an_error(spec: dict) -> None:
    with pytest.raises(UserError, match=r"pattern\.\w+ must be (at least [01]|a whole number), not"):
        build_pattern(spec)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_top_blocks_are_those_with_the_best_mean_key(causal: bool, first: bool) -> None:
    """Oracle: Lu et al. 2025, equations 3 to 6, one query at a time; the second text has two tokens of padding."""
    pattern, length, block, top = build_pattern({"name": "top_blocks", "block": 3, "top": 2}), 14, 3, 2
    pattern = with_first_token(pattern) if first else pattern
    mask = None if causal else torch.arange(length) < torch.tensor([[length], [length - 2]])
    pairs = Pairs.of_text(build_positions({"name": "nope"}, **SIZES), pattern, causal, length, mask, None)
    q, k = torch.randn(2, 2, 2, length, 4, dtype=torch.float64)
    assert isinstance(pattern, TopBlocks)
    seen = pattern.select(q, k, pairs)
    for b, n, i in itertools.product(range(2), range(2), range(length)):
        keys = [j for j in range(length) if mask is None or mask[b, j]]
        means = {c: k[b, n, [j for j in keys if j // block == c]].mean(dim=0) for c in {j // block for j in keys}}
        others = [c for c in means if (c < i // block if causal else c != i // block)]
        best = sorted(others, key=lambda c: -float(q[b, n, i] @ means[c]))[:top]
        for j in keys:
            expected = j // block in (i // block, *best) or (first and 0 in (i, j))
            assert bool(seen[b, n, i, j]) == expected, (b, n, i, j)
