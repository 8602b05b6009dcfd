"""Encoder-decoders: how is it said in another language?

    source ids -> encoder -> memory;   target ids so far, memory -> decoder -> linear -> logits of the next

Three kinds, alike from outside:

    EncoderDecoder            the transformer: every block of the decoder attends to the encoder's states
                              (Vaswani et al. 2017)
    RecurrentEncoderDecoder   the RNN that it replaced: the decoder starts from the encoder's last state, and at each
                              step adds a context c to its own state h:  tanh(W [c; h])
        without attention     c is the encoder's last state: all that is known of the source has to pass through it
                              (Cho et al. 2014; Sutskever et al. 2014)
        with attention        c is the sum of all states of the encoder, weighted by softmax(h . s)
                              (Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine
                              Translation", global attention, score "dot", equations 5, 7 and 8)

The two recurrent ones have the same weights and differ in c alone. None of the three takes a position or a pattern
from the source to the target; see `CrossAttention`.

Shapes: B sources of S tokens; R = B times the beam rows of targets of T tokens, those of a source one after another;
N heads, H width of a head, L layers, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.layers.attention import attention_reference
from speechformer.models.recurrent_stack import RecurrentStack
from speechformer.models.stack import Cache, Stack, Weights


@dataclass
class Memory:
    """What a decoder needs of the sources, a row of each tensor for each source.

    `layers`: of a transformer, keys and values for each block; of an RNN, the encoder's states, [B, S, D], and its
    end state. `bias`: 0 on the tokens and minus infinity on the padding, [B, 1, 1, S].
    """

    layers: list[dict[str, Tensor]]
    bias: Tensor

    def of(self, sources: Tensor) -> Memory:
        """That of some of the sources, by index."""
        layers = [{name: part[sources] for name, part in layer.items()} for layer in self.layers]
        return Memory(layers, self.bias[sources])

    def for_blocks(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What the `CrossAttention` of each block takes."""
        return [(layer["k"], layer["v"], self.bias) for layer in self.layers]


def padding_bias(source_BS: Tensor) -> Tensor:
    """What is added to scores over the source, [B, 1, 1, S]."""
    bias = torch.zeros(source_BS.shape, device=source_BS.device)
    return bias.masked_fill(source_BS == PAD, -math.inf)[:, None, None, :]


class Translator(nn.Module):
    """What the kinds share. A subclass says `encode`, `past` and `decode`.

    Attributes: `max_length`, the most tokens that a side can have; None for no limit.
    """

    output: nn.Linear
    max_length: int | None

    def make_output(self, width: int, vocab_size: int, embedding: nn.Embedding, tied: bool) -> None:
        """The layer from states to logits; tied, it is the target's embedding table and has no bias."""
        self.output = nn.Linear(width, vocab_size, bias=not tied)
        if tied:
            self.output.weight = embedding.weight

    def encode(self, source_BS: Tensor) -> Memory:
        """What the decoder needs of sources, padded with 0."""
        raise NotImplementedError

    def past(self, memory: Memory) -> Cache:
        """The state of a decoder that has seen nothing yet, one row for each source."""
        raise NotImplementedError

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        """States [R, T, D] from which `output` makes the logits of the token after each.

        With `past`, the targets are what follows it, and are added to it.
        """
        raise NotImplementedError

    def hidden(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """The states from which `output` makes logits, [B, T, D]."""
        return self.decode(self.encode(source_BS), target_BT)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Logits of the target token after each, [B, T, vocabulary]."""
        return self.output(self.hidden(source_BS, target_BT))

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        """The attention weights of each layer: "encoder" [B, N, S, S] and "decoder" [B, N, T, T], of a transformer,
        and "cross", from the decoder to the encoder, [B, N, T, S]. An RNN has those of one layer and head, or none.
        """
        raise NotImplementedError


class EncoderDecoder(Translator):
    """The transformer.

    Args:
        block_size: the number of positions that each side is trained on.
        shared_embeddings: one embedding table for source and target.
        tied_output: the output layer uses the target's (with both, Vaswani et al. 2017, section 3.4).
        stack: the arguments of `Stack`, the same for encoder and decoder.
    """

    def __init__(self, *, block_size: int, shared_embeddings: bool, tied_output: bool, **stack: Any) -> None:
        super().__init__()
        self.encoder = Stack(length=block_size, causal=False, **stack)
        shared = self.encoder.embedding if shared_embeddings else None
        self.decoder = Stack(length=block_size, causal=True, cross=True, embedding=shared, **stack)
        self.max_length = self.encoder.max_length
        self.make_output(stack["width"], stack["vocab_size"], self.decoder.embedding, tied_output)

    def encode(self, source_BS: Tensor) -> Memory:
        return self.memory(self.encoder(source_BS, source_BS != PAD)[0], source_BS)

    def memory(self, states_BSD: Tensor, source_BS: Tensor) -> Memory:
        """Keys and values of the encoder's states, for each block of the decoder."""
        layers = []
        for block in self.decoder.blocks:
            k, v = block.cross_attention.keys_and_values(states_BSD)  # type: ignore
            layers.append({"k": k, "v": v})
        return Memory(layers, padding_bias(source_BS))

    def past(self, memory: Memory) -> Cache:
        return self.decoder.new_cache()

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        # padding of the target stands after its last token, where nothing that is scored sees it
        return self.decoder(target_RT, memory=memory.for_blocks(), cache=past)[0]

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        states_BSD, encoder, _ = self.encoder(source_BS, source_BS != PAD, with_weights=True)
        memory = self.memory(states_BSD, source_BS).for_blocks()
        _, decoder, cross = self.decoder(target_BT, with_weights=True, memory=memory)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}


