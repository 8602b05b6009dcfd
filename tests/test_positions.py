"""Oracles: each paper's formula, written out index by index."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MODELS, TINY, compose, group
from PIL import Image

from speechformer.errors import UserError
from speechformer.layers.positions import (
    FIRE,
    POSITIONS,
    ALiBi,
    Learned,
    Positions,
    Relative,
    RoPE,
    Sinusoidal,
    XPos,
    build_positions,
    geometric_slopes,
    query_and_key_indices,
    sinusoid,
)
from speechformer.positions import main, mean_cosine, position_panels
from speechformer.training.run import execute

SIZES = {"width": 16, "heads": 2, "length": 12}


def make(kind: type[Positions], causal: bool = True, **options: object) -> Positions:
    return kind(**{**SIZES, "causal": causal, **options})  # type: ignore[arg-type]


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
    assert FORMULAS[name].keys() <= {"embed", "rotate", "bias", "gate"}
    nothing = {"embed": lambda _, x, i, d: x[d], "rotate": lambda _, x, i, d: x[d], "bias": lambda _, n, i, j: 0.0}
    formulas = {**nothing, **FORMULAS[name]}
    positions = build_positions(group("model", name), causal=causal, **SIZES)
    positions.causal = causal  # type: ignore[assignment]  # for formulas that depend on it
    for parameter in positions.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)  # the initial values can hide a part of the formula
    x, q = torch.randn(1, 12, 16), torch.randn(1, 2, 12, 8)
    embedded, rotated_q = positions.embed(x), positions.rotate(q, q)[0]
    bias = positions.bias(*query_and_key_indices(12, 12))
    bias = torch.zeros(2, 12, 12) if bias is None else bias
    for i in range(12):
        expected = [formulas["embed"](positions, x[0, i].tolist(), i, d) for d in range(16)]
        assert embedded[0, i].tolist() == pytest.approx(expected, abs=1e-5), i
        expected = [formulas["rotate"](positions, q[0, 1, i].tolist(), i, d) for d in range(8)]
        assert rotated_q[0, 1, i].tolist() == pytest.approx(expected, abs=1e-5), i
        for n in range(2):
            keys = range(i + 1 if causal else 12)
            expected = [formulas["bias"](positions, n, i, j) for j in keys]
            assert bias[n, i, : len(keys)].tolist() == pytest.approx(expected, abs=1e-5), (n, i)
    assert positions.overrides("gate") == ("gate" in FORMULAS[name])
    if "gate" in FORMULAS[name]:
        z = torch.randn(3, 12, 2)
        added = positions.gate(z, *query_and_key_indices(5, 12))
        for b, n, i, j in itertools.product(range(3), range(2), range(7, 12), range(12)):
            if j <= i or not causal:
                expected = formulas["gate"](positions, z[b, :, n].tolist(), i, j)
                assert added[b, n, i - 7, j].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("width", [6, 7, 64])
def test_sinusoid_is_the_formula_of_vaswani(width: int) -> None:
    table = sinusoid(50, width)
    for i in range(50):
        for d in range(width):
            angle = i / 10000 ** (2 * (d // 2) / width)
            expected = math.sin(angle) if d % 2 == 0 else math.cos(angle)
            assert table[i, d].item() == pytest.approx(expected, abs=1e-6)


def test_sinusoidal_grows_beyond_the_trained_length() -> None:
    x = torch.zeros(1, 40, 16)
    assert torch.equal(make(Sinusoidal).embed(x)[0], sinusoid(40, 16))


def test_learned_ends_at_its_length() -> None:
    positions = make(Learned)
    x = torch.randn(3, 4, 16)
    assert torch.equal(positions.embed(x, offset=5), x + positions.table.weight[5:9])
    with pytest.raises(UserError, match="no vector for position 12"):
        positions.embed(x, offset=9)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-n for n in range(1, 9)]),
        # 6 heads: the four of 4 heads, then the first and third of 8 heads
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [2**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    assert geometric_slopes(heads) == pytest.approx(slopes)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_bias_is_minus_slope_times_distance(causal: bool) -> None:
    bias = make(ALiBi, causal, slopes=[0.5, 0.25], scale=1.1).bias(*query_and_key_indices(5, 5))
    for n, slope in enumerate([0.5, 0.25]):
        for i in range(5):
            for j in range(5):
                assert bias[n, i, j].item() == pytest.approx(-1.1 * slope * abs(i - j))


def test_alibi_learned_slopes_start_geometric_and_train() -> None:
    fixed, learned = make(ALiBi, scale=2.0), make(ALiBi, scale=2.0, slopes="learned")
    pairs = query_and_key_indices(6, 6)
    torch.testing.assert_close(learned.bias(*pairs), fixed.bias(*pairs))
    learned.bias(*pairs).sum().backward()
    # d/dm of sum(-scale m |i-j|) is -scale sum |i-j|; the parameter is log m, so times m
    total = sum(abs(i - j) for i in range(6) for j in range(6))
    expected = [-2.0 * total * m for m in geometric_slopes(2)]
    assert learned.log_slopes.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("slopes", ["flat", [0.5], [0.5, 0.25, 0.1]])
def test_alibi_rejects_slopes_that_do_not_fit_the_heads(slopes: object) -> None:
    with pytest.raises(UserError, match="list of 2 numbers"):
        make(ALiBi, slopes=slopes)


def test_rope_is_the_rotation_of_each_pair() -> None:
    positions, H = make(RoPE), 8
    q = torch.randn(1, 2, 5, H)
    turned, _ = positions.rotate(q, q, offset=3)
    for t in range(5):
        for d in range(H // 2):
            angle = (3 + t) * 10000 ** (-2 * d / H)
            a, b = q[0, 1, t, 2 * d].item(), q[0, 1, t, 2 * d + 1].item()
            pair = [math.cos(angle) * a - math.sin(angle) * b, math.sin(angle) * a + math.cos(angle) * b]
            assert turned[0, 1, t, 2 * d : 2 * d + 2].tolist() == pytest.approx(pair, abs=1e-5)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    positions = make(RoPE)
    q, k = (torch.randn(1, 2, 1, 8).expand(1, 2, 12, 8) for _ in range(2))  # the same vectors everywhere
    turned_q, turned_k = positions.rotate(q, k)
    scores = (turned_q @ turned_k.transpose(-2, -1))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert scores[0, 5].item() != pytest.approx(scores[5, 0].item())  # and on its sign


def test_xpos_scores_are_those_of_rope_times_the_decay_of_the_distance() -> None:
    """Oracle: Sun et al. 2022, equation 12, pair by pair: keys shrink where queries grow."""
    xpos, rope = make(XPos, scale_base=3.0), make(RoPE)
    q, k = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    (q_x, k_x), (q_r, k_r) = xpos.rotate(q, k), rope.rotate(q, k)
    for pair in range(4):
        z, own = (2 * pair / 8 + 0.4) / 1.4, slice(2 * pair, 2 * pair + 2)
        for i in range(12):
            for j in range(12):
                expected = (q_r[0, 0, i, own] @ k_r[0, 0, j, own]).item() * z ** ((i - j) / 3)
                assert (q_x[0, 0, i, own] @ k_x[0, 0, j, own]).item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_fraction_of_rope_leaves_the_rest_of_each_head_alone() -> None:
    """Oracle: RoPE of a head as wide as that fraction."""
    half, narrow = make(RoPE, fraction=0.5), make(RoPE, width=8)
    q, k = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    for ours, x, theirs in zip(half.rotate(q, k), (q, k), narrow.rotate(q[..., :4], k[..., :4])):
        assert torch.equal(ours, torch.cat((theirs, x[..., 4:]), dim=-1))


def scaled_angle(scaling: str, pair: int, factor: float, length: int, H: int) -> tuple[float, float]:
    """Peng et al. 2023, sections 3.1 to 3.4: a pair's angle at position 1, and the factor of queries and keys."""
    angle = 10000 ** (-2 * pair / H)
    if scaling == "linear":
        return angle / factor, 1.0
    if scaling == "ntk":
        return (10000 * factor ** (H / (H - 2))) ** (-2 * pair / H), 1.0
    turns = length * angle / (2 * math.pi)
    share = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
    return (1 - share) * angle / factor + share * angle, 0.1 * math.log(factor) + 1


