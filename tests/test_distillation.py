"""Oracles: Kneser-Ney models fitted by hand on all folds but one, and the formula of the loss."""

from __future__ import annotations

import torch
from test_kneser_ney import stream

from speechformer.models.kneser_ney import KneserNey
from speechformer.tasks.distillation import FOLDS, CrossFittedTargets

IDS = torch.tensor(stream(400, 12, 0))
V = 15


def test_a_target_is_shared_with_counts_of_the_other_folds() -> None:
    """The last two rows of the embedding table belong to no word."""
    targets, size = CrossFittedTargets(IDS, 3, V - 3, V, 0.7), len(IDS) // FOLDS
    places = torch.tensor([1, 2, size - 1, size, 5 * size + 3, len(IDS) - 1])
    q_RV = targets.distributions(places, IDS[places])
    for place, q_V in zip(places.tolist(), q_RV):
        start = place // size * size
        rest = [*IDS[:start].tolist(), *IDS[start + size :].tolist()]
        teacher, context = KneserNey(rest, 3, V - 3), tuple(IDS[max(0, place - 2) : place].tolist())
        expected = torch.tensor([0.0, *(0.7 * teacher.probability(word, context) for word in range(1, V - 2)), 0, 0])
        expected[IDS[place]] += 0.3
        torch.testing.assert_close(q_V, expected)


def test_the_loss_is_its_formula() -> None:
    """Oracle: - sum of q log p over the words, averaged over two windows of four targets."""
    torch.manual_seed(0)
    targets, start_B = CrossFittedTargets(IDS, 3, V - 1, V, 0.7), torch.tensor([10, 200])
    weight, bias, hidden = torch.randn(V, 6), torch.randn(V), torch.randn(8, 6)
    places = torch.tensor([11, 12, 13, 14, 201, 202, 203, 204])
    q_RV, log_p = targets.distributions(places, IDS[places]), (hidden @ weight.T + bias).log_softmax(dim=1)
    loss = targets.loss(weight, bias, hidden, start_B, IDS[places])
    torch.testing.assert_close(loss, -(q_RV * log_p).sum(dim=1).mean())
