"""The models that a user would choose instead: torch.nn.TransformerEncoder and x-transformers, for the same function.

With equal weights and without dropout they compute what our models compute. All are pre-norm, with sinusoidal
positions, biases everywhere, ReLU, and dropout of embeddings, attention weights and branches. To reach this,
torch.nn loses the dropout of hidden feed-forward units; x-transformers gets biases in the projections of attention
and in LayerNorm, and our positions. The settings of a peer change only its speed.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.errors import UserError
from speechformer.layers.positions import sines_and_cosines, wavelengths

Sizes = dict[str, int]  # vocab_size, width, heads, layers, ff, block_size, classes
Loss = Callable[[Tensor, Tensor], Tensor]  # of ids [B, T] and targets, [B, T] (lm) or [B] (classify)


def cross_entropy(hidden_RD: Tensor, output: nn.Module, targets_R: Tensor) -> Tensor:
    """Compute the mean cross-entropy from all logits."""
    return F.cross_entropy(output(hidden_RD), targets_R)


def linear_cross_entropy(hidden_RD: Tensor, output: nn.Linear, targets_R: Tensor) -> Tensor:
    """Compute the same in chunks of as many rows as our loss, which is faster than the number that torch chooses."""
    rows = max(128, hidden_RD.shape[1])
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    return F.linear_cross_entropy(hidden_RD, output.weight, targets_R, linear_bias=output.bias, options=chunks)


OUTPUT_LOSSES = [cross_entropy, *([linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else [])]


class Sinusoidal(nn.Module):
    """Sinusoidal positions, [T, D], of ids [B, T]."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        table = sines_and_cosines(length, width, wavelengths(width, 10000.0))
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids_BT: Tensor, **unused: Any) -> Tensor:
        """Return the first T rows of the table."""
        return self.table[: ids_BT.shape[1]]  # type: ignore[index]


class Peer(nn.Module):
    """Base class of the peers, for the task "lm" or "classify". Subclasses define `hidden` and its `SETTINGS`."""

    SETTINGS: ClassVar[dict[bool, dict[str, Any]]]  # by name, in training (True) and in evaluation (False)

    def __init__(self, task: str, sizes: Sizes) -> None:
        super().__init__()
        self.task = task
        width = sizes["width"]
        classifier = (nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, sizes.get("classes", 3)))
        self.head = nn.Linear(width, sizes["vocab_size"]) if task == "lm" else nn.Sequential(*classifier)

    def hidden(self, ids_BT: Tensor, padding_BT: Tensor | None, setting: Any) -> Tensor:
        """Compute hidden states, [B, T, D]."""
        raise NotImplementedError

    def losses(self, training: bool) -> dict[str, Loss]:
        """Return the mean loss under each setting that may be the fastest."""
        output_losses = OUTPUT_LOSSES if self.task == "lm" else OUTPUT_LOSSES[:1]
        choices = itertools.product(self.SETTINGS[training].items(), output_losses)
        return {f"{name}, {f.__name__}": functools.partial(self.loss, setting, f) for (name, setting), f in choices}

    def loss(self, setting: Any, output_loss: Callable[..., Tensor], ids_BT: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of the next token; or of the classes, from the mean over tokens."""
        if self.task == "lm":
            return output_loss(self.hidden(ids_BT, None, setting).flatten(0, 1), self.head, targets.flatten())
        token_mask = (ids_BT != PAD)[:, :, None]
        hidden = self.hidden(ids_BT, None if token_mask.all() else ~token_mask[:, :, 0], setting)
        return output_loss((hidden * token_mask).sum(dim=1) / token_mask.sum(dim=1), self.head, targets)


class TorchPeer(Peer):
    """torch.nn.TransformerEncoder, with and without its fast path of evaluation."""

    SETTINGS: ClassVar = {True: {"default": True}, False: {"fast path": True, "no fast path": False}}

    def __init__(self, task: str, sizes: Sizes, dropout: float) -> None:
        super().__init__(task, sizes)
        width, length = sizes["width"], sizes["block_size"]
        self.embedding, self.positions = nn.Embedding(sizes["vocab_size"], width), Sinusoidal(length, width)
        shape = (width, sizes["heads"], sizes["ff"], dropout)
        layer = nn.TransformerEncoderLayer(*shape, batch_first=True, norm_first=True)
        layer.dropout = nn.Identity()  # type: ignore[assignment]  # of hidden feed-forward units
        self.stack = nn.TransformerEncoder(layer, sizes["layers"], nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def hidden(self, ids_BT: Tensor, padding_BT: Tensor | None, setting: bool) -> Tensor:
        torch.backends.mha.set_fastpath_enabled(setting)
        T = ids_BT.shape[1]
        x = self.dropout(self.embedding(ids_BT) + self.positions(ids_BT))
        if self.task == "lm":
            return self.stack(x, mask=self.mask[:T, :T], is_causal=True)  # type: ignore[index]
        return self.stack(x, src_key_padding_mask=padding_BT)


class XPeer(Peer):
    """x-transformers, with and without `attn_flash`; a UserError says that it is not installed."""

    SETTINGS: ClassVar = {training: {"attn_flash": True, "no attn_flash": False} for training in (True, False)}

    def __init__(self, task: str, sizes: Sizes, dropout: float) -> None:
        super().__init__(task, sizes)
        try:
            from x_transformers import Decoder, Encoder, TransformerWrapper
            from x_transformers.attend import Attend
            from x_transformers.x_transformers import LayerNorm
        except ImportError:
            raise UserError("x-transformers is not installed: pip install 'speechformer[bench]'.") from None
        width, heads = sizes["width"], sizes["heads"]
        shape = {"dim": width, "depth": sizes["layers"], "heads": heads, "attn_dim_head": width // heads}
        dropouts = dict.fromkeys(("attn_dropout", "attn_sublayer_dropout", "ff_sublayer_dropout"), dropout)
        options = {"ff_mult": sizes["ff"] / width, "ff_custom_activation": nn.ReLU(), "attn_flash": True}
        stack = (Decoder if task == "lm" else Encoder)(**shape, **dropouts, **options)
        lengths = {"num_tokens": sizes["vocab_size"], "max_seq_len": sizes["block_size"]}
        self.model = TransformerWrapper(**lengths, attn_layers=stack, emb_dropout=dropout, return_only_embed=True)
        self.model.pos_emb = Sinusoidal(sizes["block_size"], width)
        for module in [*stack.modules()]:
            for name, child in module.named_children():
                if isinstance(child, LayerNorm):
                    setattr(module, name, nn.LayerNorm(width))
                elif isinstance(child, nn.Linear) and child.bias is None:
                    setattr(module, name, nn.Linear(child.in_features, child.out_features))
        self.attentions = [module for module in stack.modules() if isinstance(module, Attend)]

    def hidden(self, ids_BT: Tensor, padding_BT: Tensor | None, setting: bool) -> Tensor:
        for attention in self.attentions:
            attention.flash = setting
        return self.model(ids_BT, mask=None if padding_BT is None else ~padding_BT)


PEERS = {"torch.nn": TorchPeer, "x-transformers": XPeer}
