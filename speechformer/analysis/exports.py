"""Export a trained model to files that other programs read.

    safetensors     model.safetensors   the weights; `load_safetensors` rebuilds the model from the file's header
    torch.export    model.pt2           the computation, for any batch size and up to 4,096 tokens (or the model's
                                        maximum); `torch.export.load("model.pt2").module()(ids)` needs only torch

    huggingface     config.json, model.safetensors, tokenizer.json and tokenizer_config.json, which `transformers`
                    loads without this package, if the model is one of `models.families`; what training does not
                    change of a model from elsewhere (special tokens, chat template, rotations) is as it was there

The first two have the counts of words beside the network (`task.ngram_mixture`, `task.naive_bayes`), and so the
training text that was counted.

Beside them are tokenizer.json, export.json (inputs, output, hyperparameters), tokenizers.json (the tokenizer in the
format of the library `tokenizers`) and README.md (an example without this package, and a model card). Each export is
loaded again, and its logits are compared with the run's, before the files get their names.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.export import Dim

from speechformer import console
from speechformer.analysis.card import card
from speechformer.analysis.load import TrainedRun, load_pretrained
from speechformer.corpora.files import OutputFolder, atomic_write
from speechformer.corpora.portable import portable_subwords, portable_words
from speechformer.corpora.pretrained import CONFIG, TOKENIZER, WEIGHTS, PretrainedTokenizer
from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.subwords import Subwords
from speechformer.errors import UserError
from speechformer.layers.mixers import Mixer
from speechformer.layers.patterns import TopBlocks
from speechformer.layers.positions import Positions
from speechformer.models.families import FAMILIES
from speechformer.models.pretrained import SMALL_FILES, TOKENIZER_CONFIG, read_small_files, to_family
from speechformer.models.stack import Stack
from speechformer.runs import folder as runs
from speechformer.tasks.base import Task
from speechformer.tasks.registry import TASKS

MAX_TOKENS = 4096  # of an exported computation whose model has no maximum
COUNTS = "counts."  # begins the names of their tensors
FILES = {"safetensors": WEIGHTS, "torch.export": "model.pt2"}
HUGGINGFACE = "huggingface"
NAMES = (*FILES.values(), runs.TOKENIZER, "export.json", "tokenizers.json", "README.md")


def description(run: TrainedRun) -> dict[str, Any]:
    """Return the inputs, the output and what rebuilds the model, as plain data."""
    return {
        "task": run.task.name,
        "inputs": run.task.inputs,
        "output": run.task.output,
        "max_length": run.max_length,
        "classes": run.task.hparams.get("classes"),
        "weights_of": run.checkpoint,
        "hyper_parameters": dict(run.task.hparams),
    }


def to_safetensors(state: Mapping[str, Tensor], dtype: torch.dtype | None = None, **metadata: str) -> bytes:
    """Serialise weights, of one type unless it is None.

    A table with several names is stored once, under the first. `shared` in the header maps its other names to that.
    """
    first = dict[int, str]()
    names = {name: first.setdefault(value.data_ptr(), name) for name, value in state.items()}
    weights = {name: state[name].detach().to("cpu", dtype).contiguous() for name in first.values()}
    shared = {name: stored for name, stored in names.items() if stored != name}
    return save(weights, metadata={**metadata, "shared": json.dumps(shared)})


def as_safetensors(run: TrainedRun) -> bytes:
    """Serialise the weights, and in the header what rebuilds the model."""
    state = run.model.state_dict()
    if run.task.counts is not None:
        state |= {f"{COUNTS}{name}": count for name, count in run.task.counts.state_dict().items()}
    return to_safetensors(state, speechformer=json.dumps(description(run)))


def load_safetensors(path: Path) -> Task:
    """Load a safetensors export as a task, on the CPU and in evaluation mode."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            described, shared = json.loads(header["speechformer"]), json.loads(header["shared"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        task = TASKS[described["task"]](**described["hyper_parameters"])
        weights |= {name: weights[first] for name, first in shared.items()}
        counts = {name: weights.pop(name) for name in [*weights] if name.startswith(COUNTS)}
        if task.counts is not None:
            task.counts.load_state_dict({name.removeprefix(COUNTS): count for name, count in counts.items()})
        task.model.load_state_dict(weights)
    except Exception as error:  # the exceptions of safetensors are not public
        raise UserError(f"{path} is not an export of speechformer ({type(error).__name__}).") from None
    return task.eval()


