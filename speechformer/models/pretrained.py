"""Read and write models as Hugging Face's `save_pretrained` leaves them: config.json and safetensors.

Nothing in a folder is executed, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from speechformer.corpora.files import read_file
from speechformer.errors import UserError, pick
from speechformer.models.families import FAMILIES, Config, Family

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# tensors of older versions that are no weights, and those of heads for other purposes
NO_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids)$|^cls\.")


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder has a model of Hugging Face's."""
    return (folder / CONFIG).exists()


def read_json(path: Path) -> Any:
    """Read a file of JSON."""
    try:
        return json.loads(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from None


def read_architecture(folder: Path) -> tuple[Family, Config, Config]:
    """Return the family of a folder's model, its config and its settings of ours.

    Raises:
        UserError: a file is missing or damaged, or the model has no counterpart here; the key is named.
    """
    path = folder / CONFIG
    config = read_json(path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{path} has no model_type, so it is no config of Hugging Face's.")
    if config.get("quantization_config"):
        raise UserError(f"{path}: quantization_config: quantised weights cannot be read; save the model without it.")
    family = pick(FAMILIES, config["model_type"], f"{path}: model_type")
    try:
        return family, config, family.architecture(config)
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None
    except (TypeError, ValueError, KeyError, ZeroDivisionError, IndexError) as error:
        raise UserError(f"{path} has a value that a {family.type} cannot have ({error}).") from None


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the safetensors of a folder: the file of each tensor, by the tensor's name."""
    if (folder / INDEX).exists():
        files = sorted({*read_json(folder / INDEX)["weight_map"].values()})
    elif (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = f" ({pickles[0]} is a pickle, which could run code; save it again with safetensors)" if pickles else ""
        raise UserError(f"{folder} has no {WEIGHTS}{why}.")
    with contextlib.ExitStack() as stack:
        tensors = {}
        for file in files:
            if Path(file).name != file:
                raise UserError(f"{folder / INDEX} names {file}, which is not in its folder.")
            try:
                parts = stack.enter_context(safe_open(folder / file, framework="pt"))
            except Exception as error:  # the exceptions of safetensors are not public
                raise UserError(f"{folder / file} is damaged, or no file of safetensors ({error}).") from None
            tensors |= dict.fromkeys(parts.keys(), parts)
        yield tensors


def load_weights(model: nn.Module, folder: Path, heads_missing: bool = False) -> None:
    """Load a folder's weights into a model that has its architecture.

    Args:
        heads_missing: keep the model's own weights of a classifier's head.

    Raises:
        UserError: a file is missing or damaged, or a tensor is missing, has another shape, or has no counterpart.
    """
    family, config, architecture = read_architecture(folder)
    heads, own = family.heads(architecture, config), model.state_dict()
    if architecture.get("tied_output"):
        del own["output.weight"]
    if heads_missing:
        own = {name: value for name, value in own.items() if not name.startswith("head.")}
    with opened(folder) as files, torch.no_grad():
        prefix = f"{family.blocks[1].partition('.')[0]}."  # which a model without its head lacks
        unread = {*files}
        for name, value in own.items():
            names, conversion = family.names(name)
            names = [each if each in files else each.removeprefix(prefix) for each in names]
            if missing := [each for each in names if each not in files]:
                raise UserError(f"{folder} lacks the tensor {missing[0]}, which a {family.type} of its config has.")
            try:
                loaded = conversion.load(heads, *(files[each].get_tensor(each).to(value.dtype) for each in names))
            except RuntimeError:
                loaded = value[:0]
            if loaded.shape != value.shape:
                shapes = " and ".join(f"{each} {files[each].get_slice(each).get_shape()}" for each in names)
                raise UserError(f"{folder}: {shapes} does not fit the sizes in {CONFIG}.")
            value.copy_(loaded)
            unread -= {*names}
    ignored = ("lm_head.", "embed_out.", ".router.") if architecture.get("tied_output") else (".router.",)
    ignored += ("classifier.", "pooler.") if heads_missing else ()
    more = sorted(
        name for name in unread if not NO_WEIGHTS.search(name) and not any(part in name for part in ignored)
    )
    if more:
        raise UserError(f"{folder} has the tensor {more[0]}, which a {family.type} of its config does not have.")


def to_family(family: Family, architecture: Config, config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model by the names of a family."""
    heads, tensors = family.heads(architecture, config), {}
    for name, value in state.items():
        if name != "output.weight" or not architecture.get("tied_output"):
            names, conversion = family.names(name)
            parts = conversion.save(heads, value.detach().cpu())
            tensors |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    tensors |= family.constants(architecture)
    return tensors
