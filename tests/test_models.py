"""What must hold for every model, position and pattern, by exact comparison where the sizes stay the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import MODELS, PATTERNS, group
from torch import nn

from speechformer.errors import UserError
from speechformer.layers.attention import attention_mask
from speechformer.layers.patterns import build_pattern
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.stack import count_parameters, initialise

T, VOCABULARY = 20, 50


def stack_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "block_size": T,
        "width": 16,
        "heads": 2,
        "layers": 2,
        "ff": 24,
        "dropout": 0.1,
        "model": {"name": "nope"},
        "pattern": {"name": "full"},
        "norm": "pre",
        "final_norm": True,
        "qkv_bias": True,
        "bias": True,
        "activation": "relu",
        **changes,
    }


def classifier(**changes: Any) -> EncoderClassifier:
    torch.manual_seed(0)
    own = {"classes": 3, "pool": "mean", "classifier_width": 10}
    return EncoderClassifier(**{**own, **stack_arguments(**changes)}).eval()


def decoder(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**{"tied_output": False, **stack_arguments(**changes)}).eval()


def sentences(rows: int = 3) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, T), generator=torch.Generator().manual_seed(1))


# Each position with a window, each pattern with ALiBi: positions act on scores, patterns on the mask.
every_model_and_pattern = pytest.mark.parametrize(
    ("model", "pattern"),
    [
        pytest.param(model, pattern, marks=() if model == "alibi" or pattern == "window" else pytest.mark.slow)
        for model in MODELS
        for pattern in PATTERNS
    ],
)


def groups(model: str, pattern: str) -> dict[str, Any]:
    return {"model": group("model", model), "pattern": group("pattern", pattern)}


def with_another_word(ids: torch.Tensor, j: int) -> torch.Tensor:
    """Return the ids with another one at place j of the first sequence."""
    changed = ids.clone()
    changed[0, j] = (ids[0, j] - 4 + 7) % (VOCABULARY - 4) + 4
    return changed


@pytest.mark.parametrize("build", [decoder, classifier])
@every_model_and_pattern
def test_a_key_outside_the_pattern_changes_nothing_in_one_layer(model: str, pattern: str, build: Any) -> None:
    network = build(**groups(model, pattern), layers=1)
    for name, parameter in network.named_parameters():
        if name.endswith("gate.weight"):  # by its gate, a token changes the scores of pairs on both sides of it
            nn.init.zeros_(parameter)
    index = torch.arange(T)
    mask = attention_mask(build_pattern(group("pattern", pattern)), index[:, None], index[None, :], build is decoder)
    ids = sentences(1)
    states = network.hidden if build is decoder else lambda ids: network.encoder(ids, ids != 0)[0]
    before = states(ids)[0]
    for j in range(T):
        same = torch.tensor([torch.equal(a, b) for a, b in zip(before, states(with_another_word(ids, j))[0])])
        assert torch.equal(same, ~mask[:, j]), j  # equal where the mask hides j, different where it does not


@every_model_and_pattern
def test_a_decoder_may_leave_out_padding(model: str, pattern: str) -> None:
    """Oracle: the pass that reads the padding, too; in training, when the tokens alone pass through the blocks."""
    network = decoder(**groups(model, pattern), dropout=0.0).double().train()
    ids = sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    expected = network.hidden(ids)
    torch.testing.assert_close(network.hidden(ids, token_mask_BT=ids != 0)[ids != 0], expected[ids != 0])


@pytest.mark.parametrize(
    ("name", "length", "pattern"),
    [
        *((name, 24, {"name": "full"}) for name in ("nope", "rope", "alibi", "relative", "kerple", "forgetting")),
        ("forgetting", 600, {"name": "window", "window": 9}),  # in sparse blocks
    ],
)
def test_attention_within_documents_is_that_of_each_alone(name: str, length: int, pattern: dict[str, Any]) -> None:
    """Oracle: the hidden states of each document by itself, which depend on distances alone."""
    network = decoder(model=group("model", name), pattern=pattern, layers=1, dropout=0.0).double()
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, VOCABULARY, (2, length), generator=generator)
    documents = torch.sort(torch.randint(1, 5, (2, length), generator=generator), dim=1).values
    hidden = network.hidden(ids, documents_BT=documents)
    for row in range(2):
        for number in documents[row].unique():
            tokens = documents[row] == number
            torch.testing.assert_close(hidden[row, tokens], network.hidden(ids[row : row + 1, tokens])[0])


@every_model_and_pattern
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_padding_changes_nothing_in_an_encoder(model: str, pattern: str, pool: str) -> None:
    """To the bit: what stands in a padded place is never used. By tolerance: more padding, for the sums over a longer
    row may be added up in another order."""
    network, ids = classifier(**groups(model, pattern), pool=pool), sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    logits = network(ids)
    with torch.no_grad():
        network.encoder.embedding.weight[0] += 1
    assert torch.equal(network(ids), logits)
    for row, length in ((1, 9), (2, 1)):
        alone = network(ids[row : row + 1, :length])[0]
        torch.testing.assert_close(alone, logits[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_word_reaches_the_cls_token_whatever_the_pattern(pattern: str) -> None:
    network, ids = classifier(pattern=group("pattern", pattern), pool="cls", layers=1), sentences(1)
    for j in range(T):
        assert not torch.equal(network(with_another_word(ids, j)), network(ids)), j


def test_config_switches_change_what_they_say() -> None:
    def count(model: nn.Module) -> int:
        return count_parameters(model)["total"]

    base = count(decoder())
    assert base - count(decoder(final_norm=False)) == 2 * 16
    assert base - count(decoder(qkv_bias=False)) == 2 * 3 * 16
    assert base - count(decoder(bias=False)) == 2 * (16 + 24 + 16)
    assert base - count(decoder(tied_output=True)) == VOCABULARY * 16 + VOCABULARY
    assert count(classifier(pool="cls")) - count(classifier()) == 16
    assert isinstance(decoder(activation="gelu").decoder.blocks[0].feed_forward[1], nn.GELU)
    tied = decoder(tied_output=True)
    assert tied.output.weight is tied.decoder.embedding.weight


def test_mean_pooling_is_over_the_real_tokens() -> None:
    model = classifier()
    ids = sentences(1)
    ids[0, 5:] = 0
    hidden = model.encoder(ids, ids != 0)[0]
    torch.testing.assert_close(model(ids), model.head(hidden[:, :5].mean(dim=1)))


@pytest.mark.parametrize(("name", "std"), [("normal", 0.05), ("xavier", math.sqrt(2 / (256 + 256)))])
def test_initialisation_has_its_standard_deviation(name: str, std: float) -> None:
    layers = nn.Sequential(nn.Linear(256, 256), nn.Embedding(256, 256))
    before = layers[0].weight.clone()
    initialise(layers, "torch", 0.05)
    assert torch.equal(layers[0].weight, before)
    initialise(layers, name, 0.05)
    assert (layers[0].bias == 0).all()
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    assert (layers[0].weight.abs().max() <= math.sqrt(6 / 512)) == (name == "xavier")  # which is uniform


@pytest.mark.parametrize("name", ["torch", "normal", "xavier"])
def test_learned_positions_can_start_otherwise_than_all_other_weights(name: str) -> None:
    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = decoder(width=64, block_size=256, model={**group("model", "learned"), **changes})
        initialise(model, name, 0.05)
        return model.state_dict()

    usual, other = weights(), weights(init_std=0.3)
    (positions,) = (key for key in usual if not torch.equal(usual[key], other[key]))
    assert usual[positions].shape == (256, 64)
    assert other[positions].std().item() == pytest.approx(0.3, rel=0.02)
    assert other[positions].mean().item() == pytest.approx(0, abs=0.3 * 4 / 128)


@pytest.mark.parametrize(
    ("build", "changes", "sentence"),
    [
        (decoder, {"heads": 3}, "width must be a multiple of heads"),
        (classifier, {"model": group("model", "rnn_attention")}, "it needs task=translate"),
        (classifier, {"model": group("model", "rnn"), "pool": "cls"}, "architecture.pool=cls needs attention"),
        (decoder, {**groups("rnn", "window")}, "so pattern must be full"),
    ],
)
def test_what_a_network_cannot_have_is_an_error(build: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(**changes)
