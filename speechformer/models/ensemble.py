"""Model ensembling: K models of equal shapes trained as one, as `torch.func.stack_module_state` does it.

Each parameter of the ensemble stacks those of its members, [K, ...]. Row b of member k is row k B + b of every batch.
Attention, residuals and activations treat rows alike and are used as they are. Modules that differ by member (linear
layers, norms, embeddings, positions, bias, dropout) are replaced by versions that know K. So `stack_models` copies a
model, replaces its leaves, and runs the model's own code.

Nothing is summed over members: a NaN in one member never reaches another.

Shapes: K members, B rows of each, T tokens, D width, V rows of an embedding table, N heads.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.kernels.dispatch import SDPA
from speechformer.kernels.dropout import FastDropout, dropout_mask
from speechformer.layers.attention import Attention, Pairs, Places
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import Pattern
from speechformer.layers.positions import ByLayer, Positions, Randomised
from speechformer.models.stack import Cache, Stack


class EnsembleLeaf(nn.Module):
    """A module without submodules of K members, with stacked parameters."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, eps: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps


class EnsembleLinear(EnsembleLeaf):
    """Linear layers y = x W_k^T + b_k, with weights [K, out, in] and biases [K, out] or None."""

    def forward(self, x: Tensor) -> Tensor:
        K, O, D = self.weight.shape
        x_KRD, weight_KDO = x.reshape(K, -1, D), self.weight.transpose(1, 2)
        y = x_KRD @ weight_KDO if self.bias is None else torch.baddbmm(self.bias[:, None], x_KRD, weight_KDO)
        return y.view(*x.shape[:-1], O)

    def members(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of each member."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind()
        # unbind, because the gradient of each weight[k] would have the size of all K
        return list(zip(self.weight.unbind(), biases))


class EnsembleLayerNorm(EnsembleLeaf):
    """Layer norms with gains and shifts [K, D]."""

    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        K, D = self.weight.shape
        normed_KRD = F.layer_norm(x, (D,), eps=self.eps).reshape(K, -1, D)
        return torch.addcmul(self.bias[:, None], normed_KRD, self.weight[:, None]).view(x.shape)


class EnsembleRMSNorm(EnsembleLeaf):
    """RMS norms with gains [K, D]."""

    def forward(self, x: Tensor) -> Tensor:
        K, D = self.weight.shape
        return (F.rms_norm(x, (D,), eps=self.eps).reshape(K, -1, D) * self.weight[:, None]).view(x.shape)


class EnsembleEmbedding(EnsembleLeaf):
    """Embedding tables [K, V, D]; ids of member k select rows of its own table."""

    def forward(self, ids: Tensor) -> Tensor:
        K, V, _ = self.weight.shape
        first_K = torch.arange(0, K * V, V, device=ids.device)
        rows = ids.reshape(K, -1) + first_K[:, None]
        return F.embedding(rows.view(ids.shape), self.weight.flatten(0, 1))


class DropoutGenerators:
    """The random generator of each member for dropout on the CPU, and how many tokens its batch was padded by."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators, self.padding = list(generators), [0] * len(generators)


class EnsembleDropout(FastDropout):
    """Dropout. On the CPU each member draws what it would draw alone; other devices draw all elements together."""

    def __init__(self, rate: float, generators: DropoutGenerators) -> None:
        super().__init__(rate)
        self.generators = generators

    def mask(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the factor of each element of [K B, T, D], or of attention weights, [K B, N, T, T]."""
        B, members = shape[0] // len(self.generators.generators), []
        for generator, padding in zip(self.generators.generators, self.generators.padding):
            keys = padding if len(shape) == 4 else 0
            alone = (B, *shape[1:-2], shape[-2] - padding, shape[-1] - keys)
            mask = dropout_mask(alone, self.rate, dtype, generator)
            members.append(F.pad(mask, (0, keys, 0, padding)) if padding else mask)
        return torch.cat(members)


class EnsemblePositions(Positions):
    """Positions of K members or of one for all; `stacked` holds their parameters by name, [K, ...]."""

    def __init__(self, members: Sequence[Positions], stacked: dict[str, nn.Parameter]) -> None:
        nn.Module.__init__(self)
        self.max_length, self.widening = members[0].max_length, members[0].widening
        self.members = nn.ModuleList(copy.deepcopy(member) for member in members)
        named = OrderedDict((name.replace(".", "_"), parameter) for name, parameter in stacked.items())
        self.stacked = nn.ParameterDict(named)  # which would sort a dict, unlike the order of the parameters
        self.paths = [name.rpartition(".") for name in stacked]
        for member in self.members:
            for owner, _, name in self.paths:
                del member.get_submodule(owner)._parameters[name]

    def unstack(self) -> list[Positions]:
        """Return the positions of each member, with its slices of the parameters."""
        for (owner, _, name), parameter in zip(self.paths, self.stacked.values()):
            for member, member_parameter in zip(self.members, parameter.unbind()):
                setattr(member.get_submodule(owner), name, member_parameter)
        return list(self.members)  # type: ignore[arg-type]

    def embed(self, x_BTD: Tensor, i_T: Tensor) -> Tensor:
        members = self.unstack()
        parts = [member.embed(x, i_T) for member, x in zip(members, x_BTD.chunk(len(members)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rotate(self, q_BNTH: Tensor, k_BNTH: Tensor, i_T: Tensor) -> tuple[Tensor, Tensor]:
        members = self.unstack()
        n = len(members)
        parts = [member.rotate(q, k, i_T) for member, q, k in zip(members, q_BNTH.chunk(n), k_BNTH.chunk(n))]
        q, k = map(torch.cat, zip(*parts)) if n > 1 else parts[0]
        return q, k

    def gate(self, z_BTN: Tensor) -> Tensor:
        return self.members[0].gate(z_BTN)  # type: ignore[operator]  # without parameters of its own


class EnsembleStack(Stack):
    """A `Stack` whose members have different biases and numbers of tokens.

    Args:
        stack: gives its modules and settings.
        members: the stacks of the members.
        stacked: the stacked version of each parameter, by the id of the first member's.

    Raises:
        ValueError: the positions cannot be stacked.
    """

    can_unpad = False

    def __init__(self, stack: Stack, members: Sequence[Stack], stacked: dict[int, nn.Parameter]) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(stack.__dict__)
        positions = members[0].positions
        if isinstance(positions, ByLayer | Randomised):
            raise ValueError(f"a {type(positions).__name__} cannot be stacked into an ensemble")
        parameters = {name: stacked[id(parameter)] for name, parameter in positions.named_parameters()}
        if not parameters and all(member.config == members[0].config for member in members):
            members = members[:1]  # all have the same bias
        self.positions = EnsemblePositions([member.positions for member in members], parameters)
        # patterns of each layer, as many as `positions` has members
        self.member_patterns = list(zip(*(member.patterns for member in members)))
        groups = [(patterns, block.attention.kernel) for patterns, block in zip(self.member_patterns, self.blocks)]
        self.bias_groups = [groups.index(group) for group in groups]

    def attentions(
        self,
        x_BTD: Tensor,
        token_mask_BT: Tensor | None,
        places: Places | None = None,
        with_weights: bool = False,
        cache: Cache | None = None,
    ) -> list[Attention]:
        (B, T, _), members = x_BTD.shape, cast(EnsemblePositions, self.positions).unstack()
        n, device = len(members), x_BTD.device
        token_masks = [None] * n if token_mask_BT is None else token_mask_BT.chunk(n)

        def of_layer(patterns: tuple[Pattern, ...], kernel: str) -> Attention:
            pairs = [
                Pairs.of_text(positions, pattern, self.causal, T, token_mask, device)
                for positions, pattern, token_mask in zip(members, patterns, token_masks)
            ]
            biases = [member.bias(*member.all) for member in pairs]
            N = max(bias.shape[1] for bias in biases)
            bias = biases[0] if n == 1 else torch.cat([bias.expand(B // n, N, T, T) for bias in biases])
            every = Pairs.of_text(self.positions, patterns[0], self.causal, T, token_mask_BT, device)
            if with_weights or kernel != "any":
                return Attention(bias, every, None, with_weights)
            return SDPA(bias, every)

        built = {
            k: of_layer(self.member_patterns[k], self.blocks[k].attention.kernel_for(self.member_patterns[k][0]))
            for k in set(self.bias_groups)
        }
        return [built[k] for k in self.bias_groups]


def stacked_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Stack each parameter of the models, [K, ...], by the names of `named_parameters`."""
    return {
        name: nn.Parameter(torch.stack([model.get_parameter(name).detach() for model in models]))
        for name, _ in models[0].named_parameters()
    }


def stack_models(models: Sequence[nn.Module], generators: DropoutGenerators) -> nn.Module:
    """Return an ensemble of the models. Its parameters are `stacked_parameters`, in the same order.

    Raises:
        ValueError: a module has parameters but no stacked version (recurrent layers, cross-attention).
    """
    ensemble = copy.deepcopy(models[0])
    by_name = stacked_parameters(models)
    stacked = {id(parameter): by_name[name] for name, parameter in models[0].named_parameters()}
    inside_positions = ""
    for name, leaf in models[0].named_modules():
        if inside_positions and name.startswith(inside_positions):
            continue
        if isinstance(leaf, Positions):
            inside_positions = f"{name}."
            path = name.rpartition(".")[0]
            stacks: Any = [model.get_submodule(path) for model in (ensemble, *models)]
            ensemble.set_submodule(path, EnsembleStack(stacks[0], stacks[1:], stacked))
        else:
            replacement = stacked_leaf(name, leaf, stacked, generators)
            if replacement is not None:
                ensemble.set_submodule(name, replacement)
    return ensemble.train(models[0].training)


def stacked_leaf(
    name: str, leaf: nn.Module, stacked: dict[int, nn.Parameter], generators: DropoutGenerators
) -> nn.Module | None:
    """Return the version of a module that knows K; None for a module that needs none."""
    parameters: Any = [p if p is None else stacked[id(p)] for p in leaf._parameters.values()]
    if type(leaf) is nn.Linear:
        return EnsembleLinear(*parameters)
    if isinstance(leaf, nn.LayerNorm):
        return EnsembleLayerNorm(parameters[0], parameters[1], leaf.eps)
    if isinstance(leaf, nn.RMSNorm):
        return EnsembleRMSNorm(parameters[0], None, leaf.eps or 0.0)
    if isinstance(leaf, nn.Embedding):
        return EnsembleEmbedding(*parameters)
    if isinstance(leaf, Dropout):
        return EnsembleDropout(leaf.rate, generators)
    if parameters:
        raise ValueError(f"{name}: a {type(leaf).__name__} cannot be stacked into an ensemble")
    return None
