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
from speechformer.models.encoder_decoder import Translator
from speechformer.models.stack import select

# These bound the memory of a batch: the tokens that its hypotheses can reach, and the logits of one step.
BATCH_TOKENS = 32768
STEP_LOGITS = 2**23


def length_penalty(length: Any, alpha: float) -> Any:
    """Return lp of hypotheses of `length` tokens, <eos> included; `length` is a number or a tensor."""
    return ((5 + length) / 6) ** alpha


def max_target_length(tokens: int, max_length: int | None) -> int:
    """Return the most tokens, <eos> included, that the translation of a source of `tokens` tokens may have."""
    return min(2 * tokens + 10, max_length or 2 * tokens + 10)


class BeamSearch:
    """The state of a search; `beam_search` documents the arguments.

    Attributes:
        best: the best finished translation of each source, and its score.
        open_B: the sources that are not done; the other tensors have a row for each of them.
    """

    def __init__(
        self, models: Sequence[Translator], source_BS: Tensor, beam: int, alpha: float, limits: Sequence[int]
    ) -> None:
        B, device = len(source_BS), source_BS.device
        self.models, self.K, self.alpha = models, beam, alpha
        self.memories = [model.encode(source_BS) for model in self.models]
        rows = torch.arange(B, device=device).repeat_interleave(beam)
        self.pasts = [select(model.past(memory), rows) for model, memory in zip(self.models, self.memories)]
        self.best: list[tuple[list[int], float]] = [([], -math.inf)] * B
        self.open_B = torch.arange(B, device=device)
        self.limit_B = torch.tensor(limits, device=device)
        self.finished_B = torch.zeros(B, dtype=torch.long, device=device)
        self.best_B = torch.full((B,), -math.inf, device=device)
        self.score_BK = torch.full((B, beam), -math.inf, device=device)
        self.score_BK[:, 0] = 0  # at first all hypotheses are equal, so only the first one counts
        self.ids_BKT = torch.full((B, beam, 1), BEGIN, device=device)

    def log_probabilities(self, length: int) -> Tensor:
        """Return the log-probabilities of the next token, [B, K, V]: at its limit a hypothesis can only end."""
        last = self.ids_BKT.flatten(0, 1)[:, -1:]
        states = zip(self.models, self.memories, self.pasts)
        each = [model.output(model.decode(memory, last, past)[:, -1]) for model, memory, past in states]
        logs = torch.stack([logits.float().log_softmax(dim=-1) for logits in each])
        log_RV = logs.logsumexp(dim=0) - math.log(len(each))
        log_BKV = log_RV.unflatten(0, (len(self.open_B), self.K))
        log_BKV[..., [PAD, BEGIN]] = -math.inf
        at_limit = self.limit_B <= length
        if at_limit.any():
            ends = log_BKV[..., END].clone()
            log_BKV[at_limit] = -math.inf
            log_BKV[..., END] = ends
        return log_BKV

    def step(self, length: int) -> bool:
        """Extend the hypotheses to `length` tokens; return whether any source is still open."""
        K, log_BKV = self.K, self.log_probabilities(length)
        V = log_BKV.shape[-1]
        total = (self.score_BK[:, :, None] + log_BKV).flatten(1)
        value, place = total.topk(min(2 * K, K * V), dim=1)
        hypothesis, token = place // V, place % V
        self.finish(value, hypothesis, token, length)
        # The K best that do not end, in their order; if there are fewer, hypotheses of score -inf fill the row.
        value = value.masked_fill(token == END, -math.inf)
        self.score_BK, unfinished = value.topk(K, dim=1)
        possible = self.score_BK[:, 0] / length_penalty(self.limit_B, self.alpha)
        done = (self.finished_B >= K) | (self.best_B >= possible) | (self.limit_B <= length)
        still_open = (~done).nonzero().flatten()
        if len(still_open):
            self.keep(
                still_open, hypothesis.gather(1, unfinished)[still_open], token.gather(1, unfinished)[still_open]
            )
        return len(still_open) > 0

    def finish(self, value: Tensor, hypothesis: Tensor, token: Tensor, length: int) -> None:
        """Record the hypotheses among the K best that end at `length` tokens."""
        ended = (token == END) & value.isfinite()
        ended[:, self.K :] = False
        score = (value / length_penalty(length, self.alpha)).masked_fill(~ended, -math.inf)
        self.finished_B += ended.sum(dim=1)
        top, where = score.max(dim=1)
        for b in (top > self.best_B).nonzero().flatten().tolist():
            ids = self.ids_BKT[b, hypothesis[b, where[b]], 1:].tolist()
            self.best[int(self.open_B[b])] = (ids, float(top[b]))
        self.best_B = torch.maximum(self.best_B, top)

    def keep(self, sources: Tensor, hypothesis: Tensor, token: Tensor) -> None:
        """Continue with these sources, and in each with these hypotheses, extended by these tokens."""
        rows = (sources[:, None] * self.K + hypothesis).flatten()
        self.pasts = [select(past, rows) for past in self.pasts]
        ids_BKT = self.ids_BKT.flatten(0, 1)[rows].unflatten(0, (len(sources), self.K))
        self.ids_BKT = torch.cat((ids_BKT, token[..., None]), dim=2)
        self.score_BK = self.score_BK[sources]
        if len(sources) < len(self.open_B):
            self.memories = [select(memory, sources) for memory in self.memories]
            self.open_B = self.open_B[sources]
            self.limit_B, self.finished_B = self.limit_B[sources], self.finished_B[sources]
            self.best_B = self.best_B[sources]


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
    search = BeamSearch(models, source_BS, beam, alpha, limits)
    for length in range(1, max(limits) + 1):
        if not search.step(length):
            break
    return search.best


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
