"""Benchmark translation in one process: `python -m speechformer.bench translation OVERRIDES`.

    model      training steps of our encoder-decoder against torch.nn.Transformer of the same size, with the same
               batches, loss and optimizer
    batches    batches of like length (`TokenBatches`) against batches of a fixed number of pairs in random order,
               with as many pairs to a batch on average
    cache      with --run RUN: translating the test set by the run's beam search with a key-value cache and without

The two sides take turns of a few steps each; a ratio is of the medians (of the cache, of one turn each).
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.analysis.load import load as load_run
from speechformer.bench.peers import parameters
from speechformer.bench.runs import data_of, prepare, task_of
from speechformer.bench.timing import Comparison, Side, table, turns
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import END, PAD
from speechformer.data.pairs import PairBatches
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.generation.beam_search import translate_ids
from speechformer.kernels.loss import next_token_loss
from speechformer.layers.positions import sinusoid

UNIT = "1,000 target tokens"


class Peer(nn.Module):
    """torch.nn.Transformer with tied embeddings and sinusoidal positions."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.width = model["width"]
        self.embedding = nn.Embedding(model["vocab_size"], self.width)
        sizes = (model["heads"], model["layers"], model["layers"], model["ff"], model["dropout"])
        options = {"activation": model["activation"], "norm_first": model["norm"] == "pre"}
        self.transformer = nn.Transformer(self.width, *sizes, batch_first=True, **options)
        self.dropout = nn.Dropout(model["dropout"])
        self.output = nn.Linear(self.width, model["vocab_size"], bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", sinusoid(1024, self.width), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [B, T] as [B, T, D]."""
        return self.dropout(self.embedding(ids) * math.sqrt(self.width) + self.table[: ids.shape[1]])  # type: ignore

    def hidden(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Compute the decoder's hidden states, [B, T, D]."""
        padding = source == PAD
        return self.transformer(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(inputs.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )


def stepper(model: Any, batches: Any, steps: int, smoothing: float) -> Side:
    """Build a function that takes some training steps and returns the thousands of target tokens in them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    stream = itertools.chain.from_iterable(itertools.repeat(batches))  # epoch after epoch

    def run() -> float:
        tokens = 0
        for batch in itertools.islice(stream, steps):
            inputs, targets = batch["target"][:, :-1], batch["target"][:, 1:].flatten()
            optimizer.zero_grad()
            scored = (targets != PAD).nonzero().flatten()
            hidden = model.hidden(batch["source"], inputs).flatten(0, 1)[scored]
            next_token_loss(model.output.weight, model.output.bias, hidden, targets[scored], smoothing).backward()
            optimizer.step()
            tokens += len(scored)
        return tokens / 1000

    return run


def bench_training(config: dict[str, Any], rounds: int, steps: int) -> list[Comparison]:
    """Measure the two comparisons of training."""
    data, smoothing = data_of(config), config["recipe"]["label_smoothing"]
    task = task_of(config, data)
    models = {"speechformer": task.model, "nn.Transformer": Peer(task.hparams["architecture"])}
    counts = " and ".join(f"{parameters(model):,}" for model in models.values())
    sides = {name: stepper(model, data.train_dataloader(), steps, smoothing) for name, model in models.items()}
    rows = [Comparison("model", f"{counts} parameters", UNIT, turns(sides, rounds))]

    buckets, (source, target) = data.train_dataloader(), data.train
    random = PairBatches(source, target, round(len(source) / len(buckets)), config["seed"])
    padding = [f"{100 * max(batches.padding().values()):.0f} %" for batches in (buckets, random)]
    what = f"{random.size} pairs to a batch; {padding[0]} and {padding[1]} padding"
    orders = {"like length": data.train_dataloader(), "random order": random}
    sides = {name: stepper(task.model, batches, steps, smoothing) for name, batches in orders.items()}
    return [*rows, Comparison("batches", what, UNIT, turns(sides, rounds))]


def bench_cache(config: dict[str, Any], run: Path) -> Comparison:
    """Compare decoding with a cache to decoding without."""
    trained = load_run(run)
    model: Any = trained.model
    corpus: Any = load(config)
    decoding: Any = trained.task.hparams["decoding"]
    sources = [[*ids, END] for ids in trained.tokenizer.encode_all([source for source, _ in corpus.test])]
    options = {"alpha": decoding["length_penalty"], "max_length": trained.max_length, "beam": decoding["beam"]}
    seconds, translations = {}, []
    for name, cache in {"with it": True, "without it": False}.items():
        started = time.perf_counter()
        translations.append(translate_ids(model, sources, cache=cache, **options))
        seconds[name] = time.perf_counter() - started
    equal = sum(a == b for a, b in zip(*translations))
    what = f"beam {decoding['beam']}, {len(sources)} sentences, {equal} with equal translations"
    return Comparison("cache", what, "test set", seconds)


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m speechformer.bench translation", description=__doc__.split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", help="of a run with task=translate, as experiment=ted")
    parser.add_argument("--run", type=Path, help="a trained run, to measure the cache with")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="training steps in a measurement (%(default)s)")
    arguments = parser.parse_args()
    run_command(lambda: bench(**vars(arguments)))


def bench(overrides: list[str], run: Path | None, rounds: int, steps: int) -> None:
    """Measure and print the comparisons."""
    if not any(override.startswith(("task=", "experiment=")) for override in overrides):
        overrides = ["task=translate", *overrides]
    config = as_plain(compose(overrides))
    if config["task"]["name"] != "translate" or config["model"]["name"] in ("rnn", "rnn_attention"):
        raise UserError("bench translation measures only the transformers of task=translate.")
    if min(rounds, steps) < 1:
        raise UserError("--rounds and --steps must be at least 1.")
    prepare()
    console.warn("Measuring; a minute or two, more with --run.")
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    rows = [bench_cache(config, run)] if run else []
    console.say(table([*rows, *bench_training(config, rounds, steps)]))
    console.say(f"torch {torch.__version__}, {torch.get_num_threads()} threads.")
