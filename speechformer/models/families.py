"""Model families of Hugging Face as settings and weights of ours, in both directions.

A family is a table: which of its config's keys are ours, which must have a fixed value, and which of its modules
make up one of ours. `Family.architecture` reads a config, `Family.config` writes one, and an architecture belongs to
a family if reading what is written gives the architecture again.

Two things are not names alone. Theirs rotate the pair (d, d + R/2) of a head, ours (2d, 2d + 1), so rows of queries
and keys change places. What multiplies all scores of a layer is part of the queries' weights here.

Shapes: see `speechformer.layers.attention`; R is the rotated width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speechformer.errors import UserError
from speechformer.layers.block import EPS
from speechformer.layers.by_layer import per_layer_configs
from speechformer.layers.mechanisms import MECHANISMS
from speechformer.layers.patterns import PATTERNS
from speechformer.layers.positions import POSITIONS, wavelengths
from speechformer.options import options_of

Config = dict[str, Any]
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
SAME = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}  # other names of activations
# what an architecture that lacks a setting means
LEFT_OUT = {
    "output_softcap": None,
    "embedding_norm": False,
    "scale_embedding": False,
    "classifier_activation": "relu",
}
KEYS = {  # of most families
    **{"width": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers"},
    **{"ff": "intermediate_size", "block_size": "max_position_embeddings", "vocab_size": "vocab_size"},
}
# of rotations, and of the longest text, which decides nothing else where positions are rotated
ROTATIONS = (
    *("rope_theta", "rotary_emb_base", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct"),
    "max_position_embeddings",
)
OPTIONAL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # which can be null
LAYER_TYPES = ("full_attention", "sliding_attention")
FAMILIES: dict[str, Family] = {}


class Heads(NamedTuple):
    """Sizes of a layer, and the factor by which its queries are larger here."""

    N: int
    K: int
    H: int
    R: int
    query_scale: float


class Conversion(NamedTuple):
    """How one tensor of ours is made of theirs, and theirs of ours."""

    load: Callable[..., Tensor]  # of the heads and their tensors
    save: Callable[[Heads, Tensor], Sequence[Tensor]]  # of the heads and our tensor


def to_pairs(heads: Heads, rows: Tensor) -> Tensor:
    """Return rows of queries or keys, [heads H, ...], in the order of our rotation."""
    each = rows.unflatten(0, (-1, heads.H))
    turned = each[:, : heads.R].unflatten(1, (2, heads.R // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, each[:, heads.R :]), dim=1).flatten(0, 1)


def to_halves(heads: Heads, rows: Tensor) -> Tensor:
    """Undo `to_pairs`."""
    each = rows.unflatten(0, (-1, heads.H))
    turned = each[:, : heads.R].unflatten(1, (heads.R // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, each[:, heads.R :]), dim=1).flatten(0, 1)


def load_qkv(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Join the rows of queries, keys and values."""
    return torch.cat((heads.query_scale * to_pairs(heads, q), to_pairs(heads, k), v))


def save_qkv(heads: Heads, qkv: Tensor) -> tuple[Tensor, ...]:
    """Undo `load_qkv`."""
    q, k, v = qkv.split([heads.N * heads.H, heads.K * heads.H, heads.K * heads.H])
    return to_halves(heads, q) / heads.query_scale, to_halves(heads, k), v


