"""`task.unknown_rate`. `test_fit.py` resumes such runs."""

from __future__ import annotations

import pytest
import torch

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.tasks.unknown_words import UnknownWords


def test_words_that_occur_once_become_unknown_at_the_rate() -> None:
    """Oracle: 5 and 6 occur once and become <unk>; the other words stay."""
    stream = torch.tensor([2] * 500 + [3] * 496 + [4] * 2 + [5, 6])
    ids = torch.arange(2, 7).repeat(4000, 1)
    replaced = UnknownWords(stream, 7, 0.3).replace(ids, torch.Generator().manual_seed(0))
    rates = (replaced == UNKNOWN).double().mean(dim=0)
    assert rates.tolist() == pytest.approx([0, 0, 0, 0.3, 0.3], abs=0.03)
    assert torch.equal(replaced[replaced != UNKNOWN], ids[replaced != UNKNOWN])
