"""Positional encodings: how a transformer knows the order of its tokens, `model=` in the config.

An encoding acts in up to four places. `i` and `j` are positions of tokens, integer tensors:

    embed(x_BTD, i_T)               adds to the embeddings, before the first block       sinusoidal, learned
    rotate(q_BNTH, k_BNTH, i_T)     rotates queries and keys, in every layer             RoPE, xPos, PoPE
    bias(i, j) -> [N, T, S]         adds to the score of query i and key j, everywhere   ALiBi, T5, KERPLE, FIRE
    gate(z_BTN) -> [B, T, N]        log of the share of all before a token that stays    forget gates

The base class does nothing in any of them, which is NoPE. To add an encoding, override what it changes.

`bias` takes any pairs: for all of them i is [T, 1] and j is [1, S]. With a gate, z is a linear map of each layer's
input to its heads, and the score of query i and key j falls by the sum of the gates between them.

Two encodings are made of others: `ByLayer` of one for each layer, `Randomised` of one at random positions.

Shapes: see `speechformer.layers.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from speechformer.errors import UserError, require
from speechformer.layers.by_layer import is_choice, per_layer_configs
from speechformer.options import Amount, Positive, Share, Size, build

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Slopes = Literal["geometric", "learned"] | list[float]


class Sizes(NamedTuple):
    """What every encoding is built for.

    Args:
        width: D.
        heads: N.
        length: number of positions the model is trained on.
        causal: whether a query attends only to itself and earlier positions, as in a decoder.
        head_width: H.
    """

    width: int
    heads: int
    length: int
    causal: bool
    head_width: int


class Positions(nn.Module):
    """No positional encoding (NoPE): the model knows order through the causal mask alone, or not at all.

    Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers".

    A subclass takes `sizes`, followed by its own options.
    """

    max_length: int | None = None  # largest number of positions; None for no limit
    widening = 1  # how many times as wide rotated queries and keys are
    can_cache = True  # whether rotated keys stay right when the text grows; else a pass with a cache reads it all

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads

    def overrides(self, place: str) -> bool:
        """Return whether this encoding does anything in a place, for example "rotate"."""
        return getattr(type(self), place) is not getattr(Positions, place)

    def at_layer(self, k: int) -> Positions:
        """Return the encoding of layer k, which rotates and biases there."""
        return self

    def prepare(self, S: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of the S tokens of a pass, cached ones included, [S]."""
        return torch.arange(S, device=device)

    def embed(self, x_BTD: Tensor, i_T: Tensor) -> Tensor:
        """Return the embeddings of tokens at these positions, [B, T, D]."""
        return x_BTD

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of tokens at these positions, [B, N, T, H times `widening`] each."""
        return q_BNTH, k_BNTH

    def bias(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Return what is added to the scores of queries i and keys j before the softmax, or None for nothing.

        The result has the shape of i and j together, after a first dimension of N heads: [N, T, S] for all pairs.
        """
        return None

    def gate(self, z_BTN: Tensor) -> Tensor:
        """Return the logarithm of the share of all before each token that its gate keeps, [B, T, N]."""
        raise NotImplementedError

    def score_mod(self) -> ScoreMod | None:
        """Return `bias` as FlexAttention takes it: a function of score, sequence b, head n, query i and key j, or
        None for nothing. It is optional; with `bias` alone, models use another kernel."""
        return None


class Sinusoidal(Positions):
    """PE(i, 2d) = sin(i / 10000^(2d/D)), PE(i, 2d+1) = cos(i / 10000^(2d/D)), added to the embeddings.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.5. No parameters; any length.
    """

    table_PD: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("table_PD", self.table(sizes.length, sizes.width), persistent=False)

    def table(self, length: int, width: int) -> Tensor:
        """Return what is added at each position, [length, width]."""
        return sines_and_cosines(length, width, wavelengths(width, 10000.0))

    def prepare(self, S: int, device: torch.device | None = None) -> Tensor:
        if len(self.table_PD) < S:  # twice that, so not with each token that is generated
            self.table_PD = self.table(2 * S, self.table_PD.shape[1]).to(self.table_PD)
        return super().prepare(S, device)

    def embed(self, x_BTD: Tensor, i_T: Tensor) -> Tensor:
        return x_BTD + self.table_PD[i_T]


