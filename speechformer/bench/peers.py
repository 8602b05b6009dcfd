"""The alternatives that a user would choose: torch.nn.TransformerEncoder and x-transformers, with the same sizes.

Both are built as in their documentation: pre-norm, the same widths, dropout, output layer and pooling, and learned
positions. The loss is torch's cross-entropy of all logits.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.errors import UserError

Sizes = dict[str, int]  # vocab_size, width, heads, layers, ff, block_size


class Peer(nn.Module):
    """Base class of the alternatives; subclasses define `hidden`."""

    def __init__(self, task: str, sizes: Sizes, classes: int) -> None:
        super().__init__()
        self.task = task
        width = sizes["width"]
        classifier = (nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, classes))
        self.head = nn.Linear(width, sizes["vocab_size"]) if task == "lm" else nn.Sequential(*classifier)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Compute hidden states, [B, T, D]."""
        raise NotImplementedError

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Compute logits of the next token, [B, T, V], or of the classes, [B, classes], from the mean over tokens."""
        hidden = self.hidden(ids_BT)
        if self.task == "lm":
            return self.head(hidden)
        token_mask = (ids_BT != PAD)[:, :, None]
        return self.head((hidden * token_mask).sum(dim=1) / token_mask.sum(dim=1))

    def loss(self, ids_BT: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy, in nats."""
        return F.cross_entropy(self(ids_BT).flatten(0, -2), targets.flatten())


class TorchPeer(Peer):
    """torch.nn.TransformerEncoder."""

    def __init__(self, task: str, sizes: Sizes, dropout: float, classes: int = 3) -> None:
        super().__init__(task, sizes, classes)
        width, length = sizes["width"], sizes["block_size"]
        self.embedding, self.positions = nn.Embedding(sizes["vocab_size"], width), nn.Embedding(length, width)
        shape = (width, sizes["heads"], sizes["ff"], dropout)
        layer = nn.TransformerEncoderLayer(*shape, batch_first=True, norm_first=True)
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
            raise UserError("x-transformers is not installed: pip install 'speechformer[bench]'.") from None
        width, heads = sizes["width"], sizes["heads"]
        shape = {"dim": width, "depth": sizes["layers"], "heads": heads, "attn_dim_head": width // heads}
        dropouts = {"attn_dropout": dropout, "ff_dropout": dropout, "layer_dropout": 0.0}
        stack = (Decoder if task == "lm" else Encoder)(**shape, **dropouts, ff_mult=sizes["ff"] / width)
        lengths = {"num_tokens": sizes["vocab_size"], "max_seq_len": sizes["block_size"]}
        self.model = TransformerWrapper(**lengths, attn_layers=stack, emb_dropout=dropout)
        del self.model.to_logits  # ours, for both tasks
        self.model.to_logits = nn.Identity()

    def hidden(self, ids_BT: Tensor) -> Tensor:
        mask = None if self.task == "lm" else ids_BT != PAD
        return self.model(ids_BT, mask=mask, return_embeddings=True)


def parameters(model: nn.Module) -> int:
    """Count the parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
