"""The bench: peers do the same work as our models, and ratios, intervals and goals are those of their timings.

The pages of the committed timings are tested in test_results.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from scipy import stats
from test_models import classifier, stack_arguments
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench.pages import BLOCK_GOALS, Results
from speechformer.bench.peers import TorchPeer, XPeer, parameters
from speechformer.bench.steps import forward_flops, losses_of
from speechformer.bench.timing import Comparison, combine, fastest_settings
from speechformer.kernels.dropout import FastDropout
from speechformer.models.decoder import Decoder
from speechformer.models.stack import Stack

SIZES = {"vocab_size": 50, "width": 16, "heads": 2, "layers": 2, "ff": 24, "block_size": 12}
TASKS = ("classify", "lm")
every_peer = pytest.mark.parametrize("peer", ["torch.nn", "x-transformers"])

# The same work


def ours_of(task: str, dropout: float) -> Any:
    changes = {**SIZES, "dropout": dropout, "model": {"name": "sinusoidal"}}
    torch.manual_seed(0)
    if task == "classify":
        return classifier(**changes, classifier_width=100)
    return Decoder(**stack_arguments(**changes), tied_output=False)


def peer_of(name: str, task: str, dropout: float) -> Any:
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    return {"torch.nn": TorchPeer, "x-transformers": XPeer}[name](task, SIZES, dropout)


def batch_of(task: str, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    if task == "lm":
        return ids[:, :-1], ids[:, 1:]
    ids[1, 12 - padding :] = 0
    return ids, torch.tensor([0, 2, 1])


@torch.no_grad()
def copy_weights(ours: Any, peer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy our weights into a peer, and return the embeddings of both."""
    stack = ours.decoder if hasattr(ours, "decoder") else ours.encoder
    embedding = peer.embedding if isinstance(peer, TorchPeer) else peer.model.token_emb.emb
    peer.head.load_state_dict((ours.output if hasattr(ours, "output") else ours.head).state_dict())
    embedding.load_state_dict(stack.embedding.state_dict())
    if isinstance(peer, TorchPeer):
        peer.stack.norm.load_state_dict(stack.final_norm.state_dict())
        for block, layer in zip(stack.blocks, peer.stack.layers):
            # both in this order: attention, feed-forward, norms
            for value, other in zip(block.parameters(), layer.parameters(), strict=True):
                other.copy_(value)
        return stack.embedding.weight, embedding.weight
    peer.model.attn_layers.final_norm.load_state_dict(stack.final_norm.state_dict())
    layers = [*peer.model.attn_layers.layers]
    for block, (norms, attention, _), (ff_norms, ff, _) in zip(stack.blocks, layers[::2], layers[1::2]):
        norms[0].load_state_dict(block.attention_norm.state_dict())
        ff_norms[0].load_state_dict(block.feed_forward_norm.state_dict())
        for place, linear in enumerate((attention.to_q, attention.to_k, attention.to_v)):
            linear.weight.copy_(block.attention.qkv.weight.chunk(3)[place])
            linear.bias.copy_(block.attention.qkv.bias.chunk(3)[place])
        attention.to_out.load_state_dict(block.attention.output.state_dict())
        linears = [layer for layer in ff.modules() if isinstance(layer, nn.Linear)]
        for place, linear in zip((0, 2), linears):
            linear.load_state_dict(block.feed_forward[place].state_dict())
    return stack.embedding.weight, embedding.weight


@every_peer
@pytest.mark.parametrize("training", [True, False])
def test_without_dropout_a_peer_has_our_loss_and_gradients(peer: str, training: bool) -> None:
    """Oracle: our model with the same weights, in double precision, under every setting, with padding and without."""
    for task in TASKS:
        ours, theirs = ours_of(task, 0.0).double().train(training), peer_of(peer, task, 0.0).double().train(training)
        with torch.no_grad():  # so that biases and norms count too
            for parameter in ours.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        weights = copy_weights(ours, theirs)
        assert parameters(theirs) == parameters(ours)
        for padding, (name, loss) in itertools.product((0, 4), losses_of(theirs, training).items()):
            ids, targets = batch_of(task, padding)
            with torch.set_grad_enabled(training):  # torch's fast path needs none
                values = [own(ids, targets) for own in (losses_of(ours, training)["default"], loss)]
            torch.testing.assert_close(values[1].float(), values[0].float(), atol=2e-6, rtol=0, msg=name)
            if training:
                gradients = [torch.autograd.grad(*pair)[0] for pair in zip(values, weights)]
                torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=0, msg=name)


