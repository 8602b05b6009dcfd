"""One self-contained HTML page on which trained runs are live: their weights, and the forward pass in JavaScript.

A run is exported as plain data: its tokenizer, the description of its model, and the weights of its checkpoints as
base64 safetensors. `play/engine.js` computes from them what the model computes here. `describe_model` raises a
`UserError` for a model that it does not compute.
"""

from __future__ import annotations

import base64
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechformer.analysis.find import CHECKPOINTS
from speechformer.analysis.load import TrainedRun, unique_labels
from speechformer.analysis.self_contained import fill_page, to_safetensors
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import ABBREVIATIONS, Tokenizer
from speechformer.errors import UserError
from speechformer.layers.by_layer import entries
from speechformer.layers.patterns import PATTERNS
from speechformer.layers.positions import POSITIONS, ALiBi, ByLayer, Positions, Relative, RoPE, XPos
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.encoder_decoder import EncoderDecoder
from speechformer.models.stack import Stack
from speechformer.runs.folder import HISTORY, STEP, WEIGHTS
from speechformer.tasks.registry import load_task, read_checkpoint

FOLDER = Path(__file__).with_name("play")
FILES = ("page.html", "page.css", "words.js", "engine.js", "views.js", "page.js", "panel.js", "controls.js")
KNOWN_POSITIONS = {"nope", "sinusoidal", "learned", "alibi", "rope", "xpos", "relative", "kerple", "fire"}
KNOWN_PATTERNS = {"full", "window", "block", "strided", "dilated", "global", "sinks", "bigbird"}
MODELS = {EncoderClassifier: "classify", Decoder: "lm", EncoderDecoder: "translate"}
MAX_TOKENS = 128  # of a text; larger maps cannot be read
FEW, MANY = 6, 16  # checkpoints of a run: above TARGET_BYTES, if they fit into MAX_BYTES; at most
TARGET_BYTES, MAX_BYTES = 5_000_000, 20_000_000  # of all weights in the page
Checkpoint = tuple[int | None, str]  # the optimizer step, None of an average; the file in the run's folder
Types = tuple[torch.dtype, torch.dtype]  # of the weights behind the metrics, and of the other checkpoints
EXAMPLES = (
    "We will rebuild our bridges, and our children will thank us.",
    "My friends, we shall mend the harbours, and our children will remember the work.",
    "The old woman does not see the horses.",
)


def describe_positions(positions: Positions, layers: int) -> dict[str, Any]:
    """Return each encoding with its options and the prefix of its weights, and which of them each layer has."""
    is_mixed = isinstance(positions, ByLayer)
    members: list[Any] = list(positions.members) if isinstance(positions, ByLayer) else [positions]
    described = []
    for k, member in enumerate(members):
        name = next((name for name, kind in POSITIONS.items() if type(member) is kind), type(member).__name__)
        if name not in KNOWN_POSITIONS:
            raise UserError(f"model={name.lower()} is not supported")
        prefix = f"positions.members.{k}." if is_mixed else "positions."
        described.append({"name": name, "prefix": prefix, **position_options(member)})
    return {"members": described, "layers": [members.index(positions.at_layer(k)) for k in range(layers)]}


def position_options(positions: Positions) -> dict[str, Any]:
    """Return what the weights do not say about an encoding."""
    options: dict[str, Any] = {}
    if isinstance(positions, ALiBi):
        learned = positions.log_slopes is not None
        options |= {"scale": positions.scale, "learned": learned, "slopes": positions.fixed_slopes.tolist()}
    if isinstance(positions, RoPE):
        options |= {"base": positions.base, "R": positions.table_TR.shape[1], "scaling": positions.scaling}
        options |= {"factor": positions.factor, "length": positions.length}
    if isinstance(positions, XPos):
        options["log_decay"] = positions.log_decay_H.tolist()
    if isinstance(positions, Relative):
        options |= {"max_distance": positions.max_distance, "buckets": positions.buckets.tolist()}
    return options


def describe_patterns(spec: dict[str, Any], layers: int) -> list[dict[str, Any]]:
    """Return the pattern of each layer, with all its options."""
    described = []
    for own in entries(spec, "pattern", layers):
        if own["name"] not in KNOWN_PATTERNS:
            raise UserError(f"pattern={own['name']} is not supported")
        described.append({**pattern_options(own["name"]), **own})
    return described


def pattern_options(name: str) -> dict[str, Any]:
    """Return the options of a pattern with their defaults."""
    return {key: option.default for key, option in inspect.signature(PATTERNS[name]).parameters.items()}


def describe_stack(stack: Stack) -> dict[str, Any]:
    """Return the sizes and positions of a stack. Encoder and decoder may differ: in the buckets of model=relative."""
    heads, layers = stack.blocks[0].attention.heads, len(stack.patterns)  # type: ignore[index]
    sizes = {"width": stack.embedding.embedding_dim, "heads": heads, "layers": layers}
    positions = describe_positions(stack.positions, layers)
    return {**sizes, "causal": stack.causal, "hasCls": stack.first_token is not None, "positions": positions}


