"""Ensembles against the same models one by one, in double precision, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import MODELS, compose, group
from torch import nn

from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.encoder_decoder import build_translator
from speechformer.models.ensemble import DropoutGenerators, stack_models, stacked_parameters

K, B, T, V = 3, 4, 10, 12
SIZES = {"vocab_size": V, "width": 8, "heads": 2, "layers": 2, "ff": 12, "dropout": 0.3}
MIXED = [("alibi", "full"), ("rope", "window"), ("nope", "bigbird")]
BY_LAYER = [("alibi", "by_layer"), ("rope", "full"), ("nope", "strided")]
SAME = [[(model, pattern)] * K for model in MODELS for pattern in ("full", "strided")]


def build(kind: str, model: str | dict[str, Any], pattern: str, **own: Any) -> nn.Module:
    architecture = compose()["architecture"]
    plain = {
        key: architecture[key] for key in ("norm", "final_norm", "qkv_bias", "bias", "activation", "scale_embedding")
    }
    positions = group("model", model) if isinstance(model, str) else model
    arguments = {**SIZES, **plain, "model": positions, "pattern": group("pattern", pattern), **own}
    if kind == "lm":
        return Decoder(block_size=T, **{"tied_output": False, **arguments}).double()
    return EncoderClassifier(block_size=T, classes=3, classifier_width=5, **{"pool": "mean", **arguments}).double()


def compare(models: list[nn.Module], padding: list[int]) -> None:
    """Compare the ensemble's outputs and gradients with those of each model alone, under each model's own dropout."""
    ids = torch.randint(1, V, (K, B, T))
    for k, more in enumerate(padding):
        ids[k, :, T - more :] = 0
    generators = DropoutGenerators([torch.Generator().manual_seed(k) for k in range(K)])
    generators.padding = padding
    ensemble = stack_models(models, generators)
    outputs = ensemble(ids.flatten(0, 1)).chunk(K)
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    for k, model in enumerate(models):
        torch.manual_seed(k)
        alone = model(ids[k, :, : T - padding[k]])
        alone.square().mean().backward()
        torch.testing.assert_close(outputs[k], alone, atol=1e-12, rtol=1e-12)
    for (name, _), stacked in zip(models[0].named_parameters(), ensemble.parameters()):
        alone = torch.stack([model.get_parameter(name).grad for model in models])
        torch.testing.assert_close(stacked.grad, alone, atol=1e-12, rtol=1e-12, msg=name)


@pytest.mark.parametrize(
    "members", [MIXED, BY_LAYER, *SAME], ids=lambda members: "_".join(map("-".join, dict.fromkeys(members)))
)
@pytest.mark.parametrize("kind", ["lm", "classify"])
def test_an_ensemble_is_its_members_one_by_one(kind: str, members: list[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    models = [build(kind, model, pattern) for model, pattern in members]
    compare(models, [2, 0, 3] if kind == "classify" else [0] * K)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("lm", {"tied_output": True}),
        ("lm", {"model": {"name": "alibi", "slopes": "learned", "scale": 1.0}}),
        ("lm", {"norm": "post", "final_norm": False, "qkv_bias": False, "bias": False}),
        ("classify", {"pool": "cls"}),
        ("classify", {"pool": "cls", "model": {"name": "relative", "buckets": 8, "max_distance": 16}}),
        ("classify", {"activation": "gelu", "scale_embedding": True}),
    ],
    ids=str,
)
def test_an_ensemble_of_other_settings_is_its_members_one_by_one(kind: str, own: dict[str, Any]) -> None:
    torch.manual_seed(0)
    compare(
        [build(kind, **{"model": "sinusoidal", "pattern": "full", **own}) for _ in range(K)],
        [1, 0, 4] if kind == "classify" else [0] * K,
    )


def test_members_never_affect_each_other() -> None:
    """Oracle: a member whose weights are NaN leaves the others' outputs and gradients as they were, to the bit."""
    torch.manual_seed(0)
    models = [build("lm", "learned", "full") for _ in range(K)]
    ids, results = torch.randint(0, V, (K * B, T)), []
    for broken in (False, True):
        ensemble = stack_models(models, DropoutGenerators([torch.Generator().manual_seed(k) for k in range(K)]))
        if broken:
            with torch.no_grad():
                for parameter in ensemble.parameters():
                    parameter[1] = float("nan")
        outputs = ensemble(ids)
        outputs.square().sum().backward()
        results.append([outputs.chunk(K), [parameter.grad for parameter in ensemble.parameters()]])
    for k in (0, 2):
        assert torch.equal(results[0][0][k], results[1][0][k])
        assert all(torch.equal(a[k], b[k]) for a, b in zip(results[0][1], results[1][1]))
    assert results[1][0][1].isnan().all()


def test_evaluation_drops_nothing_out() -> None:
    torch.manual_seed(0)
    models = [build("lm", "rope", "full").eval() for _ in range(K)]
    ensemble = stack_models(models, DropoutGenerators([torch.Generator() for _ in range(K)]))
    ids = torch.randint(0, V, (K, B, T))
    with torch.no_grad():
        results = ensemble(ids.flatten(0, 1)).unflatten(0, (K, B))
        torch.testing.assert_close(
            results, torch.stack([model(rows) for model, rows in zip(models, ids)]), atol=1e-12, rtol=0
        )


def test_a_shared_parameter_is_stacked_once() -> None:
    models = [build("lm", "nope", "full", tied_output=True) for _ in range(K)]
    ensemble = stack_models(models, DropoutGenerators([torch.Generator() for _ in range(K)]))
    assert ensemble.output.weight is ensemble.decoder.embedding.weight
    assert [name for name, _ in models[0].named_parameters()] == list(stacked_parameters(models))


def test_a_model_that_cannot_be_stacked_is_an_error() -> None:
    architecture = {
        key: value for key, value in compose()["architecture"].items() if key not in ("pool", "classifier_width")
    }
    arguments = {**SIZES, **architecture, "block_size": T, "pattern": group("pattern", "full")}
    models = [build_translator(model=group("model", "rnn"), **arguments) for _ in range(2)]
    with pytest.raises(ValueError, match="a GRU cannot be stacked"):
        stack_models(models, DropoutGenerators([torch.Generator() for _ in range(2)]))
    for model, kind in (("by_layer", "ByLayer"), ("randomised", "Randomised")):
        models = [build("lm", model, "full") for _ in range(2)]
        with pytest.raises(ValueError, match=f"a {kind} cannot be stacked"):
            stack_models(models, DropoutGenerators([torch.Generator() for _ in range(2)]))
