"""Ensembles against the same models one by one, in double precision, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import MODELS, group
from test_encoder_decoder import translator
from test_models import decoder, groups, stack_arguments
from torch import nn

from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.ensemble import DropoutGenerators, stack_models, stacked_parameters

K, B, T, V = 3, 4, 10, 12
MIXED = [("alibi", "full"), ("rope", "window"), ("nope", "bigbird")]
BY_LAYER = [("alibi", "by_layer"), ("rope", "full"), ("nope", "strided")]
SAME = [[(model, "strided")] * K for model in MODELS]


def build(kind: str, **changes: Any) -> nn.Module:
    """Return a model with what is not the default: shared tables, other norms, no biases, a CLS token."""
    arguments = stack_arguments(**{"vocab_size": V, "dropout": 0.3, **changes})
    if kind == "lm":
        return Decoder(tied_output=True, **arguments).double()
    arguments |= {"norm": "post", "qkv_bias": False, "bias": False, "activation": "gelu", "scale_embedding": True}
    return EncoderClassifier(classes=3, classifier_width=5, pool="cls", **arguments).double()


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
    models = [build(kind, **groups(model, pattern)) for model, pattern in members]
    compare(models, [2, 0, 3] if kind == "classify" else [0] * K)
    assert [name for name, _ in models[0].named_parameters()] == list(stacked_parameters(models))


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "entmax", "softpick", "linear"])
@pytest.mark.parametrize("kind", ["lm", "classify"])
def test_mechanisms_without_parameters_of_their_own_are_stacked(kind: str, name: str) -> None:
    torch.manual_seed(0)
    options = {"qk_norm": True} | ({} if name == "linear" else {"kv_heads": 1, "output_gate": True, "softcap": 3.0})
    spec = {"attention": {"name": name, **options}, "norm_type": "rms"}
    compare([build(kind, **spec) for _ in range(K)], [2, 0, 3] if kind == "classify" else [0] * K)


def test_members_never_affect_each_other_and_evaluation_drops_nothing_out() -> None:
    """Oracle: each model alone; a member whose weights are NaN leaves the others as they were."""
    torch.manual_seed(0)
    models = [build("lm", model=group("model", "learned")).eval() for _ in range(K)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.fill_(float("nan"))
    ensemble = stack_models(models, DropoutGenerators([torch.Generator() for _ in range(K)]))
    ids = torch.randint(0, V, (K, B, T))
    outputs = ensemble(ids.flatten(0, 1)).unflatten(0, (K, B))
    outputs.square().sum().backward()
    for k, model in enumerate(models):
        torch.testing.assert_close(outputs[k], model(ids[k]), atol=1e-12, rtol=0, equal_nan=True)
        assert all(parameter.grad[k].isfinite().all() == (k != 1) for parameter in ensemble.parameters())


@pytest.mark.parametrize(
    ("model", "module"),
    [
        (translator("rnn"), "GRU"),
        (decoder(model=group("model", "by_layer")), "ByLayer"),
        (decoder(model=group("model", "randomised")), "Randomised"),
    ],
)
def test_a_model_that_cannot_be_stacked_is_an_error(model: nn.Module, module: str) -> None:
    with pytest.raises(ValueError, match=f"a {module} cannot be stacked"):
        stack_models([model, model], DropoutGenerators([torch.Generator() for _ in range(2)]))
