"""Finding a translation under a model: beam search, of which greedy search is the beam of 1.

    score(Y) = log P(Y | X) / lp(Y),   lp(Y) = ((5 + |Y|) / 6)^alpha

Wu et al. 2016, "Google's Neural Machine Translation System", equation 14; |Y| counts the <eos>. With alpha = 0 the
most probable translation is looked for, which is often too short; 0.6 to 1 are usual.

Shapes: B sources, K hypotheses of each (the beam), V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechformer.corpora.special_tokens import BEGIN, END, PAD
from speechformer.models.encoder_decoder import Translator

TOKENS_AT_ONCE = 32768  # that the hypotheses of a batch can come to; with LOGITS_AT_ONCE what bounds the memory
LOGITS_AT_ONCE = 2**23  # of one step


def length_penalty(length: Any, alpha: float) -> Any:
    """lp of a hypothesis of so many tokens, its <eos> included; of a tensor of lengths, of each."""
    return ((5 + length) / 6) ** alpha


def limit_of(tokens: int, max_length: int | None) -> int:
    """The most tokens that the translation of a source of so many has, its <eos> included: twice as many and ten, and
    no more than the model's positions."""
    return min(2 * tokens + 10, max_length or 2 * tokens + 10)


@torch.no_grad()
def search(
    model: Translator, source_BS: Tensor, *, beam: int, alpha: float, limits: Sequence[int], cache: bool = True
) -> list[tuple[list[int], float]]:
    """The best translation found of each source, as ids without <bos> and <eos>, and its score.

    At each step the 2K best continuations of a source's K hypotheses are looked at. One that ends is a finished
    translation if it is among the K best; the K best that do not end go on. A source is done when it has K finished
    ones, or when no unfinished one can become better than the best. Every translation ends within its limit: there
    <eos> is the only choice.

    Args:
        source_BS: ids, padded with 0.
        alpha: of the length penalty, at least 0.
        limits: the most tokens of each translation, its <eos> included.
        cache: whether the decoder keeps what it has computed of the tokens so far; without, it reads all of them
            again for each next one, which gives the same and is for comparison.
    """
    device, K = source_BS.device, beam
    memory = model.encode(source_BS)
    past = select(model.past(memory), torch.arange(len(source_BS), device=device).repeat_interleave(K))
    remaining = torch.arange(len(source_BS), device=device)  # the sources that are not done
    limit_B = torch.tensor(limits, device=device)
    found: list[tuple[list[int], float]] = [([], -math.inf)] * len(source_BS)
    finished_B = torch.zeros(len(source_BS), dtype=torch.long, device=device)
    best_B = torch.full((len(source_BS),), -math.inf, device=device)
    score_BK = torch.full((len(source_BS), K), -math.inf, device=device)
    score_BK[:, 0] = 0  # all K are alike at first, so one of them stands for all
    ids_BKT = torch.full((len(source_BS), K, 1), BEGIN, device=device)

    for length in range(1, max(limits) + 1):
        B = len(remaining)
        rows = ids_BKT.flatten(0, 1)
        states = model.decode(memory, rows[:, -1:], past) if cache else model.decode(memory, rows)
        log_BKV = model.output(states[:, -1]).float().log_softmax(dim=-1).unflatten(0, (B, K))
        V = log_BKV.shape[-1]
        log_BKV[..., [PAD, BEGIN]] = -math.inf
        at_limit = limit_B <= length
        if at_limit.any():
            ends = log_BKV[..., END].clone()
            log_BKV[at_limit] = -math.inf
            log_BKV[..., END] = ends
        total = (score_BK[:, :, None] + log_BKV).flatten(1)
        value, place = total.topk(min(2 * K, K * V), dim=1)
        hypothesis, token = place // V, place % V

        ended = (token == END) & value.isfinite()
        ended[:, K:] = False
        score = (value / length_penalty(length, alpha)).masked_fill(~ended, -math.inf)
        finished_B += ended.sum(dim=1)
        top, where = score.max(dim=1)
        for b in (top > best_B).nonzero().flatten().tolist():
            ids = ids_BKT[b, hypothesis[b, where[b]], 1:].tolist()
            found[int(remaining[b])] = (ids, float(top[b]))
        best_B = torch.maximum(best_B, top)

        # the K best that go on, in their order; where there are fewer, hypotheses of no chance fill the row
        value = value.masked_fill(token == END, -math.inf)
        score_BK, kept = value.topk(K, dim=1)
        hypothesis, token = hypothesis.gather(1, kept), token.gather(1, kept)
        possible = score_BK[:, 0] / length_penalty(limit_B, alpha)
        done = (finished_B >= K) | (best_B >= possible) | at_limit

        going = (~done).nonzero().flatten()
        if len(going) == 0:
            break
        hypothesis, token = hypothesis[going], token[going]
        rows_before = (going[:, None] * K + hypothesis).flatten()
        past = select(past, rows_before)
        ids_BKT = torch.cat(
            (ids_BKT.flatten(0, 1)[rows_before].unflatten(0, (len(going), K)), token[..., None]), dim=2
        )
        score_BK = score_BK[going]
        if len(going) < B:
            memory, remaining = memory.select(going), remaining[going]
            limit_B, finished_B, best_B = limit_B[going], finished_B[going], best_B[going]
    return found


def select(past: list[dict[str, Tensor]], rows: Tensor) -> list[dict[str, Tensor]]:
    """What a decoder has seen, for some of its rows."""
    return [{name: part[rows] for name, part in layer.items()} for layer in past]


def batches(
    lengths: Sequence[int], beam: int, max_length: int | None, tokens: int = TOKENS_AT_ONCE, rows: int = 10**9
) -> Iterator[list[int]]:
    """The sources as lists of indices, alike in length. The hypotheses of a list are at most `rows`, and can come to
    at most `tokens` tokens (a source that is too long for that is alone)."""
    chosen: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        hypotheses = (len(chosen) + 1) * beam  # the max_length is the last
        if chosen and (hypotheses > rows or hypotheses * limit_of(lengths[index], max_length) > tokens):
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


def translate_ids(
    model: Translator,
    sources: Sequence[Sequence[int]],
    *,
    beam: int,
    alpha: float,
    max_length: int | None = None,
    cache: bool = True,
    tokens: int = TOKENS_AT_ONCE,
) -> list[list[int]]:
    """The translations of sources (ids with their <eos>), in the same order.

    A source of more tokens than the model has positions is cut there; `max_length` is that number, None for no limit.
    """
    device = model.output.weight.device
    sources = [list(source[:max_length]) for source in sources]
    found: list[list[int]] = [[] for _ in sources]
    rows = LOGITS_AT_ONCE // model.output.out_features
    for chosen in batches([len(source) for source in sources], beam, max_length, tokens, rows):
        ids = pad_sequence([torch.tensor(sources[k]) for k in chosen], batch_first=True, padding_value=PAD)
        limits = [limit_of(len(sources[k]), max_length) for k in chosen]
        translations = search(model, ids.to(device), beam=beam, alpha=alpha, limits=limits, cache=cache)
        for k, (translation, _) in zip(chosen, translations):
            found[k] = translation
    return found
