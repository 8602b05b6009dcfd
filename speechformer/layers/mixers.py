"""Attention mechanisms without scores, `attention=` in the config: a state of fixed size in place of all keys.

Each token fades the state S of a head, [H, V], writes into it, and reads it:

    S_t = exp(g_t) S_{t-1} + b_t k_t v_t^T          or with the delta rule, which first removes what k_t reads,
    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
    o_t = S_t^T q_t / sqrt(H),  but o_t = S_t^T q_t in Mamba-2

`layers.recurrence` computes both, token by token (generation, with constant memory) and in chunks (training). What a
mixer defines is q, k and v, the decay g and the strength b, and what it does with the output. Positions may act on
the embeddings and rotate queries and keys; there are no scores for a bias, a gate or a pattern. A rotation comes
before `features`. So with RoPE, what `linear` reads depends on more than distances, unlike in Su et al. 2021,
"RoFormer", section 3.3; and the unit length of the delta rule's keys undoes the decay of xPos.

Shapes: see `speechformer.layers.attention`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.errors import UserError
from speechformer.layers.attention import Attention, KVCache, Layer, Places, SelfAttention
from speechformer.layers.patterns import Pattern, all_pairs
from speechformer.layers.positions import Positions
from speechformer.layers.recurrence import chunked, step_by_step
from speechformer.options import Whole


class Mixer(SelfAttention):
    """A mixer that neither decays nor selects, o_t = sum over j <= t of (q_t k_j) v_j / sqrt(H); a base for others.

    Args:
        conv, qk_norm: as for `SelfAttention`.
    """

    kernel = "none"
    sums_to_one = False
    causal_only = True  # whether it is defined for decoders alone
    is_scaled = True  # whether queries are divided by sqrt(H)
    delta = False

    def __init__(self, layer: Layer, conv: Whole = 0, qk_norm: bool = False) -> None:
        super().__init__(layer, conv=conv, qk_norm=qk_norm)
        if self.causal_only and not layer.sizes.causal:
            raise UserError(
                f"attention={self.name} reads from left to right, so it needs a decoder (task=lm, "
                "task=probe); in an encoder attention=linear and those with scores work."
            )

    def check(self, positions: Positions, pattern: Pattern) -> None:
        acting = [place for place in ("bias", "gate") if positions.overrides(place)]
        if acting or pattern is not all_pairs:
            remedy = (
                "model must be nope, sinusoidal, learned or a rotation such as rope"
                if acting
                else "pattern must be full"
            )
            what = acting[0] if acting else "pattern"
            raise UserError(f"attention={self.name} has no scores that a {what} could change: {remedy}.")

    @property
    def name(self) -> str:
        """The choice in the config; the class of one that is not among `MIXERS`."""
        return next((name for name, kind in MIXERS.items() if kind is type(self)), type(self).__name__)

    def features(self, x_BNTH: Tensor) -> Tensor:
        """Return queries or keys as the state meets them."""
        return x_BNTH

    def decay(self, x_BTD: Tensor, k_BNTH: Tensor) -> Tensor | None:
        """Return g, [1 or B, N, T, 1 or H], from the layer's input; None for no decay."""
        return None

    def strength(self, x_BTD: Tensor) -> Tensor | None:
        """Return b, [B, N, T, 1]; None for 1."""
        return None

    def mix(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache) -> Tensor:
        """Return the output of the heads for some values, [B, N, T, V], in which it is linear."""
        q, k = self.features(q), self.features(k)
        if self.is_scaled:
            q = q / math.sqrt(q.shape[-1])
        run = step_by_step if q.shape[2] == 1 else chunked
        state = None if cache is None else cache.get("state")
        output, state = run(q, k, v, self.decay(x_BTD, k), self.strength(x_BTD), self.delta, state)
        if cache is not None:
            cache["state"] = state
        return output

    def attend(
        self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        weights = None
        if attention.with_weights and cache is None:  # what multiplies each value: the output for unit vectors
            B, N, T, _ = v.shape
            weights = self.mix(
                x_BTD, q, k, torch.eye(T, dtype=v.dtype, device=v.device).expand(B, N, T, T), attention, None
            )
        return self.mix(x_BTD, q, k, v, attention, cache), weights


class Linear(Mixer):
    """o_t = sum_j f(q_t) f(k_j) v_j / sum_j f(q_t) f(k_j), with f(x) = elu(x) + 1, over j <= t; in an encoder all j.

    Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention".
    """

    sums_to_one = True
    causal_only = False

    def features(self, x_BNTH: Tensor) -> Tensor:
        return F.elu(x_BNTH) + 1

    def mix(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache) -> Tensor:
        pairs = attention.pairs
        assert pairs is not None
        with_ones = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
        if pairs.causal:
            output = super().mix(x_BTD, q, k, with_ones, attention, cache)
        else:
            q, k = self.features(q), self.features(k)
            if pairs.token_mask_BS is not None:
                k = k * pairs.token_mask_BS[:, None, :, None]
            output = q @ (k.transpose(2, 3) @ with_ones)
        return output[..., :-1] / (output[..., -1:] + 1e-6)


class Normed(Mixer):
    """A mixer whose heads are normed by their RMS and, if `has_gate`, multiplied by silu(W x) (Sun et al. 2023)."""

    has_gate = True

    def __init__(self, layer: Layer, conv: Whole = 0, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        self.norm = nn.RMSNorm(layer.sizes.head_width, eps=1e-6)
        read = layer.sizes.head_width * layer.sizes.heads
        self.output_gate = nn.Linear(layer.sizes.width, read, bias=False) if self.has_gate else None

    def read(self, output_BNTH: Tensor, x_BTD: Tensor, places: Places) -> Tensor:
        output_BTD = places.join(self.norm(output_BNTH))
        return self.output(output_BTD if self.output_gate is None else output_BTD * F.silu(self.output_gate(x_BTD)))


class Retention(Normed):
    """g_n = log(1 - 2^(-5 - n)) for head n = 0, 1, ...: a fixed decay. Sun et al. 2023, "Retentive Network"; theirs
    rotates queries and keys, `model=rope` or `model=xpos`."""

    decay_N: Tensor

    def __init__(self, layer: Layer, conv: Whole = 0, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        decay_N = torch.log1p(-(2.0 ** (-5 - torch.arange(self.heads))))
        self.register_buffer("decay_N", decay_N, persistent=False)

    def decay(self, x_BTD: Tensor, k_BNTH: Tensor) -> Tensor:
        return self.decay_N[None, :, None, None].expand(1, -1, k_BNTH.shape[2], 1)


class GatedLinear(Normed):
    """exp(g_t) = sigmoid(W' W x_t + c)^(1/16), for each channel of the keys, with W' W of rank 16.

    Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.4.
    """

    def check(self, positions: Positions, pattern: Pattern) -> None:
        super().check(positions, pattern)
        if positions.widening > 1:
            raise UserError(
                "attention=gated_linear has a decay for each channel of a key, and model=pope makes two of each: "
                "take another model, such as rope."
            )

    def __init__(self, layer: Layer, conv: Whole = 0, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        sizes = layer.sizes
        self.decay_map = nn.Sequential(
            nn.Linear(sizes.width, 16, bias=False), nn.Linear(16, sizes.head_width * sizes.heads)
        )

    def decay(self, x_BTD: Tensor, k_BNTH: Tensor) -> Tensor:
        return (F.logsigmoid(self.decay_map(x_BTD)) / 16).unflatten(2, (self.heads, -1)).transpose(1, 2)


class Delta(Normed):
    """The delta rule, with b_t = sigmoid(W x_t) and q, k = silu(.) of length 1.

    Schlag, Irie, Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers"; Yang et al. 2024,
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length". `conv` covers 4 tokens there.
    """

    delta = True
    has_gate = False

    def __init__(self, layer: Layer, conv: Whole = 4, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        self.strength_map = nn.Linear(layer.sizes.width, self.heads, bias=False)

    def projections(self, x_BTD: Tensor, cache: KVCache) -> Tensor:
        return F.silu(super().projections(x_BTD, cache))

    def features(self, x_BNTH: Tensor) -> Tensor:
        return F.normalize(x_BNTH, dim=-1)

    def strength(self, x_BTD: Tensor) -> Tensor:
        return self.strength_map(x_BTD).sigmoid().transpose(1, 2)[..., None]


class Steps(nn.Module):
    """How long the step of a token is for each head, and what decays in it: s = softplus(W x + c), g = -exp(a) s.

    Gu and Dao 2023, "Mamba", section 3.6: a starts at log uniform(1, 16), softplus(c) log-uniform in [0.001, 0.1].
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        N = layer.sizes.heads
        self.map = nn.Linear(layer.sizes.width, N, bias=False)
        self.log_rate = nn.Parameter(torch.empty(N).uniform_(1, 16).log())
        step = torch.empty(N).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.shift = nn.Parameter(step.expm1().log())  # the inverse of softplus

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and g, [B, N, T, 1] each."""
        steps_BNT1 = F.softplus(self.map(x_BTD) + self.shift).transpose(1, 2)[..., None]
        return steps_BNT1, -self.log_rate.exp()[:, None, None] * steps_BNT1


class GatedDelta(Delta):
    """The delta rule with the decay of Mamba-2. Yang, Kautz, Hatamizadeh 2025, "Gated Delta Networks"."""

    has_gate = True

    def __init__(self, layer: Layer, conv: Whole = 4, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        self.steps = Steps(layer)

    def decay(self, x_BTD: Tensor, k_BNTH: Tensor) -> Tensor:
        return self.steps(x_BTD)[1]


class SSD(Normed):
    """Mamba-2: b_t is the step s_t and g_t = -exp(a) s_t; the output is o_t + d_n v_t. Queries, keys and values are
    its C, B and x, here of each head.

    Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
    Space Duality". The gate comes before the norm, which is of each head; theirs is of all heads together.
    """

    is_scaled = False

    def __init__(self, layer: Layer, conv: Whole = 4, qk_norm: bool = False) -> None:
        super().__init__(layer, conv, qk_norm)
        self.steps, self.skip = Steps(layer), nn.Parameter(torch.ones(self.heads))

    def projections(self, x_BTD: Tensor, cache: KVCache) -> Tensor:
        return F.silu(super().projections(x_BTD, cache))

    def decay(self, x_BTD: Tensor, k_BNTH: Tensor) -> Tensor:
        return self.steps(x_BTD)[1]

    def strength(self, x_BTD: Tensor) -> Tensor:
        return self.steps(x_BTD)[0]

    def mix(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, attention: Attention, cache: KVCache) -> Tensor:
        return super().mix(x_BTD, q, k, v, attention, cache) + self.skip[:, None, None] * v

    def read(self, output_BNTH: Tensor, x_BTD: Tensor, places: Places) -> Tensor:
        assert self.output_gate is not None
        gates_BNTH = F.silu(self.output_gate(x_BTD)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        return self.output(places.join(self.norm(output_BNTH * gates_BNTH)))


MIXERS: dict[str, type[Mixer]] = {
    "linear": Linear,
    "retention": Retention,
    "gated_linear": GatedLinear,
    "delta": Delta,
    "gated_delta": GatedDelta,
    "ssd": SSD,
}
