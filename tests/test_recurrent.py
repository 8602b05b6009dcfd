"""Recurrent layers against torch's cells, and a recurrent network in the place of a stack of blocks."""

from __future__ import annotations

import pytest
import torch
from conftest import group
from test_models import classifier, sentences
from torch import nn

from speechformer.layers.dropout import Dropout
from speechformer.layers.recurrent import Recurrent


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_layers_are_torchs_own_stack(cell: str) -> None:
    """Oracle: nn.GRU or nn.LSTM of three layers with the same weights, each sequence alone and unpadded."""
    torch.manual_seed(0)
    ours = Recurrent(width=8, layers=3, dropout=Dropout(0.0), cell=cell)
    theirs = (nn.GRU if cell == "gru" else nn.LSTM)(8, 8, 3, batch_first=True)
    state = {}
    for k, layer in enumerate(ours.layers):
        state |= {name.replace("l0", f"l{k}"): value for name, value in layer.state_dict().items()}
    theirs.load_state_dict(state)
    x, real = torch.randn(3, 7, 8), torch.ones(3, 7, dtype=torch.bool)
    real[1, 4:], real[2, 1:] = False, False
    states, end = ours(x, token_mask_BT=real)
    for row in range(3):
        length = int(real[row].sum())
        expected, last = theirs(x[row : row + 1, :length])
        torch.testing.assert_close(states[row, :length], expected[0])
        for name, part in zip(("h", "c"), last if cell == "lstm" else (last,)):
            torch.testing.assert_close(end[name][row], part[:, 0])
    first, state = ours(x[:, :3])
    second, _ = ours(x[:, 3:], state)
    torch.testing.assert_close(torch.cat((first, second), dim=1)[0], states[0])


def test_dropout_is_between_layers_and_off_in_evaluation() -> None:
    x = torch.randn(4, 5, 8)
    for layers, training in ((1, True), (2, True), (2, False)):
        cells = Recurrent(width=8, layers=layers, dropout=Dropout(0.5), cell="gru").train(training)
        assert torch.equal(cells(x)[0], cells(x)[0]) == (layers == 1 or not training)


def test_as_a_classifier_it_does_not_see_padding() -> None:
    model, ids = classifier(model=group("model", "rnn")), sentences()
    ids[1, 9:] = 0
    logits = model(ids)
    torch.testing.assert_close(model(ids[1:2, :9]), logits[1:2])
    with torch.no_grad():
        model.encoder.embedding.weight[0] += 1
    assert torch.equal(model(ids), logits)
