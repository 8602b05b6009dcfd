"""Beam search against a greedy loop, against all translations there are, and with a cache against without."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, RECURRENT
from test_encoder_decoder import translator

from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.generation.beam_search import (
    batch_sources,
    beam_search,
    length_penalty,
    max_target_length,
    translate_ids,
)

TINY = 8  # tokens of the vocabulary: four special ones and four


def sources(rows: int = 4, tokens: int = 9, vocabulary: int = TINY) -> torch.Tensor:
    ids = torch.randint(4, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(5))
    ids[:, -1] = END
    for row in range(1, rows):
        ids[row, tokens - row :] = PAD
        ids[row, tokens - row - 1] = END
    return ids


def opinionated(model: str, pattern: str = "full", /, **changes: Any) -> Any:
    """An untrained model is nearly indifferent; with larger weights it has opinions that depend on all it sees, and
    in a vocabulary this small it ends now and then."""
    model = translator(model, pattern, vocab_size=TINY, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
        model.output.bias[END] += 1
    return model


@torch.no_grad()
def greedy(model: Any, source: torch.Tensor, limit: int) -> list[int]:
    """The definition: the most probable token at each step, until <eos> or the limit, where it is <eos>."""
    ids = [BEGIN]
    while len(ids) < limit:
        logits = model(source[None], torch.tensor([ids]))[0, -1].clone()
        logits[[PAD, BEGIN]] = -math.inf
        token = int(logits.argmax())
        if token == END:
            break
        ids.append(token)
    return ids[1:]


@pytest.mark.parametrize("model", ["sinusoidal", "rope", *RECURRENT])
def test_a_beam_of_one_is_greedy(model: str) -> None:
    model = opinionated(model)
    ids = sources(6)
    for limit in (3, 12):
        translations = beam_search(model, ids, beam=1, alpha=1.0, limits=[limit] * 6)
        expected = [greedy(model, row[row != PAD], limit) for row in ids]
        assert [translation for translation, _ in translations] == expected
    assert len({len(translation) for translation in expected}) > 1  # some end by themselves


@torch.no_grad()
def every_translation(models: Any, source: torch.Tensor, limit: int, alpha: float) -> list[tuple[float, list[int]]]:
    """All sequences of at most `limit` tokens that end with <eos>, with scores by the models' mean probability."""
    words = [token for token in range(TINY) if token not in (PAD, BEGIN, END)]
    scored = []
    for length in range(limit):
        for sequence in itertools.product(words, repeat=length):
            each = [model(source[None], torch.tensor([[BEGIN, *sequence]]))[0].softmax(dim=-1) for model in models]
            log = (sum(each) / len(each)).log()
            steps = [float(log[t, token]) for t, token in enumerate([*sequence, END])]
            scored.append((sum(steps) / length_penalty(length + 1, alpha), list(sequence)))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("models", [["alibi"], ["rnn_attention"], ["alibi", "rnn_attention", "rope"]])
def test_a_wide_beam_finds_the_best_of_all(models: Any, alpha: float) -> None:
    models = [opinionated(model) for model in models]
    ids = sources(3, 6)
    limit = 3
    translations = beam_search(models, ids, beam=(TINY - 3) ** limit, alpha=alpha, limits=[limit] * 3)
    for row, (translation, score) in zip(ids, translations):
        best = every_translation(models, row[row != PAD], limit, alpha)[0]
        assert translation == best[1] and score == pytest.approx(best[0], abs=1e-4)


def test_a_wider_beam_scores_no_worse_on_the_whole_and_its_score_is_that_of_its_translation() -> None:
    model = opinionated("sinusoidal")
    ids = sources(6)
    totals = []
    for beam in (1, 4, 16):
        translations = beam_search(model, ids, beam=beam, alpha=0.6, limits=[12] * 6)
        totals.append(sum(score for _, score in translations))
        for row, (translation, score) in zip(ids, translations):
            log = model(row[row != PAD][None], torch.tensor([[BEGIN, *translation]]))[0].log_softmax(dim=-1)
            total = sum(log[t, token].item() for t, token in enumerate([*translation, END]))
            assert score == pytest.approx(total / length_penalty(len(translation) + 1, 0.6), abs=1e-4)
    assert totals == sorted(totals) and totals[0] < totals[-1]


