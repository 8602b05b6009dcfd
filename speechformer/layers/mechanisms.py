"""Attention mechanisms with scores, `attention=` in the config: what they do with the score of each pair.

Each is `SelfAttention` with one of its four steps (project, score, normalise, read) done otherwise, and takes all of
its options. z are the scores of a query with positions and mask, -inf for hidden keys.

Shapes: see `speechformer.layers.attention`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from speechformer.errors import require
from speechformer.layers.attention import Attention, KVCache, Layer, Places, SelfAttention
from speechformer.layers.mixers import MIXERS
from speechformer.options import build, options_of

Alpha = Annotated[float, Field(gt=1, le=2)]


class Sink(SelfAttention):
    """exp(z_j) / (exp(s_n) + sum_k exp(z_k)): a head can attend to nothing, by a logit s_n that starts at 0.

    OpenAI 2025, "gpt-oss"; Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Without
    training, s_n = 0: Miller 2023, "Attention Is Off By One".

    Args:
        learned: whether the logits are trained.
    """

    sums_to_one = False

    def __init__(self, layer: Layer, learned: bool = True, **options: Any) -> None:
        super().__init__(layer, **options)
        self.sinks = nn.Parameter(torch.zeros(self.heads), requires_grad=learned)

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        sinks_BNT1 = self.sinks[:, None, None].expand(*scores_BNTS.shape[:-1], 1)
        return torch.cat((scores_BNTS, sinks_BNT1.to(scores_BNTS.dtype)), dim=-1).softmax(dim=-1)[..., :-1]


class Sigmoid(SelfAttention):
    """sigmoid(z_j - log(length)), each key by itself; the length is that of training, whatever the text's.

    Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", section 3.
    """

    sums_to_one = False

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__(layer, **options)
        self.shift = math.log(layer.sizes.length)

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        return (scores_BNTS - self.shift).sigmoid()


class Threshold(torch.autograd.Function):
    """The tau for which p_j = max(0, (alpha - 1) z_j - tau)^(1 / (alpha - 1)) sum to 1, and these p."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float) -> Tensor:
        power = 1 / (alpha - 1)
        z = (alpha - 1) * (scores - scores.amax(dim=-1, keepdim=True))
        tau = torch.full_like(z[..., :1], -1.0)  # where the largest score alone gives 1
        for _ in range(30):  # Newton's steps from the left of a convex function
            excess = (z - tau).clamp(min=0)
            slope = power * excess.pow(power - 1).where(excess > 0, 0).sum(dim=-1, keepdim=True)
            tau = tau + (excess.pow(power).sum(dim=-1, keepdim=True) - 1) / slope
        weights = (z - tau).clamp(min=0).pow(power)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(weights)
        ctx.alpha = alpha
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        slopes = weights.pow(2 - ctx.alpha).where(weights > 0, 0)  # dp / dz where tau stands still
        mean = (slopes * grad).sum(dim=-1, keepdim=True) / slopes.sum(dim=-1, keepdim=True)
        return slopes * (grad - mean), None


class Entmax(SelfAttention):
    """max(0, (alpha - 1) z_j - tau)^(1 / (alpha - 1)), with the tau that makes them sum to 1: most weights are 0.

    Peters, Niculae, Martins 2019, "Sparse Sequence-to-Sequence Models"; alpha=2 is sparsemax (Martins and Astudillo
    2016), and towards 1 it becomes the softmax.

    Args:
        alpha: above 1, at most 2.
    """

    def __init__(self, layer: Layer, alpha: Alpha = 1.5, **options: Any) -> None:
        super().__init__(layer, **options)
        self.alpha = alpha

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        return Threshold.apply(scores_BNTS, self.alpha)


class Softpick(SelfAttention):
    """max(0, exp(z_j) - 1) / sum_k |exp(z_k) - 1|: keys of scores below 0 get nothing; a query may attend to none.

    Zuhri et al. 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax".
    """

    sums_to_one = False

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        largest = scores_BNTS.detach().amax(dim=-1, keepdim=True).clamp(min=0)
        shifted = (scores_BNTS - largest).exp() - (-largest).exp()  # times exp(largest): the quotient's two parts
        shifted = shifted.where(scores_BNTS > -math.inf, 0)
        return shifted.clamp(min=0) / (shifted.abs().sum(dim=-1, keepdim=True) + 1e-6)


class Differential(SelfAttention):
    """softmax(z) - lambda softmax(z'), where heads 2n and 2n + 1 score for a pair that reads values of width 2 H.

        lambda = exp(a b) - exp(c d) + start,    start = 0.8 - 0.6 exp(-0.3 layer)

    with trained vectors a, b, c, d. The output of a pair is normed and multiplied by 1 - start. Ye et al. 2024,
    "Differential Transformer".
    """

    sums_to_one = False
    pairs_heads = True

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__(layer, **options)
        require(self.heads % 2 == 0, "heads", "even with attention=differential, which pairs them", self.heads)
        require(self.kv_heads == self.heads, "attention.kv_heads", "null with attention=differential", self.kv_heads)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer.depth)
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, layer.sizes.head_width))
        self.norm = nn.RMSNorm(2 * layer.sizes.head_width, eps=1e-5)

    def attend(
        self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        v = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # of a pair, side by side, [B, N / 2, T, 2 H]
        output, weights = super().attend(x_BTD, q, k, v, attention, cache)
        return output, None if weights is None else weights.repeat_interleave(2, dim=1)  # of both heads

    def normalise(self, scores_BNTS: Tensor) -> Tensor:
        a, b, c, d = self.lambdas
        first, second = scores_BNTS.softmax(dim=-1).unflatten(1, (-1, 2)).unbind(dim=2)
        return first - ((a @ b).exp() - (c @ d).exp() + self.start) * second

    def read(self, output_BNTH: Tensor, x_BTD: Tensor, places: Places) -> Tensor:
        return super().read((1 - self.start) * self.norm(output_BNTH), x_BTD, places)


MECHANISMS: dict[str, type[SelfAttention]] = {
    "softmax": SelfAttention,
    "sink": Sink,
    "sigmoid": Sigmoid,
    "entmax": Entmax,
    "softpick": Softpick,
    "differential": Differential,
    **MIXERS,
}


def changed_options(spec: dict[str, Any]) -> list[str]:
    """Return the name of a choice, and in words its options that are not at their defaults."""
    name, options = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if name == "by_layer":
        return [", ".join(map(str, options["layers"]))]
    kind: Any = MECHANISMS[name]
    defaults = options_of(kind, "layer").model_fields
    changed = {key.replace("_", " "): value for key, value in options.items() if value != defaults[key].default}
    return [name, *(key if value is True else f"{key} {value}" for key, value in changed.items())]


def build_attention(spec: dict[str, Any], layer: Layer) -> SelfAttention:
    """Build the attention of a layer from a config group such as `{"name": "sink", "qk_norm": True}`."""
    return build(MECHANISMS, spec, "attention", layer=layer)
