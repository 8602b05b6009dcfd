"""What stands in TensorBoard after a run. Oracles: norms from the weights themselves, the maps' entropies."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose, run_in
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from speechformer.analysis.attention_maps import maps_of
from speechformer.analysis.load import load
from speechformer.config import as_plain
from speechformer.corpora.load import load as load_corpus
from speechformer.runs.folder import read_result
from speechformer.tasks.registry import build_data
from speechformer.training.run import execute
from speechformer.training.tensorboard import TensorBoardCallback

OWN = ["corpus=speeches", "corpus.classes=[ann,bob,cy]", "model=alibi", "layers=2", "trainer.log_every_n_steps=2"]


def events_of(run: Path) -> Any:
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0}).Reload()


@pytest.fixture(scope="module")
def run(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = [*OWN, f"corpus.root={little}", "trainer.max_epochs=5"]
    return run_in(tmp_path_factory.mktemp("shown"), *own)


def test_norms_and_speakers_are_logged(run: Path) -> None:
    events = events_of(run)
    tags = events.Tags()["scalars"]
    assert {f"training/{name}" for name in ("train_loss", "lr", "gradient_norm", "weight_norm")} <= set(tags)
    assert {"metrics/test_accuracy", "metrics/test_accuracy_of_bob"} <= set(tags)
    assert min(tags).startswith("metrics/")  # what TensorBoard opens on
    steps = read_result(run)["steps"]
    assert [event.step for event in events.Scalars("training/gradient_norm")] == list(range(2, steps + 1, 2))
    norm = torch.cat([p.detach().flatten() for p in load(run).task.parameters()]).norm().item()
    assert events.Scalars("training/weight_norm")[-1].value == pytest.approx(norm, rel=1e-5)


def test_accuracies_by_speaker_make_up_the_accuracy(run: Path, little: Path) -> None:
    metrics = read_result(run)["metrics"]
    labels = [line.split("\t")[0] for line in (little / "test_CLS.tsv").read_text(encoding="utf-8").splitlines()]
    mean = sum(metrics[f"test_accuracy_of_{['ann', 'bob', 'cy'][int(label)]}"] for label in labels) / len(labels)
    assert metrics["test_accuracy"] == pytest.approx(mean, abs=1e-6)


def test_the_entropy_of_each_head_is_that_of_the_maps(run: Path, little: Path) -> None:
    config = as_plain(compose(*TINY, *OWN, f"corpus.root={little}"))
    examples = build_data(config, load_corpus(config)).examples()
    assert len(examples) == 3 and {example.label for example in examples} == {0, 1, 2}
    model = load(run).task.cpu().model
    maps = [maps_of(model, example.ids, example.tokens)[0] for example in examples]
    entropies = torch.stack([attention_map.entropy() for attention_map in maps]).mean(0)
    events = events_of(run)
    for layer in (1, 2):
        for head in (1, 2):
            logged = events.Scalars(f"training_attention_entropy/layer{layer}_head{head}")
            assert len(logged) == 5  # one for each evaluation
            assert logged[-1].value == pytest.approx(entropies[layer - 1, head - 1].item(), rel=1e-4)


def test_maps_and_texts_come_with_the_first_few_evaluations_and_the_last(run: Path) -> None:
    events = events_of(run)
    evaluated = [int(point["step"]) for point in read_result(run)["curve"]]
    expected = [evaluated[k - 1] for k in (1, 2, 4, 5)]
    pictures = events.Images("training_attention_maps/encoder")
    assert [picture.step for picture in pictures] == expected
    assert min(Image.open(io.BytesIO(pictures[0].encoded_image_string)).size) > 100
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("who said it")]
    assert [event.step for event in events.Tensors(tag)] == expected
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("| sentence | said by | ann | bob | cy |") and text.count("%") == 9


def test_the_layout_names_charts_that_there_are(run: Path, a_language_model: Path, a_translator: Path) -> None:
    """Every chart of a run has a figure, by the match that TensorBoard makes."""
    for folder in (run, a_language_model, a_translator):
        events = events_of(folder)
        content = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
        categories = {category.title: category for category in layout_pb2.Layout.FromString(content).category}
        assert set(categories) == {"Metrics", "Training", "Attention"}
        for category in categories.values():
            for chart in category.chart:
                matched = [tag for tag in events.Tags()["scalars"] for p in chart.multiline.tag if re.match(p, tag)]
                assert matched or "leaked" in chart.title, chart.title  # the sample repeats nothing


def test_a_language_model_goes_on_and_has_a_map(a_language_model: Path) -> None:
    events = events_of(a_language_model)
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("what comes next")]
    assert "**" in events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert events.Images("training_attention_maps/decoder")


def test_a_translator_has_three_maps(a_translator: Path) -> None:
    tags = events_of(a_translator).Tags()
    assert {f"training_attention_maps/{name}" for name in ("encoder", "decoder", "cross")} <= set(tags["images"])
    assert any(tag.startswith("training_attention_entropy_cross/") for tag in tags["scalars"])


def test_training_is_the_same_with_it_and_without(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    for hook in ("on_fit_start", "on_before_optimizer_step", "on_validation_end", "on_train_end"):
        monkeypatch.delattr(TensorBoardCallback, hook)
    execute(compose(*TINY, *OWN, f"corpus.root={little}", "trainer.max_epochs=5"), tmp_path)
    with_it, without = (
        torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in (run, tmp_path)
    )
    assert all(torch.equal(with_it[name], without[name]) for name in with_it)
    assert not any("entropy" in tag for tag in events_of(tmp_path).Tags()["scalars"])


def test_a_run_that_goes_on_has_all_its_pictures(little: Path, run: Path, tmp_path: Path) -> None:
    """What an interrupted run has shown is written again: TensorBoard's files begin anew."""
    folder = tmp_path / "run"
    own = [*OWN, f"corpus.root={little}"]
    half = compose(*TINY, *own, "trainer.max_epochs=5")
    whole = read_result(run)
    execute(half, folder)
    shutil.rmtree(folder / "tensorboard")
    (folder / "result.json").unlink()
    execute(half, folder)
    before, after = events_of(run), events_of(folder)
    assert whole["metrics"] == read_result(folder)["metrics"]
    assert [p.step for p in after.Images("training_attention_maps/encoder")] == [
        p.step for p in before.Images("training_attention_maps/encoder")
    ]


def test_the_norm_of_the_gradient_is_that_before_it_is_clipped(little: Path, tmp_path: Path) -> None:
    """Oracle: a step of plain gradient descent moves the weights by lr times the gradient."""
    own = [*OWN, f"corpus.root={little}", "recipe.optimizer=sgd", "recipe.lr=0.5", "dropout=0"]
    own.append("trainer.log_every_n_steps=1")
    weights = []
    for steps in (1, 2):
        execute(compose(*TINY, *own, f"trainer.max_steps={steps}"), tmp_path / str(steps))
        state = torch.load(tmp_path / str(steps) / "last.ckpt", weights_only=True)["state_dict"]
        weights.append(torch.cat([value.flatten() for value in state.values()]))
    moved = ((weights[1] - weights[0]).norm() / 0.5).item()
    assert events_of(tmp_path / "2").Scalars("training/gradient_norm")[1].value == pytest.approx(moved, rel=1e-4)
    execute(compose(*TINY, *own, "trainer.max_steps=1", "trainer.gradient_clip_val=1e-3"), tmp_path / "clipped")
    first, clipped = (
        events_of(tmp_path / name).Scalars("training/gradient_norm")[0].value for name in ("2", "clipped")
    )
    assert clipped == pytest.approx(first) and first > 1e-2
