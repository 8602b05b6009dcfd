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


every_model_and_pattern = pytest.mark.parametrize(
    ("model", "pattern"), [(model, pattern) for model in MODELS for pattern in PATTERNS]
)


def with_constant_gates(model: Any) -> Any:
    """Make gates the same at every token: by its gate, a token changes the scores of pairs on both sides of it."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.zeros_(parameter)
    return model


@every_model_and_pattern
def test_a_key_outside_the_pattern_changes_nothing_in_one_layer_of_a_decoder(model: str, pattern: str) -> None:
    model = with_constant_gates(decoder(model=group("model", model), pattern=group("pattern", pattern), layers=1))
    mask = attention_mask(build_pattern(group("pattern", pattern)), T, T, causal=True)[0, 0]
    ids = sentences(1)
    before = model(ids)[0]
    for j in range(T):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] - 2 + 7) % (VOCABULARY - 2) + 2
        after = model(changed)[0]
        same = torch.tensor([torch.equal(a, b) for a, b in zip(before, after)])
        assert torch.equal(same, ~mask[:, j]), j  # equal where the mask hides j, different where it does not


@every_model_and_pattern
def test_the_future_changes_nothing_in_a_decoder(model: str, pattern: str) -> None:
    model = decoder(model=group("model", model), pattern=group("pattern", pattern))
    ids = sentences()
    changed = ids.clone()
    changed[:, 12:] = ids[:, 12:].flip(1)
    assert torch.equal(model(ids)[:, :12], model(changed)[:, :12])
    assert not torch.equal(model(ids)[:, 12:], model(changed)[:, 12:])


@every_model_and_pattern
def test_a_key_outside_the_pattern_changes_nothing_in_one_layer_of_an_encoder(model: str, pattern: str) -> None:
    model = with_constant_gates(classifier(model=group("model", model), pattern=group("pattern", pattern), layers=1))
    mask = attention_mask(build_pattern(group("pattern", pattern)), T, T, causal=False)[0, 0]
    ids = sentences(1)
    before = model.encoder(ids, ids != 0)[0][0]
    for j in range(0, T, 3):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] - 2 + 7) % (VOCABULARY - 2) + 2
        after = model.encoder(changed, ids != 0)[0][0]
        same = torch.tensor([torch.equal(a, b) for a, b in zip(before, after)])
        assert torch.equal(same, ~mask[:, j]), j


@every_model_and_pattern
def test_a_decoder_may_leave_out_padding(model: str, pattern: str) -> None:
    """Oracle: the pass that reads the padding, too; in training, when the tokens alone pass through the blocks."""
    model = decoder(model=group("model", model), pattern=group("pattern", pattern)).double().train()
    ids = sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    torch.manual_seed(0)  # of randomised positions
    expected = model.hidden(ids)
    torch.manual_seed(0)
    torch.testing.assert_close(model.hidden(ids, token_mask_BT=ids != 0)[ids != 0], expected[ids != 0])


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "relative", "kerple", "forgetting"])
@pytest.mark.parametrize(
    ("length", "pattern"),
    [(24, {"name": "full"}), (600, {"name": "window", "window": 9}), (2050, {"name": "full"})],
    ids=["dense", "sparse blocks", "query blocks"],
)
def test_attention_within_documents_is_that_of_each_alone(name: str, length: int, pattern: dict[str, Any]) -> None:
    """Oracle: the hidden states of each document by itself, which depend on distances alone."""
    model = decoder(model=group("model", name), pattern=pattern, layers=1, dropout=0.0).double()
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, VOCABULARY, (2, length), generator=generator)
    numbers = torch.sort(torch.randint(1, 5, (2, length), generator=generator), dim=1).values
    for training in (False, True):
        model.train(training)
        hidden = model.hidden(ids, documents_BT=numbers)
        for row in range(2):
            for number in numbers[row].unique():
                own = numbers[row] == number
                alone = model.hidden(ids[row : row + 1, own])[0]
                torch.testing.assert_close(hidden[row, own], alone)


def test_a_recurrent_network_reads_documents_one_after_another() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"model=rnn reads one document after another; set task\.documents=joined"):
        decoder(model=group("model", "rnn")).hidden(ids, documents_BT=ids)


@pytest.mark.parametrize(("name", "training"), [("rnn", True), ("rope", False), ("rope", True)])
def test_a_decoder_masks_padding_only_where_it_is_left_out(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent network would be slower, and other kernels would not be taken."""
    model = decoder(model=group("model", name)).train(training)
    masks, ids = [], sentences()
    whole = model.decoder.forward
    monkeypatch.setattr(
        model.decoder, "forward", lambda ids, mask, **own: masks.append(mask) or whole(ids, mask, **own)
    )
    model.hidden(ids, token_mask_BT=ids != 0)
    assert (masks[0] is not None) == (name == "rope" and training)


