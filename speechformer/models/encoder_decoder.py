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
          .attention=bahdanau the weights are softmax(v . tanh(W h' + U s)), where h' is the last layer's state of the
                              step before, and the first layer's cell reads c beside the token (Bahdanau et al. 2015,
                              section A.1.2, but with tanh(W [c; h]) as above in place of a maxout)

`rnn` and Luong's model have the same weights and differ only in c. No model uses positions or patterns between source
and target; see `CrossAttention`.

Shapes: B sources of S tokens; R target sequences of T tokens, R / B for each source; N heads, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.kernels.dispatch import SDPA
from speechformer.layers.attention import Attention, attention_reference
from speechformer.layers.block import Memory as BlockMemory
from speechformer.layers.recurrent import AdditiveScore
from speechformer.models.stack import Cache, RecurrentStack, Stack, Weights

# What a decoder needs of the sources; row b of each tensor belongs to source b. Of a transformer "k", "v" and "bias"
# for each block; of an RNN "states", [B, S, D], "bias" and, for Bahdanau's score, "keys", [B, S, D]; then the final
# state. The bias is -inf on padding, [B, 1, 1, S].
Memory = Cache


def padding_bias(source_BS: Tensor) -> Tensor:
    """Return the bias that hides padding, [B, 1, 1, S]."""
    return torch.where(source_BS == PAD, -math.inf, 0.0)[:, None, None, :]


def for_blocks(memory: Memory, kernel: type[Attention] = SDPA) -> list[BlockMemory]:
    """Return the arguments of `CrossAttention` in each block."""
    return [(layer["k"], layer["v"], kernel(layer["bias"])) for layer in memory]


class Translator(nn.Module):
    """Interface of the encoder-decoders. A subclass implements `encode`, `past`, `decode` and `attention`.

    Args:
        shared_embeddings: whether source and target share an embedding table.
        tied_output: whether the output layer shares the target's table and has no bias. With both: Vaswani et al.
            2017, section 3.4.
        block_size, stack: arguments of `Stack` or `RecurrentStack` for encoder and decoder.
    """

    max_length: int | None = None  # tokens on each side; None for no limit
    stack_class: type[Any]

    def __init__(self, *, block_size: int, shared_embeddings: bool, tied_output: bool, **stack: Any) -> None:
        super().__init__()
        self.encoder = self.stack_class(length=block_size, causal=False, **stack)
        shared = self.encoder.embedding if shared_embeddings else None
        self.decoder = self.stack_class(length=block_size, causal=True, cross=True, embedding=shared, **stack)
        self.max_length = self.encoder.max_length
        self.add_context(stack)
        self.output = nn.Linear(stack["width"], stack["vocab_size"], bias=not tied_output)
        if tied_output:
            self.output.weight = self.decoder.embedding.weight

    def add_context(self, stack: dict[str, Any]) -> None:
        """Add the layers between `decoder` and `output`."""

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
    """The transformer."""

    stack_class = Stack

    def encode(self, source_BS: Tensor) -> Memory:
        return self.memory(self.encoder(source_BS, source_BS != PAD)[0], source_BS)

    def memory(self, states_BSD: Tensor, source_BS: Tensor) -> Memory:
        """Project the encoder's states to keys and values for each block of the decoder."""
        pairs = (block.cross_attention.keys_and_values(states_BSD) for block in self.decoder.blocks)
        return [{"k": k, "v": v, "bias": padding_bias(source_BS)} for k, v in pairs]

    def past(self, memory: Memory) -> Cache:
        return self.decoder.new_cache()

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        # no token mask: the target's padding follows its last token, so no scored position attends to it
        return self.decoder(target_RT, memory=for_blocks(memory), cache=past)[0]

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        states_BSD, encoder, _ = self.encoder(source_BS, source_BS != PAD, with_weights=True)
        memory = for_blocks(self.memory(states_BSD, source_BS), Attention)
        _, decoder, cross = self.decoder(target_BT, with_weights=True, memory=memory)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}