COPY = Conversion(lambda _, x: x, lambda _, x: (x,))
TRANSPOSED = Conversion(lambda _, x: x.t(), lambda _, x: (x.t(),))
JOINED = Conversion(lambda _, *x: torch.cat(x), lambda _, x: x.chunk(2))
ONE_LESS = Conversion(lambda _, x: x + 1, lambda _, x: (x - 1,))
FIRST_TYPE = Conversion(  # positions, and the vector that every token of a first sentence gets
    lambda _, positions, types: positions + types[0], lambda _, x: (x, torch.zeros_like(x[:2]))
)
QKV = Conversion(load_qkv, save_qkv)
QKV_TRANSPOSED = Conversion(  # GPT-2's linear layers multiply from the other side
    lambda heads, x: load_qkv(heads, *x.t().chunk(3)), lambda heads, x: (torch.cat(save_qkv(heads, x)).t(),)
)
QKV_BY_HEAD = Conversion(  # queries, keys and values of the first head, of the second, ...
    lambda heads, x: load_qkv(heads, *x.unflatten(0, (heads.N, 3, -1)).transpose(0, 1).flatten(1, 2)),
    lambda heads, x: (torch.stack([y.unflatten(0, (heads.N, -1)) for y in save_qkv(heads, x)], 1).flatten(0, 2),),
)
Q_NORM = Conversion(
    lambda heads, x: heads.query_scale * to_pairs(heads, x),
    lambda heads, x: (to_halves(heads, x) / heads.query_scale,),
)
K_NORM = Conversion(to_pairs, lambda heads, x: (to_halves(heads, x),))
ONLY_EXPERT = Conversion(lambda _, x: x[0].t(), lambda _, x: (x.t()[None],))
ONLY_EXPERT_GATED = Conversion(  # the rows of both halves in turns
    lambda _, x: torch.cat((x[0].t()[::2], x[0].t()[1::2])),
    lambda _, x: (x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).t()[None],),
)


class Family:
    """A family. A subclass declares its tables; those of `Llama` are the most frequent.

    Attributes:
        type: `model_type` in the config.
        head: the class that the library loads.
        keys: keys of the config by those of ours with the same value.
        defaults: what a config that lacks a key means.
        fixed: keys of the config with the values that they must have.
        ours: settings that all models of the family have.
        activation, activations: the key of the config, and its values by ours.
        model: our modules outside the blocks, theirs (several: separated by spaces), and how ours are made of them.
        blocks: the names of both lists of blocks.
        block: as `model`, within a block. A trailing * stands for names without ".weight", with "_bias".
    """

    type: ClassVar[str]
    head: ClassVar[str]
    keys: ClassVar[dict[str, str]]
    defaults: ClassVar[Config] = {}
    fixed: ClassVar[Config] = {}
    ours: ClassVar[Config]
    activation: ClassVar[str] = "hidden_act"
    activations: ClassVar[dict[str, str]] = ACTIVATIONS
    model: ClassVar[list[tuple[str, str, Conversion]]]
    blocks: ClassVar[tuple[str, str]]
    block: ClassVar[list[tuple[str, str, Conversion]]]

    def __init_subclass__(cls) -> None:
        FAMILIES[cls.type] = cls()

    # Configs

    def architecture(self, config: Config) -> Config:
        """Return a config's settings of ours, the arguments of the model without dropout.

        Raises:
            UserError: a value has no counterpart.
        """
        read = {**self.defaults, **config}
        for key, value in self.fixed.items():
            if read.get(key, value) != value:
                raise no_counterpart(key, read[key], f"only {value!r}")
        names = {SAME.get(theirs, theirs): ours for ours, theirs in self.activations.items()}
        activation = names.get(SAME.get(read[self.activation], read[self.activation]))
        for key, default in self.defaults.items():
            types = (bool,) if isinstance(default, bool) else (int, float) if isinstance(default, int | float) else ()
            if types and type(read[key]) not in types and not (read[key] is None and key in OPTIONAL):
                raise no_counterpart(key, read[key], "true or false" if bool in types else "numbers")
        if activation is None:
            raise no_counterpart(self.activation, read[self.activation], ", ".join(self.activations.values()))
        missing = [theirs for theirs in self.keys.values() if theirs not in read]
        if missing:
            raise UserError(f"config.json has no {missing[0]}, which a {self.type} must have.")
        settings = {ours: read[theirs] for ours, theirs in self.keys.items()}
        for ours, value in settings.items():
            if ours in KEYS and (type(value) is not int or value < 1):
                raise no_counterpart(self.keys[ours], value, "whole numbers above 0")
        if settings["width"] % settings["heads"] and not read.get("head_dim"):
            raise no_counterpart(self.keys["heads"], settings["heads"], f"divisors of {settings['width']}")
        common = {"scale_embedding": False, "embedding_norm": False, "head_width": None, "pattern": {"name": "full"}}
        return {**common, **self.ours, **settings, "activation": activation, **self.special(read)}

    def special(self, config: Config) -> Config:
        """Return the settings that are not a key of the config each."""
        return {"attention": {"name": "softmax"}, "model": {"name": "learned"}}

    def config(self, architecture: Config) -> Config:
        """Return a config for settings of ours, as close as this family comes to them."""
        filled = filled_in(architecture)
        activation = self.activations.get(filled["activation"], next(iter(self.activations.values())))
        settings = {theirs: filled[ours] for ours, theirs in self.keys.items() if ours in filled}
        named = {"architectures": [self.head], "model_type": self.type, self.activation: activation}
        return {**self.defaults, **self.fixed, **settings, **named, **self.special_config(filled)}

    def special_config(self, architecture: Config) -> Config:
        """Undo `special`."""
        return {}

    # Weights

    def heads(self, architecture: Config, config: Config) -> Heads:
        """Return the sizes of the layers."""
        filled = filled_in(architecture)
        rotated = filled["model"][0].get("fraction", 0)
        kv_heads = filled["attention"][0].get("kv_heads") or filled["heads"]
        H = filled["head_width"]
        return Heads(filled["heads"], kv_heads, H, round(rotated * H), self.query_scale(filled, config))

    def query_scale(self, architecture: Config, config: Config) -> float:
        """Return the factor of the scores that ours have in the weights of the queries."""
        return 1.0

    def constants(self, architecture: Config) -> dict[str, Tensor]:
        """Return tensors of theirs that do not depend on ours."""
        return {}

    def names(self, name: str) -> tuple[list[str], Conversion]:
        """Return the names of the tensors that make up one of ours, and how they do; a KeyError for another name."""
        (ours, theirs), module, parameter = self.blocks, *name.rsplit(".", 1)
        table, prefix = self.model, ""
        if module.startswith(f"{ours}."):
            index, _, module = module.removeprefix(f"{ours}.").partition(".")
            table, prefix = self.block, f"{theirs}.{index}."
        for own, others, conversion in table:
            if own == module:
                ends = {"*": {"weight": "", "bias": "_bias"}.get(parameter, "")}
                return [
                    f"{prefix}{other.removesuffix('*')}{ends.get(other[-1], f'.{parameter}')}"
                    for other in others.split()
                ], conversion
        raise KeyError(name)


