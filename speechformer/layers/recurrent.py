"""Recurrent layers, which attention replaced.

    h_t = cell(x_t, h_{t-1})

The state h_t is all that the network knows of tokens up to t. The cells are torch's. GRU: Cho et al. 2014, "Learning
Phrase Representations using RNN Encoder-Decoder". LSTM: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory".

Shapes: B sequences, T tokens, S tokens of the source, L layers, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}
State = dict[str, Tensor]  # "h" of each layer, [B, L, D], and for an LSTM also "c"


class Recurrent(nn.Module):
    """Recurrent layers that read from left to right, with `dropout` between them.

    Args:
        attention: with "bahdanau", the first layer of a decoder (`cross`) reads tokens and contexts, [B, T, 2 D].
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        dropout: nn.Module,
        cell: Literal["gru", "lstm"] = "gru",
        attention: Literal["luong", "bahdanau"] = "luong",
        cross: bool = False,
    ) -> None:
        super().__init__()
        widths = [width] * layers
        widths[0] *= 2 if cross and attention == "bahdanau" else 1
        self.layers = nn.ModuleList(CELLS[cell](inputs, width, batch_first=True) for inputs in widths)
        self.dropout = dropout

    def forward(
        self, x_BTD: Tensor, state: State | None = None, token_mask_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the states of the last layer, [B, T, D], and the state of all layers after the last token.

        Args:
            state: that of the text before x; None at the start.
            token_mask_BT: False on padding, which must stand at the end; None for no padding.
        """
        lengths = None if token_mask_BT is None else token_mask_BT.sum(dim=1).cpu()
        finals = []
        for k, layer in enumerate(self.layers):
            initial = None
            if state is not None:
                parts = [part[:, k][None].contiguous() for part in state.values()]
                initial = parts[0] if len(parts) == 1 else tuple(parts)
            x_BTD = self.dropout(x_BTD) if k else x_BTD
            if lengths is None:
                x_BTD, last = layer(x_BTD, initial)
            else:
                packed = pack_padded_sequence(x_BTD, lengths, batch_first=True, enforce_sorted=False)
                packed, last = layer(packed, initial)
                x_BTD = pad_packed_sequence(packed, batch_first=True, total_length=x_BTD.shape[1])[0]
            finals.append(last if isinstance(last, tuple) else (last,))
        return x_BTD, {name: torch.cat(parts).transpose(0, 1) for name, parts in zip("hc", zip(*finals))}


class AdditiveScore(nn.Module):
    """v . tanh(W h + U s) for a state h of a decoder and s of an encoder; Bahdanau et al. 2015, section A.1.2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.total = nn.Linear(width, 1, bias=False)

    def forward(self, h_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        """Return the scores, [B, T, S]; `keys_BSD` is U s, the same at every step."""
        return self.total((self.query(h_BTD)[:, :, None] + keys_BSD[:, None]).tanh()).squeeze(-1)
