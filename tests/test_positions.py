"""Oracles: each paper's formula, written out index by index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import MODELS, group

from speechformer.analysis.encodings import table_of
from speechformer.errors import UserError
from speechformer.layers.attention import gate_bias
from speechformer.layers.positions import (
    POSITIONS,
    ALiBi,
    Learned,
    PoPE,
    Positions,
    Relative,
    RoPE,
    Sinusoidal,
    Sizes,
    XPos,
    build_positions,
    geometric_slopes,
)

SIZES = {"width": 16, "heads": 2, "length": 12}


def make(kind: type[Positions], causal: bool = True, **options: object) -> Positions:
    sizes: Any = {name: options.pop(name, value) for name, value in {**SIZES, "causal": causal}.items()}
    return kind(Sizes(**sizes, head_width=sizes["width"] // sizes["heads"]), **options)


def sine_or_cosine(i: int, d: int, width: int) -> float:
    angle = i / 10000 ** (2 * (d // 2) / width)
    return math.sin(angle) if d % 2 == 0 else math.cos(angle)


def rotated(positions: Positions, x: list[float], i: int, d: int) -> float:
    """RoFormer, equation 34: the pair (2k, 2k + 1) as a complex number, times e^(i angle)."""
    pair = complex(x[d - d % 2], x[d - d % 2 + 1])
    angle = i * 10000 ** (-2 * (d // 2) / len(x))
    pair *= complex(math.cos(angle), math.sin(angle))
    return pair.imag if d % 2 else pair.real


def t5_bucket(distance: int, causal: bool, buckets: int, max_distance: int) -> int:
    """Raffel et al. 2020, section 2.1: the bucket of one distance i - j."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(buckets - 1, exact + int(share * (buckets - exact)))


def relative_bias(positions: Positions, n: int, i: int, j: int) -> float:
    return positions.table.weight[t5_bucket(i - j, positions.causal, 32, 128), n].item()


def kerple(positions: Positions, n: int, i: int, j: int) -> float:
    """Chi et al. 2022: -r1 log(1 + r2 |i - j|)."""
    a, b = math.exp(positions.log_a[n].item()), math.exp(positions.log_b[n].item())
    return -a * math.log(1 + b * abs(i - j))


def fire(positions: Positions, n: int, i: int, j: int) -> float:
    """Li et al. 2023, equation 3, with the MLP as two loops."""
    c, t = math.exp(positions.log_c.item()), math.exp(positions.log_threshold.item())
    share = math.log(c * abs(i - j) + 1) / math.log(c * max(t, i, j) + 1)
    first, _, second = positions.mlp
    hidden = [max(0.0, w[0] * share + b) for w, b in zip(first.weight.tolist(), first.bias.tolist())]
    return sum(w * h for w, h in zip(second.weight[n].tolist(), hidden)) + second.bias[n].item()