def no_counterpart(key: str, value: object, valid: str) -> UserError:
    """Return the error of a config's value that has no counterpart."""
    return UserError(f"config.json: {key}={value!r} has no counterpart here, as {valid} would have.")


def without_defaults(spec: Mapping[str, Any], kinds: Mapping[str, Any], common: str) -> Config:
    """Return a choice of a group with the options that are not at their defaults."""
    fields = options_of(kinds[spec["name"]], common).model_fields
    return {key: value for key, value in spec.items() if key == "name" or value != fields[key].default}


def filled_in(architecture: Config) -> Config:
    """Return an architecture whose settings are equal if they mean the same; groups are lists, one for each layer."""
    layers, filled = architecture["layers"], {**LEFT_OUT, **architecture}
    heads, norm_eps = architecture["heads"], architecture.get("norm_eps")
    filled["head_width"] = architecture.get("head_width") or architecture["width"] // heads
    filled["norm_eps"] = EPS[architecture["norm_type"]] if norm_eps is None else norm_eps
    if "tied_output" in architecture:
        bias = architecture.get("output_bias", "init")
        filled["output_bias"] = "none" if architecture["tied_output"] and bias == "init" else bias
    every: dict[str, Any] = {
        "model": (POSITIONS, "sizes"),
        "pattern": (PATTERNS, ""),
        "attention": (MECHANISMS, "layer"),
    }
    for group, (kinds, common) in every.items():
        specs = per_layer_configs(architecture.get(group, {"name": "softmax"}), group, layers)
        filled[group] = [without_defaults(spec, kinds, common) if spec["name"] in kinds else spec for spec in specs]
    for spec in filled["attention"]:
        if spec.get("kv_heads") == heads:
            del spec["kv_heads"]
    for spec in filled["model"]:
        if spec["name"] == "rope":
            spec |= {"base": float(spec.get("base", 10000.0)), "fraction": float(spec.get("fraction", 1.0))}
    return filled


