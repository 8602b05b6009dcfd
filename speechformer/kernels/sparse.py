"""Sparse attention: only the pairs that a pattern allows, in blocks, so that time and memory grow with their number.

The queries are cut into blocks. `layout_of` finds from the pattern which keys the queries of each block can see, one
block after another, so it never builds a T x T tensor. `BlockAttention` then computes, for all blocks with a similar
number of keys at once,

    out = softmax(q k^T / sqrt(H) + bias) v    with k and v gathered for each block, and the log of the sum of exp

A pattern such as `strided` is a union of parts (`layers.patterns.parts`). Each part orders the tokens so that
neighbours see the same keys. The outputs of parts p are merged by their log-sum-exp l_p (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"):    out = sum_p exp(l_p - l) out_p,   l = log sum_p exp(l_p)

Shapes: see `speechformer.layers.attention`; P places (T tokens in the order of a part, then padding), G blocks of Q
queries, each with K keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechformer.layers.patterns import Pattern, parts

BLOCKS = (32, 64)  # queries of a block: fewer see fewer keys, more are faster for each pair
RUNS = (64, 32, 16, 1)  # keys that are gathered together
GATHER, BLOCK_COST = 1.0, 8.0  # time to gather a run, in keys, and time of a block, in queries; measured
CACHED = 1 << 18  # scores at once
KEPT = 1 << 24  # most weights of a group that are kept for the backward pass; more are computed again


@dataclass(frozen=True)
class Group:
    """Blocks of queries with a similar number of keys.

    Args:
        queries: places of the blocks, in units of Q, [G].
        keys: places of the runs of keys that each block sees, in units of `run`, [G, K / run].
        run: number of keys that are gathered together.
        i, j: positions of queries and keys, [G, Q, 1] and [G, 1, K].
        mask: which pairs the pattern allows, [G, Q, K].
    """

    queries: Tensor
    keys: Tensor
    run: int
    i: Tensor
    j: Tensor
    mask: Tensor

    def chunks(self, rows: int) -> list[slice]:
        """Return slices of the blocks whose scores, in so many sequences and heads, fit into a CPU's cache."""
        G, Q, K = self.mask.shape
        size = max(1, CACHED // (rows * Q * K))
        return [slice(start, start + size) for start in range(0, G, size)]

    def to(self, device: torch.device) -> Group:
        """Return the group on another device."""
        queries, keys, i, j, mask = (x.to(device) for x in (self.queries, self.keys, self.i, self.j, self.mask))
        return Group(queries, keys, self.run, i, j, mask)


@dataclass(frozen=True)
class Part:
    """A part of a pattern in blocks.

    Args:
        place: the position at each place, [P]; T is padding.
        block: Q.
        in_order: whether the places are the positions.
    """

    place: Tensor
    block: int
    groups: list[Group]
    in_order: bool

    def to(self, device: torch.device) -> Part:
        """Return the part on another device."""
        return Part(self.place.to(device), self.block, [group.to(device) for group in self.groups], self.in_order)

    def to_places(self, x_BNTH: Tensor) -> Tensor:
        """Return the tokens in the order of this part, then padding, [B, N, P, H]."""
        B, N, T, H = x_BNTH.shape
        if self.in_order and len(self.place) == T:
            return x_BNTH.contiguous()
        if self.in_order:
            return torch.nn.functional.pad(x_BNTH, (0, 0, 0, len(self.place) - T)).contiguous()
        rows = flat(self.place.clamp(max=T - 1), B * N, T)
        return x_BNTH.reshape(-1, H).index_select(0, rows).view(B, N, -1, H)

    def from_places(self, x_BNPH: Tensor, T: int) -> Tensor:
        """Return the tokens in their own order, without padding, [B, N, T, H]."""
        B, N, P, H = x_BNPH.shape
        if self.in_order:
            return x_BNPH if P == T else x_BNPH[:, :, :T]
        return x_BNPH.reshape(-1, H).index_select(0, flat(self.place.argsort()[:T], B * N, P)).view(B, N, T, H)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # autograd cannot save tensors made in inference mode
def layout_of(
    pattern: Pattern, T: int, causal: bool, device: torch.device, share: float = math.inf
) -> list[Part] | None:
    """Return the blocks of each part of a pattern over T tokens.

    None if they would hold more than this share of all pairs, times the number of parts, whose merging takes time.
    """
    with torch.device("cpu"):
        plans = [best_plan(part, stride, T, causal) for part, stride in parts(pattern)]
        if sum(plan.pairs for plan in plans) * len(plans) > share * T**2:
            return None
        layout = [plan.build() for plan in plans]
    return layout if device.type == "cpu" else [part.to(device) for part in layout]


def pairs_computed(layout: list[Part]) -> int:
    """Return the number of pairs of query and key in all blocks."""
    return sum(group.mask.numel() for part in layout for group in part.groups)


@dataclass(frozen=True)
class Plan:
    """Which blocks a part will have.

    Args:
        place, block: of the part.
        run: keys that are gathered together.
        runs: numbers of the runs that each block sees.
        in_order, pattern, T, causal: as for `Part` and `layout_of`.
    """

    place: Tensor
    block: int
    run: int
    runs: list[Tensor]
    in_order: bool
    pattern: Pattern
    T: int
    causal: bool

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The numbers of the blocks of each group."""
        return grouped([*map(len, self.runs)])

    @property
    def pairs(self) -> int:
        """The number of pairs in all groups."""
        return sum(len(own) * max(len(self.runs[k]) for k in own) for own in self.groups) * self.run * self.block

    def build(self) -> Part:
        """Build the part."""
        return Part(self.place, self.block, [self.group(blocks) for blocks in self.groups], self.in_order)

    def group(self, blocks: list[int]) -> Group:
        """Build a group of blocks; blocks with fewer runs repeat their first one, hidden by the mask."""
        rows = [self.runs[k] for k in blocks]
        most = max(map(len, rows))
        keys = torch.stack([torch.cat((own, own[:1].expand(most - len(own)))) for own in rows])
        is_first = torch.arange(most) < torch.tensor([len(own) for own in rows])[:, None]
        queries = torch.tensor(blocks)
        i = self.place.view(-1, self.block)[queries][:, :, None]
        j = self.place.view(-1, self.run)[keys].flatten(1)[:, None, :]
        mask = allowed(self.pattern, i, j, self.T, self.causal)
        mask = mask & is_first.repeat_interleave(self.run, dim=1)[:, None, :]
        return Group(queries, keys, self.run, i.clamp(max=self.T - 1), j.clamp(max=self.T - 1), mask)


def best_plan(pattern: Pattern, stride: int, T: int, causal: bool) -> Plan:
    """Return the plan of a part that costs least, by block size and run."""
    index = torch.arange(T)
    order = index if stride == 1 else torch.argsort(index % stride, stable=True)
    place = torch.nn.functional.pad(order, (0, -T % max(*BLOCKS, *RUNS)), value=T)
    keys, candidates = visible_keys(pattern, place, BLOCKS[0], T, causal), []
    for block in BLOCKS:
        joined = [keys[k : k + block // BLOCKS[0]] for k in range(0, len(keys), block // BLOCKS[0])]
        for run in RUNS:
            runs = [torch.unique(torch.cat(own) // run) for own in joined]
            cost = sum(map(len, runs)) * (run + GATHER) * (block + BLOCK_COST)
            candidates.append((cost, block, run, runs))
    _, block, run, runs = min(candidates, key=lambda own: own[0])
    return Plan(place, block, run, runs, stride == 1, pattern, T, causal)


def visible_keys(pattern: Pattern, place: Tensor, block: int, T: int, causal: bool) -> list[Tensor]:
    """Return for each block the places of the keys that any of its queries sees, ascending."""
    keys, is_sorted = [], bool((place.diff() >= 0).all())
    for queries in place.split(block):
        ahead = place[: int(queries[-1]) + 1] if is_sorted and causal else place
        mask = allowed(pattern, queries[:, None], ahead[None, :], T, causal)
        keys.append(mask.any(dim=0).nonzero()[:, 0])
    return keys


def allowed(pattern: Pattern, i: Tensor, j: Tensor, T: int, causal: bool) -> Tensor:
    """Return the mask of a part for queries i and keys j, where T is padding, which sees the last token."""
    i = i.clamp(max=T - 1)
    mask = pattern(i, j) & (j < T)
    return mask & (j <= i) if causal else mask


def grouped(sizes: list[int]) -> list[list[int]]:
    """Return groups of blocks by number of runs; a group takes smaller blocks if that costs less than a twentieth."""
    order = sorted((k for k, size in enumerate(sizes) if size), key=lambda k: -sizes[k])
    groups: list[list[int]] = []
    wasted = 0
    for k in order:
        largest = sizes[groups[-1][0]] if groups else 0
        if groups and (largest == sizes[k] or 20 * (wasted + largest - sizes[k]) <= sum(sizes)):
            wasted += largest - sizes[k]
            groups[-1].append(k)
        else:
            groups.append([k])
    return [sorted(own) for own in groups]


def take(x_BNPH: Tensor, rows: Tensor, size: int) -> Tensor:
    """Gather runs of `size` places, of which `rows` [G, runs] has the numbers: [B N G, places, H]."""
    B, N, P, H = x_BNPH.shape
    return x_BNPH.view(-1, size * H).index_select(0, flat(rows, B * N, P // size)).view(B * N * len(rows), -1, H)


def add(total_BNPH: Tensor, gathered: Tensor, rows: Tensor, size: int) -> None:
    """Add the gradients of gathered values to those of the places that `take` found them at."""
    B, N, P, H = total_BNPH.shape
    total_BNPH.view(-1, size * H).index_add_(0, flat(rows, B * N, P // size), gathered.view(-1, size * H))


def flat(rows: Tensor, copies: int, count: int) -> Tensor:
    """Return the numbers of rows in tensors of `count` rows that lie one after another."""
    return (torch.arange(0, copies * count, count, device=rows.device)[:, None] + rows.flatten()).flatten()


class BlockAttention(torch.autograd.Function):
    """Attention of the blocks of a group, and the log-sum-exp of each query's scores.

    Arguments of `apply`: q_BNPH (divided by sqrt(H)), k_BNPH, v_BNPH; the bias [1 or B, 1 or N, G, Q, K]; the
    dropout mask [B, N, G, Q, K] or None; the group; whether the log-sum-exp is needed.

    It returns the output, [B, N, G, Q, H], and the log-sum-exp, [B, N, G, Q] or None. With scores S, P = softmax(S),
    dropout mask M, output O and log-sum-exp l:

        dv = (P M)^T dO,   dP = M (dO v^T),   dS = P (dP - sum_j dP P + dl)

    It works on as many blocks at once as fit into a CPU's cache. For the backward pass it gathers queries, keys and
    values again. It keeps P unless that is larger than KEPT and than the bias, from which it is computed again, and
    always keeps M.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        dropout_mask: Tensor | None,
        group: Group,
        merged: bool,
    ) -> tuple[Tensor, Tensor | None]:
        (G, Q, K), (B, N, _, H) = group.mask.shape, q.shape
        output, log_sums = q.new_empty(B, N, G, Q, H), q.new_empty(B, N, G, Q) if merged else None
        saved: list[Tensor] = []
        stores = keeps_weights(B * N, bias, group)
        for blocks in group.chunks(B * N):
            weights, sums = weights_of(q, k, bias, group, blocks, merged)
            dropped = weights if dropout_mask is None else weights * dropout_mask[:, :, blocks]
            values = take(v, group.keys[blocks], group.run)
            output[:, :, blocks] = torch.bmm(dropped.view(-1, Q, K), values).view(B, N, -1, Q, H)
            if log_sums is not None and sums is not None:
                log_sums[:, :, blocks] = sums
            if stores:
                saved.append(weights)
        ctx.save_for_backward(q, k, v, None if stores else bias, dropout_mask, *saved)
        ctx.group, ctx.merged, ctx.bias_shape = group, merged, bias.shape
        return output, log_sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, dropout_mask, *saved = ctx.saved_tensors
        group: Group = ctx.group
        _, Q, K = group.mask.shape
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        dbias = q.new_empty(ctx.bias_shape) if ctx.needs_input_grad[3] else None
        with torch.autocast(q.device.type, enabled=False):
            for number, blocks in enumerate(group.chunks(q.shape[0] * q.shape[1])):
                weights = saved[number] if saved else weights_of(q, k, bias, group, blocks, ctx.merged)[0]
                queries, keys = group.queries[blocks][:, None], group.keys[blocks]
                dropped = weights if dropout_mask is None else weights * dropout_mask[:, :, blocks]
                own = grad[:, :, blocks].reshape(-1, Q, q.shape[-1])
                add(dv, torch.bmm(dropped.view(-1, Q, K).transpose(1, 2), own), keys, group.run)
                grad_weights = torch.bmm(own, take(v, keys, group.run).transpose(1, 2)).view_as(weights)
                if dropout_mask is not None:
                    grad_weights.mul_(dropout_mask[:, :, blocks])
                grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                if grad_log_sums is not None:
                    grad_scores.addcmul_(weights, grad_log_sums[:, :, blocks, :, None])
                if dbias is not None:
                    dbias[:, :, blocks] = grad_scores.sum_to_size(dbias[:, :, blocks].shape)
                grad_scores = grad_scores.view(-1, Q, K)
                add(dq, torch.bmm(grad_scores, take(k, keys, group.run)), queries, Q)
                add(dk, torch.bmm(grad_scores.transpose(1, 2), take(q, queries, Q)), keys, group.run)
        return dq, dk, dv, dbias, None, None, None