def wavelengths(width: int, base: float) -> Tensor:
    """Return base^(2d/width) for each pair d, in float64: its wavelength over 2 pi."""
    return base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


def sines_and_cosines(length: int, width: int, wavelengths: Tensor) -> Tensor:
    """Return sine and cosine of i / wavelength for each pair and position, interleaved, [length, width]."""
    # float32 angles would be off by 1e-4 after a few hundred positions
    angle = torch.arange(length, dtype=torch.float64)[:, None] / wavelengths
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :width].float()


class Learned(Positions):
    """One trained vector for each of the first `length` positions, added to the embeddings.

    Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; compared in Vaswani et al. 2017.

    Args:
        init_std: `initialise` draws them from normal(0, init_std); None: like the other embeddings.
    """

    def __init__(self, sizes: Sizes, init_std: Amount | None = None) -> None:
        super().__init__(sizes)
        self.init_std = init_std
        self.table = nn.Embedding(sizes.length, sizes.width)
        self.max_length = sizes.length

    def prepare(self, S: int, device: torch.device | None = None) -> Tensor:
        if self.table.num_embeddings < S:
            raise UserError(
                f"model=learned has no vector for position {S - 1}: it was trained on {self.max_length} positions. "
                "Use a shorter text, or train with a larger block_size or another model."
            )
        return super().prepare(S, device)

    def embed(self, x_BTD: Tensor, i_T: Tensor) -> Tensor:
        return x_BTD + self.table.weight[i_T]


def by_head(values_N: Tensor, pairs: Tensor) -> Tensor:
    """Return one value for each head with as many dimensions as it takes to broadcast with pairs, [N, 1, ...]."""
    return values_N.view(-1, *(1,) * pairs.dim())


def geometric_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes for N heads: 2^(-8/N), 2^(-16/N), ... if N is a power of two.

    Any other N takes the slopes of the next lower power of two, then every second slope of the next higher one. Press
    et al. 2022, section 3 and published code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    between = [2 ** (-8 * (n + 1) / (2 * power)) for n in range(2 * power)]
    return slopes + between[0::2][: heads - power]


class ALiBi(Positions):
    """score(i, j) = q_i k_j / sqrt(H) - scale * slope_n * |i - j| for head n. Any length.

    Press, Smith, Lewis 2022, "Train Short, Test Long", section 3. An encoder has the symmetric bias.

    Args:
        slopes: "geometric" (the paper's), "learned" (from the geometric ones; the parameter is their logarithm, so
            they stay positive), or one number for each head.
        scale: factor on every slope.
    """

    fixed_slopes: Tensor

    def __init__(self, sizes: Sizes, slopes: Slopes = "geometric", scale: Amount = 1.0) -> None:
        super().__init__(sizes)
        values = geometric_slopes(sizes.heads) if isinstance(slopes, str) else slopes
        rule = f"geometric, learned or a list of {sizes.heads} numbers, one for each head"
        require(len(values) == sizes.heads, "model.slopes", rule, slopes)
        self.scale = scale
        fixed_slopes = torch.tensor(values, dtype=torch.float32)
        self.log_slopes = nn.Parameter(fixed_slopes.log()) if slopes == "learned" else None
        self.register_buffer("fixed_slopes", fixed_slopes, persistent=False)

    def slopes(self) -> Tensor:
        """Return the slope of each head, including the scale, [N]."""
        return self.scale * (self.fixed_slopes if self.log_slopes is None else self.log_slopes.exp())

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).abs()
        return -by_head(self.slopes(), distance) * distance

    def score_mod(self) -> ScoreMod:
        slopes = self.slopes()
        return lambda score, b, n, i, j: score - slopes[n] * (i - j).abs()