@pytest.mark.parametrize(
    ("model", "pattern"),
    [(model, "full") for model in [*MODELS, *RECURRENT]] + [("alibi", pattern) for pattern in PATTERNS],
)
def test_the_cache_changes_nothing(model: str, pattern: str) -> None:
    """Oracle: the decoder reads all tokens again for each next one."""
    model = opinionated(model, pattern, block_size=30)
    ids = sources(5)
    limits = [14, 13, 12, 9, 5]
    with_cache, without = (
        beam_search(model, ids, beam=4, alpha=1.0, limits=limits, cache=cache) for cache in (True, False)
    )
    for ours, theirs in zip(with_cache, without):
        assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-4)


def test_sentences_together_are_translated_as_each_alone_in_any_order_and_size_of_batch() -> None:
    model = opinionated("sinusoidal")
    ids = [row[row != PAD].tolist() for row in sources(8)]
    alone = [
        beam_search(model, torch.tensor([row]), beam=3, alpha=1.0, limits=[max_target_length(len(row), None)])[0][0]
        for row in ids
    ]
    for tokens in (1, 200, 10**6):
        assert translate_ids(model, ids, beam=3, alpha=1.0, tokens=tokens) == alone
    assert translate_ids(model, ids[::-1], beam=3, alpha=1.0) == alone[::-1]
    assert translate_ids(model, [], beam=3, alpha=1.0) == []


def test_a_batch_is_bounded_by_its_hypotheses_tokens_and_each_source_is_in_one() -> None:
    lengths = [5, 90, 7, 7, 31, 400, 2, 8, 8, 8]
    batches = list(batch_sources(lengths, beam=5, max_length=None, tokens=1000))
    assert sorted(index for chosen in batches for index in chosen) == list(range(10))
    for chosen in batches:
        most = sum(5 * max_target_length(lengths[index], None) for index in chosen)
        assert len(chosen) == 1 or most <= 1000
    assert [5] in batches  # which is too long for any
    assert max(map(len, batch_sources([3] * 50, beam=5, max_length=None, tokens=10**6, rows=35))) == 7


def test_no_translation_passes_its_limit_or_the_models_positions() -> None:
    model = opinionated("learned", block_size=8)
    with torch.no_grad():
        model.output.bias[END] = -50  # a model that never ends
    ids = [row[row != PAD].tolist() for row in sources(3, 12)]
    translations = translate_ids(model, ids, beam=2, alpha=1.0, max_length=model.max_length)
    assert all(len(translation) == 7 for translation in translations)  # and an <eos>
    free = opinionated("sinusoidal")
    with torch.no_grad():
        free.output.bias[END] = -50
    assert [len(row) for row in translate_ids(free, ids, beam=2, alpha=1.0)] == [2 * len(row) + 9 for row in ids]


def test_the_length_penalty_is_wu_et_als() -> None:
    """Equation 14, by hand."""
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == pytest.approx(2.0)
    assert length_penalty(19, 0.5) == pytest.approx(2.0)
    assert length_penalty(100, 0.0) == 1.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", [*MODELS, *RECURRENT])
def test_decoding_on_cuda_finds_what_the_cpu_finds(model: str) -> None:
    model = opinionated(model, block_size=30)
    ids, limits = sources(5), [14, 13, 12, 9, 5]
    expected = beam_search(model, ids, beam=3, alpha=1.0, limits=limits)
    on_cuda = beam_search(model.cuda(), ids.cuda(), beam=3, alpha=1.0, limits=limits)
    for ours, theirs in zip(on_cuda, expected):
        assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-3)
