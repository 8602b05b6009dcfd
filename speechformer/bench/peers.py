"""What a user would pick instead: the same sizes built from torch.nn.TransformerEncoder and from x-transformers.

Both as their documentation has them, pre-norm, with the same widths, dropout, output layer and pooling; both know
order by a table of learned positions. The loss is torch's cross-entropy of all logits.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.errors import UserError

Sizes = dict[str, int]  # vocab_size, width, heads, layers, ff, block_size


def head_of(task: str, sizes: Sizes, classes: int) -> nn.Module:
    """Hidden states to logits."""
    width = sizes["width"]
    if task == "lm":
        return nn.Linear(width, sizes["vocab_size"])
    return nn.Sequential(nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, classes))


class Peer(nn.Module):
    """A model of theirs: `hidden` is to be filled in."""

    def __init__(self, task: str, sizes: Sizes, classes: int) -> None:
        super().__init__()
        self.task = task
        self.head = head_of(task, sizes, classes)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits: of the next token, [B, T, V], or of the classes, [B, classes], from the mean over real tokens."""
        hidden = self.hidden(ids_BT)
        if self.task == "lm":
            return self.head(hidden)
        real = (ids_BT != PAD)[:, :, None]
        return self.head((hidden * real).sum(dim=1) / real.sum(dim=1))

    def loss(self, ids_BT: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats."""
        return F.cross_entropy(self(ids_BT).flatten(0, -2), targets.flatten())


class TorchPeer(Peer):
    """torch.nn.TransformerEncoder."""

    def __init__(self, task: str, sizes: Sizes, dropout: float, classes: int = 3) -> None:
        super().__init__(task, sizes, classes)
        width, length = sizes["width"], sizes["block_size"]
        self.embedding, self.positions = nn.Embedding(sizes["vocab_size"], width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, sizes["heads"], sizes["ff"], dropout, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(layer, sizes["layers"], nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        T = ids_BT.shape[1]
        x = self.dropout(self.embedding(ids_BT) + self.positions.weight[:T])
        if self.task == "lm":
            return self.stack(x, mask=self.mask[:T, :T], is_causal=True)  # type: ignore[index]
        return self.stack(x, src_key_padding_mask=ids_BT == PAD)


class XPeer(Peer):
    """x-transformers."""

    def __init__(self, task: str, sizes: Sizes, dropout: float, classes: int = 3) -> None:
        super().__init__(task, sizes, classes)
        try:
            from x_transformers import Decoder, Encoder, TransformerWrapper
        except ImportError:
            raise UserError("x-transformers is not here: pip install 'speechformer[bench]'.") from None
        stack: Any = (Decoder if task == "lm" else Encoder)(
            dim=sizes["width"],
            depth=sizes["layers"],
            heads=sizes["heads"],
            attn_dim_head=sizes["width"] // sizes["heads"],
            ff_mult=sizes["ff"] / sizes["width"],
            attn_dropout=dropout,
            ff_dropout=dropout,
            layer_dropout=0.0,
        )
        self.model = TransformerWrapper(
            num_tokens=sizes["vocab_size"],
            max_seq_len=sizes["block_size"],
            attn_layers=stack,
            emb_dropout=dropout,
        )
        del self.model.to_logits  # ours, for both tasks
        self.model.to_logits = nn.Identity()

    def hidden(self, ids_BT: Tensor) -> Tensor:
        mask = None if self.task == "lm" else ids_BT != PAD
        return self.model(ids_BT, mask=mask, return_embeddings=True)


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())