def decayed(positions: Positions, x: list[float], i: int, d: int) -> float:
    """Sun et al. 2022, algorithm 1, of a query: the pair d // 2 of `rotated`, times z^(i / 512)."""
    z = (2 * (d // 2) / len(x) + 0.4) / 1.4
    return rotated(positions, x, i, d) * z ** (i / 512)


def polar(positions: Positions, x: list[float], i: int, d: int) -> float:
    """Gopalakrishnan et al. 2025, equation 7, of a query of head 1: its cosines, then its sines."""
    c, H = d % len(x), len(x)
    angle = i * 10000 ** (-c / H) + min(0.0, positions.delta[1, 0, c].item())
    return math.sqrt(2) * math.log1p(math.exp(x[c])) * (math.cos(angle) if d < H else math.sin(angle))


def forgotten(positions: Positions, z: list[float], i: int, j: int) -> float:
    """Lin et al. 2025: the product of the gates between two tokens."""
    return math.log(math.prod(1 / (1 + math.exp(-z[l])) for l in range(min(i, j) + 1, max(i, j) + 1)))


# What each encoding computes, one number at a time, from its paper. A place without a formula must do nothing.
#   embed(positions, x, i, d)   column d of the vector x at position i
#   rotate(positions, x, i, d)  column d of the query or key x at position i
#   bias(positions, n, i, j)    head n, query i, key j
#   gate(positions, z, i, j)    query i, key j, for the gate z of each token of a head
FORMULAS: dict[str, dict[str, Callable]] = {
    "nope": {},
    "sinusoidal": {"embed": lambda positions, x, i, d: x[d] + sine_or_cosine(i, d, len(x))},
    "learned": {"embed": lambda positions, x, i, d: x[d] + positions.table.weight[i, d].item()},
    "alibi": {"bias": lambda positions, n, i, j: -[2**-4, 2**-8][n] * abs(i - j)},
    "rope": {"rotate": rotated},
    "relative": {"bias": relative_bias},
    "xpos": {"rotate": decayed},
    "pope": {"rotate": polar},
    "kerple": {"bias": kerple},
    "fire": {"bias": fire},
    "forgetting": {"gate": forgotten},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", sorted({*POSITIONS, *MODELS}))
def test_position_is_its_formula(name: str, causal: bool) -> None:
    assert name in POSITIONS, f"{name} has a yaml file but no class: add it to POSITIONS in layers/positions.py"
    assert name in MODELS, f"POSITIONS[{name!r}] has no file conf/model/{name}.yaml"
    assert name in FORMULAS, f"model={name} has no formula: add FORMULAS[{name!r}] = ... to tests/test_positions.py"
    formulas = FORMULAS[name]
    positions = build_positions(group("model", name), causal=causal, **SIZES)
    assert formulas.keys() == {place for place in ("embed", "rotate", "bias", "gate") if positions.overrides(place)}
    positions.causal = causal  # type: ignore[assignment]  # for formulas that depend on it
    for parameter in positions.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)  # the initial values can hide a part of the formula
    x, q = torch.randn(1, 12, 16), torch.randn(1, 2, 12, 8)
    index = positions.prepare(12)
    results = {"embed": (x, positions.embed(x, index)), "rotate": (q[:, 1], positions.rotate(q, q, index)[0][:, 1])}
    for place in formulas.keys() & results.keys():
        before, after = results[place]
        for i in range(12):
            expected = [formulas[place](positions, before[0, i].tolist(), i, d) for d in range(after.shape[-1])]
            assert after[0, i].tolist() == pytest.approx(expected, abs=1e-5), i
    pairs = [(i, j) for i in range(7, 12) for j in range(12) if j <= i or not causal]
    if "bias" in formulas:
        bias = positions.bias(index[:, None], index[None, :])
        for (i, j), n in itertools.product([(0, 0), *pairs], range(2)):
            assert bias[n, i, j].item() == pytest.approx(formulas["bias"](positions, n, i, j), abs=1e-5)
    if "gate" in formulas:
        z = torch.randn(3, 12, 2)
        added = gate_bias(positions.gate(z).cumsum(dim=1).mT, index[7:, None], index[None, :])
        for (i, j), b, n in itertools.product(pairs, range(3), range(2)):
            expected = formulas["gate"](positions, z[b, :, n].tolist(), i, j)
            assert added[b, n, i - 7, j].item() == pytest.approx(expected, abs=1e-5)


def test_a_score_of_pope_is_its_formula() -> None:
    """Oracle: the sum over numbers of |q_d| |k_d| cos((i - j) theta_d + delta_d), in double precision."""
    positions = make(PoPE).double()
    torch.nn.init.uniform_(positions.delta, -6.0, 0.0)
    q, k = torch.randn(2, 1, 2, 12, 8, dtype=torch.float64)
    turned_q, turned_k = positions.rotate(q, k, positions.prepare(12))
    scores = turned_q @ turned_k.mT / math.sqrt(turned_q.shape[-1])
    i, theta = torch.arange(12.0, dtype=torch.float64), 10000 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angles = (i[:, None] - i)[..., None] * theta + positions.delta[:, :, None]
    sizes = torch.nn.functional.softplus(q)[..., :, None, :] * torch.nn.functional.softplus(k)[..., None, :, :]
    torch.testing.assert_close(scores, (sizes * angles.cos()).sum(dim=-1) / math.sqrt(8), atol=1e-5, rtol=0)


def test_sinusoidal_has_any_width_and_length() -> None:
    expected = torch.tensor([[sine_or_cosine(i, d, 7) for d in range(7)] for i in range(40)])
    for first in (0, 30):  # within and beyond the 12 positions of training
        positions = make(Sinusoidal, width=7)
        embedded = positions.embed(torch.zeros(1, 40 - first, 7), positions.prepare(40)[first:])[0]
        torch.testing.assert_close(embedded, expected[first:], atol=1e-5, rtol=0)


def test_learned_ends_at_its_length() -> None:
    with pytest.raises(UserError, match="no vector for position 12"):
        make(Learned).prepare(13)


def test_alibi_slopes_of_other_numbers_of_heads_are_those_of_the_paper() -> None:
    """6 heads: the four of 4 heads, then the first and third of 8 heads."""
    assert geometric_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_alibi_takes_other_slopes_and_scales_them() -> None:
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    listed = make(ALiBi, slopes=[0.5, 0.25], scale=1.1).bias(i, j)
    torch.testing.assert_close(listed, -1.1 * torch.tensor([0.5, 0.25])[:, None, None] * (i - j).abs())
    fixed, learned = make(ALiBi, scale=2.0), make(ALiBi, scale=2.0, slopes="learned")
    torch.testing.assert_close(learned.bias(i, j), fixed.bias(i, j))
    learned.bias(i, j).sum().backward()
    assert (learned.log_slopes.grad < 0).all()


@pytest.mark.parametrize("kind", [RoPE, XPos])
def test_scores_of_rotated_queries_and_keys_depend_on_the_distance_alone(kind: type[Positions]) -> None:
    q, k = (torch.randn(1, 2, 1, 8).expand(1, 2, 12, 8) for _ in range(2))  # the same vectors everywhere
    turned_q, turned_k = make(kind).rotate(q, k, torch.arange(12))
    scores = (turned_q @ turned_k.mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=1e-5)
    assert scores[0, 5].item() != pytest.approx(scores[5, 0].item())  # and on its sign


def test_a_fraction_of_rope_leaves_the_rest_of_each_head_alone() -> None:
    """Oracle: RoPE of a head as wide as that fraction."""
    q = torch.randn(1, 2, 12, 8)
    i = torch.arange(12)
    turned = make(RoPE, fraction=0.5).rotate(q, q, i)[0]
    narrow = make(RoPE, width=8).rotate(q[..., :4], q[..., :4], i)[0]
    torch.testing.assert_close(turned, torch.cat((narrow, q[..., 4:]), dim=-1))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_rope_scales_longer_texts_in_evaluation_alone(scaling: str) -> None:
    """Oracle: Peng et al. 2023, sections 3.1 to 3.4. Pairs turn more than 32 times, or less than once."""
    length, factor, H = 400, 4.0, 8
    exponents = -torch.arange(0, H, 2, dtype=torch.double) / H
    angles, temperature = 10000**exponents, 1.0
    if scaling == "linear":
        scaled_angles = angles / factor
    elif scaling == "ntk":
        scaled_angles = (10000 * factor ** (H / (H - 2))) ** exponents
    else:
        share = ((length * angles / (2 * math.pi) - 1) / 31).clamp(0, 1)
        scaled_angles, temperature = (1 - share) * angles / factor + share * angles, 0.1 * math.log(factor) + 1
    scaled = make(RoPE, scaling=scaling, factor=factor, length=length)
    for training, T in ((True, length + 5), (False, length), (False, length + 5)):
        unit = torch.tensor([1.0, 0.0] * 4).expand(1, 2, T, H)
        index = scaled.train(training).prepare(T)
        turned = scaled.rotate(unit, unit, index)[0][0, 1].unflatten(-1, (4, 2)).double()
        is_scaled = not training and length < T
        angles_TP = torch.arange(T)[:, None] * (scaled_angles if is_scaled else angles)
        expected = torch.stack((angles_TP.cos(), angles_TP.sin()), dim=-1) * (temperature if is_scaled else 1.0)
        torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)


def test_relative_starts_as_in_the_code_of_t5() -> None:
    """Oracle: normal(0, width^-1/2), as the T5 of Hugging Face draws it, with the numbers of torch."""
    torch.manual_seed(0)
    table = make(Relative, width=64).table.weight
    torch.manual_seed(0)
    torch.testing.assert_close(table, torch.nn.Embedding(32, 2).weight / 8)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_is_one_number_for_each_head_and_bucket(causal: bool) -> None:
    positions = make(Relative, causal, buckets=8, max_distance=20)
    index = torch.arange(40)
    bias = positions.bias(index[:, None], index[None, :])
    buckets = torch.tensor([[t5_bucket(i - j, causal, 8, 20) for j in range(40)] for i in range(40)])
    torch.testing.assert_close(bias, positions.table.weight[buckets].permute(2, 0, 1))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"name": "rope", "width": 6}, "must be even"),
        (
            {"name": "rope", "fraction": 0.3},
            r"model.fraction times the width of a head must be even.* 0.3 \* 8 = 2.4",
        ),
        ({"name": "rope", "fraction": 0.25, "scaling": "ntk"}, "at least two of them"),
        ({"name": "rope", "scaling": "yarm"}, "model.scaling must be .* or 'yarn', not 'yarm'"),
        ({"name": "rope", "factor": 1.0}, "model.factor must be above 1"),
        ({"name": "xpos", "gamma": 0.0}, "model.gamma must be greater than 0"),
        ({"name": "xpos", "scale_base": 0.1}, "model=xpos overflows after"),
        ({"name": "fire", "threshold": 0.0}, "model.threshold must be greater than 0"),
        ({"name": "relative", "causal": False, "buckets": 2}, "even number of at least 4 buckets"),
        ({"name": "alibi", "slopes": [0.5, 0.25, 0.1]}, "list of 2 numbers"),
        ({"name": "alibbi"}, "sinusoidal, learned, alibi.*Did you mean alibi"),
    ],
)
def test_an_invalid_option_is_an_error(spec: dict[str, Any], sentence: str) -> None:
    sizes = {name: spec.pop(name, value) for name, value in {**SIZES, "causal": True}.items()}
    with pytest.raises(UserError, match=sentence):
        build_positions(spec, **sizes)


def test_a_panel_shows_what_the_class_computes() -> None:
    """Oracles: ALiBi's first slope of two heads, 1/16; the rotation of the pair (1, 0); nothing without positions."""
    sizes: dict[str, Any] = {"T": 12, "width": 16, "heads": 2, "causal": True}
    table = {name: table_of(make(POSITIONS[name]), **sizes)[1] for name in POSITIONS}
    alibi, rope = table["alibi"], table["rope"]
    assert alibi is not None and rope is not None and table["nope"] is None
    assert alibi[9, 4].item() == pytest.approx(-5 / 16) and alibi[4, 4] == 0 and alibi[4, 5].isnan()
    assert rope[3].tolist() == pytest.approx([math.cos(3 * 10000 ** (-2 * k / 8)) for k in range(4)], abs=1e-6)
    assert table_of(make(ALiBi, causal=False), **{**sizes, "causal": False})[1][4, 5].item() == pytest.approx(-1 / 16)