def keeps_weights(rows: int, bias: Tensor, group: Group) -> bool:
    """Return whether the weights of a group, in so many sequences and heads, are kept for the backward pass."""
    return max(KEPT, bias.numel()) >= rows * group.mask.numel()


def weights_of(
    q: Tensor, k: Tensor, bias: Tensor, group: Group, blocks: slice, merged: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of the scores of some blocks, [B, N, blocks, Q, K].

    Also their log-sum-exp, [B, N, blocks, Q], if it is needed.
    """
    (B, N, _, _), (_, Q, K) = q.shape, group.mask.shape
    queries, keys = take(q, group.queries[blocks][:, None], Q), take(k, group.keys[blocks], group.run)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(B, N, -1, Q, K).add_(bias[:, :, blocks])
    if not merged:
        return scores.softmax(dim=-1), None
    numbers = torch.finfo(scores.dtype)  # a part may have no key for a query
    largest = scores.amax(dim=-1, keepdim=True).clamp_(min=numbers.min)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(dim=-1, keepdim=True)
    return weights.div_(sums.clamp(min=numbers.tiny)), (sums.log() + largest)[..., 0]


def sparse_attention(
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    v_BNTH: Tensor,
    layout: list[Part],
    biases: list[list[Tensor]],
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the attention of a layout, [B, N, T, H].

    Half precision is computed in single precision: a softmax over parts needs more.

    Args:
        biases: for each group of each part, [1 or B, 1 or N, G, Q, K].
        dropout: applied to the weights.
    """
    B, N, T, H = q_BNTH.shape
    single = torch.promote_types(q_BNTH.dtype, torch.float32)
    outputs, log_sums = [], []
    with torch.autocast(q_BNTH.device.type, enabled=False):
        qkv = [q_BNTH.to(single) / math.sqrt(H), k_BNTH.to(single), v_BNTH.to(single)]
        for part, own in zip(layout, biases):
            placed = [part.to_places(x) for x in qkv]
            zero = q_BNTH.new_zeros((), dtype=single)
            blocks = zero.expand(B, N, len(part.place) // part.block, part.block, H)
            sums = blocks.new_full(blocks.shape[:-1], -math.inf)
            for group, bias in zip(part.groups, own):
                shape = (B, N, *group.mask.shape)
                mask = None if dropout is None else dropout(blocks.new_ones(shape))
                output, log_sum = BlockAttention.apply(*placed, bias.to(single), mask, group, len(layout) > 1)
                if len(group.queries) == blocks.shape[2]:
                    blocks, sums = output, log_sum
                    continue
                blocks = blocks.index_copy(2, group.queries, output)
                sums = sums if log_sum is None else sums.index_copy(2, group.queries, log_sum)
            outputs.append(part.from_places(blocks.flatten(2, 3), T))
            log_sums.append(None if sums is None else part.from_places(sums.flatten(2, 3)[..., None], T))
        if len(layout) == 1:
            return outputs[0].to(q_BNTH.dtype)
        total = torch.stack(log_sums).logsumexp(dim=0)
        merged = [(own - total).exp() * output for own, output in zip(log_sums, outputs)]
        return functools.reduce(torch.add, merged).to(q_BNTH.dtype)