class DroppedShapes(TorchDispatchMode):
    """Record the shape of every mask that torch draws, and the probability to keep an element."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.kept: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "bernoulli" in func.__name__:
            self.shapes[tuple(args[0].shape)] += 1
            self.kept.add(round(args[1], 6))
        return func(*args, **(kwargs or {}))


def expected_drops(task: str) -> Counter[tuple[int, ...]]:
    """Embeddings, then in each of 2 layers the weights of 2 heads and two branches."""
    T = 12 - (task == "lm")
    return Counter({(3, T, 16): 1 + 2 * 2, (3, 2, T, T): 2})


@pytest.mark.parametrize("task", TASKS)
def test_our_dropout_places(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the list above, from the documentation of `Block` and `Stack`."""
    monkeypatch.setattr(Stack, "can_unpad", False)  # masks of sequences, not of rows of tokens
    shapes: Counter[tuple[int, ...]] = Counter()
    draw = FastDropout.mask

    def mask(self: FastDropout, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        shapes[tuple(shape)] += 1
        return draw(self, shape, dtype)

    monkeypatch.setattr(FastDropout, "mask", mask)
    losses_of(ours_of(task, 0.1).train(), training=True)["default"](*batch_of(task))
    assert shapes == expected_drops(task)


@every_peer
def test_a_peer_drops_out_where_we_do(peer: str) -> None:
    """Oracle: the masks that torch draws in a pass, under every setting; in evaluation, none."""
    for task, training in itertools.product(TASKS, (True, False)):
        theirs = peer_of(peer, task, 0.1).train(training)
        for name, loss in losses_of(theirs, training).items():
            with DroppedShapes() as dropped:
                loss(*batch_of(task))
            assert dropped.shapes == (expected_drops(task) if training else Counter()), name
            assert dropped.kept <= {0.9}


def test_the_least_flops_of_a_pass() -> None:
    """Oracle: torch's counter, which counts attention in full; the future of a token needs none of it."""
    for task in TASKS:
        ours, batch = ours_of(task, 0.0).eval(), batch_of(task)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            losses_of(ours, training=False)["default"](*batch)
        T = batch[0].shape[1]
        spared = 4 * 2 * 16 * 3 * (T * T - T * (T + 1) // 2) if task == "lm" else 0
        assert forward_flops(ours, SIZES, [batch]) == counter.get_total_flops() - spared


# Statistics and goals


def test_a_side_is_as_fast_as_its_fastest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a clock that each side moves on by its own seconds; in turns; a slow setting has no second one."""
    clock, order = [0.0], []

    def side(name: str, seconds: float) -> Any:
        def run() -> float:
            order.append(name)
            clock[0] += seconds
            return 2  # units of work

        return run

    monkeypatch.setattr("speechformer.bench.timing.time.perf_counter", lambda: clock[0])
    sides = {"ours": {"default": side("o", 4)}, "peer": {"a": side("a", 8), "b": side("b", 7), "c": side("c", 18)}}
    seconds, settings = fastest_settings(sides, rounds=2)
    assert seconds == {"ours": 2, "peer": 3.5} and settings == {"ours": "default", "peer": "b"}
    assert "".join(order) == "oabc" * 2 + "oab" * 3


def test_the_interval_of_a_ratio_over_processes() -> None:
    """Oracle: scipy's t-interval of the logarithms of five ratios to the faster peer."""
    ratios = [1.4, 1.5, 1.45, 1.6, 1.5]
    rows = [Comparison("steps", "lm", "step", {"ours": 2.0, "b": 9.0, "a": 2 * ratio}) for ratio in ratios]
    for row, ratio in zip(rows, ratios):
        row.more["settings"] = {"a": "x" if ratio < 1.5 else "y"}
    row = combine(rows)
    expected = stats.ttest_1samp([math.log(ratio) for ratio in ratios], 0.0).confidence_interval(0.95)
    assert row.ratio == pytest.approx(stats.gmean(ratios))
    assert row.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert row.seconds == {"ours": 2.0, "b": 9.0, "a": 3.0} and row.more["settings"] == {"a": "y"}
    assert combine(rows[:1]).interval is None and Comparison("p", "w", "step", {"ours": 2.0}).ratio is None


def results_of(*rows: Comparison) -> Results:
    return Results({"rows": [*map(asdict, rows)]})


def test_goals_are_judged_by_their_intervals() -> None:
    """Oracles: ratios well above a goal, well below it, and on both sides; of nine rounds, the second and the eighth
    bound the median with at least 95 % (binomial)."""
    speed = {"classify, training step": (1.6, 1.7), "lm, training step": (1.1, 1.12), "lm, evaluation": (0.9, 1.2)}
    rows = []
    for what, ratios in speed.items():
        processes = [{"speechformer": 1.0, "torch.nn": ratio} for ratio in (*ratios, *ratios)]
        rows.append(Comparison("steps, report", what, "step", processes[0], {"processes": processes}))
    assert results_of(*rows).goals() == (
        "The goals were 1.5 (classifier, reports' size, training step) and 1.3 (language model, reports' size, "
        "training step), and 1.0 elsewhere; missed: language model, reports' size, training step (1.11). "
        "Too close to tell: language model, reports' size, evaluation (1.04)."
    )
    rounds = {"2,048": [1.0] * 9, "4,096": [1.5, 1.9, 1.92, 1.96, 2.0, 2.03, 2.1, 2.2, 2.5]}
    rows = [
        Comparison("a long text", f"lm, 512 wide, 6 layers, full, {tokens} tokens", "step", {}, {"rounds": own})
        for tokens, own in rounds.items()
    ]
    for goal, verdict in ((1.8, "missed"), (1.95, "too close to tell"), (2.3, "met")):
        expected = f"2.00 times (median of 9 rounds, 95 % interval 1.90 to 2.20; the goal of {goal:g}: {verdict})"
        assert results_of(*rows).doubled("full", 4096, goal) == expected
    rows = [  # one pattern below its goal of 15, the others at 20
        Comparison("attention, 4096 tokens", what, "pass", {"sparse blocks": 1.0, "dense mask": 14.0 + 6 * bool(k)})
        for k, what in enumerate(BLOCK_GOALS)
    ]
    assert results_of(*rows).attention_goals(4096).endswith("missed: window 64 (14.0)")
