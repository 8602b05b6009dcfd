"""How fast translation is, side by side in one process: `python -m speechformer.bench translation OVERRIDES`.

    model      training steps of our encoder-decoder against the same size built from torch.nn.Transformer, the same
               batches, loss (the same function) and optimiser: seconds of theirs / seconds of ours
    buckets    target tokens a second in batches of like length (`TokenBatches`) against batches of a fixed number
               of pairs in random order, as many pairs to a batch on average
    cache      with --run RUN: seconds to translate the test by the run's beam without a key-value cache, and with it

The two sides take turns, a few steps each, so that what else the machine does falls on both; a ratio is of the
medians of the turns (of the cache, of one turn each).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.analysis.load import load as load_run
from speechformer.bench.timing import turns
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import END, PAD
from speechformer.data.pairs import PairBatches
from speechformer.errors import UserError, run_command
from speechformer.generation.beam_search import translate_ids
from speechformer.kernels.loss import next_token_loss
from speechformer.layers.positions import sinusoid
from speechformer.tasks.translate import Translate
from speechformer.training.fit import build_data, tune_memory


class Peer(nn.Module):
    """What one would build from torch's parts: nn.Transformer between tied embeddings, sinusoidal positions."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.width = model["width"]
        self.embedding = nn.Embedding(model["vocab_size"], self.width)
        self.transformer = nn.Transformer(
            self.width,
            model["heads"],
            model["layers"],
            model["layers"],
            model["ff"],
            model["dropout"],
            activation=model["activation"],
            batch_first=True,
            norm_first=model["norm"] == "pre",
        )
        self.dropout = nn.Dropout(model["dropout"])
        self.output = nn.Linear(self.width, model["vocab_size"], bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", sinusoid(1024, self.width), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(self.width) + self.table[: ids.shape[1]])  # type: ignore

    def hidden(self, source: Tensor, inputs: Tensor) -> Tensor:
        padding = source == PAD
        return self.transformer(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(inputs.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )


def endless(batches: PairBatches) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from batches


def stepper(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    parameters: Any,
    batches: Iterator[dict[str, Tensor]],
    steps: int,
) -> Callable[[], float]:
    """A function that does some training steps and returns the target tokens that they saw."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def run() -> float:
        tokens = 0
        for _ in range(steps):
            batch = next(batches)
            inputs, targets = batch["target"][:, :-1], batch["target"][:, 1:]
            optimizer.zero_grad()
            loss(batch["source"], inputs, targets).backward()
            optimizer.step()
            tokens += int((targets != PAD).sum())
        return tokens

    return run


def bench_training(config: dict[str, Any], rounds: int, steps: int) -> list[tuple[str, ...]]:
    """The rows of the two comparisons of training."""
    from speechformer.models.encoder_decoder import build_translator

    data: Any = build_data(config, load(config))
    arguments, smoothing = Translate.architecture_arguments(config, data), config["recipe"]["label_smoothing"]
    torch.manual_seed(0)
    model, peer = build_translator(**arguments), Peer(arguments)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (model, peer)]

    def loss_of(model: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def loss(source: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
            scored = (targets != PAD).flatten().nonzero().flatten()
            hidden = model.hidden(source, inputs).flatten(0, 1)[scored]
            return next_token_loss(
                model.output.weight, model.output.bias, hidden, targets.flatten()[scored], smoothing
            )

        return loss

    ours, theirs = loss_of(model), loss_of(peer)

    buckets = data.train_dataloader()
    plain = PairBatches(*data.train, round(len(data.train[0]) / len(buckets)), config["seed"])  # type: ignore
    rows: list[tuple[str, ...]] = []
    found = turns(
        {
            "ours": stepper(ours, model.parameters(), endless(buckets), steps),
            "theirs": stepper(theirs, peer.parameters(), endless(data.train_dataloader()), steps),
        },
        rounds,
    )
    rows.append(
        (
            f"model: ours ({counts[0]:,} parameters), nn.Transformer ({counts[1]:,})",
            *(f"{1 / value:,.0f} tokens/s" for value in found.values()),
            f"{found['theirs'] / found['ours']:.2f}",
        )
    )
    found = turns(
        {
            "buckets": stepper(ours, model.parameters(), endless(data.train_dataloader()), steps),
            "random": stepper(ours, model.parameters(), endless(plain), steps),
        },
        rounds,
    )
    padding = [f"{100 * max(batches.padding().values()):.0f} %" for batches in (buckets, plain)]
    rows.append(
        (
            f"batches: of like length ({padding[0]} padding), {plain.size} pairs in random order ({padding[1]})",
            *(f"{1 / value:,.0f} tokens/s" for value in found.values()),
            f"{found['random'] / found['buckets']:.2f}",
        )
    )
    return rows


def bench_cache(config: dict[str, Any], run: Path) -> tuple[str, ...]:
    """The row of decoding with and without a cache."""
    model = load_run(run)
    corpus = load(config)
    decoding = model.task.hparams["decoding"]
    sources = [[*ids, END] for ids in model.tokenizer.encode_all([source for source, _ in corpus.test])]  # type: ignore
    seconds, found = [], []
    for cache in (True, False):
        started = time.perf_counter()
        found.append(
            translate_ids(
                model.model,  # type: ignore[arg-type]
                sources,
                beam=decoding["beam"],
                alpha=decoding["length_penalty"],
                max_length=model.max_length,
                cache=cache,
            )
        )
        seconds.append(time.perf_counter() - started)
    same = sum(a == b for a, b in zip(*found))
    return (
        f"cache: beam {decoding['beam']}, {len(sources)} sentences with it, without it ({same} alike)",
        *(f"{value:.1f} s" for value in seconds),
        f"{seconds[1] / seconds[0]:.2f}",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.bench translation", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("overrides", nargs="*", help="of a run with task=translate, as experiment=ted")
    parser.add_argument("--run", type=Path, help="a trained run, to measure the cache with")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (9)")
    parser.add_argument("--steps", type=int, default=4, help="training steps in a turn (4)")
    given = parser.parse_args()

    def command() -> None:
        overrides = given.overrides
        if not any(override.startswith(("task=", "experiment=")) for override in overrides):
            overrides = ["task=translate", *overrides]
        config = as_plain(compose(overrides))
        if config["task"]["name"] != "translate" or config["model"]["name"] in ("rnn", "rnn_attention"):
            raise UserError("only the transformers of task=translate are measured here.")
        if min(given.rounds, given.steps) < 1:
            raise UserError("--rounds and --steps must be at least 1.")
        tune_memory()
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # torch's, of norm_first
        print("Measuring; a minute or two, more with --run.", file=sys.stderr)
        if config["threads"]:
            torch.set_num_threads(config["threads"])
        rows: list[tuple[str, ...]] = [("", "first", "second", "ratio")]
        if given.run:
            rows.append(bench_cache(config, given.run))
        rows += bench_training(config, given.rounds, given.steps)
        console.say(console.table(rows))
        console.say(f"torch {torch.__version__}, {torch.get_num_threads()} threads.")

    run_command(command)