def rotate_pairs(x_BNTH: Tensor, table_TR: Tensor) -> Tensor:
    """Rotate the first R numbers of each head, in pairs, by the angles whose sines and cosines the table has."""
    R, sin, cos = table_TR.shape[1], table_TR[:, 0::2], table_TR[:, 1::2]
    even, odd = x_BNTH[..., 0:R:2], x_BNTH[..., 1:R:2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return turned if x_BNTH.shape[-1] == R else torch.cat((turned, x_BNTH[..., R:]), dim=-1)


class RoPE(Positions):
    """Rotary encoding: rotate the pair (2d, 2d+1) of a query or key at position i by the angle i * base^(-2d/R).

    Su et al. 2021, "RoFormer", equations 14-16 and 34, where R is the width H of a head. Scores depend on i - j
    alone. No parameters; any length.

    Args:
        base: of the angles.
        frequencies: the angle for each pair, in place of base^(-2d/R); null: by the base.
        growth: multiplies what is rotated of queries and keys, as YaRN does for a model that was trained with it.
        fraction: R / H. The last H - R numbers of a head are not rotated (Black et al. 2022, "GPT-NeoX-20B").
        scaling: what evaluation does with a text, or a batch with one, that is longer than the training's `length`:
            "none": nothing.
            "linear": divide all positions by the factor (Chen et al. 2023, "Extending Context Window of LLMs via
                Positional Interpolation").
            "ntk": multiply the base by factor^(R / (R - 2)), so that the slowest pair is divided by the factor and
                the fastest keeps its angle (bloc97 2023; Peng et al. 2023, "YaRN", section 3.1).
            "yarn": divide the pairs that turn less than once in `length` by the factor, keep those that turn more
                than 32 times, interpolate between them, and multiply what is rotated of queries and keys by
                0.1 ln(factor) + 1 (Peng et al. 2023, section 3.4).
        factor: how many times longer the longest test text is; fixed, whatever the length of the text.

    With a scaling, all keys of a text turn when it grows beyond `length`. So they are not cached (`can_cache`).
    """

    table_PR: Tensor

    def __init__(
        self,
        sizes: Sizes,
        base: Positive = 10000.0,
        frequencies: list[Positive] | None = None,
        growth: Positive = 1.0,
        fraction: Share = 1.0,
        scaling: Literal["none", "linear", "ntk", "yarn"] = "none",
        factor: Positive = 4.0,
    ) -> None:
        super().__init__(sizes)
        require(factor > 1, "model.factor", "above 1", factor)
        share = fraction * sizes.head_width
        rotated = round(share)
        if rotated % 2 or abs(rotated - share) > 1e-6 or rotated < 2:
            raise UserError(
                "RoPE rotates pairs, so model.fraction times the width of a head must be even and at least 2, "
                f"not {fraction:g} * {sizes.head_width} = {share:g}."
            )
        if scaling == "ntk" and rotated == 2:
            raise UserError("model.scaling=ntk changes all pairs but the fastest, so it needs at least two of them.")
        if frequencies is not None:
            require(len(frequencies) == rotated // 2, "model.frequencies", f"{rotated // 2} numbers", frequencies)
            require(scaling != "ntk", "model.scaling", "linear or yarn, as model.frequencies have no base", scaling)
        self.base, self.scaling, self.factor, self.length = base, scaling, factor, sizes.length
        self.frequencies, self.growth = frequencies, growth
        self.can_cache, self.is_scaled = scaling == "none", False
        self.register_buffer("table_PR", self.table(sizes.length, rotated, "none"), persistent=False)

    def table(self, length: int, R: int, scaling: str) -> Tensor:
        """Return the sines and cosines of each position, [length, R]."""
        lengths, growth = wavelengths(R, self.base), self.growth
        if self.frequencies is not None:
            lengths = 1 / torch.tensor(self.frequencies, dtype=torch.float64)
        if scaling == "linear":
            lengths *= self.factor
        elif scaling == "ntk":
            lengths = wavelengths(R, self.base * self.factor ** (R / (R - 2)))
        elif scaling == "yarn":
            turns = self.length / (2 * math.pi * lengths)
            kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
            lengths = 1 / ((1 - kept) / (lengths * self.factor) + kept / lengths)
            growth *= 0.1 * math.log(self.factor) + 1
        return sines_and_cosines(length, R, lengths) * growth

    @torch.inference_mode(False)  # autograd cannot save tensors made in inference mode
    def prepare(self, S: int, device: torch.device | None = None) -> Tensor:
        is_scaled = self.scaling != "none" and not self.training and self.length < S
        if is_scaled != self.is_scaled or len(self.table_PR) < S:
            length = max(2 * S, self.length)  # as in `Sinusoidal`
            table = self.table(length, self.table_PR.shape[1], self.scaling if is_scaled else "none")
            self.table_PR, self.is_scaled = table.to(self.table_PR), is_scaled
        return super().prepare(S, device)

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        table_TR = self.table_PR[i_T]
        return rotate_pairs(q_BNTH, table_TR), rotate_pairs(k_BNTH, table_TR)


class XPos(RoPE):
    """RoPE with decay: queries times z_d^(i/scale_base) and keys times z_d^(-j/scale_base), for each pair d.

        z_d = (2d/H + gamma) / (1 + gamma)

    A score shrinks with i - j, fastest in the pairs that turn fastest. Sun et al. 2022, "A Length-Extrapolatable
    Transformer", section 2. The paper has decoders; in an encoder, scores grow towards later keys.

    Args:
        gamma: the larger, the slower the decay.
        scale_base: distance after which a pair has decayed to z_d.
    """

    log_decay_H: Tensor

    def __init__(
        self,
        sizes: Sizes,
        base: Positive = 10000.0,
        gamma: Positive = 0.4,
        scale_base: Positive = 512.0,
    ) -> None:
        super().__init__(sizes, base=base)
        H = sizes.head_width
        z = (torch.arange(0, H, 2) / H + gamma) / (1 + gamma)
        self.register_buffer("log_decay_H", z.log().repeat_interleave(2) / scale_base, persistent=False)
        self.max_length = int(80 / -float(self.log_decay_H.min()))  # float32 overflows at e^88
        if sizes.length > self.max_length:
            raise UserError(
                f"model=xpos overflows after {self.max_length} positions; raise model.scale_base={scale_base:g}."
            )

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q_BNTH, k_BNTH, i_T)
        scale_TH = (i_T[:, None] * self.log_decay_H).exp()
        return q * scale_TH, k / scale_TH


class PoPE(RoPE):
    """score(i, j) = sum over d of softplus(q_d) softplus(k_d) cos((i - j) base^(-d/H) + delta_nd) / sqrt(H).

    Where RoPE turns a pair by its position from the angle that its content has, here content is the length of a
    vector alone and position its angle, up to a trained delta for head n and number d, between -2 pi and 0, which
    starts at 0. All layers share it. Gopalakrishnan et al. 2025, "Decoupling the 'What' and 'Where' With Polar
    Coordinate Positional Embeddings". Any length.
    """

    widening = 2

    def __init__(self, sizes: Sizes, base: Positive = 10000.0) -> None:
        super().__init__(sizes, base=base)
        H = sizes.head_width
        self.register_buffer("table_PR", self.table(sizes.length, 2 * H, "none"), persistent=False)
        self.delta = nn.Parameter(torch.zeros(sizes.heads, 1, H))

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        sin, cos = self.table_PR[i_T].to(q_BNTH.dtype).unflatten(1, (-1, 2)).unbind(dim=2)
        delta = self.delta.clamp(-2 * math.pi, 0)
        turned_sin, turned_cos = sin * delta.cos() + cos * delta.sin(), cos * delta.cos() - sin * delta.sin()
        q = nn.functional.softplus(q_BNTH) * math.sqrt(2)  # scores are divided by sqrt(2 H)
        k = nn.functional.softplus(k_BNTH)
        return torch.cat((q * turned_cos, q * turned_sin), dim=-1), torch.cat((k * cos, k * sin), dim=-1)


class Relative(Positions):
    """T5's relative bias: one trained number for each head and bucket of distances, shared by all layers.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1. Half of the buckets hold one
    distance each, the other half grow logarithmically up to `max_distance`, and all larger distances share the last.
    An encoder uses half of the buckets for each side. With `recipe.init=torch` the table starts from
    normal(0, 1 / sqrt(width)), as in Hugging Face's T5. Other initialisations draw it like every embedding.
    """

    buckets: Tensor

    def __init__(self, sizes: Sizes, buckets: Size = 32, max_distance: Size = 128) -> None:
        super().__init__(sizes)
        one_side = buckets if sizes.causal else buckets // 2
        if one_side < 2 or buckets % 2 or max_distance <= one_side // 2:
            raise UserError(
                f"model=relative needs an even number of at least {2 if sizes.causal else 4} buckets and a "
                f"max_distance above {one_side // 2}, not {buckets} and {max_distance}."
            )
        self.max_distance = max_distance
        self.table = nn.Embedding(buckets, sizes.heads)
        with torch.no_grad():
            self.table.weight.mul_(sizes.width**-0.5)
        distance = torch.arange(-max_distance, max_distance + 1)
        first = torch.zeros_like(distance) if sizes.causal else (distance < 0).long() * one_side
        distance = distance.clamp(min=0) if sizes.causal else distance.abs()
        exact = one_side // 2
        ratio = (distance.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
        far = (exact + (ratio * (one_side - exact)).long()).clamp(max=one_side - 1)
        self.register_buffer("buckets", first + torch.where(distance < exact, distance, far), persistent=False)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each signed distance i - j: integers from 0, same shape."""
        m = self.max_distance
        return self.buckets[distance.clamp(-m, m) + m]

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        return self.table(self.bucket(i - j)).movedim(-1, 0)

    def score_mod(self) -> ScoreMod:
        buckets, table, m = self.buckets, self.table.weight, self.max_distance
        return lambda score, b, n, i, j: score + table[buckets[(i - j).clamp(-m, m) + m], n]


class Kerple(Positions):
    """Bias -a_n log(1 + b_n |i - j|), with a_n and b_n above 0 trained for each head n, shared by all layers.

    Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", the logarithmic
    variant. As in their code, a starts from uniform(0, 2) and b from uniform(0, 1), at 0.01 at least. The parameters
    are the logarithms. Any length.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.log_a = nn.Parameter((2 * torch.rand(sizes.heads)).clamp(min=0.01).log())
        self.log_b = nn.Parameter(torch.rand(sizes.heads).clamp(min=0.01).log())

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).abs()
        a, b = by_head(self.log_a.exp(), distance), by_head(self.log_b.exp(), distance)
        return -a * torch.log1p(b * distance)

    def score_mod(self) -> ScoreMod:
        a, b = self.log_a.exp(), self.log_b.exp()
        return lambda score, _, n, i, j: score - a[n] * torch.log1p(b[n] * (i - j).abs())


class FIRE(Positions):
    """Bias f(log(1 + c |i - j|) / log(1 + c max(t, i, j))), with an MLP f that has one output for each head.

    Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context Transformers", equation 3.
    The argument of f lies between 0 and 1 at any length. The trained c and t stay above 0, because the parameters are
    their logarithms. All layers share f, the paper's "FIRE-S", so a pass computes the biases once. The paper has
    decoders, where max(i, j) is i.

    Args:
        hidden: width of the MLP: linear, ReLU, linear.
        threshold: start of t; texts that are shorter than t are not interpolated. None: a quarter of `length`.
    """

    def __init__(self, sizes: Sizes, hidden: Size = 32, threshold: Positive | None = None) -> None:
        super().__init__(sizes)
        start = max(1.0, sizes.length / 4) if threshold is None else threshold
        self.log_c = nn.Parameter(torch.tensor(math.log(0.1)))
        self.log_threshold = nn.Parameter(torch.tensor(math.log(start)))
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, sizes.heads))

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        c, longest = self.log_c.exp(), torch.maximum(self.log_threshold.exp(), torch.maximum(i, j))
        share = torch.log1p(c * (i - j).abs()) / torch.log1p(c * longest)
        return self.mlp(share[..., None]).movedim(-1, 0)


