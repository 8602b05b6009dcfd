"""Stacks of layers, from token ids to hidden states: of transformer blocks or, for `model=rnn`, of recurrent cells.

Shapes: see `speechformer.layers.attention`; R tokens of a batch without its padding.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.errors import UserError, pick
from speechformer.kernels.dispatch import choose_kernel
from speechformer.kernels.dropout import FastDropout
from speechformer.kernels.padding import unpadder_for
from speechformer.layers.attention import Attention, Layer, Pairs, Places, checked, extend, forget_hidden_keys
from speechformer.layers.block import EPS, Block, Memory, new_norm
from speechformer.layers.by_layer import per_layer_configs
from speechformer.layers.mechanisms import build_attention, changed_options
from speechformer.layers.patterns import build_patterns
from speechformer.layers.positions import Learned, Sizes, build_positions
from speechformer.layers.recurrent import Recurrent
from speechformer.options import build

Cache = list[dict[str, Tensor]]  # for each layer, what it keeps of earlier tokens; one row for each sequence
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile with them
COMPILE_MODES = ("default", *CUDA_GRAPHS, "max-autotune-no-cudagraphs")  # torch's
SOFTMAX = {"name": "softmax"}
Weights = dict[str, list[Tensor]]  # for each of "encoder", "decoder" and "cross", the attention weights of each layer


def cached_tokens(cache: Cache | None) -> int:
    """Return the number of tokens that a cache has read."""
    return int(cache[0]["j"][0, -1]) + 1 if cache and cache[0] else 0


def select(cache: Cache, rows: Tensor) -> Cache:
    """Return some rows of a cache, by index."""
    return [{name: part[rows] for name, part in layer.items()} for layer in cache]


class Stack(nn.Module):
    """A stack of transformer blocks, from token ids to hidden states.

    Args:
        length: number of positions the model is trained on.
        causal: whether a token attends only to itself and earlier tokens.
        model, pattern, attention: config groups, `{"name": ..., options}`. See `conf/config.yaml` for the other
            options.
        embedding_dropout: rate on the embeddings; None for `dropout`.
        embedding_norm: whether to norm the embeddings with their positions.
        head_width: H; None for width / heads.
        first_token: whether to put a trained vector (CLS) in front of every sequence. It attends to all tokens,
            and all attend to it, whatever the pattern.
        cross: whether the blocks also attend to an encoder.
        embedding: table shared with another stack; None for a new one.
        block: other arguments of `layers.block.Block`.

    Attributes:
        choose: returns the kernel of a pass; see `kernels.dispatch`.
        is_compiled: whether the blocks are; see `compile_blocks`.
    """

    is_compiled = False

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
        dropout: float,
        final_norm: bool,
        attention: dict[str, Any] = SOFTMAX,
        norm_type: str = "layer",
        norm_eps: float | None = None,
        embedding_norm: bool = False,
        head_width: int | None = None,
        qkv_bias: bool,
        bias: bool,
        embedding_dropout: float | None = None,
        scale_embedding: bool = False,
        first_token: bool = False,
        cross: bool = False,
        embedding: nn.Embedding | None = None,
        **block: Any,
    ) -> None:
        super().__init__()
        if head_width is None and width % heads:
            raise UserError(f"width must be a multiple of heads, but {width} is not a multiple of {heads}.")
        if head_width is not None and cross:
            raise UserError("architecture.head_width is for task=classify, lm and probe; set it to null.")
        sizes = Sizes(width, heads, length + first_token, causal, head_width or width // heads)
        self.head_width = sizes.head_width
        self.causal, self.heads, self.config = causal, heads, {"model": model, "pattern": pattern}
        self.choose: Callable[..., Attention] = choose_kernel
        self.embedding = nn.Embedding(vocab_size, width) if embedding is None else embedding
        self.scale = math.sqrt(width) if scale_embedding else 1.0
        self.first_token = nn.Embedding(1, width) if first_token else None
        per_layer_configs(model, "model", layers)  # which they must divide
        self.positions = build_positions(model, **sizes._asdict())
        self.max_length = self.positions.max_length  # tokens; None for no limit
        self.patterns = build_patterns(pattern, layers, first_token)
        self.dropout_rate = dropout
        self.embedding_dropout = FastDropout(dropout if embedding_dropout is None else embedding_dropout)
        block |= {"width": width, "heads": heads, "dropout": dropout, "cross": cross}
        block |= {"dropout_class": FastDropout, "qkv_bias": qkv_bias, "bias": bias}
        block |= {"norm_type": norm_type, "norm_eps": norm_eps}
        qk_eps = EPS["rms"] if norm_eps is None else norm_eps
        blocks = []
        for k, spec in enumerate(per_layer_configs(attention, "attention", layers)):
            gated = self.positions.at_layer(k).overrides("gate")
            layer = Layer(sizes, k, FastDropout(dropout), qkv_bias, bias, gated, qk_eps)
            mechanism = build_attention(spec, layer)
            mechanism.check(self.positions.at_layer(k), self.patterns[k])
            blocks.append(Block(mechanism, **block))
        self.blocks: Sequence[Any] = nn.ModuleList(blocks)  # type: ignore[assignment]
        groups = [
            (self.positions.at_layer(k), self.patterns[k], block.attention.kernel_for(self.patterns[k]))
            for k, block in enumerate(blocks)
        ]
        self.bias_groups = [groups.index(group) for group in groups]  # the first layer with the same bias
        self.final_norm = new_norm(norm_type, norm_eps, width) if final_norm else nn.Identity()
        self.embedding_norm = new_norm(norm_type, norm_eps, width) if embedding_norm else None

    def embed(self, ids_BT: Tensor, token_mask_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return embeddings and token mask, with the first token if the stack has one."""
        x_BTD = self.embedding(ids_BT)
        if self.scale != 1:
            x_BTD = x_BTD * self.scale
        if self.first_token is not None:
            B = ids_BT.shape[0]
            x_BTD = torch.cat((self.first_token(ids_BT.new_zeros(B, 1)), x_BTD), dim=1)
            if token_mask_BT is not None:
                token_mask_BT = torch.cat((token_mask_BT.new_ones(B, 1), token_mask_BT), dim=1)
        return x_BTD, token_mask_BT

    @property
    def can_unpad(self) -> bool:
        """Whether a pass with padding runs on rows of tokens, without it.

        An accelerator would wait to learn their number, and compiled blocks would be compiled for every number.
        """
        on_cpu = self.embedding.weight.device.type == "cpu"
        can = all(block.attention.can_unpad for block in self.blocks)
        return self.training and on_cpu and can and not self.is_compiled

    def attentions(
        self,
        x_BTD: Tensor,
        token_mask_BT: Tensor | None,
        places: Places | None = None,
        with_weights: bool = False,
        cache: Cache | None = None,
    ) -> list[Attention]:
        """Return the attention of each layer, from the tokens of x to them and those of the cache."""
        none = [None] * len(self.patterns)
        (B, T, _), device, offset = x_BTD.shape, x_BTD.device, cached_tokens(cache)
        compiled = self.is_compiled or torch.compiler.is_compiling()
        rate, i_T = self.dropout_rate if self.training else 0.0, torch.arange(offset, offset + T, device=device)
        j_S = [i_T if past is None else extend(past, "j", i_T.expand(B, -1), 1)[0] for past in cache or none]
        positions = [self.positions.at_layer(k) for k in range(len(none))]
        prepared = {layer: layer.prepare(offset + T, device) for layer in dict.fromkeys(positions)}
        chosen, shared = dict[int, Attention](), dict[str, Tensor]()
        for k in dict.fromkeys(self.bias_groups):
            tokens = (prepared[positions[k]], i_T, j_S[k], token_mask_BT)
            pairs = Pairs(positions[k], self.patterns[k], self.causal, *tokens)
            kernel = self.blocks[k].attention.kernel_for(self.patterns[k])
            if kernel == "none":
                chosen[k] = Attention(None, pairs, places, with_weights)
            else:
                rest = (rate, with_weights, compiled, places, kernel == "reference")
                chosen[k] = self.choose(pairs, B, self.head_width, *rest)
            chosen[k].shared = shared
        return [chosen[k] for k in self.bias_groups]

    def forward(
        self,
        ids_BT: Tensor,
        token_mask_BT: Tensor | None = None,
        with_weights: bool = False,
        memory: Sequence[Memory] | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return hidden states, [B, T, D], and if asked for the weights of self- and cross-attention of each layer.

        With `first_token`, T is one more than that of `ids_BT`.

        Args:
            token_mask_BT: False on padding, whose states are undefined.
            memory: for each block, the keys, values and bias for `CrossAttention`.
            cache: keys and values of S - T earlier tokens, extended in place; start with `new_cache()`. Without a
                token mask. Positions that move when the text grows (`Positions.can_cache`) cache the ids alone.
        """
        if cache is not None and not self.positions.can_cache:
            T, ids_BT = ids_BT.shape[1], torch.cat([*cache[0].values(), ids_BT], dim=1)
            cache[0]["ids"] = ids_BT
            x_BTD, *weights_of = self.forward(ids_BT, None, with_weights, memory)
            weights, cross_weights = ([layer[:, :, -T:] for layer in layers] for layers in weights_of)
            return x_BTD[:, -T:], weights, cross_weights
        x_BTD, token_mask_BT = self.embed(ids_BT, token_mask_BT)
        unpadder = None
        if token_mask_BT is not None and x_BTD.device.type == "cpu" and not torch.compiler.is_compiling():
            if token_mask_BT.dtype == torch.bool and token_mask_BT.all():  # not documents
                token_mask_BT = None
            elif memory is None and cache is None and self.can_unpad:
                unpadder = unpadder_for(token_mask_BT, self.heads)
        attentions = self.attentions(x_BTD, token_mask_BT, unpadder, with_weights, cache)
        pairs = attentions[0].pairs
        assert pairs is not None
        x_BTD = checked(self.positions, "embed", self.positions.embed(x_BTD, pairs.query_positions), x_BTD.shape)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = self.embedding_dropout(x_BTD)
        x_BTD = x_BTD if unpadder is None else unpadder.unpad(x_BTD)
        weights, cross_weights = [], []
        for k, block in enumerate(self.blocks):
            block.dropout.unpadder = unpadder
            run = block if cache is None and not with_weights else block.forward  # `forward` is never compiled
            past = None if cache is None else cache[k]
            x_BTD, *of_layer = run(x_BTD, attentions[k], memory and memory[k], past)
            if past is not None:
                forget_hidden_keys(past, self.patterns[k])
            for layers, layer in zip((weights, cross_weights), of_layer):
                layers += [] if layer is None else [layer]
        x_BTD = self.final_norm(x_BTD)
        return x_BTD if unpadder is None else unpadder.pad(x_BTD), weights, cross_weights

    def new_cache(self) -> Cache:
        """Return the cache of an empty sequence."""
        return [{} for _ in self.blocks]


class RecurrentStack(nn.Module):
    """A stack of recurrent layers, from token ids to hidden states.

    It takes the arguments of `Stack`, ignores those of blocks, and raises a `UserError` for those of attention.
    """

    max_length: int | None = None
    can_unpad = is_compiled = False  # its cells skip padding themselves

    def __init__(
        self,
        *,
        vocab_size: int,
        model: dict[str, Any],
        pattern: dict[str, Any],
        width: int,
        layers: int,
        dropout: float,
        attention: dict[str, Any] = SOFTMAX,
        embedding_dropout: float | None = None,
        scale_embedding: bool = False,
        first_token: bool = False,
        cross: bool = False,
        embedding: nn.Embedding | None = None,
        **of_a_transformer: Any,
    ) -> None:
        super().__init__()
        if pattern["name"] != "full" or changed_options(attention) != ["softmax"]:
            raise UserError(
                f"model={model['name']} has no self-attention, so pattern must be full, and attention softmax "
                "without options."
            )
        if first_token:
            raise UserError(
                "architecture.pool=cls needs attention: a CLS token in front of a sentence that a recurrent network "
                "reads from left to right would know nothing of it. Set architecture.pool=mean."
            )
        self.embedding = nn.Embedding(vocab_size, width) if embedding is None else embedding
        self.scale = math.sqrt(width) if scale_embedding else 1.0
        self.dropout = FastDropout(dropout)
        self.embedding_dropout = FastDropout(dropout if embedding_dropout is None else embedding_dropout)
        arguments: Any = {"width": width, "layers": layers, "dropout": FastDropout(dropout), "cross": cross}
        if model["name"] == "rnn":  # which has no such option
            arguments["attention"] = "luong"
        self.cells = build({model["name"]: Recurrent}, model, "model", **arguments)

    def forward(
        self,
        ids_BT: Tensor,
        token_mask_BT: Tensor | None = None,
        with_weights: bool = False,
        cache: Cache | None = None,
        context_BTD: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return hidden states, [B, T, D], and two empty lists in place of attention weights; see `Stack.forward`.

        Args:
            cache: the state before these tokens, and then the state after them.
            context_BTD: what cells with `model.attention=bahdanau` read beside each token.
        """
        state = cache[0] if cache and cache[0] else None
        x_BTD = self.embedding_dropout(self.embedding(ids_BT) * self.scale)
        x_BTD = x_BTD if context_BTD is None else torch.cat((x_BTD, context_BTD), dim=-1)
        x_BTD, state = self.cells(x_BTD, state, token_mask_BT)
        if cache is not None:
            cache[0].update(state)
        return self.dropout(x_BTD), [], []

    def new_cache(self) -> Cache:
        """Return the cache of an empty sequence."""
        return [{}]


def build_stack(*, model: dict[str, Any], **arguments: Any) -> Stack | RecurrentStack:
    """Build the stack of a `model` config: recurrent for "rnn", else a transformer with that encoding."""
    if model["name"] == "rnn_attention":
        raise UserError(
            "model=rnn_attention attends from a decoder to an encoder, so it needs task=translate. "
            "Use model=rnn for this task."
        )
    stack_class = RecurrentStack if model["name"] == "rnn" else Stack
    return stack_class(model=model, **arguments)


def compile_blocks(model: nn.Module, mode: str, device: torch.device, accumulated: int = 1) -> None:
    """Apply torch.compile to the blocks of a model for `device`, in place. Equal blocks share one compilation.

    Args:
        accumulated: batches whose gradients are added up for one step.

    Raises:
        UserError: torch has no such mode, the device is a CPU and there is no C++ compiler, or CUDA graphs would
            overwrite the gradients that are added up.
    """
    pick(dict.fromkeys(COMPILE_MODES), mode, "compile")
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise UserError(
            f"compile={mode}: torch found no C++ compiler for the CPU. Install g++ or leave compile unset."
        )
    if device.type == "cuda" and mode in CUDA_GRAPHS and accumulated > 1:
        raise UserError(
            f"compile={mode} with trainer.accumulate_grad_batches={accumulated}: the CUDA graphs of a batch "
            "overwrite the gradients of the last one. Set compile=default, or accumulate nothing."
        )
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.is_compiled = True
            for block in stack.blocks:
                block.compile(mode=mode)
            if device.type == "cuda":
                stack.register_forward_pre_hook(begin_pass)


def begin_pass(stack: Any, arguments: Any) -> None:
    """Mark the start of a step of CUDA graphs, once for each pass. Memory of earlier steps is free then.

    Without gradients, torch would start one at each block, and free the block's input. The decoder of an
    encoder-decoder belongs to the step of its encoder, whose activations the backward pass needs. So between two
    forward passes there must be a backward pass, unless the first one is not for training.
    """
    if not hasattr(stack.blocks[0], "cross_attention"):
        torch.compiler.cudagraph_mark_step_begin()


def initialise(model: nn.Module, name: str, std: float) -> None:
    """Initialise linear layers and embeddings in place, by `recipe.init` and `recipe.init_std`.

    "torch" leaves them: Kaiming uniform in linear layers, normal(0, 1) in embeddings. "normal" is GPT-2's, with 0.02.
    "xavier": Glorot and Bengio 2010, equation 16. Learned positions may have an `init_std` of their own.
    """
    for module in model.modules() if name != "torch" else ():
        if isinstance(module, nn.Linear | nn.Embedding):
            if name == "normal":
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Learned) and module.init_std is not None:
            nn.init.normal_(module.table.weight, std=module.init_std)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Count the trained parameters: `total`, and by part. A shared table counts once, in its first part."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts[name.removeprefix("encoder.").removeprefix("decoder.").split(".")[0]] += parameter.numel()
    return {"total": parts.total(), **parts}
