"""The peers of the bench compute what our models compute, and drop out in as many places."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from test_encoder_decoder import pairs, torchs_transformer, translator
from test_models import classifier, stack_arguments
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench import __main__ as bench_main
from speechformer.bench.__main__ import earlier
from speechformer.bench.pages import Results, fill
from speechformer.bench.peers import TorchPeer, XPeer, parameters
from speechformer.bench.steps import forward_flops, losses_of
from speechformer.bench.timing import Comparison, combine, fastest_settings, in_processes, table
from speechformer.bench.translation import OUR_LOSS, PEER_LOSSES
from speechformer.bench.translation import Peer as TranslationPeer
from speechformer.errors import UserError
from speechformer.kernels.dropout import FastDropout
from speechformer.models.decoder import Decoder
from speechformer.models.stack import Stack
from speechformer.runs.folder import write_json

SIZES = {"vocab_size": 50, "width": 16, "heads": 2, "layers": 2, "ff": 24, "block_size": 12}
every_peer = pytest.mark.parametrize("peer", ["torch.nn", "x-transformers"])
every_task = pytest.mark.parametrize("task", ["classify", "lm"])


def ours_of(task: str, dropout: float) -> Any:
    own = {**SIZES, "dropout": dropout, "model": {"name": "sinusoidal"}}
    torch.manual_seed(0)
    if task == "classify":
        return classifier(**own, classifier_width=100)
    return Decoder(**stack_arguments(**own), tied_output=False)


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


def stack_of(ours: Any) -> Any:
    return ours.decoder if hasattr(ours, "decoder") else ours.encoder


def embedding_of(peer: Any) -> nn.Embedding:
    return peer.embedding if isinstance(peer, TorchPeer) else peer.model.token_emb.emb


@torch.no_grad()
def copy_weights(ours: Any, peer: Any) -> None:
    stack = stack_of(ours)
    peer.head.load_state_dict((ours.output if hasattr(ours, "output") else ours.head).state_dict())
    embedding_of(peer).load_state_dict(stack.embedding.state_dict())
    if isinstance(peer, TorchPeer):
        peer.stack.norm.load_state_dict(stack.final_norm.state_dict())
        for block, layer in zip(
            stack.blocks, peer.stack.layers
        ):  # both in this order: attention, feed-forward, norms
            for own, other in zip(block.parameters(), layer.parameters(), strict=True):
                other.copy_(own)
        return
    peer.model.attn_layers.final_norm.load_state_dict(stack.final_norm.state_dict())
    layers = [*peer.model.attn_layers.layers]
    for block, (norms, attention, _), (ff_norms, ff, _) in zip(stack.blocks, layers[::2], layers[1::2]):
        norms[0].load_state_dict(block.attention_norm.state_dict())
        ff_norms[0].load_state_dict(block.feed_forward_norm.state_dict())
        for k, linear in enumerate((attention.to_q, attention.to_k, attention.to_v)):
            linear.weight.copy_(block.attention.qkv.weight.chunk(3)[k])
            linear.bias.copy_(block.attention.qkv.bias.chunk(3)[k])
        attention.to_out.load_state_dict(block.attention.output.state_dict())
        linears = [layer for layer in ff.modules() if isinstance(layer, nn.Linear)]
        linears[0].load_state_dict(block.feed_forward[0].state_dict())
        linears[1].load_state_dict(block.feed_forward[2].state_dict())


@every_task
@every_peer
@pytest.mark.parametrize("training", [True, False])
def test_without_dropout_a_peer_has_our_loss_and_gradients(peer: str, task: str, training: bool) -> None:
    """Oracle: our model with the same weights, in double precision, under every setting, with padding and without."""
    ours, theirs = ours_of(task, 0.0).double().train(training), peer_of(peer, task, 0.0).double().train(training)
    with torch.no_grad():  # so that biases and norms count too
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    copy_weights(ours, theirs)
    assert parameters(theirs) == parameters(ours)
    settings = losses_of(theirs, training)
    assert len(settings) == (1 if peer == "torch.nn" and training else 2) * (2 if task == "lm" else 1)
    for padding, (name, loss) in itertools.product((0, 4), settings.items()):
        ids, targets = batch_of(task, padding)
        with torch.set_grad_enabled(training):  # torch's fast path needs none
            expected, value = losses_of(ours, training)["default"](ids, targets), loss(ids, targets)
        torch.testing.assert_close(value.float(), expected.float(), atol=2e-6, rtol=0, msg=name)
        if training:
            (gradient,) = torch.autograd.grad(expected, stack_of(ours).embedding.weight)
            (other,) = torch.autograd.grad(value, embedding_of(theirs).weight)
            torch.testing.assert_close(other, gradient, atol=1e-6, rtol=0, msg=name)


def expected_drops(task: str) -> Counter[tuple[int, ...]]:
    """Embeddings, then in each of 2 layers the weights of 2 heads and two branches."""
    T = 12 - (task == "lm")
    return Counter({(3, T, 16): 1 + 2 * 2, (3, 2, T, T): 2})


def shapes_of_our_masks(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Count the dropout masks that our models draw from now on, by shape; of sequences, not of rows of tokens."""
    monkeypatch.setattr(Stack, "can_unpad", False)
    shapes: Counter[tuple[int, ...]] = Counter()
    draw = FastDropout.mask

    def mask(self: FastDropout, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        shapes[tuple(shape)] += 1
        return draw(self, shape, dtype)

    monkeypatch.setattr(FastDropout, "mask", mask)
    return shapes


@every_task
def test_our_dropout_places(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the list above, from the documentation of `Block` and `Stack`."""
    shapes = shapes_of_our_masks(monkeypatch)
    ours = ours_of(task, 0.1).train()
    losses_of(ours, training=True)["default"](*batch_of(task))
    assert shapes == expected_drops(task)


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


@every_task
@every_peer
def test_a_peer_drops_out_where_we_do(peer: str, task: str) -> None:
    """Oracle: the masks that torch draws in a pass, under every setting; in evaluation, none."""
    theirs = peer_of(peer, task, 0.1)
    for training, name in [(own, name) for own in (True, False) for name in losses_of(theirs, own)]:
        losses = losses_of(theirs.train(training), training)
        with DroppedShapes() as dropped:
            losses[name](*batch_of(task))
        assert dropped.shapes == (expected_drops(task) if training else Counter()), name
        assert dropped.kept <= {0.9}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_peer_of_translation_computes_the_same(norm: str) -> None:
    """Oracle: our model with the same weights, in double precision; each of the peer's losses with padding in the
    target, with smoothing and without."""
    arguments = stack_arguments(norm=norm, dropout=0.0)
    model = translator(norm=norm, dropout=0.0, tied_output=True, shared_embeddings=True).double()
    peer = TranslationPeer(arguments).double().eval()
    peer.transformer.load_state_dict(torchs_transformer(model, norm == "pre").state_dict())
    peer.embedding.load_state_dict(model.encoder.embedding.state_dict())
    assert parameters(peer) == parameters(model)
    source, target = pairs()
    target[0, 4:] = 0
    tokens = target[:, :-1] != 0
    hidden = model.hidden(source, target[:, :-1]), peer.hidden(source, target[:, :-1])
    torch.testing.assert_close(hidden[1][tokens], hidden[0][tokens], atol=1e-6, rtol=0)  # a table in single precision
    for smoothing, (name, loss) in itertools.product((0.0, 0.1), PEER_LOSSES.items()):
        values = [own(model, hidden[0].flatten(0, 1), target[:, 1:].flatten(), smoothing) for own in (OUR_LOSS, loss)]
        torch.testing.assert_close(values[1].float(), values[0].float(), atol=2e-6, rtol=0, msg=name)


def test_the_peer_of_translation_drops_out_where_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the masks that torch draws in both, where each of ours draws for itself."""
    arguments = stack_arguments(dropout=0.1)
    ours, peer = translator(dropout=0.1, tied_output=True, shared_embeddings=True).train(), TranslationPeer(arguments)
    shapes = shapes_of_our_masks(monkeypatch)
    source, target = pairs()
    source[:] = source[:1]  # no padding, which ours leaves out
    ours.hidden(source, target)
    with DroppedShapes() as dropped:
        peer.train().hidden(source, target)
    assert dropped.shapes == shapes and shapes.total() == 2 * 1 + 2 * (3 + 5)


def test_the_least_flops_of_a_pass() -> None:
    """Oracle: torch's counter, which counts attention in full; the future of a token needs none of it."""
    for task in ("classify", "lm"):
        ours, batch = ours_of(task, 0.0).eval(), batch_of(task)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            losses_of(ours, training=False)["default"](*batch)
        T = batch[0].shape[1]
        spared = 4 * 2 * 16 * 3 * (T * T - T * (T + 1) // 2) if task == "lm" else 0
        assert forward_flops(ours, SIZES, [batch]) == counter.get_total_flops() - spared
    batch = batch_of("classify", padding=4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ours_of("classify", 0.0)(batch[0][1:2, :8])
    alone = forward_flops(ours_of("classify", 0.0), SIZES, [(batch[0][1:2], batch[1][1:2])])
    assert alone == forward_flops(ours_of("classify", 0.0), SIZES, [(batch[0][1:2, :8], batch[1][1:2])])


def test_a_side_is_as_fast_as_its_fastest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a clock that each side moves on by its own seconds; a slow setting has no second turn."""
    clock, order = [0.0], []

    def side(name: str, seconds: float) -> Any:
        def run() -> float:
            order.append(name)
            clock[0] += seconds
            return 1

        return run

    monkeypatch.setattr("speechformer.bench.timing.time.perf_counter", lambda: clock[0])
    sides = {"ours": {"default": side("o", 2)}, "peer": {"a": side("a", 4), "b": side("b", 3.5), "c": side("c", 9)}}
    seconds, settings = fastest_settings(sides, rounds=2)
    assert seconds == {"ours": 2, "peer": 3.5} and settings == {"ours": "default", "peer": "b"}
    assert "".join(order) == "oabc" * 2 + "oab" * 3


def test_the_interval_of_a_ratio_over_processes() -> None:
    """Oracle: scipy's t-interval of the logarithms of five ratios to the faster peer."""
    ratios = [1.4, 1.5, 1.45, 1.6, 1.5]
    rows = [
        Comparison(
            "steps", "lm", "step", {"ours": 2.0, "b": 9.0, "a": 2 * r}, {"settings": {"a": "x" if r < 1.5 else "y"}}
        )
        for r in ratios
    ]
    row = combine(rows)
    logs = [math.log(r) for r in ratios]
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert row.ratio == pytest.approx(stats.gmean(ratios))
    assert row.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert row.seconds == {"ours": 2.0, "b": 9.0, "a": 3.0} and row.more["settings"] == {"a": "y"}
    assert table([row]).splitlines()[-1].endswith(f"{row.ratio:.2f} ({row.interval[0]:.2f} to {row.interval[1]:.2f})")  # type: ignore[index]
    assert combine(rows[:1]).interval is None and Comparison("p", "w", "step", {"ours": 2.0}).ratio is None


def test_each_process_is_a_new_one() -> None:
    assert len({*in_processes(os.getpid, 2), os.getpid()}) == 3


def test_tables_of_the_page(tmp_path: Path) -> None:
    """Oracle: the tables written out; the limit is the greater of 2e9 / 1e12 s and 8e8 / 1e11 s."""
    more = {"flops": 2e9, "bytes": 8e8, "settings": {"ours": "default", "peer": "fast"}, "changed": {"peer": "a, b"}}
    more["processes"] = [{"ours": 0.01, "peer": 0.02}] * 2
    more["machine"] = {"flops_float32": 1e12, "bytes_per_second": 1e11, "device": "A CPU", "torch": "2"}
    row = Comparison("steps, large", "lm, evaluation", "step", {"ours": 0.01, "peer": 0.02}, more)
    rows = [row, Comparison("attention", "nope, full", "pass", {"ours": 1.0})]
    for task in ("classify", "lm"):
        rows.append(Comparison("the Trainer's loop", task, "step", {"Trainer": 0.012, "bare loop": 0.01}))
        rows.append(Comparison("start-up", task, "start", {"command to first step": 3.0, "bare imports": 2.0}))
        rows.append(Comparison("start to end", f"{task}, experiment=e", "run", {"speechformer": 20.0}))
    rows.append(Comparison("a run of a sweep", "lm, 20 steps", "run", {"overhead": 0.2}))
    for what, own in (("lm, 1 busy", 0.03), ("lm, 1 busy, from the middle on", 0.09)):
        rows.append(Comparison("threads", what, "step", {"own choice": own, "threads=2": 0.04, "threads=1": 0.02}))
    path, page = tmp_path / "bench.json", tmp_path / "page.md"
    write_json(path, {"rows": [{**asdict(own), "commit": "1234567890"} for own in rows]})
    results = Results(json.loads(path.read_text()))
    name = "language model, 512 wide, 1,024 tokens, evaluation"
    assert results.steps_table().splitlines() == [
        "|  | ours | peer | times as fast | limit |",
        "|---|---|---|---|---|",
        f"| {name} | 10 ms | 20 ms | 2.00 (2.00 to 2.00) | 8 ms |",
    ]
    assert results.settings_table().splitlines()[-1] == f"| {name} | fast |"
    assert results.changed_table().splitlines()[-1] == "| peer | a, b |"
    assert results.overheads_table().splitlines()[2:] == [
        "| a step in the Trainer, with logging and checkpoints | 12 ms | 12 ms |",
        "| a step in a bare loop | 10 ms | 10 ms |",
        "| the Trainer's share | 20 % | 20 % |",
        "| from the command to the first step | 3.00 s | 3.00 s |",
        "| importing torch and lightning alone | 2.00 s | 2.00 s |",
        "| a run in a sweep, besides its training |  | 200 ms |",
        "| a whole command: | `experiment=e` | `experiment=e` |",
        "| from the command to the last line | 20.0 s | 20.0 s |",
    ]
    assert results.threads_table().splitlines()[2] == "| language model, 1 busy | 30 ms | 40 ms | 20 ms |"
    page.write_text('<!--= {{ ratio("large", "lm, evaluation") }}, {{ threads_ratio() }} -->\n<!--/-->\n')
    fill(path, [page])
    assert page.read_text().splitlines()[1] == "2.00 (2.00 to 2.00), 1.50"
    page.write_text('<!--= {{ ratio("report", "lm, evaluation") }} -->\n<!--/-->\n')
    with pytest.raises(UserError, match=r"page.md, line 1: bench.json has no result of steps, report"):
        fill(path, [page])
    assert (results.machine("steps"), results.commit("threads")) == ("A CPU, torch 2", "1234567")
    with pytest.raises(UserError, match="there is no"):
        fill(tmp_path / "missing.json", [page])


def test_results_of_other_parts_stay_with_their_machine(tmp_path: Path) -> None:
    """Oracle: the rows by hand."""
    path = tmp_path / "bench.json"
    assert earlier(path, ["loop"]) == []
    rows = [{"measured_by": part, "more": {"machine": {"device": "A CPU"}}} for part in ("steps", "loop")]
    write_json(path, {"rows": [*rows, {"measured_by": None, "more": {}}]})
    assert earlier(path, ["loop"]) == rows[:1]
    older = [{"measured_by": "steps", "more": {}}, {"measured_by": "loop", "more": {}}]
    write_json(path, {"machine": {"device": "Another"}, "rows": older})
    assert earlier(path, ["loop"]) == [{"measured_by": "steps", "more": {"machine": {"device": "Another"}}}]


def test_parts_that_are_measured_one_after_the_other_name_their_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: two parts and two machines by hand."""
    limits = {"threads": 1, "torch": "2", "flops_float32": 1.0, "flops_bfloat16": 1.0, "bytes_per_second": 1.0}
    for part in ("loop", "whole"):
        row = Comparison(part, "lm", "step", {"ours": 1.0})
        monkeypatch.setitem(bench_main.PARTS, part, lambda rounds, row=row: [row])
        monkeypatch.setattr(bench_main, "machine", lambda part=part: {"device": f"CPU of {part}", **limits})
        bench_main.bench([part], 1, 1, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert [(row["part"], row["more"]["machine"]["device"]) for row in rows] == [
        ("loop", "CPU of loop"),
        ("whole", "CPU of whole"),
    ]
    assert Results({"rows": rows}).machine("whole") == "CPU of whole, torch 2"
    assert Results({"rows": rows}).machine("") == "CPU of loop, torch 2 and CPU of whole, torch 2"
