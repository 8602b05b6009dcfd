"""The lecture's example. Oracles: its vocabulary counted by hand, and the formula of the positions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from commands import call
from torch import nn

from speechformer.corpora.tokenizer import Tokenizer
from speechformer.toy import PARAGRAPH, SENTENCES, main, steps


def test_the_input_is_embedding_plus_position() -> None:
    """The vocabulary has 24 different words, three marks, and two tokens of our own."""
    tokenizer, embedding = Tokenizer.fit([PARAGRAPH]), nn.Embedding(29, 6)
    assert len(tokenizer) == 29
    words, ids, embedded, positions, total = steps(SENTENCES[0], tokenizer, embedding)
    assert len(words) == len(ids) == len(total)
    for i, d in itertools.product(range(len(ids)), range(3)):
        angle = i / 10000 ** (2 * d / 6)
        assert positions[i, 2 * d : 2 * d + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)
    assert torch.equal(embedded, embedding.weight[ids]) and torch.equal(total, embedded + positions)


def test_the_command_line() -> None:
    printed, _ = call(main, "what will, come", "--width", "2")
    assert "   ids: 26 27 1 13\n" in printed and "so encoded as <unk> (1): ," in printed
    with pytest.raises(SystemExit, match="--width must be between 1 and 16"):
        call(main, "--width", "0")
