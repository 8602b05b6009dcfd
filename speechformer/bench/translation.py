"""Benchmark translation in one process: `python -m speechformer.bench translation OVERRIDES`.

    model      training steps of our encoder-decoder against torch.nn.Transformer with the same function, batches and
               optimizer, and its fastest loss
    batches    batches of like length (`TokenBatches`) against batches of a fixed number of pairs in random order,
               with as many pairs to a batch on average
    cache      with --run RUN: translating the test set by the run's beam search with a key-value cache and without

The two sides take turns of a few steps each, in several processes; a ratio has its 95 % interval over these (of the
cache, it is of one turn each).
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer import console
from speechformer.analysis.load import load as load_run
from speechformer.bench.peers import parameters
from speechformer.bench.runs import data_of, prepare, task_of
from speechformer.bench.timing import Comparison, Side, device, fastest_settings, over_processes, table, turns
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import END, PAD
from speechformer.data.pairs import PairBatches
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.generation.beam_search import translate_ids
from speechformer.kernels.loss import next_token_loss
from speechformer.layers.positions import sinusoid

UNIT = "1,000 target tokens"
OURS = {  # what the peer has; a run with others is compared all the same, and the result names them
    "model": "sinusoidal",
    "pattern": "full",
    **dict.fromkeys(("scale_embedding", "tied_output", "shared_embeddings", "final_norm", "qkv_bias", "bias"), True),
}


class Peer(nn.Module):
    """torch.nn.Transformer with tied embeddings and sinusoidal positions, without dropout of hidden units."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.width = model["width"]
        self.embedding = nn.Embedding(model["vocab_size"], self.width)
        sizes = (model["heads"], model["layers"], model["layers"], model["ff"], model["dropout"])
        options = {"activation": model["activation"], "norm_first": model["norm"] == "pre"}
        self.transformer = nn.Transformer(self.width, *sizes, batch_first=True, **options)
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout = nn.Identity()  # of hidden feed-forward units
        self.dropout = nn.Dropout(model["dropout"])
        self.output = nn.Linear(self.width, model["vocab_size"], bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", sinusoid(max(1024, model["block_size"]), self.width), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [B, T] as [B, T, D]."""
        return self.dropout(self.embedding(ids) * math.sqrt(self.width) + self.table[: ids.shape[1]])  # type: ignore

    def hidden(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Compute the decoder's hidden states, [B, T, D]."""
        padding = source == PAD if (source == PAD).any() else None
        return self.transformer(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], inputs.device),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )


def scored_loss(loss: Callable, model: Any, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Compute a loss of output layer, hidden states and targets without the padding."""
    scored = (targets != PAD).nonzero().flatten()
    return loss(model.output.weight, model.output.bias, hidden[scored], targets[scored], smoothing)


def loss_of_all(model: Any, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Compute torch's cross-entropy of all logits, which ignores the padding."""
    return F.cross_entropy(model.output(hidden), targets, ignore_index=PAD, label_smoothing=smoothing)


def torch_loss(weight: Tensor, bias: Tensor | None, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Compute torch's cross-entropy at once."""
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, label_smoothing=smoothing)


OUR_LOSS = functools.partial(scored_loss, next_token_loss)
PEER_LOSSES: dict[str, Callable] = {
    "all logits": loss_of_all,
    "logits of tokens": functools.partial(scored_loss, torch_loss),
    "logits of tokens in chunks": OUR_LOSS,  # torch's `linear_cross_entropy` where it can
}


def stepper(model: Any, batches: Any, steps: int, smoothing: float, loss: Callable = OUR_LOSS) -> Side:
    """Build a function that takes some training steps and returns the thousands of target tokens in them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    stream = itertools.chain.from_iterable(itertools.repeat(batches))  # epoch after epoch

    def run() -> float:
        tokens = 0
        for batch in itertools.islice(stream, steps):
            source, target = batch["source"].to(device()), batch["target"].to(device())
            targets = target[:, 1:].flatten()
            optimizer.zero_grad()
            loss(model, model.hidden(source, target[:, :-1]).flatten(0, 1), targets, smoothing).backward()
            optimizer.step()
            tokens += int((targets != PAD).sum())
        return tokens / 1000

    return run


def measure_training(config: dict[str, Any], rounds: int, steps: int) -> list[Comparison]:
    """Measure the two comparisons of training in this process."""
    prepare()
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    data, smoothing = data_of(config), config["recipe"]["label_smoothing"]
    task = task_of(config, data)
    peer = Peer(task.hparams["architecture"]).to(device())
    counts = {"speechformer": parameters(task.model), "nn.Transformer": parameters(peer)}
    architecture = {**config["architecture"], **{group: config[group]["name"] for group in ("model", "pattern")}}
    others = [f"{key}={architecture[key]}" for key, value in OURS.items() if architecture[key] != value]

    def side(model: Any, losses: dict[str, Callable]) -> dict[str, Side]:
        return {name: stepper(model, data.train_dataloader(), steps, smoothing, own) for name, own in losses.items()}

    sides = {"speechformer": side(task.model, {"default": OUR_LOSS}), "nn.Transformer": side(peer, PEER_LOSSES)}
    seconds, settings = fastest_settings(sides, rounds)
    more = {"parameters": counts, "settings": settings, "changed": {"nn.Transformer": ", ".join(others)}}
    what = " and ".join(f"{count:,}" for count in counts.values()) + " parameters"
    what += f"; ours alone has {', '.join(others)}" if others else ""
    rows = [Comparison("model", what, UNIT, seconds, more)]

    buckets, (source, target) = data.train_dataloader(), data.train
    random = PairBatches(source, target, round(len(source) / len(buckets)), config["seed"])
    padding = [f"{100 * max(batches.padding().values()):.0f} %" for batches in (buckets, random)]
    what = f"{random.size} pairs to a batch; {padding[0]} and {padding[1]} padding"
    orders = {"like length": data.train_dataloader(), "random order": random}
    seconds = turns(
        {name: stepper(task.model, batches, steps, smoothing) for name, batches in orders.items()}, rounds
    )
    return [*rows, Comparison("batches", what, UNIT, seconds)]


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
    parser.add_argument("--processes", type=int, default=5, help="that measure the training (%(default)s)")
    arguments = parser.parse_args()
    run_command(lambda: bench(**vars(arguments)))


def bench(overrides: list[str], run: Path | None, rounds: int, steps: int, processes: int) -> None:
    """Measure and print the comparisons."""
    if not any(override.startswith(("task=", "experiment=")) for override in overrides):
        overrides = ["task=translate", *overrides]
    config = as_plain(compose(overrides))
    if config["task"]["name"] != "translate" or config["model"]["name"] in ("rnn", "rnn_attention"):
        raise UserError("bench translation measures only the transformers of task=translate.")
    if min(rounds, steps, processes) < 1:
        raise UserError("--rounds, --steps and --processes must be at least 1.")
    prepare()
    console.warn("Measuring; a few minutes, more with --run.")
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    rows = [bench_cache(config, run)] if run else []
    rows += over_processes(functools.partial(measure_training, config, rounds, steps), processes)
    console.say(table(rows))
    console.say(f"Fastest loss of the peer: {rows[-2].more['settings']['nn.Transformer']}.")
    console.say(f"torch {torch.__version__}, {torch.get_num_threads()} threads.")