def describe_model(model: nn.Module, architecture: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine needs to know of a model beside its weights; a `UserError` if it cannot compute it."""
    task = MODELS.get(type(model), "")
    stacks = {name: part for name, part in model.named_children() if name in ("encoder", "decoder")}
    if not task or not all(isinstance(part, Stack) for part in stacks.values()):
        raise UserError(f"model={architecture['model']['name']} is not supported")
    first: Any = next(iter(stacks.values()))
    return {
        "task": task,
        "parts": {name: describe_stack(part) for name, part in stacks.items()},  # type: ignore[arg-type]
        "patterns": describe_patterns(architecture["pattern"], len(first.patterns)),
        "norm": architecture["norm"],
        "activation": architecture["activation"],
        "finalNorm": architecture["final_norm"],
        "scale": first.scale,
    }


def describe_tokenizer(tokenizer: Tokenizer | Subwords) -> dict[str, Any]:
    """Return a tokenizer as the page reads it."""
    if isinstance(tokenizer, Tokenizer):
        return {"kind": "nltk", "vocabulary": tokenizer.vocabulary, "abbreviations": ABBREVIATIONS}
    content = json.loads(tokenizer.tokenizer.to_str())["model"]
    ids: dict[str, int] = tokenizer.tokenizer.get_vocab()
    vocabulary = sorted(ids, key=lambda word: ids[word])
    if content["type"] == "WordLevel":
        return {"kind": "words", "vocabulary": vocabulary}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    return {"kind": "bpe", "vocabulary": vocabulary, "merges": merges}


def check_supported(run: TrainedRun) -> dict[str, Any]:
    """Return `describe_model` of a run; a `UserError` that names the run if the page cannot compute it."""
    if run.task.name not in MODELS.values():
        raise UserError(f"{run.directory} is a run of task={run.task.name}, which the live page does not support.")
    try:
        return describe_model(run.model, run.task.hparams["architecture"])
    except UserError as error:
        has_maps = run.task.hparams["architecture"]["model"]["name"] != "rnn"
        hint = " Its maps: python -m speechformer.attention RUN." if has_maps else ""
        raise UserError(f"{run.directory}: {error} by the live page.{hint}") from None


def checkpoints_of(run: TrainedRun, alone: bool) -> list[Checkpoint]:
    """Return the checkpoints of a run: that which was loaded, and unless `alone` those beside it."""
    names = {step_of(run.directory / run.checkpoint): run.checkpoint}
    for path in () if alone else (run.directory / name for name in CHECKPOINTS):
        if path.exists() and path.name != run.checkpoint and (step := step_of(path)) is not None:
            names.setdefault(step, path.name)
    for folder in () if alone else (HISTORY, WEIGHTS):
        for path in (run.directory / folder).glob("*.ckpt"):
            if re.fullmatch(STEP, path.name):
                names.setdefault(int(path.stem), f"{folder}/{path.name}")
    return sorted(names.items(), key=lambda own: (own[0] is None, own[0] or 0))


def step_of(path: Path) -> int | None:
    """Return the optimizer step of a checkpoint; None of an average, which is of several."""
    step = read_checkpoint(path).get("global_step")
    return step if type(step) is int and path.name != "average.ckpt" else None


def fit_into_page(
    runs: Sequence[TrainedRun], files: Sequence[Sequence[Checkpoint]]
) -> tuple[list[list[Checkpoint]], Types]:
    """Choose the checkpoints of each run that the page holds, and the types of their weights.

    They are evenly spaced ones if all would be too many. Of the weights, those behind the metrics are halved last.

    Raises:
        UserError: even one of each run in half precision would be too large.
    """
    numbers = [count_weights(run.model) for run in runs]
    full, half = torch.float32, torch.float16

    def size(most: int, types: Types) -> float:  # base64 takes 4 bytes for 3
        bytes_of = (types[0].itemsize + (min(most, len(own)) - 1) * types[1].itemsize for own in files)
        return sum(number * each for number, each in zip(numbers, bytes_of)) * 4 / 3

    most = MANY
    while most > 1 and size(most, (half, half)) > (TARGET_BYTES if most > FEW else MAX_BYTES):
        most -= 1
    if (total := size(most, (half, half))) > MAX_BYTES:
        raise UserError(
            f"The page would hold {total / 1e6:.0f} MB of weights; the limit is {MAX_BYTES / 1e6:.0f} MB. "
            "Name fewer runs, one --checkpoint, or smaller models."
        )
    picked = []
    for run, own in zip(runs, files):
        chosen = [name for _, name in own].index(run.checkpoint)
        picked.append([own[k] for k in evenly_spaced(len(own), chosen, most)])
    fitting = (types for types in ((full, full), (full, half)) if size(most, types) <= TARGET_BYTES)
    return picked, next(fitting, (half, half))


def count_weights(model: nn.Module) -> int:
    """Count the numbers in the weights of a model, those of a shared table once."""
    return sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())


def evenly_spaced(count: int, chosen: int, most: int) -> list[int]:
    """Return at most so many of `count` indices in order: the chosen one, the ends, and some between."""
    if count <= most:
        return [*range(count)]
    if most < 3:
        return sorted([chosen, 0 if chosen else count - 1][:most])
    picked = [round(k * (count - 1) / (most - 1)) for k in range(most)]
    if chosen not in picked:
        picked[min(range(1, most - 1), key=lambda k: abs(picked[k] - chosen))] = chosen
    return picked


def limit_of(run: TrainedRun) -> int:
    """Return how many tokens of a text the page reads."""
    limits = [MAX_TOKENS, run.max_length, run.block_size if run.task.name == "classify" else None]
    return min(limit for limit in limits if limit is not None)


def choose_text(tokenizer: Any) -> str:
    """Return the example with the fewest unknown words."""
    unknown = [sum(index == 1 for index in tokenizer.encode(text)) for text in EXAMPLES]
    return EXAMPLES[unknown.index(min(unknown))]


def name_of_chosen(run: TrainedRun, own: Sequence[Checkpoint]) -> str:
    """Return what the loaded checkpoint is: "reported" of a finished run, else "best so far" or "last"."""
    if run.finished:
        return "reported"
    if run.checkpoint == "best.ckpt":
        return "best so far"
    return "last" if own[-1][1] == run.checkpoint else run.checkpoint  # `checkpoints/` may have a later one


def encode_checkpoint(run: TrainedRun, name: str, types: Types) -> str:
    """Return the weights of a checkpoint as base64 safetensors."""
    is_chosen = name == run.checkpoint
    task = run.task if is_chosen else load_task(run.directory / name)
    return base64.b64encode(to_safetensors(task.model.state_dict(), types[not is_chosen])).decode()


def export_run(run: TrainedRun, own: Sequence[Checkpoint], types: Types) -> dict[str, Any]:
    """Return a run as plain data, but for what is shared with other runs or follows from them."""
    return {
        "name": run.directory.resolve().name,
        "finished": run.finished,
        "classes": run.task.hparams.get("classes"),
        "words": len(run.tokenizer),
        "limit": limit_of(run),
        "trained": run.block_size,
        "half": types[0] == torch.float16,
        "chosen": [name for _, name in own].index(run.checkpoint),
        "reported": name_of_chosen(run, own),
        "checkpoints": [
            {"name": name, "step": step, "weights": encode_checkpoint(run, name, types)} for step, name in own
        ],
    }


def export_runs(runs: Sequence[TrainedRun], alone: bool) -> tuple[dict[str, Any], list[str]]:
    """Return tokenizers and runs as plain data for the page, and lines for the console on what it holds.

    Args:
        alone: only the loaded checkpoint of each run, without those beside it.

    Raises:
        UserError: the page cannot compute a model, or would be too large.
    """
    models = [check_supported(run) for run in runs]
    files = [checkpoints_of(run, alone) for run in runs]
    checkpoints, types = fit_into_page(runs, files)
    tokenizers: list[dict[str, Any]] = []
    exported, lines = [], []
    for run, label, model, own, total in zip(runs, unique_labels(runs), models, checkpoints, map(len, files)):
        tokenizer = describe_tokenizer(run.tokenizer)
        if tokenizer not in tokenizers:
            tokenizers.append(tokenizer)
        label += ", without its counts" if run.task.counts is not None else ""
        shared = {"label": label, "total": total, "model": model, "tokenizer": tokenizers.index(tokenizer)}
        exported.append(export_run(run, own, types) | shared)
        lines.append(f"{exported[-1]['name']} ({run.label}): {list_checkpoints(own, total)}")
    if not alone and (single := [run for run, total in zip(exported, map(len, files)) if total == 1]):
        names = ", ".join(run["name"] for run in single)
        lines.append(f"No slider over the training of {names}: train with keep_every_n_steps=100 to get one.")
    if types[0] == torch.float16:
        lines.append("Weights are rounded to float16: in float32 they exceed 5 MB. Probabilities differ slightly.")
    return {"tokenizers": tokenizers, "runs": exported}, lines


def list_checkpoints(own: Sequence[Checkpoint], total: int) -> str:
    """Return the checkpoints that the page holds of a run as text: "average.ckpt, 9 steps from 0 to 396"."""
    if len(own) == 1 and own[0][0] is not None:
        return f"{own[0][1]} (step {own[0][0]})"
    names, steps = ([name for step, name in own if step is None], [step for step, _ in own if step is not None])
    names += [f"{len(steps)} steps from {steps[0]} to {steps[-1]}"] if steps else []
    share = f"; {len(own)} of {total} checkpoints, evenly spaced" if len(own) < total else ""
    return ", ".join(names) + share


def render_page(content: dict[str, Any], text: str, title: str = "Attention, live") -> str:
    """Return the page as HTML, for the runs of `export_runs` and the sentence that it opens with."""
    patterns = {name: pattern_options(name) for name in PATTERNS if name in KNOWN_PATTERNS}
    content = {**content, "text": text, "title": title, "patterns": patterns}
    page, style, *scripts = ((FOLDER / name).read_text(encoding="utf-8") for name in FILES)
    return fill_page(page, '"use strict";\n' + "\n".join(scripts), style, content)
