"""Oracles: the rates of the settings, the words that a count allows to change, and frequencies in train."""

from __future__ import annotations

import pytest
import torch

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.tasks.word_noise import WordNoise

STREAM = torch.tensor([2] * 500 + [3] * 300 + [4] * 198 + [5, 6])  # 5 and 6 occur once


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_only_words_that_occur_once_become_unknown_and_at_the_rate_that_is_set() -> None:
    noise, ids = WordNoise(STREAM, 8, 0.3, 0.0), torch.tensor([[2, 3, 4, 5, 6]]).repeat(4000, 1)
    replaced = noise.with_unknown(ids, seeded())
    assert torch.equal(replaced[:, :3], ids[:, :3])
    rates = (replaced[:, 3:] == UNKNOWN).double().mean(dim=0)
    assert rates.tolist() == pytest.approx([0.3, 0.3], abs=4 * (0.3 * 0.7 / 4000) ** 0.5)
    assert set(replaced[:, 3].tolist()) == {5, UNKNOWN}
    assert torch.equal(noise.inputs(ids, seeded()), ids)


def test_noise_draws_words_by_their_frequency() -> None:
    """Oracle: an input is another with probability 0.4, drawn as often as in train, itself included."""
    noise, ids = WordNoise(STREAM, 8, 0.0, 0.4), torch.full((200, 100), 6)
    drawn = noise.inputs(ids, seeded()).flatten().bincount(minlength=8) / ids.numel()
    expected = 0.4 * STREAM.bincount(minlength=8) / len(STREAM)
    expected[6] += 0.6
    torch.testing.assert_close(drawn, expected, atol=4 * (0.25 / ids.numel()) ** 0.5, rtol=0)
    assert torch.equal(noise.with_unknown(ids, seeded()), ids)


def test_a_generator_decides_everything() -> None:
    noise, ids = WordNoise(STREAM, 8, 0.5, 0.5), torch.randint(2, 7, (8, 9))
    for change in (noise.with_unknown, noise.inputs):
        assert torch.equal(change(ids, seeded(1)), change(ids, seeded(1)))
        assert not torch.equal(change(ids, seeded(1)), change(ids, seeded(2)))
