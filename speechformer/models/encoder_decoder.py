"""Encoder-decoders: how is it said in another language?

    source ids -> encoder -> memory;   target ids so far, memory -> decoder -> linear -> logits of the next token

Three models with one interface:

    EncoderDecoder            the transformer: every block of the decoder attends to the encoder's states
                              (Vaswani et al. 2017)
    RecurrentEncoderDecoder   the RNN it replaced: the decoder starts from the encoder's final state, and at each
                              step combines a context c with its own state h:  tanh(W [c; h])
        model=rnn             c is the encoder's final state, a bottleneck (Cho et al. 2014; Sutskever et al. 2014)
        model=rnn_attention   c is the sum of all states s of the encoder, weighted by softmax(h . s)
                              (Luong et al. 2015, global attention, score "dot", equations 5, 7 and 8)

The two recurrent models have the same weights and differ only in c. No model uses positions or patterns between
source and target; see `CrossAttention`.

Shapes: B sources of S tokens; R target sequences of T tokens, R / B for each source; N heads, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.kernels.dispatch import SDPA
from speechformer.layers.attention import attention_reference
from speechformer.layers.block import Memory as BlockMemory
from speechformer.models.stack import Cache, RecurrentStack, Stack, Weights, select


@dataclass
class Memory:
    """What a decoder needs of the sources; row b of each tensor belongs to source b."""

    layers: Cache  # "k" and "v" for each block; of an RNN "states", [B, S, D], then the final state
    bias: Tensor  # 0 on tokens and -inf on padding, [B, 1, 1, S]

    def select(self, sources: Tensor) -> Memory:
        """Return the memory of some sources, by index."""
        return Memory(select(self.layers, sources), self.bias[sources])

    def for_blocks(self) -> list[BlockMemory]:
        """Return the arguments of `CrossAttention` in each block."""
        return [(layer["k"], layer["v"], SDPA(self.bias)) for layer in self.layers]


def padding_bias(source_BS: Tensor) -> Tensor:
    """Return the bias that hides padding, [B, 1, 1, S]."""
    return torch.where(source_BS == PAD, -math.inf, 0.0)[:, None, None, :]


class Translator(nn.Module):
    """Interface of the encoder-decoders. A subclass implements `encode`, `past`, `decode` and `attention`."""

    output: nn.Linear
    max_length: int | None  # tokens on each side; None for no limit

    def make_output(self, width: int, vocab_size: int, embedding: nn.Embedding, tied: bool) -> None:
        """Add the layer from states to logits. Tied, it shares the target's embedding table and has no bias."""
        self.output = nn.Linear(width, vocab_size, bias=not tied)
        if tied:
            self.output.weight = embedding.weight

    def encode(self, source_BS: Tensor) -> Memory:
        """Encode sources padded with `PAD`."""
        raise NotImplementedError

    def past(self, memory: Memory) -> Cache:
        """Return the decoder's cache before the first token, one row for each source."""
        raise NotImplementedError

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        """Return the hidden states that `output` turns into logits, [R, T, D].

        `past` holds what the decoder has read before and is extended in place; start with `past(memory)`.
        """
        raise NotImplementedError

    def hidden(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Return the hidden states that `output` turns into logits, [B, T, D]."""
        return self.decode(self.encode(source_BS), target_BT)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Return the logits of the target token after each position, [B, T, vocabulary]."""
        return self.output(self.hidden(source_BS, target_BT))

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        """Return the attention weights of each layer: "encoder" [B, N, S, S], "decoder" [B, N, T, T] and "cross"
        [B, N, T, S]. An RNN has "cross" with one layer and head, or nothing."""
        raise NotImplementedError


class EncoderDecoder(Translator):
    """The transformer.

    Args:
        shared_embeddings: whether source and target share an embedding table.
        tied_output: whether the output layer shares the target's. With both: Vaswani et al. 2017, section 3.4.
        block_size, stack: arguments of `Stack` for encoder and decoder.
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
        """Project the encoder's states to keys and values for each block of the decoder."""
        pairs = (block.cross_attention.keys_and_values(states_BSD) for block in self.decoder.blocks)
        return Memory([{"k": k, "v": v} for k, v in pairs], padding_bias(source_BS))

    def past(self, memory: Memory) -> Cache:
        return self.decoder.new_cache()

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        # no token mask: the target's padding follows its last token, so no scored position attends to it
        return self.decoder(target_RT, memory=memory.for_blocks(), cache=past)[0]

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        states_BSD, encoder, _ = self.encoder(source_BS, source_BS != PAD, with_weights=True)
        memory = self.memory(states_BSD, source_BS).for_blocks()
        _, decoder, cross = self.decoder(target_BT, with_weights=True, memory=memory)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}


class RecurrentEncoderDecoder(Translator):
    """The RNN, with or without attention; arguments as for `EncoderDecoder` and `RecurrentStack`."""

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
        final_state: Cache = self.encoder.new_cache()
        states_BSD = self.encoder(source_BS, source_BS != PAD, cache=final_state)[0]
        return Memory([{"states": states_BSD}, *final_state], padding_bias(source_BS))

    def past(self, memory: Memory) -> Cache:
        return [dict(memory.layers[1])]

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        return self.decode_and_attend(memory, target_RT, past)[0]

    def decode_and_attend(
        self, memory: Memory, target_RT: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `decode` returns and the weights on the source, [R, 1, T, S], None without attention."""
        (R, T), B = target_RT.shape, len(memory.bias)
        states_BSD, final_state = memory.layers[0]["states"], memory.layers[1]
        if past is None:
            past = [{name: part.repeat_interleave(R // B, dim=0) for name, part in final_state.items()}]
        h_RTD = self.decoder(target_RT, cache=past)[0]
        if self.attends:
            q_B1TD = h_RTD.reshape(B, 1, R // B * T, -1)
            s_B1SD = states_BSD[:, None]
            # times the root of the width, by which `attention_reference` divides and Luong's score does not
            c_B1TD, weights = attention_reference(q_B1TD * math.sqrt(q_B1TD.shape[-1]), s_B1SD, s_B1SD, memory.bias)
            c_RTD, weights = c_B1TD.reshape(h_RTD.shape), weights.reshape(R, 1, T, -1)
        else:
            weights = None
            c_RTD = final_state["h"][:, -1].repeat_interleave(R // B, dim=0)[:, None].expand(h_RTD.shape)
        return self.context(torch.cat((c_RTD, h_RTD), dim=-1)).tanh(), weights

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        weights = self.decode_and_attend(self.encode(source_BS), target_BT)[1]
        return {} if weights is None else {"cross": [weights]}


def build_translator(*, model: dict[str, Any], **arguments: Any) -> EncoderDecoder | RecurrentEncoderDecoder:
    """Build the encoder-decoder of a `model` config."""
    recurrent = model["name"] in ("rnn", "rnn_attention")
    return (RecurrentEncoderDecoder if recurrent else EncoderDecoder)(model=model, **arguments)
