"""The groups `architecture`, `model` and `pattern` of the config."""

from __future__ import annotations

from typing import Any, Literal

from speechformer.options import Options, Size


class Architecture(Options):
    """What a network consists of, besides its sizes; `conf/config.yaml` explains each key."""

    norm: Literal["pre", "post"]
    final_norm: bool
    qkv_bias: bool
    bias: bool
    activation: Literal["relu", "gelu"]
    pool: Literal["mean", "cls"]
    classifier_width: Size
    scale_embedding: bool
    output_bias: Literal["init", "unigram"]
    tied_output: bool
    shared_embeddings: bool


def check_attention(config: dict[str, Any]) -> None:
    """Build the positions and patterns of a config to find what is wrong with their options; torch takes seconds.

    Raises:
        UserError: a choice or an option is unknown, or a value is invalid.
    """
    import torch

    from speechformer.layers.patterns import build_patterns
    from speechformer.layers.positions import build_positions

    build_patterns(config["pattern"], config["layers"])
    if not config["model"]["name"].startswith("rnn"):
        sizes = {name: config[name] for name in ("width", "heads")}
        with torch.random.fork_rng(devices=[]):
            build_positions(config["model"], length=1, causal=True, **sizes)