def as_program(run: TrainedRun) -> bytes:
    """Serialise the computation with torch.export; raise a UserError if torch cannot export the model."""
    modules = list(run.model.modules())
    stacks = [module for module in modules if isinstance(module, Stack)]
    decoders = [module for stack in stacks if stack.causal for module in stack.modules()]
    refused = {
        f"model={run.label} (an RNN)": any(isinstance(module, torch.nn.RNNBase) for module in modules),
        "positions that depend on the length of the text": any(
            isinstance(module, Positions) and not module.can_cache for module in modules
        ),
        "attention without scores in a decoder, whose chunks depend on the length of the text": any(
            isinstance(module, Mixer) for module in decoders
        ),
        "pattern=top_blocks, whose blocks depend on the length of the text": any(
            isinstance(pattern, TopBlocks) for stack in stacks for pattern in stack.patterns
        ),
    }
    for construct, is_there in refused.items():  # torch would fix the length, or end in an error about its guards
        if is_there:
            raise UserError(f"torch.export cannot export {construct}. Use the safetensors (`--format safetensors`).")
    limit = run.max_length or MAX_TOKENS
    inputs = tuple(example_inputs(run, 2, 7))
    run.task(*inputs)  # which makes the tables of counts
    for module in modules:
        if isinstance(module, Positions):
            module.prepare(min(limit + 1, module.max_length or limit + 1))  # one more for a CLS token
    batch = Dim("batch", min=1, max=1 << 20)
    sizes = tuple({0: batch, 1: Dim(f"{name}_tokens", min=1, max=limit)} for name in run.task.inputs)
    # torch 2.9 loses the names of the inputs of a task, whose forward takes *ids
    module, shapes = (run.model, sizes) if run.task.counts is None else (run.task, (sizes,))
    try:
        program = torch.export.export(module, inputs, dynamic_shapes=shapes)
        torch.export.save(program, file := io.BytesIO())
        program.module()(*inputs)  # which compiles the guards: some errors of torch come only here
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            f"torch {torch.__version__} cannot export model={run.label} ({reason}). Use the safetensors "
            "(`--format safetensors`), or try a newer torch."
        ) from error
    return file.getvalue()


def example_inputs(run: TrainedRun, rows: int, tokens: int) -> list[Tensor]:
    """Draw ids for each input of the run's model, [rows, tokens]; the last row ends with padding where it may."""
    length = min(tokens, run.max_length or tokens)
    generator = torch.Generator().manual_seed(tokens)
    ids = [torch.randint(4, len(run.tokenizer), (rows, length), generator=generator) for _ in run.task.inputs]
    if run.task.pads_input and tokens > 1:
        ids[0][-1, -1] = PAD
    return ids


@torch.no_grad()
def compare(run: TrainedRun, exported: Callable[..., Tensor]) -> float:
    """Return the largest difference between a logit of the run and of its export, over a few batches."""
    batches = [example_inputs(run, rows, tokens) for rows, tokens in ((1, 1), (2, 7), (5, 12))]
    return float(torch.stack([(exported(*ids) - run.task(*ids)).abs().max() for ids in batches]).max())


def checked(run: TrainedRun, exported: Callable[..., Tensor]) -> float:
    """Return the largest difference of a logit; raise a UserError if it is more than the order of sums explains."""
    difference = compare(run, exported)
    if not difference <= 1e-4:
        raise UserError(f"The export is wrong: a logit differs by {difference:.1e}. Please report this.")
    return difference


def export(run: TrainedRun, format: str, path: Path) -> float:
    """Export a run to a file, load the export again and compare; return the largest difference of a logit."""
    run.task.cpu()
    content = as_program(run) if format == "torch.export" else as_safetensors(run)
    with atomic_write(path) as file:
        file.write(content)
        file.flush()
        exported: Callable[..., Tensor] = (
            torch.export.load(io.BytesIO(content)).module()
            if format == "torch.export"
            else load_safetensors(Path(file.name))
        )
        return checked(run, exported)


def portable_tokenizer(run: TrainedRun) -> Any:
    """Return a run's tokenizer as one of the library `tokenizers`."""
    if isinstance(run.tokenizer, PretrainedTokenizer):
        return run.tokenizer.tokenizer
    if isinstance(run.tokenizer, Subwords):
        return portable_subwords(run.tokenizer)
    limit = run.block_size if "predict" in run.task.abilities else None  # a classifier reads no more than in training
    return portable_words(run.tokenizer.vocabulary, limit)


