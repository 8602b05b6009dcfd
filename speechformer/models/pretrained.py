"""Read and write models as Hugging Face's `save_pretrained` leaves them: config.json and safetensors.

Nothing in a folder is executed, and nothing is downloaded.

`init_from=FOLDER` in a config goes on from such a model, or from a run: `settings_of` takes its architecture.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from speechformer.corpora.files import decode, file_sums, read_file, read_json
from speechformer.corpora.pretrained import CONFIG, TOKENIZER, WEIGHTS, PretrainedTokenizer
from speechformer.errors import UserError
from speechformer.keys import CONF, load_plain
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.families import FAMILIES, Config, Family, family_of, no_counterpart
from speechformer.models.options import SIZES
from speechformer.paths import path_of
from speechformer.runs.find import find_checkpoint
from speechformer.runs.folder import PRETRAINED, RESULT
from speechformer.runs.folder import sha256 as sha256_of_file

INDEX = "model.safetensors.index.json"
# Beside them, what training does not change
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SMALL_FILES = (CONFIG, "generation_config.json", TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
# tensors of older versions that are no weights
NO_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids)$")
OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of the norms of early BERTs
DTYPES = ("F64", "F32", "F16", "BF16")  # that are not quantised


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder has a model of Hugging Face's."""
    return (folder / CONFIG).exists()


def read_architecture(folder: Path) -> tuple[Family, Config, Config]:
    """Return the family of a folder's model, its config and its settings of ours.

    Raises:
        UserError: a file is missing or damaged, or the model has no counterpart here; the key is named.
    """
    path = folder / CONFIG
    if not is_pretrained(folder):
        raise UserError(f"{folder} has no {CONFIG}, so it is no folder of a model as Hugging Face saves it.")
    config = read_json(path)
    if "model_type" not in config:
        raise UserError(f"{path} has no model_type, so it is no config of Hugging Face's.")
    if config.get("quantization_config"):
        raise UserError(f"{path}: quantization_config: quantised weights cannot be read; save the model without it.")
    family = next((family for name, family in FAMILIES.items() if name == config["model_type"]), None)
    if family is None:
        families = f"the families that can be read are {', '.join(FAMILIES)}"
        raise UserError(f"{path}: model_type={config['model_type']!r} has no counterpart here; {families}.")
    try:
        architecture = family.architecture(config)
        family.heads(architecture, config)
        return family, config, architecture
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None
    except (TypeError, ValueError, KeyError, ZeroDivisionError, IndexError) as error:
        raise UserError(f"{path} has a value that a {family.type} cannot have ({error}).") from None


def read_small_files(folder: Path) -> dict[str, Any]:
    """Return the small files of a model that training does not change by name: JSON as plain data, else the text.

    Raises:
        UserError: a file is damaged.
    """
    if (folder / RESULT).exists():  # a run, which may have begun with a model from elsewhere itself
        return read_json(folder / PRETRAINED) if (folder / PRETRAINED).exists() else {}
    contents = dict[str, Any]()
    for path in (folder / name for name in SMALL_FILES):
        if path.exists():
            is_json = path.suffix == ".json"
            contents[path.name] = read_json(path) if is_json else decode(read_file(path), str(path))
    return contents


def class_names(folder: Path, config: Config) -> list[str]:
    """Return the names of the classes of a folder's classifier, in order.

    Raises:
        UserError: it does not choose one of two or more classes.
    """
    if (problem := config.get("problem_type")) not in (None, "single_label_classification"):
        raise UserError(f"{folder}/{no_counterpart('problem_type', problem, 'only single_label_classification')}")
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    if not isinstance(names, dict) or {*map(str, names)} != {*map(str, range(max(len(names), 2)))}:
        raise UserError(f"{folder}/{no_counterpart('id2label', names, 'names of two or more classes by 0, 1, ...')}")
    return [str(names[index]) for index in sorted(names, key=int)]


def sha256(folder: Path) -> str:
    """Return the sha256 of the files of a model that decide what it computes."""
    names = [*sorted(path.name for path in folder.glob("*.safetensors*")), TOKENIZER, CONFIG]
    return hashlib.sha256(b"".join(map(bytes.fromhex, file_sums(folder, names).values()))).hexdigest()


