"""Beam search against a naive one in loops, against all translations there are, and with a cache against without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import BAHDANAU
from test_encoder_decoder import translator

from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.generation.beam_search import (
    batch_sources,
    beam_search,
    length_penalty,
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
def naive_search(models: Any, source: torch.Tensor, beam: int, alpha: float, limit: int) -> tuple[float, list[int]]:
    """The definition in loops, for one source; a beam of 1 is greedy, and one of 5^limit tries all translations.

    The `beam` best continuations that do not end go on. One that ends among the `beam` best is finished. The search
    ends with `beam` finished ones, or at the limit, where hypotheses can only end.
    """
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        tokens = [END] if length == limit else [token for token in range(TINY) if token not in (PAD, BEGIN)]
        extended = []
        for total, ids in hypotheses:
            each = [model(source[None], torch.tensor([[BEGIN, *ids]]))[0, -1].softmax(dim=-1) for model in models]
            log = torch.stack(each).mean(dim=0).log()
            extended += [(total + float(log[token]), [*ids, token]) for token in tokens]
        extended.sort(reverse=True)
        ended = [(total, ids[:-1]) for total, ids in extended[:beam] if ids[-1] == END]
        finished += [(total / length_penalty(length, alpha), ids) for total, ids in ended]
        hypotheses = [(total, ids) for total, ids in extended if ids[-1] != END][:beam]
        if len(finished) >= beam:
            break
    return max(finished)


@pytest.mark.parametrize("names", [["sinusoidal"], ["rnn"], ["rnn_attention"], ["alibi", BAHDANAU, "rope"]])
def test_the_search_is_the_naive_one(names: list[str]) -> None:
    models, ids, lengths = [opinionated(name) for name in names], sources(6), set()
    for beam, alpha, limit in ((1, 1.0, 3), (1, 1.0, 12), (2, 0.0, 12), (4, 3.0, 12), (125, 0.6, 3)):
        lengths |= compare(models, ids, beam, alpha, limit)
    assert len(lengths) > 2  # some end by themselves


def compare(models: list[Any], ids: torch.Tensor, beam: int, alpha: float, limit: int) -> set[int]:
    """Compare the search with the naive one; return the lengths of the translations."""
    translations = beam_search(models, ids, beam=beam, alpha=alpha, limits=[limit] * len(ids))
    for row, (translation, score) in zip(ids, translations, strict=True):
        expected_score, expected = naive_search(models, row[row != PAD], beam, alpha, limit)
        assert translation == expected and score == pytest.approx(expected_score, abs=1e-4)
    return {len(translation) for translation, _ in translations}


def test_sentences_together_are_translated_as_each_alone_in_any_order_and_size_of_batch() -> None:
    model = opinionated("sinusoidal")
    ids = [row[row != PAD].tolist() for row in sources(8)]
    alone = [translate_ids([model], [row], beam=3, alpha=1.0)[0] for row in ids]
    for tokens in (1, 200, 10**6):
        assert translate_ids([model], ids, beam=3, alpha=1.0, tokens=tokens) == alone
    assert translate_ids([model], ids[::-1], beam=3, alpha=1.0) == alone[::-1]
    assert translate_ids([model], [], beam=3, alpha=1.0) == []


def test_a_batch_is_bounded_by_its_hypotheses_tokens_and_each_source_is_in_one() -> None:
    lengths = [5, 90, 7, 7, 31, 400, 2, 8, 8, 8]
    batches = list(batch_sources(lengths, beam=5, max_length=None, tokens=1000))
    assert sorted(itertools.chain(*batches)) == list(range(10)) and [5] in batches  # which is too long for any
    for batch in batches:
        assert len(batch) == 1 or 5 * len(batch) * (2 * max(lengths[index] for index in batch) + 10) <= 1000
    assert max(map(len, batch_sources([3] * 50, beam=5, max_length=None, tokens=10**6, rows=35))) == 7


@torch.no_grad()
def test_no_translation_passes_its_limit_or_the_models_positions() -> None:
    """A model that never ends writes 2 S + 10 tokens for a source of S, <eos> included, or as many as it can."""
    ids = [row[row != PAD].tolist() for row in sources(3, 12)]
    for name, expected in (("learned", [7] * 3), ("sinusoidal", [2 * len(row) + 9 for row in ids])):
        model = opinionated(name, block_size=8)
        model.output.bias[END] = -50
        translations = translate_ids([model], ids, beam=2, alpha=1.0, max_length=model.max_length)
        assert [len(translation) for translation in translations] == expected


def test_the_length_penalty_is_wu_et_als() -> None:
    """Equation 14, by hand."""
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == pytest.approx(2.0)
    assert length_penalty(19, 0.5) == pytest.approx(2.0)
    assert length_penalty(100, 0.0) == 1.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_decoding_on_cuda_finds_what_the_cpu_finds() -> None:
    model, ids = opinionated("rope"), sources(5)
    expected = translate_ids([model], ids.tolist(), beam=3, alpha=1.0)
    assert translate_ids([model.cuda()], ids.tolist(), beam=3, alpha=1.0) == expected