class RecurrentEncoderDecoder(Translator):
    """The RNN, with and without attention.

    Args:
        shared_embeddings, tied_output: as for `EncoderDecoder`.
        stack: the arguments of `RecurrentStack`, the same for encoder and decoder; `model["name"]` is "rnn" or
            "rnn_attention".
    """

    max_length = None

    def __init__(self, *, block_size: int, shared_embeddings: bool, tied_output: bool, **stack: Any) -> None:
        super().__init__()
        self.attends = stack["model"]["name"] == "rnn_attention"
        self.encoder = RecurrentStack(**stack)
        shared = self.encoder.embedding if shared_embeddings else None
        self.decoder = RecurrentStack(embedding=shared, **stack)
        self.context = nn.Linear(2 * stack["width"], stack["width"], bias=False)
        self.make_output(stack["width"], stack["vocab_size"], self.decoder.embedding, tied_output)

    def encode(self, source_BS: Tensor) -> Memory:
        end: Cache = self.encoder.new_cache()
        states_BSD = self.encoder(source_BS, source_BS != PAD, cache=end)[0]
        return Memory([{"states": states_BSD}, *end], padding_bias(source_BS))

    def past(self, memory: Memory) -> Cache:
        return [dict(memory.layers[1])]

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        return self.decode_and_attend(memory, target_RT, past)[0]

    def decode_and_attend(
        self, memory: Memory, target_RT: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `decode`, and the weights with which it attends to the source, [R, 1, T, S], if it does."""
        (R, T), B = target_RT.shape, len(memory.bias)
        states_BSD, end = memory.layers[0]["states"], memory.layers[1]
        if past is None:
            past = [{name: part.repeat_interleave(R // B, dim=0) for name, part in end.items()}]
        h_RTD = self.decoder(target_RT, cache=past)[0]
        if self.attends:
            q_B1TD = h_RTD.reshape(B, 1, R // B * T, -1)
            s_B1SD = states_BSD[:, None]
            # `attend` divides by the root of the width, which Luong's score does not
            c_B1TD, weights = attention_reference(q_B1TD * math.sqrt(q_B1TD.shape[-1]), s_B1SD, s_B1SD, memory.bias)
            c_RTD, weights = c_B1TD.reshape(h_RTD.shape), weights.reshape(R, 1, T, -1)
        else:
            weights = None
            c_RTD = end["h"][:, -1].repeat_interleave(R // B, dim=0)[:, None].expand(h_RTD.shape)
        return self.context(torch.cat((c_RTD, h_RTD), dim=-1)).tanh(), weights

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        weights = self.decode_and_attend(self.encode(source_BS), target_BT)[1]
        return {} if weights is None else {"cross": [weights]}


def build_translator(*, model: dict[str, Any], **arguments: Any) -> EncoderDecoder | RecurrentEncoderDecoder:
    """The encoder-decoder of a `model` config."""
    kind = RecurrentEncoderDecoder if model["name"] in ("rnn", "rnn_attention") else EncoderDecoder
    return kind(model=model, **arguments)
