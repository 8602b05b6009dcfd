"""One self-contained HTML page on which trained runs are live: their weights, and the forward pass in JavaScript.

A run is exported as plain data: its tokenizer, the description of its model, and the weights of its checkpoints as
base64 safetensors. `play/engine.js` computes from them what the model computes here. `describe_model` raises a
`UserError` for a model that it does not compute: for every setting that this module does not name and that is not at
its default. `describe_tokenizer` does so for a tokenizer from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from speechformer.analysis.exports import to_safetensors
from speechformer.analysis.load import TrainedRun, unique_labels
from speechformer.corpora.load import AnyTokenizer
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.tokenizer import ABBREVIATIONS, Tokenizer
from speechformer.errors import UserError
from speechformer.keys import CONF, load_plain
from speechformer.layers.block import EPS
from speechformer.layers.by_layer import per_layer_configs
from speechformer.layers.mechanisms import MECHANISMS
from speechformer.layers.patterns import PATTERNS
from speechformer.layers.positions import POSITIONS, ALiBi, ByLayer, Positions, Relative, RoPE, XPos
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.encoder_decoder import EncoderDecoder
from speechformer.models.families import without_defaults
from speechformer.models.stack import SOFTMAX, Stack
from speechformer.runs.find import CHECKPOINTS
from speechformer.runs.folder import HISTORY, STEP, WEIGHTS
from speechformer.tasks.registry import load_task, read_checkpoint

FOLDER = Path(__file__).with_name("play")
FILES = ("page.html", "page.css", "words.js", "engine.js", "views.js", "page.js", "panel.js", "controls.js")
KNOWN: dict[str, dict[str, str]] = {  # choices of each group, and their options
    "model": {
        **dict.fromkeys(("nope", "sinusoidal", "learned", "kerple"), ""),
        **{"alibi": "slopes scale", "relative": "buckets max_distance", "fire": "hidden threshold"},
        **{"rope": "base frequencies growth fraction scaling factor", "xpos": "base gamma scale_base"},
    },
    "pattern": {
        **{"full": "", "window": "window", "block": "block", "strided": "stride", "dilated": "window dilation"},
        **{"global": "window tokens", "sinks": "window tokens", "bigbird": "window tokens links seed"},
    },
    "attention": {"softmax": "kv_heads qk_norm"},
}
KINDS = {"model": (POSITIONS, "sizes"), "pattern": (PATTERNS, ""), "attention": (MECHANISMS, "layer")}
KNOWN_VALUES = {
    "norm": "pre post sandwich parallel",
    "norm_type": "layer rms",
    "activation": "relu relu2 gelu gelu_tanh swiglu geglu geglu_tanh",
    "pool": "mean cls first",
    "classifier_activation": "relu tanh",
}
# keys of an architecture with any value
ANY_VALUE = """width heads layers ff vocab_size block_size dropout embedding_dropout classes classifier_width norm_eps
    final_norm embedding_norm head_width qkv_bias bias scale_embedding output_bias tied_output shared_embeddings"""
# What GPT-2 splits a text at, and the regular expressions that mean the same in the library and in JavaScript
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PROPERTY = r"\\[rnts]|\\p\{[LMNPSZ][a-z]?\}"
CLASS = rf"\[\^?(?:{PROPERTY}|[^\\\[\]&~-])+\]"
SAME_REGEX = re.compile(
    rf"(?:{CLASS}|{PROPERTY}|\\S|\(\?[:!]|[)|]|(?:[?*+]|\{{\d+(?:,\d*)?\}})(?!\+)|[^\\\[\](){{}}?*+.^$~])+"
)
MODELS = {EncoderClassifier: "classify", Decoder: "lm", EncoderDecoder: "translate"}
MAX_TOKENS = 128  # of a text; larger maps cannot be read
MOST = 16  # checkpoints of a run
TARGET_BYTES, MAX_BYTES = 5_000_000, 20_000_000  # of all weights in the page
Checkpoint = tuple[int | None, str]  # the optimizer step, None of an average; the file in the run's folder
EXAMPLES = (
    "We will rebuild our bridges, and our children will thank us.",
    "My friends, we shall mend the harbours, and our children will remember the work.",
    "The old woman does not see the horses.",
)


def describe_positions(positions: Positions, layers: int) -> dict[str, Any]:
    """Return each encoding with its options and the prefix of its weights, and which of them each layer has."""
    is_mixed = isinstance(positions, ByLayer)
    members: list[Any] = list(positions.members) if isinstance(positions, ByLayer) else [positions]
    names = {encoding: name for name, encoding in POSITIONS.items()}
    described = []
    for k, member in enumerate(members):
        name = names.get(type(member), type(member).__name__.lower())
        options: dict[str, Any] = {}  # what the weights do not say
        if isinstance(member, ALiBi):
            learned = member.log_slopes is not None
            options = {"scale": member.scale, "learned": learned, "slopes": member.fixed_slopes.tolist()}
        if isinstance(member, RoPE):
            shown = ("base", "frequencies", "growth", "scaling", "factor", "length")
            options = {name: getattr(member, name) for name in shown}
            options["R"] = member.table_PR.shape[1]
        if isinstance(member, XPos):
            options["log_decay"] = member.log_decay_H.tolist()
        if isinstance(member, Relative):
            options = {"max_distance": member.max_distance, "buckets": member.buckets.tolist()}
        prefix = f"positions.members.{k}." if is_mixed else "positions."
        described.append({"name": name, "prefix": prefix, **options})
    return {"members": described, "layers": [members.index(positions.at_layer(k)) for k in range(layers)]}


def pattern_options(name: str) -> dict[str, Any]:
    """Return the options of a pattern with their defaults."""
    return {key: option.default for key, option in inspect.signature(PATTERNS[name]).parameters.items()}


def check_settings(architecture: dict[str, Any], layers: int) -> None:
    """Raise a `UserError` for a setting that the engine does not know and that is not at its default."""
    for group, (kinds, common) in KINDS.items():
        for spec in per_layer_configs(architecture.get(group, SOFTMAX), group, layers):
            if spec["name"] not in KNOWN[group]:
                raise UserError(f"{group}={spec['name']} is not supported")
            for key in without_defaults(spec, kinds, common):  # type: ignore[arg-type]
                if key not in ("name", *KNOWN[group][spec["name"]].split()):
                    raise UserError(f"{group}.{key}={spec[key]} is not supported")
    defaults = load_plain(CONF / "config.yaml")["architecture"]
    for key, value in architecture.items():
        is_known = key in (*ANY_VALUE.split(), *KINDS) or value in KNOWN_VALUES.get(key, "").split()
        if not is_known and value != defaults.get(key):
            raise UserError(f"architecture.{key}={value} is not supported")


def describe_model(model: nn.Module, architecture: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine needs to know of a model beside its weights; a `UserError` if it cannot compute it."""
    stacks = {name: stack for name, stack in model.named_children() if name in ("encoder", "decoder")}
    if type(model) not in MODELS or not all(isinstance(stack, Stack) for stack in stacks.values()):
        raise UserError(f"model={architecture['model']['name']} is not supported")
    parts = {}
    for name, stack in stacks.items():
        assert isinstance(stack, Stack)
        layers = len(stack.patterns)
        check_settings(architecture, layers)
        parts[name] = {
            "width": stack.embedding.embedding_dim,
            "heads": stack.heads,
            "kvHeads": [block.attention.kv_heads for block in stack.blocks],
            "headWidth": stack.head_width,
            "causal": stack.causal,
            "hasCls": stack.first_token is not None,
            "positions": describe_positions(stack.positions, layers),  # of encoder and decoder their buckets differ
        }
    eps = architecture.get("norm_eps")
    patterns = per_layer_configs(architecture["pattern"], "pattern", layers)
    return {
        "task": MODELS[type(model)],
        "parts": parts,
        "patterns": [{**pattern_options(pattern["name"]), **pattern} for pattern in patterns],
        "norm": architecture["norm"],
        "eps": EPS[architecture.get("norm_type", "layer")] if eps is None else eps,
        "qkEps": EPS["rms"] if eps is None else eps,
        "activation": architecture["activation"],
        "finalNorm": architecture["final_norm"],
        "pool": architecture.get("pool"),
        "headActivation": architecture.get("classifier_activation", "relu"),
        "scale": stack.scale,
    }


