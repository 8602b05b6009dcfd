"""The groups `architecture`, `model`, `pattern` and `attention` of the config."""

from __future__ import annotations

from typing import Any, Literal

from speechformer.options import Options, Positive, Size

SIZES = ("width", "heads", "layers", "ff")


class Architecture(Options):
    """What a network consists of, besides its sizes; `conf/config.yaml` explains each key."""

    norm: Literal["pre", "post", "sandwich", "parallel"]
    norm_type: Literal["layer", "rms", "dyt"]
    norm_eps: Positive | None
    final_norm: bool
    embedding_norm: bool
    head_width: Size | None
    qkv_bias: bool
    bias: bool
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"]
    pool: Literal["mean", "cls", "first"]
    classifier_width: Size
    classifier_activation: Literal["relu", "tanh"]
    scale_embedding: bool
    output_bias: Literal["init", "unigram", "none"]
    output_softcap: Positive | None
    tied_output: bool
    shared_embeddings: bool


def check_attention(config: dict[str, Any]) -> None:
    """Build positions, patterns and attention of a config to find what is wrong with them; torch takes seconds.

    Raises:
        UserError: a choice or an option is unknown, or a value is invalid.
    """
    import torch

    from speechformer.layers.attention import Layer
    from speechformer.layers.by_layer import per_layer_configs
    from speechformer.layers.dropout import Dropout
    from speechformer.layers.mechanisms import build_attention
    from speechformer.layers.patterns import build_patterns
    from speechformer.layers.positions import Sizes, build_positions

    patterns = build_patterns(config["pattern"], config["layers"])
    specs = per_layer_configs(config["attention"], "attention", config["layers"])
    width, heads = config["width"], config["heads"]
    sizes = Sizes(width, heads, 1, True, config["architecture"]["head_width"] or width // heads)
    with torch.device("meta"):  # without weights
        attentions = [
            build_attention(spec, Layer(sizes, k, Dropout(0.0), True, True)) for k, spec in enumerate(specs)
        ]
    with torch.random.fork_rng(devices=[]):
        if not config["model"]["name"].startswith("rnn"):
            positions = build_positions(config["model"], **sizes._asdict())
            for k, attention in enumerate(attentions):
                attention.check(positions.at_layer(k), patterns[k])
