"""The bench measures what it documents."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench import __main__ as bench
from speechformer.bench.attention import bias_of, kernels, saved_bytes
from speechformer.bench.gpu import bench_compiled, bench_gpu, bench_large, decoder_of
from speechformer.bench.plots import draw
from speechformer.bench.steps import SIZES
from speechformer.bench.timing import Comparison, table, turns
from speechformer.bench.translation import main
from speechformer.corpora.files import OutputFolder
from speechformer.errors import UserError


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


@pytest.mark.parametrize(("model", "pattern"), [("nope", "full"), ("alibi", "full"), ("rope", "window")])
def test_the_measured_kernels_agree(model: str, pattern: str) -> None:
    bias = bias_of(model, pattern, 40)
    qkv = [torch.randn(1, 8, 40, 64) for _ in range(3)]
    outputs = {name: run(*qkv) for name, run in kernels(bias, torch.float32).items()}
    assert set(outputs) >= {"dense mask", "reference"} and ("no mask" in outputs) == (
        pattern == "full" and model == "nope"
    )
    for mixed in outputs.values():
        torch.testing.assert_close(mixed, outputs["reference"], atol=1e-5, rtol=1e-5)


def test_memory_includes_the_attention_weights_of_the_reference() -> None:
    """Oracle: softmax saves its T x T weights for each head; every kernel saves at least q, k, v and the output."""
    T, bias = 64, bias_of("nope", "full", 64)
    qkv = [torch.randn(1, 8, T, 64, requires_grad=True) for _ in range(3)]
    bytes_of = {name: saved_bytes(run, qkv) for name, run in kernels(bias, torch.float32).items()}
    assert bytes_of["reference"] >= 8 * T * T * 4 > bytes_of["no mask"] - 8 * T * 64 * 4 - 8 * T * 4


def test_plots_and_table(tmp_path: Path) -> None:
    more = {"flops": 1e9, "bytes": 1e7, "size": SIZES["report"]}
    rows = [
        Comparison("steps, report", f"{task}, training step", "step", {"speechformer": 0.01, "torch.nn": 0.015}, more)
        for task in ("classify", "lm")
    ]
    for T in (256, 512):
        memory = {"bytes": {"dense mask": T, "reference": T * T}, "tokens": T}
        rows.append(
            Comparison(f"attention, {T} tokens", "nope, full", "pass", {"dense mask": 1.0, "reference": 2.0}, memory)
        )
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
    drawn = draw(rows, {"flops_float32": 1e11, "bytes_per_second": 1e10}, OutputFolder(tmp_path))
    assert [path.name for path in drawn] == ["steps.png", "attention.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert draw([], {}, OutputFolder(tmp_path)) == []


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


def test_the_share_of_the_rate_and_the_flops_of_a_large_model() -> None:
    """Oracle: torch's own counter of FLOPs, on a size whose attention and products both matter; it counts attention
    in full, of which causality spares half."""
    sizes = {"width": 32, "heads": 2, "layers": 2, "ff": 64, "block_size": 64, "vocab_size": 100}
    result = bench_large(1e12, sizes, batch=1, steps=1)
    assert result.more["part_of_the_rate"] == pytest.approx(
        result.more["flops"] / result.seconds["speechformer"] / 1e12
    )
    model, ids = decoder_of(sizes), torch.randint(100, (1, 65))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # whose products it knows
        logits = model(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:]).backward()
    spared = 6 * 2 * 32 * 64 * 64
    assert counter.get_total_flops() - spared == pytest.approx(result.more["flops"], rel=0.1)


def test_compiled_blocks_are_timed_beside_others(traced: list[str]) -> None:
    pytest.importorskip("x_transformers")  # the bench builds all sides
    result = bench_compiled(1, modes=["default"])
    assert traced == ["default"] * SIZES["report"]["layers"]
    assert list(result.seconds) == ["default", "not compiled"] and min(result.seconds.values()) > 0


def test_without_a_gpu_its_part_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="no CUDA device"):
        bench_gpu(1, 1e12)
