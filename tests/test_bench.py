"""The bench compares what it says that it compares."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from test_cores import stack_arguments
from test_encoder_decoder import pairs, translator

from speechformer.bench import Peer, main, turns


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_peer_has_as_many_parameters_and_sees_no_padding_and_no_future(norm: str) -> None:
    torch.manual_seed(0)
    arguments = stack_arguments(norm=norm, dropout=0.0)
    core, peer = translator(norm=norm, tied_output=True, shared_embeddings=True), Peer(arguments).eval()
    assert sum(p.numel() for p in core.parameters()) == sum(p.numel() for p in peer.parameters())
    source, target = pairs()
    hidden = peer.hidden(source, target)
    torch.testing.assert_close(peer.hidden(source[1:2, :6], target[1:2]), hidden[1:2], atol=1e-5, rtol=1e-5)
    changed = target.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(peer.hidden(source, changed)[:, :4], hidden[:, :4], atol=1e-5, rtol=1e-5)


def test_the_sides_take_turns_and_the_median_of_their_seconds_for_each_unit_counts() -> None:
    """Oracle: sleeping 20 ms for one unit and 40 ms for four."""
    order: list[str] = []

    def side(name: str, seconds: float, work: float) -> float:
        order.append(name)
        time.sleep(seconds)
        return work

    found = turns({"a": lambda: side("a", 0.02, 1), "b": lambda: side("b", 0.04, 4)}, rounds=3)
    assert order == ["a", "b"] * 4  # the first of each is not measured
    assert found["a"] == pytest.approx(0.02, abs=0.01) and found["b"] == pytest.approx(0.01, abs=0.005)


def test_the_command_line(little_pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    own = ["corpus=ted", f"corpus.root={little_pairs}", "width=16", "heads=2", "layers=1", "ff=16", "task.size=20"]
    monkeypatch.setattr(sys, "argv", ["bench", *own, "--rounds", "1", "--steps", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["model", "batches"]
    assert all(float(line.split()[-1]) > 0 for line in lines[1:3])
    for arguments, sentence in (
        (["task=lm"], "only the transformers of task=translate"),
        (["model=rnn"], "only the transformers of task=translate"),
        (["threads=abc"], "threads"),
        (["--rounds", "0"], "--rounds and --steps must be at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as refused:
            main()
        assert sentence in str(refused.value)