@pytest.mark.parametrize("length", [12, 400])
@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_rope_scales_longer_texts_in_evaluation_alone(scaling: str, length: int) -> None:
    scaled, plain = make(RoPE, scaling=scaling, factor=4.0, length=length), make(RoPE, length=length)
    q = torch.randn(1, 2, length + 5, 8)
    shorter = q[:, :, :length]
    assert torch.equal(scaled.rotate(q, q)[0], plain.rotate(q, q)[0])  # in training mode
    scaled.eval()
    assert torch.equal(scaled.rotate(shorter, shorter)[0], plain.rotate(shorter, shorter)[0])
    longer = scaled.rotate(q, q)[0]
    for i in range(0, length + 5, 7):
        for pair in range(4):
            angle, factor = scaled_angle(scaling, pair, 4.0, length, 8)
            x = complex(*q[0, 1, i, 2 * pair : 2 * pair + 2].tolist()) * factor
            x *= complex(math.cos(i * angle), math.sin(i * angle))
            assert longer[0, 1, i, 2 * pair : 2 * pair + 2].tolist() == pytest.approx([x.real, x.imag], abs=1e-5)


def test_relative_starts_as_in_the_code_of_t5() -> None:
    """Oracle: normal(0, width^-1/2), as the T5 of Hugging Face draws it, with the numbers of torch."""
    torch.manual_seed(0)
    table = make(Relative, width=64).table.weight
    torch.manual_seed(0)
    assert torch.equal(table, torch.nn.Embedding(32, 2).weight / 8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
def test_relative_is_one_number_for_each_head_and_bucket(causal: bool, buckets: int, max_distance: int) -> None:
    positions = make(Relative, causal, buckets=buckets, max_distance=max_distance)
    bias = positions.bias(*query_and_key_indices(200, 200))
    for i in range(0, 200, 7):
        for j in range(200):
            bucket = t5_bucket(i - j, causal, buckets, max_distance)
            assert torch.equal(bias[:, i, j], positions.table.weight[bucket])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("causal", [True, False])
def test_later_queries_alone_get_what_they_get_among_all(model: str, causal: bool) -> None:
    """What a key-value cache relies on: the whole sequence at once is the oracle of its tail."""
    positions = build_positions(group("model", model), causal=causal, **SIZES)
    x, q, k = torch.randn(2, 12, 16), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    assert torch.equal(positions.embed(x)[:, 7:], positions.embed(x[:, 7:], offset=7))
    for whole, tail in zip(positions.rotate(q, k), positions.rotate(q[:, :, 7:], k[:, :, 7:], offset=7)):
        torch.testing.assert_close(whole[:, :, 7:], tail)
    whole, tail = (positions.bias(*query_and_key_indices(T, 12)) for T in (12, 5))
    assert (whole is None and tail is None) or torch.equal(whole[:, 7:], tail)


@pytest.mark.parametrize(
    ("model", "count"), [("nope", 0), ("sinusoidal", 0), ("alibi", 0), ("rope", 0), ("learned", 12 * 16)]
)
def test_parameters(model: str, count: int) -> None:
    positions = build_positions(group("model", model), causal=True, **SIZES)
    assert sum(parameter.numel() for parameter in positions.parameters()) == count


@pytest.mark.parametrize("model", ["nope", "sinusoidal", "learned"])
def test_the_places_where_an_encoding_does_not_act(model: str) -> None:
    positions = build_positions(group("model", model), causal=True, **SIZES)
    q = torch.randn(1, 2, 4, 8)
    assert positions.bias(*query_and_key_indices(4, 4)) is None
    assert positions.rotate(q, q)[0] is q
    x = torch.randn(1, 4, 16)
    assert (positions.embed(x) is x) == (model == "nope")


def test_invalid_options() -> None:
    with pytest.raises(UserError, match="must be even"):
        make(RoPE, width=6)
    with pytest.raises(UserError, match=r"model.fraction \* width / heads must be even.* 0.3 \* 16 / 2 = 2.4"):
        make(RoPE, fraction=0.3)
    with pytest.raises(UserError, match="model.fraction"):
        make(RoPE, fraction=1e-8)
    with pytest.raises(UserError, match="at least two of them"):
        make(RoPE, fraction=0.25, scaling="ntk")
    with pytest.raises(UserError, match="model.scaling has no choice 'yarm'.*Did you mean yarn"):
        make(RoPE, scaling="yarm")
    with pytest.raises(UserError, match="model.factor must be above 1"):
        make(RoPE, factor=1.0)
    with pytest.raises(UserError, match="model.gamma and model.scale_base must be above 0"):
        make(XPos, gamma=0.0)
    with pytest.raises(UserError, match="model.threshold above 0"):
        make(FIRE, threshold=0.0)
    with pytest.raises(UserError, match="even number of at least 4 buckets"):
        make(Relative, causal=False, buckets=2)
    with pytest.raises(UserError, match="sinusoidal, learned, alibi.*Did you mean alibi"):
        build_positions({"name": "alibbi"}, causal=True, **SIZES)
    with pytest.raises(UserError, match="slopes, scale.*Did you mean slopes"):
        build_positions({"name": "alibi", "slope": "learned"}, causal=True, **SIZES)


def test_the_pictures_show_what_the_classes_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    panels = position_panels()
    assert set(panels) == set(POSITIONS)
    for i in range(32):
        for pair in range(16):  # 64 wide, 2 heads: 16 pairs
            assert panels["rope"][1][i, pair].item() == pytest.approx(math.cos(i * 10000 ** (-pair / 16)), abs=1e-6)
    assert panels["alibi"][1][9, 4].item() == pytest.approx(-5 / 16)
    assert panels["alibi"][1][4, 9].isnan()
    assert torch.equal(panels["sinusoidal"][1], sinusoid(32, 64))
    monkeypatch.setattr(sys, "argv", ["positions", str(tmp_path / "new")])
    main()
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.stem for path in written] == ["overview", "sinusoidal", "alibi", "rope", "patterns"]
    for path in written:
        assert min(Image.open(path).size) > 300 and len(set(Image.open(path).convert("L").tobytes())) > 10


def test_the_mean_cosine_of_two_positions() -> None:
    """Oracle: sin a sin b + cos a cos b = cos(a - b), so the cosine of two positions k apart is the mean over the
    pairs of cos(k w), for every two of them."""
    means = mean_cosine(sinusoid(50, 16), 20)
    for k in range(21):
        expected = sum(math.cos(k * 10000 ** (-2 * pair / 16)) for pair in range(8)) / 8
        assert means[k].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "learned"),
    [
        (["model=relative"], True),
        (["model=learned"], True),
        (["model=kerple"], True),
        (["model=fire"], True),
        (["model=alibi", "model.slopes=learned"], True),
        (["model=alibi"], False),
        (["model=rnn"], False),
    ],
)
def test_the_learned_positions_of_a_run_are_drawn(
    overrides: list[str], learned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(compose(*TINY, "task=lm", "trainer.max_steps=1", *overrides), tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["positions", str(tmp_path / "drawn"), "--run", str(tmp_path / "run")])
    if learned:
        main()
        assert min(Image.open(tmp_path / "drawn" / "learned.png").size) > 300
    else:
        with pytest.raises(SystemExit, match="which has no learned positions"):
            main()