class Forgetting(Positions):
    """Forget gates: score(i, j) = q_i k_j / sqrt(H) + sum over j < l <= i of log f_l, with f_l = sigmoid(z_l).

    Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate". Each head of a layer decides by
    the content of a token how much of all before it is forgotten. Where ALiBi subtracts the same from the score with
    each token, a gate can stay open. In an encoder, the gates between two tokens count both ways. Any length.
    """

    def gate(self, z_BTN: Tensor) -> Tensor:
        return nn.functional.logsigmoid(z_BTN)


POSITIONS: dict[str, type[Positions]] = {
    "nope": Positions,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "alibi": ALiBi,
    "rope": RoPE,
    "relative": Relative,
    "xpos": XPos,
    "pope": PoPE,
    "kerple": Kerple,
    "fire": FIRE,
    "forgetting": Forgetting,
}


class ByLayer(Positions):
    """Another encoding in each layer, such as RoPE in most and none in the others. See `layers.by_layer`.

    Yang et al. 2025, "RoPE to NoPE and Back Again: A New Hybrid Attention Strategy". An encoding that acts on the
    embeddings has no layer.
    """

    def __init__(self, sizes: Sizes, layers: Sequence[str | dict[str, Any]] = ("rope", "nope")) -> None:
        super().__init__(sizes)
        specs = per_layer_configs({"name": "by_layer", "layers": list(layers)}, "model")
        distinct = [spec for k, spec in enumerate(specs) if specs.index(spec) == k]
        self.order = [distinct.index(spec) for spec in specs]
        members = [build_positions(spec, **sizes._asdict()) for spec in distinct]
        for member, spec in zip(members, distinct):
            if member.overrides("embed"):
                raise UserError(
                    f"model.layers: {spec['name']} acts on the embeddings, before the first layer, so it cannot be "
                    "the encoding of a layer."
                )
        self.members = nn.ModuleList(members)
        self.can_cache = all(member.can_cache for member in members)
        self.max_length = min((x.max_length for x in members if x.max_length is not None), default=None)

    def at_layer(self, k: int) -> Positions:
        return self.members[self.order[k % len(self.order)]]  # type: ignore[return-value]


