"""Different positions, patterns or attention in the layers of a model: `by_layer` in the config.

    model=by_layer 'model.layers=[rope,rope,nope]'
    pattern=by_layer 'pattern.layers=[{name:window,window:3},full]'
    attention=by_layer 'attention.layers=[gated_delta,gated_delta,gated_delta,softmax]'

An entry is the name of a choice, with its default options, or the choice with its options. The list repeats until all
layers have one, from the first layer on. Layers with equal entries share an encoding, as all layers do otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speechformer.errors import UserError

EXAMPLES = {
    "model": "[rope,nope] or [{name:rope,base:500},nope]",
    "pattern": "[window,full] or [{name:window,window:3},full]",
    "attention": "[delta,softmax] or [{name:delta,conv:0},softmax]",
}


def is_choice(layer: object) -> bool:
    """Return whether an item of the list names a choice, with options or without."""
    name = layer.get("name") if isinstance(layer, Mapping) else layer
    return isinstance(name, str) and name != "by_layer"


def per_layer_configs(spec: Mapping[str, Any], group: str, layers: int | None = None) -> list[dict[str, Any]]:
    """Return the config group of each layer.

    Args:
        spec: the config group "model", "pattern" or "attention".
        group: its name.
        layers: number of layers; None: those of the list, once.

    Raises:
        UserError: the list is not one of choices, or does not divide the layers.
    """
    if spec["name"] != "by_layer":
        return [dict(spec)] * (layers or 1)
    listed = spec.get("layers")
    if not isinstance(listed, list | tuple) or not listed or not all(map(is_choice, listed)):
        raise UserError(f"{group}.layers must be a list of choices, such as {EXAMPLES[group]}, not {listed}.")
    specs = [{"name": entry} if isinstance(entry, str) else dict(entry) for entry in listed]
    repeats, rest = divmod(layers or len(specs), len(specs))
    if rest:
        raise UserError(
            f"{group}.layers has {len(specs)} entries, which repeat over the layers, so layers must be a multiple of "
            f"{len(specs)}, not {layers}."
        )
    return specs * repeats
