"""Scores of heads. Oracles: their definitions in plain loops; a head's columns of the output weights set to 0."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import group
from test_models import decoder

from speechformer.analysis.heads import attention_layers, head_scores, without_heads


@pytest.mark.parametrize("attention", ["softmax", "delta"])
@torch.no_grad()
def test_scores_of_heads_are_their_definitions(attention: str) -> None:
    torch.manual_seed(0)
    model = decoder(attention=group("attention", attention)).eval()
    ids = torch.tensor([5, 6, 7, 5, 6, 8, 5])
    (weights,) = (torch.stack(layers)[:, 0] for layers in model.attention(ids[None]).values())
    scores, T = head_scores(model, ids, weights), len(ids)
    for layer, n in torch.cartesian_prod(*map(torch.arange, weights.shape[:2])).tolist():
        own = weights[layer, n]
        previous = sum(own[i, i - 1] for i in range(1, T)) / (T - 1)
        first = sum(own[i, 0] for i in range(1, T)) / (T - 1)
        after = [[own[i, p + 1] for p in range(i - 1) if ids[p] == ids[i]] for i in range(T)]
        induction = sum(map(sum, after)) / sum(map(bool, after))
        expected = torch.stack([previous, first, induction])
        assert scores.induction is not None
        found = torch.stack([scores.previous[layer, n], scores.first[layer, n], scores.induction[layer, n]])
        torch.testing.assert_close(found, expected)
        output = model.decoder.blocks[layer].attention.output
        kept, H = output.weight.clone(), output.weight.shape[1] // weights.shape[1]
        whole = F.cross_entropy(model(ids[None])[0, :-1], ids[1:])
        output.weight[:, n * H : (n + 1) * H] = 0
        without = F.cross_entropy(model(ids[None])[0, :-1], ids[1:])
        output.weight.copy_(kept)
        torch.testing.assert_close(scores.cost[layer, n], without - whole, atol=1e-6, rtol=1e-4)


def test_heads_are_on_again_and_pairs_have_none() -> None:
    model, ids = decoder().eval(), torch.tensor([[5, 6, 7]])
    before = model(ids)
    with without_heads(model, [(0, 0), (1, 1)]):
        assert not torch.equal(model(ids), before)
    assert torch.equal(model(ids), before)
    assert not attention_layers(decoder(attention=group("attention", "differential")))
    assert not attention_layers(decoder(model=group("model", "rnn")))
