"""Benchmark a training step and an evaluation of classifier and language model against the peers.

All sides have the same batches, dropout and fused AdamW. The unit of work is a step, or the evaluation of a batch.

    report   the reports' size: width 64, 2 heads, 4 layers, block 32, batch 16, 5,760 words; sentences of the corpus,
             padded to the longest of their batch
    large    width 512, 8 heads, 8 layers, block 1,024; random words
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench.peers import TorchPeer, XPeer, parameters
from speechformer.bench.runs import data_of, task_of
from speechformer.bench.timing import Comparison, device, turns
from speechformer.config import as_plain, compose
from speechformer.kernels.loss import next_token_loss

SIZES: dict[str, dict[str, int]] = {
    "report": {"width": 64, "heads": 2, "layers": 4, "ff": 100, "block_size": 32, "batch_size": 16},
    "large": {"width": 512, "heads": 8, "layers": 8, "ff": 2048, "block_size": 1024, "batch_size": 1},
}
WORDS = 5760
Batches = Sequence[tuple[Tensor, Tensor]]  # ids [B, T]; targets [B, T] (lm) or [B] (classify)


def batches_of(task: str, size: str, data: Any, count: int) -> Batches:
    """Draw some batches."""
    if size == "report":
        ids = [(batch["ids"], batch.get("labels")) for batch, _ in zip(data.train_dataloader(), range(count))]
    else:
        generator = torch.Generator().manual_seed(0)
        shape = (SIZES[size]["batch_size"], SIZES[size]["block_size"] + 1)
        drawn = [torch.randint(2, WORDS, shape, generator=generator) for _ in range(count)]
        ids = [(own, None) if task == "lm" else (own[:, :-1], own[:, -1] % 3) for own in drawn]
    pairs = [(own[:, :-1], own[:, 1:]) if task == "lm" else (own, labels) for own, labels in ids]
    return [(inputs.to(device()), targets.to(device())) for inputs, targets in pairs]


def losses_of(task: str, size: str, dropout: float = 0.1) -> tuple[dict[str, Any], dict[str, Callable], Any]:
    """Build the models of the three sides, their losses as functions of ids and targets, and the data."""
    sizes = {**SIZES[size], "vocab_size": WORDS}
    overrides = [f"{key}={value}" for key, value in sizes.items()]
    config = as_plain(compose([f"task={task}", f"dropout={dropout}", *overrides]))
    data = data_of(config)
    ours = task_of(config, data).model
    classes = len(data.corpus.classes) if task == "classify" else 3
    peers = {"torch.nn": TorchPeer, "x-transformers": XPeer}
    theirs = {name: peer(task, sizes, dropout, classes).to(device()) for name, peer in peers.items()}

    def our_loss(ids: Tensor, targets: Tensor) -> Tensor:
        if task == "classify":
            return F.cross_entropy(ours(ids), targets)
        hidden = ours.hidden(ids).flatten(0, 1)
        return next_token_loss(ours.output.weight, ours.output.bias, hidden, targets.flatten())

    losses = {"speechformer": our_loss, **{name: model.loss for name, model in theirs.items()}}
    return {"speechformer": ours, **theirs}, losses, data


def train(model: nn.Module, loss: Callable, optimizer: torch.optim.Optimizer, batches: Batches) -> float:
    """Take a training step with each batch."""
    model.train()
    for ids, targets in batches:
        optimizer.zero_grad()
        loss(ids, targets).backward()
        optimizer.step()
    return len(batches)


@torch.no_grad()
def evaluate(model: nn.Module, loss: Callable, batches: Batches) -> float:
    """Evaluate each batch."""
    model.eval()
    for ids, targets in batches:
        loss(ids, targets)
    return len(batches)


def bench_steps(rounds: int) -> list[Comparison]:
    """Measure this part."""
    rows = []
    for size, task in itertools.product(SIZES, ("classify", "lm")):
        own_rounds, count = (rounds, 10) if size == "report" else (min(rounds, 2), 1)
        models, losses, data = losses_of(task, size)
        batches = batches_of(task, size, data, count)
        # forward alone, because the counter cannot look into every backward kernel; backward is twice that
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            losses["speechformer"](*batches[0])
        counts = {name: parameters(model) for name, model in models.items()}
        # the update reads and writes weights, gradients and Adam's two moments
        moved = 8 * 4 * counts["speechformer"]
        more = {"parameters": counts, "size": SIZES[size], "flops": 3 * counter.get_total_flops(), "bytes": moved}
        training, evaluation = {}, {}
        for name, model in models.items():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            training[name] = functools.partial(train, model, losses[name], optimizer, batches)
            evaluation[name] = functools.partial(evaluate, model, losses[name], batches)
        for what, sides in (("training step", training), ("evaluation", evaluation)):
            seconds = turns(sides, own_rounds)
            rows.append(Comparison(f"steps, {size}", f"{task}, {what}", "step", seconds, more))
    return rows