class Randomised(Positions):
    """Another encoding, whose T tokens are at a sorted random sample of the positions 0 to max_positions - 1.

    Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers", section 3: texts
    of any length meet the positions of long ones in training. As in their code, all texts of a batch share a sample,
    of its padded length, and evaluation draws, too. Training draws from torch's generator, as dropout does.
    Evaluation takes the same sample for the same number of tokens, so results repeat. A sample fits one length, so
    keys are not cached.

    Args:
        encoding: a choice of `model`, or one with options such as {name: rope, base: 500}; not nope or forgetting.
        max_positions: the paper's L, also the largest number of tokens. The encoding is built for that length.
    """

    can_cache = False
    max_length: int

    def __init__(self, sizes: Sizes, encoding: str | dict[str, Any] = "rope", max_positions: Size = 2048) -> None:
        super().__init__(sizes)
        if not is_choice(encoding):
            raise UserError(f"model.encoding must be a choice of model, such as rope, not {encoding!r}.")
        spec = {"name": encoding} if isinstance(encoding, str) else dict(encoding)
        if spec["name"] in ("nope", "randomised", "forgetting"):
            raise UserError(f"model.encoding={spec['name']} has no positions of its own to randomise.")
        rule = f"at least the {sizes.length} positions of training"
        require(max_positions >= sizes.length, "model.max_positions", rule, max_positions)
        self.encoding = build_positions(spec, **sizes._replace(length=max_positions)._asdict())
        self.max_length = max_positions

    def overrides(self, place: str) -> bool:
        return place != "score_mod" and self.encoding.overrides(place)  # which would count the tokens

    def prepare(self, S: int, device: torch.device | None = None) -> Tensor:
        if self.max_length < S:
            raise UserError(f"model.max_positions={self.max_length} is less than the {S} tokens of a text.")
        self.encoding.prepare(self.max_length, device)
        generator = None if self.training else torch.Generator().manual_seed(S)
        return torch.randperm(self.max_length, generator=generator)[:S].sort().values.to(device)

    def embed(self, x_BTD: Tensor, i_T: Tensor) -> Tensor:
        return self.encoding.embed(x_BTD, i_T)

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoding.rotate(q_BNTH, k_BNTH, i_T)

    def bias(self, i: Tensor, j: Tensor) -> Tensor | None:
        return self.encoding.bias(i, j)


def build_positions(
    spec: dict[str, Any], *, width: int, heads: int, length: int, causal: bool, head_width: int | None = None
) -> Positions:
    """Build the positional encoding of a config group such as `{"name": "alibi", "scale": 1.1}`."""
    every = {**POSITIONS, "by_layer": ByLayer, "randomised": Randomised}
    return build(every, spec, "model", sizes=Sizes(width, heads, length, causal, head_width or width // heads))
