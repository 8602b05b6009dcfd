"""The encoder-decoders against torch's transformer with the same weights, loops written out, and themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import BAHDANAU, MODELS, PATTERNS, RECURRENT, group
from test_models import stack_arguments
from torch import nn

from speechformer.errors import UserError
from speechformer.models.encoder_decoder import EncoderDecoder, RecurrentEncoderDecoder, build_translator
from speechformer.models.stack import count_parameters, select

S, T, VOCABULARY = 9, 7, 50
every_model_and_pattern = pytest.mark.parametrize(
    ("model", "pattern"),
    # each of both: the one acts on embeddings, queries and scores, the other on the mask; test_models has all pairs
    [(model, "full") for model in [*MODELS, *RECURRENT, BAHDANAU]] + [("rope", p) for p in PATTERNS if p != "full"],
)


def translator(model: str = "sinusoidal", pattern: str = "full", /, **changes: Any) -> Any:
    torch.manual_seed(0)
    own = {"model": group("model", model), "pattern": group("pattern", pattern)}
    arguments = {"tied_output": False, "shared_embeddings": False, "scale_embedding": True, **own, **changes}
    return build_translator(**stack_arguments(**arguments)).eval()


def pairs(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, VOCABULARY, (rows, S), generator=generator)
    source[1:2, 6:] = 0
    return source, torch.randint(4, VOCABULARY, (rows, T), generator=generator)


def copy_attention(ours: nn.Module, theirs: Any, weight: torch.Tensor, bias: torch.Tensor) -> None:
    theirs.in_proj_weight.copy_(weight)
    theirs.in_proj_bias.copy_(bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())  # type: ignore


def torchs_transformer(model: EncoderDecoder, norm_first: bool) -> nn.Transformer:
    """Return nn.Transformer with the weights of the model."""
    theirs = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first).double().eval()
    with torch.no_grad():
        for ours, other in zip(model.encoder.blocks, theirs.encoder.layers):
            copy_attention(ours.attention, other.self_attn, ours.attention.qkv.weight, ours.attention.qkv.bias)
            copy_rest(ours, other, {"norm1": ours.attention_norm, "norm2": ours.feed_forward_norm})
        for ours, other in zip(model.decoder.blocks, theirs.decoder.layers):
            copy_attention(ours.attention, other.self_attn, ours.attention.qkv.weight, ours.attention.qkv.bias)
            cross = ours.cross_attention
            weight = torch.cat((cross.q.weight, cross.kv.weight))
            copy_attention(cross, other.multihead_attn, weight, torch.cat((cross.q.bias, cross.kv.bias)))
            norms = {
                "norm1": ours.attention_norm,
                "norm2": ours.cross_attention_norm,
                "norm3": ours.feed_forward_norm,
            }
            copy_rest(ours, other, norms)
        theirs.encoder.norm.load_state_dict(model.encoder.final_norm.state_dict())
        theirs.decoder.norm.load_state_dict(model.decoder.final_norm.state_dict())
    return theirs


def copy_rest(ours: Any, theirs: Any, norms: dict[str, nn.Module]) -> None:
    theirs.linear1.load_state_dict(ours.feed_forward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward[2].state_dict())
    for name, norm in norms.items():
        getattr(theirs, name).load_state_dict(norm.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_whole_model_is_torchs_transformer(norm: str) -> None:
    """Oracle: torch.nn.Transformer with the same weights and its own masks, in double precision; logits, and
    the gradient of the first layer."""
    model = translator(norm=norm, dropout=0.0).double()
    with torch.no_grad():  # so that biases and norms count too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs = torchs_transformer(model, norm == "pre")
    source, target = pairs()

    def embedded(stack: Any, ids: torch.Tensor) -> torch.Tensor:
        index = stack.positions.prepare(ids.shape[1])
        return stack.positions.embed(stack.embedding(ids).detach() * math.sqrt(16), index)

    expected = theirs(
        embedded(model.encoder, source),
        embedded(model.decoder, target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64),
        src_key_padding_mask=source == 0,
        memory_key_padding_mask=source == 0,
    )
    hidden = model.hidden(source, target)
    torch.testing.assert_close(hidden, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(model(source, target), model.output(expected), atol=1e-10, rtol=0)
    for states in (hidden, expected):
        states.square().sum().backward()
    ours = model.encoder.blocks[0].feed_forward[0].weight.grad
    torch.testing.assert_close(ours, theirs.encoder.layers[0].linear1.weight.grad, atol=1e-9, rtol=0)


@every_model_and_pattern
def test_padding_of_the_source_changes_nothing(model: str, pattern: str) -> None:
    """Oracle: the same sentence alone, without padding; and any change of what the padding's embedding is."""
    model = translator(model, pattern)
    source, target = pairs()
    logits = model(source, target)
    torch.testing.assert_close(model(source[1:2, :6], target[1:2]), logits[1:2], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model.encoder.embedding.weight[0] += 1
    assert torch.equal(model(source, target), logits)


@every_model_and_pattern
def test_decoding_step_by_step_with_a_cache_gives_what_decoding_at_once_gives(model: str, pattern: str) -> None:
    """Oracle: the logits of all tokens at once, of each target alone. Three targets share a source, as in a beam."""
    model = translator(model, pattern, dropout=0.3)  # which is off
    source, _ = pairs()
    targets = torch.randint(4, VOCABULARY, (9, T), generator=torch.Generator().manual_seed(2))
    memory = model.encode(source)
    expected = model(source.repeat_interleave(3, dim=0), targets)
    for sizes in ([1] * T, [3, T - 3]):
        past = select(model.past(memory), torch.arange(3).repeat_interleave(3))
        states = torch.cat([model.decode(memory, tokens, past) for tokens in targets.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(model.output(states), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.output(model.decode(memory, targets)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_cross_attention_takes_neither_position_nor_pattern(model: str) -> None:
    """Permuting the encoder's states, and nothing else, changes no output, even under a window of one token."""
    model, (source, target) = translator(model), pairs(1)
    model.encoder.patterns = model.decoder.patterns = [lambda i, j: i == j] * 2
    memory, order = model.encode(source), torch.randperm(S, generator=torch.Generator().manual_seed(3))
    states = model.decode(memory, target)
    for layer in memory:
        layer |= {name: layer[name][:, :, order] for name in ("k", "v")}
    torch.testing.assert_close(model.decode(memory, target), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_recurrent_ones_are_their_formulas(kind: str) -> None:
    """Oracle: Luong et al. 2015, equations 5, 7 and 8, over cells that `test_recurrent.py` compares with torch's."""
    model: RecurrentEncoderDecoder = translator(kind)
    source, target = pairs(1)
    s_BSD, last = model.encoder.cells(4 * model.encoder.embedding(source))  # times the root of the width
    h_BTD, _ = model.decoder.cells(4 * model.decoder.embedding(target), last)
    attended = (h_BTD @ s_BSD.mT).softmax(dim=-1) @ s_BSD
    c_BTD = attended if kind == "rnn_attention" else s_BSD[:, -1:].expand_as(h_BTD)
    expected = model.output(torch.tanh(model.context(torch.cat((c_BTD, h_BTD), dim=-1))))
    torch.testing.assert_close(model(source, target), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_bahdanaus_attention_is_its_formula(cell: str) -> None:
    """Oracle: Bahdanau et al. 2015, section A.1.2, for one token and one state of the source at a time."""
    model = translator(f"{BAHDANAU} model.cell={cell}").double()
    source, target = pairs(1)
    s_BSD, last = model.encoder.cells(4 * model.encoder.embedding(source))
    W, U, v = (layer.weight.T for layer in (model.score.query, model.score.key, model.score.total))
    expected = []
    for x_BD in (4 * model.decoder.embedding(target)).unbind(dim=1):
        e_BS = torch.cat([(last["h"][:, -1] @ W + s_BD @ U).tanh() @ v for s_BD in s_BSD.unbind(dim=1)], dim=1)
        c_BD = (e_BS.softmax(dim=1)[..., None] * s_BSD).sum(dim=1)
        h_B1D, last = model.decoder.cells(torch.cat((x_BD, c_BD), dim=1)[:, None], last)
        expected.append(model.context(torch.cat((c_BD, h_B1D[:, 0]), dim=1)).tanh())
    torch.testing.assert_close(model.hidden(source, target), torch.stack(expected, dim=1), atol=1e-10, rtol=0)


def test_the_gradient_goes_through_all_steps_and_the_attention() -> None:
    """Oracle: differences, in double precision. The weights of the score act through all later steps."""
    model = translator(BAHDANAU, width=4).double()  # of few weights, because a check that fails tries each alone
    assert torch.autograd.gradcheck(lambda *_: model.hidden(*pairs()), [*model.score.parameters()], atol=1e-8)


def test_tied_tables_count_once() -> None:
    """Oracle: the sizes written out. Vaswani et al. 2017, section 3.4: three matrices are one."""
    apart, tied = translator(), translator(tied_output=True, shared_embeddings=True)
    table = VOCABULARY * 16
    difference = count_parameters(apart)["total"] - count_parameters(tied)["total"]
    assert difference == 2 * table + VOCABULARY  # and the output's bias
    assert tied.output.weight is tied.encoder.embedding.weight is tied.decoder.embedding.weight


def test_errors() -> None:
    with pytest.raises(UserError, match=r"model=rnn has no self-attention, so pattern must be full"):
        translator("rnn", "window")
    with pytest.raises(UserError, match=r"model.cell must be 'gru' or 'lstm', not 'gruu'"):
        translator("rnn", model={"name": "rnn", "cell": "gruu"})
    with pytest.raises(UserError, match=r"model.attention must be 'luong' or 'bahdanau', not 'dot'"):
        translator("rnn_attention model.attention=dot")