class RecurrentEncoderDecoder(Translator):
    """The RNN without attention, with Luong's or, if it has a `score`, with Bahdanau's."""

    stack_class = RecurrentStack

    def add_context(self, stack: dict[str, Any]) -> None:
        model, width = stack["model"], stack["width"]
        self.attends = model["name"] == "rnn_attention"
        self.score = AdditiveScore(width) if model.get("attention") == "bahdanau" else None
        self.context = nn.Linear(2 * width, width, bias=False)

    def encode(self, source_BS: Tensor) -> Memory:
        final_state: Cache = self.encoder.new_cache()
        states_BSD = self.encoder(source_BS, source_BS != PAD, cache=final_state)[0]
        source = {"states": states_BSD, "bias": padding_bias(source_BS)}
        if self.score is not None:
            source["keys"] = self.score.key(states_BSD)
        return [source, *final_state]

    def past(self, memory: Memory) -> Cache:
        return [dict(memory[1])]

    def decode(self, memory: Memory, target_RT: Tensor, past: Cache | None = None) -> Tensor:
        if past is None:
            copies = len(target_RT) // len(memory[0]["bias"])
            past = [{name: part.repeat_interleave(copies, dim=0) for name, part in memory[1].items()}]
        return self.decode_and_attend(memory, target_RT, past)[0]

    def decode_and_attend(self, memory: Memory, target_RT: Tensor, past: Cache) -> tuple[Tensor, Tensor | None]:
        """Return what `decode` returns and the weights on the source, [R, 1, T, S], None without attention."""
        if self.score is None:
            h_RTD = self.decoder(target_RT, cache=past)[0]
            c_RTD, weights = self.attend(h_RTD, memory)
        elif target_RT.shape[1] == 1:
            c_RTD, weights = self.attend(past[0]["h"][:, -1:], memory)
            h_RTD = self.decoder(target_RT, cache=past, context_BTD=c_RTD)[0]
        else:  # token by token, because each context needs the state before
            steps = [self.decode_and_attend(memory, ids_R1, past) for ids_R1 in target_RT.split(1, dim=1)]
            states, maps = zip(*steps)
            return torch.cat(states, dim=1), torch.cat(maps, dim=2)
        return self.context(torch.cat((c_RTD, h_RTD), dim=-1)).tanh(), weights

    def attend(self, h_RTD: Tensor, memory: Memory) -> tuple[Tensor, Tensor | None]:
        """Return the contexts of decoder states, [R, T, D], and the weights as `decode_and_attend`."""
        (source, final_state), (R, T, D) = memory, h_RTD.shape
        s_B1SD = source["states"][:, None]
        h_B1TD = h_RTD.reshape(len(s_B1SD), 1, -1, D)  # the hypotheses of a source in one row
        if not self.attends:
            return final_state["h"][:, None, -1:].expand_as(h_B1TD).reshape(R, T, D), None
        if self.score is None:
            # times the root of the width, by which `attention_reference` divides and Luong's score does not
            c_B1TD, weights = attention_reference(h_B1TD * math.sqrt(D), s_B1SD, s_B1SD, source["bias"])
        else:
            weights = (self.score(h_B1TD[:, 0], source["keys"])[:, None] + source["bias"]).softmax(dim=-1)
            c_B1TD = weights.to(s_B1SD.dtype) @ s_B1SD
        return c_B1TD.reshape(R, T, D), weights.reshape(R, 1, T, -1)

    def attention(self, source_BS: Tensor, target_BT: Tensor) -> Weights:
        memory = self.encode(source_BS)
        weights = self.decode_and_attend(memory, target_BT, self.past(memory))[1]
        return {} if weights is None else {"cross": [weights]}


def build_translator(*, model: dict[str, Any], **arguments: Any) -> EncoderDecoder | RecurrentEncoderDecoder:
    """Build the encoder-decoder of a `model` config."""
    recurrent = model["name"] in ("rnn", "rnn_attention")
    return (RecurrentEncoderDecoder if recurrent else EncoderDecoder)(model=model, **arguments)
