"""Sparse attention: only the pairs that a pattern allows, in blocks, so that time and memory grow with their number.

The queries are cut into blocks. `layout_of` finds from the pattern which keys the queries of each block can see, one
block after another, so it never builds a T x T tensor. `BlockAttention` then computes, for as many blocks with a
similar number of keys at once as fit into a CPU's cache, or on another device many,

    out = softmax(q k^T / sqrt(H) + bias) v    with k and v gathered for each block, and the log of the sum of exp

A pattern such as `strided` is a union of parts (`layers.patterns.parts`). Each part orders the tokens so that
neighbours see the same keys. The outputs of parts p are merged by their log-sum-exp l_p (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"):    out = sum_p exp(l_p - l) out_p,   l = log sum_p exp(l_p)

Shapes: see `speechformer.layers.attention`; P places (T tokens in the order of a part, then padding), G blocks of Q
queries, each with K keys.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speechformer.layers.patterns import Pattern, parts

BLOCKS = (32, 64)  # queries of a block: fewer see fewer keys, more are faster for each pair
RUNS = (64, 32, 16, 1)  # keys that are gathered together
GATHER, BLOCK_COST = 0.5, 24.0  # time to gather a run, in keys, and time of a block, in queries; measured
CACHED = 1 << 18  # scores at once on a CPU, whose cache holds them
AT_ONCE = 1 << 26  # scores at once elsewhere, where many small products take longer than few large ones
KEPT = 1 << 24  # most weights of a group that are kept for the backward pass; more are computed again


class Chunk(NamedTuple):
    """What is computed at once: in one sequence b, all blocks of some heads, or some blocks of one head.

    `blocks` are numbers in the group, `queries` numbers in the part; `keys`, Q and `run` are as for `Group`.
    """

    b: int
    heads: slice
    blocks: slice
    queries: slice | Tensor
    keys: Tensor
    Q: int
    run: int

    def pairs(self, x: Tensor) -> Tensor:
        """Return what belongs to the pairs of x, [1 or B, 1 or N, G, Q, K], as [heads or 1, blocks, Q, K]."""
        x = x[self.b if len(x) > 1 else 0]
        return (x[self.heads] if len(x) > 1 else x)[:, self.blocks]

    def in_blocks(self, x_BNPH: Tensor) -> Tensor:
        """Return a view of the heads, [heads, P / Q, Q, H]."""
        x = x_BNPH[self.b, self.heads]
        return x.view(len(x), -1, self.Q, x.shape[-1])

    def take_queries(self, x_BNPH: Tensor) -> Tensor:
        """Return the places of the queries, [heads blocks, Q, H]; of one head a view if they follow one another."""
        return self.in_blocks(x_BNPH)[:, self.queries].reshape(-1, self.Q, x_BNPH.shape[-1])

    def put_queries(self, x_BNPH: Tensor, values: Tensor) -> None:
        """Write the places of the queries."""
        x = self.in_blocks(x_BNPH)
        x[:, self.queries] = values.view(len(x), -1, *x.shape[2:])

    def key_rows(self, x_BNPH: Tensor) -> tuple[Tensor, Tensor]:
        """Return a view of the heads in rows of a run, and the numbers of the rows that hold the keys."""
        x = x_BNPH[self.b, self.heads]
        count = x.shape[1] // self.run
        return x.view(len(x) * count, -1), flat(self.keys, len(x), count)

    def take_keys(self, x_BNPH: Tensor) -> Tensor:
        """Gather the places of the keys, [heads blocks, K, H]."""
        rows, numbers = self.key_rows(x_BNPH)
        return rows.index_select(0, numbers).view(-1, self.keys.shape[1] * self.run, x_BNPH.shape[-1])

    def add_keys(self, total_BNPH: Tensor, values: Tensor) -> None:
        """Add values, [heads blocks, K, H], to the places that `take_keys` finds."""
        rows, numbers = self.key_rows(total_BNPH)
        rows.index_add_(0, numbers, values.view(-1, rows.shape[1]))


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

    @functools.cached_property
    def first(self) -> int | None:
        """The number of the first block if the others follow one another, else None."""
        numbers = self.queries.tolist()
        return numbers[0] if numbers == [*range(numbers[0], numbers[0] + len(numbers))] else None

    def chunks(self, B: int, N: int) -> Iterator[Chunk]:
        """Yield what is computed at once, of B sequences and N heads: CACHED scores on a CPU, AT_ONCE elsewhere."""
        G, Q, K = self.mask.shape
        fitting = max(1, (CACHED if self.mask.device.type == "cpu" else AT_ONCE) // (Q * K))
        heads, size = max(1, fitting // G), math.ceil(G / math.ceil(G / fitting))
        for b, n, g in itertools.product(range(B), range(0, N, heads), range(0, G, size)):
            blocks = slice(g, min(g + size, G))
            queries: slice | Tensor = self.queries[blocks]
            if self.first is not None:
                queries = slice(self.first + blocks.start, self.first + blocks.stop)
            yield Chunk(b, slice(n, n + heads), blocks, queries, self.keys[blocks], Q, self.run)

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

    @property
    def is_whole(self) -> bool:
        """Whether the groups have all blocks."""
        return sum(len(group.queries) for group in self.groups) * self.block == len(self.place)

    def with_pairs(self, biases_and_masks: Sequence[Tensor]) -> Iterator[tuple[Group, Tensor, Tensor | None]]:
        """Return each group with its bias and its dropout mask; the biases come first, and there may be no masks."""
        count = len(self.groups)
        masks: Sequence[Tensor | None] = biases_and_masks[count:] or [None] * count
        return zip(self.groups, biases_and_masks[:count], masks)

    def to_places(self, x_BNTH: Tensor) -> Tensor:
        """Return the tokens in the order of this part, then padding, [B, N, P, H]."""
        B, N, T, H = x_BNTH.shape
        if self.in_order and len(self.place) == T:
            return x_BNTH.contiguous()
        if self.in_order:
            return torch.nn.functional.pad(x_BNTH, (0, 0, 0, len(self.place) - T)).contiguous()
        rows = flat(self.place.clamp(max=T - 1), B * N, T)
        return x_BNTH.reshape(B * N * T, H).index_select(0, rows).view(B, N, len(self.place), H)

    def from_places(self, x_BNPH: Tensor, T: int) -> Tensor:
        """Return the tokens in their own order, without padding, [B, N, T, H]."""
        B, N, P, H = x_BNPH.shape
        if self.in_order:
            return x_BNPH if P == T else x_BNPH[:, :, :T]
        rows = flat(self.place.argsort()[:T], B * N, P)
        return x_BNPH.reshape(B * N * P, H).index_select(0, rows).view(B, N, T, H)


def flat(rows: Tensor, copies: int, count: int) -> Tensor:
    """Return the numbers of rows in tensors of `count` rows that lie one after another."""
    if copies == 1:
        return rows.flatten()
    return (torch.arange(0, copies * count, count, device=rows.device)[:, None] + rows.flatten()).flatten()


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # autograd cannot save tensors made in inference mode
def layout_of(
    pattern: Pattern, T: int, causal: bool, device: torch.device, cost: float = math.inf
) -> list[Part] | None:
    """Return the blocks of each part of a pattern over T tokens.

    None if they would cost more than this for each pair of the text, times the number of parts, which takes merging.
    """
    with torch.device("cpu"):
        plans = [best_plan(part, stride, T, causal) for part, stride in parts(pattern)]
        if sum(plan.cost for plan in plans) * len(plans) > cost * T**2:
            return None
        layout = [Part(plan.place, plan.block, [*map(plan.group, plan.groups)], plan.in_order) for plan in plans]
    return layout if device.type == "cpu" else [part.to(device) for part in layout]


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
    def cost(self) -> float:
        """The time of a pass, in that of a pair without what gathering and blocks add to it."""
        gathered_runs = sum(len(blocks) * max(len(self.runs[k]) for k in blocks) for blocks in self.groups)
        return gathered_runs * (self.run + GATHER) * (self.block + BLOCK_COST)

    def group(self, blocks: list[int]) -> Group:
        """Build a group of blocks; blocks with fewer runs repeat their first one, hidden by the mask."""
        visible = [self.runs[k] for k in blocks]
        most = max(map(len, visible))
        keys = torch.stack([torch.cat((runs, runs[:1].expand(most - len(runs)))) for runs in visible])
        is_first = torch.arange(most) < torch.tensor([*map(len, visible)])[:, None]
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
            runs = [torch.unique(torch.cat(visible) // run) for visible in joined]
            candidates.append(Plan(place, block, run, runs, stride == 1, pattern, T, causal))
    return min(candidates, key=lambda plan: plan.cost)


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
    return [*map(sorted, groups)]


class BlockAttention(torch.autograd.Function):
    """Attention of the blocks of a part, and the log-sum-exp of each query's scores.

    Arguments of `apply`: q_BNPH, k_BNPH, v_BNPH; the part; whether the log-sum-exp is needed; for each group its
    bias, [1 or B, 1 or N, G, Q, K]; and, with dropout, for each group its mask, [B, N, G, Q, K].

    It returns the output, [B, N, P, H], and the log-sum-exp, [B, N, P] or None. With scores S, P = softmax(S),
    dropout mask M, output O and log-sum-exp l:

        dv = (P M)^T dO,   dP = M (dO v^T),   dS = P (dP - sum_j dP P + dl)

    For the backward pass it gathers keys and values again. It keeps P of a group unless that is larger than KEPT and
    than the bias, from which it is computed again, and always keeps M.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: Part, merged: bool, *biases_and_masks: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        B, N, P, _ = q.shape
        output = torch.empty_like(q) if part.is_whole else torch.zeros_like(q)
        log_sums = q.new_full((B, N, P, 1), -math.inf) if merged else None
        weights_of_chunks: list[Tensor] = []
        keeps: list[bool] = []  # for each group, whether its weights are kept
        for group, bias, mask in part.with_pairs(biases_and_masks):
            keeps.append(any(ctx.needs_input_grad) and keeps_weights(B * N, bias, group))
            for chunk in group.chunks(B, N):
                weights, sums = weights_of(q, k, bias, chunk, merged)
                dropped = weights if mask is None else weights * chunk.pairs(mask)
                chunk.put_queries(output, torch.bmm(dropped.flatten(0, 1), chunk.take_keys(v)))
                if log_sums is not None and sums is not None:
                    chunk.put_queries(log_sums, sums)
                if keeps[-1]:
                    weights_of_chunks.append(weights)
        G = len(keeps)
        biases = [None if keep else bias for keep, bias in zip(keeps, biases_and_masks)]
        ctx.save_for_backward(q, k, v, *biases, *biases_and_masks[G:], *weights_of_chunks)
        ctx.part, ctx.merged, ctx.keeps, ctx.arguments = part, merged, keeps, len(biases_and_masks)
        ctx.bias_shapes = [bias.shape for bias in biases_and_masks[:G]]
        return output, None if log_sums is None else log_sums[..., 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        biases_and_masks, weights_of_chunks = rest[: ctx.arguments], iter(rest[ctx.arguments :])
        (B, N, _, H), grad = q.shape, grad.contiguous()
        dq = torch.empty_like(q) if ctx.part.is_whole else torch.zeros_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dbiases: list[Tensor | None] = [None] * ctx.arguments
        with torch.autocast(q.device.type, enabled=False):
            for number, (group, bias, mask) in enumerate(ctx.part.with_pairs(biases_and_masks)):
                dbias = q.new_zeros(ctx.bias_shapes[number]) if ctx.needs_input_grad[5 + number] else None
                dbiases[number] = dbias
                for chunk in group.chunks(B, N):
                    keep = ctx.keeps[number]
                    weights = next(weights_of_chunks) if keep else weights_of(q, k, bias, chunk, ctx.merged)[0]
                    dropped = weights if mask is None else weights * chunk.pairs(mask)
                    grad_output = chunk.take_queries(grad)
                    chunk.add_keys(dv, torch.bmm(dropped.flatten(0, 1).transpose(1, 2), grad_output))
                    grad_weights = torch.bmm(grad_output, chunk.take_keys(v).transpose(1, 2)).view_as(weights)
                    if mask is not None:
                        grad_weights.mul_(chunk.pairs(mask))
                    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                    if grad_log_sums is not None:
                        sums = chunk.take_queries(grad_log_sums[..., None]).view(*weights.shape[:-1], 1)
                        grad_scores.addcmul_(weights, sums)
                    if dbias is not None:
                        dbias_of_chunk = chunk.pairs(dbias)
                        dbias_of_chunk.add_(grad_scores.sum_to_size(dbias_of_chunk.shape))
                    grad_scores = grad_scores.flatten(0, 1)
                    chunk.put_queries(dq, torch.bmm(grad_scores, chunk.take_keys(k)))
                    chunk.add_keys(dk, torch.bmm(grad_scores.transpose(1, 2), chunk.take_queries(q)))
        scale = 1 / math.sqrt(H)
        return dq.mul_(scale), dk.mul_(scale), dv, None, None, *dbiases


def keeps_weights(rows: int, bias: Tensor, group: Group) -> bool:
    """Return whether the weights of a group, in so many sequences and heads, are kept for the backward pass."""
    return max(KEPT, bias.numel()) >= rows * group.mask.numel()


def weights_of(q: Tensor, k: Tensor, bias: Tensor, chunk: Chunk, merged: bool) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of the scores of a chunk, [heads, blocks, Q, K].

    Also their log-sum-exp, [heads, blocks, Q, 1], if it is needed.
    """
    bias_of_chunk = chunk.pairs(bias)
    products = torch.bmm(chunk.take_queries(q), chunk.take_keys(k).transpose(1, 2))
    scores = products.view(-1, *bias_of_chunk.shape[1:])
    torch.add(bias_of_chunk, scores, alpha=1 / math.sqrt(q.shape[-1]), out=scores)
    if not merged:
        return scores.softmax(dim=-1), None
    numbers = torch.finfo(scores.dtype)  # a part may have no key for a query
    largest = scores.amax(dim=-1, keepdim=True).clamp_(min=numbers.min)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(dim=-1, keepdim=True)
    return weights.div_(sums.clamp(min=numbers.tiny)), sums.log() + largest


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
    B, N, T, _ = q_BNTH.shape
    single = torch.promote_types(q_BNTH.dtype, torch.float32)
    outputs: list[Tensor] = []
    log_sums: list[Tensor] = []
    with torch.autocast(q_BNTH.device.type, enabled=False):
        qkv = [x.to(single) for x in (q_BNTH, k_BNTH, v_BNTH)]
        one = torch.ones((), dtype=single, device=q_BNTH.device)
        for part, biases_of_part in zip(layout, biases):
            placed = [part.to_places(x) for x in qkv]
            pairs = [bias.to(single) for bias in biases_of_part]
            if dropout is not None:
                pairs += [dropout(one.expand(B, N, *group.mask.shape)) for group in part.groups]
            output, sums = BlockAttention.apply(*placed, part, len(layout) > 1, *pairs)
            outputs.append(part.from_places(output, T))
            log_sums += [] if sums is None else [part.from_places(sums[..., None], T)]
        if len(layout) == 1:
            return outputs[0].to(q_BNTH.dtype)
        total = torch.stack(log_sums).logsumexp(dim=0)
        merged = [(log_sum - total).exp() * output for log_sum, output in zip(log_sums, outputs)]
        return functools.reduce(torch.add, merged).to(q_BNTH.dtype)
