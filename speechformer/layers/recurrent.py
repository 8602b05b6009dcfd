"""Recurrent layers: what attention replaced.

    h_t = cell(x_t, h_{t-1})

The state h_t is all that is known of what stood before t. GRU: Cho et al. 2014, "Learning Phrase Representations
using RNN Encoder-Decoder"; LSTM: Hochreiter and Schmidhuber 1997. The cells are torch's.

Shapes: B sequences, T tokens, L layers, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from speechformer.errors import pick
from speechformer.layers.dropout import Dropout

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}
State = dict[str, Tensor]  # "h" of each layer, [B, L, D], and for an LSTM "c"


class Recurrent(nn.Module):
    """Layers of recurrent cells, from left to right, with dropout between them.

    Args:
        cell: "gru" or "lstm".
    """

    def __init__(self, *, width: int, layers: int, dropout: float, cell: str) -> None:
        super().__init__()
        kind = pick(CELLS, cell, "model.cell")
        self.layers = nn.ModuleList(kind(width, width, batch_first=True) for _ in range(layers))
        self.dropout = Dropout(dropout)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, token_mask_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The states of the last layer, [B, T, D], and those of all layers after the last real token.

        `state` is what stood before, None for nothing. `token_mask_BT` is False on padding, which stands at the end; None
        for none.
        """
        lengths = None if token_mask_BT is None else token_mask_BT.sum(dim=1).cpu()
        ends: dict[str, list[Tensor]] = {"h": [], "c": []}
        for k, layer in enumerate(self.layers):
            before = None
            if state is not None:
                parts = [part[:, k][None].contiguous() for part in state.values()]
                before = parts[0] if len(parts) == 1 else tuple(parts)
            x_BTD = self.dropout(x_BTD) if k else x_BTD
            if lengths is None:
                x_BTD, end = layer(x_BTD, before)
            else:
                packed = pack_padded_sequence(x_BTD, lengths, batch_first=True, enforce_sorted=False)
                packed, end = layer(packed, before)
                x_BTD = pad_packed_sequence(packed, batch_first=True, total_length=x_BTD.shape[1])[0]
            for name, part in zip(ends, end if isinstance(end, tuple) else (end,)):
                ends[name].append(part[0])
        return x_BTD, {name: torch.stack(parts, dim=1) for name, parts in ends.items() if parts}
