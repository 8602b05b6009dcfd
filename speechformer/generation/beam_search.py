"""Beam search for translations; greedy search is a beam of 1.

    score(Y) = log P(Y | X) / lp(Y),   lp(Y) = ((5 + |Y|) / 6)^alpha

Wu et al. 2016, "Google's Neural Machine Translation System", equation 14; |Y| counts the <eos>. alpha = 0 searches
the most probable translation, which is often too short; 0.6 to 1 are usual. With several models, the probability of a
token is the mean of theirs (Sutskever et al. 2014, table 1).

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
from speechformer.models.encoder_decoder import Memory, Translator
from speechformer.models.stack import Cache, select

# These bound the memory of a batch: the tokens that its hypotheses can reach, and the logits of one step.
BATCH_TOKENS = 32768
STEP_LOGITS = 2**23


def length_penalty(length: Any, alpha: float) -> Any:
    """Return lp of hypotheses of `length` tokens, <eos> included; `length` is a number or a tensor."""
    return ((5 + length) / 6) ** alpha


def max_target_length(tokens: int, max_length: int | None) -> int:
    """Return the most tokens, <eos> included, that the translation of a source of `tokens` tokens may have."""
    return min(2 * tokens + 10, max_length or 2 * tokens + 10)


@torch.no_grad()
def beam_search(
    models: Sequence[Translator], source_BS: Tensor, *, beam: int, alpha: float, limits: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Return the best translation found of each source, as ids without <bos> and <eos>, and its score.

    Each step considers the 2K best continuations of a source's K hypotheses. One that ends is a finished translation
    if it is among the K best; the K best that do not end continue. A source is done when it has K finished
    translations, or when no unfinished one can score higher than the best.

    Args:
        models: one or more with the same vocabulary.
        source_BS: ids, padded with 0.
        alpha: of the length penalty, at least 0.
        limits: the most tokens of each translation, <eos> included.
    """
    (B, _), K, device = source_BS.shape, beam, source_BS.device
    memories = [model.encode(source_BS) for model in models]
    rows = torch.arange(B, device=device).repeat_interleave(K)
    pasts = [select(model.past(memory), rows) for model, memory in zip(models, memories)]
    best: list[tuple[list[int], float]] = [([], -math.inf)] * B
    # the sources that are not done; each of the other tensors has a row for each of them
    open_B, limit_B = torch.arange(B, device=device), torch.tensor(limits, device=device)
    finished_B, best_B = torch.zeros_like(open_B), torch.full((B,), -math.inf, device=device)
    score_BK = torch.full((B, K), -math.inf, device=device)
    score_BK[:, 0] = 0  # at first all hypotheses are equal, so only the first one counts
    ids_BKT = torch.full((B, K, 1), BEGIN, device=device)
    for length in range(1, max(limits) + 1):
        log_BKV = next_logs(models, memories, pasts, ids_BKT)
        V, at_limit_B = log_BKV.shape[-1], limit_B <= length
        can_only_end = at_limit_B[:, None] & (torch.arange(V, device=device) != END)
        total = (score_BK[:, :, None] + log_BKV.masked_fill(can_only_end[:, None], -math.inf)).flatten(1)
        value, place = total.topk(min(2 * K, K * V), dim=1)
        hypothesis, token = place // V, place % V
        # those among the K best that end
        ended = (token == END) & value.isfinite()
        ended[:, K:] = False
        finished_B += ended.sum(dim=1)
        top, where = (value / length_penalty(length, alpha)).masked_fill(~ended, -math.inf).max(dim=1)
        for b in (top > best_B).nonzero().flatten().tolist():
            best[int(open_B[b])] = (ids_BKT[b, hypothesis[b, where[b]], 1:].tolist(), float(top[b]))
        best_B = torch.maximum(best_B, top)
        # the K best that do not end, in their order; if there are fewer, hypotheses of score -inf fill the row
        score_BK, unfinished = value.masked_fill(token == END, -math.inf).topk(K, dim=1)
        possible_B = score_BK[:, 0] / length_penalty(limit_B, alpha)
        kept = (~((finished_B >= K) | (best_B >= possible_B) | at_limit_B)).nonzero().flatten()
        if not len(kept):
            break
        hypothesis, token = (x.gather(1, unfinished)[kept] for x in (hypothesis, token))
        rows = (kept[:, None] * K + hypothesis).flatten()
        pasts = [select(past, rows) for past in pasts]
        ids_BKT = torch.cat((ids_BKT.flatten(0, 1)[rows].unflatten(0, (-1, K)), token[..., None]), dim=2)
        if len(kept) < len(open_B):
            memories = [select(memory, kept) for memory in memories]
        state = (open_B, limit_B, finished_B, best_B, score_BK)
        open_B, limit_B, finished_B, best_B, score_BK = (x[kept] for x in state)
    return best


def next_logs(
    models: Sequence[Translator], memories: Sequence[Memory], pasts: Sequence[Cache], ids_BKT: Tensor
) -> Tensor:
    """Return the log-probabilities of the next token, [B, K, V]."""
    B, K, _ = ids_BKT.shape
    last, states = ids_BKT.flatten(0, 1)[:, -1:], zip(models, memories, pasts)
    each = [model.output(model.decode(memory, last, past)[:, -1]) for model, memory, past in states]
    logs = torch.stack([logits.float().log_softmax(dim=-1) for logits in each])
    log_BKV = (logs.logsumexp(dim=0) - math.log(len(each))).unflatten(0, (B, K))
    log_BKV[..., [PAD, BEGIN]] = -math.inf
    return log_BKV


def batch_sources(
    lengths: Sequence[int], beam: int, max_length: int | None, tokens: int = BATCH_TOKENS, rows: int = 10**9
) -> Iterator[list[int]]:
    """Yield the indices of the sources in batches of similar length.

    The hypotheses of a batch number at most `rows`, and can reach at most `tokens` tokens, unless it has one source.
    """
    chosen: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        hypotheses = (len(chosen) + 1) * beam  # this source is the longest so far
        if chosen and (hypotheses > rows or hypotheses * max_target_length(lengths[index], max_length) > tokens):
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


def translate_ids(
    models: Sequence[Translator],
    sources: Sequence[Sequence[int]],
    *,
    beam: int,
    alpha: float,
    max_length: int | None = None,
    tokens: int = BATCH_TOKENS,
) -> list[list[int]]:
    """Translate sources (ids that end with <eos>) by `beam_search`; return the translations in the same order.

    Sources longer than `max_length`, the positions of the model, are cut; None is no limit.
    """
    sources = [list(source[:max_length]) for source in sources]
    translations: list[list[int]] = [[] for _ in sources]
    output = models[0].output
    rows, device = STEP_LOGITS // (output.out_features * len(models)), output.weight.device
    for chosen in batch_sources([len(source) for source in sources], beam, max_length, tokens, rows):
        ids = pad_sequence([torch.tensor(sources[k]) for k in chosen], batch_first=True, padding_value=PAD)
        limits = [max_target_length(len(sources[k]), max_length) for k in chosen]
        best = beam_search(models, ids.to(device), beam=beam, alpha=alpha, limits=limits)
        for k, (translation, _) in zip(chosen, best):
            translations[k] = translation
    return translations
