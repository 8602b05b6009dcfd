"""Sparse attention: only the keys that a pattern shows to a block of queries, so that time grows with their number.

The queries are cut into blocks of neighbours. `layout_of` finds from the pattern which keys the queries of each block
can see, one block after another, so nothing is ever built for all pairs.

A pattern such as `strided` is a union of parts (`layers.patterns.parts`). Each part orders the queries so that
neighbours see the same keys. The outputs of parts p are merged by their log-sum-exp l_p (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"):    out = sum_p exp(l_p - l) out_p,   l = log sum_p exp(l_p)

Shapes: see `speechformer.layers.attention`; a block has Q queries and K keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.layers.attention import (
    Attention,
    Pairs,
    Places,
    SelfAttention,
    attention_reference,
    gate_bias,
)
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern, all_pairs, parts

BLOCK = 64  # queries of a block: fewer see fewer keys, more are faster for each pair
OVERHEAD = 64  # time of a block beside that of its pairs, in keys
HIDDEN = -1e30  # in place of -inf, because a part may have no key for a query


@dataclass(frozen=True)
class Part:
    """A part of a pattern, its queries in the order of their blocks, and the keys of each block; all are indices."""

    pattern: Pattern
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]

    @functools.cached_property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """The queries of all blocks, and the inverse of that order; None if they are in order."""
        queries = torch.cat(self.queries)
        return None if bool((queries.diff() == 1).all()) else (queries, queries.argsort())

    @functools.cached_property
    def all_keys(self) -> Tensor:
        """The keys of one block after another."""
        return torch.cat(self.keys)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # autograd cannot save tensors made in inference mode
def layout_of(pattern: Pattern, T: int, causal: bool, device: torch.device, share: float) -> list[Part] | None:
    """Return the parts of a pattern over T tokens in blocks; None if these cost more than a share of all pairs."""
    if pattern is all_pairs:
        return None
    index, layout, cost = torch.arange(T), [], 0
    for part, stride in parts(pattern):
        queries, keys = torch.argsort(index % stride, stable=True).split(BLOCK), []
        for i in queries:
            mask = part(i[:, None], index)
            keys.append((mask & (index <= i[:, None]) if causal else mask).any(dim=0).nonzero()[:, 0])
            cost += len(i) * (len(keys[-1]) + OVERHEAD)
        layout.append(Part(part, tuple(i.to(device) for i in queries), tuple(j.to(device) for j in keys)))
    return layout if cost * len(layout) <= share * T**2 else None


class SparseBlocks(Attention):
    """Attention in blocks.

    Args:
        layout: of the pattern; see `layout_of`.
    """

    def __init__(self, pairs: Pairs, layout: list[Part], places: Places | None = None) -> None:
        super().__init__(None, pairs, places)
        self.layout = layout
        self.biases = [
            [pairs.bias(i[:, None], j[None], part.pattern).clamp(min=HIDDEN) for i, j in zip(part.queries, part.keys)]
            for part in layout
        ]

    def __call__(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        dropout: Dropout,
        gates_BNS: Tensor | None = None,
        mechanism: SelfAttention | None = None,
    ) -> tuple[Tensor, None]:
        """Compute attention in single precision at least: a softmax over parts needs more than half."""
        dtype = torch.promote_types(q_BNTH.dtype, torch.float32)
        q, k, v = (x.to(dtype) for x in (q_BNTH, k_BNSH, v_BNSH))
        outputs, log_sums = [], []
        with torch.autocast(q.device.type, enabled=False):
            for part, biases in zip(self.layout, self.biases):
                output, log_sum = self.of_part(q, k, v, part, biases, dropout, gates_BNS)
                outputs.append(output if part.order is None else output[:, :, part.order[1]])
                log_sums.append(log_sum if part.order is None else log_sum[:, :, part.order[1]])
            if len(outputs) > 1:
                shares = torch.stack(log_sums).softmax(dim=0)
                outputs = [(shares * torch.stack(outputs)).sum(dim=0)]
        return outputs[0].to(q_BNTH.dtype), None

    def of_part(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: Part,
        biases: list[Tensor],
        dropout: Dropout,
        gates_BNS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of a part for queries in its order, and the log-sum-exp of their scores, if needed."""
        q = q if part.order is None else q[:, :, part.order[0]]
        sizes = [len(keys) for keys in part.keys]
        k, v = (x.index_select(2, part.all_keys).split(sizes, dim=2) for x in (k, v))  # the gradient is one sum
        outputs, log_sums = [], []
        blocks = zip(q.split(BLOCK, dim=2), k, v, biases, part.queries, part.keys)
        for q_block, k_block, v_block, bias, i, j in blocks:
            if gates_BNS is not None:
                bias = bias + gate_bias(gates_BNS, i[:, None], j[None])
            bias = bias.to(q.dtype)
            if len(self.layout) > 1:
                scores = q_block @ k_block.mT / math.sqrt(q.shape[-1]) + bias
                log_sums.append(scores.logsumexp(dim=-1, keepdim=True))
                outputs.append(dropout(scores.softmax(dim=-1)) @ v_block)
            elif dropout.active_rate:
                outputs.append(attention_reference(q_block, k_block, v_block, bias, dropout)[0])
            else:
                outputs.append(F.scaled_dot_product_attention(q_block, k_block, v_block, bias))
        output = torch.cat(outputs, dim=2)
        return output, torch.cat(log_sums, dim=2) if log_sums else output
