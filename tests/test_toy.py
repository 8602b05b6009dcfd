"""The lecture's example. Oracles: its vocabulary counted by hand, and the formula of the positions."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from speechformer.corpora.tokenizer import Tokenizer
from speechformer.toy import PARAGRAPH, SENTENCES, main, show, steps


def test_the_vocabulary_is_that_of_the_paragraph() -> None:
    """24 different words, three marks, and two of our own."""
    tokenizer = Tokenizer.fit([PARAGRAPH])
    assert len(tokenizer) == 29
    assert tokenizer.vocabulary[:5] == ["<pad>", "<unk>", "!", ".", "?"] and "Hello" in tokenizer.vocabulary


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_input_is_embedding_plus_position(sentence: str) -> None:
    tokenizer, embedding = Tokenizer.fit([PARAGRAPH]), nn.Embedding(29, 6)
    words, ids, embedded, positions, total = steps(sentence, tokenizer, embedding)
    assert len(words) == len(ids) == len(total)
    for i, index in enumerate(ids):
        for d in range(3):
            angle = i / 10000 ** (2 * d / 6)
            assert positions[i, 2 * d].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert positions[i, 2 * d + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert torch.equal(embedded[i], embedding.weight[index]) and torch.equal(total[i], embedded[i] + positions[i])


def test_a_comma_is_unknown_because_the_paragraph_has_none() -> None:
    text = show(SENTENCES, 4, 0)
    assert text.count("Not in the paragraph") == 1 and text.endswith("so encoded as <unk> (1): ,")


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["toy", "what will come", "--width", "2"])
    main()
    assert "   ids: 26 27 13\n" in capsys.readouterr().out
    for arguments, sentence in ((["--width", "0"], "--width must be between 1 and 16"), ([" "], "is empty")):
        monkeypatch.setattr(sys, "argv", ["toy", *arguments])
        with pytest.raises(SystemExit, match=sentence):
            main()