def describe_tokenizer(tokenizer: AnyTokenizer) -> dict[str, Any]:
    """Return a tokenizer as the page reads it; a `UserError` if the page would give other ids."""
    common: dict[str, Any] = {"unknown": tokenizer.unknown, "ends": tokenizer.ends, "padding": tokenizer.padding}
    if isinstance(tokenizer, Tokenizer):
        return {**common, "kind": "nltk", "vocabulary": tokenizer.vocabulary, "abbreviations": ABBREVIATIONS}
    content = json.loads(tokenizer.tokenizer.to_str())
    ids: dict[str, int] = tokenizer.tokenizer.get_vocab()
    common |= {"vocabulary": sorted(ids, key=lambda word: ids[word])}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"].get("merges", [])]
    if isinstance(tokenizer, PretrainedTokenizer):
        return {**common, "merges": merges, **describe_pretrained(tokenizer, content)}
    is_words = content["model"]["type"] == "WordLevel"
    return {**common, "kind": "words"} if is_words else {**common, "kind": "bpe", "merges": merges}


def describe_pretrained(tokenizer: PretrainedTokenizer, content: dict[str, Any]) -> dict[str, Any]:
    """Return what a tokenizer from elsewhere does besides merging bytes, of its tokenizer.json's content."""
    from tokenizers.pre_tokenizers import ByteLevel

    model, ids, written = content["model"], tokenizer.tokenizer.get_vocab(), content["added_tokens"]
    steps = content["pre_tokenizer"] or {}
    *before, last = steps.get("pretokenizers", [steps])
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [step.pop("pattern", {}).get("Regex", "") for step in before]
    is_split = all(step == split for step in before) and last.get("type") == "ByteLevel"
    splits = [to_javascript(each) for each in [*splits, *[GPT2_SPLIT] * last.get("use_regex", True)]]
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    same = {
        "model": model["type"] == "BPE" and not any(map(model.get, options)),
        "vocab": {*ByteLevel.alphabet()} <= ids.keys() and sorted(ids.values()) == list(range(len(ids))),
        "normalizer": content["normalizer"] in (None, {"type": "NFC"}),
        "pre_tokenizer": is_split and None not in splits and not last["add_prefix_space"],
        "added_tokens": not any(token[key] for token in written for key in ("single_word", "lstrip", "rstrip")),
    }
    for key, is_same in same.items():
        if not is_same:
            raise UserError(f"the {key} of its tokenizer.json is not supported")
    letter = tokenizer.tokenizer.encode("a", add_special_tokens=False).ids
    around = tokenizer.encode("a")
    at = next(k for k in range(len(around)) if around[k : k + len(letter)] == letter)
    return {
        "kind": "pretrained",
        "written": [{key: token[key] for key in ("content", "id", "normalized")} for token in written],
        "special": [token["id"] for token in written if token["special"]],
        "nfc": content["normalizer"] is not None,
        "splits": splits,
        "wholeWords": model.get("ignore_merges", False),
        "before": around[:at],
        "after": around[at + len(letter) :],
    }


