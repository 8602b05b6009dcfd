"""A training step and an evaluation of classifier and language model, against the peers: the same batches,
dropout and fused AdamW.

    report   the reports' size: 64 wide, 2 heads, 4 layers, block 32, batch 16, 5,760 words; sentences of the corpus,
             cut to the max_length of their batch
    large    512 wide, 8 heads, 8 layers, block 1,024; random words

A unit of work is a step, or the evaluation of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from speechformer.bench.peers import TorchPeer, XPeer, parameters
from speechformer.bench.timing import Comparison, device, turns
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.kernels.loss import next_token_loss
from speechformer.tasks.registry import TASKS
from speechformer.training.build import build_data

SIZES: dict[str, dict[str, int]] = {
    "report": {"width": 64, "heads": 2, "layers": 4, "ff": 100, "block_size": 32, "batch_size": 16},
    "large": {"width": 512, "heads": 8, "layers": 8, "ff": 2048, "block_size": 1024, "batch_size": 1},
}
WORDS = 5760


def batches_of(task: str, size: str, data: Any, count: int) -> list[tuple[Tensor, Tensor]]:
    """Ids and targets of some batches."""
    sizes = SIZES[size]
    if size == "report":
        found = []
        for batch, _ in zip(data.train_dataloader(), range(count)):
            ids = batch["ids"]
            found.append((ids[:, :-1], ids[:, 1:]) if task == "lm" else (ids, batch["labels"]))
        return [(ids.to(device()), targets.to(device())) for ids, targets in found]
    generator = torch.Generator().manual_seed(0)
    shape = (sizes["batch_size"], sizes["block_size"] + 1)
    drawn = [torch.randint(2, WORDS, shape, generator=generator).to(device()) for _ in range(count)]
    if task == "lm":
        return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]
    return [(ids[:, :-1], ids[:, -1] % 3) for ids in drawn]


def losses_of(task: str, size: str, dropout: float = 0.1) -> tuple[dict[str, Any], dict[str, Callable], Any]:
    """The models of the three sides, their losses as functions of ids and targets, and the data."""
    sizes = SIZES[size]
    words = [f"{key}={value}" for key, value in sizes.items()]
    config = as_plain(compose([f"task={task}", f"vocab_size={WORDS}", f"dropout={dropout}", *words]))
    data = build_data(config, load(config))
    classes = len(data.corpus.classes) or 3
    torch.manual_seed(0)
    ours: Any = TASKS[task].from_config(config, data).model.to(device())
    theirs = {**sizes, "vocab_size": WORDS}
    models = {
        "speechformer": ours,
        "torch.nn": TorchPeer(task, theirs, dropout, classes).to(device()),
        "x-transformers": XPeer(task, theirs, dropout, classes).to(device()),
    }

    def our_loss(ids: Tensor, targets: Tensor) -> Tensor:
        if task == "classify":
            return F.cross_entropy(ours(ids), targets)
        return next_token_loss(
            ours.output.weight, ours.output.bias, ours.hidden(ids).flatten(0, 1), targets.flatten()
        )

    losses = {name: model.loss for name, model in models.items() if name != "speechformer"}
    return models, {"speechformer": our_loss, **losses}, data


def bench_steps(rounds: int, sizes: tuple[str, ...] = ("report", "large")) -> list[Comparison]:
    """The rows of this part."""
    found = []
    for size in sizes:
        steps = 10 if size == "report" else 1
        for task in ("classify", "lm"):
            models, losses, data = losses_of(task, size)
            batches = batches_of(task, size, data, steps)
            optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in models.items()}

            def train(name: str, losses: Any = losses, optimizers: Any = optimizers, batches: Any = batches) -> float:
                for ids, targets in batches:
                    optimizers[name].zero_grad()
                    losses[name](ids, targets).backward()
                    optimizers[name].step()
                return len(batches)

            def evaluate(name: str, losses: Any = losses, batches: Any = batches) -> float:
                with torch.no_grad():
                    for ids, targets in batches:
                        losses[name](ids, targets)
                return len(batches)

            # forward alone, which has no kernel that it cannot look into; backward is twice that
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                losses["speechformer"](*batches[0])
            counts = {name: parameters(model) for name, model in models.items()}
            # the update reads and writes weights, gradients and Adam's two moments
            moved = 8 * 4 * counts["speechformer"]
            more = {"parameters": counts, "size": SIZES[size], "flops": 3 * counter.get_total_flops(), "bytes": moved}
            for what, side in (("training step", train), ("evaluation", evaluate)):
                for model in models.values():
                    model.train(side is train)
                sides = {name: lambda name=name, side=side: side(name) for name in models}
                seconds = turns(sides, rounds if size == "report" else min(rounds, 2))
                found.append(Comparison(f"steps, {size}", f"{task}, {what}", "step", seconds, more))
    return found
