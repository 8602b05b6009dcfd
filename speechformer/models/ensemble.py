"""K models of the same shapes as one: their weights stacked, their batches one behind the other.

Each parameter of the packed model is that of the K members, [K, ...], and row b of member k is row k B + b of what
goes through it. Attention, residuals and activations treat rows alike and are used as they are; what has weights
(linear layers, norms, embeddings, positions) or differs by member (positional biases, patterns, dropout) is replaced
by a version that knows K. So `packed` is a copy of a model with other leaves, and runs the core's own code.

Nothing is summed over members: what one of them computes, NaN included, never reaches another.

Shapes: K members, B rows of each, T tokens, D width, V rows of an embedding table, N heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.layers.attention import attention_bias
from speechformer.layers.dropout import Dropout, masks
from speechformer.layers.positions import Positions


class EnsembleLinear(nn.Module):
    """y = x W_k^T + b_k. Weight [K, out, in], bias [K, 1, out] or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        K, O, D = self.weight.shape
        x_KRD, weight_KDO = x.reshape(K, -1, D), self.weight.transpose(1, 2)
        y = x_KRD @ weight_KDO if self.bias is None else torch.baddbmm(self.bias[:, None], x_KRD, weight_KDO)
        return y.view(*x.shape[:-1], O)

    def members(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each member."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind()
        # not weight[k], whose gradients would be K tensors of the size of all
        return list(zip(self.weight.unbind(), biases))


class EnsembleLayerNorm(nn.Module):
    """Layer norm, with gains and shifts [K, D]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        K, D = self.weight.shape
        normed_KRD = F.layer_norm(x, (D,), eps=self.eps).reshape(K, -1, D)
        return torch.addcmul(self.bias[:, None], normed_KRD, self.weight[:, None]).view(x.shape)


class EnsembleEmbedding(nn.Module):
    """Row ids[b, t] of member k's table, of [K, V, D]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        K, V, _ = self.weight.shape
        first_K = torch.arange(0, K * V, V, device=ids.device)
        rows = ids.reshape(K, -1) + first_K[:, None]
        return F.embedding(rows.view(ids.shape), self.weight.flatten(0, 1))


class Draws:
    """Whose random numbers dropout takes on the CPU.

    Attributes: `generators`, one for each member; `padding`, by how many tokens each member's batch was made longer
    than it is alone.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self.padding = [0] * len(self.generators)


class EnsembleDropout(Dropout):
    """Dropout. On the CPU each member draws what it would draw alone, from its own generator; on other devices all
    draw from one, each element for itself."""

    def __init__(self, rate: float, draws: Draws) -> None:
        super().__init__(rate)
        self.draws = draws

    def masks(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Those of tensors [KB, T, D] or, of attention weights, [KB, N, T, T]."""
        of_members, K = [], len(self.draws.generators)
        for generator, padding in zip(self.draws.generators, self.draws.padding):
            more = [(padding if len(shape) == 4 else 0, padding) for shape in shapes]  # keys, tokens
            own_shapes = [
                (shape[0] // K, *shape[1:-2], shape[-2] - tokens, shape[-1] - keys)
                for shape, (keys, tokens) in zip(shapes, more)
            ]
            own = masks(own_shapes, self.rate, dtype, generator)
            of_members.append(
                [F.pad(mask, (0, keys, 0, tokens)) if padding else mask for mask, (keys, tokens) in zip(own, more)]
            )
        return [torch.cat(parts) for parts in zip(*of_members)]


class EnsemblePositions(Positions):
    """The positions of each member, in its rows.

    Args:
        members: one for each, or one that is that of all.
        stacked: of each of their parameters, by its name, those of all, [K, ...].
    """

    def __init__(self, members: Sequence[Positions], stacked: dict[str, nn.Parameter]) -> None:
        nn.Module.__init__(self)
        self.max_length = members[0].max_length
        self.members = nn.ModuleList(copy.deepcopy(member) for member in members)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): parameter for name, parameter in stacked.items()})
        self.places = [name.rpartition(".") for name in stacked]
        for member in self.members:
            for owner, _, name in self.places:
                del member.get_submodule(owner)._parameters[name]

    def each(self) -> list[Positions]:
        """Those of each member, with its slices of the parameters."""
        for (owner, _, name), parameter in zip(self.places, self.stacked.values()):
            for member, own in zip(self.members, parameter.unbind()):
                setattr(member.get_submodule(owner), name, own)
        return list(self.members)  # type: ignore[arg-type]

    def embed(self, x_BTD: Tensor, offset: int = 0) -> Tensor:
        each = self.each()
        parts = [member.embed(x, offset) for member, x in zip(each, x_BTD.chunk(len(each)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        each = self.each()
        n = len(each)
        if n == 1:
            return each[0].rotate(q_BNTH, k_BNTH, offset)
        parts = [member.rotate(q, k, offset) for member, q, k in zip(each, q_BNTH.chunk(n), k_BNTH.chunk(n))]
        q, k = map(torch.cat, zip(*parts))
        return q, k


def stacked_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Each parameter of the models, [K, ...], by its name; one that a model has in two places once, as in
    `named_parameters`."""
    return {
        name: nn.Parameter(torch.stack([model.get_parameter(name).detach() for model in models]))
        for name, _ in models[0].named_parameters()
    }


def stack_models(models: Sequence[nn.Module], draws: Draws) -> nn.Module:
    """The models as one, whose parameters are `stacked_parameters`, in the order of theirs.

    Raises:
        ValueError: a part of the model has parameters and cannot be packed (a recurrent layer, attention across).
    """
    model = copy.deepcopy(models[0])
    stacked = stacked_parameters(models)
    of = {id(parameter): stacked[name] for name, parameter in models[0].named_parameters()}
    inside = ""
    for name, leaf in models[0].named_modules():
        if inside and name.startswith(inside):
            continue
        own: dict[str, Any] = {
            place: None if parameter is None else of[id(parameter)] for place, parameter in leaf._parameters.items()
        }
        new: nn.Module
        if isinstance(leaf, Positions):
            inside = f"{name}."
            stacks = [each.get_submodule(name.rpartition(".")[0]) for each in models]
            stack_positions(model.get_submodule(name.rpartition(".")[0]), stacks, leaf, of)
            continue
        if isinstance(leaf, nn.Linear):
            new = EnsembleLinear(own["weight"], own["bias"])
        elif isinstance(leaf, nn.LayerNorm):
            new = EnsembleLayerNorm(own["weight"], own["bias"], leaf.eps)
        elif isinstance(leaf, nn.Embedding):
            new = EnsembleEmbedding(own["weight"])
        elif isinstance(leaf, Dropout):
            new = EnsembleDropout(leaf.rate, draws)
        elif own:
            raise ValueError(f"{name} is a {type(leaf).__name__}, and those are not packed")
        else:
            continue
        model.set_submodule(name, new)
    return model.train(models[0].training)


def stack_positions(stack: Any, stacks: Sequence[Any], leaf: Positions, of: dict[int, nn.Parameter]) -> None:
    """Give a packed stack the positions and patterns of its members."""
    parameters = {name: of[id(parameter)] for name, parameter in leaf.named_parameters()}
    alike = not parameters and all(each.kinds == stacks[0].kinds for each in stacks)
    members = [each.positions for each in (stacks[:1] if alike else stacks)]
    patterns = [each.pattern for each in stacks[: len(members)]]
    stack.positions = EnsemblePositions(members, parameters)

    def bias_of_all(B: int, T: int, S: int, token_mask_BS: Tensor | None) -> Tensor:
        positions, n = stack.positions.each(), len(members)
        reals = [None] * n if token_mask_BS is None else token_mask_BS.chunk(n)
        device = stack.embedding.weight.device
        biases = [
            attention_bias(member, pattern, T, S, stack.causal, real, device)
            for member, pattern, real in zip(positions, patterns, reals)
        ]
        heads = max(bias.shape[1] for bias in biases)
        return biases[0] if n == 1 else torch.cat([bias.expand(B // n, heads, T, S) for bias in biases])

    stack.scores = bias_of_all
