"""The bench measures what it documents."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench import __main__ as bench
from speechformer.bench import corpus, gpu, long
from speechformer.bench.attention import SIZES as SIZES_OF_ATTENTION
from speechformer.bench.attention import VARIANTS, bias_of, held_bytes, kernels
from speechformer.bench.attention import measure as bench_of_attention
from speechformer.bench.gpu import GPU_PARTS, bench_compiled, bench_large, bench_precision, decoder_of
from speechformer.bench.long import bench_stream, measure, peak_of_steps
from speechformer.bench.pages import BLOCK_GOALS, Results
from speechformer.bench.plots import draw, fits
from speechformer.bench.steps import SIZES
from speechformer.bench.timing import Comparison, device, table, turns
from speechformer.bench.translation import main
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError
from speechformer.kernels import sparse
from speechformer.kernels.sparse import pairs_computed
from speechformer.layers.patterns import all_pairs
from speechformer.training.memory import peak_bytes


def test_sides_take_turns_and_the_result_is_the_median_per_unit() -> None:
    """Oracle: sleeping 20 ms for one unit and 40 ms for four."""
    order: list[str] = []

    def side(name: str, seconds: float, work: float) -> float:
        order.append(name)
        time.sleep(seconds)
        return work

    seconds = turns({"a": lambda: side("a", 0.02, 1), "b": lambda: side("b", 0.04, 4)}, rounds=3)
    assert order == ["a", "b"] * 4  # the first of each is the warm-up
    assert seconds["a"] == pytest.approx(0.02, abs=0.01) and seconds["b"] == pytest.approx(0.01, abs=0.005)


def test_the_command_line(little_pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    own = [
        "corpus=ted",
        f"corpus.root={little_pairs}",
        "width=16",
        "heads=2",
        "layers=1",
        "ff=16",
        "task.vocab_size=20",
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *own, "--rounds", "1", "--steps", "1", "--processes", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4:2]] == ["model", "batches"]
    assert all(float(line.split()[-1]) > 0 for line in lines[1:4:2])
    for arguments, sentence in (
        (["task=lm"], "measures only the transformers of task=translate"),
        (["model=rnn"], "measures only the transformers of task=translate"),
        (["threads=abc"], "threads"),
        (["--rounds", "0"], "--rounds, --steps and --processes must be at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert sentence in str(end.value)


# The other parts


def test_the_ratio_is_of_the_fastest_other_side() -> None:
    seconds = {"ours": 2.0, "theirs": 6.0, "others": 5.0}
    assert Comparison("part", "what", "step", seconds).ratio == 2.5
    assert Comparison("part", "what", "step", {"ours": 2.0}).ratio is None


@pytest.mark.parametrize("what", VARIANTS)
def test_the_measured_kernels_agree(what: str) -> None:
    """The first one is that of models, as `choose_kernel` says, and `local_attention` has our patterns."""
    bias, T = bias_of(VARIANTS[what], 300), 300
    (heads, width), own = SIZES_OF_ATTENTION[device().type], {"dense mask", "reference"}
    qkv = [torch.randn(1, heads, T, width, device=device()) for _ in range(3)]
    outputs = {name: run(*qkv) for name, run in kernels(bias, VARIANTS[what], torch.float32).items()}
    own |= {
        "sparse blocks"
        if bias.pattern is not all_pairs
        else "SDPA without mask"
        if bias.has_no_mask
        else "query blocks"
    }
    assert {*outputs} - {"FlexAttention", "local_attention"} == own
    if importlib.util.find_spec("local_attention") and device().type == "cpu":
        assert ("local_attention" in outputs) == (what in ("window 64", "window 256", "block 64"))
    for mixed in outputs.values():
        torch.testing.assert_close(mixed, outputs["reference"], atol=1e-5, rtol=1e-5)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on the CPU, whose memory is counted exactly, on a machine with a GPU, too."""
    monkeypatch.setattr("speechformer.bench.attention.device", lambda: torch.device("cpu"))