def differences(architecture: Config, other: Config) -> list[str]:
    """Return the keys whose settings mean something else in another architecture."""
    one, two = filled_in(architecture), filled_in(other)
    ignored = {"dropout", "embedding_dropout", "classes"}
    if one["model"][0]["name"] == "rope":
        ignored.add("block_size")
    return [key for key in one if key not in ignored and one[key] != two.get(key)]


def kept(architecture: Config, config: Config, source: Config) -> Config:
    """Return a config with what training does not change of the one that it began with.

    That is special tokens, and if the rotation is the same, what describes it and the longest text.
    """
    tokens = {key: value for key, value in source.items() if key.endswith("_token_id")}
    began = FAMILIES[source["model_type"]].architecture(source)
    if began["model"]["name"] != "rope" or "model" in differences(architecture, began):
        return config | tokens
    others = {key: value for key, value in config.items() if key not in ROTATIONS}
    return others | tokens | {key: source[key] for key in ROTATIONS if key in source}


def family_of(architecture: Config, source: Config | None = None) -> tuple[Family, Config]:
    """Return the family to which an architecture belongs, and its config.

    Args:
        source: the config of the model that training began with, None without one.

    Raises:
        UserError: there is none; the settings that the closest one lacks are named.
    """
    closest: tuple[list[str], Family] | None = None
    for family in FAMILIES.values():
        if ("pool" in architecture) != ("pool" in family.ours):
            continue
        config = family.config(architecture)
        if source is not None:
            config = kept(architecture, config, source)
        try:
            missing = differences(architecture, family.architecture(config))
        except UserError:
            continue
        if not missing:
            return family, config
        if closest is None or len(missing) < len(closest[0]):
            closest = missing, family
    assert closest is not None
    missing, family = closest
    one, two = filled_in(architecture), filled_in(family.architecture(family.config(architecture)))
    shown = [f"{key}: {readable(two[key])} (here {readable(one[key])})" for key in missing]
    raise UserError(
        f"No family of Hugging Face's models ({', '.join(FAMILIES)}) has these settings; the closest, {family.type}, "
        f"has other ones: {'; '.join(shown)}."
    )


def readable(value: Any) -> Any:
    """Return the setting of a group that all layers share."""
    if isinstance(value, list) and all(each == value[0] for each in value):
        (name, *rest) = value[0].items()
        return ", ".join([str(name[1]), *(f"{key} {option}" for key, option in rest)])
    return value


# Rotations