def settings_of(config: Config) -> Config:
    """Return a config with the architecture of the folder that its `init_from` names, and the sha256 of its files.

    The folder is that of a finished run, or of a model from elsewhere. A pattern of the config stays, so that a model
    can be given a window; so does `block_size`.

    Raises:
        UserError: the folder has no model for the config's task.
    """
    folder = path_of(config["init_from"])
    if not is_pretrained(folder):
        return settings_of_run(config, folder)
    family, _, architecture = read_architecture(folder)
    if architecture["model"]["name"] == "learned" and config["block_size"] > architecture["block_size"]:
        raise UserError(
            f"block_size={config['block_size']} is above the {architecture['block_size']} learned positions of "
            f"{folder}; set at most that."
        )
    task = "classify" if "pool" in architecture else "lm"
    if config["task"]["name"] != task:
        raise UserError(f"init_from={folder} is a {family.type}, for task={task}, not task={config['task']['name']}.")
    end = PretrainedTokenizer.of_folder(folder).end
    if task == "lm" and config["corpus"]["name"] in ("text", "stories") and end is None:
        raise UserError(f"{folder / CONFIG}: eos_token_id, the token that ends a document, is missing; set it.")
    check_tensors(folder, new_classifier=True)  # what is wrong with a file is said before a corpus is read
    groups = {
        group: load_plain(CONF / group / f"{architecture[group]['name']}.yaml") | architecture[group]
        for group in ("model", "pattern", "attention")
    }
    if config["pattern"]["name"] != "full":
        groups["pattern"] = config["pattern"]
    own = config["architecture"]
    options = {key: architecture.get(key, value) for key, value in own.items()}
    sizes = {key: architecture[key] for key in (*SIZES, "vocab_size")}
    place = {"folder": str(folder), "sha256": sha256(folder)}
    task_options = {**config["task"], "tokens": "pretrained"}
    return {**config, **sizes, **groups, "architecture": options, "task": task_options, "init_from": place}


def settings_of_run(config: Config, folder: Path) -> Config:
    """Return a config with the architecture of a finished run; see `settings_of`."""
    checkpoint, result = find_checkpoint(folder)
    if result is None or result["status"] != "finished":
        raise UserError(f"init_from={folder}: the run has not finished; let the same command resume it.")
    own, task, length = result["config"], result["task"], config["block_size"]
    if config["task"]["name"] != task:
        raise UserError(f"init_from={folder} is a run of task={task}; set task={task}.")
    if symbols_of(config) != symbols_of(own):
        raise UserError(f"init_from={folder} is a run of a probe with other settings; only lengths may differ.")
    if result.get("tokenizer_sha256") not in (None, sha256_of_file(folder / TOKENIZER)):
        raise UserError(f"{folder / TOKENIZER} is not the one that the run trained with: its sha256 differs.")
    if own["model"]["name"] == "learned" and length > own["block_size"]:
        raise UserError(f"block_size={length} is above the {own['block_size']} learned positions of {folder}.")
    decided = {key: own[key] for key in (*SIZES, "vocab_size", "model", "attention", "architecture")}
    if config["pattern"]["name"] == "full":
        decided["pattern"] = own["pattern"]
    if "tokens" in own["task"]:
        decided["task"] = config["task"] | {"tokens": own["task"]["tokens"]}
    sums = file_sums(folder, [checkpoint, TOKENIZER])
    digest = hashlib.sha256(b"".join(map(bytes.fromhex, sums.values()))).hexdigest()
    return {**config, **decided, "init_from": {"folder": str(folder), "sha256": digest}}


def symbols_of(config: Config) -> Config:
    """Return what decides the symbols of a probe, all but its lengths; {} of another task."""
    return {key: value for key, value in (config.get("probe") or {}).items() if "length" not in key}