@every_model_and_pattern
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_padding_changes_nothing_in_an_encoder(model: str, pattern: str, pool: str) -> None:
    """By exact comparison: what stands in a padded place is never used. By tolerance: more padding, for the sums
    over a longer row may be added up in another order."""
    model = classifier(model=group("model", model), pattern=group("pattern", pattern), pool=pool)
    ids = sentences()
    ids[1, 9:], ids[2, 1:] = 0, 0
    logits = model(ids)
    assert torch.isfinite(logits).all()
    with torch.no_grad():
        model.encoder.embedding.weight[0] += 1
    assert torch.equal(model(ids), logits)
    torch.testing.assert_close(model(ids[1:2, :9]), logits[1:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(ids[2:3, :1]), logits[2:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_word_reaches_the_cls_token_whatever_the_pattern(pattern: str) -> None:
    model = classifier(pattern=group("pattern", pattern), pool="cls", layers=1)
    ids = sentences(1)
    for j in range(T):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] - 2 + 7) % (VOCABULARY - 2) + 2
        assert not torch.equal(model(changed), model(ids)), j


@pytest.mark.parametrize("model", MODELS)
def test_an_encoder_without_positions_alone_is_permutation_equivariant(model: str) -> None:
    classify = classifier(model=group("model", model))
    ids = sentences()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
    hidden, permuted = classify.encoder(ids)[0], classify.encoder(ids[:, order])[0]
    assert torch.allclose(permuted, hidden[:, order], atol=1e-5) == (model == "nope")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [classifier, decoder])
def test_a_window_as_long_as_the_block_is_full(model: str, make: Any) -> None:
    arguments = {"model": group("model", model)}
    wide = make(**arguments, pattern={"name": "window", "window": T})
    assert torch.equal(wide(sentences()), make(**arguments)(sentences()))


@every_model_and_pattern
def test_weights_of_every_layer_are_returned_and_sum_to_one(model: str, pattern: str) -> None:
    arguments = {"model": group("model", model), "pattern": group("pattern", pattern)}
    ids = sentences()
    ids[1, 9:] = 0
    encoder_weights = classifier(**arguments).attention(ids)["encoder"]
    decoder_weights = decoder(**arguments).attention(ids)["decoder"]
    for weights, causal in ((encoder_weights, False), (decoder_weights, True)):
        assert len(weights) == 2
        mask = attention_mask(build_pattern(arguments["pattern"]), T, T, causal, ids != 0 if not causal else None)
        for layer in weights:
            torch.testing.assert_close(layer.sum(dim=-1), torch.ones(3, 2, T))
            assert (layer[~mask.expand_as(layer)] == 0).all()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_is_its_formula(norm: str) -> None:
    """Oracle: Vaswani et al. 2017, section 3.1, and Xiong et al. 2020, written with the block's own parts."""
    model = decoder(norm=norm, final_norm=False, layers=1)
    block = model.decoder.blocks[0]
    x = torch.randn(2, T, 16)
    bias = torch.where(torch.ones(T, T).tril().bool(), 0.0, -math.inf)

    def attended(y: torch.Tensor) -> torch.Tensor:
        q, k, v = block.attention.qkv(y).view(2, T, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT / math.sqrt(8) + bias, dim=-1)
        return block.attention.output((weights @ v).transpose(1, 2).reshape(2, T, 16))

    def fed(y: torch.Tensor) -> torch.Tensor:
        first, _, second = block.feed_forward
        return second(torch.relu(first(y)))

    if norm == "post":
        y = block.attention_norm(x + attended(x))
        expected = block.feed_forward_norm(y + fed(y))
    else:
        y = x + attended(block.attention_norm(x))
        expected = y + fed(block.feed_forward_norm(y))
    torch.testing.assert_close(block(x, model.decoder.positions, bias)[0], expected)


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
    layer = nn.Sequential(nn.Linear(256, 256), nn.Embedding(256, 256))
    initialise(layer, name, 0.05)
    assert (layer[0].bias == 0).all()
    for part in layer:
        assert part.weight.std().item() == pytest.approx(std, rel=0.02)
        assert part.weight.mean().item() == pytest.approx(0, abs=5 * std / 256)
    if name == "xavier":  # uniform: nothing beyond sqrt(6 / (in + out))
        assert layer[0].weight.abs().max() <= math.sqrt(6 / 512)


def test_torch_initialisation_leaves_torchs_own() -> None:
    layer = nn.Linear(8, 8)
    before = layer.weight.clone()
    initialise(layer, "torch", 0.05)
    assert torch.equal(layer.weight, before)


def test_errors() -> None:
    with pytest.raises(UserError, match="width must be a multiple of heads"):
        decoder(heads=3)
    with pytest.raises(UserError, match=r"architecture\.norm has no choice 'prey'.*pre, post"):
        decoder(norm="prey")
    with pytest.raises(UserError, match=r"architecture\.activation"):
        decoder(activation="tanh")
    with pytest.raises(UserError, match=r"architecture\.pool"):
        classifier(pool="max")
    with pytest.raises(UserError, match=r"recipe\.init"):
        initialise(decoder(), "kaiming", 0.1)