def read_rope(config: Config, H: int) -> Config:
    """Return `model=rope` of a config.

    The angle per position of each pair is that of the library: for "llama3" (Dubey et al. 2024, "The Llama 3 Herd of
    Models") and "yarn" (Peng et al. 2023) fixed, whatever the length of the text.
    """
    options: Config = {"rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0))}
    options |= config.get("rope_scaling") or {}
    options |= config.get("rope_parameters") or {}
    kind = options.get("rope_type", options.get("type", "default"))
    share: Any = options.get(
        "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    )
    base, R = float(options["rope_theta"]), int(H * share)
    spec: Config = {"name": "rope", "base": base, "fraction": R / H}
    f, factor = 1 / wavelengths(R, base), options.get("factor", 1.0)
    length = options.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "default":
        return spec
    if kind == "linear":
        f = f / factor
    elif kind == "llama3":
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        kept = ((length * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        f = (1 - kept) * f / factor + kept * f
    elif kind == "yarn" and not options.keys() & {"mscale", "mscale_all_dim"} and R == H:
        fast, slow = (
            R * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (options.get("beta_fast") or 32, options.get("beta_slow") or 1)
        )
        if options.get("truncate", True):
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, R - 1)
        slow = slow + 0.001 if fast == slow else slow
        divided = ((torch.arange(R // 2, dtype=torch.float64) - fast) / (slow - fast)).clamp(0, 1)
        f = divided * f / factor + (1 - divided) * f
        spec["growth"] = options.get("attention_factor") or 0.1 * math.log(factor) + 1
    else:
        raise no_counterpart("rope_parameters", options, "rope_type default, linear, llama3 or yarn of whole heads")
    return {**spec, "frequencies": f.tolist()}


def write_rope(architecture: Config) -> Config:
    """Undo `read_rope`, where the angles are those of a base."""
    spec = architecture["model"][0]
    base, share = spec.get("base", 10000.0), spec.get("fraction", 1.0)
    parameters = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
    return {"rope_theta": base, "rope_parameters": parameters}


# The families


class GPT2(Family):
    type, head, activation = "gpt2", "GPT2LMHeadModel", "activation_function"
    keys: ClassVar = {
        **{"width": "n_embd", "heads": "n_head", "layers": "n_layer", "ff": "n_inner", "block_size": "n_positions"},
        **{"vocab_size": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied_output": "tie_word_embeddings"},
    }
    defaults: ClassVar = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"}
    fixed: ClassVar = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    ours: ClassVar = {
        **{"norm": "pre", "norm_type": "layer", "final_norm": True, "qkv_bias": True, "bias": True},
        **{"output_bias": "none", "output_softcap": None},
    }
    blocks = ("decoder.blocks", "transformer.h")
    model: ClassVar = [
        ("decoder.embedding", "transformer.wte", COPY),
        ("decoder.positions.table", "transformer.wpe", COPY),
        ("decoder.final_norm", "transformer.ln_f", COPY),
        ("output", "lm_head", COPY),
    ]
    block: ClassVar = [
        ("attention_norm", "ln_1", COPY),
        ("attention.qkv", "attn.c_attn", QKV_TRANSPOSED),
        ("attention.output", "attn.c_proj", TRANSPOSED),
        ("feed_forward_norm", "ln_2", COPY),
        ("feed_forward.0", "mlp.c_fc", TRANSPOSED),
        ("feed_forward.2", "mlp.c_proj", TRANSPOSED),
    ]

    def architecture(self, config: Config) -> Config:
        return super().architecture({**config, "n_inner": config.get("n_inner") or 4 * config.get("n_embd", 0)})


class GPTNeoX(Family):
    type, head = "gpt_neox", "GPTNeoXForCausalLM"
    keys: ClassVar = {
        **KEYS,
        **{"norm_eps": "layer_norm_eps", "tied_output": "tie_word_embeddings"},
    }
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    }
    fixed: ClassVar = {"attention_bias": True}
    ours = GPT2.ours
    blocks = ("decoder.blocks", "gpt_neox.layers")
    model: ClassVar = [
        ("decoder.embedding", "gpt_neox.embed_in", COPY),
        ("decoder.final_norm", "gpt_neox.final_layer_norm", COPY),
        ("output", "embed_out", COPY),
    ]
    block: ClassVar = [
        ("attention_norm", "input_layernorm", COPY),
        ("attention.qkv", "attention.query_key_value", QKV_BY_HEAD),
        ("attention.output", "attention.dense", COPY),
        ("feed_forward_norm", "post_attention_layernorm", COPY),
        ("feed_forward.0", "mlp.dense_h_to_4h", COPY),
        ("feed_forward.2", "mlp.dense_4h_to_h", COPY),
    ]

    def special(self, config: Config) -> Config:
        spec = read_rope(config, config["hidden_size"] // config["num_attention_heads"])
        norm = "parallel" if config["use_parallel_residual"] else "pre"
        return {"attention": {"name": "softmax"}, "model": spec, "norm": norm}

    def special_config(self, architecture: Config) -> Config:
        rope = write_rope(architecture)
        share = rope["rope_parameters"]["partial_rotary_factor"]
        return {**rope, "rotary_pct": share, "use_parallel_residual": architecture["norm"] == "parallel"}


class Llama(Family):
    type, head, activations = "llama", "LlamaForCausalLM", GATED
    keys: ClassVar = {
        **KEYS,
        **{"norm_eps": "rms_norm_eps", "tied_output": "tie_word_embeddings"},
    }
    defaults: ClassVar = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False}
    ours: ClassVar = {
        **{"norm": "pre", "norm_type": "rms", "final_norm": True, "qkv_bias": False, "bias": False},
        **{"output_bias": "none", "output_softcap": None},
    }
    mechanism: ClassVar[Config] = {"name": "softmax"}
    slides: ClassVar = False  # whether layers can have a sliding window
    alternates: ClassVar = False  # whether every second layer has it, from the first on, if the config does not say
    blocks = ("decoder.blocks", "model.layers")
    model: ClassVar = [
        ("decoder.embedding", "model.embed_tokens", COPY),
        ("decoder.final_norm", "model.norm", COPY),
        ("output", "lm_head", COPY),
    ]
    block: ClassVar = [
        ("attention_norm", "input_layernorm", COPY),
        ("attention.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", QKV),
        ("attention.output", "self_attn.o_proj", COPY),
        ("feed_forward_norm", "post_attention_layernorm", COPY),
        ("feed_forward.0", "mlp.gate_proj mlp.up_proj", JOINED),
        ("feed_forward.2", "mlp.down_proj", COPY),
    ]

    def special(self, config: Config) -> Config:
        heads = config["num_attention_heads"]
        H = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads, window = config.get("num_key_value_heads") or heads, config.get("sliding_window")
        layers, types = range(config["num_hidden_layers"]), config.get("layer_types")
        if self.slides and types and not (len(types) == len(layers) and all(each in LAYER_TYPES for each in types)):
            raise no_counterpart("layer_types", types, f"{' or '.join(LAYER_TYPES)} for each layer")
        slides = [bool(self.slides and window and self.layer_slides(k, config)) for k in layers]
        each = [{"name": "window", "window": window} if is_sliding else {"name": "full"} for is_sliding in slides]
        pattern = each[0] if len({*slides}) == 1 else {"name": "by_layer", "layers": each}
        attention = {**self.mechanism, "kv_heads": kv_heads, **self.scores(config)}
        rope = read_rope(config, H)
        if rope["fraction"] != 1:  # the library would rotate whole heads all the same
            raise no_counterpart("partial_rotary_factor", rope["fraction"], "only 1")
        return {"attention": attention, "model": rope, "pattern": pattern, "head_width": H}

    def scores(self, config: Config) -> Config:
        """Return options of the attention that the config decides."""
        return {}

    def layer_slides(self, k: int, config: Config) -> bool:
        """Return whether layer k has the sliding window."""
        types = config.get("layer_types")
        return types[k] == "sliding_attention" if types else k % 2 == 0 or not self.alternates

    def special_config(self, architecture: Config) -> Config:
        windows = [spec.get("window", 5) if spec["name"] == "window" else None for spec in architecture["pattern"]]
        sliding = {"sliding_window": next(filter(None, windows), None)}
        if self.slides:
            sliding["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windows]
        kv_heads = architecture["attention"][0].get("kv_heads") or architecture["heads"]
        sizes = {"head_dim": architecture["head_width"], "num_key_value_heads": kv_heads}
        return {**write_rope(architecture), **sizes, **(sliding if self.slides else {})}


class Mistral(Llama):
    type, head, slides = "mistral", "MistralForCausalLM", True
    defaults: ClassVar = {**Llama.defaults, "sliding_window": 4096}

    def special_config(self, architecture: Config) -> Config:
        config = super().special_config(architecture)
        del config["layer_types"]  # all layers have the window
        return config


class Qwen3(Llama):
    type, head, slides = "qwen3", "Qwen3ForCausalLM", True
    defaults: ClassVar = {**Llama.defaults, "use_sliding_window": False}
    mechanism: ClassVar = {"name": "softmax", "qk_norm": True}
    block: ClassVar = [
        *Llama.block,
        ("attention.q_norm", "self_attn.q_norm", Q_NORM),
        ("attention.k_norm", "self_attn.k_norm", K_NORM),
    ]

    def layer_slides(self, k: int, config: Config) -> bool:
        before = config["use_sliding_window"] and k >= config.get("max_window_layers", 28)
        return super().layer_slides(k, config) if config.get("layer_types") else before

    def special_config(self, architecture: Config) -> Config:
        config = super().special_config(architecture)
        return {**config, "use_sliding_window": config["sliding_window"] is not None}


class Gemma2(Llama):
    type, head, activation = "gemma2", "Gemma2ForCausalLM", "hidden_activation"
    slides, alternates = True, True
    keys: ClassVar = {**Llama.keys, "output_softcap": "final_logit_softcapping"}
    defaults: ClassVar = {
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
        **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096},
    }
    ours: ClassVar = {**Llama.ours, "norm": "sandwich", "scale_embedding": True}
    model: ClassVar = [
        ("decoder.embedding", "model.embed_tokens", COPY),
        ("decoder.final_norm", "model.norm", ONE_LESS),
        ("output", "lm_head", COPY),
    ]
    block: ClassVar = [
        *[row for row in Llama.block if not row[0].endswith("norm")],
        ("attention_norm", "input_layernorm", ONE_LESS),
        ("output_norms.0", "post_attention_layernorm", ONE_LESS),
        ("feed_forward_norm", "pre_feedforward_layernorm", ONE_LESS),
        ("output_norms.1", "post_feedforward_layernorm", ONE_LESS),
    ]

    def scores(self, config: Config) -> Config:
        return {"softcap": config["attn_logit_softcapping"]}

    def special_config(self, architecture: Config) -> Config:
        cap = architecture["attention"][0].get("softcap")
        scalar = {"query_pre_attn_scalar": architecture["head_width"]}
        return {**super().special_config(architecture), **scalar, "attn_logit_softcapping": cap}

    def query_scale(self, architecture: Config, config: Config) -> float:
        return math.sqrt(architecture["head_width"] / config.get("query_pre_attn_scalar", 256))


class GptOss(Llama):
    type, head, slides, alternates = "gpt_oss", "GptOssForCausalLM", True, True
    activations: ClassVar = {"swiglu_clamped": "silu"}
    defaults: ClassVar = {**Llama.defaults, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150_000.0}
    fixed: ClassVar = {
        **{"attention_bias": True, "num_local_experts": 1, "num_experts_per_tok": 1},
        **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    }
    ours: ClassVar = {**Llama.ours, "qkv_bias": True, "bias": True}
    mechanism: ClassVar = {"name": "sink"}
    block: ClassVar = [
        *[row for row in Llama.block if not row[0].startswith("feed_forward.")],
        ("attention", "self_attn", COPY),  # its sinks
        ("feed_forward.0", "mlp.experts.gate_up_proj*", ONLY_EXPERT_GATED),
        ("feed_forward.2", "mlp.experts.down_proj*", ONLY_EXPERT),
    ]

    def constants(self, architecture: Config) -> dict[str, Tensor]:
        zeros = {
            "weight": torch.zeros(1, architecture["width"]),
            "bias": torch.zeros(1),
        }  # of one expert all is chosen
        layers = range(architecture["layers"])
        return {f"model.layers.{k}.mlp.router.{name}": zero.clone() for k in layers for name, zero in zeros.items()}


class Bert(Family):
    type, head = "bert", "BertForSequenceClassification"
    keys: ClassVar = {
        **KEYS,
        **{"norm_eps": "layer_norm_eps"},
    }
    defaults: ClassVar = {"layer_norm_eps": 1e-12, "hidden_act": "gelu"}
    fixed: ClassVar = {"is_decoder": False, "position_embedding_type": "absolute", "pad_token_id": 0}
    ours: ClassVar = {
        **{"norm": "post", "norm_type": "layer", "final_norm": False, "embedding_norm": True, "qkv_bias": True},
        **{"bias": True, "pool": "first", "classifier_activation": "tanh"},
    }
    blocks = ("encoder.blocks", "bert.encoder.layer")
    model: ClassVar = [
        ("encoder.embedding", "bert.embeddings.word_embeddings", COPY),
        (
            "encoder.positions.table",
            "bert.embeddings.position_embeddings bert.embeddings.token_type_embeddings",
            FIRST_TYPE,
        ),
        ("encoder.embedding_norm", "bert.embeddings.LayerNorm", COPY),
        ("head.0", "bert.pooler.dense", COPY),
        ("head.2", "classifier", COPY),
    ]
    block: ClassVar = [
        ("attention.qkv", "attention.self.query attention.self.key attention.self.value", QKV),
        ("attention.output", "attention.output.dense", COPY),
        ("attention_norm", "attention.output.LayerNorm", COPY),
        ("feed_forward.0", "intermediate.dense", COPY),
        ("feed_forward.2", "output.dense", COPY),
        ("feed_forward_norm", "output.LayerNorm", COPY),
    ]

    def special(self, config: Config) -> Config:
        return {**super().special(config), "classifier_width": config["hidden_size"]}

    def special_config(self, architecture: Config) -> Config:
        return {"type_vocab_size": 2}