def check_overrides(config: Config, overrides: Sequence[str]) -> None:
    """Raise a `UserError` if a command line sets what `init_from` decides."""
    if not config.get("init_from"):
        return
    groups = {*SIZES, "vocab_size", "architecture", "model", "attention"}
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    decided = [key for key in keys if key.partition(".")[0] in groups or key == "task.tokens"]
    if decided:
        it = "it" if len(decided) == 1 else "them"
        raise UserError(f"init_from={config['init_from']['folder']} decides {', '.join(decided)}; remove {it}.")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the safetensors of a folder: each tensor, which is read when it is indexed, by its name."""
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(f"{folder / INDEX} has no weight_map, the file of each tensor; save the model again.")
        files = sorted({*names.values()})
    elif (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = f" ({pickles[0]} is a pickle, which could run code; save it again with safetensors)" if pickles else ""
        raise UserError(f"{folder} has no {WEIGHTS}{why}.")
    with contextlib.ExitStack() as stack:
        tensors = dict[str, Any]()
        for file in files:
            if Path(file).name != file:
                raise UserError(f"{folder / INDEX} names {file}, which is not in its folder.")
            try:
                parts = stack.enter_context(safe_open(folder / file, framework="pt"))
            except Exception as error:  # the exceptions of safetensors are not public
                raise UserError(f"{folder / file} is damaged, or no file of safetensors ({error}).") from None
            for name in parts.keys():  # noqa: SIM118, as it is no dict
                new = re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda match: OLD_NAMES[match[0]], name)
                tensors[new] = parts.get_slice(name)
                if (dtype := tensors[new].get_dtype()) not in DTYPES and not NO_WEIGHTS.search(name):
                    raise UserError(f"{folder}: {name} is quantised ({dtype}), which cannot be read.")
        yield tensors


def check_shape(folder: Path, name: str, tensor: Any, shape: list[int]) -> None:
    """Raise a `UserError` unless a tensor of a file has this shape."""
    if (own := tensor.get_shape()) != shape:
        raise UserError(f"{folder}: {name} {own} does not fit the sizes in {CONFIG}, which ask for {shape}.")


def check_tensors(folder: Path, new_classifier: bool = False) -> None:
    """Compare the tensors of a folder with its config, without reading them; for errors see `load_weights`."""
    _, config, architecture = read_architecture(folder)
    classes = {"classes": 2 if new_classifier else len(class_names(folder, config))} if "pool" in architecture else {}
    kind: Any = EncoderClassifier if classes else Decoder
    try:
        with torch.device("meta"):
            model = kind(**architecture, **classes, dropout=0.0)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}, as settings of ours: {error}") from None
    load_weights(model, folder, new_classifier)


def load_weights(model: nn.Module, folder: Path, new_classifier: bool = False) -> list[str]:
    """Load a folder's weights into a model of its architecture, which may have fewer learned positions.

    Into a model on torch's "meta" device nothing is loaded, and only shapes are compared.

    Args:
        new_classifier: leave the layer of the classes as it is, and the pooler before it if the folder has none.

    Returns:
        The names in the library of the modules that were left.

    Raises:
        UserError: a file is missing or damaged, or a tensor is missing, quantised, not finite, has another shape, or
            has no counterpart.
    """
    family, config, architecture = read_architecture(folder)
    heads, is_tied = family.heads(architecture, config), architecture.get("tied_output")
    state, new = model.state_dict(), list[str]()
    table_rows = architecture["block_size"], config.get("type_vocab_size", 2)
    if is_tied:
        del state["output.weight"]
    with opened(folder) as tensors, torch.no_grad():
        prefix = f"{family.blocks[1].partition('.')[0]}."  # which a model without its head lacks
        unread = {*tensors}
        for name, value in state.items():
            names, conversion = family.names(name)
            missing = [each for each in names if not {each, each.removeprefix(prefix)} & tensors.keys()]
            if new_classifier and (name.startswith("head.2.") or (missing and name.startswith("head."))):
                new += [each.rpartition(".")[0] for each in names]
                continue
            if missing:
                raise UserError(f"{folder} lacks the tensor {missing[0]}, which a {family.type} of its config has.")
            names = [each if each in tensors else each.removeprefix(prefix) for each in names]
            unread -= {*names}
            parts = [[*part.shape] for part in conversion.save(heads, torch.empty(value.shape, device="meta"))]
            if name.endswith("positions.table.weight"):
                parts = [[rows, *part[1:]] for rows, part in zip(table_rows, parts)]
            for each, part in zip(names, parts, strict=True):
                check_shape(folder, each, tensors[each], part)
            if value.is_meta:
                continue
            loaded = conversion.load(heads, *(tensors[each][:].to(value.dtype) for each in names))
            value.copy_(loaded[: len(value)] if name.endswith("positions.table.weight") else loaded)
            if not value.isfinite().all():
                raise UserError(f"{folder}: {' and '.join(names)} has NaN or infinite values.")
        constants = family.constants(architecture)
        outputs = {"lm_head.weight", "embed_out.weight"} & tensors.keys() if is_tied else set()
        for each in constants.keys() & tensors.keys():
            check_shape(folder, each, tensors[each], [*constants[each].shape])
        for each in outputs:
            embedding = state["decoder.embedding.weight"]
            check_shape(folder, each, tensors[each], [*embedding.shape])
            if not embedding.is_meta and not torch.equal(tensors[each][:].to(embedding.dtype), embedding):
                raise UserError(f"{folder}: {each} is not the embedding, as tie_word_embeddings in {CONFIG} says.")
    body = (prefix, family.blocks[1].removeprefix(prefix)) if new else ""  # other heads do not matter then
    unknown = unread - constants.keys() - outputs
    of_bert = "cls." if family.type == "bert" else ()  # its heads for other purposes
    more = sorted(
        name
        for name in unknown
        if not NO_WEIGHTS.search(name) and name.startswith(body) and not name.startswith(of_bert)
    )
    if more:
        raise UserError(f"{folder} has the tensor {more[0]}, which a {family.type} of its config does not have.")
    return sorted({*new})


def to_family(
    architecture: Config, state: Mapping[str, Tensor], source: Config | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """Return the config and the weights of a model as its family has them; `source` as for `family_of`.

    Raises:
        UserError: no family has such a model; the setting that the closest one lacks is named.
    """
    family, config = family_of(architecture, source)
    heads, tensors = family.heads(architecture, config), dict[str, Tensor]()
    for name, value in state.items():
        if name != "output.weight" or not architecture.get("tied_output"):
            names, conversion = family.names(name)
            parts = conversion.save(heads, value.detach().cpu())
            tensors |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    return config, tensors | family.constants(architecture)
