"""Benchmark a training step and an evaluation of classifier and language model against the peers.

All sides have the same batches, dropout and fused AdamW, and compute the same function (`peers`). A peer's time is
that of its fastest setting. The unit of work is a step, or the evaluation of a batch.

    report   the reports' size: width 64, 2 heads, 4 layers, block 32, batch 16, 5,760 words; sentences of the corpus,
             padded to the longest of their batch. An evaluation has the batches of the test, of up to 4,096 tokens
    large    width 512, 8 heads, 8 layers, block 1,024; random words
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.bench.peers import CHANGED, Loss, Peer, TorchPeer, XPeer, parameters
from speechformer.bench.runs import data_of, prepare, task_of
from speechformer.bench.timing import Comparison, device, fastest_settings, over_processes
from speechformer.config import as_plain, compose
from speechformer.corpora.special_tokens import IGNORE, PAD
from speechformer.data.batches import Batch
from speechformer.kernels.loss import next_token_loss

SIZES: dict[str, dict[str, int]] = {
    "report": {"width": 64, "heads": 2, "layers": 4, "ff": 100, "block_size": 32, "batch_size": 16},
    "large": {"width": 512, "heads": 8, "layers": 8, "ff": 2048, "block_size": 1024, "batch_size": 1},
}
WORDS = 5760
Batches = Sequence[tuple[Tensor, Tensor]]  # ids [B, T]; targets [B, T] (lm) or [B] (classify)


def batches_of(task: str, size: str, data: Any, count: int, training: bool) -> Batches:
    """Draw some training batches; or return those of the test, without padded targets."""
    if size != "report":
        generator = torch.Generator().manual_seed(0)
        shape = (SIZES[size]["batch_size"], SIZES[size]["block_size"] + 1)
        drawn = [torch.randint(2, WORDS, shape, generator=generator) for _ in range(count)]
        pairs = [(own[:, :-1], own[:, 1:] if task == "lm" else own[:, -1] % 3) for own in drawn]
    elif training:
        batches = [batch for batch, _ in zip(data.train_dataloader(), range(count))]
        pairs = [(own["ids"], own["labels"]) if task == "classify" else halves(own["ids"]) for own in batches]
    else:
        batches = [batch for batch in data.test_dataloader() if batch["part"][0] == "test"]
        pairs = [(own["ids"], own["labels"]) if task == "classify" else whole_rows(own) for own in batches]
    return [(inputs.to(device()), targets.to(device())) for inputs, targets in pairs if len(inputs)]


def halves(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of windows."""
    return ids_BT[:, :-1], ids_BT[:, 1:]


def whole_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the rows whose targets are all scored."""
    rows = (batch["targets"] != IGNORE).all(dim=1)
    return batch["ids"][rows], batch["targets"][rows]


def models_of(task: str, size: str, dropout: float = 0.1) -> tuple[dict[str, nn.Module], Any]:
    """Build the models of the three sides, and the data."""
    sizes = {**SIZES[size], "vocab_size": WORDS}
    overrides = [f"{key}={value}" for key, value in sizes.items()]
    config = as_plain(compose([f"task={task}", f"dropout={dropout}", *overrides]))
    data = data_of(config)
    models = {"speechformer": task_of(config, data).model}
    classes = len(data.corpus.classes) if task == "classify" else 3
    for name, peer in {"torch.nn": TorchPeer, "x-transformers": XPeer}.items():
        models[name] = peer(task, sizes, dropout, classes).to(device())
    return models, data


def losses_of(model: Any, training: bool) -> dict[str, Loss]:
    """Return the loss of a model under each of its settings, as functions of ids and targets."""
    if isinstance(model, Peer):
        return model.losses(training)

    def our_loss(ids: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            return F.cross_entropy(model(ids), targets)
        hidden = model.hidden(ids).flatten(0, 1)
        return next_token_loss(model.output.weight, model.output.bias, hidden, targets.flatten())

    return {"default": our_loss}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: Loss) -> float:
    """Take a training step with each batch."""
    model.train()
    for ids, targets in batches:
        optimizer.zero_grad()
        loss(ids, targets).backward()
        optimizer.step()
    return len(batches)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """Evaluate each batch."""
    model.eval()
    for ids, targets in batches:
        loss(ids, targets)
    return len(batches)


def forward_flops(model: nn.Module, sizes: dict[str, int], batches: Batches) -> float:
    """Count the FLOPs that no evaluation of a batch can avoid: matrix products, without padding and the future."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    in_blocks = sum(layer.weight.numel() for name, layer in layers.items() if ".blocks." in name)
    in_head = sum(layer.weight.numel() for layer in layers.values()) - in_blocks
    total = 0.0
    for ids, targets in batches:
        lengths, causal = (ids != PAD).sum(dim=1), targets.dim() == 2
        pairs = int((lengths * (lengths + 1) // 2 if causal else lengths**2).sum())
        tokens = int(lengths.sum())
        total += 2 * (in_blocks * tokens + in_head * (tokens if causal else len(ids)))
        total += 4 * sizes["layers"] * sizes["width"] * pairs
    return total / len(batches)


def measure_steps(rounds: int) -> list[Comparison]:
    """Measure this part in this process."""
    prepare()
    rows = []
    for size, task in itertools.product(SIZES, ("classify", "lm")):
        own_rounds, count = (rounds, 10) if size == "report" else (min(rounds, 2), 1)
        models, data = models_of(task, size)
        counts = {name: parameters(model) for name, model in models.items()}
        optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in models.items()}
        for training in (True, False):
            batches = batches_of(task, size, data, count, training)
            flops = forward_flops(models["speechformer"], SIZES[size], batches)
            # backward is twice forward; the update reads and writes weights, gradients and two moments
            minimum = (3 * flops, 8 * 4 * counts["speechformer"]) if training else (flops, 0)
            sides = {}
            for name, model in models.items():
                run = (
                    functools.partial(train, model, optimizers[name])
                    if training
                    else functools.partial(evaluate, model)
                )
                losses = losses_of(model, training)
                sides[name] = {setting: functools.partial(run, batches, loss) for setting, loss in losses.items()}
            seconds, settings = fastest_settings(sides, own_rounds)
            more = {"parameters": counts, "size": SIZES[size], "settings": settings, "changed": CHANGED}
            more |= dict(zip(("flops", "bytes"), minimum))
            what = f"{task}, {'training step' if training else 'evaluation'}"
            rows.append(Comparison(f"steps, {size}", what, "step", seconds, more))
    return rows


def bench_steps(rounds: int, processes: int = 5) -> list[Comparison]:
    """Measure this part in several processes."""
    return over_processes(functools.partial(measure_steps, rounds), processes)
