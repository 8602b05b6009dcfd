"""What each head of a language model does with a text: where it attends, and what the text costs without it.

Attention to the previous token, to the first one, and induction: to the token after an earlier occurrence of the
query's own (Olsson et al. 2022, "In-context Learning and Induction Heads"). A head is switched off by zeros in its
place (Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.errors import UserError
from speechformer.models.stack import Stack


class HeadScores(NamedTuple):
    """Scores of the heads of each layer, [L, N].

    Args:
        previous, first: mean weight on the token before, and on the first one, of all queries but the first.
        induction: mean weight on the tokens after earlier occurrences of the query's token; None without one.
        cost: how much higher the loss of the text is without the head, in nats per token.
    """

    previous: Tensor
    first: Tensor
    induction: Tensor | None
    cost: Tensor


@contextlib.contextmanager
def without_heads(model: nn.Module, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Switch heads (layer, head) off, both counted from 0: the output layer of their attention reads zeros.

    Raises:
        UserError: the model has no such head.
    """
    layers = attention_layers(model)
    with contextlib.ExitStack() as hooks:
        for layer, n in heads:
            if not (0 <= layer < len(layers) and 0 <= n < layers[layer].heads):
                valid = f"layers 0 to {len(layers) - 1}, heads 0 to {layers[0].heads - 1}" if layers else "no heads"
                raise UserError(f"There is no head {n} of layer {layer} to switch off: the model has {valid}.")
            attention = layers[layer]

            def switch_off(module: nn.Module, inputs: tuple[Tensor], n: int = n, N: int = attention.heads) -> Tensor:
                each = inputs[0].unflatten(-1, (N, -1)).clone()
                each[..., n, :] = 0
                return each.flatten(-2)

            hooks.callback(attention.output.register_forward_pre_hook(switch_off).remove)
        yield


def attention_layers(model: nn.Module) -> list[Any]:
    """Return the attention of each layer of a model, or nothing if its heads do not have an output each."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    layers: list[Any] = [block.attention for block in stacks[-1].blocks] if stacks else []
    return [] if any(layer.pairs_heads for layer in layers) else layers


def loss_of(model: Any, ids_T: Tensor) -> float:
    """Return the mean loss of the tokens of a text but the first, in nats."""
    return float(F.cross_entropy(model(ids_T[None])[0, :-1].float(), ids_T[1:]))


@torch.no_grad()
def head_scores(model: Any, ids_T: Tensor, weights_LNTT: Tensor) -> HeadScores:
    """Score the heads of a `Decoder` on a text of at least two tokens.

    Args:
        weights_LNTT: its attention weights on the text.
    """
    L, N, T, _ = weights_LNTT.shape
    i = torch.arange(T)
    ids_T = ids_T.to(next(model.parameters()).device)
    same = (ids_T[:, None] == ids_T[None]).cpu() & (i[None] + 1 < i[:, None])
    follows = F.pad(same, (1, -1))  # the token after an earlier occurrence
    rows = follows.any(dim=1)
    induction = (weights_LNTT * follows).sum(dim=3)[:, :, rows].mean(dim=2) if rows.any() else None
    whole, costs = loss_of(model, ids_T), torch.zeros(L, N)
    for layer in range(L):
        for n in range(N):
            with without_heads(model, [(layer, n)]):
                costs[layer, n] = loss_of(model, ids_T) - whole
    previous = weights_LNTT.diagonal(-1, dim1=2, dim2=3).mean(dim=-1)
    return HeadScores(previous, weights_LNTT[:, :, 1:, 0].mean(dim=2), induction, costs)