def export_huggingface(run: TrainedRun, folder: Path) -> None:
    """Export a run as `transformers` reads it, load the export again, compare the logits, and print what was written.

    Raises:
        UserError: the model has no counterpart there; the setting is named.
    """
    run.task.cpu()
    if run.task.counts is not None:
        raise UserError("Hugging Face's models have no counts of words beside the network; train without them.")
    place = run.directory / runs.PRETRAINED
    small = read_small_files(run.directory) if run.is_pretrained else runs.read_json(place) or {}
    config, tensors = to_family(run.task.hparams["architecture"], run.model.state_dict(), small.get(CONFIG))
    if "predict" in run.task.abilities:
        labels = list(run.task.hparams["classes"])
        config |= {"id2label": dict(enumerate(labels)), "label2id": {label: k for k, label in enumerate(labels)}}
    tokenizer = portable_tokenizer(run)
    pads = PAD if "predict" in run.task.abilities else run.tokenizer.padding
    every = {"pad": pads, "eos": run.tokenizer.end, "unk": max(run.tokenizer.unknown, 0) or None}
    ids = {kind: index for kind, index in every.items() if index is not None}
    config = {f"{kind}_token_id": ids.get(kind) for kind in ("pad", "eos", "bos")} | config | {"dtype": "float32"}
    special = {f"{kind}_token": tokenizer.id_to_token(index) for kind, index in ids.items()}
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    own["split_special_tokens"] = not isinstance(run.tokenizer, PretrainedTokenizer)  # "<eos>" in a text is text
    longest = config[FAMILIES[config["model_type"]].keys["block_size"]]
    tokenizer_config = small.get(TOKENIZER_CONFIG, own)
    known = tokenizer_config.get("model_max_length")
    shortest = min(known, longest) if isinstance(known, int | float) else longest
    contents = small | {
        CONFIG: config,
        TOKENIZER: tokenizer.to_str(pretty=False),
        TOKENIZER_CONFIG: tokenizer_config | {"model_max_length": shortest},
        "README.md": f"{card(run, [HUGGINGFACE]).rstrip()}\n",
    }
    output = OutputFolder(folder)
    paths = {name: output.file(name) for name in (WEIGHTS, *contents)}
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        unchecked = Path(directory)
        for name, content in contents.items():
            text = content if isinstance(content, str) else f"{json.dumps(content, indent=2)}\n"
            (unchecked / name).write_text(text, encoding="utf-8", newline="\n")
        (unchecked / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        difference = checked(run, load_pretrained(unchecked).task.cpu())
        for name, path in paths.items():
            os.replace(unchecked / name, path)
    for name in SMALL_FILES:  # of another model
        output.remove_stale(name)
    kind = config["model_type"]
    console.write(f"{folder}: a {kind} for transformers; loaded again, logits differ by at most {difference:.0e}.")


def export_all(run: TrainedRun, format: str | None, folder: Path) -> None:
    """Export a run in a format, None for each that its model has, and print what was written."""
    if format == HUGGINGFACE:
        return export_huggingface(run, folder)
    output, formats = OutputFolder(folder), []
    paths = {name: output.file(name) for name in NAMES}  # before any is written
    for name in [format] if format else FILES:
        path = paths[FILES[name]]
        try:
            difference = export(run, name, path)
        except UserError as error:
            if format or name == "safetensors":
                raise
            console.say(str(error))
            continue
        formats.append(name)
        megabytes = path.stat().st_size / 2**20
        console.write(f"{path} ({megabytes:.1f} MB); loaded again, logits differ by at most {difference:.0e}.")
    if run.task.counts is not None:
        console.say("The export has the counts of words, too, and so the training text that was counted.")
    run.tokenizer.save(paths[runs.TOKENIZER])
    portable = portable_tokenizer(run).to_str(pretty=False)
    texts = {"export.json": json.dumps(description(run), indent=2), "tokenizers.json": portable}
    for name, text in {**texts, "README.md": card(run, formats)}.items():
        paths[name].write_text(f"{text.rstrip()}\n", encoding="utf-8")
    console.write(f"{paths['README.md']} has an example that needs no speechformer.")
    return None