def test_memory_includes_the_attention_weights_of_the_reference(on_the_cpu: None) -> None:
    """Oracle: softmax saves its T x T weights for each head; every kernel saves at least q, k, v and the output."""
    T, bias = 64, bias_of("pattern=full", 64)
    qkv = [torch.randn(1, 4, T, 32, requires_grad=True) for _ in range(3)]
    held = {name: held_bytes(run, bias, qkv) for name, run in kernels(bias, "pattern=full", torch.float32).items()}
    assert held["reference"] >= 4 * T * T * 4 > held["SDPA without mask"] - 4 * T * 32 * 4 - 4 * T * 4


def test_memory_includes_the_bias_of_blocks(on_the_cpu: None) -> None:
    """Oracle: a float and a bool for each pair in the blocks, and the weights of each head."""
    T, overrides = 1024, VARIANTS["window 64"]
    bias = bias_of(overrides, T)
    qkv = [torch.randn(1, 4, T, 32, requires_grad=True) for _ in range(3)]
    held = held_bytes(kernels(bias, overrides, torch.float32)["sparse blocks"], bias, qkv)
    assert held == pairs_computed(bias.layout or []) * (4 + 1 + 4 * 4)


def test_plots_and_table(tmp_path: Path) -> None:
    more = {"flops": 1e9, "bytes": 1e7, "size": SIZES["report"]}
    rows = [
        Comparison("steps, report", f"{task}, training step", "step", {"speechformer": 0.01, "torch.nn": 0.015}, more)
        for task in ("classify", "lm")
    ]
    for T in (256, 512):
        times = {"sparse blocks": T / 256, "dense mask": 4 * (T / 256) ** 2}
        memory = {"bytes": {"sparse blocks": T, "dense mask": T * T}, "tokens": T, "chosen": "sparse blocks"}
        rows.append(Comparison(f"attention, {T} tokens", "window 64", "pass", times, memory))
    lines = table(rows).splitlines()
    assert lines[0].split()[-1] == "ratio"
    assert lines[1].split() == [
        *["classify,", "training", "step"],
        "10",
        "ms",
        "15",
        "ms",
        "1.50",
    ]
    more["machine"] = {"flops_float32": 1e11, "bytes_per_second": 1e10}
    older = Comparison("attention, 128 tokens", "window 64", "pass", {"speechformer": 1.0}, {"tokens": 128})
    drawn = draw([*rows, older], OutputFolder(tmp_path))
    assert [path.name for path in drawn] == ["steps.png", "attention.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert draw([], OutputFolder(tmp_path)) == []


def test_tables_of_long_texts() -> None:
    """Oracles: power laws with known exponents, and ratios of round numbers."""
    rows = []
    for T in (256, 512, 1024, 2048):
        blocks = T >= 512
        seconds = {"sparse blocks": T**1.1 / 1e6, "dense mask": T**2 / 1e7, "local_attention": 2 * T**1.1 / 1e6}
        held = {"sparse blocks": T * 2**12, "dense mask": T * T * 2**10, "local_attention": 0}
        chosen = "sparse blocks" if blocks else "dense mask"
        row = Comparison(f"attention, {T} tokens", "window 64", "pass", seconds, {"bytes": held, "tokens": T})
        rows.append({**asdict(row), "more": {**row.more, "chosen": chosen}})
        seconds, held = {"SDPA without mask": T / 1e4}, {"SDPA without mask": T * 2**10}
        row = Comparison(f"attention, {T} tokens", "full", "pass", seconds, {"bytes": held, "tokens": T})
        rows.append({**asdict(row), "more": {**row.more, "chosen": "SDPA without mask"}})
    steps = [
        Comparison(
            "a long text",
            f"lm, 512 wide, 6 layers, full, {tokens} tokens",
            "step",
            {"speechformer": seconds[1]},
            {"peak_bytes": 3e9, "rounds": seconds},
        )
        for tokens, seconds in {"2,048": (1.0, 1.0, 2.0), "4,096": (2.5, 2.0, 3.0)}.items()
    ]
    more = {"cache_bytes": 5e6, "added_bytes": 1e5}
    stream = Comparison("a stream", "lm", "token", {"last 10,000": 0.002, "first 10,000": 0.001}, more)
    results = Results({"rows": [*rows, *map(asdict, steps), asdict(stream)]})
    ours, dense = 2048**1.1 / 1e6, 2048**2 / 1e7
    assert results.attention_table(2048).splitlines()[2] == (
        f"| window 64 | {1000 * ours:.3g} ms | 419 ms | {dense / ours:.1f} | 8 MiB | 4096 MiB | 2.0 |"
    )
    assert results.unmasked(2048) == "205 ms and 2 MiB"
    assert results.attention_slopes("window 64").splitlines()[2:] == [
        "| window 64 | sparse blocks | T^1.10, 512 to 2,048 | T^1.00, 512 to 2,048 |",
        "| window 64 | dense mask | T^2.00, 512 to 2,048 | T^2.00, 512 to 2,048 |",
    ]
    ratio = {T: T**0.9 / 10 for T in (256, 512, 2048)}
    assert results.sparse_rule() == (
        f"where the rule takes blocks (3 rows), they are {ratio[512]:.1f} to {ratio[2048]:.0f} times as fast as a "
        f"dense mask; where it does not (1), {ratio[256]:.1f} to {ratio[256]:.1f} times"
    )
    assert results.long_table().splitlines()[3] == "| lm, 512 wide, 6 layers, full, 4,096 tokens | 2.00 s | 3.0 GB |"
    few = "2.00 times (median of 3 rounds, too few for an interval; the goal of 2: too close to tell)"
    assert results.doubled("full", 4096, 2) == few
    assert results.stream().startswith("1.00 ms for each of the first 10,000 tokens and 2.00 ms for each of the last")


@pytest.mark.parametrize("goal, verdict", [(1.8, "missed"), (1.95, "too close to tell"), (2.3, "met")])
def test_the_goal_of_a_doubled_length_is_judged_by_an_interval(goal: float, verdict: str) -> None:
    """Oracle: of nine values, the second and the eighth bound the median with at least 95 % (binomial)."""
    rounds = {"2,048": [1.0] * 9, "4,096": [1.5, 1.9, 1.92, 1.96, 2.0, 2.03, 2.1, 2.2, 2.5]}
    rows = [
        Comparison("a long text", f"lm, 512 wide, 6 layers, full, {tokens} tokens", "step", {}, {"rounds": own})
        for tokens, own in rounds.items()
    ]
    expected = f"2.00 times (median of 9 rounds, 95 % interval 1.90 to 2.20; the goal of {goal:g}: {verdict})"
    assert Results({"rows": [*map(asdict, rows)]}).doubled("full", 4096, goal) == expected


def test_goals_of_steps_are_judged_by_their_intervals() -> None:
    """Oracle: ratios of processes well above the goal, well below it, and on both sides."""
    speed = {"classify, training step": (1.6, 1.7), "lm, training step": (1.1, 1.12), "lm, evaluation": (0.9, 1.2)}
    rows = []
    for what, ratios in speed.items():
        processes = [{"speechformer": 1.0, "torch.nn": ratio} for ratio in (*ratios, *ratios)]
        row = Comparison("steps, report", what, "step", processes[0], {"processes": processes})
        rows.append({**asdict(row), "measured_by": "steps"})
    assert Results({"rows": rows}).goals() == (
        "The goals were 1.5 (classifier, reports' size, training step) and 1.3 (language model, reports' size, "
        "training step), and 1.0 elsewhere; missed: language model, reports' size, training step (1.11). "
        "Too close to tell: language model, reports' size, evaluation (1.04)."
    )


def test_each_way_of_the_backward_pass_has_an_exponent_of_memory() -> None:
    """Oracle: two power laws of memory, with a drop between them."""
    rows = []
    for k, T in enumerate((256, 512, 1024, 2048, 4096, 8192)):
        again = k > 3
        held = {"sparse blocks": T**0.9 * (10 if again else 100), "dense mask": T**2}
        more = {"bytes": held, "tokens": T, "chosen": "sparse blocks", "recomputed": again}
        times = {"sparse blocks": T / 1e4, "dense mask": T**2 / 1e8}
        rows.append(Comparison(f"attention, {T} tokens", "window 256", "pass", times, more))
    results = Results({"rows": [*map(asdict, rows)]})
    assert results.attention_slopes("window 256").splitlines()[2:] == [
        "| window 256 | sparse blocks | T^1.00, 512 to 8,192 | T^0.90 kept, 512 to 2,048; "
        "T^0.90 recomputed, 4,096 to 8,192 |",
        "| window 256 | dense mask | T^2.00, 512 to 8,192 | T^2.00, 512 to 8,192 |",
    ]
    assert results.slope_goals("window 256").endswith("outside: none")
    (one,) = fits(rows[:5], "sparse blocks")["memory"]  # one length tells no exponent
    assert (one.how, one.tokens) == ("kept", (512, 2048))


def test_goals_of_blocks() -> None:
    """Oracle: one pattern below its goal of 15, the others at 20."""
    rows = [
        Comparison("attention, 4096 tokens", what, "pass", {"sparse blocks": 1.0, "dense mask": 14.0 + 6 * bool(k)})
        for k, what in enumerate(BLOCK_GOALS)
    ]
    text = Results({"rows": [*map(asdict, rows)]}).attention_goals(4096)
    assert text.startswith("The goals were 15 (window 64), 6 (window 256)") and text.endswith(
        "missed: window 64 (14.0)"
    )


def test_the_rule_for_gpus_is_judged_by_its_rows() -> None:
    """Oracle: three rows in which the kernel that is chosen is the fastest, and then one in which it is not."""
    times = {"FlexAttention": 1.0, "dense mask": 2.0, "sparse blocks": 3.0}
    dense_is_best = {"FlexAttention": 3.0, "dense mask": 2.0, "sparse blocks": 4.0}
    rows = [
        Comparison(f"attention, {tokens} tokens", what, "pass", own, {"tokens": tokens})
        for tokens, what, own in (
            (8192, "window 64", times),
            (8192, "bigbird and window 64", dense_is_best),
            (2048, "window 64", dense_is_best),
        )
    ]
    rows.append(Comparison("batches, 16 x 2048 tokens", "window 64", "pass", times, {"tokens": 2048, "batch": 16}))
    text = Results({"rows": [*map(asdict, rows)]}).gpu_rule()
    assert "FlexAttention 2.0 times (rows: 2). It takes a dense mask in 2 rows." in text and text.endswith(": none")
    rows[2].seconds = times
    text = Results({"rows": [*map(asdict, rows)]}).gpu_rule()
    assert text.endswith("in: window 64 over 1 x 2,048 tokens (FlexAttention, 2.00 times)")


def test_tables_of_gpus() -> None:
    """Oracle: by hand; a quarter of the rate of matrix products."""
    sides = {"FlexAttention": 0.001, "dense mask": 0.002}
    rows = [
        Comparison(f"batches, {B} x 4096 tokens", "window 64", "pass", sides, {"tokens": 4096, "batch": B})
        for B in (16, 2)
    ]
    machine = {"flops_bfloat16": 400e12}
    more = {"flops_of_step": 5e12, "tokens_per_second": 200_000.0, "machine": machine}
    rows.append(Comparison("a large model", "lm", "step", {"speechformer": 0.05}, more))
    results = Results({"rows": [*map(asdict, rows)]})
    assert results.batch_table(4096).splitlines()[2:] == [
        "| window 64 | 2 | 1 ms | 2 ms | dense mask |",
        "| window 64 | 16 | 1 ms | 2 ms | FlexAttention |",
    ]
    assert results.large_rate() == (
        "50 ms for 10,000 tokens, 200,000 tokens/s, 100 TFLOP/s. "
        "A matrix product of 8,192 x 8,192 runs at 400 TFLOP/s; the step has 25 % of this rate"
    )


def test_patterns_are_measured_in_batches(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; batches end at 65,536 tokens."""
    rows = [row for B in (1, 2) for row in bench_of_attention(1, (128,), ["window 64"], B)]
    assert [(row.part, row.more["batch"]) for row in rows] == [
        ("attention, 128 tokens", 1),
        ("batches, 2 x 128 tokens", 2),
    ]
    assert "reference" in rows[0].seconds and "reference" not in rows[1].seconds
    calls: list[tuple[list[int], int]] = []
    monkeypatch.setattr(gpu, "bench_attention", lambda rounds, lengths, variants, B: calls.append((lengths, B)) or [])
    gpu.bench_patterns(1, (1, 8, 64))
    assert calls == [([1024, 2048, 4096, 8192, 16_384], 1), ([1024, 2048, 4096, 8192], 8), ([1024], 64)]


def test_rows_say_whether_weights_are_computed_again(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: memory without the weights of all pairs in the blocks, a float for each of four heads."""
    rows = []
    for most in (sparse.KEPT, 0):
        monkeypatch.setattr(sparse, "KEPT", most)
        rows += bench_of_attention(1, (512,), ["window 64"])
    assert [row.more["recomputed"] for row in rows] == [False, True]
    with_weights, without = (row.more["bytes"]["sparse blocks"] for row in rows)
    pairs = pairs_computed(bias_of(VARIANTS["window 64"], 512).layout or [])
    assert with_weights - without == 4 * 4 * pairs


def test_phases_of_runs_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(corpus, "seconds_by_phase", lambda name: calls.append(name) or {"training": len(calls)})
    turns = corpus.phases_in_turns({"large text": ["a"], "sample": ["b"]}, 2)
    assert calls == ["a", "b"] * 3
    assert turns == [{"large text": {"training": k}, "sample": {"training": k + 1}} for k in (3, 5)]


def test_goals_of_a_large_text() -> None:
    """Oracles: a ratio of 1.05 in every turn, and the t-interval of two turns, 12.71 standard errors to each side."""
    first = Comparison("a large text", "bpe, 1 GB", "first start", {"first": 100}, {"text_bytes": 1e9, "cores": 2})
    turns = [{"large text": 1.05, "sample": 1.0}] * 2
    even = Comparison("a large text", "bpe, 1 GB", "100 steps, training", turns[0], {"processes": turns})
    turns = [{"large text": 1.2 * math.exp(own), "sample": 1.0} for own in (-0.01, 0.01)]
    uneven = Comparison("a large text", "words, 1 GB", "100 steps, training", turns[0], {"processes": turns})
    older = Comparison("a large text", "bytes, 1 GB", "100 steps, training", {"large text": 0.9, "sample": 1.0}, {})
    results = Results({"rows": [*map(asdict, (first, even, uneven, older))]})
    low, high = (100 * (1.2 * math.exp(sign * 12.706 * 0.01) - 1) for sign in (-1, 1))
    assert results.corpus_goals() == (
        "The goal of 4 MB a second and core is met. Against the sample, 100 steps of training take "
        f"+5 % (bpe, +5 to +5), +20 % (words, {low:+.0f} to {high:+.0f}), −10 % (bytes); the goal of at most +10 % "
        "is missed by: words"
    )


def test_the_training_step_and_the_stream_of_the_bench() -> None:
    """Oracle: the cache of a sink and a window, keys and values of each layer, in single precision."""
    sizes = {"width": 16, "heads": 2, "layers": 2, "ff": 16, "vocab_size": 30}
    rows = measure(2, [("window 4", 40), ("full", 20)], sizes)
    assert [row.what for row in rows] == [
        "lm, 16 wide, 2 layers, window 4, 40 tokens",
        "lm, 16 wide, 2 layers, full, 20 tokens",
    ]
    assert all(row.seconds["speechformer"] > 0 and len(row.more["rounds"]) == 2 for row in rows)
    assert peak_of_steps("full", 20, sizes) > 0
    stream = bench_stream(300, 100, {**sizes, "block_size": 8})
    assert stream.more["cache_bytes"] == 2 * 2 * (255 + 4) * 16 * 4 + 2 * 8 and len(stream.more["seconds"]) == 3


def test_long_texts_warm_up_until_no_memory_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: numbers of new pages by hand; a round calls `page_faults` before and after."""
    for new, rounds in (([0], 1), ([10**6, 10**5, 100, 10**6], 3), ([10**6] * 9, 8)):
        counts = iter([number for k, own in enumerate(new) for number in (sum(new[:k]), sum(new[:k]) + own)])
        monkeypatch.setattr(long, "page_faults", lambda: next(counts))  # noqa: B023
        taken: list[int] = []
        assert long.warm_up([lambda: taken.append(1) or 1.0, lambda: 1.0]) == rounds == len(taken)  # noqa: B023


def test_the_peak_of_memory_grows_by_what_is_allocated() -> None:
    before = peak_bytes(device()) or 0
    more = torch.ones(before + 2**26, dtype=torch.uint8, device=device())  # more than was ever free
    assert before + 2**26 <= (peak_bytes(device()) or 0) <= 2 * before + 2**27 and more[-1] == 1


def test_invalid_arguments_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for words, sentence in (
        (["stops"], "there is no part stops"),
        (["packed"], "part packed is now ensemble."),
        (["--rounds", "0"], "--rounds and --processes must be at least 1"),
        (["--processes", "0"], "--rounds and --processes must be at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit) as end:
            bench.main()
        assert sentence in str(end.value.code) + capsys.readouterr().err


def test_the_flops_of_a_large_model() -> None:
    """Oracle: torch's own counter of FLOPs, on a size whose attention and products both matter; it counts attention
    in full, of which causality spares half."""
    sizes = {"width": 32, "heads": 2, "layers": 2, "ff": 64, "block_size": 64, "vocab_size": 100}
    result = bench_large(sizes, batch=1, steps=1)
    model, ids = decoder_of(sizes), torch.randint(100, (1, 65))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # whose products it knows
        logits = model(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:]).backward()
    spared = 6 * 2 * 32 * 64 * 64
    assert counter.get_total_flops() - spared == pytest.approx(result.more["flops_of_step"], rel=0.1)


def test_steps_in_bfloat16_are_timed_beside_single_precision() -> None:
    sizes = {"width": 32, "heads": 2, "layers": 2, "ff": 64, "block_size": 64, "vocab_size": 100}
    rows = bench_precision(1, sizes, steps=1)
    assert [[*row.seconds] for row in rows] == [["bf16-mixed", "32-true"]] * 2
    assert [row.what for row in rows] == [f"lm, 32 wide, 2 layers, {batch} x 64 tokens" for batch in (1, 8)]


def test_the_decoder_of_the_bench_begins_without_knowledge() -> None:
    """Oracle: the entropy of guessing, of which the loss is a multiple if embeddings have variance 1."""
    model = decoder_of({"width": 512, "heads": 8, "layers": 2, "ff": 64, "block_size": 16, "vocab_size": 1000})
    ids = torch.randint(1000, (4, 17))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(1000), abs=0.5)


def test_compiled_blocks_are_timed_beside_others(traced: list[str]) -> None:
    pytest.importorskip("x_transformers")  # the bench builds all sides
    result = bench_compiled(1, modes=["default"])
    assert traced == ["default"] * SIZES["report"]["layers"]
    assert list(result.seconds) == ["default", "not compiled"] and min(result.seconds.values()) > 0


def test_without_a_gpu_its_parts_say_so_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "machine", lambda: pytest.fail("measured"))
    for parts, needing in ((["gpu"], ", ".join(GPU_PARTS)), (["corpus", "large"], "large")):
        with pytest.raises(UserError, match=f"no CUDA device here, which the bench needs for: {needing}."):
            bench.bench(parts, 1, 1, None)