def to_javascript(regex: str) -> str | None:
    """Return a regular expression of the library `tokenizers` as `words.js` reads it; None if it might differ."""
    anycase = {letter: letter + letter.upper() for letter in "dlmrtve"} | {"s": "sS\u017f"}

    def spell(group: re.Match[str]) -> str:
        return "(?:" + "".join(f"[{anycase[c]}]" if c in anycase else c for c in group[1]) + ")"

    spelt = re.sub(r"\(\?i:([dlmrstve'|]+)\)", spell, regex)
    if not SAME_REGEX.fullmatch(spelt):
        return None
    in_class = re.sub(CLASS, lambda match: match[0].replace(r"\s", "~S"), spelt)
    return in_class.replace(r"\s", "[~S]").replace(r"\S", "[^~S]")


def check_supported(run: TrainedRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe the model of a run and its tokenizer; a `UserError` that names the run if the page lacks them."""
    try:
        if run.task.name not in MODELS.values():
            raise UserError(f"task={run.task.name} is not supported")
        return describe_model(run.model, run.task.hparams["architecture"]), describe_tokenizer(run.tokenizer)
    except UserError as error:
        raise UserError(f"{run.directory}: {error} by the live page.") from None


def checkpoints_of(run: TrainedRun, alone: bool) -> list[Checkpoint]:
    """Return the checkpoints of a run by step: that which was loaded, and unless `alone` those beside it."""
    if run.is_pretrained:
        return [(None, run.checkpoint)]
    paths = [run.directory / run.checkpoint]
    if not alone:
        kept = [path for folder in (HISTORY, WEIGHTS) for path in (run.directory / folder).glob("*.ckpt")]
        paths += filter(Path.exists, (run.directory / name for name in CHECKPOINTS))
        paths += [path for path in kept if re.fullmatch(STEP, path.name)]
    names: dict[int | None, str] = {}
    for path in paths:  # an average is of several steps
        step = None if path.name == "average.ckpt" else read_checkpoint(path).get("global_step")
        if not names or step is not None:
            names.setdefault(step, path.relative_to(run.directory).as_posix())
    return sorted(names.items(), key=lambda checkpoint: (checkpoint[0] is None, checkpoint[0]))


def evenly_spaced(checkpoints: Sequence[Checkpoint], chosen: str, most: int) -> list[Checkpoint]:
    """Return at most `most` checkpoints: the chosen one, and others between the first and the last."""
    others = [checkpoint for checkpoint in checkpoints if checkpoint[1] != chosen]
    places = np.linspace(0, len(others) - 1, min(len(others), most - 1)).round()
    picked = {others[int(place)] for place in places}
    return [checkpoint for checkpoint in checkpoints if checkpoint in picked or checkpoint[1] == chosen]


def fit_into_page(
    runs: Sequence[TrainedRun], files: Sequence[Sequence[Checkpoint]]
) -> tuple[list[list[Checkpoint]], torch.dtype]:
    """Choose the checkpoints of each run that the page holds, and the type of their weights.

    Raises:
        UserError: even one of each run in half precision would be too large.
    """
    total = sum(count_weights(run.model) for run in runs) * torch.half.itemsize
    if total > MAX_BYTES:
        raise UserError(
            f"The page would hold {total / 1e6:.0f} MB of weights; the limit is {MAX_BYTES / 1e6:.0f} MB. "
            "Name fewer runs or smaller models."
        )
    most = min(MOST, int(MAX_BYTES / total))
    picked = [evenly_spaced(own, run.checkpoint, most) for run, own in zip(runs, files)]
    is_small = 2 * total * max(map(len, picked)) <= TARGET_BYTES
    return picked, torch.float32 if is_small else torch.float16


def count_weights(model: nn.Module) -> int:
    """Count the numbers in the weights of a model, those of a shared table once."""
    return sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())


def encode_checkpoint(run: TrainedRun, name: str, dtype: torch.dtype) -> str:
    """Return the weights of a checkpoint as base64 safetensors."""
    task = run.task if name == run.checkpoint else load_task(run.directory / name)
    return base64.b64encode(to_safetensors(task.model.state_dict(), dtype)).decode()


def export_runs(runs: Sequence[TrainedRun], alone: bool) -> tuple[dict[str, Any], list[str]]:
    """Return tokenizers and runs as plain data for the page, and lines for the console on what it holds.

    Args:
        alone: only the loaded checkpoint of each run, without those beside it.

    Raises:
        UserError: the page cannot compute a model, or would be too large.
    """
    models, tokenizers = zip(*map(check_supported, runs))
    files = [checkpoints_of(run, alone) for run in runs]
    picked, dtype = fit_into_page(runs, files)
    exported, lines = [], []
    for run, label, model, tokenizer, own, known in zip(runs, unique_labels(runs), models, tokenizers, picked, files):
        limits = [MAX_TOKENS, run.max_length, run.block_size if run.task.name == "classify" else None]
        names = [name for _, name in own]
        exported.append(
            {
                "name": run.directory.resolve().name,
                "finished": run.finished,
                "classes": run.task.hparams.get("classes"),
                "words": len(run.tokenizer),
                "limit": min(limit for limit in limits if limit is not None),
                "trained": run.block_size,
                "half": dtype == torch.float16,
                "chosen": names.index(run.checkpoint),
                "reported": "reported" if run.finished else run.checkpoint,
                "label": f"{run.directory.resolve().name}: " * run.is_pretrained
                + label
                + ", without its counts" * (run.task.counts is not None),
                "total": len(known),
                "model": model,
                "tokenizer": tokenizers.index(tokenizer),
                "checkpoints": [
                    {"name": name, "step": step, "weights": encode_checkpoint(run, name, dtype)} for step, name in own
                ],
            }
        )
        steps = [step for step, _ in own if step is not None]
        span = f", steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else ""
        lines.append(f"{run.directory.name} ({run.label}): {len(own)} of {len(known)} checkpoints{span}")
        if len(known) == 1 and not alone and not run.is_pretrained:
            lines.append("No slider over its training: train with keep_every_n_steps=100 to get one.")
    if dtype == torch.float16:
        lines.append("Weights are rounded to float16: in float32 they exceed 5 MB. Probabilities differ slightly.")
    return {"tokenizers": tokenizers, "runs": exported}, lines


def write_page(
    runs: Sequence[TrainedRun], path: Path | str, text: str | None = None, alone: bool = False
) -> list[str]:
    """Write the page of some runs, and return lines on what it holds.

    Args:
        text: the sentence that it opens with; None: the example with the fewest unknown words.
        alone: only the loaded checkpoint of each run, without those beside it.

    Raises:
        UserError: the page cannot compute a model, or would be too large.
    """
    content, lines = export_runs(runs, alone)
    example = min(EXAMPLES, key=lambda text: runs[0].tokenizer.encode(text).count(runs[0].tokenizer.unknown))
    Path(path).write_text(render_page(content, text or example), encoding="utf-8")
    return lines


def render_page(content: dict[str, Any], text: str) -> str:
    """Return the page as HTML, for the runs of `export_runs` and the sentence that it opens with.

    All data is one JSON object, escaped so that no character can end its element. The policy of the page allows its
    script alone, by the hash. The script inserts words as text only, never as HTML.
    """
    patterns = {name: pattern_options(name) for name in PATTERNS if name in KNOWN["pattern"]}
    content = {**content, "text": text, "title": "Attention, live", "patterns": patterns}
    page, style, *scripts = ((FOLDER / name).read_text(encoding="utf-8") for name in FILES)
    script = '"use strict";\n' + "\n".join(scripts)
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for mark, part in (("__SHA256__", digest), ("__STYLE__", style), ("__SCRIPT__", script), ("__CONTENT__", data)):
        page = page.replace(mark, part, 1)
    return page
