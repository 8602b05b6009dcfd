"""What encoder and decoder share: embedding, positions, a stack of blocks; and how they are initialised.

Shapes: B sequences, T tokens, D width, N heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.errors import UserError, pick
from speechformer.kernels.padding import without_padding
from speechformer.layers.attention import AttentionBias
from speechformer.layers.block import Block
from speechformer.layers.dropout import Dropout, draw_ahead
from speechformer.layers.patterns import build_pattern, with_first_token
from speechformer.layers.positions import Positions, build_positions

Cache = list[dict[str, Tensor]]  # what a stack has seen so far, a row of each tensor for each sequence
Weights = dict[str, list[Tensor]]  # of "encoder", "decoder" and "cross", those that a model has: of each layer


class Stack(nn.Module):
    """Token ids to hidden states.

    Args:
        vocab_size: rows of the embedding table.
        length: the number of positions that the model is trained on.
        causal: whether a token sees only itself and what is before it.
        first_token: put one trained vector before every sequence (a CLS token); it sees all and all see it,
            whatever the pattern.
        model, pattern: the config groups, `{"name": ..., options}`.
        width, heads, layers, ff, dropout, norm, final_norm, qkv_bias, bias, activation, scale_embedding: see
            `conf/config.yaml`.
        cross: whether its blocks attend to the states of an encoder too.
        embedding: a table to share with another stack; None for one of its own.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        length: int,
        causal: bool,
        model: dict[str, Any],
        pattern: dict[str, Any],
        width: int,
        heads: int,
        layers: int,
        ff: int,
        dropout: float,
        norm: str,
        final_norm: bool,
        qkv_bias: bool,
        bias: bool,
        activation: str,
        scale_embedding: bool = False,
        first_token: bool = False,
        cross: bool = False,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UserError(f"width must be a multiple of heads, and {width} is not one of {heads}.")
        self.causal = causal
        self.kinds = (model, pattern)
        self.embedding = nn.Embedding(vocab_size, width) if embedding is None else embedding
        self.scale = math.sqrt(width) if scale_embedding else 1.0
        self.first_token = nn.Embedding(1, width) if first_token else None
        self.positions = build_positions(model, width=width, heads=heads, length=length + first_token, causal=causal)
        self.pattern = with_first_token(build_pattern(pattern)) if first_token else build_pattern(pattern)
        self.trained_bias = type(self.positions).bias is not Positions.bias and bool([*self.positions.parameters()])
        self.kept: tuple[tuple, AttentionBias] | None = None
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                width=width,
                heads=heads,
                ff=ff,
                dropout=dropout,
                norm=norm,
                qkv_bias=qkv_bias,
                bias=bias,
                activation=activation,
                cross=cross,
            )
            for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width) if final_norm else nn.Identity()

    @property
    def max_length(self) -> int | None:
        """The most tokens that it can take; None for no limit."""
        return self.positions.max_length

    def forward(
        self,
        ids_BT: Tensor,
        token_mask_BT: Tensor | None = None,
        with_weights: bool = False,
        memory: list[tuple[Tensor, Tensor, Tensor]] | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Hidden states [B, T, D], and if asked for the attention weights of each layer, [B, N, T, S], and those of
        its cross-attention.

        `token_mask_BT` is False on padding, whose states are 0 where it is left out. With `first_token`, T is one more than
        that of `ids_BT`. `memory` (what each block's `CrossAttention` takes) is for a stack with `cross`. `cache`
        holds what each block has seen before, S - T tokens, all real; it begins as `new_cache`, and is added to.
        """
        x_BTD = self.embedding(ids_BT)
        if self.scale != 1:
            x_BTD = x_BTD * self.scale
        if self.first_token is not None:
            B = ids_BT.shape[0]
            x_BTD = torch.cat((self.first_token(ids_BT.new_zeros(B, 1)), x_BTD), dim=1)
            if token_mask_BT is not None:
                token_mask_BT = torch.cat((token_mask_BT.new_ones(B, 1), token_mask_BT), dim=1)
        before = cache[0]["k"].shape[2] if cache and cache[0] else 0
        B, T, _ = x_BTD.shape
        if self.dropout.active and memory is None and cache is None:
            self.draw_ahead(x_BTD)
        x_BTD = self.positions.embed(x_BTD, before)
        scores = self.scores(B, T, before + T, token_mask_BT)
        tokens = None
        if isinstance(scores, AttentionBias):
            if token_mask_BT is not None and memory is None and self.leaves_out_padding:
                tokens = scores.tokens = without_padding(token_mask_BT)
            scores.prepare(self.dropout.rate if self.dropout.active else 0.0, with_weights)
        x_BTD = self.dropout(x_BTD if tokens is None else tokens.unpad(x_BTD), tokens)
        layers, cross_layers = [], []
        for k, block in enumerate(self.blocks):
            # a compiled block is for the many passes that are alike, not for looking inside and writing
            run = block if cache is None and not with_weights else block.forward
            x_BTD, weights, cross_weights = run(
                x_BTD, self.positions, scores, with_weights, memory and memory[k], None if cache is None else cache[k]
            )
            if weights is not None:
                layers.append(weights)
            if cross_weights is not None:
                cross_layers.append(cross_weights)
        x_BTD = self.final_norm(x_BTD)
        return x_BTD if tokens is None else tokens.pad(x_BTD), layers, cross_layers

    def scores(self, B: int, T: int, S: int, token_mask_BS: Tensor | None) -> AttentionBias | Tensor:
        """What is added to the scores of B sequences; where only T decides it, it is kept until another T comes."""
        weight, everything = self.embedding.weight, self.kinds[1]["name"] == "full"
        made = AttentionBias(
            self.positions, self.pattern, self.causal, T, S, token_mask_BS, weight.device, everything
        )
        if token_mask_BS is not None or T != S or self.trained_bias:
            return made
        # what is made in inference mode cannot be trained with
        of = (T, weight.device, weight.dtype, torch.is_inference_mode_enabled())
        if self.kept is None or self.kept[0] != of:
            self.kept = (of, made)
        return self.kept[1]

    def draw_ahead(self, x_BTD: Tensor) -> None:
        """Have dropout make its masks for this pass, where it makes them itself and all of the type of x."""
        if x_BTD.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return
        places: list[tuple[Dropout, Sequence[int]]] = [(self.dropout, x_BTD.shape)]
        blocks: Iterable[Any] = self.blocks
        for block in blocks:
            places += block.places_of_dropout(*x_BTD.shape)
        draw_ahead(places, x_BTD.dtype)

    @property
    def leaves_out_padding(self) -> bool:
        """In training on a CPU: an accelerator would wait to hear how many tokens there are, a compiled block be
        compiled anew for each number, and in evaluation batches hold little padding. Packed runs keep theirs too, for
        each member has another number."""
        blocks: Iterable[Any] = self.blocks
        on_cpu = self.embedding.weight.device.type == "cpu"
        return self.training and on_cpu and not any(block.compiled for block in blocks)

    def new_cache(self) -> Cache:
        """That of a sequence of which nothing was seen yet."""
        return [{} for _ in self.blocks]


def keep_initialisation(module: nn.Module, std: float) -> None:
    """torch's own: Kaiming uniform in the linear layers, normal(0, 1) in the embeddings."""


def normal_initialisation(module: nn.Module, std: float) -> None:
    """Weights of linear layers and embeddings from normal(0, std), biases 0. Radford et al. 2019 use 0.02."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def xavier_initialisation(module: nn.Module, std: float) -> None:
    """Weights uniform with variance 2 / (in + out), biases 0. Glorot and Bengio 2010, equation 16."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


INITIALISATIONS = {
    "torch": keep_initialisation,
    "normal": normal_initialisation,
    "xavier": xavier_initialisation,
}


def initialise(model: nn.Module, name: str, std: float) -> None:
    """Set the weights of `core` anew, in place; `name` and `std` as `recipe.init` and `recipe.init_std`."""
    rule = pick(INITIALISATIONS, name, "recipe.init")
    for module in model.modules():
        rule(module, std)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """The trained parameters of a model: `total`, and by part; a shared table counts once, where it first stands."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.removeprefix("encoder.").removeprefix("decoder.").split(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return {"total": sum(parts.values()), **parts}
