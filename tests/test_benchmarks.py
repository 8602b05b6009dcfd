"""The benchmarks: peers do the same work as our models, and tables show what was measured."""

import itertools
import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import gpu
import limits
import pytest
import session
import torch
from peers import PEERS
from scipy import stats
from test_models import classifier, decoder
from workloads import find_losses

SIZES = {"vocab_size": 50, "width": 16, "heads": 2, "layers": 2, "ff": 24, "block_size": 12}


@torch.no_grad()
def copy_weights(ours: Any, peer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy our weights into a peer, and return the embeddings of both."""
    stack, head = (ours.decoder, ours.output) if hasattr(ours, "decoder") else (ours.encoder, ours.head)
    peer.head.load_state_dict(head.state_dict())
    if hasattr(peer, "stack"):
        embedding, norm, layers = peer.embedding, peer.stack.norm, [[layer] for layer in peer.stack.layers]
    else:
        embedding, norm = peer.model.token_emb.emb, peer.model.attn_layers.final_norm
        pairs = [*peer.model.attn_layers.layers]
        layers = [
            [attend.to_q, attend.to_k, attend.to_v, attend.to_out, ff, norms[0], ff_norms[0]]
            for (norms, attend, _), (ff_norms, ff, _) in zip(pairs[::2], pairs[1::2])
        ]
    embedding.load_state_dict(stack.embedding.state_dict())
    norm.load_state_dict(stack.final_norm.state_dict())
    for block, modules in zip(stack.blocks, layers):
        weight, bias, *values = block.parameters()  # of q, k and v; then output, feed-forward, norms
        parameters = [parameter for module in modules for parameter in module.parameters()]
        parts = 3 if len(modules) > 1 else 1
        values = [*itertools.chain(*zip(weight.chunk(parts), bias.chunk(parts))), *values]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return stack.embedding.weight, embedding.weight


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("training", [True, False])
def test_without_dropout_a_peer_has_our_loss_and_gradients(name: str, training: bool) -> None:
    """Oracle: the other library with our weights, in double precision, under every setting."""
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    changes = {**SIZES, "dropout": 0.0, "model": {"name": "sinusoidal"}}
    ids = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    padded = ids * (torch.arange(12) < torch.tensor([[12], [8], [12]]))
    classes = torch.tensor([0, 2, 1])
    for task, ours, batches in (
        ("classify", classifier(**changes, classifier_width=100), [(ids, classes), (padded, classes)]),
        ("lm", decoder(**changes), [(ids[:, :-1], ids[:, 1:])]),
    ):
        ours, peer = ours.double().train(training), PEERS[name](task, SIZES, 0.0).double().train(training)
        with torch.no_grad():  # so that biases and norms count too
            for parameter in ours.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        weights = copy_weights(ours, peer)
        for batch, (setting, loss) in itertools.product(batches, find_losses(peer, training).items()):
            with torch.set_grad_enabled(training):  # torch's fast path needs none
                values = [find_losses(ours, training)["default"](*batch), loss(*batch)]
            torch.testing.assert_close(values[1].float(), values[0].float(), atol=2e-6, rtol=0, msg=setting)
            if training:
                gradients = [torch.autograd.grad(*pair)[0] for pair in zip(values, weights)]
                torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=0, msg=setting)


def test_the_interval_of_a_ratio() -> None:
    """Oracle: scipy's t-interval of the logarithms of five ratios to the faster peer."""
    ratios = [1.4, 1.5, 1.45, 1.6, 1.5]
    row = common.Row("steps", "lm", {"ours": [2.0] * 5, "b": [9.0] * 5, "a": [2 * ratio for ratio in ratios]})
    row.compare()
    expected = stats.ttest_1samp([math.log(ratio) for ratio in ratios], 0.0).confidence_interval(0.95)
    assert row.ratio == pytest.approx(stats.gmean(ratios))
    assert row.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def row_of(B: int, T: int, partial: float, **milliseconds: float) -> common.Row:
    names = {"flex": limits.FLEX, "dense": limits.DENSE, "blocks": limits.BLOCKS}
    sides = {names[side]: [value / 1000] for side, value in milliseconds.items()}
    return common.Row("forward and backward", "", sides, {"limits": {"B": B, "T": T, "partial": partial}})


# FlexAttention wins from 4 x 4,096^2 pairs on unless half of its tiles are partial; there blocks win from 16,384 on
MEASURED = [
    row_of(1, 4096, 0.1, flex=1.2, dense=0.5, blocks=2.5),
    row_of(2, 4096, 0.1, flex=1.2, dense=1.0, blocks=4.0),
    row_of(4, 4096, 0.1, flex=1.3, dense=2.0, blocks=8.0),
    row_of(1, 16_384, 0.1, flex=1.3, dense=7.8, blocks=3.9),
    row_of(1, 4096, 0.5, flex=1.9, dense=0.6, blocks=3.4),
    row_of(4, 4096, 0.5, flex=5.7, dense=2.0),
    row_of(1, 16_384, 0.5, flex=20.0, dense=7.8, blocks=5.4),
]


@pytest.mark.parametrize(
    "today", [(1 << 26, 0.25, 16_384), (1 << 20, 1.0, 512), (1 << 40, 0.0, 1 << 20)], ids=["fitting", "low", "high"]
)
def test_limits_take_the_fastest_kernel_of_a_table(today: limits.Limits) -> None:
    """Oracle: the table, made so that one rule takes the fastest kernel of each row. Limits that fit stay."""
    best = limits.fit(MEASURED, today)
    assert [limits.choose(row, best) for row in MEASURED] == [
        min(row.seconds, key=row.seconds.get) for row in MEASURED
    ]
    assert limits.loss(MEASURED, best) == pytest.approx(0)
    if today[0] == 1 << 26:
        assert best == today


def test_a_part_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time that a part leaves goes to the next; what has been measured before stays in the file."""
    (tmp_path / "gpu.json").write_text('{"rows": [1]}')
    late = ["-c", "import time; time.sleep(600)"]
    parts = {"failing": (60, ["-c", "raise SystemExit('no memory')"]), "late": (-59, late), "good": (99, ["-c", ""])}
    done = session.run_parts(parts, tmp_path, dry=True)
    assert [part["ended"] for part in done] == ["failed (1)", "out of time", "done"]
    assert done[0]["last"] == "no memory"
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"rows": [1], "parts": done}
    assert sum(seconds for seconds, _ in session.PARTS.values()) == 540


def test_a_row_is_added_to_what_the_file_has(tmp_path: Path) -> None:
    path, other = tmp_path / "gpu.json", common.Row("other", "", {"ours": [1.0]})
    path.write_text(json.dumps({"rows": [asdict(other)], "parts": [1]}))
    common.record(path, [common.Row("a step", "lm", {"ours": [2.0]})])
    assert [row.table for row in common.read_rows(path)] == ["other", "a step"]
    assert json.loads(path.read_text())["parts"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ensemble", "foreign", "mechanisms", "patterns"])
def test_a_part_runs_dry(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("speechformer"), "setLevel", lambda level: None)  # other tests read the log
    rows = [*getattr(gpu, f"measure_{part}")(1, gpu.DRY)]
    assert all(row.seconds for row in rows)
    assert all(row.facts.get("difference", 0) < 0.01 for row in rows)  # of another library's logits, in bfloat16
